"""From a table of requests to request classes: who they are, how long, how many, and on which half to judge.

A router sees a request's prompt and not its output. So classes are told apart by what is known at arrival:
a class column, rules, or bands of the prompt's length, cut where prompts *and* outputs differ most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvcache.engine import JointLengths
from kvcache.traces import Trace, read_trace
from kvcache.traces.prefixes import cached_tokens

__all__ = ["Workload", "prompt_bands", "workload"]

Floats = NDArray[np.float64]

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
#: Requests of a class whose lengths are kept; more are thinned evenly (the means then err by about 0.1 %).
KEPT = 500_000
#: A class column with more values than this is not taken for classes of work.
MOST_CLASSES = 50
#: Below so many requests the plan warns: a 95th percentile then rests on 25 requests or fewer.
FEW = 500
#: Widths of a window, s; the narrowest that holds 100 requests on average is taken.
WINDOWS = (60.0, 300.0, 900.0, 3600.0, 21600.0, 86400.0)


@dataclass(frozen=True, eq=False)
class Workload:
    """Request classes, with the requests behind them.

    Attributes
    ----------
    requests : DataFrame by arrival: ``arrival_s``, ``output_tokens``, ``class`` (code, a position in
        ``names``), ``cached_tokens`` (prompt tokens found in a prefix cache) and ``input_tokens``, the rest.
    names : (I,) labels.
    found : how the classes were told apart, in words, with what a router has to know.
    rules : (I,) what a router checks: a value of the class column, an expression, or a band of prompts.
    rates : (I,) requests/s to plan for.
    window_s, percentile : ``rates`` hold in that percentile of windows of this width (NaN: rate was given).
    classify : table -> (n,) codes, as a router would.
    arrivals : ``"recorded"`` where the trace's own times are kept; ``"poisson"`` where the rate was given.
    warnings : what the plan's reader must know.
    """

    requests: pd.DataFrame
    names: tuple[str, ...]
    found: str
    rules: tuple[str, ...]
    classify: Callable[[pd.DataFrame], NDArray[np.int64]]
    rates: Floats
    window_s: float
    percentile: float
    arrivals: str
    warnings: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Requests/s of all classes."""
        return float(self.rates.sum())

    @cached_property
    def training(self) -> pd.DataFrame:
        """The even rows, by which the plan is made."""
        return self.requests.iloc[::2]

    @cached_property
    def held_out(self) -> pd.DataFrame:
        """The odd rows, by which it is judged."""
        return self.requests.iloc[1::2]

    @property
    def judging(self) -> pd.DataFrame:
        """What judges a plan: the held-out half, or the one request that there is."""
        return self.held_out if len(self.requests) > 1 else self.training

    @cached_property
    def lengths(self) -> tuple[JointLengths, ...]:
        """(I,) prompt and output of the training half, jointly."""
        return tuple(
            JointLengths.from_samples(*self._columns(code, "input_tokens", "output_tokens"), name=name)
            for code, name in enumerate(self.names)
        )

    @cached_property
    def cached(self) -> Floats:
        """(I,) h_i: mean prompt tokens found in a prefix cache."""
        return np.array(
            [float(self._columns(code, "cached_tokens")[0].mean()) for code in range(len(self.names))]
        )

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """(I,) tokens of the longest request of each class, of both halves."""
        total = self.requests[["input_tokens", "cached_tokens", "output_tokens"]].to_numpy().sum(axis=1)
        found = np.zeros(len(self.names), dtype=np.int64)
        np.maximum.at(found, self.requests["class"].to_numpy(), total)
        return found

    def like(self, requests: str | PathLike[str] | Trace | pd.DataFrame) -> Workload:
        """Another window of requests, in the same classes, at its own mean rate.

        Raises
        ------
        ValueError
            For a window of one instant.
        """
        table, notes = _table(requests)
        span = float(table["arrival_s"].iloc[-1] - table["arrival_s"].iloc[0])
        if not span > 0:
            raise ValueError(f"window: {len(table):,} requests at one instant; expected a stretch of time")
        table["class"] = self.classify(table)
        table["cached_tokens"] = 0
        counts = np.bincount(table["class"], minlength=len(self.names))
        rates = np.maximum(counts, 0.5) / span
        table = table[[*COLUMNS, "class", "cached_tokens"]]
        return replace(self, requests=table, rates=rates, window_s=span, percentile=np.nan, warnings=notes)

    def _columns(self, code: int, *names: str) -> list[NDArray]:
        rows = self._rows_by_class[code]
        rows = rows[:: max(1, -(-rows.size // KEPT))]
        return [self.training[name].to_numpy()[rows] for name in names]

    @cached_property
    def _rows_by_class(self) -> list[NDArray[np.intp]]:
        codes = self.training["class"].to_numpy()
        rows = [np.flatnonzero(codes == code) for code in range(len(self.names))]
        return [mine if mine.size else np.flatnonzero(codes >= 0) for mine in rows]

    @cached_property
    def drift(self) -> tuple[float, float]:
        """Least and largest mean output of a window over the mean of all, without what chance explains.

        From the 5th to the 95th percentile of windows of at least 100 requests; each is drawn towards one
        by the share of the spread that the sampling of requests alone would show.
        """
        window = self._window
        outputs = self.requests["output_tokens"].to_numpy(dtype=float)
        counts = np.bincount(window)
        large = counts >= 100
        if large.sum() < 4:
            return 1.0, 1.0
        means = np.bincount(window, outputs)[large] / counts[large] / outputs.mean()
        noise = np.mean(outputs.var() / counts[large]) / outputs.mean() ** 2
        kept = np.sqrt(max(0.0, 1 - noise / means.var())) if means.var() > 0 else 0.0
        low, high = np.quantile(means, [0.05, 0.95])
        return float(min(1.0, 1 + kept * (low - 1))), float(max(1.0, 1 + kept * (high - 1)))

    @property
    def _window(self) -> NDArray[np.int64]:
        arrival = self.requests["arrival_s"].to_numpy()
        width = self.window_s if np.isfinite(self.window_s) else _window_width(arrival)
        return np.floor((arrival - arrival[0]) / width).astype(np.int64)

    def rate_table(self) -> pd.DataFrame:
        """Requests/s per window (index: its start, s) and class."""
        window, codes = self._window, self.requests["class"].to_numpy()
        size = len(self.names)
        counts = np.bincount(window * size + codes, minlength=(window[-1] + 1) * size).reshape(-1, size)
        width = self.window_s if np.isfinite(self.window_s) else _window_width(self.requests["arrival_s"])
        return pd.DataFrame(counts / width, columns=list(self.names), index=np.arange(len(counts)) * width)

    def at(self, rate: float) -> Workload:
        """The same mix at another total rate, requests/s."""
        return replace(self, rates=self.rates * (rate / self.rate), window_s=np.nan, arrivals="poisson")

    def table(self) -> pd.DataFrame:
        """One row per class: what a router checks, rate, share, mean and 95th percentile of its lengths."""
        rows = []
        for code, name in enumerate(self.names):
            inputs, outputs = self._columns(code, "input_tokens", "output_tokens")
            rows.append(
                {
                    "class": name,
                    "rule": self.rules[code],
                    "rate": self.rates[code],
                    "share": self.rates[code] / self.rate,
                    "prompt": inputs.mean(),
                    "prompt_p95": np.quantile(inputs, 0.95),
                    "output": outputs.mean(),
                    "output_p95": np.quantile(outputs, 0.95),
                    "cached": self.cached[code],
                }
            )
        return pd.DataFrame(rows)


def workload(
    requests: str | PathLike[str] | Trace | pd.DataFrame,
    *,
    rules: Mapping[str, str] | None = None,
    classes: int = 4,
    rate: float | None = None,
    percentile: float = 95.0,
    window_s: float | None = None,
    prefix_block: int | None = None,
    prefix_pool: float | None = None,
) -> Workload:
    """Request classes of a trace.

    Parameters
    ----------
    requests : a path that `kvcache.read_trace` reads, its result, or a table with the columns ``arrival_s``,
        ``input_tokens``, ``output_tokens`` and perhaps ``class`` and ``prefix_blocks``.
    rules : name -> expression over the columns, such as ``{"long": "input_tokens > 4000"}``; the first that
        holds counts, the rest is ``"other"``. Without rules a class column decides, and without more than one
        class there, `prompt_bands`.
    classes : the most bands of prompts; 1 for one class.
    rate : requests/s to plan for. By default the trace's own: the ``percentile`` of its windows.
    window_s : width of a window; by default the narrowest usual one that holds 100 requests on average.
    prefix_block : tokens of a block in ``prefix_blocks``; by default what the trace's report says.
    prefix_pool : tokens that the prefix cache may hold (least recently used); None: no sharing is counted.

    Raises
    ------
    ValueError
        For a table without the columns or rows, a count that is not positive, a trace of one instant when no
        rate is given, and a rule that matches nothing.
    """
    if isinstance(requests, (str, PathLike)):
        requests = read_trace(requests)
    if prefix_block is None and isinstance(requests, Trace):
        prefix_block = requests.report.block_tokens
    table, notes = _table(requests)
    if rate is None and not table["arrival_s"].iloc[-1] > table["arrival_s"].iloc[0]:
        raise ValueError(
            f"requests: all {len(table):,} arrive at one instant or have no times, so there is no arrival "
            "rate; name it: rate= requests/s"
        )
    if rate is not None and not (np.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate}; expected > 0 requests/s")
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile is {percentile}; expected within (0, 100]")
    classify, names, tests, found = _classes(table, rules, classes)
    codes = classify(table)
    cached = np.zeros(len(table), np.int64)
    if prefix_pool is not None and "prefix_blocks" in table:
        cached = cached_tokens(table, prefix_pool, block_tokens=prefix_block)
    table = table.assign(
        **{"class": codes, "cached_tokens": cached, "input_tokens": table["input_tokens"] - cached}
    )
    table = table[[*COLUMNS, "class", "cached_tokens"]]
    if len(table) < FEW:
        notes += (
            f"{len(table)} requests: too few for a 95th percentile; read the intervals, not the numbers",
        )
    shares = np.bincount(codes, minlength=len(names)) / len(table)
    width = np.nan
    if rate is None:
        arrival = table["arrival_s"].to_numpy()
        width = window_s or _window_width(arrival)
        total = _windowed_rate(arrival, width, percentile)
    else:
        total = rate
    arrivals = "poisson" if rate is not None else "recorded"
    return Workload(table, names, found, tests, classify, shares * total, width, percentile, arrivals, notes)


def _table(requests: str | PathLike[str] | Trace | pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The requests by arrival, checked."""
    if isinstance(requests, (str, PathLike)):
        requests = read_trace(requests)
    notes: tuple[str, ...] = ()
    if isinstance(requests, Trace):
        dropped = sum(requests.report.dropped.values())
        if dropped:
            notes = (f"{dropped:,} of {requests.report.rows_read:,} rows of the trace were dropped",)
        requests = requests.requests
    missing = [c for c in COLUMNS[1:] if c not in requests]
    if missing:
        raise ValueError(f"requests: no column {missing}; found {list(requests.columns)}, expected {COLUMNS}")
    if not len(requests):
        raise ValueError("requests: no rows; expected at least one request")
    table = requests.reset_index(drop=True)
    if "arrival_s" not in table:
        table = table.assign(arrival_s=np.nan)
    arrival = table["arrival_s"].to_numpy(dtype=float)
    if np.isnan(arrival).any():
        table = table.assign(arrival_s=0.0)
    elif np.any(np.diff(arrival) < 0):
        table = table.sort_values("arrival_s", kind="stable", ignore_index=True)
    for name, least in (("input_tokens", 0), ("output_tokens", 1)):
        values = table[name].to_numpy()
        bad = np.flatnonzero(~(values >= least))
        if bad.size:
            raise ValueError(f"requests: row {bad[0]}: {name} is {values[bad[0]]}; expected >= {least}")
    return table, notes


Classifier = Callable[[pd.DataFrame], NDArray[np.int64]]


def _classes(
    table: pd.DataFrame, rules: Mapping[str, str] | None, classes: int
) -> tuple[Classifier, tuple[str, ...], tuple[str, ...], str]:
    """How to tell the class of a request, the names, what a router checks, and how they were found."""
    if rules:
        return _by_rules(table, rules)
    if "class" in table:
        values = pd.unique(table["class"].dropna())
        if 1 < len(values) <= MOST_CLASSES and not table["class"].isna().any():
            names = tuple(sorted(str(v) for v in values))
            return _by_column(names), names, names, "by the trace's class column"
    edges = prompt_bands(table["input_tokens"].to_numpy(), table["output_tokens"].to_numpy(), classes)

    def classify(requests: pd.DataFrame) -> NDArray[np.int64]:
        return np.searchsorted(edges, requests["input_tokens"].to_numpy(), side="left").astype(np.int64)

    if not edges.size:
        return classify, ("all",), ("any request",), "one class: bands of the prompt do not differ enough"
    ends = [0, *edges.tolist()]
    tests = (*(f"{a} < input_tokens <= {b}" for a, b in pairwise(ends)),)
    tests = (f"input_tokens <= {ends[1]}", *tests[1:], f"input_tokens > {ends[-1]}")
    names = (*(f"prompt<={b}" for b in ends[1:]), f"prompt>{ends[-1]}")
    how = "by clustering prompt and output into bands of the prompt, which a router can tell at arrival"
    return classify, names, tests, how


def _by_column(names: tuple[str, ...]) -> Classifier:
    def classify(requests: pd.DataFrame) -> NDArray[np.int64]:
        if "class" not in requests:
            raise ValueError(f"requests: no column 'class'; expected the classes {list(names)} there")
        codes = pd.Index(names).get_indexer(requests["class"].astype(str))
        if np.any(codes < 0):
            row = int(np.argmax(codes < 0))
            raise ValueError(f"requests: row {row}: class {requests['class'].iloc[row]!r}; known are {names}")
        return codes.astype(np.int64)

    return classify


def _by_rules(
    table: pd.DataFrame, rules: Mapping[str, str]
) -> tuple[Classifier, tuple[str, ...], tuple[str, ...], str]:
    def classify(requests: pd.DataFrame) -> NDArray[np.int64]:
        codes = np.full(len(requests), len(rules), dtype=np.int64)
        for code, expression in reversed(list(enumerate(rules.values()))):
            codes[requests.eval(expression).to_numpy(dtype=bool)] = code
        return codes

    found = np.bincount(classify(table), minlength=len(rules) + 1)
    for name, count in zip(rules, found, strict=False):
        if not count:
            raise ValueError(f"rules: {name!r} ({rules[name]}) matches no request that earlier ones left")
    names, tests = (*rules, "other"), (*rules.values(), "none of the above")
    if not found[-1]:
        names, tests = names[:-1], tests[:-1]
    return classify, names, tests, "by rules, which a router checks in order"


def prompt_bands(
    inputs: NDArray, outputs: NDArray, bands: int, *, bins: int = 96, gain: float = 0.05
) -> NDArray[np.int64]:
    """Upper ends of the bands of prompt length that differ most in prompt and output (all but the last).

    One-dimensional clustering, exact by dynamic programming (Fisher 1958): the bands are intervals of the
    prompt's length, and least is the sum over bands of the squared distances of (ln prompt, ln output) from
    the band's mean, on ``bins`` quantiles of the prompt. A band more must explain another ``gain`` of the
    whole scatter.
    """
    x = np.log1p(np.asarray(inputs, dtype=float))
    y = np.log(np.asarray(outputs, dtype=float))
    cuts = np.unique(np.quantile(inputs, np.linspace(0, 1, bins + 1)[1:-1], method="inverted_cdf"))
    cuts = cuts[cuts < np.max(inputs)]
    cell = np.searchsorted(cuts, inputs, side="left")
    n = np.bincount(cell, minlength=cuts.size + 1).astype(float)
    sums = [np.bincount(cell, v, minlength=n.size) for v in (x, y, x * x + y * y)]
    n, sx, sy, ss = (np.concatenate([[0.0], np.cumsum(v)]) for v in (n, *sums))
    i, j = np.triu_indices(n.size, 1)
    count = n[j] - n[i]
    spread = np.full((n.size, n.size), np.inf)
    around = (sx[j] - sx[i]) ** 2 + (sy[j] - sy[i]) ** 2
    spread[i, j] = ss[j] - ss[i] - np.divide(around, count, out=np.zeros_like(around), where=count > 0)
    whole = spread[0, -1]
    best, came = spread[0], []
    kept: list[int] = []
    value = whole
    for _ in range(1, bands):
        total = best[:, None] + spread
        came.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
        if not value - best[-1] > gain * whole:
            break
        value, kept, at = best[-1], [], n.size - 1
        for origin in reversed(came):
            at = int(origin[at])
            kept.append(at)
    return np.array([int(cuts[at - 1]) for at in sorted(kept)], dtype=np.int64)


def _window_width(arrival: NDArray) -> float:
    arrival = np.asarray(arrival, dtype=float)
    span = float(arrival[-1] - arrival[0])
    wide = [w for w in WINDOWS if arrival.size * w / max(span, w) >= 100 and 4 * w <= span]
    return wide[0] if wide else max(span / 4, 1e-9)


def _windowed_rate(arrival: NDArray, width: float, percentile: float) -> float:
    """Requests/s in that percentile of the whole windows."""
    window = np.floor((arrival - arrival[0]) / width).astype(np.int64)
    counts = np.bincount(window)[: max(1, int((arrival[-1] - arrival[0]) // width))]
    return float(np.quantile(counts, percentile / 100) / width)
