"""What the paper's question becomes in a paged engine: the tables of notebook 09.

Rules are set from one half of each trace's requests and judged on requests drawn from the other half. A
point is one group, one stream of requests and one seed; all rules of a point see the same requests. Loads are
shares of the saturated throughput of the *law*; what a finite stream *realised* is in a column of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from kvcache.ambiguity import Wasserstein1
from kvcache.engine import (
    BurstRule,
    Bursts,
    Demand,
    Headroom,
    JointLengths,
    MaxRunning,
    Reserve,
    Simulation,
    Watermark,
    headroom,
    lundberg_exponent,
    operating_point,
    preemptions_per_request,
    saturation,
    simulate,
)
from kvcache.engine.headroom import throughput_losses
from kvcache.engine.waiting import sample_latencies, waiting_share
from kvcache.groups import group
from kvcache.hardware import ParallelConfig
from kvcache.paper.builders import RADIUS
from kvcache.paper.digests.joint import JOINT, load_joint
from kvcache.paper.engine import workloads
from kvcache.paper.engine.workloads import A100, WORKLOADS
from kvcache.paper.experiments import sweep
from kvcache.paper.methods import rivals
from kvcache.paper.methods.baselines import FIXED_RULES
from kvcache.paper.methods.systems import SYSTEMS
from kvcache.paper.project import project_root
from kvcache.problem import Costs

__all__ = [
    "COST",
    "JOINT",
    "RULES",
    "WORKLOADS",
    "below",
    "best_headroom",
    "burst_frontier",
    "clear_wins",
    "compare",
    "engine_ratios",
    "intervals",
    "law_errors",
    "law_of_overflow",
    "lengths",
    "most_to_win",
    "newsvendor",
    "operating",
    "outgrown",
    "overall",
    "picture",
    "rates_against_default",
    "requests",
    "scarce",
    "scheduler_runs",
    "systems",
    "told",
]

Row = dict[str, Any]

COST = A100
MAX_RUNNING, MAX_TOKENS = 256, 2048
#: Deadlines of goodput: first token, and mean time per token after it; seconds.
TTFT_S, TPOT_S = 5.0, 0.1


@cache
def lengths(name: str, half: int) -> JointLengths:
    """Prompt and output lengths of a workload or a trace: half 0 to choose from, half 1 to judge on."""
    return workloads.lengths(name, half) if name in WORKLOADS else load_joint(name, half)


def requests(law: JointLengths, count: int, seed: int, rate: float | None = None) -> pd.DataFrame:
    """Requests drawn from a law, with Poisson arrivals; without a rate all are there at the start."""
    rng = np.random.default_rng(seed)
    inputs, outputs = law.sample(rng, count)
    arrival = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return pd.DataFrame(
        {
            "arrival_s": arrival,
            "input_tokens": np.maximum(inputs, 1),
            "output_tokens": np.maximum(outputs, 1),
        }
    )


# ---- rules --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What a rule may look at: past lengths, the pool, and the cost ratio that a reservation is for."""

    law: JointLengths
    pool: int
    ratio: float = 10.0

    @property
    def headroom(self) -> float:
        """u*, tokens."""
        return headroom(self.law, self.pool, COST)

    def fixed(self, name: str) -> float:
        """A reservation by one of the paper's rules, output tokens."""
        outputs = self.law.output_lengths
        if name == "DRO":
            return Wasserstein1(RADIUS, relative=True).reservation(outputs, self.ratio, 1.0)
        return float(min(FIXED_RULES[name](outputs, Costs(preemption=self.ratio)), outputs.upper))


def _bursts(at: Setting) -> Bursts:
    theta = lundberg_exponent(at.law)
    return Bursts(BurstRule(at.law.output_lengths, at.pool, theta, at.headroom))


def _few(at: Setting) -> MaxRunning:
    most = int(at.pool / (at.law.mean_input + at.fixed("P90")))
    return MaxRunning(int(np.clip(most, 1, MAX_RUNNING)))


def _watermark(share: float) -> Callable[[Setting], Watermark]:
    return lambda at: Watermark(share)


def _reserve(name: str) -> Callable[[Setting], Reserve]:
    return lambda at: Reserve(at.fixed(name))


#: Rules by name, each made from what is known beforehand. MC-SF alone sees true lengths.
RULES: Mapping[str, Callable[[Setting], Any]] = {
    "default": lambda at: None,
    **{f"watermark {share:g}": _watermark(share) for share in (0.005, 0.01, 0.02, 0.05)},
    "u*": lambda at: Headroom(at.headroom),
    "burst rule": _bursts,
    "median": lambda at: Reserve(float(at.law.output_lengths.quantile(0.5))),
    **{
        name: _reserve(name) for name in ("P90", "P95", "P99", "Mean", "LP+1sigma", "LP+2sigma", "SAA", "DRO")
    },
    "no evict (L_max)": _reserve("Max"),
    "max running": _few,
    "Past-Future": lambda at: rivals.PastFuture(at.law.upper),
    "SGLang": lambda at: rivals.SGLang(at.law.upper),
    "exclusive batching": lambda at: rivals.exclusive_batching(at.law.mean_input, at.law.mean_output),
    "dynamic batching": lambda at: rivals.DynamicBatching(),
    "prompt + half limit": lambda at: rivals.prompt_and_share(at.law.upper, 0.5),
    "MC-SF (true lengths)": lambda at: rivals.ShortestFirst(),
}


# ---- one group ----------------------------------------------------------------------------------


def run_group(table: pd.DataFrame, pool: int, admission: Any = None, **options: Any) -> Simulation:
    """The group of this notebook."""
    limits = {"max_running": MAX_RUNNING, "max_batched_tokens": MAX_TOKENS, "step_cost": COST}
    return simulate(table, pool=pool, admission=admission, **{**limits, **options})


def scores(run: Simulation, pool: int) -> Row:
    """What users and operators see of a run. Shares are of all requests; a refused one is never good."""
    rows = run.requests
    ttft = rows["first_token_s"] - rows["arrival_s"]
    more = (rows["output_tokens"] - 1).to_numpy()
    tpot = np.divide(rows["finish_s"] - rows["first_token_s"], more, out=np.zeros(more.size), where=more > 0)
    good = (ttft <= TTFT_S) & (tpot <= TPOT_S)
    line = run.timeline
    spent = np.diff(line["time_s"], append=line["time_s"].iloc[-1])
    latency = rows["finish_s"] - rows["arrival_s"]
    return {
        "goodput": float(good.mean()),
        "throughput": run.throughput,
        "preempted": float((rows["preemptions"] > 0).mean()),
        "preemptions": run.preemptions / len(rows),
        "recomputing": float(COST.per_prefill_token * rows["recomputed_tokens"].sum() / run.seconds),
        "worst_gap_p99_s": float(rows["worst_gap_s"].quantile(0.99)),
        "ttft_p99_s": float(ttft.quantile(0.99)),
        "tpot_p99_s": float(np.nanquantile(tpot[more > 0], 0.99)),
        "latency_p99_s": float(latency.quantile(0.99)),
        "used": float(np.average(16 * line["used_blocks"] / pool, weights=spent)),
        "refused": int((rows["status"] == "refused").sum()),
    }


def point(
    workload: str,
    pool: int,
    load: float,
    seed: int,
    count: int,
    rules: Sequence[str],
    scale: float = 1.0,
    known: float = 1.0,
    ratio: float = 10.0,
    prefix_cache: bool = True,
) -> list[Row]:
    """One stream of requests under each rule.

    scale : of the outputs that come; known : of those that the rules were made from, 1 for what was seen.
    load : arrivals per second over what the group could serve before outputs changed.
    """
    past, law = lengths(workload, 0), lengths(workload, 1)
    capacity = saturation(Demand.of(law), COST, pool, MAX_RUNNING, MAX_TOKENS).throughput
    table = requests(law if scale == 1 else law.scale(scale), count, seed, load * capacity)
    drawn = JointLengths.from_samples(table["input_tokens"], table["output_tokens"])
    most = saturation(Demand.of(drawn), COST, pool, MAX_RUNNING, MAX_TOKENS).throughput
    at = Setting(past if known == 1 else past.scale(known), pool, ratio)
    what = {"workload": workload, "pool": pool, "load": load, "seed": seed, "scale": scale, "known": known}
    what |= {"ratio": ratio, "realised": count / float(table["arrival_s"].iloc[-1]) / most}
    return [
        what
        | {"rule": rule}
        | scores(run_group(table, pool, RULES[rule](at), prefix_cache=prefix_cache), pool)
        for rule in rules
    ]


def compare(
    workloads: Iterable[str],
    pools: Iterable[int],
    loads: Iterable[float],
    seeds: int,
    count: int,
    rules: Sequence[str] = tuple(RULES),
    **options: Sequence[float],
) -> pd.DataFrame:
    """Every rule at every point: one row per workload, pool, load, seed and rule.

    ``options`` are further axes: ``scale``, ``known``, ``ratio``.
    """
    axes = pd.MultiIndex.from_product(
        [list(workloads), list(pools), list(loads), range(seeds), *options.values()],
        names=["workload", "pool", "load", "seed", *options],
    )
    tasks = axes.to_frame(index=False).to_dict("records")
    return sweep.table(point, [task | {"count": count, "rules": list(rules)} for task in tasks])


def intervals(table: pd.DataFrame, by: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Means over seeds with a 95 % interval (Student's t): ``<column>, <column>_low, <column>_high``."""
    from scipy.stats import t

    rows = []
    for key, own in table.groupby(list(by), sort=False):
        row: Row = dict(zip(by, key, strict=True)) | {"seeds": own["seed"].nunique()}
        for column in columns:
            values = own[column].dropna()
            half = t.ppf(0.975, len(values) - 1) * values.sem() if len(values) > 1 else np.nan
            row |= {column: values.mean(), f"{column}_low": values.mean() - half}
            row[f"{column}_high"] = values.mean() + half
        rows.append(row)
    return pd.DataFrame(rows)


def rates_against_default(table: pd.DataFrame) -> pd.DataFrame:
    """Goodput of each rule less the default's on the same requests, with intervals over the seeds."""
    key = ["workload", "pool", "load"]
    wide = table.pivot(index=[*key, "seed"], columns="rule", values="goodput")
    gain = wide.sub(wide["default"], axis=0).drop(columns="default")
    long = gain.melt(ignore_index=False, value_name="gain").reset_index()
    return intervals(long, [*key, "rule"], ["gain"])


# ---- one picture --------------------------------------------------------------------------------


def picture(
    workload: str, pool: int, load: float, seed: int, count: int, share: float = 0.0
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A run from event to event, and its requests.

    Returns
    -------
    line : ``time_s, used`` (share of the blocks), ``running, waiting``, and between this row and the one
        before ``arrived, finished, entered, evicted``: where less run than have not finished, some were
        evicted; where more do, some have entered. Several of both within one iteration cancel out, and
        a request that ends as it enters may be taken for an eviction.
    rows : the requests of the `Simulation`.
    """
    law = lengths(workload, 1)
    capacity = saturation(Demand.of(law), COST, pool, MAX_RUNNING, MAX_TOKENS).throughput
    run = run_group(requests(law, count, seed, load * capacity), pool, Watermark(share))
    line, rows = run.timeline.copy(), run.requests
    ends = np.sort(rows["finish_s"].dropna())
    # Where requests end there are two rows of the same time, before and after.
    before = line["time_s"].duplicated(keep="last")
    done = [np.searchsorted(ends, line["time_s"], side=side) for side in ("left", "right")]
    line["finished"] = np.diff(np.where(before, *done), prepend=0)
    line["arrived"] = (line["running"] + line["waiting"]).diff().fillna(line["running"] + line["waiting"])
    line["arrived"] = (line["arrived"] + line["finished"]).astype(int)
    came = line["running"].diff().fillna(line["running"]) + line["finished"]
    line["entered"] = came.clip(lower=0).astype(int)
    line["evicted"] = (-came).clip(lower=0).astype(int)
    return line.assign(used=16 * line["used_blocks"] / pool).drop(columns="used_blocks"), rows


# ---- operating point ----------------------------------------------------------------------------


def operating_task(workload: str, pool: int, load: float, seed: int, count: int) -> Row:
    """The operating point at the realised rate, and what was simulated after the first 20 % of arrivals."""
    law = lengths(workload, 1)
    demand = Demand.of(law)
    most = saturation(demand, COST, pool, MAX_RUNNING, MAX_TOKENS).throughput
    table = requests(law, count, seed, load * most)
    drawn = Demand.of(JointLengths.from_samples(table["input_tokens"], table["output_tokens"]))
    rate = count / float(table["arrival_s"].iloc[-1])
    found = operating_point([drawn], [rate], COST)
    run = run_group(table, pool)
    rows, line = run.requests, run.timeline
    long = rows[rows["output_tokens"] > 1]
    tpot = (long["finish_s"] - long["first_token_s"]) / (long["output_tokens"] - 1)
    end = float(table["arrival_s"].iloc[-1])
    inside = line["time_s"].between(0.2 * end, end)
    weights = np.diff(line["time_s"], append=line["time_s"].iloc[-1])[inside]
    return {
        "workload": workload,
        "pool": pool,
        "load": load,
        "seed": seed,
        "realised": rate / saturation(drawn, COST, pool, MAX_RUNNING, MAX_TOKENS).throughput,
        "rho_c": found.load,
        "predicted_tpot_s": found.tpot,
        "tpot_median_s": float(tpot.median()),
        "predicted_running": found.running,
        "running": float(np.average(line["running"][inside], weights=weights)),
        "preempted": float((rows["preemptions"] > 0).mean()),
    }


def operating(
    workloads: Iterable[str], pools: Iterable[int], loads: Iterable[float], seeds: int, count: int
) -> pd.DataFrame:
    """The operating point of 9.2 against the simulation."""
    tasks = [
        {"workload": w, "pool": pool, "load": float(load), "seed": seed, "count": count}
        for w in workloads
        for pool in pools
        for load in loads
        for seed in range(seeds)
    ]
    return sweep.table(operating_task, tasks)


# ---- overflow -----------------------------------------------------------------------------------


def steady(run: Simulation) -> tuple[float, float]:
    """(preemptions per request, requests/s) of a group with a queue, in the middle of the run."""
    rows = run.requests[run.requests["status"] == "finished"].sort_values("admitted_s")
    middle = rows.iloc[int(0.15 * len(rows)) : int(0.8 * len(rows))]
    finished = np.sort(rows["finish_s"])
    low, high = int(0.15 * len(rows)), int(0.8 * len(rows))
    return float(middle["preemptions"].mean()), (high - low) / float(finished[high] - finished[low])


def outgrown_task(workload: str, pool: int, quantile: float, seed: int, count: int) -> Row:
    """A saturated pool whose number of running requests is what a reservation of that quantile allows."""
    past, law = lengths(workload, 0), lengths(workload, 1)
    eta = float(past.output_lengths.quantile(quantile))
    limit = int(np.clip(pool / (past.mean_input + eta), 1, MAX_RUNNING))
    table = requests(law, count, seed)
    run = run_group(table, pool, None, max_running=limit)
    rows = run.requests
    evicted = rows["preemptions"] > 0
    outgrew = rows["output_tokens"] > eta
    return {
        "workload": workload,
        "pool": pool,
        "quantile": quantile,
        "seed": seed,
        "eta": eta,
        "running": limit,
        "outgrow": float(outgrew.mean()),
        "preempted": float(evicted.mean()),
        "evicted": int(evicted.sum()),
        "evicted_outgrew": float(outgrew[evicted].mean()) if evicted.any() else np.nan,
        "output_all": float(rows["output_tokens"].mean()),
        "output_evicted": float(rows.loc[evicted, "output_tokens"].mean()),
        "reserved_preempted": float(
            (run_group(table, pool, Reserve(eta)).requests["preemptions"] > 0).mean()
        ),
    }


def outgrown(
    workloads: Iterable[str], pools: Iterable[int], quantiles: Iterable[float], seeds: int, count: int
) -> pd.DataFrame:
    """P(xi > eta), the paper's probability of preemption, beside the share that an engine evicts."""
    tasks = [
        {"workload": w, "pool": pool, "quantile": q, "seed": seed, "count": count}
        for w in workloads
        for pool in pools
        for q in quantiles
        for seed in range(seeds)
    ]
    return sweep.table(outgrown_task, tasks)


def saturated_task(
    workload: str, pool: int, multiples: Sequence[float], seed: int, count: int, prefix_cache: bool = True
) -> list[Row]:
    """A pool whose queue is never empty, at headrooms of so many 1 / theta."""
    law = lengths(workload, 1)
    theta, demand = lundberg_exponent(law), Demand.of(law)
    table = requests(law, count, seed)
    full = saturation(demand, COST, pool, MAX_RUNNING, MAX_TOKENS)
    rows = []
    for multiple in multiples:
        u = multiple / theta
        run = run_group(table, pool, Headroom(u), prefix_cache=prefix_cache)
        preemptions, throughput = steady(run)
        rows.append(
            {
                "workload": workload,
                "pool": pool,
                "seed": seed,
                "multiple": multiple,
                "headroom": u,
                "per_theta": 1 / theta,
                "running": full.running,
                "requests": count,
                "preemptions": preemptions,
                "predicted": preemptions_per_request(law, u),
                "corrected": preemptions_per_request(law, u, running=min(full.running, MAX_RUNNING)),
                "throughput": throughput,
                "predicted_throughput": full.throughput,
            }
        )
    return rows


def law_of_overflow(
    cells: Iterable[tuple[str, int]], multiples: Sequence[float], seeds: int, count: int
) -> pd.DataFrame:
    """Preemptions per request of saturated pools, counted and by the exponential law.

    ``cells`` are (trace or workload, pool). The lengths are of the half that the requests are drawn from,
    since what is judged is the law and not a choice. ``running`` tells where the limit on running requests
    binds and not memory: nothing overflows there.
    """
    tasks = [
        {"workload": w, "pool": pool, "multiples": list(multiples), "seed": seed, "count": count}
        for w, pool in cells
        for seed in range(seeds)
    ]
    return sweep.table(saturated_task, tasks)


def scheduler_runs() -> pd.DataFrame:
    """Saturated runs of vLLM's own scheduler beside the law, from ``data/engine/vllm.csv``.

    That table is committed and made in the engine environment (``make engine-check`` compares with it), so
    vLLM is not needed here. Without the table: no rows. Preemptions are per request of the whole run.
    """
    columns = ["workload", "pool", "headroom", "requests", "preemptions", "law", "with_overshoot"]
    path = project_root() / "data" / "engine" / "vllm.csv"
    if not path.is_file():
        return pd.DataFrame(columns=columns)
    runs = pd.read_csv(path, keep_default_na=False)
    own = runs[
        runs["workload"].isin(list(WORKLOADS))
        & (runs["scheduler"] == "Scheduler")
        & (runs["rate"].astype(float) == np.inf)
        & (runs["requests"] >= 300)
    ]
    rows = []
    for run in own.itertuples():
        law = lengths(run.workload, 1)
        busy = saturation(Demand.of(law), COST, run.pool, MAX_RUNNING, MAX_TOKENS).running
        predicted = [preemptions_per_request(law, run.headroom, running=b) for b in (0.0, busy)]
        counted = run.preemptions / run.requests
        values = (run.workload, run.pool, run.headroom, run.requests, counted, *predicted)
        rows.append(dict(zip(columns, values, strict=True)))
    return pd.DataFrame(rows, columns=columns)


def scarce(name: str, pool: int) -> bool:
    """Whether every request fits the pool and memory, not the limit on running requests, fills it."""
    law = lengths(name, 1)
    most = saturation(Demand.of(law), COST, pool, np.inf, MAX_TOKENS).running
    return law.longest <= pool and most < 0.9 * MAX_RUNNING


# ---- the newsvendor of the pool -----------------------------------------------------------------


def newsvendor(saturated: pd.DataFrame) -> pd.DataFrame:
    """The two costs of a headroom by the formulas, and the measured throughput lost, both in %.

    Measured is the loss against the best headroom of the grid (picked afterwards, on the mean of the seeds);
    the formulas' sum is likewise less its own smallest value.
    """
    rows = []
    for (workload, pool), own in saturated.groupby(["workload", "pool"], sort=False):
        law = lengths(workload, 0)
        best = own.groupby("multiple")["throughput"].mean().idxmax()
        top = own[own["multiple"] == best].set_index("seed")["throughput"]
        for multiple, part in own.groupby("multiple"):
            u = float(part["headroom"].iloc[0])
            idle, again = throughput_losses(law, u, pool, COST, max_running=MAX_RUNNING)
            lost = 100 * (1 - part.set_index("seed")["throughput"] / top)
            rows.append(
                {
                    "workload": workload,
                    "pool": pool,
                    "multiple": multiple,
                    "headroom": u,
                    "idle_pct": 100 * idle,
                    "recomputed_pct": 100 * again,
                    "sum_pct": 100 * (idle + again),
                    "lost_pct": lost.mean(),
                    "lost_sem_pct": lost.sem(),
                    "best": multiple == best,
                    "u_star": headroom(law, pool, COST),
                }
            )
    return pd.DataFrame(rows)


def best_headroom(table: pd.DataFrame) -> pd.DataFrame:
    """u* beside the best of the grid, and what each brings over no headroom, % of the throughput."""
    rows = []
    for (workload, pool), own in table.groupby(["workload", "pool"], sort=False):
        own = own.sort_values("headroom")
        u = float(own["u_star"].iloc[0])
        at = np.interp(u, own["headroom"], own["lost_pct"])
        law = lengths(workload, 0)
        costs = [sum(throughput_losses(law, x, pool, COST, max_running=MAX_RUNNING)) for x in (0.0, u)]
        rows.append(
            {
                "workload": workload,
                "pool": pool,
                "u_star": u,
                "u_star_share": u / pool,
                "best_share": float(own.loc[own["best"], "headroom"].iloc[0]) / pool,
                "gain_predicted_pct": 100 * (costs[0] - costs[1]),
                "gain_pct": float(own["lost_pct"].iloc[0] - at),
                "gain_best_pct": float(own["lost_pct"].iloc[0]),
                "sem_pct": float(own["lost_sem_pct"].iloc[0]),
            }
        )
    return pd.DataFrame(rows)


def law_errors(table: pd.DataFrame, least: int = 30) -> pd.DataFrame:
    """Counted over predicted preemptions, less 1, by cell; NaN where fewer than ``least`` were counted.

    ``error_corrected`` is that of the law with the batch's overshoot, `preemptions_per_request(running=)`.
    """
    rows = []
    for key, own in table.groupby(["workload", "pool", "multiple"], sort=False):
        counted = own["preemptions"].mean()
        enough = (own["preemptions"] * own["requests"]).sum() >= least
        row: Row = dict(zip(("workload", "pool", "multiple"), key, strict=True)) | {"counted": counted}
        for law, error in (("predicted", "error"), ("corrected", "error_corrected")):
            row[error] = counted / own[law].mean() - 1 if enough else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def told(errors: pd.DataFrame, column: str = "error") -> str:
    """How well a law does over its cells, in a sentence."""
    off = errors[column].abs().dropna()
    return (
        f"{len(off)} cells: median error {off.median():.0%}, {(off <= 0.15).sum()} within 15 %, "
        f"{(off <= 0.2).sum()} within 20 %, {(off <= 0.25).sum()} within 25 %, largest {off.max():.0%}"
    )


KEY = ["workload", "pool", "load"]


def overall(table: pd.DataFrame) -> pd.DataFrame:
    """Each rule over all points: means, and at how many points it is clearly off the default.

    One row is no rule: the watermark that was best at each point, picked afterwards on the mean of the seeds.
    """
    marks = table[table["rule"].str.startswith("watermark") | (table["rule"] == "default")]
    mean = marks.groupby([*KEY, "rule"])["goodput"].mean().unstack()
    best = mean.idxmax(axis=1).rename("rule").reset_index()
    picked = marks.merge(best, on=[*KEY, "rule"]).assign(rule="best watermark, picked after")
    both = pd.concat([table, picked])
    gains = rates_against_default(both)
    clear = gains.groupby("rule").agg(
        above=("gain_low", lambda x: int((x > 0).sum())), below=("gain_high", lambda x: int((x < 0).sum()))
    )
    means = both.groupby("rule", sort=False)[
        ["goodput", "throughput", "preempted", "worst_gap_p99_s", "ttft_p99_s", "refused"]
    ].mean()
    rows = means.join(clear).fillna({"above": 0, "below": 0}).astype({"above": int, "below": int})
    return rows.sort_values("goodput", ascending=False).reset_index()


def clear_wins(gains: pd.DataFrame, rule: str) -> pd.DataFrame:
    """By workload and pool: at how many loads a rule is above, below, or not to be told from the default."""
    own = gains[gains["rule"] == rule]
    verdict = np.where(own["gain_low"] > 0, "above", np.where(own["gain_high"] < 0, "below", "neither"))
    counts = own.assign(verdict=verdict).groupby(["workload", "pool", "verdict"]).size().unstack(fill_value=0)
    return counts.reindex(columns=["above", "neither", "below"], fill_value=0)


def most_to_win(table: pd.DataFrame) -> pd.DataFrame:
    """What the default recomputes: no rule that only avoids evictions can win more throughput."""
    own = table[table["rule"] == "default"]
    return intervals(own, ["workload", "pool", "load"], ["recomputing", "preemptions"])


# ---- below saturation ---------------------------------------------------------------------------


def below_task(workload: str, pool: int, load: float, seed: int, count: int) -> Row:
    """Preemptions and tails of latency below saturation, predicted and counted after the first fifth.

    The prediction knows the lengths, the realised rate, and the throughput of one saturated run.
    """
    law = lengths(workload, 1)
    capacity = steady(run_group(requests(law, count, seed), pool))[1]
    table = requests(law, count, seed, load * capacity)
    rate = count / float(table["arrival_s"].iloc[-1])
    drawn = JointLengths.from_samples(table["input_tokens"], table["output_tokens"])
    known = {"max_running": MAX_RUNNING, "throughput": capacity}
    rows = run_group(table, pool).requests.iloc[count // 5 :]
    more = rows[rows["output_tokens"] > 1]
    tpot = (more["finish_s"] - more["first_token_s"]) / (more["output_tokens"] - 1)
    row = {"workload": workload, "pool": pool, "load": load, "seed": seed, "requests": len(rows)}
    row |= {
        "realised": rate / capacity,
        "preemptions": float(rows["preemptions"].mean()),
        "ttft_p99_s": float((rows["first_token_s"] - rows["arrival_s"]).quantile(0.99)),
        "tpot_p99_s": float(tpot.quantile(0.99)),
    }
    if rate >= capacity:
        return row | dict.fromkeys(("predicted", "predicted_ttft_p99_s", "predicted_tpot_p99_s"))
    busy = saturation(Demand.of(drawn), COST, pool, MAX_RUNNING, MAX_TOKENS).running
    full = preemptions_per_request(drawn, 0.0, running=busy)
    ttft, tpots = sample_latencies(
        drawn, rate, COST, pool, np.random.default_rng(seed), max_batched_tokens=MAX_TOKENS, **known
    )
    return row | {
        "predicted": waiting_share(drawn, rate, COST, pool, **known) * full,
        "predicted_ttft_p99_s": float(np.quantile(ttft, 0.99)),
        "predicted_tpot_p99_s": float(np.quantile(tpots, 0.99)),
    }


def below(cells: Iterable[tuple[str, int]], loads: Iterable[float], seeds: int, count: int) -> pd.DataFrame:
    """What a group below saturation does, predicted and counted, and the errors of the means."""
    tasks = [
        {"workload": w, "pool": pool, "load": load, "seed": seed, "count": count}
        for w, pool in cells
        for load in loads
        for seed in range(seeds)
    ]
    table = sweep.table(below_task, tasks).astype({"predicted": float})
    mean = table.groupby(KEY, sort=False).mean(numeric_only=True).reset_index().drop(columns="seed")
    enough = (mean["preemptions"] * mean["requests"] * seeds) >= 30
    mean["preemptions_error"] = (mean["predicted"] / mean["preemptions"] - 1).where(enough)
    for name in ("ttft_p99_s", "tpot_p99_s"):
        mean[name.replace("_s", "_error")] = mean[f"predicted_{name}"] / mean[name] - 1
    return mean


# ---- systems ------------------------------------------------------------------------------------


def system_task(system: str, workload: str, pool: int, load: float, seed: int, count: int) -> Row:
    """One system; two groups of it, where it needs them, get twice the arrivals."""
    law, past = lengths(workload, 1), lengths(workload, 0)
    chosen = SYSTEMS[system]
    capacity = saturation(Demand.of(law), COST, pool, MAX_RUNNING, MAX_TOKENS).throughput
    table = requests(law, count * chosen.groups, seed, load * capacity * chosen.groups)
    run = chosen.run(
        table, pool=pool, step_cost=COST, limit=float(past.upper), rng=np.random.default_rng(seed)
    )
    what = {"system": system, "workload": workload, "pool": pool, "load": load, "seed": seed}
    return what | scores(run, pool)


def systems(
    workloads: Iterable[str], pools: Iterable[int], loads: Iterable[float], seeds: int, count: int
) -> pd.DataFrame:
    """The systems of the paper's Table I and its neighbours on the same requests."""
    tasks = [
        {"system": s, "workload": w, "pool": pool, "load": load, "seed": seed, "count": count}
        for s in SYSTEMS
        for w in workloads
        for pool in pools
        for load in loads
        for seed in range(seeds)
    ]
    return sweep.table(system_task, tasks)


# ---- what rho is in an engine -------------------------------------------------------------------


def engine_ratios(
    workloads: Iterable[str], groups: Iterable[tuple[str, str, int]], reserve: float = 1.0
) -> pd.DataFrame:
    """The cost ratio that measured step times imply, with and without a prefix cache.

    The two costs of a headroom, e u / M and K_0 exp(-theta u), are a newsvendor's with an exponential demand
    of mean 1 / theta: overage e / M per token, and underage theta K_0 per token of unmet growth. So

        rho = theta M K_0 / e,   u* = max(0, ln(rho) / theta).

    Parameters
    ----------
    groups : (model, GPU, tensor parallel). reserve : share of the pool that prefixes leave.
    """
    rows = []
    for model, gpu, tensor in groups:
        found = group(model, gpu, parallel=ParallelConfig(tensor))
        pool = found.kv_tokens * reserve
        for workload in workloads:
            law = lengths(workload, 0)
            demand, theta = Demand.of(law), lundberg_exponent(law)
            running = min(pool / demand.context, 256.0)
            cost = found.refit(running, demand.context).cost
            for cached in (True, False):
                idle, _ = throughput_losses(law, 1.0, pool, cost, prefix_cache=cached)
                _, again = throughput_losses(law, 0.0, pool, cost, prefix_cache=cached)
                u = headroom(law, pool, cost, prefix_cache=cached)
                rows.append(
                    {
                        "model": model.split("/")[-1],
                        "gpu": gpu.split("_")[0].upper(),
                        "tensor": tensor,
                        "workload": workload,
                        "prefix_cache": cached,
                        "pool": pool,
                        "fits": pool / demand.context,
                        "rho": theta * again / idle,
                        "u_star": u,
                        "watermark": u / pool,
                    }
                )
    return pd.DataFrame(rows)


# ---- bursts -------------------------------------------------------------------------------------

#: https://github.com/vllm-project/vllm/pull/44594: preemptions reported by watermark.
REPORTED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.1: 168}
BURST_POOL, BURST_RUNNING = 299_584, 128


def burst_task(watermark: float, seed: int) -> Row:
    """450 alike requests at once, at most 128 running, no prefix cache.

    ``watermark`` below 0 stands for the burst rule, made from other requests of the same kind.
    """
    table = workloads.burst(seed)
    past = workloads.burst(seed + 1_000, 10_000)
    law = JointLengths.from_samples(past["input_tokens"], past["output_tokens"])
    if watermark >= 0:
        admission: Any = Watermark(watermark)
    else:
        u = headroom(law, BURST_POOL, COST, prefix_cache=False)
        admission = Bursts(BurstRule(law.output_lengths, BURST_POOL, lundberg_exponent(law), u))
    run = run_group(table, BURST_POOL, admission, max_running=BURST_RUNNING, prefix_cache=False)
    return {
        "watermark": watermark,
        "rule": "burst rule" if watermark < 0 else f"watermark {watermark:g}",
        "seed": seed,
        "preemptions": run.preemptions,
        "reported": REPORTED.get(watermark, np.nan),
        "worst_gap_s": float(run.requests["worst_gap_s"].max()),
        "throughput": run.throughput,
    }


def burst_frontier(watermarks: Iterable[float], seeds: int) -> pd.DataFrame:
    """A public report's four watermarks, and the burst rule, by seed."""
    return sweep.table(
        burst_task,
        [{"watermark": float(w), "seed": seed} for w in (*watermarks, -1.0) for seed in range(seeds)],
    )
