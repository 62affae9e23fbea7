"""Figures of a plan draw what their tables hold, and the sliders redraw the plan."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvcache import plan
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.paper.experiments import planning
from kvcache.paper.plots import planning as figures
from kvcache.paper.plots.widgets import PlanPanel


@pytest.fixture(scope="module")
def made():
    requests = planning.bundled_requests(20.0, count=900)
    model, gpu = Model("small", 16, 16, 8, 64, 1e9), GPU("card", 24e9, 1e14, 1e12)
    return plan(requests, model, gpu, 2, rate=20.0, tpot=0.03, parallel=[ParallelConfig(1)], split=False)


def test_the_bundled_requests_have_the_lengths_and_the_rate_asked_for():
    table = planning.bundled_requests(20.0, count=6000)
    assert len(table) / table["arrival_s"].iloc[-1] == pytest.approx(20.0, rel=0.05)
    assert table["class"].value_counts(normalize=True)["code"] == pytest.approx(1 / 3, abs=1e-3)
    code = table[table["class"] == "code"]
    law = planning.load_joint("azure-2023-code")
    assert code["output_tokens"].mean() == pytest.approx(law.mean_output, rel=0.1)
    pd.testing.assert_frame_equal(table, planning.bundled_requests(20.0, count=6000))


def test_outcomes_span_the_replays_and_name_what_was_predicted(made):
    table = planning.outcomes(made, [0, 1]).set_index("figure")
    runs = made.replays([0, 1])
    assert table.loc["goodput", "least"] == runs["goodput"].min()
    assert table.loc["tpot_mean", "predicted"] == made.predicted["tpot"]
    assert np.isnan(table.loc["ttft_p95", "predicted"])


def test_bars_lines_and_notes_show_the_tables(made):
    table = planning.limits(made)
    assert table["use"].max() == pytest.approx(made.groups["use"].max())
    figure = figures.fig_limits(table)
    assert sorted(bar.get_width() for bar in figure.axes[0].patches[: len(table)]) == sorted(table["use"])

    replayed = made.replayed.rename_axis("case").reset_index()
    bars = figures.fig_replays(replayed, 5.0, 0.03).axes[0].patches
    assert [bar.get_width() for bar in bars] == replayed["goodput"].tolist()

    grown = planning.growth(made, [1, 2], [0.02, 0.03])
    lines = figures.fig_growth(grown, 2, 0.03, 20.0).axes[0].lines
    assert lines[0].get_ydata().tolist() == grown[grown["tpot"] == 0.02]["served_per_s"].tolist()

    changed = planning.what_ifs(made, [1.0, 2.0], [1.0, 2.0])
    assert changed["rejected"].iloc[1] > changed["rejected"].iloc[0]
    assert len(figures.fig_what_ifs(changed).axes) == 2


def test_the_sliders_redraw_and_a_refusal_is_a_picture(made):
    panel = PlanPanel(made)
    before = bytes(panel._image.value)
    panel._gpus.value = 1
    assert bytes(panel._image.value) != before
    assert panel.plan().predicted["gpus"] == 1
    panel._tpot.value = 5
    assert bytes(panel._image.value).startswith(b"\x89PNG")
