"""The look that all figures share, and how one is saved with its data.

A figure is drawn by one function from one tidy table. `save` writes it as PNG and SVG with the same
bytes on every run, and the table as CSV under the same name.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from IPython.display import Image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from kvcache.files import atomic_path
from kvcache.paper.results import figures_dir, write_table

__all__ = [
    "COLORS",
    "CYCLE",
    "GREY",
    "INK",
    "LINE_STYLES",
    "PAGE",
    "RATIO",
    "canvas",
    "color_of",
    "heat",
    "label_ends",
    "plain_log",
    "save",
    "style",
    "title",
]

#: Width of a page, inches; figures are drawn at this width so that 9 pt text is 9 pt.
PAGE = 8.0
INK, GREY, FAINT = "#222222", "#767676", "#d9d9d9"
#: The axis that most figures share, and the bound that some name.
RATIO, L_MAX = r"cost ratio $\rho = c_p / c_w$", r"$L_\mathrm{max}$"

#: Okabe and Ito's colours, told apart by most colour-blind readers.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F6A00", "#000000")

#: One colour per policy, in every figure.
COLORS = {
    "DRO": "#D55E00",
    "SAA": "#0072B2",
    "P90": "#009E73",
    "P95": "#CC79A7",
    "P99": "#E69F00",
    "Mean": "#7F6A00",
    "Max": "#000000",
    "LP+1sigma": "#56B4E9",
    "LP+2sigma": "#5D3A9B",
}
#: For series that are ordered or many: told apart without colour.
LINE_STYLES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 2)))

_STYLE = {
    **sns.axes_style("whitegrid"),
    **sns.plotting_context("paper"),
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": mpl.cycler(color=CYCLE),
    "patch.force_edgecolor": False,
    "grid.color": FAINT,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "mathtext.default": "regular",
    "svg.hashsalt": "kvcache",
}


@contextmanager
def style() -> Iterator[None]:
    """The shared look, for what is drawn inside the block."""
    with mpl.rc_context(_STYLE):
        yield


def canvas(
    rows: int = 1, columns: int = 1, height: float = 3.4, width: float = PAGE, **subplots: object
) -> tuple[Figure, np.ndarray]:
    """A figure that no notebook shows by itself, and its (rows, columns) axes; sizes in inches."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def title(figure: Figure, text: str, note: str = "") -> None:
    """What the figure shows, in bold over it, and below it in grey how to read it; both wrap."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=10.5, fontweight="bold", wrap=True)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8, color=GREY, wrap=True)


def color_of(policy: str, position: int = 0) -> str:
    """The policy's own colour, or that of its position for one that has none."""
    return COLORS.get(policy, CYCLE[position % len(CYCLE)])


def heat(
    ax: Axes,
    grid: pd.DataFrame,
    form: Callable[[float], str],
    *,
    size: float = 7.5,
    boxed: pd.DataFrame | None = None,
    **colours: object,
) -> None:
    """A table as coloured cells, its first row at the foot, with their values; missing cells stay white.

    ``boxed`` marks the cells to outline; ``colours`` (``cmap``, ``norm``, ...) go to `seaborn.heatmap`.
    """
    plain = grid.rename(index=_plain, columns=_plain)
    look = {"annot_kws": {"size": size}, "linewidths": 0.4, "xticklabels": 1, "yticklabels": 1, "cbar": False}
    sns.heatmap(plain, annot=grid.map(form), fmt="", ax=ax, **{**look, **colours})
    ax.invert_yaxis()
    ax.tick_params(length=0, rotation=0)
    ax.set(xlabel="", ylabel="")
    for y, x in np.argwhere(boxed.to_numpy()) if boxed is not None else ():
        ax.add_patch(
            Rectangle((x + 0.02, y + 0.02), 0.96, 0.96, fill=False, edgecolor="black", linewidth=1.8)
        )


def _plain(name: object) -> str:
    return name if isinstance(name, str) else f"{name:g}"


def label_ends(
    ax: Axes, labels: Iterable[tuple[float, str, str]], size: float = 8.5, side: float = 1.01
) -> None:
    """Names (y in data units, text, colour) right of the axes, moved apart where they would overlap."""
    figure = ax.figure
    figure.draw_without_rendering()
    gap = size * 1.2 * figure.dpi / 72 / ax.get_window_extent().height

    def place(y: float) -> float:
        return float(ax.transAxes.inverted().transform(ax.transData.transform((1, y)))[1])

    placed = sorted((min(max(place(y), 0.0), 1.0), text, color) for y, text, color in labels)
    for y, (_, text, color) in zip(_apart([at for at, _, _ in placed], gap), placed, strict=True):
        ax.text(side, y, text, transform=ax.transAxes, color=color, fontsize=size, va="center")


def _apart(at: Sequence[float], gap: float) -> np.ndarray:
    """Sorted positions with at least ``gap`` between neighbours, as near the given ones as blocks allow."""
    blocks: list[list[float]] = []  # centre, size
    for y in at:
        blocks.append([float(y), 1.0])
        while len(blocks) > 1:
            (low, n), (high, m) = blocks[-2:]
            if high - low >= gap * (n + m) / 2:
                break
            blocks[-2:] = [[(low * n + high * m) / (n + m), n + m]]
    return np.array([centre + gap * (i - (n - 1) / 2) for centre, n in blocks for i in range(int(n))])


def plain_log(ax: Axes, axis: str, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis (``"x"`` or ``"y"``) that writes 10 and 2,000 and not powers."""
    getattr(ax, f"set_{axis}scale")("log")
    which = getattr(ax, f"{axis}axis")
    if ticks is not None:
        which.set_ticks(list(ticks))
        which.set_minor_locator(mpl.ticker.NullLocator())
    which.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    which.set_minor_formatter(mpl.ticker.NullFormatter())


def save(figure: Figure, name: str, profile: str, data: pd.DataFrame | None = None) -> Image:
    """Write ``name``.png (150 dpi) and ``name``.svg to the figures, and ``data`` to ``name``.csv.

    Parameters
    ----------
    figure : as drawn, under `style`.
    name : as in the paper where it is one of its figures (``fig2a``).
    profile : ``quick`` or ``full``, the folder.
    data : the tidy table that the figure was drawn from.

    Returns
    -------
    Image
        The PNG, to be the last value of a notebook cell.
    """
    folder = figures_dir(profile)
    with style():
        for suffix, metadata in ((".svg", {"Date": None, "Creator": None}), (".png", {"Software": None})):
            with atomic_path(folder / f"{name}{suffix}") as partial:
                figure.savefig(partial, dpi=150, metadata=metadata)
    if data is not None:
        write_table(data, f"{name}.csv", profile)
    return shown(figure, alt=name)


def shown(figure: Figure, alt: str = "") -> Image:
    """The figure as an image for a notebook, at its own width."""
    buffer = io.BytesIO()
    with style():
        figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return Image(data=buffer.getvalue(), width=int(figure.get_figwidth() * 100), alt=alt)
