"""How much each choice of :mod:`kvcache.paper.assumptions` matters: one at a time, everything else as it is.

An effect is one number under the choice made here and under another one. The numbers are what the choice
is about: the optimal cost of the joint problem, a reservation, a capacity, a share of rejected requests.
All problems are `kvcache.paper.builders.paper` unless the alternative is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, lgamma, log
from typing import Any

import numpy as np
import pandas as pd

from kvcache.ambiguity import Regime, Wasserstein1
from kvcache.hardware import GPU, Model, serving_configs
from kvcache.lengths import LengthDistribution
from kvcache.paper import builders
from kvcache.paper.assumptions import ASSUMPTIONS
from kvcache.paper.digests import load_digest
from kvcache.paper.digests.sources import load_sources
from kvcache.paper.experiments import runner, sweep
from kvcache.paper.experiments.comparison import BUSY_LOAD, NEVER_REJECT, TABLE5_SHIFT
from kvcache.paper.experiments.fractile import BURSTGPT, DEFAULT_RADIUS, RATIOS, all_traces
from kvcache.paper.methods import bcd
from kvcache.paper.methods.baselines import optimise
from kvcache.paper.published import published
from kvcache.policy import Policy, Solution, evaluate
from kvcache.problem import Problem
from kvcache.queueing import wait_at
from kvcache.replay import PREEMPTION_FACTOR, UTILISATION_CAP, Replay, Workload, replay

__all__ = ["COLUMNS", "allen_cunneen", "effects", "measure"]

COLUMNS = ("id", "metric", "default", "alternative", "baseline", "changed", "relative")

#: Requests per class of the replays here.
REQUESTS = 2_000
#: Nodes and not seconds, so that results do not depend on the machine.
_SOLVER = {"gap": 2e-5, "node_limit": 2 * runner.NODE_LIMIT}
_CONVERSATION = 2

Effect = dict[str, Any]


def _effect(metric: str, default: str, alternative: str, baseline: float, changed: float) -> Effect:
    """One row, to the digits that the solver's gap leaves sure.

    A number that does not exist (an infinite wait) is missing, and so is its change then.
    """
    both = [float(v) if np.isfinite(v) else None for v in (baseline, changed)]
    known = None not in both and both[0] != 0
    shown = [None if v is None else float(f"{v:.4g}") if abs(v) > 1e-9 else 0.0 for v in both]
    return {
        "metric": metric,
        "default": default,
        "alternative": alternative,
        "baseline": shown[0],
        "changed": shown[1],
        "relative": round(both[1] / both[0] - 1, 4) if known else None,
    }


def _optimum(problem: Problem, method: str = "DRO") -> Solution:
    return optimise(method, problem, **_SOLVER)


def _per_request(problem: Problem) -> float:
    return _optimum(problem).objective / problem.arrival_rates.sum()


def _replayed(problem: Problem, policy: Policy, shift: float = 1.0, **options: float) -> Replay:
    lengths = runner.replayed_lengths(problem, shift=shift)
    return replay(problem, policy, Workload.draw(lengths, np.random.default_rng(0), REQUESTS), **options)


def _reservation(problem: Problem) -> float:
    """Output tokens for conversation while memory is free."""
    return float(problem.unconstrained_reservations()[_CONVERSATION])


def _capacity(problem: Problem) -> float:
    """Requests per second of all classes that the memory can hold."""
    return builders.capacity(problem) * float(problem.arrival_rates.sum())


# ---- one function per assumption ----------------------------------------------------------------


def _radius_unit() -> list[Effect]:
    means, tokens = "0.15 x mean", "0.15 tokens"
    pair = [builders.paper(), builders.paper(relative=False)]
    steep = [builders.paper(rho=20.0), builders.paper(rho=20.0, relative=False)]

    def premium(relative: bool) -> float:
        plain, robust = (
            builders.paper(radius=radius, relative=relative).unconstrained_reservations()
            for radius in (0.0, 0.5)
        )
        base, ball = builders.paper(radius=0.0), builders.paper(radius=0.5, relative=relative)
        cost = [
            sum(i.worst_case(c, float(e)) for c, e in enumerate(eta))
            for i, eta in ((base, plain), (ball, robust))
        ]
        return 100 * (cost[1] / cost[0] - 1)

    return [
        _effect("cost per second", means, tokens, *(_optimum(i).objective for i in pair)),
        _effect("tokens for conversation, rho 20", means, tokens, *map(_reservation, steep)),
        _effect(
            "premium (%) of radius 0.5 (C09)",
            "means as the unit",
            "tokens as the unit",
            premium(True),
            premium(False),
        ),
    ]


def _support_bound() -> list[Effect]:
    own, twice = "the trace's cap", "twice that"

    def build(upper: float | None, rho: float) -> Problem:
        return runner.build(upper=upper, costs={"preemption": rho})

    def jumped(upper: float | None) -> int:
        built = [build(upper, rho) for rho in RATIOS]
        return sum(
            i.ambiguity.solve(c.output, i.costs.preemption, 1.0).regime is not Regime.FRACTILE
            for i in built
            for c in i.classes
        )

    return [
        _effect("cost per second", own, twice, *(_optimum(build(u, 10.0)).objective for u in (None, 2.0))),
        _effect(
            "cost per second, rho 20", own, twice, *(_optimum(build(u, 20.0)).objective for u in (None, 2.0))
        ),
        _effect(
            "tokens for conversation, rho 20",
            own,
            twice,
            *(_reservation(build(u, 20.0)) for u in (None, 2.0)),
        ),
        _effect("classes past the jump, of 18 (class, rho)", own, twice, jumped(None), jumped(2.0)),
    ]


def allen_cunneen(servers: float, offered: float, residual: float) -> float:
    """Mean wait in M/G/c by Allen and Cunneen's approximation, seconds.

    Parameters
    ----------
    servers : places, rounded down to a whole number >= 1.
    offered : requests in service on average; infinite wait where it reaches the places.
    residual : E[T^2] / (2 E[T]), seconds; exact for one server.
    """
    c = max(int(servers), 1)
    if offered >= c:
        return float("inf")
    # Erlang's C, summed in logarithms since factorials of hundreds of servers overflow.
    terms = [exp(n * log(offered) - lgamma(n + 1) - c * log(offered) + lgamma(c + 1)) for n in range(c)]
    waiting = 1 / (1 + (1 - offered / c) * sum(terms))
    return waiting * residual / (c - offered)


def _utilisation() -> list[Effect]:
    problem = builders.paper()
    policy = _optimum(problem).policy
    result = evaluate(problem, policy)
    k = int(np.argmax(policy.routing.sum(axis=0)))
    concurrent = problem.offered_loads[:, k] * policy.routing[:, k] / policy.groups[k]
    held = policy.reservations - policy.prefix_cache[:, k] * problem.prefix_tokens
    offered = float(concurrent.sum())
    places = float(problem.kv_tokens[k] * offered / (concurrent @ held))
    phi, wait = float(problem.queueing_factors[k]), float(result.waits[k])

    mixed = runner.choose(problem, "DRO", "full", [0, 1, 1, 0], _SOLVER).policy
    waits = []
    for over in (np.ones_like(mixed.routing), mixed.routing):
        rates = problem.arrival_rates[:, None] * over
        variance = np.array([c.output.variance for c in problem.classes])[:, None]
        per_token = np.array([c.decode_s_per_token for c in problem.configs])
        second = (rates * (problem.service_times**2 + variance * per_token**2)).sum(axis=0)
        mean = (rates * problem.service_times).sum(axis=0)
        residual = np.divide(second, 2 * mean, out=np.zeros_like(mean), where=mean > 0)
        flow = problem.arrival_rates @ mixed.routing
        waits.append(float(flow @ wait_at(evaluate(problem, mixed).utilisation, residual) / flow.sum()))
    memory = "M/G/1 at v_k"
    return [
        _effect(
            "utilisation of a group",
            "reserved memory",
            "u of (6e) instead",
            float(result.utilisation[k]),
            offered,
        ),
        _effect("mean wait, s", memory, "M/G/1 at u", wait, wait_at(offered, phi)),
        _effect(
            "mean wait, s", memory, "M/G/c, c reservations fit", wait, allen_cunneen(places, offered, phi)
        ),
        _effect("mean wait, s, on TP4 and TP2xPP2", "phi of the whole mix", "of each group's own", *waits),
    ]


def _gpu_cost() -> list[Effect]:
    def cost(c_gpu: float, load: float) -> Solution:
        return _optimum(runner.build(arguments={"load": load}, costs={"gpu": c_gpu}))

    def gpus(c_gpu: float, load: float) -> int:
        problem = runner.build(arguments={"load": load})
        return int(cost(c_gpu, load).policy.groups @ problem.group_gpus)

    return [
        *(
            _effect(
                "cost per second",
                "c_gpu = 1",
                f"c_gpu = {c:g}",
                cost(1.0, 0.6).objective,
                cost(c, 0.6).objective,
            )
            for c in (0.0, 10.0)
        ),
        *(
            _effect("GPUs in use at load 0.2", "c_gpu = 1", f"c_gpu = {c:g}", gpus(1.0, 0.2), gpus(c, 0.2))
            for c in (0.0, 10.0)
        ),
    ]


def _workload() -> list[Effect]:
    base = builders.paper()
    share = builders.prefix_share()
    code = replace(base.classes[1], arrival_rate=5 * base.classes[1].arrival_rate)
    mixed = builders.with_load(base.replace(classes=(base.classes[0], code, base.classes[2])), builders.LOAD)

    def wait(problem: Problem) -> float:
        return _replayed(problem, _optimum(problem).policy).mean_wait

    rows = [
        _effect(
            "cost per request",
            "load 0.6",
            f"load {x:g}",
            _per_request(base),
            _per_request(builders.paper(load=x)),
        )
        for x in (0.3, 0.9)
    ]
    rows += [
        _effect("mean wait, s", "load 0.6", f"load {x:g}", wait(base), wait(builders.paper(load=x)))
        for x in (0.3, 0.9)
    ]
    rows += [
        _effect(
            "cost per second",
            "D = 2 service times",
            f"D = {x:g}",
            _optimum(base).objective,
            _optimum(builders.paper(slo_factor=x)).objective,
        )
        for x in (1.5, 4.0)
    ]
    rows += [
        _effect(
            "cost per second",
            f"L_pre = {share:.2f} L_in",
            f"L_pre = {x:g} L_in",
            _optimum(base).objective,
            _optimum(builders.paper(shared_prefix=x)).objective,
        )
        for x in (0.0, 0.8)
    ]
    return [
        *rows,
        _effect(
            "cost per request",
            "equal rates",
            "code five times as often",
            _per_request(base),
            _per_request(mixed),
        ),
    ]


def _table2_cost() -> list[Effect]:
    dist, traces = load_digest(BURSTGPT), all_traces()

    def worst(d: LengthDistribution, eta: float, rho: float) -> float:
        return DEFAULT_RADIUS.worst_case(d, eta, rho, 1.0)

    def plain(d: LengthDistribution, eta: float, rho: float) -> float:
        return d.cost(eta, rho, 1.0)

    def dearer(robust: Callable[..., float], fixed: Callable[..., float]) -> int:
        cells = [(d, rho) for d in traces.values() for rho in RATIOS]
        return sum(
            robust(d, DEFAULT_RADIUS.reservation(d, rho, 1.0), rho)
            > (1 + 1e-9) * min(fixed(d, d.quantile(q), rho) for q in (0.9, 0.95))
            for d, rho in cells
        )

    eta = DEFAULT_RADIUS.reservation(dist, 10.0, 1.0)
    cells = f"cells of {len(traces) * len(RATIOS)} where DRO is dearer than P90 or P95 (C01)"
    return [
        _effect(
            "DRO on BurstGPT, cost per request",
            "its expected cost",
            "its worst case",
            plain(dist, eta, 10.0),
            worst(dist, eta, 10.0),
        ),
        _effect(cells, "expected cost", "DRO at its worst case", dearer(plain, plain), dearer(worst, plain)),
        _effect(
            cells, "expected cost", "all at their worst case", dearer(plain, plain), dearer(worst, worst)
        ),
    ]


def _block3() -> list[Effect]:
    tried = [builders.scalability(3, 4, 60, 12, seed) for seed in range(4)]
    ends = np.array([[bcd.solve(i, block3=b).objective for b in ("resolve", "literal")] for i in tried])
    above = 100 * (ends / ends.min(axis=1, keepdims=True) - 1)
    pair = "problems solved again for each z", "all else fixed"
    return [
        _effect(
            f"mean excess over the better reading, % of cost, {len(tried)} instances of 3x4x60 on 12 GPUs",
            *pair,
            *above.mean(axis=0),
        ),
        _effect("largest excess there, %", *pair, *above.max(axis=0)),
    ]


def _oversized() -> list[Effect]:
    rows = []
    for label, groups, load in (
        ("optimal partition", None, 0.6),
        ("four TP2 groups, load 0.002", [4, 0, 0, 0], 0.002),
    ):
        problem = runner.build(arguments={"load": load})
        policy = runner.choose(problem, "DRO", "full", groups, _SOLVER).policy
        planned = 1 - problem.arrival_rates @ policy.admission / problem.arrival_rates.sum()
        rows.append(
            _effect(
                f"rejected share (%), {label}",
                "L_in + xi > M_k turned away",
                "all served",
                100 * _replayed(problem, policy).rejection,
                100 * planned,
            )
        )
    return rows


def _kv_bytes() -> list[Effect]:
    full, grouped = builders.paper(), builders.paper(model="Llama-3-70B")
    same = grouped.replace(
        classes=tuple(
            replace(c, arrival_rate=r) for c, r in zip(grouped.classes, full.arrival_rates, strict=True)
        )
    )
    pair = "64 KV heads", "8 KV heads"
    return [
        _effect("M_k of TP4xPP2, tokens", *pair, full.kv_tokens[-1], grouped.kv_tokens[-1]),
        _effect("capacity, requests/s", *pair, _capacity(full), _capacity(grouped)),
        _effect(
            "cost per second at the same rates", *pair, _optimum(full).objective, _optimum(same).objective
        ),
        _effect(
            "utilisation at the same rates",
            *pair,
            *(float(evaluate(i, _optimum(i).policy).utilisation.max()) for i in (full, same)),
        ),
    ]


def _burstgpt_p99() -> list[Effect]:
    known = load_sources().digests[BURSTGPT].quantiles["output"]
    stated = published("traces")["BurstGPT"]["p99"]

    def lengths(p99: int) -> LengthDistribution:
        return LengthDistribution.from_quantiles(
            {**known.points, 0.99: p99}, known.mean, minimum=known.minimum, maximum=known.maximum
        )

    ours, theirs = lengths(known.points[0.99]), lengths(stated)
    pair = f"P99 {known.points[0.99]:,}", f"P99 {stated:,}"

    def gain(d: LengthDistribution) -> float:
        fixed = 16 * np.ceil(d.quantile(0.95) / 16)
        return 100 * (
            1 - d.cost(DEFAULT_RADIUS.reservation(d, 100.0, 1.0), 100.0, 1.0) / d.cost(fixed, 100.0, 1.0)
        )

    return [
        _effect(
            "DRO's reservation on BurstGPT at rho 100, tokens",
            *pair,
            *(DEFAULT_RADIUS.reservation(d, 100.0, 1.0) for d in (ours, theirs)),
        ),
        _effect(
            "its cost per request",
            *pair,
            *(d.cost(d.quantile(100 / 101), 100.0, 1.0) for d in (ours, theirs)),
        ),
        _effect("its gain over P95 (%) at rho 100 (C01)", *pair, gain(ours), gain(theirs)),
    ]


def _service_constants() -> list[Effect]:
    fitted, measured = builders.paper(), builders.paper(service="measured")
    same = measured.replace(
        classes=tuple(
            replace(c, arrival_rate=r, latency_slo=d)
            for c, r, d in zip(measured.classes, fitted.arrival_rates, fitted.latency_slos, strict=True)
        )
    )
    pair = "equation 1, fitted", "as measured, batch 32"
    return [
        _effect(
            "service of a mean conversation on TP4xPP2, s",
            *pair,
            fitted.service_times[_CONVERSATION, -1],
            measured.service_times[_CONVERSATION, -1],
        ),
        _effect("capacity, requests/s", *pair, _capacity(fitted), _capacity(measured)),
        _effect(
            "cost per second at the same rates", *pair, _optimum(fitted).objective, _optimum(same).objective
        ),
    ]


def _memory() -> list[Effect]:
    base = builders.paper()
    gpu, model = GPU.preset("A100-80GB"), Model.preset("70B-MHA")
    rows = []
    for default, alternative, options in (
        ("no overhead", "1 GB per GPU", {"overhead_bytes": 1e9}),
        ("90 % of memory", "95 %", {"utilisation": 0.95}),
    ):
        other = base.replace(configs=serving_configs(gpu, model, builders.PAPER_CONFIGS, **options))
        rows += [
            _effect("M_k of TP2, tokens", default, alternative, base.kv_tokens[0], other.kv_tokens[0]),
            _effect("capacity, requests/s", default, alternative, _capacity(base), _capacity(other)),
            _effect(
                "cost per second", default, alternative, _optimum(base).objective, _optimum(other).objective
            ),
        ]
    return rows


def _table3_instances() -> list[Effect]:
    costs = [_per_request(builders.scalability(5, 5, 200, 8, seed)) for seed in range(5)]
    mean = float(np.mean(costs))
    classes, configs, samples, gpus = builders.TABLE3_SIZES[-2]

    def deployable(budget: int) -> int:
        return int((builders.scalability(classes, configs, samples, budget, 0).max_groups > 0).sum())

    return [
        _effect("cost per request, 5x5x200", "the mean of seeds 0 to 4", "the cheapest", mean, min(costs)),
        _effect("cost per request, 5x5x200", "the mean of seeds 0 to 4", "the dearest", mean, max(costs)),
        _effect(
            f"configurations of {configs} that the budget allows, {classes}x{configs}x{samples}",
            f"{gpus} GPUs",
            "8 GPUs",
            deployable(gpus),
            deployable(8),
        ),
    ]


def _cap() -> list[Effect]:
    problem = runner.build(builder="ablation", arguments={"load": 0.2})
    eta = problem.unconstrained_reservations()
    policy = runner.uniform_routing(problem, eta, [1, 1, 0, 0])
    at = {
        cap: _replayed(problem, policy, shift=TABLE5_SHIFT, cap=cap) for cap in (UTILISATION_CAP, 0.95, 0.999)
    }
    here = f"cap {UTILISATION_CAP:g}"
    return [
        _effect(
            "P99 latency, s, of an unstable partition (C15)",
            here,
            f"cap {cap:g}",
            at[UTILISATION_CAP].latency_p99,
            run.latency_p99,
        )
        for cap, run in at.items()
        if cap != UTILISATION_CAP
    ]


def _shift_cap() -> list[Effect]:
    problem = builders.ablation(load=BUSY_LOAD)
    plain = problem.replace(ambiguity=Wasserstein1(0.0))

    def cost(chosen: Problem, capped: bool) -> float:
        eta = chosen.unconstrained_reservations()
        lengths = runner.replayed_lengths(chosen, shift=TABLE5_SHIFT, capped=capped)
        rates = chosen.arrival_rates / chosen.arrival_rates.sum()
        c_p, c_w = chosen.costs.preemption, chosen.costs.waste
        # Where lengths may exceed L_max, a reservation of L_max is within the wider support all the same.
        return float(rates @ [d.cost(e, c_p, c_w) for d, e in zip(lengths, eta, strict=True)])

    pair = "lengths cut at L_max", "lengths as they are"
    ratio = [cost(plain, capped) / cost(problem, capped) for capped in (True, False)]
    return [
        _effect("SAA's cost under the 2.5x shift, per request", *pair, cost(plain, True), cost(plain, False)),
        _effect("SAA's cost over DRO's under the shift (C16)", *pair, *ratio),
    ]


def _ablation_load() -> list[Effect]:
    def run(load: float) -> Replay:
        problem = builders.ablation(load=load)
        return _replayed(problem, _optimum(problem).policy, shift=TABLE5_SHIFT)

    low, high = run(BUSY_LOAD), run(builders.LOAD)
    pair = f"load {BUSY_LOAD:g}", f"load {builders.LOAD:g}, as stated"
    return [
        _effect(
            "utilisation under the 2.5x shift (1 is full)",
            *pair,
            low.utilisation.max(),
            high.utilisation.max(),
        ),
        _effect("P99 latency, s, there", *pair, low.latency_p99, high.latency_p99),
    ]


def _admission() -> list[Effect]:
    def run(method: str, rejection: float) -> Replay:
        problem = runner.build(costs={"preemption": 100.0, "rejection": rejection})
        return _replayed(problem, _optimum(problem, method).policy)

    rows = []
    pair = "no rejection by choice", "c_rej = 5,000"
    for method in ("DRO", "Mean"):
        forced, free = run(method, NEVER_REJECT), run(method, 5000.0)
        rows += [
            _effect(
                f"reservation cost per request, {method} at rho 100",
                *pair,
                forced.mismatch_cost,
                free.mismatch_cost,
            ),
            _effect(
                f"rejected requests, %, {method} at rho 100",
                *pair,
                100 * forced.rejection,
                100 * free.rejection,
            ),
        ]
    return rows


def _preempted_service() -> list[Effect]:
    problem = builders.paper()
    solution = _optimum(problem)
    here, without = (
        _replayed(problem, solution.policy, preemption_factor=f) for f in (PREEMPTION_FACTOR, 1.0)
    )
    planned = float(evaluate(problem, solution.policy).utilisation.max())
    return [
        _effect(
            "P99 latency, s",
            f"preempted service x {PREEMPTION_FACTOR:g}",
            "x 1",
            here.latency_p99,
            without.latency_p99,
        ),
        _effect(
            "utilisation",
            "preemption replayed",
            "the optimiser's view",
            float(here.utilisation.max()),
            planned,
        ),
    ]


_EXPERIMENTS: Mapping[str, Callable[[], Sequence[Effect]]] = {
    "A1": _radius_unit,
    "A2": _support_bound,
    "A3": _utilisation,
    "A4": _gpu_cost,
    "A5": _workload,
    "A6": _table2_cost,
    "A7": _block3,
    "A8": _oversized,
    "A9": _kv_bytes,
    "A10": _burstgpt_p99,
    "A11": _service_constants,
    "A12": _memory,
    "A13": _table3_instances,
    "A14": _cap,
    "A15": _shift_cap,
    "A16": _ablation_load,
    "A17": _admission,
    "A18": _preempted_service,
}


def measure(assumption: str) -> list[Effect]:
    """The effects of one assumption, rows of `COLUMNS`.

    Raises
    ------
    KeyError
        For an assumption that nothing measures.
    """
    if assumption not in _EXPERIMENTS:
        raise KeyError(f"assumption {assumption!r} has no experiment; measured are {', '.join(_EXPERIMENTS)}")
    return [{"id": assumption, **row} for row in _EXPERIMENTS[assumption]()]


def effects() -> pd.DataFrame:
    """The effects of all assumptions, in their order.

    Returns
    -------
    DataFrame
        id, metric (with its unit), default and alternative (what is chosen here, and what instead), and the
        number under each (``baseline``, ``changed``; missing where it is infinite), ``relative`` change.
    """
    table = sweep.table(measure, [{"assumption": a.id} for a in ASSUMPTIONS])
    return table[list(COLUMNS)]
