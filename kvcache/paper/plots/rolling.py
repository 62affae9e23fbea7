"""Figures of drift: what shifts cost, and what policies make of real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcache.paper.experiments.drift import DEFAULT, GRID
from kvcache.paper.plots import GREY, RATIO, canvas, color_of, heat, label_ends, plain_log, style, title

__all__ = ["figure_5a", "figure_5b", "real_drift", "robust_regions", "surprises"]

#: Colour and line of the policies in these figures.
LOOK = {
    DEFAULT: ("#009E73", "-"),
    "static": ("#767676", "-"),
    "static DRO": ("#767676", "-"),
    "rolling SAA": (color_of("SAA"), "-"),
    "rolling SAA, last window": (color_of("SAA"), "-"),
    "rolling SAA, last day": ("#56B4E9", "-"),
    "rolling DRO": (color_of("DRO"), "--"),
    "rolling DRO, W1 0.15 mean": (color_of("DRO"), "--"),
    GRID: ("#000000", "-"),
    "hindsight optimum": ("#000000", "-"),
}


def figure_5a(single: pd.DataFrame, joint: pd.DataFrame) -> Figure:
    """Fig. 5(a): lengths shrink; a static reservation against ones made again every window.

    Parameters
    ----------
    single : as `kvcache.paper.experiments.drift.shrinking` returns it, for one trace.
    joint : rows of `kvcache.paper.experiments.drift.memory_point` with ``window`` and ``policy``.
    """
    low, rho = single["scale"].min(), single["rho"].iloc[0]
    with style():
        figure, axes = canvas(1, 3, height=3.3)
        left, middle, right = axes[0]
        _lines(left, single, "reservation", 1, ("static", "rolling SAA", "rolling DRO", DEFAULT))
        _lines(middle, single, "used", 100, ("static", "rolling SAA", "rolling DRO", DEFAULT))
        _lines(right, joint, "used", 100, ("static DRO", "rolling SAA", "rolling DRO"), marker="o")
        left.set_ylabel("reserved output tokens per request")
        middle.set_ylabel("reserved tokens that are used (%)")
        right.set_ylabel("reserved tokens that are used (%)")
        left.set_title("(1) the reservation")
        middle.set_title("(2) reserved memory in use")
        right.set_title("(3) joint, replayed")
        title(
            figure,
            "Fig. 5(a)  When lengths shrink a static reservation idles; re-optimising recovers",
            f"(1), (2): {single['digest'].iloc[0]}, lengths times a factor from 1 to {low:g}, ρ = {rho:g}. "
            "(3): the paper's cluster, set for the window before.",
        )
    return figure


def _lines(
    ax: Axes, table: pd.DataFrame, column: str, unit: float, names: Sequence[str], marker: str = ""
) -> None:
    """One line per policy over the windows, with its name (and its GPUs) at its end, from zero up."""
    ends = []
    for name in names:
        part = table[table["policy"] == name]
        color, line = LOOK[name]
        ax.plot(part["window"], unit * part[column], line, color=color, marker=marker)
        text = f"{name}, {part['gpus'].iloc[-1]} GPUs" if "gpus" in part else name
        ends.append((float(unit * part[column].iloc[-1]), text, color))
    ax.set_ylim(0, None)
    ax.set_xlabel("window")
    label_ends(ax, ends, size=8)


def figure_5b(table: pd.DataFrame) -> Figure:
    """Fig. 5(b): what DRO saves over fixed reservations, by shift and cost ratio.

    ``table`` is that of `experiments.drift.advantage`; only the W1 rows of its first radius are drawn.
    """
    part = table[(table["set"] == "W1") & (table["radius"] == table["radius"].iloc[0])]
    return _maps(
        part,
        list(product(pd.unique(part["digest"]), pd.unique(part["baseline"]))),
        ("digest", "baseline"),
        columns=part["baseline"].nunique(),
        name=lambda digest, baseline: f"{digest}: against {baseline}",
        heading="Fig. 5(b)  What DRO saves when lengths shift: much past its jump, if they grow",
        note=f"Cost saved by $W_1$ at {part['radius'].iloc[0]:g} × mean, % of the baseline's cost "
        "(blue: DRO is cheaper). Shifted lengths are cut at the trace's bound.",
    )


def robust_regions(table: pd.DataFrame, digest: str) -> Figure:
    """Where a robust set beats SAA: one map per radius of W1, and the other sets (C12)."""
    part = table[(table["digest"] == digest) & (table["baseline"] == "SAA")]
    panels = list(part[["set", "radius"]].drop_duplicates().itertuples(index=False, name=None))
    names = {
        "W1": "$W_1$, {:g} × mean",
        "W-infinity": "$W_\\infty$, {:g} × mean",
        "scale shift": "scale shift, 1 to {:g}",
    }
    return _maps(
        part,
        panels,
        ("set", "radius"),
        columns=3,
        name=lambda label, size: names[label].format(size),
        heading=f"Where robustness pays ({digest}): cost saved over SAA, by set, shift and ρ",
        note="% of SAA's cost (blue: the robust one is cheaper). White: $W_1$ has not jumped and equals SAA.",
    )


def _maps(
    part: pd.DataFrame,
    panels: Sequence[tuple],
    keys: tuple[str, str],
    *,
    columns: int,
    name: Callable[..., str],
    heading: str,
    note: str,
) -> Figure:
    """One map of ``advantage`` (%) over rho and shift per panel, a pair of values of the two ``keys``."""
    rows = -(-len(panels) // columns)
    with style():
        figure, axes = canvas(rows, columns, height=0.9 + 2.0 * rows)
        for ax in axes.ravel()[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.ravel(), panels, strict=False):
            chosen = part[(part[keys[0]] == panel[0]) & (part[keys[1]] == panel[1])]
            grid = chosen.pivot_table(index="rho", columns="shift", values="advantage")
            size = 6.5 if grid.shape[1] < 10 else 4.5
            heat(ax, 100 * grid, lambda v: f"{round(v)}", size=size, cmap="RdBu", vmin=-100, vmax=100)
            ax.set_title(name(*panel), fontsize=8.5)
            ax.tick_params(labelsize=7.5)
        for ax in axes[:, 0]:
            ax.set_ylabel(RATIO, fontsize=8)
        for ax in axes[-1]:
            ax.set_xlabel("shift (factor on the lengths)", fontsize=8)
        title(figure, heading, note)
    return figure


def real_drift(table: pd.DataFrame, period: str, ceiling: float = 1.32) -> Figure:
    """Cost over hindsight by rho on the long traces: the default policy among the others (``drift.csv``)."""
    part = table[table["period"] == period]
    traces = list(pd.unique(part["trace"]))
    names = (
        "static",
        "rolling SAA, last day",
        "rolling DRO, W1 0.15 mean",
        "rolling SAA, last window",
        DEFAULT,
    )
    rhos = sorted(part["rho"].unique())
    with style():
        figure, axes = canvas(1, len(traces), height=4.0, sharey=True)
        for ax, trace in zip(axes[0], traces, strict=True):
            here = part[part["trace"] == trace].pivot_table(index="policy", columns="rho", values="ratio")
            x = np.arange(len(rhos))
            oracle = here.loc["oracle: best within the forecasts"].to_numpy()
            ax.fill_between(x, 1, oracle, color="#e8e8e8", zorder=0, label="out of any forecasts' reach")
            for policy in names:
                color, line = LOOK[policy]
                width = {DEFAULT: 2.4, "rolling SAA, last day": 4.0}.get(policy, 1.3)
                y = np.minimum(here.loc[policy].to_numpy(), ceiling + 0.05)
                ax.plot(x, y, line, color=color, marker="o", lw=width, ms=3.5, label=policy)
            ax.plot(x, here.loc[GRID].to_numpy(), "D", mfc="none", color=LOOK[GRID][0], ms=6, label=GRID)
            if (highest := here.loc["static"].max()) > ceiling:
                ax.set_title(f"static: up to {highest:.2f}", loc="right", fontsize=8, color=GREY)
            ax.axhline(1.05, color=GREY, lw=0.8, ls=(0, (1, 3)))
            ax.set_xticks(x, [f"{r:g}" for r in rhos])
            ax.set_xlabel(RATIO)
            ax.set_title(trace)
            ax.set_ylim(1.0, ceiling)
        axes[0][0].set_ylabel("cost / hindsight optimum")
        handles, labels = axes[0][0].get_legend_handles_labels()
        axes[0][-1].legend(handles, labels, loc="center", bbox_to_anchor=(0.56, 0.45), fontsize=7.5)
        title(
            figure,
            f"Real drift, {period}: cost of each policy over the optimum of every window",
            "ServeGen, 6-hour windows; each policy sees only earlier windows. Dotted: 1.05.",
        )
    return figure


def surprises(path: pd.DataFrame, days: pd.DataFrame) -> Figure:
    """Reservations window by window beside the optimum, and the day on which the excess arose.

    Parameters
    ----------
    path : as `kvcache.paper.experiments.drift.path` returns it, for one trace and rho.
    days : as `kvcache.paper.experiments.drift.by_day` returns it; the rows of that trace and rho are drawn.
    """
    trace, rho = path["trace"].iloc[0], path["rho"].iloc[0]
    daily = days[(days["trace"] == trace) & (days["rho"] == rho)]
    with style():
        figure, axes = canvas(2, 1, height=4.8, gridspec_kw={"height_ratios": [3, 2]})
        top, bottom = axes[:, 0]
        ends = []
        for policy in ("hindsight optimum", "rolling SAA, last window", DEFAULT):
            part = path[path["policy"] == policy]
            color, line = LOOK[policy]
            optimum = policy == "hindsight optimum"
            top.step(
                part["window"] / 4 + 1, part["reservation"], line, where="post", color=color,
                lw=1.0 if optimum else 1.6, zorder=3 if optimum else 2,
            )  # fmt: skip
            ends.append((float(part["reservation"].iloc[-1]), policy, color))
        plain_log(top, "y", [200, 300, 500, 700, 1000, 1500])
        low, high = path["reservation"].min(), path["reservation"].max()
        top.set_ylim(low / 1.15, high * 1.15)
        label_ends(top, ends)
        top.set_ylabel("reserved output tokens")
        names = list(pd.unique(daily["policy"]))
        width = 0.8 / len(names)
        for i, policy in enumerate(names):
            part = daily[daily["policy"] == policy]
            bottom.bar(
                part["day"] + 0.5 + (i - (len(names) - 1) / 2) * width,
                part["excess"],
                width,
                color=LOOK[policy][0],
            )
        label_ends(
            bottom, [(daily["excess"].max() * (1 - 0.2 * i), n, LOOK[n][0]) for i, n in enumerate(names)]
        )
        bottom.set_ylabel("excess cost (% of\nall days' optimum)")
        bottom.set_xlabel("day")
        for ax in (top, bottom):
            ax.set_xlim(2, 15)
            ax.xaxis.set_major_locator(mpl.ticker.MultipleLocator(1))
        title(
            figure,
            f"{trace}, ρ = {rho:g}: most of the excess over hindsight comes on few days",
            "A jump that no earlier window announces is paid by every policy.",
        )
    return figure
