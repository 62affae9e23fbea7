"""Figures of the traces themselves, each drawn from one table of `kvcache.paper.experiments.survey`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from kvcache.paper.experiments.fractile import DEFAULT_RADIUS
from kvcache.paper.experiments.survey import SHORT
from kvcache.paper.plots import CYCLE, GREY, INK, L_MAX, canvas, label_ends, plain_log, style, title

__all__ = ["TRACE_GROUPS", "bounds_table", "fig_drift_days", "fig_drift_fortnight", "fig_prefix", "fig_tails"]

#: Which traces share a panel.
TRACE_GROUPS: Mapping[str, tuple[str, ...]] = {
    "traces of the paper": ("burstgpt", "azure-2024-code", "azure-2024-conv", "sharegpt"),
    "an hour or a week, exact": (
        "burstgpt-week1",
        "azure-2023-code",
        "azure-2023-conv",
        "mooncake-conversation",
    ),
    "ServeGen, 14 days": ("servegen-m-small", "servegen-m-mid", "servegen-m-large", "servegen-deepseek-r1"),
}
_TOKEN_TICKS = (1, 10, 100, 1000, 10_000, 100_000)
_SERVEGEN = ("servegen-m-small", "servegen-m-mid", "servegen-m-large")


def fig_tails(survival: pd.DataFrame, bounds: pd.DataFrame) -> Figure:
    """Log-log survival of output and input lengths, one panel per group of traces.

    Parameters
    ----------
    survival : of `survey.survival_table`.
    bounds : trace, field, upper (tokens): where the marks of L_max go.
    """
    with style():
        figure, axes = canvas(2, 3, height=5.6, sharey=True, sharex="row")
        for row, field in zip(axes, ("output", "input"), strict=True):
            for ax, (group, names) in zip(row, TRACE_GROUPS.items(), strict=True):
                for position, name in enumerate(names):
                    part = survival[(survival["trace"] == name) & (survival["field"] == field)]
                    ax.plot(part["tokens"], part["survival"], color=CYCLE[position], linewidth=1.4)
                    upper = bounds[(bounds["trace"] == name) & (bounds["field"] == field)]["upper"].iloc[0]
                    ax.plot(upper, 1.5e-8, marker="|", color=CYCLE[position], markersize=8, clip_on=False)
                ax.set_yscale("log")
                ax.set_ylim(1e-8, 1.5)
                _token_axis(ax, _TOKEN_TICKS)
                ax.set_xlim(1, 200_000)
                ax.set_xlabel(f"{field} tokens")
                if field == "output":
                    ax.set_title(group)
                    _key(ax, names)
            row[0].set_ylabel("share of requests that are longer")
        title(
            figure,
            "Most outputs are short, a few are a hundred times longer",
            f"Ticks at the foot mark {L_MAX}, the trace's own bound. BurstGPT and Azure 2024 are "
            "reconstructed from published quantiles, so their curves are smooth by construction.",
        )
    return figure


def _token_axis(ax: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis of tokens: 100, 1k, 10k, 1M."""
    plain_log(ax, "x", ticks)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))


def _key(ax: Axes, names: Sequence[str]) -> None:
    """The names in their colours, lower left, where every survival curve leaves room."""
    for position, name in enumerate(reversed(names)):
        ax.text(
            0.03,
            0.08 + 0.085 * position,
            SHORT[name],
            transform=ax.transAxes,
            color=CYCLE[len(names) - 1 - position],
            fontsize=8,
        )


def fig_drift_days(days: pd.DataFrame) -> Figure:
    """BurstGPT's first week: quantiles by day, and how far each day moved from the one before.

    ``days`` is of `survey.drift_table` by day.
    """
    with style():
        figure, (axes,) = canvas(1, 2, height=2.9)
        left, right = axes
        ends = []
        for color, column in zip(CYCLE, ("p99", "p90", "mean", "p50"), strict=False):
            left.plot(days["day"], days[column], color=color, marker="o")
            ends.append((days[column].iloc[-1], column.replace("p", "P"), color))
        left.set_ylim(0, None)
        left.set_ylabel("output tokens")
        left.set_xlabel("day")
        label_ends(left, ends)
        right.bar(days["day"], days["w1_over_mean"], color=CYCLE[0], width=0.6)
        radius = _radius(right)
        for day, noise in zip(days["day"], days["noise_over_mean"], strict=True):
            right.hlines(noise, day - 0.3, day + 0.3, color=INK, linewidth=1)
        right.set_xlim(-0.5, days["day"].max() + 0.5)
        right.set_ylim(0, max(0.18, 1.1 * days["w1_over_mean"].max()))
        right.set_xlabel("day")
        right.set_ylabel("$W_1$ to the day before / mean")
        label_ends(right, [radius])
        title(
            figure,
            "BurstGPT's first week hardly moves from day to day",
            "The line in each bar is the distance that sampling alone would give.",
        )
    return figure


def _radius(ax: Axes) -> tuple[float, str, str]:
    """The paper's default radius as a line; returns its label for `label_ends`."""
    radius = DEFAULT_RADIUS.radius
    ax.axhline(radius, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    return radius, f"ε = {radius:g} mean", INK


def fig_drift_fortnight(windows: pd.DataFrame) -> Figure:
    """ServeGen over 14 days in six-hour windows: quantiles, and the distance to the same hours a day before.

    ``windows`` is of `survey.drift_table` by window with a lag of 4, for several models.
    """
    with style():
        figure, axes = canvas(2, 3, height=4.8, sharex=True, sharey="row")
        for (top, bottom), name in zip(axes.T, _SERVEGEN, strict=True):
            part = windows[windows["trace"] == name]
            day = part["window"] / 4
            ends = []
            for color, column in zip(CYCLE, ("p99", "p90", "mean", "p50"), strict=False):
                top.step(day, part[column], color=color, where="post", linewidth=1.3)
                ends.append((part[column].iloc[-1], column.replace("p", "P"), color))
            plain_log(top, "y", (1, 10, 100, 1000))
            top.set_title(SHORT[name])
            bottom.step(day, part["w1_over_mean"], where="post", color=CYCLE[0], linewidth=1.3)
            plain_log(bottom, "y", (0.05, 0.15, 0.5, 1, 2))
            bottom.set_ylim(0.03, 4)
            radius = _radius(bottom)
            bottom.set_xlabel("day")
            bottom.set_xticks(range(0, 15, 2))
            if name == _SERVEGEN[-1]:
                label_ends(top, ends)
                label_ends(bottom, [radius])
        axes[0, 0].set_ylabel("output tokens")
        axes[1, 0].set_ylabel("$W_1$ to a day before / mean")
        title(
            figure,
            "Production lengths often drift by more than the paper's radius in a day",
            "Six-hour windows; below, each against the same hours of the day before.",
        )
    return figure


def fig_prefix(windows: pd.DataFrame, caches: pd.DataFrame, leading: pd.DataFrame) -> Figure:
    """Prefix sharing: by time, by request, and by the size of the cache.

    Parameters
    ----------
    windows, caches : of `survey.prefix_tables`.
    leading : of `survey.survival_table` for the field ``prefix``.
    """
    with style():
        figure, (axes,) = canvas(1, 3, height=2.9)
        time, request, cache = axes
        time.bar(windows["window"] * 10, 100 * windows["shared_share"], width=9, align="edge", color=CYCLE[0])
        time.set_ylim(0, 50)
        time.set_xlabel("minutes from the start (empty cache)")
        time.set_ylabel("prompt tokens seen before (%)")
        request.step(leading["tokens"], 100 * leading["survival"], color=CYCLE[0], where="post")
        _token_axis(request, (100, 1000, 10_000, 100_000))
        request.set_xlim(100, 130_000)
        request.set_ylim(0, 105)
        request.set_xlabel("leading shared tokens, x")
        request.set_ylabel("requests sharing more than x (%)")
        limit = 100 * caches["shared_share"].iloc[-1]
        cache.plot(caches["capacity_tokens"], 100 * caches["shared_share"], color=CYCLE[0], marker="o")
        cache.axhline(limit, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        cache.text(1.5e5, limit, "unlimited", va="bottom", color=GREY, fontsize=8)
        _token_axis(cache, (1e5, 1e6, 1e7, 1e8))
        cache.set_ylim(0, 50)
        cache.set_xlabel("size of the LRU cache (tokens)")
        cache.set_ylabel("prompt tokens found (%)")
        title(figure, f"{limit:.0f} % of Mooncake's prompt tokens came before, if the cache is large enough")
    return figure


def bounds_table(output: pd.DataFrame, inputs: pd.DataFrame) -> pd.DataFrame:
    """The bounds of both fields for `fig_tails`, from two `survey.traces_table`."""
    parts = [
        table[["trace", "upper"]].assign(field=name)
        for name, table in (("output", output), ("input", inputs))
    ]
    return pd.concat(parts, ignore_index=True).astype({"upper": np.int64})
