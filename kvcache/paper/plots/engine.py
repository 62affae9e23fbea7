"""Figures of the engine notebook, each drawn from one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kvcache.paper.plots import CYCLE, GREY, INK, canvas, heat, label_ends, plain_log, style, title

__all__ = [
    "fig_bursts",
    "fig_frontier",
    "fig_gains",
    "fig_newsvendor",
    "fig_operating",
    "fig_outgrown",
    "fig_overflow",
    "fig_picture",
    "fig_ratios",
    "fig_shift",
    "fig_stalls",
]

WORKLOAD_COLORS = {"W1": CYCLE[0], "W2": CYCLE[2], "W3": CYCLE[1]}
RULE_COLORS = {
    "default": INK,
    "watermark 0.01": CYCLE[5],
    "u*": CYCLE[1],
    "burst rule": CYCLE[2],
    "P90": CYCLE[3],
    "SAA": CYCLE[0],
    "DRO": CYCLE[4],
    "no evict (L_max)": GREY,
    "Past-Future": CYCLE[6],
}


def _thousands(tokens: float) -> str:
    return f"{tokens / 1000:g}k"


def fig_picture(line: pd.DataFrame) -> Figure:
    """Used memory, who runs and who waits, with admissions, finishes and evictions."""
    with style():
        figure, axes = canvas(2, 1, height=4.2, sharex=True, height_ratios=(1.5, 1))
        memory, crowd = axes[:, 0]
        memory.step(line["time_s"], line["used"], where="post", color=CYCLE[0], linewidth=1)
        marks = (
            ("finished", "v", CYCLE[2], 1.04, "finish"),
            ("entered", "|", GREY, -0.04, "admission"),
            ("evicted", "X", CYCLE[1], 1.12, "eviction"),
        )
        for column, marker, color, y, label in marks:
            at = line.loc[line[column] > 0, "time_s"]
            size = 22 if marker == "X" else 9
            memory.scatter(at, np.full(len(at), y), marker=marker, s=size, color=color, linewidths=0.8,
                           label=label, clip_on=False)  # fmt: skip
        memory.set(ylabel="used share of the pool", ylim=(-0.08, 1.17))
        memory.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), handletextpad=0.2)
        for column, color in (("running", CYCLE[0]), ("waiting", CYCLE[1])):
            crowd.step(line["time_s"], line[column], where="post", color=color, linewidth=1.2, label=column)
        crowd.legend(loc="upper left", bbox_to_anchor=(1.0, 1.05))
        crowd.set(xlabel="time, s", ylabel="requests", xlim=(0, line["time_s"].max()), ylim=(0, None))
        title(figure, "What a paged engine does: memory fills, the last comer is evicted and comes back")
    return figure


def fig_operating(table: pd.DataFrame) -> Figure:
    """TPOT over the share of time that requests take, and running requests, predicted and simulated."""
    with style():
        figure, axes = canvas(1, 2, height=3.5)
        time, crowd = axes[0]
        x = np.linspace(0, 0.88, 200)
        t0 = (table["predicted_tpot_s"] * (1 - table["rho_c"])).iloc[0]
        time.plot(x, 1000 * t0 / (1 - x), color=INK, linewidth=1.2)
        look = {"hue": "workload", "palette": WORKLOAD_COLORS, "s": 20, "linewidth": 0}
        own = table.assign(tpot_ms=1000 * table["tpot_median_s"])
        sns.scatterplot(own, x="rho_c", y="tpot_ms", ax=time, **look)
        time.set(
            xlabel=r"$\rho_c$ at the realised arrival rate", ylabel="time per output token, ms", xlim=(0, 0.9)
        )
        time.set_ylim(0, 1.08 * own["tpot_ms"].max())
        time.text(0.03, 0.93, r"line: $t_0 / (1 - \rho_c)$", transform=time.transAxes)
        time.legend(loc="center left", title="median over requests", alignment="left")
        ends = [1, 1.1 * max(table["running"].max(), table["predicted_running"].max())]
        crowd.plot(ends, ends, color=INK, linewidth=1)
        sns.scatterplot(table, x="predicted_running", y="running", ax=crowd, legend=False, **look)
        plain_log(crowd, "x", (2, 5, 10, 20, 50, 100))
        plain_log(crowd, "y", (2, 5, 10, 20, 50, 100))
        crowd.set(
            xlabel=r"running requests by Little's law, $\tau \lambda E\xi$",
            ylabel="running requests, simulated",
        )
        title(figure, "The operating point: one step cost, one arrival rate, and everything else follows")
    return figure


def fig_outgrown(table: pd.DataFrame) -> Figure:
    """The paper's probability of preemption beside the share of requests evicted, and who they are."""
    mean = table.groupby(["workload", "pool", "quantile"], as_index=False).mean(numeric_only=True)
    first = mean.iloc[0]
    with style():
        figure, axes = canvas(1, 2, height=3.5)
        share, who = axes[0]
        labels = []
        for (workload, pool), own in mean.groupby(["workload", "pool"], sort=False):
            color, line = WORKLOAD_COLORS[workload], "-" if pool == first["pool"] else "--"
            share.plot(own["quantile"], own["preempted"].clip(lower=1e-4), line, marker="o", color=color)
            labels.append((max(own["preempted"].iloc[-1], 1e-4), f"{workload} {_thousands(pool)}", color))
            who.plot(
                own["quantile"], own["output_evicted"] / own["output_all"], line, marker="o", color=color
            )
        q = np.sort(mean["quantile"].unique())
        share.plot(q, 1 - q, color=INK, linewidth=2)
        share.text(q[0], 1.15 * (1 - q[0]), r"$P(\xi > \eta)$, the paper's", color=INK, va="bottom")
        share.set(
            xlabel=r"reservation $\eta$, quantile of the lengths",
            ylabel="share of requests evicted",
            ylim=(8e-5, 1),
        )
        plain_log(share, "y", (0.0001, 0.001, 0.01, 0.1, 1))
        share.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1], ["none", "0.1 %", "1 %", "10 %", "100 %"])
        label_ends(share, labels)
        who.axhline(1, color=INK, linewidth=1)
        who.set(
            xlabel=r"reservation $\eta$, quantile of the lengths",
            ylabel="mean output of the evicted / of all",
            ylim=(0, None),
        )
        title(
            figure,
            "Who is evicted is not who outgrows a reservation",
            "as many requests run as the reservation would allow, with blocks on demand; mean of the seeds",
        )
    return figure


def fig_overflow(table: pd.DataFrame) -> Figure:
    """Preemptions per request over the headroom in units of 1 / theta: counted, and by the law."""
    names = list(pd.unique(table["workload"]))
    with style():
        rows = -(-len(names) // 4)
        figure, axes = canvas(rows, 4, height=2.3 * rows + 0.5, sharex=True, sharey=True)
        pools = sorted(table["pool"].unique())
        colors = dict(zip(pools, CYCLE, strict=False))
        for ax, name in zip(axes.ravel(), names, strict=False):
            own = table[table["workload"] == name]
            law = own.groupby("multiple")["predicted"].first()
            ax.plot(law.index, law, color=INK, linewidth=1.2)
            counted = own[own["preemptions"] > 0]
            sns.lineplot(
                counted, x="multiple", y="preemptions", hue="pool", palette=colors, ax=ax, linestyle="",
                marker="o", err_style="bars", errorbar=("ci", 95), seed=0, legend=False, markeredgewidth=0,
            )  # fmt: skip
            ax.set(xlabel="", ylabel="", title=name)
            ax.text(0.97, 0.95, rf"1/$\theta$ = {own['per_theta'].iloc[0]:,.0f}", transform=ax.transAxes,
                    ha="right", va="top", fontsize=8)  # fmt: skip
            ax.set_yscale("log")
            ax.set_ylim(1e-3, 3)
        for ax in axes.ravel()[len(names) :]:
            ax.set_axis_off()
        for ax in axes[:, 0]:
            plain_log(ax, "y", (0.001, 0.01, 0.1, 1))
        handles = [axes[0, 0].plot([], [], "o", color=c, label=_thousands(p))[0] for p, c in colors.items()]
        figure.legend(handles=handles, loc="outside right upper", title="pool, tokens")
        figure.supylabel("preemptions per request", fontsize=9)
        title(
            figure,
            r"The exponential law, $C\,e^{-\theta u}$ (lines), and what saturated pools counted (dots)",
            r"horizontal: headroom u in units of 1/$\theta$ tokens; bars: 95 % over the seeds",
        )
    return figure


def fig_newsvendor(table: pd.DataFrame) -> Figure:
    """The two costs of a headroom, their sum, u*, and the throughput lost as measured."""
    cells = list(table.groupby(["workload", "pool"], sort=False))
    columns = table["pool"].nunique()
    with style():
        rows = -(-len(cells) // columns)
        figure, axes = canvas(rows, columns, height=2.1 * rows + 0.6)
        for ax, ((workload, pool), own) in zip(axes.ravel(), cells, strict=True):
            x = own["headroom"] / pool
            for column, color, label in (
                ("idle_pct", CYCLE[0], "idle"),
                ("recomputed_pct", CYCLE[1], "recomputed"),
                ("sum_pct", INK, "both"),
            ):
                ax.plot(x, own[column], color=color, label=label, linewidth=1.8 if label == "both" else 1.2)
            floor = own["sum_pct"].min()
            ax.errorbar(x, own["lost_pct"] + floor, own["lost_sem_pct"], fmt="o", color=CYCLE[2],
                        markersize=3.5, linewidth=0.8, label="measured + smallest sum")  # fmt: skip
            ax.axvline(own["u_star"].iloc[0] / pool, color=CYCLE[3], linestyle="--", label="u*")
            ax.set_title(f"{workload}, pool {_thousands(pool)}")
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
            ax.set(
                xlabel="",
                ylabel="",
                ylim=(0, min(3 * own["sum_pct"].iloc[0] + 1, own["sum_pct"].max() * 1.1)),
            )
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
        figure.supylabel("throughput lost, %", fontsize=9)
        title(
            figure,
            "The newsvendor of the pool: room kept idle against work done twice",
            "horizontal: headroom as a share of the pool; bars: standard error over the seeds",
        )
    return figure


def fig_frontier(table: pd.DataFrame, rules: Sequence[str]) -> Figure:
    """Goodput over the realised load, some rules, by workload and pool."""
    workloads, pools = list(pd.unique(table["workload"])), sorted(table["pool"].unique())
    own = table[table["rule"].isin(rules)]
    with style():
        figure, axes = canvas(
            len(workloads), len(pools), height=1.9 * len(workloads) + 0.7, sharey="row", sharex=True
        )
        for row, workload in zip(axes, workloads, strict=True):
            for ax, pool in zip(row, pools, strict=True):
                cell = own[(own["workload"] == workload) & (own["pool"] == pool)]
                cell = cell.assign(at=cell.groupby("load")["realised"].transform("mean"))
                sns.lineplot(
                    cell, x="at", y="goodput", hue="rule", hue_order=list(rules), ax=ax, errorbar=None,
                    palette={rule: RULE_COLORS.get(rule, GREY) for rule in rules}, marker="o",
                    markeredgewidth=0, markersize=3.5, linewidth=1.3, legend=ax is axes[0, 0],
                )  # fmt: skip
                ax.set(xlabel="", ylabel="", title=f"{workload}, pool {_thousands(pool)}", ylim=(0, 1.03))
        handles, labels = axes[0, 0].get_legend_handles_labels()
        axes[0, 0].get_legend().remove()
        figure.legend(handles, labels, loc="outside right upper")
        figure.supylabel("goodput, share of requests", fontsize=9)
        title(
            figure,
            "Goodput by rule: first token within 5 s and 100 ms per token",
            "horizontal: load as realised, mean of the seeds",
        )
    return figure


def fig_gains(gains: pd.DataFrame) -> Figure:
    """Goodput of each rule less the default's, points, mean over the loads."""
    clear = (gains["gain_low"] > 0) | (gains["gain_high"] < 0)
    frame = gains.assign(points=100 * gains["gain"], clear=clear)
    key = ["workload", "pool"]
    values = frame.pivot_table(index="rule", columns=key, values="points", aggfunc="mean")
    marks = frame.pivot_table(index="rule", columns=key, values="clear", aggfunc=lambda x: x.mean() >= 0.5)
    order = values.mean(axis=1).sort_values().index
    flat = [f"{w}\n{_thousands(p)}" for w, p in values.columns]
    values, marks = (t.loc[order].set_axis(flat, axis=1) for t in (values, marks.astype(bool)))
    with style():
        figure, axes = canvas(1, 1, height=0.24 * len(order) + 1.2)
        norm = TwoSlopeNorm(0, -25, 25)
        heat(axes[0, 0], values, lambda x: f"{x:+.1f}", boxed=marks, norm=norm, cmap="PuOr", size=7)
        title(
            figure,
            "Goodput less the default's, points, mean over the loads",
            "columns: workload, pool in tokens; boxed: the 95 % interval excludes 0 at half of the loads",
        )
    return figure


def fig_stalls(table: pd.DataFrame, load: float) -> Figure:
    """The 99th percentile of the longest gap between two tokens of a request, seconds, at one load."""
    own = table[table["load"] == load]
    values = own.pivot_table(index="rule", columns=["workload", "pool"], values="worst_gap_p99_s")
    order = np.log(values).mean(axis=1).sort_values(ascending=False).index
    flat = [f"{w}\n{_thousands(p)}" for w, p in values.columns]
    values = values.loc[order].set_axis(flat, axis=1)
    with style():
        figure, axes = canvas(1, 1, height=0.24 * len(order) + 1.2)
        heat(axes[0, 0], values, lambda x: f"{x:.3g}", norm=LogNorm(0.3, 300), cmap="YlOrBr", size=7)
        title(
            figure,
            f"Stalls: p99 of a request's longest gap between tokens, s, at load {load:g}",
            "mean of the seeds",
        )
    return figure


def fig_ratios(table: pd.DataFrame) -> Figure:
    """The cost ratio that step times imply, and the watermark that follows, by group and workload."""
    own = table.assign(
        group=table["model"].str.replace("Meta-", "")
        + "\n"
        + table["gpu"]
        + " TP"
        + table["tensor"].astype(str),
        cache=np.where(table["prefix_cache"], "prefix cache", "none"),
        percent=100 * table["watermark"],
    )
    with style():
        figure, axes = canvas(1, 2, height=3.4, sharey=True)
        for ax, column in zip(axes[0], ("rho", "percent"), strict=True):
            sns.stripplot(
                own, y="group", x=column, hue="workload", palette=WORKLOAD_COLORS, ax=ax, jitter=False,
                dodge=True, size=5, legend=column == "rho", marker="o",
            )  # fmt: skip
            ax.set_ylabel("")
            ax.grid(axis="y", visible=False)
        plain_log(axes[0, 0], "x")
        axes[0, 0].set_xlabel(r"$\rho = \theta M K_0 / e$")
        axes[0, 1].set_xlabel("u*, % of the pool (--watermark)")
        axes[0, 0].legend(loc="lower left", title="")
        title(
            figure,
            "What ρ is in an engine: not a price, but the step times, the pool and the lengths",
            "of each pair the larger ρ is without prefix cache",
        )
    return figure


def fig_bursts(table: pd.DataFrame) -> Figure:
    """The public report's frontier beside ours: preemptions, and the longest gap between tokens."""
    marks = table[table["watermark"] >= 0]
    rule = table[table["watermark"] < 0]
    with style():
        figure, axes = canvas(1, 2, height=3.2)
        for ax, column in zip(axes[0], ("preemptions", "throughput"), strict=True):
            sns.lineplot(
                marks, x="watermark", y=column, ax=ax, color=CYCLE[0], marker="o", errorbar=("sd", 1),
                err_style="bars", markeredgewidth=0, label="simulated",
            )  # fmt: skip
            ax.axhline(rule[column].mean(), color=CYCLE[2], label="burst rule, simulated")
            ax.set_ylim(0, None)
            ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            ax.set_xlabel("watermark, share of the pool")
        reported = marks.groupby("watermark")["reported"].first()
        axes[0, 0].plot(
            reported.index, reported, "D", color=CYCLE[1], markersize=5, label="reported (vllm#44594)"
        )
        axes[0, 0].legend()
        axes[0, 1].legend().remove()
        axes[0, 0].set_ylabel("preemptions")
        axes[0, 1].set_ylabel("requests/s")
        title(
            figure,
            "A burst of 450 alike requests: no headroom is enough, the burst rule is",
            "bars: 1 sd over the seeds",
        )
    return figure


def fig_shift(table: pd.DataFrame, measures: Mapping[str, str], rules: Sequence[str]) -> Figure:
    """How rules fare as outputs grow: one panel per measure, one line per rule (mean of the seeds)."""
    own = table[table["rule"].isin(rules)]
    with style():
        figure, axes = canvas(1, len(measures), height=3.3)
        for ax, (column, label) in zip(axes[0], measures.items(), strict=True):
            ends = []
            for at, rule in enumerate(rules):
                line = own[own["rule"] == rule].groupby("scale")[column].mean()
                color = RULE_COLORS.get(rule, CYCLE[at % len(CYCLE)])
                ax.plot(line.index, line, "o-", color=color, markersize=3.5)
                ends.append((float(line.iloc[-1]), rule, color))
            ax.set(xlabel="factor on the outputs", title=label)
            ax.set_ylim(0, None)
            label_ends(ax, ends)
        title(figure, "Outputs grow: rules that were set before", "mean of the seeds")
    return figure
