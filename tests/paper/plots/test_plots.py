"""Figures: the same bytes on every run, labels that do not overlap."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.paper import plots
from kvcache.paper.results import read_table


def draw():
    with plots.style():
        figure, axes = plots.canvas(1, 2, height=2.5)
        axes[0, 0].plot([1, 10, 100], [1, 3, 2])
        plots.plain_log(axes[0, 0], "x", (1, 10, 100))
        plots.label_ends(axes[0, 0], [(2.0, "two", "#000000"), (2.01, "three", "#000000")])
        plots.title(figure, "What it shows", "how to read it")
    return figure


def test_a_figure_is_saved_with_its_data_and_always_the_same_bytes(tmp_path, monkeypatch):
    found = []
    for run in ("one", "two"):
        monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path / run))
        image = plots.save(draw(), "fig9z", "quick", pd.DataFrame({"x": [1, 2], "y": [0.5, 1.5]}))
        folder = tmp_path / run / "figures"
        png, svg = (folder / f"fig9z.{kind}" for kind in ("png", "svg"))
        assert image.data == png.read_bytes()
        assert read_table("fig9z.csv", "quick")["y"].tolist() == [0.5, 1.5]
        found.append((png.read_bytes(), svg.read_bytes()))
    assert found[0] == found[1]
    text = found[0][1].decode()
    assert "dc:date" not in text
    assert "Matplotlib" not in text


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0.01, 0.3))
def test_labels_keep_their_distance_and_their_order(at, gap):
    at = sorted(at)
    placed = plots._apart(at, gap)
    assert np.all(np.diff(placed) >= gap * (1 - 1e-9))
    if len(at) == 1 or np.diff(at).min() >= gap:
        assert placed == pytest.approx(at)
    assert placed.mean() == pytest.approx(np.mean(at), abs=1e-9)


def test_end_labels_stand_beside_their_lines():
    with plots.style():
        figure, axes = plots.canvas(height=3)
        ax = axes[0, 0]
        ax.set_ylim(0, 10)
        plots.label_ends(ax, [(9.0, "high", "#000000"), (1.0, "low", "#000000"), (99.0, "out", "#000000")])
    places = {text.get_text(): text.get_position()[1] for text in ax.texts}
    assert places["low"] == pytest.approx(0.1)
    assert 0.85 < places["high"] < places["out"]
    assert figure.axes == [ax]


def test_logarithmic_axes_write_plain_numbers():
    with plots.style():
        _, axes = plots.canvas()
        plots.plain_log(axes[0, 0], "y", (1, 2000))
    assert [axes[0, 0].yaxis.get_major_formatter()(value, 0) for value in (0.5, 1, 2000)] == [
        "0.5",
        "1",
        "2,000",
    ]


def test_every_policy_has_a_colour_of_its_own():
    assert len(set(plots.COLORS.values())) == len(plots.COLORS)
    assert plots.color_of("DRO") == plots.COLORS["DRO"]
    assert plots.color_of("another", 1) == plots.CYCLE[1]
