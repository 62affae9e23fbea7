"""The figures of drift show the numbers of their tables."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from kvcache.paper.experiments.drift import DEFAULT, GRID
from kvcache.paper.plots import shown
from kvcache.paper.plots.rolling import figure_5a, figure_5b, real_drift, robust_regions, surprises


def texts(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def drawn(ax) -> list[list[float]]:
    return [list(line.get_ydata()) for line in ax.lines]


def test_figure_5a_draws_every_policy_and_names_its_gpus():
    single = pd.DataFrame(
        [
            ("azure", 10.0, t, 1 - 0.2 * t, policy, 100.0 + i - t, 0.5 - 0.01 * i)
            for i, policy in enumerate(("static", "rolling SAA", "rolling DRO", DEFAULT))
            for t in (1, 2, 3)
        ],
        columns=["digest", "rho", "window", "scale", "policy", "reservation", "used"],
    )
    joint = pd.DataFrame(
        [
            (t, policy, 0.4, 4 + 4 * (policy == "static DRO"))
            for policy in ("static DRO", "rolling SAA", "rolling DRO")
            for t in (1, 2)
        ],
        columns=["window", "policy", "used", "gpus"],
    )
    figure = figure_5a(single, joint)
    left, middle, right = figure.axes
    assert drawn(left) == [[99.0 + i, 98.0 + i, 97.0 + i] for i in range(4)]
    assert drawn(middle)[3] == pytest.approx([47.0] * 3)
    assert len(drawn(right)) == 3
    assert {"static", DEFAULT, "static DRO, 8 GPUs", "rolling DRO, 4 GPUs"} <= set(texts(figure))
    assert shown(figure).data.startswith(b"\x89PNG")


@pytest.fixture
def advantages() -> pd.DataFrame:
    rows = [
        ("burst", label, radius, rho, shift, baseline, round(0.01 * rho * shift - 1.5 * (shift < 1), 3))
        for (label, radius), rho, shift, baseline in itertools.product(
            (("W1", 0.15), ("W1", 0.5), ("W-infinity", 0.15), ("scale shift", 2.5)),
            (2.0, 10.0),
            (0.5, 1.0, 2.0),
            ("SAA", "P90"),
        )
    ]
    return pd.DataFrame(rows, columns=["digest", "set", "radius", "rho", "shift", "baseline", "advantage"])


def test_figure_5b_writes_the_advantage_in_percent(advantages):
    figure = figure_5b(advantages)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["burst: against SAA", "burst: against P90"]
    assert [t.get_text() for t in figure.axes[0].texts] == ["-149", "2", "4", "-145", "10", "20"]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["2", "10"]


def test_robust_regions_have_one_map_per_set_and_radius(advantages):
    figure = robust_regions(advantages, "burst")
    titles = [ax.get_title(loc="left") for ax in figure.axes if ax.axison]
    assert titles == [
        "$W_1$, 0.15 × mean",
        "$W_1$, 0.5 × mean",
        "$W_\\infty$, 0.15 × mean",
        "scale shift, 1 to 2.5",
    ]


def test_real_drift_clips_what_is_off_the_scale_and_says_so():
    names = (
        "static",
        "rolling SAA, last day",
        "rolling DRO, W1 0.15 mean",
        "rolling SAA, last window",
        DEFAULT,
        GRID,
        "oracle: best within the forecasts",
    )
    table = pd.DataFrame(
        [
            (trace, "days 6-14", name, rho, 2.5 if name == "static" else 1.0 + 0.01 * i)
            for trace in ("m-large", "m-mid")
            for i, name in enumerate(names)
            for rho in (2.0, 10.0)
        ],
        columns=["trace", "period", "policy", "rho", "ratio"],
    )
    figure = real_drift(table, "days 6-14")
    ax = figure.axes[0]
    assert max(drawn(ax)[0]) < 1.4
    assert ax.get_title(loc="right") == "static: up to 2.50"
    lines = {line.get_label(): line.get_ydata() for line in ax.lines}
    assert lines[DEFAULT] == pytest.approx([1.04, 1.04])
    assert lines[GRID] == pytest.approx([1.05, 1.05])


def test_surprises_put_the_excess_on_its_day():
    windows = np.arange(4, 12)
    frames = [
        pd.DataFrame(
            {"trace": "m-large", "rho": 50.0, "policy": policy, "window": windows, "reservation": 400.0 + i}
        )
        for i, policy in enumerate(("hindsight optimum", "rolling SAA, last window", DEFAULT))
    ]
    days = pd.DataFrame(
        [
            ("m-large", policy, 50.0, day, 1.0 * day)
            for policy in ("rolling SAA, last window", DEFAULT)
            for day in (2, 3)
        ]
        + [("m-mid", DEFAULT, 50.0, 2, 99.0)],
        columns=["trace", "policy", "rho", "day", "excess"],
    )
    figure = surprises(pd.concat(frames, ignore_index=True), days)
    top, bottom = figure.axes
    assert [values[0] for values in drawn(top)] == [400.0, 401.0, 402.0]
    assert sorted(bar.get_height() for bar in bottom.patches) == [2.0, 2.0, 3.0, 3.0]
    middles = {round(bar.get_x() + bar.get_width() / 2, 6) for bar in bottom.patches}
    assert middles == {2.3, 2.7, 3.3, 3.7}
