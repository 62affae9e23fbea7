"""What a plan is worth: its groups simulated request by request on requests it was not made from.

Requests arrive, a share of each class is rejected at the door, the rest goes to a kind of group by the plan's
shares and there to the groups in turn. Groups of a kind are alike, so some of each are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvcache.engine import Headroom, StepCost, StepTable, simulate

__all__ = ["FIGURES", "Station", "arrivals", "replay"]

Floats = NDArray[np.float64]

#: Figures of a replay, in order; rates are per second of the whole plan, times in s.
FIGURES = (
    "offered",
    "admitted",
    "throughput",
    "goodput",
    "within_deadlines",
    "ttft_p50",
    "ttft_p95",
    "tpot_mean",
    "tpot_p95",
    "worst_gap_p99",
    "preempted",
    "requests",
)

#: The first part of a replay fills the groups and is not counted.
WARM_UP = 0.2


@dataclass(frozen=True, eq=False)
class Station:
    """A kind of group as it runs.

    Parameters
    ----------
    name, groups : label and how many there are.
    step : linear or measured step times.
    pool, headroom : tokens, and those kept free when requests are admitted.
    max_running, max_batched : the engine's limits.
    phase : ``both``, ``prefill`` or ``decode``.
    transfer : s per prompt token to move the cache to a ``decode`` group.
    """

    name: str
    groups: int
    step: StepCost | StepTable
    pool: int
    headroom: float
    max_running: int
    max_batched: int
    phase: str = "both"
    transfer: float = 0.0


def arrivals(
    requests: pd.DataFrame, rates: Floats, count: int, rng: np.random.Generator, recorded: bool = False
) -> pd.DataFrame:
    """Requests to replay: lengths in the order of the trace, again from its start where it ends.

    ``recorded`` keeps the trace's own gaps, of the busiest stretch of so many requests; their rate is then
    that of the stretch. Otherwise arrivals are Poisson with ``rates`` (I,) requests/s per class: a class
    whose rate exceeds its share in the trace is drawn more often.
    """
    if recorded:
        arrival = requests["arrival_s"].to_numpy()
        count = min(count, arrival.size)
        spans = arrival[count - 1 :] - arrival[: arrival.size - count + 1]
        start = int(np.argmin(spans))
        table = requests.iloc[start : start + count]
        return table.assign(arrival_s=table["arrival_s"] - table["arrival_s"].iloc[0]).reset_index(drop=True)
    codes = requests["class"].to_numpy()
    shares = np.bincount(codes, minlength=rates.size) / codes.size
    if np.allclose(shares, rates / rates.sum(), rtol=0.02, atol=1e-4):
        rows = np.arange(count) % codes.size
    else:
        of_class = [np.flatnonzero(codes == i) for i in range(rates.size)]
        drawn = rng.choice(rates.size, count, p=rates / rates.sum())
        rows = np.empty(count, dtype=np.int64)
        for i, mine in enumerate(of_class):
            at = np.flatnonzero(drawn == i)
            rows[at] = mine[np.arange(at.size) % mine.size] if mine.size else 0
    gaps = rng.exponential(1 / rates.sum(), count)
    return requests.iloc[rows].assign(arrival_s=np.cumsum(gaps)).reset_index(drop=True)


def replay(
    requests: pd.DataFrame,
    stations: Sequence[Station],
    shares: Floats,
    tpot: Floats,
    ttft: Floats,
    rng: np.random.Generator,
    *,
    sample: int = 1,
) -> tuple[pd.Series, pd.DataFrame]:
    """Run a plan.

    Parameters
    ----------
    requests : of `arrivals`, with ``class``.
    shares : (I, K) of each class's requests to each station; what is missing to one is rejected. Prompts go
        by the shares of stations that are not ``decode``; their outputs by those of ``decode`` stations.
    tpot, ttft : (I,) deadlines, s.
    sample : groups of each station that are simulated.

    Returns
    -------
    figures : Series over `FIGURES`. ``within_deadlines`` is a share of the requests admitted, ``preempted`` a
        share of them too; ``throughput`` counts finishes while requests arrive, ``goodput`` those in time.
    served : one row per simulated request, with ``station``, ``ttft``, ``tpot``, ``in_time``, ``weight``.
    """
    start = np.array([s.phase != "decode" for s in stations])
    goes = _routed(requests, np.where(start, shares, 0.0), rng)
    parts, prompts = [], []
    for k in np.flatnonzero(start):
        station = stations[k]
        mine = np.flatnonzero(goes == k)
        # what decode groups get is the work of all prefill groups
        simulated = min(sample, station.groups) if station.phase == "both" else station.groups
        for g in range(simulated if mine.size else 0):
            part = requests.iloc[mine[g :: station.groups]]
            if station.phase == "both":
                parts.append(_run(part, station).assign(station=k, weight=station.groups / simulated))
            else:
                prompts.append(_prefill(part, station).assign(station=k))
    if prompts:
        moved = pd.concat(prompts, ignore_index=True).sort_values("first_token_s", ignore_index=True)
        then = _routed(moved, _shares_of_rest(np.where(start, 0.0, shares)), rng)
        for k in np.flatnonzero(~start):
            station, mine = stations[k], np.flatnonzero(then == k)
            simulated = min(sample, station.groups) if mine.size else 0
            for g in range(simulated):
                part = moved.iloc[mine[g :: station.groups]]
                parts.append(_decode(part, station).assign(station=k, weight=station.groups / simulated))
    span = float(requests["arrival_s"].iloc[-1])
    offered = len(requests) / span
    if not parts:
        nothing = pd.Series(0.0, index=FIGURES)
        nothing["offered"] = offered
        return nothing, pd.DataFrame()
    served = pd.concat(parts, ignore_index=True)
    code = served["class"].to_numpy()
    served["ttft"] = served["first_token_s"] - served["arrival_s"]
    served["tpot"] = (served["finish_s"] - served["first_token_s"]) / np.maximum(
        served["output_tokens"] - 1, 1
    )
    served["in_time"] = (served["ttft"] <= ttft[code]) & (served["tpot"] <= tpot[code])
    return _figures(served, span, offered, float((goes < len(stations)).mean())), served


def _routed(requests: pd.DataFrame, shares: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
    """The station that each request goes to; the number of stations where it is rejected."""
    draw = rng.random(len(requests))
    return (draw[:, None] >= np.cumsum(shares, axis=1)[requests["class"].to_numpy()]).sum(axis=1)


def _shares_of_rest(shares: Floats) -> Floats:
    """Shares that add up to one (just above, so that no draw falls beside them), by class."""
    total = shares.sum(axis=1, keepdims=True)
    return np.divide(shares, total, out=np.zeros_like(shares), where=total > 0) * (1 + 1e-12)


def _prefill(requests: pd.DataFrame, station: Station) -> pd.DataFrame:
    """Prompts of one group; ``first_token_s`` is when the cache and the first token have been moved."""
    done = _run(requests.assign(output_tokens=1), station)
    moved = done["first_token_s"] + station.transfer * done["input_tokens"]
    return done.assign(
        output_tokens=requests["output_tokens"].to_numpy(), first_token_s=moved, finish_s=moved
    )


def _decode(prompts: pd.DataFrame, station: Station) -> pd.DataFrame:
    """The rest of the outputs of one decode group; what never came never ends."""
    going = ((prompts["output_tokens"] > 1) & np.isfinite(prompts["first_token_s"])).to_numpy()
    if not going.any():
        return prompts
    sent = prompts[going]
    done = _run(sent.assign(arrival_s=sent["first_token_s"]), station, received=True)
    table = prompts.copy()
    for name in ("finish_s", "worst_gap_s", "preemptions"):
        table.loc[going, name] = done[name].to_numpy()
    return table


def _figures(served: pd.DataFrame, span: float, offered: float, admitted: float) -> pd.Series:
    begin = WARM_UP * span
    weight = served["weight"].to_numpy()
    ended = (served["finish_s"] > begin) & (served["finish_s"] <= span)
    steady = served[(served["arrival_s"] >= begin).to_numpy()]
    steady = steady if len(steady) else served
    w = steady["weight"].to_numpy()
    within = float(w @ steady["in_time"] / w.sum())
    several = (steady["output_tokens"] > 1).to_numpy()
    tpot = steady["tpot"].to_numpy()[several]
    return pd.Series(
        {
            "offered": offered,
            "admitted": offered * admitted,
            "throughput": float(weight @ ended / (span - begin)),
            "goodput": offered * admitted * within,
            "within_deadlines": within,
            "ttft_p50": _quantile(steady["ttft"].to_numpy(), w, 0.5),
            "ttft_p95": _quantile(steady["ttft"].to_numpy(), w, 0.95),
            "tpot_mean": float(w[several] @ tpot / w[several].sum()) if several.any() else 0.0,
            "tpot_p95": _quantile(tpot, w[several], 0.95),
            "worst_gap_p99": _quantile(steady["worst_gap_s"].to_numpy()[several], w[several], 0.99),
            "preempted": float(w @ (steady["preemptions"] > 0) / w.sum()),
            "requests": float(len(served)),
        },
        index=FIGURES,
    )


def _run(requests: pd.DataFrame, station: Station, received: bool = False) -> pd.DataFrame:
    table = simulate(
        requests.reset_index(drop=True),
        pool=station.pool,
        step_cost=station.step,
        admission=Headroom(station.headroom) if station.headroom > 0 else None,
        max_running=station.max_running,
        max_batched_tokens=max(station.max_batched, station.max_running),
        received=received,
    ).requests
    late = (table["status"] == "refused").to_numpy()
    for name in ("first_token_s", "finish_s"):
        table.loc[late, name] = np.inf
    return table


def _quantile(values: Floats, weights: Floats, p: float) -> float:
    """The weighted quantile of what is known; 0 of nothing."""
    known = ~np.isnan(values)
    values, weights = values[known], weights[known]
    if not values.size:
        return 0.0
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    return float(values[order[min(np.searchsorted(sums, p * sums[-1]), values.size - 1)]])
