"""What the traces look like: tables of their lengths, tails, drift and prefixes, all from digests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvcache.lengths import LengthDistribution
from kvcache.paper.digests import list_digests, load_digest, load_digests, load_prefix_stats
from kvcache.paper.digests.sources import load_sources
from kvcache.traces.formats import FORMATS

__all__ = [
    "PAPER_TRACES",
    "beside_paper",
    "classes_table",
    "drift_summary",
    "drift_table",
    "first_hours",
    "formats_table",
    "prefix_tables",
    "sampling_noise",
    "sources_table",
    "survival_table",
    "traces_table",
]

#: The paper's name of a trace -> ours.
PAPER_TRACES = {
    "BurstGPT": "burstgpt",
    "Azure LLM 2024 code": "azure-2024-code",
    "Azure LLM 2024 conversation": "azure-2024-conv",
    "ShareGPT": "sharegpt",
}
#: Names short enough for a figure.
SHORT = {
    "burstgpt": "BurstGPT",
    "burstgpt-week1": "BurstGPT, week 1",
    "azure-2023-code": "Azure 2023 code",
    "azure-2023-conv": "Azure 2023 conv.",
    "azure-2024-code": "Azure 2024 code",
    "azure-2024-conv": "Azure 2024 conv.",
    "mooncake-conversation": "Mooncake",
    "sharegpt": "ShareGPT",
    "servegen-m-small": "m-small",
    "servegen-m-mid": "m-mid",
    "servegen-m-large": "m-large",
    "servegen-deepseek-r1": "deepseek-r1",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def formats_table() -> pd.DataFrame:
    """The formats that `read_trace` knows: name, what they are, and the columns read for each tidy one."""
    rows = []
    for form in FORMATS.values():
        columns = {
            tidy: s.rstrip("|").replace("|", " or ") if isinstance(s, str) else " / ".join(s)
            for tidy, s in form.columns.items()
        }
        rows.append({"format": form.name, "about": form.about, **columns})
    return pd.DataFrame(rows).fillna("")


def sources_table() -> pd.DataFrame:
    """One row per trace: what it is, its licence, rows read and kept, windows, and how it was reduced."""
    digests = list_digests()
    sources = load_sources().digests
    return pd.DataFrame(
        {
            "trace": digests["name"],
            "what": [sources[name].origin.partition(": ")[2] for name in digests["name"]],
            "requests": digests["requests"],
            "window_s": digests["window_s"],
            "windows": digests["windows"],
            "reconstructed": digests["reconstructed"],
            "licence": digests["licence"],
        }
    )


def traces_table(field: str = "output") -> pd.DataFrame:
    """One row per trace: requests, mean, standard deviation, quantiles, maximum and bound (tokens).

    ``tail_share`` is the share of all tokens that the longest tenth of the requests holds.
    """
    rows = []
    for name in list_digests()["name"]:
        d = load_digest(name, field=field)
        tail = d.excess(d.quantile(0.9)) + 0.1 * d.quantile(0.9)
        rows.append(
            {
                "trace": name,
                **d.summary(),
                "cv": d.std / d.mean,
                "tail_share": tail / d.mean,
                "reconstructed": d.reconstructed,
            }
        )
    return pd.DataFrame(rows).astype({"requests": np.int64})


def classes_table(name: str, field: str = "output") -> pd.DataFrame:
    """One row per class of a trace: its share of the requests, then mean, quantiles and maximum (tokens)."""
    parts = load_digests(name, "class", field=field)
    total = sum(d.total for d in parts.values())
    return pd.DataFrame(
        [
            {
                "class": label,
                "requests": int(d.total),
                "share": d.total / total,
                **{key: d.summary()[key] for key in STATISTICS},
            }
            for label, d in parts.items()
        ]
    )


def beside_paper(published: Mapping[str, Any]) -> pd.DataFrame:
    """What the paper states of its traces beside ours, and the difference relative to the paper's.

    ``published`` is ``paper.published("traces")``. Columns: trace, statistic, paper, ours, difference
    (a share), and the paper's number as a quantile of our trace where it is one.
    """
    rows = []
    for title, name in PAPER_TRACES.items():
        d = load_digest(name)
        ours = {**d.summary(), "responses": d.total}
        for statistic, value in published[title].items():
            rows.append(
                {
                    "trace": name,
                    "statistic": statistic,
                    "paper": float(value),
                    "ours": float(ours[statistic]),
                    "difference": ours[statistic] / value - 1,
                    "paper_as_quantile": d.cdf(value) if statistic.startswith("p") else np.nan,
                    "reconstructed": d.reconstructed,
                }
            )
    return pd.DataFrame(rows)


def first_hours(name: str) -> pd.DataFrame:
    """Published output quantiles of the first hours of a trace: hour, and one column per quantile."""
    hours = load_sources().digests[name].first_hours_output
    if not hours:
        raise ValueError(f"digest {name!r}: no hours were published")
    table = pd.DataFrame({f"p{100 * p:g}": values for p, values in hours.items()})
    return table.rename_axis("hour").reset_index()


def survival_table(
    names: Iterable[str], fields: Iterable[str] = ("output", "input"), points: int = 120
) -> pd.DataFrame:
    """P(length > x) on a logarithmic grid: trace, field, tokens, survival (never zero)."""
    parts = []
    for name in names:
        for field in fields:
            d = load_digest(name, field=field)
            longest = int(d.tokens[-1])
            grid = np.unique(np.rint(np.geomspace(1, max(longest - 1, 1), points)).astype(int))
            # Summed from the top, so that the far tail is as exact as the counts are.
            above = np.append(np.cumsum(d.weights[::-1])[::-1], 0.0)
            survival = above[np.searchsorted(d.tokens, grid, side="right")] / d.total
            parts.append(
                pd.DataFrame({"trace": name, "field": field, "tokens": grid, "survival": survival}).query(
                    "survival > 0"
                )
            )
    return pd.concat(parts, ignore_index=True)


def drift_table(name: str, by: str = "day", lag: int = 1, **filters: Any) -> pd.DataFrame:
    """How a trace's lengths move from one day or window to the next.

    Parameters
    ----------
    name, **filters : as in `load_digests`.
    by : ``"day"`` or ``"window"``.
    lag : how many of them lie between the two compared; windows of six hours and a lag of 4 compare
        with the same hours of the day before.

    Returns
    -------
    DataFrame with trace, the day or window, requests, mean, p50, p90, p99 (tokens), and of the distance to
    the one ``lag`` earlier: w1 (tokens), w1_over_mean (relative to the earlier mean), noise_over_mean (what
    sampling alone would give, see `sampling_noise`), total_variation, p90_change (relative); NaN for the
    first ``lag``.
    """
    parts = load_digests(name, by, **filters)
    rows = []
    for key, d in parts.items():
        s = d.summary()
        row = {"trace": name, by: key, **{k: s[k] for k in ("requests", "mean", "p50", "p90", "p99")}}
        rows.append({**row, **_distance(parts.get(key - lag), d)})
    return pd.DataFrame(rows)


def sampling_noise(d: LengthDistribution, n: float, m: float) -> float:
    """Expected W1 distance (tokens) between independent samples of n and m lengths from one distribution d.

    To first order the difference of the two empirical distribution functions at x is normal with
    variance F(x) (1 - F(x)) (1/n + 1/m), so its mean modulus is sqrt(2 / pi) of its deviation; W1 is
    the integral.
    """
    spread = np.sqrt(d.cumulative[:-1] * (1 - d.cumulative[:-1])) @ np.diff(d.tokens)
    return float(np.sqrt(2 / np.pi * (1 / n + 1 / m)) * spread)


def _distance(before: LengthDistribution | None, now: LengthDistribution) -> dict[str, float]:
    if before is None:
        measures = ("w1", "w1_over_mean", "noise_over_mean", "total_variation", "p90_change")
        return dict.fromkeys(measures, np.nan)
    w1 = before.wasserstein(now)
    noise = sampling_noise(LengthDistribution.mix([before, now]), before.total, now.total)
    return {
        "w1": w1,
        "w1_over_mean": w1 / before.mean,
        "noise_over_mean": noise / before.mean,
        "total_variation": before.total_variation(now),
        "p90_change": now.quantile(0.9) / before.quantile(0.9) - 1,
    }


def drift_summary(tables: Iterable[pd.DataFrame], radius: float) -> pd.DataFrame:
    """Of each drift table: the median and largest step, the median of what sampling alone would give, the
    share of steps beyond a relative radius, and the largest relative change of the P90."""
    rows = []
    for table in tables:
        steps = table["w1_over_mean"].dropna()
        rows.append(
            {
                "trace": table["trace"].iloc[0],
                "compared": "days" if "day" in table else "windows",
                "steps": len(steps),
                "median": steps.median(),
                "largest": steps.max(),
                "noise": table["noise_over_mean"].median(),
                "beyond_radius": (steps > radius).mean(),
                "largest_p90_change": table["p90_change"].abs().max(),
            }
        )
    return pd.DataFrame(rows)


def prefix_tables(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Prefix sharing of a trace by time window, and by the size of a least-recently-used cache."""
    stats = load_prefix_stats(name)
    return stats.window_table().assign(trace=name), stats.cache_table().assign(trace=name)
