"""The claims at a glance."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure

from kvcache.paper.claims.verdicts import Outcome
from kvcache.paper.plots import FAINT, GREY, INK, PAGE, canvas, style, title

__all__ = ["OUTCOMES", "at_a_glance"]

#: Colour, marker and column heading of each verdict; told apart by place, shape and shade too.
OUTCOMES = {
    Outcome.REPRODUCED: ("#009E73", "o", "reproduced"),
    Outcome.PARTLY: ("#E69F00", "D", "partly"),
    Outcome.NOT_REPRODUCED: ("#B03A00", "X", "not\nreproduced"),
    Outcome.NOT_TESTABLE: ("#767676", "_", "not\ntestable"),
}
#: Inches of a claim of two lines of text, and characters of a line.
_ROW, _LINE = 0.32, 76


def at_a_glance(claims: pd.DataFrame) -> Figure:
    """Every claim in one row: where it stands, what it says, and its verdict.

    Parameters
    ----------
    claims : rows of ``claims.csv``, in the order in which they are shown.
    """
    with style():
        figure, axes = canvas(height=_ROW * len(claims) + 1.1, width=PAGE)
        ax = axes[0, 0]
        columns = list(OUTCOMES)
        for y, (_, row) in enumerate(claims.iterrows()):
            if y and row["where"] == claims["where"].iloc[y - 1]:
                where = ""
            else:
                where = row["where"]
                ax.axhline(y - 0.5, color=FAINT, linewidth=0.8, zorder=0)
            lines = textwrap.wrap(row["claim"], _LINE, break_on_hyphens=False)
            if len(lines) > 2:
                lines = [lines[0], textwrap.shorten(" ".join(lines[1:]), _LINE, placeholder=" ...")]
            ax.text(-8.3, y, where, va="center", fontsize=8, color=GREY)
            ax.text(-7.25, y, row["id"], va="center", fontsize=8.5, fontweight="bold")
            ax.text(-6.75, y, "\n".join(lines), va="center", fontsize=7.3, linespacing=1.05, color=INK)
            outcome = Outcome(row["verdict"])
            color, marker, _ = OUTCOMES[outcome]
            x = columns.index(outcome)
            ax.plot([-0.45, 3.45], [y, y], color=FAINT, linewidth=0.6, zorder=0)
            ax.plot(x, y, marker, color=color, markersize=9, markeredgewidth=2.5 if marker == "_" else 0.5)
        for x, outcome in enumerate(columns):
            color, _, heading = OUTCOMES[outcome]
            count = int((claims["verdict"] == outcome).sum())
            ax.text(
                x, -0.8, f"{heading}\n{count}", ha="center", va="bottom", fontsize=8, color=color,
                fontweight="bold", linespacing=1.1,
            )  # fmt: skip
        ax.set(xlim=(-8.35, 3.5), ylim=(len(claims) - 0.5, -2.2))
        ax.axis("off")
        title(figure, f"{len(claims)} claims of the paper and what became of them")
    return figure
