"""Figures of the solvers, each drawn from tables of `kvcache.paper.experiments.solvers`."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from kvcache.paper.plots import CYCLE, GREY, INK, canvas, heat, label_ends, plain_log, style, title

__all__ = ["descent", "growth", "readings", "structure", "table3"]

#: One colour per solver, in every figure.
SOLVER_COLORS = {
    "certified": CYCLE[1],
    "BCD, fast": CYCLE[0],
    "BCD, N thetas": CYCLE[5],
    "compact MIBLP, Gurobi": CYCLE[2],
    "compact MIBLP, SCIP": CYCLE[4],
    "literal MIBLP, Gurobi": CYCLE[6],
    "literal MIBLP, SCIP": CYCLE[3],
    "paper: MIBLP": GREY,
    "paper: BCD": INK,
}
READING_COLORS = {"resolve": CYCLE[0], "literal": CYCLE[1]}


def table3(seconds: pd.DataFrame) -> Figure:
    """Table III as curves: seconds against size, ours solid and the paper's dotted.

    ``seconds`` as of `experiments.solvers.table3_seconds`.
    """
    with style():
        figure, axes = canvas(height=3.9)
        ax = axes[0, 0]
        at = np.arange(len(seconds))
        ends = []
        for name in [c for c in seconds.columns if c != "size"]:
            known = seconds[name].notna().to_numpy()
            if not known.any():
                continue
            paper = name.startswith("paper")
            color = SOLVER_COLORS[name]
            ax.plot(
                at[known],
                seconds[name][known],
                marker="s" if paper else "o",
                linestyle=":" if paper else "-",
                color=color,
                zorder=2 if paper else 3,
            )
            last = int(np.flatnonzero(known)[-1])
            if last == len(seconds) - 1:
                ends.append((float(seconds[name].iloc[last]), name, color))
            else:
                ax.annotate(
                    name,
                    (at[last], seconds[name].iloc[last]),
                    xytext=(5, 3),
                    textcoords="offset points",
                    color=color,
                    fontsize=8.5,
                )
        ax.axhline(300, color=GREY, linewidth=0.8)
        ax.text(0, 330, "the paper's limit, 300 s", color=GREY, fontsize=8)
        plain_log(ax, "y", (0.01, 0.1, 1, 10, 100))
        ax.set_ylim(0.02, 700)
        ax.set_xticks(at, seconds["size"])
        ax.set_xlabel("classes x configurations x samples")
        ax.set_ylabel("seconds")
        label_ends(ax, ends)
        title(
            figure,
            "Table III: time to solve",
            "Lines that end were not run further in this profile, or the licence does not admit the size. "
            "Certified: to 1e-4 (in the quick profile the last to 1e-3).",
        )
    return figure


def growth(table: pd.DataFrame) -> Figure:
    """Seconds against classes, configurations and samples. Of `experiments.solvers.growth`."""
    with style():
        figure, axes = canvas(1, 3, height=3.2, sharey=True)
        for ax, (axis, rows) in zip(axes[0], table.groupby("axis", sort=False), strict=True):
            look = {"hue": "method", "palette": SOLVER_COLORS, "marker": "o", "markeredgewidth": 0}
            sns.lineplot(rows, x="value", y="seconds", legend=ax is axes[0, 0], **look, ax=ax)
            values = sorted(rows["value"].unique())
            plain_log(ax, "x", values)
            if max(values) > 1e5:
                ax.set_xticks(
                    values, [f"{v:.0e}".replace("e+0", "e") if v > 1e3 else f"{v:,}" for v in values]
                )
            plain_log(ax, "y", (0.01, 0.1, 1, 10, 100))
            ax.set_xlabel(axis + (" per class" if axis == "samples" else ""))
        axes[0, 0].set_ylabel("seconds")
        axes[0, 0].legend(loc="best", title="")
        title(
            figure,
            "Growth of time: only the program with one theta per sample grows with the samples",
            "One axis at a time from 4 x 4 x 200; BCD with Block 3 read literally.",
        )
    return figure


def descent(table: pd.DataFrame) -> Figure:
    """Objective above the certified bound after each accepted block. Of `experiments.solvers.descent`."""
    with style():
        figure, axes = canvas(height=3.3)
        ax = axes[0, 0]
        shown = table.assign(above=100 * (table["objective"] / table["lower_bound"] - 1))
        shown = shown.rename(columns={"block3": "Block 3"})
        look = {"hue": "Block 3", "palette": READING_COLORS, "style": "start", "marker": "o"}
        sns.lineplot(shown, x="step", y="above", markeredgewidth=0, **look, ax=ax)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        ax.set_xticks(np.arange(1, table["step"].max() + 1))
        ax.set_xlabel("accepted block")
        ax.set_ylabel("above the certified bound")
        ax.legend(loc="best")
        title(figure, "Algorithm 1 descends to a point that depends on its start and on Block 3")
    return figure


def readings(table: pd.DataFrame) -> Figure:
    """Where each reading of Block 3 ends, above the best policy known. Of `experiments.solvers.readings`."""
    with style():
        figure, axes = canvas(1, 2, height=3.3, sharey=True)
        floor = 1e-6
        for ax, (start, rows) in zip(axes[0], table.groupby("start", sort=False), strict=True):
            loads = sorted(rows["load"].unique())
            for side, (block3, color) in zip((-0.12, 0.12), READING_COLORS.items(), strict=True):
                own = rows[rows["block3"] == block3]
                x = own["load"].map(loads.index) + side
                ax.plot(x, own["above"].clip(lower=floor), "o", color=color, alpha=0.75, label=block3)
            ax.set_yscale("log")
            ax.set_ylim(floor / 2, 10)
            ax.set_yticks([floor, 1e-4, 1e-2, 1], ["optimal", "0.01 %", "1 %", "100 %"])
            ax.set_xticks(range(len(loads)), [f"{load:g}" for load in loads])
            ax.set_xlim(-0.5, len(loads) - 0.5)
            ax.set_xlabel("load (fraction of capacity)")
            ax.set_title(f"start: {start}")
        axes[0, 0].set_ylabel("above the best policy known")
        axes[0, 1].legend(title="Block 3", loc="lower right")
        title(figure, "What the reading of Block 3 costs", "Each point is a random problem of 3 x 4 x 60.")
    return figure


def structure(groups: pd.DataFrame, routing: pd.DataFrame, reservations: pd.DataFrame) -> Figure:
    """The optimal policy: GPUs by configuration, routing, and reservations on each class's lengths.

    Of `experiments.solvers.structure`.
    """
    with style():
        figure, axes = canvas(1, 3, height=3.6, width_ratios=[0.8, 1.1, 1.5])
        left, middle, right = axes[0]
        shown = groups.iloc[::-1].reset_index(drop=True)
        left.barh(shown.index, shown["gpus"], color=CYCLE[0], height=0.65)
        for row in shown.itertuples():
            text = f"{row.groups} x, {row.utilisation:.0%} full" if row.groups else "–"
            left.text(
                row.gpus + 0.5, row.Index, text, va="center", fontsize=8, color=INK if row.groups else GREY
            )
        left.set_yticks(shown.index, shown["config"])
        left.set_xlim(0, shown["gpus"].max() * 1.9)
        left.set_xlabel("GPUs")
        left.set_title("a  Groups")
        left.grid(axis="y", visible=False)

        names = reservations["class"].tolist()
        used = groups.loc[groups["groups"] > 0, "config"].tolist()
        share = routing.pivot(index="class", columns="config", values="share").loc[names, used]
        cached = routing.pivot(index="class", columns="config", values="cached").loc[names, used]
        heat(middle, share, "{:.1%}".format, size=8, cmap="Blues", vmin=0, vmax=1.2)
        for text, kept, value in zip(
            middle.texts, cached.to_numpy().ravel(), share.to_numpy().ravel(), strict=True
        ):
            text.set_text("–" if value < 5e-4 else text.get_text() + (" ●" if kept else ""))
        middle.invert_yaxis()
        middle.set_xticklabels([name.replace("x", "\nx") for name in used])
        middle.set_title("b  Routing (● prefix kept)")

        at = np.arange(len(names))
        right.barh(
            at,
            reservations["p99"] - reservations["p10"],
            left=reservations["p10"],
            height=0.22,
            color="#d9d9d9",
        )
        right.barh(
            at,
            reservations["p90"] - reservations["p10"],
            left=reservations["p10"],
            height=0.5,
            color="#b9b9b9",
        )
        right.plot(reservations["p50"], at, "|", color=INK, markersize=11, markeredgewidth=1.5)
        right.plot(reservations["fractile"], at, "D", color=CYCLE[2], markerfacecolor="none", markersize=8)
        right.plot(reservations["eta"].clip(lower=1), at, "o", color=CYCLE[1], zorder=3)
        plain_log(right, "x", (10, 100, 1000))
        right.set_xlim(2, 2 * reservations["p99"].max())
        right.set_yticks(at, [""] * len(at))
        right.set_ylim(len(at) - 0.5, -0.5)
        right.set_xlabel("output tokens")
        right.set_title("c  Reservation ● beside its fractile ◇")
        title(
            figure,
            "The optimal policy",
            "c: rows as in b; bars from P10 to P90 (wide) and P99 (thin), the stroke is the median.",
        )
    return figure
