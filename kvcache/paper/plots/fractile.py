"""Figures of the single-class study, each drawn from one table of `kvcache.paper.experiments.fractile`."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvcache.ambiguity import AmbiguitySet, critical_fractile
from kvcache.lengths import LengthDistribution
from kvcache.paper.plots import (
    CYCLE,
    GREY,
    INK,
    L_MAX,
    RATIO,
    canvas,
    color_of,
    heat,
    label_ends,
    plain_log,
    style,
    title,
)

__all__ = [
    "ambiguity_sets",
    "critical_radius",
    "fig2a",
    "fig2a_traces",
    "fig2b",
    "panel",
    "regimes",
    "table2_implied",
]

RATIO_TICKS = (1, 2, 5, 10, 20, 50, 100, 200)
POLICIES = ("DRO", "SAA", "P90", "P95", "P99", "Mean", "Max")
QUANTILES = ("P90", "P95", "P99")


def _line(ax: Axes, rows: pd.DataFrame, policy: str, column: str) -> tuple[float, str, str]:
    """One policy over the cost ratio; returns its label for `label_ends`."""
    own = rows[rows["policy"] == policy]
    front = policy in ("DRO", "SAA")
    dash = (0, (4, 3)) if policy == "SAA" else "-"
    ax.plot(own["rho"], own[column], color=color_of(policy), linestyle=dash, zorder=3 if front else 2)
    return float(own[column].iloc[-1]), policy, color_of(policy)


def _over_ratio(ax: Axes, ticks: tuple[int, ...] = RATIO_TICKS) -> None:
    plain_log(ax, "x", ticks)
    ax.set_xlim(1, 200)


def fig2a(costs: pd.DataFrame, table2: pd.DataFrame, trace: str) -> Figure:
    """Fig. 2(a): cost per arrival against the cost ratio on one trace, and what each policy wastes.

    Parameters
    ----------
    costs : of `fractile.costs_by_ratio`.
    table2 : of `fractile.table2`; its published rows become the open circles.
    trace : which one.
    """
    rows = costs[costs["trace"] == trace]
    paper = table2[table2["trace"] == "published"]
    with style():
        figure, axes = canvas(1, 2, height=3.7)
        left, right = axes[0]
        labels = [_line(left, rows, policy, "cost") for policy in POLICIES]
        _over_ratio(left)
        plain_log(left, "y")
        for policy in ("DRO", "P90", "P95"):
            dots = {"mfc": "none", "mec": color_of(policy), "mew": 1.2, "zorder": 4}
            left.plot(paper["rho"], paper[policy.lower()], "o", **dots)
        left.text(0.03, 0.93, "○ published Table II", transform=left.transAxes, color=GREY, fontsize=8.5)
        left.set_ylabel("cost per arrival (in wasted tokens)")
        left.set_title("a  Cost per arrival")
        label_ends(left, labels)

        _over_ratio(right)
        right.set_ylim(-4, 100)
        ends = [_line(right, rows, policy, "excess_pct") for policy in POLICIES]
        label_ends(right, [label for label in ends if label[0] <= 100])
        for policy in ("Mean", "P90"):
            own = rows[rows["policy"] == policy]
            best = own.loc[own["excess_pct"].idxmin(), "rho"]
            right.text(best, 4, policy, color=color_of(policy), fontsize=8.5, ha="center")
        right.set_ylabel("cost over the best reservation (%)")
        right.set_title("b  What a fixed quantile wastes")
        for ax in (left, right):
            ax.set_xlabel(RATIO)
        title(figure, f"Each fixed quantile is right at one cost ratio only ({trace})")
    return figure


def fig2a_traces(costs: pd.DataFrame) -> Figure:
    """Fig. 2(a) on every trace: cost over the best reservation, and where DRO has left the fractile."""
    traces = list(dict.fromkeys(costs["trace"]))
    columns = 4
    with style():
        figure, axes = canvas(-(-len(traces) // columns), columns, height=6.4, sharex=True, sharey=True)
        for ax, trace in zip(axes.flat, traces, strict=False):
            rows = costs[costs["trace"] == trace]
            for policy in (*QUANTILES, "DRO"):
                _line(ax, rows, policy, "excess_pct")
            jumped = rows.loc[(rows["policy"] == "DRO") & (rows["regime"] != "fractile"), "rho"]
            if len(jumped):
                ax.axvspan(jumped.min(), 200, color=color_of("DRO"), alpha=0.12, lw=0)
            _over_ratio(ax, (1, 10, 100))
            ax.set_ylim(-4, 150)
            ax.set_title(trace, fontsize=8.5)
        for ax in axes.flat[len(traces) :]:
            ax.set_visible(False)
        handles = [Line2D([], [], color=color_of(policy), label=policy) for policy in (*QUANTILES, "DRO")]
        figure.legend(handles=handles, loc="outside lower right", ncols=len(handles))
        figure.supylabel("cost over the best reservation (%)", fontsize=9)
        title(
            figure,
            "DRO at its default radius is the fractile until it jumps, and then costs more than a quantile",
            "Across: cost ratio ρ. Shaded: the default radius exceeds the critical one.",
        )
    return figure


def fig2b(costs: pd.DataFrame, trace: str) -> Figure:
    """Fig. 2(b): the share of requests that DRO lets outgrow their reservation, against 1 / (1 + rho).

    Left the paper's trace, right all traces.
    """
    dro = costs[costs["policy"] == "DRO"]
    traces = list(dict.fromkeys(costs["trace"]))
    with style():
        figure, axes = canvas(1, 2, height=3.7, sharey=True)
        left, right = axes[0]
        grid = np.geomspace(1, 200, 50)
        for ax in (left, right):
            ax.plot(grid, 100 / (1 + grid), color=INK, lw=1, linestyle="--", zorder=4)
            _over_ratio(ax)
            ax.set_xlabel(RATIO)
        own = dro[dro["trace"] == trace]
        left.plot(own["rho"], 100 * (1 - own["quantile"]), color=color_of("DRO"), lw=2.2, zorder=3)
        for policy in ("P90", "P95"):
            rows = costs[(costs["trace"] == trace) & (costs["policy"] == policy)]
            share = 100 * (1 - rows["quantile"])
            left.plot(rows["rho"], share, color=color_of(policy))
            left.text(1.1, share.iloc[0], policy, color=color_of(policy), va="bottom", fontsize=8.5)
        left.text(30, 5, "1 − q* = 1 / (1 + ρ)", color=INK, fontsize=8.5)
        left.text(2.2, 20, "DRO", color=color_of("DRO"), fontsize=8.5, ha="right")
        left.set_title(f"a  {trace}")
        left.set_ylabel("requests longer than the reservation (%)")
        floor = 2e-3
        labels = []
        for name in traces:
            rows = dro[dro["trace"] == name]
            jumps = (rows["regime"] != "fractile").any()
            color = CYCLE[len(labels) % len(CYCLE)] if jumps else GREY
            share = np.maximum(100 * (1 - rows["quantile"]), floor)
            right.plot(rows["rho"], share, color=color, lw=1.2, zorder=3 if jumps else 2)
            if jumps:
                labels.append((share.iloc[-1], name, color))
        plain_log(right, "y", (1e-3, 1e-2, 0.1, 1, 10, 50))
        right.set_ylim(floor / 2, 70)
        label_ends(right, labels, size=8)
        right.set_title("b  All traces; named where DRO jumps")
        title(
            figure,
            "DRO follows the critical fractile exactly as long as it is the fractile",
            "Dashed: the theory. None longer than the reservation is drawn at the lower edge.",
        )
    return figure


def table2_implied(curves: pd.DataFrame, points: pd.DataFrame) -> Figure:
    """What Table II implies: expected excess E(xi - r)^+ against r - E xi.

    Parameters
    ----------
    curves : of `fractile.excess_curves`.
    points : of `fractile.implied_by_baselines` and `implied_by_dro`, one below the other.
    """
    with style():
        figure, axes = canvas(1, 2, height=3.8)
        for ax, (low, high) in zip(axes[0], ((-250, 520), (0, 2000)), strict=True):
            for color, (trace, rows) in zip(
                (GREY, CYCLE[0]), curves.groupby("trace", sort=False), strict=True
            ):
                ax.plot(rows["offset"], rows["excess"], color=color, label=trace)
            for row in points.itertuples():
                offset, excess = (row.offset_low, row.offset_high), (row.excess_high, row.excess_low)
                if row.policy == "DRO":
                    ax.plot(offset, excess, color=color_of("DRO"), lw=4, alpha=0.4, solid_capstyle="butt")
                    if (row.rho <= 20) == (low < 0):
                        text = f"DRO, ρ = {row.rho:g}  "
                        place = {"ha": "right", "va": "top", "fontsize": 8}
                        ax.text(np.mean(offset), np.mean(excess), text, color=color_of("DRO"), **place)
                else:
                    ax.plot(np.mean(offset), np.mean(excess), "o", color=color_of(row.policy), ms=6, zorder=4)
                    if low < 0:
                        ax.annotate(
                            row.policy,
                            (np.mean(offset), np.mean(excess)),
                            xytext=(8, 34),
                            textcoords="offset points",
                            color=color_of(row.policy),
                            arrowprops={"arrowstyle": "-", "color": color_of(row.policy), "lw": 0.6},
                        )
            ax.set_xlim(low, high)
            inside = curves[curves["offset"].between(low, high)]["excess"]
            ax.set_ylim(0, inside.max() * 1.05)
            ax.set_xlabel("reservation less mean, r − E ξ (tokens)")
        axes[0, 0].set_ylabel("expected excess E(ξ − r)⁺ (tokens)")
        axes[0, 0].set_title("a  Near the mean")
        axes[0, 1].set_title("b  The tail")
        axes[0, 1].legend(loc="upper right")
        title(
            figure,
            "The published costs belong to one distribution, which is not that of the whole file",
            "Dots: read off the P90 and P95 columns. Bars: where DRO must lie if it is the fractile.",
        )
    return figure


def regimes(table: pd.DataFrame, default: float, trace: str) -> Figure:
    """The robust reservation against the radius, for several support bounds and cost ratios.

    Parameters
    ----------
    table : of `fractile.regimes`.
    default : the paper's radius, in means.
    trace : its name, for the title.
    """
    ratios = list(dict.fromkeys(table["rho"]))
    uppers = list(dict.fromkeys(table["upper"]))
    with style():
        figure, axes = canvas(1, len(ratios), height=3.7, sharey=True)
        for ax, rho in zip(axes[0], ratios, strict=True):
            labels = []
            for color, upper in zip(CYCLE, uppers, strict=False):
                rows = table[(table["rho"] == rho) & (table["upper"] == upper)]
                ax.plot(rows["radius"], rows["reservation"], color=color, drawstyle="steps-post")
                labels.append((float(rows["reservation"].iloc[-1]), f"{upper:,}", color))
            ax.axvline(default, color=GREY, lw=1, linestyle=":")
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
            plain_log(ax, "y", (100, 200, 500, 1000, 2000, 5000, 10000))
            ax.set_xlim(table["radius"][table["radius"] > 0].min(), table["radius"].max())
            ax.set_title(f"ρ = {rho:g}")
            label_ends(ax, labels, size=8)
        axes[0, 0].set_ylabel("robust reservation η* (tokens)")
        axes[0, 0].text(
            default * 1.08,
            0.03,
            f"{default:g}",
            transform=axes[0, 0].get_xaxis_transform(),
            color=GREY,
            fontsize=8,
        )
        axes[0, len(ratios) // 2].set_xlabel("radius ε / mean length")
        title(
            figure,
            f"The robust reservation is constant in the radius, but for two steps ({trace})",
            f"One line per {L_MAX} (tokens, at its right end); the steps are at S and $S_2$. "
            "Dotted: the paper's radius.",
        )
    return figure


def critical_radius(table: pd.DataFrame, default: float) -> Figure:
    """The critical radius, in means, over traces and cost ratios; outlined where the default exceeds it.

    Parameters
    ----------
    table : of `fractile.critical_radii`.
    default : the paper's radius, in means.
    """
    grid = table.pivot(index="trace", columns="rho", values="critical")
    grid = grid.loc[grid.iloc[:, -1].sort_values(ascending=False).index]
    upper = table.drop_duplicates("trace").set_index("trace")["upper"]
    with style():
        figure, axes = canvas(1, 1, height=4.6)
        ax = axes[0, 0]
        heat(
            ax,
            grid.rename(index=lambda name: f"{name}  ({upper[name]:,})"),
            lambda value: f"{value:.2f}" if value < 10 else f"{value:.0f}",
            size=8.5,
            boxed=grid < default,
            cmap="PuOr",
            norm=LogNorm(default / 100, default * 100),
        )
        ax.set_xlabel(RATIO)
        bar = figure.colorbar(ax.collections[0], ax=ax, shrink=0.8, pad=0.02)
        bar.set_label("critical radius S / mean length")
        bar.ax.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
        bar.ax.axhline(default, color="black", lw=1.8)
        title(
            figure,
            f"Where the default radius, {default:g} × mean, changes the reservation at all",
            "Outlined: S is below the default, and DRO has left the fractile. "
            f"In brackets: {L_MAX} (tokens).",
        )
    return figure


def ambiguity_sets(table: pd.DataFrame, trace: str) -> Figure:
    """The ambiguity sets side by side: the growth that a reservation is right for, and its price now.

    Parameters
    ----------
    table : of `fractile.growth_hedged`.
    trace : its name, for the title.
    """
    sets = list(dict.fromkeys(table["set"]))
    ratios = list(dict.fromkeys(table["rho"]))
    with style():
        figure, axes = canvas(2, len(sets), height=4.6, sharex="col", sharey="row")
        for i, name in enumerate(sets):
            rows = table[table["set"] == name].assign(rho=lambda t: t["rho"].map("ρ = {:g}".format))
            for ax, column in zip(axes[:, i], ("growth", "excess_pct"), strict=True):
                sns.lineplot(
                    rows,
                    x="value",
                    y=column,
                    hue="rho",
                    palette=list(CYCLE[: len(ratios)]),
                    legend=i == 1,
                    ax=ax,
                )
            axes[0, i].set_title(name.replace("inf", "∞"))
            axes[1, i].set_xlabel(table.loc[table["set"] == name, "parameter"].iloc[0])
        axes[0, 0].set_ylim(0.5, 2.6)
        axes[0, 0].set_ylabel("reservation / fractile")
        axes[1, 0].set_ylim(-5, 105)
        axes[1, 0].set_ylabel("price while nothing\nchanges (%)")
        axes[0, 1].legend(loc="upper left", handlelength=1.2, title="")
        axes[1, 1].legend_.remove()
        title(
            figure,
            f"Five ambiguity sets: how much growth each reservation is made for ({trace})",
            "Upper row: the factor by which all lengths would have to grow for it to be the best.",
        )
    return figure


def panel(dist: LengthDistribution, ambiguity: AmbiguitySet, rho: float) -> Figure:
    """One distribution, one set, one cost ratio: where the reservation lies and what it costs.

    Left the tail of the lengths, right the expected cost of every reservation as things are and in the
    worst case of the set.
    """
    fractile = dist.quantile(critical_fractile(rho, 1.0))
    robust = ambiguity.reservation(dist, rho, 1.0)
    eta = np.union1d(np.linspace(0, dist.upper, 400), [fractile, robust])
    with style():
        figure, axes = canvas(1, 2, height=3.5)
        left, right = axes[0]
        left.step(dist.tokens, 1 - dist.cdf(dist.tokens), where="post", color=INK)
        left.set_xscale("symlog", linthresh=10)
        left.set_yscale("log")
        left.set_xlim(0, dist.upper * 1.1)
        whole = mpl.ticker.StrMethodFormatter("{x:,.0f}")
        left.xaxis.set_major_formatter(whole)
        left.set_xlabel("output length (tokens)")
        left.set_ylabel("share of longer outputs")
        nominal, worst = dist.cost(eta, rho, 1.0), ambiguity.worst_case(dist, eta, rho, 1.0)
        right.plot(eta, nominal, color=color_of("SAA"))
        right.plot(eta, worst, color=color_of("DRO"))
        right.set_ylim(0, 1.05 * max(worst[-1], 3 * worst.min()))
        right.set_xlim(0, dist.upper)
        right.xaxis.set_major_formatter(whole)
        right.yaxis.set_major_formatter(whole)
        ends = ((nominal[-1], "as is", color_of("SAA")), (worst[-1], "worst case", color_of("DRO")))
        label_ends(right, ends)
        right.set_xlabel("reservation η (tokens)")
        right.set_ylabel("expected cost per arrival")
        for ax in (left, right):
            ax.axvline(fractile, color=color_of("SAA"), lw=1, linestyle="--")
            ax.axvline(robust, color=color_of("DRO"), lw=1, linestyle="--")
        at_fractile, at_robust = (ambiguity.worst_case(dist, r, rho, 1.0) for r in (fractile, robust))
        title(
            figure,
            f"η* = {robust:,.0f} tokens, fractile {fractile:,} "
            f"({dist.name}, ρ = {rho:g}, {L_MAX} = {dist.upper:,})",
            f"Worst case {at_robust:,.1f} at η* and {at_fractile:,.1f} at the fractile; as things are "
            f"{dist.cost(robust, rho, 1.0):,.1f} and {dist.cost(fractile, rho, 1.0):,.1f}.",
        )
    return figure
