"""Figures of notebook 10: what a plan does, what limits it, and what would change it."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvcache.paper.experiments.planning import limits
from kvcache.paper.plots import CYCLE, GREY, INK, canvas, style, title
from kvcache.planner import Plan

__all__ = ["fig_growth", "fig_limits", "fig_plan", "fig_refused", "fig_replays", "fig_what_ifs"]

_PANELS = (
    ("goodput", "in time, requests/s", None, 1.0),
    ("ttft_p95", "TTFT P95, s", "ttft", 1.0),
    ("tpot_p95", "TPOT P95, ms", "tpot", 1e3),
    ("worst_gap_p99", "worst gap P99, s", None, 1.0),
)


def fig_replays(replayed: pd.DataFrame, ttft: float, tpot: float) -> Figure:
    """The plan, the plan without headroom and the engine's defaults, replayed on the held-out half.

    ``replayed`` has a column ``case`` and the figures of `kvcache.planner.judge.FIGURES`; deadlines in s.
    """
    deadlines = {"ttft": ttft, "tpot": tpot}
    with style():
        figure, axes = canvas(1, len(_PANELS), height=2.0, sharey=True)
        for ax, (name, label, deadline, unit) in zip(axes[0], _PANELS, strict=True):
            values = replayed[name] * unit
            bars = ax.barh(replayed["case"], values, color=CYCLE[: len(replayed)], height=0.6)
            ax.bar_label(bars, [f"{v:,.3g}" for v in values], padding=2, fontsize=8, color=INK)
            ax.set_xlabel(label)
            ax.grid(False)
            ax.set_xlim(0, 1.3 * max(values.max(), 1e-9))
            if deadline and deadlines[deadline] * unit <= 1.3 * values.max():
                ax.axvline(deadlines[deadline] * unit, color=GREY, linestyle="--", linewidth=1)
            ax.locator_params(axis="x", nbins=3)
        axes[0][0].invert_yaxis()
        title(
            figure, "What the groups do on requests that the plan was not made from", "dashed: the deadline"
        )
    return figure


def fig_limits(table: pd.DataFrame) -> Figure:
    """How much of each limit the groups use; of `experiments.planning.limits`."""
    with style():
        figure, axes = canvas(height=1.2 + 0.25 * len(table))
        ax = axes[0][0]
        sns.barplot(
            table, x="use", y="limit", hue="label", ax=ax, palette=list(CYCLE[: table["label"].nunique()])
        )
        for bars in ax.containers:
            ax.bar_label(bars, fmt=lambda v: f"{v:.0%}", padding=2, fontsize=8)
        ax.axvline(1, color=GREY, linestyle="--", linewidth=1)
        ax.set(
            xlabel="share of the limit that is used", ylabel="", xlim=(0, max(1.1, 1.1 * table["use"].max()))
        )
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.legend(title="", loc="lower right", frameon=True)
        filled = float(table["filled"].iloc[0])
        ax.axvline(filled, color=INK, linewidth=1)
        note = f"line: {filled:.0%}, so that the asked share of requests is in time; dashed: what means allow"
        title(figure, "What limits the plan: the longest bar", note)
    return figure


def fig_growth(table: pd.DataFrame, gpus: int, tpot: float, offered: float) -> Figure:
    """Requests/s served over GPUs, one line per TPOT deadline; of `experiments.planning.growth`."""
    with style():
        figure, axes = canvas(height=3.0)
        ax = axes[0][0]
        for at, (deadline, part) in enumerate(table.groupby("tpot")):
            chosen = np.isclose(deadline, tpot)
            ax.plot(
                part["gpus"], part["served_per_s"], marker="o", color=CYCLE[at],
                linewidth=2.2 if chosen else 1.2, label=f"{1e3 * deadline:g} ms a token",
            )  # fmt: skip
        ax.axhline(offered, color=GREY, linestyle="--", linewidth=1)
        ax.annotate(
            "offered", (1, offered), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY
        )
        ax.axvline(gpus, color=GREY, linestyle=":", linewidth=1)
        ax.set(xlabel="GPUs", ylabel="served in time, requests/s", ylim=(0, None))
        ax.set_xticks(sorted(table["gpus"].unique()))
        ax.legend(loc="lower right", frameon=True)
        title(
            figure,
            "What more GPUs or a longer deadline would buy",
            "dotted: the GPUs of this plan; proven optima",
        )
    return figure


def fig_what_ifs(table: pd.DataFrame) -> Figure:
    """Share rejected and time per token over load and output lengths; of `experiments.planning.what_ifs`."""
    with style():
        figure, axes = canvas(1, 2, height=2.7)
        for ax, column, label in zip(axes[0], ("rejected", "tpot_s"), ("rejected", "TPOT, ms"), strict=True):
            for at, (change, part) in enumerate(table.groupby("change", sort=False)):
                values = part[column] * (1e3 if column == "tpot_s" else 1)
                ax.plot(part["factor"], values, marker="o", color=CYCLE[at], label=change)
            ax.axvline(1, color=GREY, linestyle=":", linewidth=1)
            ax.set(xlabel="times what was planned for", ylabel=label, ylim=(0, None))
        axes[0][0].yaxis.set_major_formatter(PercentFormatter(1))
        axes[0][0].legend(loc="upper left")
        title(figure, "If more requests come, or outputs get longer, and the plan is made again")
    return figure


def fig_plan(made: Plan) -> Figure:
    """A plan that was not replayed, in one picture: what is served of each class, and the limits."""
    served = made.routing["rate"] * (1 - made.routing["rejected"])
    with style():
        figure, axes = canvas(1, 2, height=3.0)
        names = made.routing["class"].astype(str)
        left, right = axes[0]
        left.barh(names, served, color=CYCLE[0], label="served")
        left.barh(names, made.routing["rate"] - served, left=served, color="#d9d9d9", label="rejected")
        left.set(xlabel="requests/s")
        left.invert_yaxis()
        left.legend(loc="lower right", frameon=True)
        sns.barplot(limits(made), x="use", y="limit", hue="label", ax=right, palette="colorblind")
        right.axvline(1, color=GREY, linestyle="--", linewidth=1)
        right.set(xlabel="share of the limit that is used", ylabel="")
        right.xaxis.set_major_formatter(PercentFormatter(1))
        right.legend(title="", loc="lower right", frameon=True)
        started = ", ".join(f"{r.groups} x {r.label}" for r in made.groups.itertuples())
        figures = made.predicted
        title(
            figure,
            f"{started}: {figures['requests_per_s']:.3g} of {figures['offered_per_s']:.3g} requests/s, "
            f"{1e3 * figures['tpot']:.0f} ms a token",
            "modelled, not replayed",
        )
    return figure


def fig_refused(reason: str) -> Figure:
    """Why there is no plan, as a picture."""
    with style():
        figure, axes = canvas(height=1.2)
        axes[0][0].axis("off")
        title(figure, "No plan", reason)
    return figure
