"""Figures of the sensitivity, cost-latency and ablation notebooks, each drawn from one table."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure

from kvcache.paper.plots import (
    CYCLE,
    GREY,
    INK,
    LINE_STYLES,
    canvas,
    color_of,
    heat,
    label_ends,
    plain_log,
    style,
    title,
)
from kvcache.paper.published import published

__all__ = [
    "fig3a",
    "fig3b",
    "fig3b_limits",
    "fig4",
    "fig6",
    "fig6_regimes",
    "fig_ablation",
    "fig_bounded",
    "fig_cost_rho",
    "fig_decoded",
    "fig_engines",
    "fig_frontier",
    "fig_late",
    "fig_latency_map",
    "fig_lmax",
    "fig_partitions",
    "fig_prefix",
    "fig_table4",
]

TERMS = ("reservation", "slo", "rejection", "gpu")
TERM_LABELS = {
    "reservation": "preemption and waste",
    "slo": "tardiness",
    "rejection": "rejection",
    "gpu": "GPUs",
}
CLASS_COLORS = {"chat": CYCLE[0], "code": CYCLE[1], "conversation": CYCLE[2]}
SET_COLORS = {
    "W-infinity": "#8C564B",
    "CVaR": "#17A2A2",
    "Contamination": "#B8860B",
    "Scale shift": "#6A3D9A",
    "vLLM": "#9A9A9A",
    "SGLang": "#BDB76B",
    "TensorRT-LLM": "#444444",
    "LightLLM": "#CC79A7",
}


def _color(policy: str, position: int = 0) -> str:
    return SET_COLORS.get(policy) or color_of(policy, position)


def _palette(column: str, table: pd.DataFrame, first: int = 0) -> dict[str, str]:
    return {name: _color(name, first + at) for at, name in enumerate(pd.unique(table[column]))}


def _by(column: str, table: pd.DataFrame, first: int = 0) -> dict[str, object]:
    """One dotted line per value of a column in its own colour, for `seaborn.lineplot`."""
    look = {"marker": "o", "markeredgewidth": 0, "legend": False}
    return {"hue": column, "palette": _palette(column, table, first), **look}


def _figures(value: float) -> str:
    """Two significant figures below 100, whole numbers above."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


# ---- sensitivity --------------------------------------------------------------------------------


def fig3a(table: pd.DataFrame, fitted_to: float) -> Figure:
    """Fig. 3(a): cost by term over the load, the line through the loads below saturation, and what gives.

    Parameters
    ----------
    table : of `experiments.comparison.load_scaling`.
    fitted_to : largest load of the line.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.5, width_ratios=(1.25, 1))
        cost, gives = axes[0]
        parts = [table[f"{term}_term"] / 1000 for term in TERMS]
        colors = (CYCLE[5], CYCLE[4], CYCLE[1], CYCLE[7])
        cost.stackplot(table["load"], *parts, colors=colors, alpha=0.85, linewidth=0)
        linear = table[table["load"] <= fitted_to]
        slope = float(linear["load"] @ linear["objective"] / (linear["load"] @ linear["load"])) / 1000
        ends = np.array([0, table["load"].max()])
        cost.plot(ends, slope * ends, color=INK, linestyle="--", linewidth=1.2)
        cost.set(xlabel="load, multiples of capacity", ylabel="cost per second, thousands", xlim=(0, ends[1]))
        last = table.iloc[-1]
        at, labels = 0.0, []
        for term, color in zip(TERMS[:3], colors, strict=False):
            height = last[f"{term}_term"] / 1000
            labels.append((at + height / 2, TERM_LABELS[term], color))
            at += height
        label_ends(cost, [*labels, (slope * ends[1], "line below 0.5", INK)])
        for c, color in CLASS_COLORS.items():
            gives.plot(table["load"], table[f"quantile_{c}"], color=color)
            gives.plot(table["load"], table[f"admitted_{c}"], color=color, linestyle=":")
        gives.set(xlabel="load, multiples of capacity", ylabel="share", xlim=(0, ends[1]), ylim=(0, 1.03))
        label_ends(gives, [(last[f"quantile_{c}"], c, color) for c, color in CLASS_COLORS.items()])
        gives.text(0.02, 0.05, "solid: quantile reserved\ndotted: share admitted", transform=gives.transAxes)
        title(
            figure,
            "Fig. 3(a)  Cost over load: linear; then reservations shrink; only then requests are rejected",
        )
    return figure


def fig3b(table: pd.DataFrame) -> Figure:
    """Fig. 3(b): premium over the radius, solved (dots) and by the closed form (lines), by rho and unit.

    Parameters
    ----------
    table : of `experiments.comparison.premium`.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.6, sharey=True)
        for ax, (unit, rows) in zip(axes[0], table.groupby("unit", sort=False), strict=True):
            labels = []
            for (rho, own), color in zip(rows.groupby("rho"), CYCLE, strict=False):
                ax.plot(own["radius"], 100 * own["predicted"], color=color)
                ax.plot(own["radius"], 100 * own["premium"], "o", color=color, markersize=4)
                jumped = own[own["classes_jumped"] > 0]
                ax.plot(jumped["radius"], 100 * jumped["premium"], "o", color="white", markersize=2, zorder=4)
                labels.append((100 * own["predicted"].iloc[-1], f"ρ = {rho:g}", color))
            plain_log(ax, "x")
            plain_log(ax, "y", (0.1, 1, 10, 100))
            ax.plot([0.1, 0.2], [0.5, 0.5], color=INK, linewidth=3, solid_capstyle="butt")
            ax.plot([0.5], [1.3], marker="v", color=INK, markersize=7, linestyle="none")
            ax.set_xlabel(
                f"Wasserstein radius ε, {'tokens' if unit == 'tokens' else 'multiples of the mean'}"
            )
            label_ends(ax, labels)
        axes[0, 0].set_ylabel("premium on the joint cost, %")
        title(
            figure,
            "Fig. 3(b)  The premium of robustness in both units of ε",
            "dots: solved, hollow where a class has jumped; lines: closed form; black: the paper's bounds",
        )
    return figure


def fig3b_limits(table: pd.DataFrame) -> Figure:
    """Where the premium stays below 1.3 % at epsilon 0.5: by trace, rho and unit.

    Parameters
    ----------
    table : of `experiments.comparison.premium_limits`.
    """
    with style():
        figure, axes = canvas(1, 2, height=2.6, sharey=True)
        rows = table[table["radius"] == 0.5]
        norm = LogNorm(0.13, 130)
        for ax, (unit, own) in zip(axes[0], rows.groupby("unit", sort=False), strict=True):
            grid = 100 * own.pivot(index="trace", columns="rho", values="premium")
            heat(ax, grid, _figures, norm=norm, cmap="PuOr_r", boxed=grid < 1.3)
            ax.set(
                xlabel="cost ratio ρ", title=f"ε = 0.5 {'tokens' if unit == 'tokens' else 'x mean output'}"
            )
        title(
            figure,
            "Premium on the reservation cost, %: below 1.3 % (boxed) only if ε is in tokens",
        )
    return figure


def fig4(table: pd.DataFrame) -> Figure:
    """Fig. 4: reservation quantile, cost and P99 latency as one weight is multiplied by a factor.

    Parameters
    ----------
    table : of `experiments.comparison.weights`.
    """
    measures = (
        ("quantile", "quantile reserved"),
        ("objective", "cost over default"),
        ("p99_s", "P99 over default"),
    )
    with style():
        figure, axes = canvas(1, 3, height=3.2)
        for ax, (column, label) in zip(axes[0], measures, strict=True):
            ends = []
            for (weight, rows), color in zip(table.groupby("weight", sort=False), CYCLE, strict=False):
                rows = rows.sort_values("multiple")
                if column == "quantile":
                    values = rows[[f"quantile_{c}" for c in CLASS_COLORS]].where(
                        rows[[f"admitted_{c}" for c in CLASS_COLORS]].to_numpy() > 0
                    )
                    values = values.min(axis=1)
                else:
                    values = rows[column] / rows.loc[rows["multiple"] == 1, column].iloc[0]
                ax.plot(rows["multiple"], values, "o-", color=color, markersize=3.5)
                ends.append((float(values.iloc[-1]), weight.replace("kappa", "κ"), color))
            plain_log(ax, "x", (0.02, 0.1, 0.2, 1, 5))
            ax.axvspan(0.2, 5, color=GREY, alpha=0.12, linewidth=0)
            ax.set(xlabel="factor on the default", title=label, ylim=(0, 1.15))
            label_ends(ax, ends)
        title(
            figure,
            "Fig. 4  The other weights within 5x of their defaults (shaded), and c_rej further down",
        )
    return figure


def fig_lmax(table: pd.DataFrame) -> Figure:
    """What L_max decides: the critical radius over the radius, and the reservation, by class and rho.

    Parameters
    ----------
    table : of `experiments.comparison.support_bound`.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.4)
        critical, reserved = axes[0]
        labels = []
        for (rho, rows), line in zip(table.groupby("rho"), LINE_STYLES, strict=False):
            for c, color in CLASS_COLORS.items():
                own = rows[rows["class"] == c]
                ratio = own["critical_radius"] / own["radius"]
                critical.plot(own["upper_multiple"], ratio, color=color, linestyle=line)
                if rho > 2:
                    over = own["eta"] / own["fractile"]
                    reserved.plot(own["upper_multiple"], over, color=color, linestyle=line)
                    if c == "chat":
                        labels.append((float(over.max()), f"ρ = {rho}", INK))
        critical.axhline(1, color=INK, linewidth=1)
        plain_log(critical, "x", (1, 2, 4, 8))
        plain_log(critical, "y", (0.1, 1, 10, 100))
        plain_log(reserved, "x", (1, 2, 4, 8))
        critical.set(xlabel="L_max over the longest output", ylabel="critical radius S over ε = 0.15 mean")
        for y, what, side in ((1.08, "above: the fractile", "bottom"), (0.92, "below: the jump", "top")):
            critical.text(8.4, y, what, fontsize=7.5, ha="right", va=side, color=INK)
        reserved.set(xlabel="L_max over the longest output", ylabel="reservation over the fractile")
        for ax in (critical, reserved):
            for (c, color), y in zip(CLASS_COLORS.items(), (0.97, 0.91, 0.85), strict=True):
                ax.text(0.02, y, c, color=color, transform=ax.transAxes, va="top", fontsize=8.5)
        critical.text(0.98, 0.03, "ρ = 2 solid, 10 dashed, 100 dash-dotted", transform=critical.transAxes,
                      ha="right", fontsize=8, color=GREY)  # fmt: skip
        title(
            figure,
            "L_max decides whether the robust reservation is the fractile or a jump",
        )
    return figure


# ---- cost and latency ---------------------------------------------------------------------------


def fig_bounded(table: pd.DataFrame) -> Figure:
    """Each method's largest cost over the fractile's among the three rho of Table IV, by trace.

    Parameters
    ----------
    table : of `experiments.comparison.bounded_map`.
    """
    with style():
        figure, axes = canvas(1, 1, height=3.2)
        grid = table.pivot(index="trace", columns="method", values="largest").sort_index(axis=1)
        order = grid.median().sort_values().index
        heat(axes[0, 0], grid[order], _figures, norm=LogNorm(0.25, 16), cmap="PuOr_r")
        axes[0, 0].tick_params(axis="x", rotation=35)
        title(figure, "Largest cost over the fractile's at ρ = 2, 10 and 100, one class, exact expectations")
    return figure


def fig_decoded(table: pd.DataFrame) -> Figure:
    """The published Table IV: each fixed policy is a line in rho, and DRO at rho 100 is Max.

    Parameters
    ----------
    table : of `experiments.comparison.decoded_table4`.
    """
    with style():
        figure, axes = canvas(1, 1, height=3.5)
        ax = axes[0, 0]
        rho = np.geomspace(2, 100, 60)
        labels = []
        for row in table.itertuples():
            color = _color(row.method)
            if row.method == "DRO":
                continue
            line = row.waste + rho * row.overflow
            ax.plot(rho, line, color=color, linewidth=1.2)
            labels.append((float(line[-1]), row.method, color))
        for entry in published("table_4")["rows"]:
            dro = entry["method"] == "DRO"
            ax.plot(
                (2, 10, 100),
                entry["cost"],
                "D" if dro else "o",
                color=_color(entry["method"]),
                markersize=7 if dro else 4,
                zorder=4 if dro else 3,
            )
        plain_log(ax, "x", (2, 5, 10, 20, 50, 100))
        plain_log(ax, "y", (1000, 2000, 5000, 10000, 20000, 40000))
        ax.set(xlabel="cost ratio ρ", ylabel="published cost")
        label_ends(ax, labels)
        ax.annotate("DRO", (2, 1270), (2.1, 1000), color=_color("DRO"), fontweight="bold")
        title(
            figure,
            "Table IV decoded: a fixed policy costs waste + ρ x overflow; DRO (diamonds) ends on Max",
            "lines through the costs at ρ 2 and 100; the dots at ρ 10 are predicted to 1 part in 10,000",
        )
    return figure


def fig_table4(table: pd.DataFrame) -> Figure:
    """Table IV beside the published one: cost over DRO's at three rho, P99 latency over DRO's at rho 10.

    Parameters
    ----------
    table : of `experiments.comparison.table4`.
    """
    with style():
        figure, axes = canvas(1, 4, height=3.3, sharey=True)
        rows = table[table["paper_p99_s"].notna()].iloc[::-1]
        y = np.arange(len(rows))
        dro = table[table["method"] == "DRO"].iloc[0]
        columns = [(f"paper_over_dro_rho{r}", f"over_dro_rho{r}", f"cost, ρ = {r}") for r in (2, 10, 100)]
        for ax, (theirs, ours, label) in zip(axes[0], columns, strict=False):
            _dumbbell(ax, y, rows[theirs], rows[ours])
            ax.set_title(label)
        _dumbbell(axes[0, 3], y, rows["paper_p99_s"] / dro["paper_p99_s"], rows["p99_s"] / dro["p99_s"])
        axes[0, 3].set_title("P99 latency, ρ = 10")
        axes[0, 0].set_yticks(y, rows["method"])
        for ax in axes[0]:
            ax.axvline(1, color=GREY, linewidth=1)
            ax.set_xlabel("over DRO's")
        title(
            figure,
            "Table IV: every method relative to DRO, published and replayed here",
            "open circles: paper; orange: here",
        )
    return figure


def _dumbbell(ax: Axes, y: np.ndarray, theirs: pd.Series, ours: pd.Series) -> None:
    for at, a, b in zip(y, theirs, ours, strict=True):
        ax.plot([a, b], [at, at], color=GREY, linewidth=1, zorder=1)
    ax.plot(theirs, y, "o", markerfacecolor="white", color=INK, markersize=5.5)
    ax.plot(ours, y, "o", color=CYCLE[1], markersize=5)
    ax.set_xscale("log")
    high = max(theirs.max(), ours.max())
    plain_log(ax, "x", [t for t in (0.5, 1, 2, 5, 10, 20) if t <= high * 1.3 and t >= 0.4])


def fig_cost_rho(table: pd.DataFrame) -> Figure:
    """Cost against rho of every policy, over the cheapest at each rho; rejection forbidden, and priced.

    Parameters
    ----------
    table : of `experiments.comparison.cost_over_rho`.
    """
    panels = {
        "forced": ("reservation_cost", "nothing rejected: reservation cost"),
        "optimised": ("cost_per_arrival", "c_rej = 5,000: whole cost per arrival"),
    }
    with style():
        figure, axes = canvas(1, 2, height=4.2, sharey=True)
        for ax, (admission, (column, label)) in zip(axes[0], panels.items(), strict=True):
            rows = table[(table["admission"] == admission) & (table["method"] != "TensorRT-LLM")]
            grid = rows.pivot(index="rho", columns="method", values=column)
            over = grid.div(grid.min(axis=1), axis=0)
            labels = []
            for method in over:
                bold = method in ("DRO", "SAA")
                ax.plot(
                    over.index,
                    over[method],
                    color=_color(method),
                    linewidth=2.2 if bold else 1.1,
                    linestyle="--" if method == "SAA" else "-",
                    zorder=3 if bold else 2,
                )
                labels.append((float(over[method].iloc[-1]), method, _color(method)))
            plain_log(ax, "x", (2, 5, 10, 20, 50, 100))
            plain_log(ax, "y", (1, 2, 5, 10, 20, 50))
            ax.set(xlabel="cost ratio ρ", title=label)
            label_ends(ax, labels, size=7.5)
        axes[0, 0].set_ylabel("cost over the cheapest policy")
        title(figure, "Cost against ρ, replayed")
    return figure


def fig_frontier(table: pd.DataFrame, rho: float = 10) -> Figure:
    """Cost against P99 latency of every policy at one rho, and the policies that no other beats on both.

    Parameters
    ----------
    table : of `experiments.comparison.cost_over_rho`; rejection forbidden.
    """
    with style():
        figure, axes = canvas(1, 1, height=3.6, width=6.5)
        ax = axes[0, 0]
        rows = table[(table["admission"] == "forced") & (table["rho"] == rho)]
        rows = rows[rows["rejection"] < 1e-3].sort_values("reservation_cost")
        best = rows[rows["p99_s"] <= rows["p99_s"].cummin()]
        ax.step(best["reservation_cost"], best["p99_s"], where="post", color=GREY, linewidth=1)
        for group in _clusters(np.log(rows[["reservation_cost", "p99_s"]].to_numpy()), 0.08):
            near = rows.iloc[group]
            for row in near.itertuples():
                ax.plot(row.reservation_cost, row.p99_s, "o", color=_color(row.method))
            lone = len(near) == 1
            ax.annotate(
                near["method"].iloc[0] if lone else textwrap.fill(", ".join(near["method"]), 26),
                (
                    near["reservation_cost"].min() if not lone else near["reservation_cost"].iloc[0],
                    near["p99_s"].min(),
                ),
                xytext=(7, 0) if lone else (-4, -14),
                textcoords="offset points",
                fontsize=8,
                va="center" if lone else "top",
                color=_color(near["method"].iloc[0]) if lone else INK,
            )
        plain_log(ax, "x", (300, 500, 1000, 2000))
        plain_log(ax, "y", (30, 40, 60, 80, 100))
        ax.set(xlabel="reservation cost per arrival", ylabel="P99 latency, s")
        title(figure, f"Cost and tail latency at ρ = {rho:g}; the line joins what nothing beats on both")
    return figure


def _clusters(points: np.ndarray, reach: float) -> list[list[int]]:
    """Positions of points that hang together by steps of at most ``reach``, in order of their first."""
    free, groups = list(range(len(points))), []
    while free:
        group, edge = [], [free.pop(0)]
        while edge:
            at = edge.pop()
            group.append(at)
            near = [j for j in free if np.hypot(*(points[j] - points[at])) <= reach]
            free = [j for j in free if j not in near]
            edge += near
        groups.append(sorted(group))
    return groups


def fig_late(late: pd.DataFrame, matched: pd.DataFrame) -> Figure:
    """Late requests over the deadline; and, where the first row is as late as published, all rows beside it.

    Parameters
    ----------
    late, matched : of `experiments.comparison.late_requests` and `experiments.comparison.late_at_paper`.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.3, width_ratios=(3, 2))
        curve, bars = axes[0]
        names, at = list(matched["row"]), matched["deadline"].iloc[0]
        colors = {name: _color(name, position) for position, name in enumerate(names)}
        means = 100 * late.groupby(["row", "deadline"])["slo_violation"].mean().unstack("row")
        for name in names:
            curve.plot(means.index, means[name], color=colors[name])
        curve.axvline(at, color=GREY, linewidth=1, linestyle="--")
        curve.text(at, 101, f"x {at:.1f}", color=GREY, ha="center", va="bottom", fontsize=8)
        plain_log(curve, "x", (1, 2, 4, 8, 16))
        curve.set(xlabel="deadlines, multiples of the problem's", ylabel="late requests, %", ylim=(0, 100))
        rank = np.arange(len(names))[::-1]
        for y, row in zip(rank, matched.itertuples(), strict=True):
            bars.plot([row.late_pct, row.paper_late_pct], [y, y], color=GREY, linewidth=0.8)
            bars.plot(row.late_pct, y, "o", color=colors[row.row])
            bars.plot(row.paper_late_pct, y, "D", markerfacecolor="white", markeredgecolor=colors[row.row])
        bars.set_yticks(rank, names)
        for label, name in zip(bars.get_yticklabels(), names, strict=True):
            label.set_color(colors[name])
        bars.set(xlabel=f"late, % (o here at x {at:.1f}, ◇ published)", xlim=(-3, None))
        title(figure, f"Late requests if deadlines were longer, set so that {names[0]} is late as published")
    return figure


def fig_latency_map(table: pd.DataFrame, method: str, traces: Sequence[str]) -> Figure:
    """P99 latency of a method over DRO's, by load and by what a preemption costs in service time.

    Parameters
    ----------
    table : of `experiments.comparison.latency_map`.
    method : a row of Table IV.
    traces : panels.
    """
    with style():
        figure, axes = canvas(1, len(traces), height=2.7, sharey=True)
        norm = LogNorm(0.4, 2.5)
        for ax, trace in zip(axes[0], traces, strict=True):
            rows = table[(table["trace"] == trace) & (table["method"] == method)]
            grid = rows.pivot(index="factor", columns="load", values="p99_over_dro")
            heat(ax, grid, _figures, norm=norm, cmap="PuOr_r")
            ax.set(xlabel="load", title=f"lengths: {trace}")
        axes[0, 0].set_ylabel("preemption factor")
        title(
            figure,
            f"P99 latency of {method} over DRO's at ρ = 10: above 1 (orange) as in the paper",
        )
    return figure


def fig_engines(table: pd.DataFrame) -> Figure:
    """The engines request by request: throughput, tail latency, waits against equation 7.

    Parameters
    ----------
    table : of `experiments.comparison.engines`.
    """
    with style():
        figure, axes = canvas(1, 3, height=3.3)
        for ax, (column, label) in zip(
            axes[0], (("throughput", "throughput, requests/s"), ("p99_s", "P99 latency, s")), strict=False
        ):
            colors = _palette("engine", table)
            sns.lineplot(table, x="load", y=column, **_by("engine", table), ax=ax)
            last = table.drop_duplicates("engine", keep="last").set_index("engine")[column]
            labels = [(y, engine, colors[engine]) for engine, y in last.items()]
            ax.set(xlabel="load, multiples of capacity", ylabel="", title=label)
            if column == "p99_s":
                plain_log(ax, "y", (20, 30, 50, 100, 150))
            label_ends(ax, labels, size=7.5)
        waits, labels = axes[0, 2], []
        for engine in ("DRO", "P99", "TensorRT-LLM"):
            rows = table[table["engine"] == engine]
            predicted = rows["equation7_wait_s"].replace(np.inf, np.nan)
            waits.plot(rows["load"], predicted, "--", color=_color(engine))
            waits.plot(rows["load"], rows["mean_queued_s"], "o-", color=_color(engine), markersize=3)
            labels.append((float(rows["mean_queued_s"].iloc[-1]), engine, _color(engine)))
        plain_log(waits, "y", (0.1, 1, 10, 100))
        waits.set(xlabel="load, multiples of capacity", title="mean wait, s (dashed: equation 7)")
        label_ends(waits, labels, size=7.5)
        title(figure, "The engines' own rules on one TP4xPP2 group, request by request")
    return figure


# ---- ablation -----------------------------------------------------------------------------------


def fig_ablation(table: pd.DataFrame) -> Figure:
    """Table V: each variant over the full model, mean and range over the seeds, published and here.

    Parameters
    ----------
    table : of `experiments.comparison.ablation`.
    """
    measures = {
        "reservation_cost": ("cost", "cost"),
        "p99_s": ("p99_s", "P99 latency"),
        "goodput": ("goodput", "goodput"),
        "slo_violation": ("slo_viol_pct", "SLO violations"),
    }
    paper = {row["variant"].replace("BCD-DRO", "full"): row for row in published("table_5")["rows"]}
    with style():
        figure, axes = canvas(1, 4, height=2.7, sharey=True)
        names = list(dict.fromkeys(table["variant"]))[::-1]
        loads = sorted(table["load"].unique())
        for ax, (column, (key, label)) in zip(axes[0], measures.items(), strict=True):
            for y, name in enumerate(names):
                theirs = paper[name][key][0] / paper["full"][key][0]
                ax.plot(theirs, y, "o", markerfacecolor="white", color=INK, markersize=6)
                for load, color, below in zip(loads, (CYCLE[1], CYCLE[0]), (0.12, -0.12), strict=True):
                    rows = table[table["load"] == load].pivot(index="seed", columns="variant", values=column)
                    ratio = (rows[name] / rows["full"]).replace(np.inf, np.nan).dropna()
                    if ratio.empty:
                        continue
                    ax.plot([ratio.min(), ratio.max()], [y + below] * 2, color=color, linewidth=3, alpha=0.4)
                    ax.plot(ratio.mean(), y + below, "o", color=color, markersize=4)
            plain_log(ax, "x", (0.1, 1, 10))
            ax.axvline(1, color=GREY, linewidth=1)
            ax.set(title=label, xlabel="over the full model")
        axes[0, 0].set_yticks(range(len(names)), names)
        title(
            figure,
            "Table V: what leaving one component out does under lengths x 2.5",
            f"circles: paper; orange: load {loads[0]:g}, blue: load {loads[1]:g}, bars: range over the seeds",
        )
    return figure


def fig6(table: pd.DataFrame) -> Figure:
    """Fig. 6: P99 latency and cost as lengths grow, over the seeds; the paper's ends as open circles.

    Parameters
    ----------
    table : of `experiments.comparison.shifts`.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.4)
        for ax, (column, label) in zip(
            axes[0],
            (("p99_s", "P99 latency over DRO's at 1x"), ("reservation_cost", "reservation cost per arrival")),
            strict=True,
        ):
            scale = 1.0
            if column == "p99_s":
                scale = table[(table["policy"] == "DRO") & (table["shift"] == 1)][column].mean()
                ends = published("figure_6")
                for policy in ("DRO", "SAA"):
                    theirs = [ends[policy][k] / ends["DRO"]["1.0"] for k in ("1.0", "3.0")]
                    ax.plot([1, 3], theirs, "o:", markerfacecolor="white", color=_color(policy), markersize=7)
            shown = table.assign(measure=table[column] / scale)
            sns.lineplot(
                shown, x="shift", y="measure", errorbar=("pi", 100), **_by("policy", table, 3), ax=ax
            )
            ax.set(xlabel="length scale", ylabel="", title=label, ylim=(0, None))
            last = shown[shown["shift"] == shown["shift"].max()].groupby("policy")["measure"].mean()
            label_ends(ax, [(y, policy, _palette("policy", table, 3)[policy]) for policy, y in last.items()])
        title(figure, "Fig. 6  Under growing shift (bands: seeds; ○: the paper's DRO and SAA)")
    return figure


def fig6_regimes(table: pd.DataFrame) -> Figure:
    """Where dropping robustness costs 85 %: SAA's cost over DRO's under the 2.5x shift.

    Parameters
    ----------
    table : of `experiments.comparison.ablation_regimes`.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.4, sharey=True)
        ratio = table.pivot(index="upper_multiple", columns="radius", values="saa_over_dro")
        jumped = table.pivot(index="upper_multiple", columns="radius", values="classes_jumped")
        heat(axes[0, 0], ratio, "{:.2f}".format, size=6.5, norm=TwoSlopeNorm(1, 0, 2.5), cmap="PuOr_r")
        heat(axes[0, 1], jumped, "{:.0f}".format, size=7, norm=TwoSlopeNorm(1.5, -1, 4), cmap="PuOr_r")
        for ax, label in zip(
            axes[0], ("cost of SAA over DRO", "classes past the critical radius"), strict=True
        ):
            ax.set(xlabel="ε, multiples of the mean output", title=label)
            ax.tick_params(axis="x", rotation=60)
        axes[0, 0].set_ylabel("L_max over longest output")
        title(figure, "Robustness pays under the shift only where a class has jumped")
    return figure


def fig_partitions(table: pd.DataFrame) -> Figure:
    """Uniform routing's cost over the best routing's on every mixed partition, by load.

    Parameters
    ----------
    table : of `experiments.comparison.ablation_partitions`.
    """
    with style():
        shifts = sorted(table["shift"].unique())
        figure, axes = canvas(1, len(shifts), height=3.6, sharey=True)
        for ax, shift in zip(axes[0], shifts, strict=True):
            grid = table[table["shift"] == shift].pivot(index="groups", columns="load", values="ratio")
            heat(ax, grid, "{:.3g}".format, norm=LogNorm(0.1, 10), cmap="PuOr_r")
            ax.set(xlabel="load", title=f"lengths x {shift:g}")
        axes[0, 0].set_ylabel("groups of TP2, TP4, TP2xPP2, TP4xPP2")
        title(figure, "Total cost of uniform routing over the best routing, on partitions that mix")
    return figure


def fig_prefix(table: pd.DataFrame) -> Figure:
    """P99 latency without prefix caching over that with it, by load and length scale.

    Parameters
    ----------
    table : of `experiments.comparison.prefix_load`.
    """
    with style():
        figure, axes = canvas(1, 1, height=3.0, width=6.0)
        ax = axes[0, 0]
        for (shift, rows), color in zip(table.groupby("shift"), CYCLE, strict=False):
            wide = rows.pivot(index="load", columns="variant", values="p99_s")
            above = 100 * (wide["-Prefix caching"] / wide["full"] - 1)
            ax.plot(above.index, above, "o-", color=color, markersize=4)
            ax.annotate(
                f"lengths x {shift:g}", (above.index[1], above.iloc[1]), fontsize=8.5, color=color,
                xytext=(6, -12), textcoords="offset points",
            )  # fmt: skip
        ax.axhline(22, color=INK, linestyle=":", linewidth=1)
        ax.text(0.01, 23, "paper: 22 %", fontsize=8, va="bottom", transform=ax.get_yaxis_transform())
        plain_log(ax, "x", (0.02, 0.05, 0.1, 0.2, 0.5, 0.8))
        plain_log(ax, "y", (0.5, 1, 2, 5, 10, 20, 50, 100, 200))
        ax.set(ylabel="P99 latency, % above", xlabel="load, multiples of capacity")
        title(figure, "Leaving prefix caching out")
    return figure
