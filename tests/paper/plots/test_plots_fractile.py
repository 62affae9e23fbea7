"""Figures of the single-class study show the numbers of their tables."""

import numpy as np
import pandas as pd
import pytest

from kvcache import LengthDistribution, ScaleShift
from kvcache.paper.experiments import fractile
from kvcache.paper.plots import fractile as figures


@pytest.fixture(scope="module")
def traces():
    rng = np.random.default_rng(0)
    lengths = rng.geometric(0.01, 400)
    return {
        "burstgpt": LengthDistribution.from_samples(lengths, 10_000, name="burstgpt"),
        "tight": LengthDistribution.from_samples(np.minimum(lengths, 300), 300, name="tight"),
    }


@pytest.fixture(scope="module")
def costs(traces):
    return fractile.costs_by_ratio(traces, np.geomspace(1, 200, 12))


def drawn(ax, y):
    """Whether some line of the axes has these ordinates."""
    return any(len(line.get_ydata()) == len(y) and np.allclose(line.get_ydata(), y) for line in ax.lines)


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_fig2a(traces, costs):
    figure = figures.fig2a(costs, fractile.table2(traces), "burstgpt")
    left, right = figure.axes
    rows = costs[costs["trace"] == "burstgpt"].set_index("policy")
    for policy in figures.POLICIES:
        assert drawn(left, rows.loc[policy, "cost"])
        assert drawn(right, rows.loc[policy, "excess_pct"])
        assert policy in texts(figure)
    assert drawn(left, [184, 360, 587, 931, 1575, 1919])


def test_fig2a_traces_shades_where_dro_has_jumped(costs):
    figure = figures.fig2a_traces(costs)
    shaded = {ax.get_title("left"): len(ax.patches) for ax in figure.axes if ax.get_visible()}
    jumped = (
        costs[costs["policy"] == "DRO"].groupby("trace")["regime"].apply(lambda r: (r != "fractile").any())
    )
    assert shaded == {trace: int(value) for trace, value in jumped.items()}
    assert shaded["tight"] == 1


def test_fig2b_names_the_traces_that_jump(costs):
    figure = figures.fig2b(costs, "burstgpt")
    left, right = figure.axes
    rows = costs[(costs["trace"] == "burstgpt") & (costs["policy"] == "DRO")]
    assert drawn(left, 100 * (1 - rows["quantile"]))
    assert "tight" in [text.get_text() for text in right.texts]


def test_regimes(traces):
    table = fractile.regimes(traces["tight"], (300, 1000), (2, 10), np.geomspace(0.1, 10, 20))
    figure = figures.regimes(table, 0.15, "tight")
    assert [ax.get_title("left") for ax in figure.axes] == ["ρ = 2", "ρ = 10"]
    for ax, rho in zip(figure.axes, (2, 10), strict=True):
        for _, rows in table[table["rho"] == rho].groupby("upper"):
            assert drawn(ax, rows["reservation"])


def test_critical_radius_outlines_what_lies_below_the_default(traces):
    table = fractile.critical_radii(traces)
    figure = figures.critical_radius(table, 0.15)
    assert len(figure.axes[0].patches) == (table["critical"] < 0.15).sum() > 0
    assert len(texts(figure)) == len(table)


def test_table2_implied(traces):
    curves = fractile.excess_curves({"burstgpt": traces["burstgpt"], "implied": traces["tight"]})
    points = pd.concat([fractile.implied_by_baselines(), fractile.implied_by_dro().assign(policy="DRO")])
    figure = figures.table2_implied(curves, points)
    for _, rows in curves.groupby("trace"):
        assert drawn(figure.axes[0], rows["excess"])
    assert {"P90", "P95"} <= {text.strip() for text in texts(figure)}
    assert sum(text.startswith("DRO") for text in texts(figure)) == 6


def test_ambiguity_sets(traces):
    table = fractile.growth_hedged(traces["tight"], (2, 10))
    figure = figures.ambiguity_sets(table, "tight")
    assert [ax.get_title("left") for ax in figure.axes[:5]] == [
        name.replace("inf", "∞") for name in table["set"].unique()
    ]
    for column, axes in (("growth", figure.axes[:5]), ("excess_pct", figure.axes[5:])):
        for ax, name in zip(axes, table["set"].unique(), strict=True):
            assert drawn(ax, table[(table["set"] == name) & (table["rho"] == 10)][column])


def test_panel(traces):
    figure = figures.panel(traces["tight"], ScaleShift(1, 1.5), 10)
    robust = ScaleShift(1, 1.5).reservation(traces["tight"], 10, 1)
    assert f"{robust:,.0f} tokens" in figure.get_suptitle()
    assert drawn(figure.axes[1], [0, 1])
    assert any(np.allclose(line.get_xdata(), robust) for line in figure.axes[1].lines)
