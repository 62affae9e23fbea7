"""Serving systems of the paper's Table I and its neighbours, each as it acts in an engine.

Every system is a function of requests, pool and step cost that runs the same simulated group, changed where
the system differs: what is reserved, how prompts are computed, how much of the cache is kept. `SYSTEMS` names
them with their sources and with what is simplified. Memory and time are simulated, and nothing else: systems
that drop tokens (H2O, SnapKV, GrowPage, GraceKV) answer worse than they seem to here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kvcache.engine.admission import Candidate, Gate, Reserve, Running, Watermark, per_row
from kvcache.engine.fleet import round_robin, simulate_groups
from kvcache.engine.group import Kept
from kvcache.engine.simulation import Simulation, simulate
from kvcache.engine.steps import StepCost

__all__ = ["SYSTEMS", "Padded", "Predicted", "SharedBudget", "System", "predictions"]

Floats = NDArray[np.float64]
#: Tokens per iteration where a system sets no limit.
UNLIMITED = 10**9


def predictions(outputs: ArrayLike, error: float, rng: np.random.Generator) -> Floats:
    """(n,) predicted lengths: true ones times a lognormal of mean 1 and a deviation of about ``error``."""
    outputs = np.asarray(outputs, dtype=float)
    return outputs * np.exp(rng.normal(-(error**2) / 2, error, outputs.size)) if error else outputs


@dataclass(frozen=True)
class Predicted:
    """Reserve a predicted length and ``margin`` standard deviations of its error; who outgrows it leaves.

    An evicted request comes back with its limit reserved, or with twice its reservation if there is none.
    Nobody else is ever evicted. With a ``class``'s eta for all of its requests this is the paper's own rule.

    Parameters
    ----------
    lengths : predicted output, as of `Reserve`. error : its relative standard deviation. margin : k of LP + k
    sigma. limit : what a request may generate, as of `Reserve`.
    """

    lengths: float | Mapping[str, float] | ArrayLike
    error: float = 0.0
    margin: float = 0.0
    limit: float | Mapping[str, float] | ArrayLike | None = None

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        eta = np.ceil(per_row(self.lengths, requests) * (1 + self.margin * self.error))
        limit = None if self.limit is None else per_row(self.limit, requests)
        return _Predicted(np.maximum(eta, 1), limit, blocks, block)


class _Predicted(Gate):
    def __init__(self, eta: Floats, limit: Floats | None, blocks: int, block: int) -> None:
        self.eta, self.limit, self.blocks, self.block = eta, limit, blocks, block
        self.entered: set[int] = set()

    def reserved(self, candidate: Candidate) -> float:
        """More than before, once it has been evicted."""
        if candidate.row not in self.entered:
            return self.eta[candidate.row]
        return 2 * self.eta[candidate.row] if self.limit is None else self.limit[candidate.row]

    def admits(self, running: Running, candidate: Candidate) -> bool:
        held = np.ceil((running.input_tokens + self.eta[running.rows]) / self.block).sum()
        own = np.ceil((candidate.input_tokens + self.reserved(candidate)) / self.block)
        return bool(held + own <= self.blocks)

    def enters(self, candidate: Candidate, running: int) -> int:
        self.eta[candidate.row] = self.reserved(candidate)
        self.entered.add(candidate.row)
        return int(self.eta[candidate.row])


@dataclass(frozen=True)
class Padded:
    """MC2: a prediction padded so that it is rarely exceeded, less so in a rush, and a reserve for all.

    The padding is Hoeffding's bound for an error within +- ``spread`` of the prediction, 2 x spread x
    sqrt(ln(1 / risk) / 2), times min(1, mean arrival rate so far / arrival rate over the last ``window``
    requests). ``reserve`` of the pool is left free when a request enters, and serves those that outgrow their
    padding.

    Parameters
    ----------
    lengths : predicted output of each request.
    """

    lengths: ArrayLike
    spread: float = 0.25
    risk: float = 0.05
    reserve: float = 0.03
    window: int = 32

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        arrival = requests["arrival_s"].to_numpy(float)
        order = np.argsort(arrival, kind="stable")
        times, number = arrival[order] - arrival.min(initial=np.inf), np.arange(1, arrival.size + 1)
        back = np.maximum(number - 1 - self.window, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rush = (times - times[back]) / (number - 1 - back) * (number - 1) / times
        calm = np.empty(arrival.size)
        calm[order] = np.clip(np.nan_to_num(rush, nan=1.0, posinf=1.0), 0, 1)
        padding = 2 * self.spread * np.sqrt(np.log(1 / self.risk) / 2) * calm
        eta = per_row(self.lengths, requests) * (1 + padding)
        return Reserve(np.ceil(eta)).gate(requests, int(blocks * (1 - self.reserve)), block)


@dataclass(frozen=True)
class SharedBudget:
    """A step cost for requests that share one budget of cached tokens, whatever they would hold alone."""

    step_cost: StepCost
    tokens: float

    def seconds(self, decoding, cached_tokens, prefill_tokens=0):
        """Seconds of iterations."""
        return self.step_cost.seconds(decoding, np.minimum(cached_tokens, self.tokens), prefill_tokens)

    def span(self, decoding: int, cached_tokens: float, steps: int) -> float:
        """Seconds of that many iterations without prompts: up to the budget, and at it."""
        below = min(steps, max(0, int(-(-(self.tokens - cached_tokens) // max(decoding, 1)))))
        seconds = self.step_cost.span(decoding, cached_tokens, below) if below else 0.0
        return seconds + (steps - below) * self.step_cost.seconds(decoding, self.tokens)


@dataclass(frozen=True)
class System:
    """A system: ``run(requests, pool=, step_cost=, limit=, rng=)``, where it is from, what is simplified.

    limit : what a client lets a request generate. rng : for systems that predict. groups : serving groups of
    ``pool`` tokens that it takes.
    """

    name: str
    source: str
    simplified: str
    run: Callable[..., Simulation]
    groups: int = 1


def vllm(requests, *, pool, step_cost, limit=None, rng=None) -> Simulation:
    """Blocks on demand, chunked prompts, the last admitted evicted."""
    return simulate(requests, pool=pool, step_cost=step_cost)


def whole_prompts(requests, *, pool, step_cost, limit=None, rng=None) -> Simulation:
    """Prompts first and whole, in iterations in which nobody decodes: vLLM before chunked prefill."""
    return simulate(
        requests,
        pool=pool,
        step_cost=step_cost,
        admission=Watermark(0.01),
        max_batched_tokens=4_096,
        prompts="alone",
        prefix_cache=False,
    )


def sarathi(requests, *, pool, step_cost, limit=None, rng=None, budget=512) -> Simulation:
    """Decoding requests first, then a chunk of a prompt, within a small budget of tokens."""
    return simulate(
        requests,
        pool=pool,
        step_cost=step_cost,
        admission=Watermark(0.01),
        max_batched_tokens=budget,
        prefix_cache=False,
    )


def orca(requests, *, pool, step_cost, limit, rng=None) -> Simulation:
    """Batches change every iteration; the limit of a request is held from its start; prompts whole."""
    return simulate(
        requests,
        pool=pool,
        step_cost=step_cost,
        admission=Reserve(limit),
        max_batched_tokens=UNLIMITED,
        prompts="whole",
        prefix_cache=False,
    )


def distserve(
    requests,
    *,
    pool,
    step_cost,
    limit=None,
    rng=None,
    prefill_groups=1,
    decode_groups=1,
    move_s_per_token=328e3 / 25e9,
    move_s=0.0,
) -> Simulation:
    """Prompts in groups of their own; the cache then moves to a group that decodes.

    ``move_s_per_token`` defaults to 0.328 MB per token (70B, 8 KV heads) over 25 GB/s.
    """
    alone = {"pool": pool, "step_cost": step_cost, "max_batched_tokens": 4_096, "prompts": "alone"}
    first = simulate_groups(
        requests.assign(output_tokens=1),
        [alone | {"prefix_cache": False}] * prefill_groups,
        round_robin(requests, prefill_groups),
    ).requests
    served = (first["status"] == "finished").to_numpy()
    more = served & (requests["output_tokens"].to_numpy() > 1)
    moved = first["finish_s"] + move_s + move_s_per_token * requests["input_tokens"]
    passed = requests[more].assign(arrival_s=moved[more])
    second = simulate_groups(
        passed,
        [{"pool": pool, "step_cost": step_cost, "received": True}] * decode_groups,
        round_robin(passed, decode_groups),
    )
    rows = first.drop(columns="group").assign(output_tokens=requests["output_tokens"])
    later = second.requests
    for name in ("status", "reason", "finish_s", "preemptions", "recomputed_tokens"):
        rows.loc[more, name] = later[name]
    gap = np.fmax(later["worst_gap_s"], later["first_token_s"] - first.loc[more, "first_token_s"])
    rows.loc[more, "worst_gap_s"] = gap
    lost = rows["status"] == "refused"
    rows.loc[lost, ["admitted_s", "first_token_s", "finish_s"]] = np.nan
    start = requests["arrival_s"].min()
    line = pd.concat([group.timeline for group in second.groups]).sort_values("time_s", ignore_index=True)
    steps = sum(group.steps for group in second.groups)
    return Simulation(rows, float(rows["finish_s"].max() - start), steps, line)


def s3(requests, *, pool, step_cost, limit=None, rng, error=0.25, margin=1.0) -> Simulation:
    """A predicted length is reserved, with a margin; who outgrows it leaves and gets twice as much."""
    lengths = predictions(requests["output_tokens"], error, rng)
    rule = Predicted(lengths if limit is None else np.minimum(lengths, limit), error, margin)
    return simulate(requests, pool=pool, step_cost=step_cost, admission=rule, prefix_cache=False)


def mc2(requests, *, pool, step_cost, limit=None, rng, error=0.25) -> Simulation:
    """A predicted length, padded, and a reserve for all."""
    rule = Padded(predictions(requests["output_tokens"], error, rng), spread=error)
    return simulate(requests, pool=pool, step_cost=step_cost, admission=rule)


def h2o(requests, *, pool, step_cost, limit=None, rng=None, share=0.2) -> Simulation:
    """A fixed share of the prompt's tokens is kept: half heavy hitters, half recent ones."""
    most = np.maximum(np.floor(share * requests["input_tokens"].to_numpy()), 1)
    return simulate(requests, pool=pool, step_cost=step_cost, kept=Kept(most, most))


def snapkv(requests, *, pool, step_cost, limit=None, rng=None, most=1_024) -> Simulation:
    """At most so many tokens of a prompt are kept; all generated ones are."""
    prompts, free = np.full(len(requests), float(most)), np.full(len(requests), np.inf)
    return simulate(requests, pool=pool, step_cost=step_cost, kept=Kept(prompts, free))


def growpage(requests, *, pool, step_cost, limit=None, rng=None, start=512, share=0.5) -> Simulation:
    """A budget per request that grows by a page at that share of its limits."""
    most = np.full(len(requests), float(start))
    return simulate(requests, pool=pool, step_cost=step_cost, kept=Kept(most, most, share=share))


def gracekv(requests, *, pool, step_cost, limit=None, rng=None, least=256) -> Simulation:
    """One budget, the pool, split over the running requests; so many run that each has ``least`` tokens."""
    running = max(1, min(256, int(pool // least)))
    longest = (requests["input_tokens"] + requests["output_tokens"]).max() if len(requests) else 1
    run = simulate(
        requests,
        pool=int(running + 1) * (int(longest) + 16),
        step_cost=SharedBudget(step_cost, pool),
        max_running=running,
        prefix_cache=False,
    )
    used = run.timeline["used_blocks"].clip(upper=int(pool) // 16)
    return Simulation(run.requests, run.seconds, run.steps, run.timeline.assign(used_blocks=used))


#: The systems by name.
SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            System(
                "vLLM",
                "PagedAttention, SOSP 2023; vLLM 0.32, https://github.com/vllm-project/vllm",
                "nothing that its scheduler decides; prefixes are not shared between requests",
                vllm,
            ),
            System(
                "vLLM, whole prompts",
                "PagedAttention, SOSP 2023; the baseline of Sarathi-Serve",
                "recomputation only, no swapping",
                whole_prompts,
            ),
            System(
                "Orca",
                "Yu et al., OSDI 2022",
                "slots are counted in blocks; no pipeline of batches",
                orca,
            ),
            System(
                "Sarathi-Serve",
                "Agrawal et al., OSDI 2024, arXiv:2403.02310",
                "the budget of 512 tokens is its strict one, not profiled for this step cost",
                sarathi,
            ),
            System(
                "DistServe",
                "Zhong et al., OSDI 2024, arXiv:2401.09670; https://github.com/LLMServe/DistServe",
                "one group prefills, one decodes; prompts leave their group when they are computed; "
                "transfers do not share a link; an evicted request is computed again, not swapped",
                distserve,
                groups=2,
            ),
            System(
                "S3",
                "Jin et al., NeurIPS 2023, arXiv:2306.06000",
                "first come first served instead of the best packing; lengths are predicted with a lognormal "
                "error of 25 %; evicted requests are computed again",
                s3,
            ),
            System(
                "MC2",
                "Shen, Sen and Tanaka, Managing KV Cache for Coordinated TTFT and TBT; arXiv:2503.13773",
                "no deadlines per request, so neither its order of service nor its choice of victims; the "
                "error is bounded by its spread; how padding follows the arrival rate is chosen here",
                mc2,
            ),
            System(
                "H2O",
                "Zhang et al., NeurIPS 2023, arXiv:2306.14048",
                "memory and time only; whole prompts are held until they are computed",
                h2o,
            ),
            System(
                "SnapKV",
                "Li et al., NeurIPS 2024, arXiv:2404.14469",
                "memory and time only; whole prompts are held until they are computed",
                snapkv,
            ),
            System(
                "GrowPage",
                "GrowPage, on-demand KV budgeting for long-output reasoning",
                "memory and time only; every second limit brings a page, whatever the attention",
                growpage,
            ),
            System(
                "GraceKV",
                "Tian, Liu and Wang, GraceKV: global allocation of resolution and coverage",
                "memory and time only; the budget is split over requests, and compressed as prompts come",
                gracekv,
            ),
        )
    }
)
