"""Every figure, drawn from the committed tables: shows what it must, stays on its page, twice alike."""

import io

import pytest
from matplotlib.figure import Figure

from kvcache.paper.plots import comparison as plots
from kvcache.paper.plots import style
from kvcache.paper.results import read_table


def table(name):
    return read_table(f"{name}.csv", "quick")


FIGURES = {
    "fig3a": (lambda: plots.fig3a(table("fig3a"), 0.5), ["rejection", "tardiness", "chat"]),
    "fig3b": (lambda: plots.fig3b(table("fig3b")), ["ρ = 2", "ρ = 10", "ρ = 50"]),
    "fig3b_limits": (lambda: plots.fig3b_limits(table("fig3b_limits")), ["ε = 0.5 tokens"]),
    "fig4": (lambda: plots.fig4(table("fig4")), ["c_slo", "c_rej", "κ"]),
    "lmax": (lambda: plots.fig_lmax(table("lmax")), ["chat", "code", "conversation"]),
    "table4_decoded": (lambda: plots.fig_decoded(table("table4_decoded")), ["DRO", "Max", "LP+1sigma"]),
    "table4": (lambda: plots.fig_table4(table("table4")), ["cost, ρ = 100"]),
    "bounded": (lambda: plots.fig_bounded(table("bounded")), ["1"]),
    "cost_rho": (lambda: plots.fig_cost_rho(table("cost_rho")), ["DRO", "SAA", "W-infinity", "vLLM"]),
    "frontier": (lambda: plots.fig_frontier(table("cost_rho")), ["P99", "Max"]),
    "latency_map": (
        lambda: plots.fig_latency_map(table("latency_map"), "Max", ["instance", "BurstGPT"]),
        ["lengths: BurstGPT"],
    ),
    "engines": (lambda: plots.fig_engines(table("engines")), ["vLLM", "SGLang", "LightLLM", "DRO"]),
    "table5": (lambda: plots.fig_ablation(table("table5_seeds")), ["P99 latency"]),
    "fig6": (lambda: plots.fig6(table("fig6")), ["DRO", "SAA"]),
    "fig6_regimes": (lambda: plots.fig6_regimes(table("fig6_regimes")), ["1.00"]),
    "partitions": (lambda: plots.fig_partitions(table("partitions")), ["lengths x 1", "lengths x 2.5"]),
    "prefix": (lambda: plots.fig_prefix(table("prefix")), ["paper: 22 %"]),
}


def texts(figure: Figure) -> list[str]:
    return [t.get_text() for ax in figure.axes for t in (*ax.texts, ax.title, ax._left_title)]


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=50, metadata={"Software": None})
    return buffer.getvalue()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_it_should(name):
    draw, expected = FIGURES[name]
    figure = draw()
    shown = texts(figure)
    for text in expected:
        assert text in shown, f"{name}: {text!r} is not on the figure"
    assert png(figure) == png(draw())
    # Nothing that is written runs over the edge of the page.
    page = figure.get_window_extent()
    title = figure._suptitle.get_window_extent()
    assert title.x1 <= page.x1
    for ax in figure.axes:
        assert ax.has_data()
        assert ax.get_xlabel() or ax.get_title() or len(figure.axes) > 1 or name == "bounded"


def test_near_points_share_a_label():
    import numpy as np

    points = np.array([[0.0, 0.0], [0.05, 0.0], [0.1, 0.0], [1.0, 1.0]])
    assert plots._clusters(points, 0.06) == [[0, 1, 2], [3]]
    assert plots._clusters(points, 0.01) == [[0], [1], [2], [3]]
