"""Figures of the traces: drawn from their tables, with what their tables say."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvcache.paper.experiments import survey
from kvcache.paper.experiments.survey import SHORT, drift_table, prefix_tables, survival_table, traces_table
from kvcache.paper.plots import data as figures


def texts(figure) -> list[str]:
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_every_trace_is_in_one_panel():
    grouped = [name for names in figures.TRACE_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(traces_table()["trace"]) == sorted(SHORT)


def test_tails():
    bounds = figures.bounds_table(traces_table(), traces_table("input"))
    survival = survival_table(bounds["trace"].unique(), points=20)
    figure = figures.fig_tails(survival, bounds)
    assert set(texts(figure)) == set(SHORT.values())
    curves = [line for ax in figure.axes for line in ax.lines if len(line.get_xdata()) > 1]
    assert len(curves) == 24
    first = survival[(survival["trace"] == "burstgpt") & (survival["field"] == "output")]
    np.testing.assert_array_equal(curves[0].get_ydata(), first["survival"])


def test_drift_of_a_week():
    days = drift_table("burstgpt-week1")
    figure = figures.fig_drift_days(days)
    left, right = figure.axes
    np.testing.assert_array_equal(left.lines[0].get_ydata(), days["p99"])
    heights = [bar.get_height() for bar in right.patches]
    np.testing.assert_array_equal(heights, days["w1_over_mean"])
    assert "ε = 0.15 mean" in texts(figure)


def test_drift_of_a_fortnight():
    models = ["servegen-m-small", "servegen-m-mid", "servegen-m-large"]
    windows = pd.concat([drift_table(name, "window", 4) for name in models])
    figure = figures.fig_drift_fortnight(windows)
    np.testing.assert_array_equal(
        figure.axes[5].lines[0].get_ydata(), windows[windows["trace"] == models[2]]["w1_over_mean"]
    )
    assert {"P99", "mean", "ε = 0.15 mean"} <= set(texts(figure))


def test_prefixes():
    windows, caches = prefix_tables("mooncake-conversation")
    leading = survival_table(["mooncake-conversation"], ["prefix"], points=50)
    figure = figures.fig_prefix(windows, caches, leading)
    np.testing.assert_allclose(
        [bar.get_height() for bar in figure.axes[0].patches], 100 * windows["shared_share"]
    )
    limit = survey.load_prefix_stats("mooncake-conversation").shared_share
    assert figure._suptitle.get_text().startswith(f"{100 * limit:.0f} % of")
