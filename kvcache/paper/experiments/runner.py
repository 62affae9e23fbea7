"""One experiment, a point of a sweep: build a problem, choose a policy, replay it, and give rows of a table.

An experiment is a mapping of JSON values, so that `sweep` can run it anywhere and keep its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import ambiguity
from kvcache.ambiguity import Wasserstein1
from kvcache.lengths import LengthDistribution
from kvcache.paper import builders
from kvcache.paper.digests import load_digest
from kvcache.paper.methods.baselines import optimise, reservations, reserver_of
from kvcache.policy import Policy, Solution, Status, evaluate
from kvcache.problem import Problem
from kvcache.replay import PREEMPTION_FACTOR, REQUESTS, WHOLE, Workload, replay

__all__ = [
    "VARIANTS",
    "build",
    "caching",
    "choose",
    "lateness",
    "partitions",
    "point",
    "replayed_lengths",
    "uniform_routing",
]

#: What an ablation leaves out.
VARIANTS = ("full", "-Routing", "-DRO (SAA)", "-Prefix caching")

#: Boxes that the certified solver may look at for one point.
NODE_LIMIT = 150

#: Requests of a class that share one decision of an online rule.
ONLINE_WINDOW = 20

#: What the tables call the cost of preemption and waste.
COLUMNS = {"mismatch": "reservation"}

_BUILDERS = {"paper": builders.paper, "ablation": builders.ablation}


def build(
    *,
    builder: str = "paper",
    arguments: Mapping[str, Any] | None = None,
    outputs: Sequence[str] | None = None,
    upper: float | None = None,
    costs: Mapping[str, float] | None = None,
    headroom: float | None = None,
    ambiguity_set: tuple[str, Mapping[str, Any]] | None = None,
    rate: float = 1.0,
) -> Problem:
    """A problem of `kvcache.paper.builders`, changed.

    Parameters
    ----------
    builder, arguments : function of `kvcache.paper.builders` and its keyword arguments.
    outputs : digests that replace the output lengths of the classes, one each.
    upper : L_max of every class, in multiples of its longest output; its own bound without it.
    costs : cost weights that differ from the builder's; arrival rates stay as built.
    headroom, ambiguity_set : kappa, and the name and parameters of a set of `kvcache.ambiguity`.
    rate : factor on all arrival rates.
    """
    if builder not in _BUILDERS:
        raise ValueError(f"builder {builder!r}; expected one of {sorted(_BUILDERS)}")
    problem = _BUILDERS[builder](**(arguments or {}))
    classes = list(problem.classes)
    if outputs is not None:
        classes = [
            replace(c, output=load_digest(name).renamed(c.name))
            for c, name in zip(classes, outputs, strict=True)
        ]
    if upper is not None:
        classes = [
            replace(c, output=c.output.with_upper(int(np.ceil(upper * c.output.tokens[-1])))) for c in classes
        ]
    classes = [replace(c, arrival_rate=c.arrival_rate * rate) for c in classes]
    changes: dict[str, Any] = {"classes": tuple(classes)}
    if costs:
        changes["costs"] = replace(problem.costs, **costs)
    if headroom is not None:
        changes["headroom"] = headroom
    if ambiguity_set is not None:
        name, parameters = ambiguity_set
        changes["ambiguity"] = getattr(ambiguity, name)(**parameters)
    return problem.replace(**changes)


def replayed_lengths(
    problem: Problem,
    *,
    shift: float = 1.0,
    outputs: Sequence[str] | None = None,
    capped: bool = True,
) -> list[LengthDistribution]:
    """The lengths that a replay draws from, one distribution per class.

    Parameters
    ----------
    shift : every length is multiplied by it.
    outputs : digests instead of the problem's own distributions.
    capped : cut shifted lengths at L_max, as a generation limit does; else they may exceed it.
    """
    own = [c.output for c in problem.classes]
    if outputs is not None:
        own = [load_digest(name) for name in outputs]
    if shift == 1.0:
        return own
    return [d.scale(shift, upper=d.upper if capped else None) for d in own]


def partitions(problem: Problem) -> list[NDArray[np.int64]]:
    """All z within the budget (6b) that use at least one group."""
    ranges = [range(most + 1) for most in problem.max_groups]
    found = [np.array(z) for z in product(*ranges)]
    return [z for z in found if 0 < z @ problem.group_gpus <= problem.gpus]


def uniform_routing(
    problem: Problem, eta: NDArray[np.float64], groups: Sequence[int] | None = None
) -> Policy:
    """Every class spread evenly over the configurations in use, nothing rejected.

    The partition z is the cheapest by `evaluate` among those that violate the memory constraint least,
    unless ``groups`` gives it; prefixes are cached where that frees memory in (6e): (1 + kappa) u pi > z.
    """
    best: tuple[float, float] = (np.inf, np.inf)
    chosen: Policy | None = None
    for z in [np.array(groups)] if groups is not None else partitions(problem):
        used = z > 0
        routing = np.tile(used / used.sum(), (len(problem.classes), 1))
        prefix = (1 + problem.headroom) * problem.offered_loads * routing > np.maximum(z, 1)
        policy = Policy.of(problem, z, eta, routing, prefix)
        result = evaluate(problem, policy)
        rank = (0.0 if result.feasible else result.violation, result.objective)
        if chosen is None or rank < best:
            best, chosen = rank, policy
    return chosen


def caching(problem: Problem, policy: Policy) -> Policy:
    """The policy with every prefix cached that frees memory in (6e), unless that costs something.

    While nobody is late and memory does not bind, the objective is indifferent to prefix caching; the
    replay is not.
    """
    useful = (1 + problem.headroom) * problem.offered_loads * policy.routing > np.maximum(policy.groups, 1)
    useful &= problem.prefix_tokens[:, None] > 0
    candidate = replace(policy, prefix_cache=useful & (policy.groups > 0))
    before, after = evaluate(problem, policy), evaluate(problem, candidate)
    same = after.objective <= before.objective + 1e-9 * abs(before.objective)
    return candidate if after.feasible and same else policy


def choose(
    problem: Problem,
    method: str,
    variant: str,
    groups: Sequence[int] | None,
    options: Mapping[str, Any],
) -> Solution:
    """The policy of a method with one component left out; ``groups`` fixes the partition."""
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}; expected one of {VARIANTS}")
    if variant == "-Routing":
        policy = uniform_routing(problem, reservations(method, problem), groups)
        return Solution.of(problem, policy, seconds=0.0, status=Status.FEASIBLE, method="uniform routing")
    solved = problem
    if variant == "-DRO (SAA)":
        solved = problem.replace(ambiguity=Wasserstein1(0.0))
    if variant == "-Prefix caching":
        solved = problem.replace(classes=tuple(replace(c, prefix_tokens=0.0) for c in problem.classes))
    solution = optimise(method, solved, groups=groups, **options)
    policy = solution.policy
    if variant == "-Prefix caching":
        policy = replace(policy, prefix_cache=np.zeros_like(policy.prefix_cache))
    else:
        policy = caching(solved, policy)
    return replace(solution, policy=policy)


def point(
    *,
    problem: Mapping[str, Any] | None = None,
    method: str = "DRO",
    variant: str = "full",
    groups: Sequence[int] | None = None,
    shifts: Sequence[float] = (1.0,),
    replayed_on: Sequence[str] | None = None,
    capped: bool = True,
    requests: int = REQUESTS,
    seed: int = 0,
    factors: Sequence[float] = (PREEMPTION_FACTOR,),
    gap: float = 2e-4,
    node_limit: int = NODE_LIMIT,
    labels: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Solve one experiment, and replay its policy for every length scale and preemption factor.

    Parameters
    ----------
    problem : keyword arguments of `build`.
    method : as in `kvcache.paper.methods.baselines.reservations`.
    variant : one of `VARIANTS`.
    groups : a fixed partition z.
    shifts : length scales of the replay.
    replayed_on, capped : ``outputs`` and ``capped`` of `replayed_lengths`.
    requests, seed : of the replay's workload.
    factors : preemption factors of the replay.
    gap, node_limit : of the solver; nodes and not seconds, so that results do not depend on the machine.
    labels : columns to put in front of the rows.

    Returns
    -------
    list of dict
        One row per shift and factor: the labels; the optimiser's objective by term, its proven gap,
        partition, reservations and their training quantiles and admitted shares per class; and what
        `kvcache.replay.Replay.row` measured.
    """
    built = build(**(problem or {}))
    solution = choose(built, method, variant, groups, {"gap": gap, "node_limit": node_limit})
    policy = solution.policy
    reserver = reserver_of(method, built)
    eta = policy.reservations - built.input_tokens
    solved: dict[str, Any] = {
        "status": str(solution.status),
        "objective": solution.objective,
        "optimality_gap": solution.gap if np.isfinite(solution.gap) else None,
        **{f"{COLUMNS.get(name, name)}_term": value for name, value in solution.terms.items()},
        "groups": "+".join(map(str, policy.groups)),
    }
    for c, tokens, share in zip(built.classes, eta, policy.admission, strict=True):
        solved[f"eta_{c.name}"] = tokens
        solved[f"quantile_{c.name}"] = c.output.cdf(tokens + WHOLE)
        solved[f"admitted_{c.name}"] = share
    rows = []
    for shift in shifts:
        lengths = replayed_lengths(built, shift=shift, outputs=replayed_on, capped=capped)
        workload = Workload.draw(lengths, np.random.default_rng(seed), requests)
        for factor in factors:
            measured = replay(
                built, policy, workload, reserver=reserver, window=ONLINE_WINDOW, preemption_factor=factor
            )
            known = {"method": method, "variant": variant, "shift": shift, "factor": factor}
            rows.append({**(labels or {}), **known, **solved, **measured.row()})
    return rows


def lateness(
    *,
    deadlines: Sequence[float],
    problem: Mapping[str, Any] | None = None,
    method: str = "DRO",
    variant: str = "full",
    shift: float = 1.0,
    requests: int = REQUESTS,
    seed: int = 0,
    gap: float = 2e-4,
    node_limit: int = NODE_LIMIT,
    labels: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """How many requests are late if all deadlines are multiplied, under the policy made for them as built.

    Parameters are those of `point`, and ``deadlines``, the multiples. One row per multiple: the labels,
    ``method``, ``variant``, ``deadline``, and ``slo_violation``, ``rejection`` and ``goodput`` of the replay.
    """
    built = build(**(problem or {}))
    policy = choose(built, method, variant, None, {"gap": gap, "node_limit": node_limit}).policy
    workload = Workload.draw(replayed_lengths(built, shift=shift), np.random.default_rng(seed), requests)
    rows = []
    for deadline in deadlines:
        classes = tuple(replace(c, latency_slo=c.latency_slo * deadline) for c in built.classes)
        measured = replay(built.replace(classes=classes), policy, workload).row()
        kept = {name: measured[name] for name in ("slo_violation", "rejection", "goodput")}
        rows.append(
            {**(labels or {}), "method": method, "variant": variant, "deadline": float(deadline), **kept}
        )
    return rows
