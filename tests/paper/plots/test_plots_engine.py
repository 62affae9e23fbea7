"""Every figure of the engine notebook, drawn from the committed tables: shows what it must, twice alike."""

import io

import pytest

from kvcache.paper.plots import engine as plots
from kvcache.paper.plots import style
from kvcache.paper.plots.widgets import EnginePanel
from kvcache.paper.results import read_table


def table(name):
    return read_table(f"engine_{name}.csv", "quick")


PANELS = {"latency_p99_s": "P99 latency, s", "goodput": "goodput"}
FIGURES = {
    "picture": (lambda: plots.fig_picture(table("picture")), ["running", "waiting"]),
    "operating": (lambda: plots.fig_operating(table("operating")), ["W1", "W3"]),
    "outgrown": (lambda: plots.fig_outgrown(table("outgrown")), ["W1 56k"]),
    "overflow": (lambda: plots.fig_overflow(table("overflow")), ["sharegpt", "W3"]),
    "newsvendor": (lambda: plots.fig_newsvendor(table("newsvendor")), ["W2, pool 24k", "u*"]),
    "gains": (lambda: plots.fig_gains(table("gains")), ["u*", "SGLang"]),
    "frontier": (
        lambda: plots.fig_frontier(table("rules"), ["default", "u*"]),
        ["W3, pool 200k", "default"],
    ),
    "stalls": (lambda: plots.fig_stalls(table("rules"), 0.9), ["Past-Future"]),
    "ratios": (lambda: plots.fig_ratios(table("ratios")), ["W2"]),
    "bursts": (lambda: plots.fig_bursts(table("bursts")), ["reported (vllm#44594)"]),
    "growth": (
        lambda: plots.fig_shift(table("growth").query("ratio == 10"), PANELS, ["u*", "SAA"]),
        ["P99 latency, s", "SAA"],
    ),
}


def words(figure):
    found = [t.get_text() for ax in figure.axes for t in (*ax.texts, ax.title, ax._left_title)]
    for ax in figure.axes:
        found += [t.get_text() for t in (*ax.get_xticklabels(), *ax.get_yticklabels())]
    for legend in (*figure.legends, *(ax.get_legend() for ax in figure.axes)):
        found += [t.get_text() for t in legend.get_texts()] if legend else []
    return found


def png(figure):
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=50, metadata={"Software": None})
    return buffer.getvalue()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_it_should(name):
    draw, expected = FIGURES[name]
    figure = draw()
    first = png(figure)
    shown = words(figure)
    for text in expected:
        assert text in shown, f"{name}: {text!r} is not on the figure"
    assert first == png(draw())
    assert figure._suptitle.get_window_extent().x1 <= figure.get_window_extent().x1
    assert all(ax.has_data() for ax in figure.axes if ax.axison)


def test_the_panel_draws_what_its_controls_say():
    panel = EnginePanel(requests=30)
    seen = [bytes(panel._image.value)]
    for control, value in (
        (panel._trace, "sharegpt"),
        (panel._pool, 16_000),
        (panel._load, 1.5),
        (panel._watermark, 0.2),
    ):
        control.value = value
        seen.append(bytes(panel._image.value))
    assert len(set(seen)) == len(seen)
    data, _ = panel._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG")
