"""Trace-driven replay: what a policy costs, and how long requests take, on lengths it never saw.

Every policy meets the same requests (common random numbers): the lengths and the routing draws belong
to the :class:`Workload`, not to the policy. A policy is frozen data, or asks a :class:`Reserver`, whose
only view of the workload is a copy of the lengths that finished before.

For request j of class i, which stands for ``lambda_i / n`` requests per second:

1. it goes to configuration k with probability pi_ik, else it is rejected;
2. with L_in + xi_j > M_k it cannot finish on k and is rejected there (choice A8);
3. it is preempted if xi_j > eta_j; its service time T_ik(xi_j) is then multiplied by 2.5;
4. the groups of k hold ``sum_j rate_j T_j (r_j - delta L_pre)`` tokens by Little's law, which gives the
   realised utilisation v_k; Pollaczek-Khinchin with the realised moments of service gives the wait W_k
   (equation 7, choice A3); latency is W_k + T_j.

A group with v_k >= 1 is unstable and the result names it. No wait is taken beyond the utilisation
``cap``, so that a fuller group never seems faster than an emptier one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy
from kvcache.problem import Problem
from kvcache.queueing import mean_residual, wait_at

__all__ = ["PREEMPTION_FACTOR", "UTILISATION_CAP", "Replay", "Reserver", "Workload", "replay"]

#: Service time of a preempted request over that of the same request undisturbed (the paper's V-D).
PREEMPTION_FACTOR = 2.5
#: Groups that are fuller, unstable ones above all, wait as if they were this full.
UTILISATION_CAP = 0.99
#: Requests per class (the paper's V-D).
REQUESTS = 10_000
#: Requests of a class that share one decision of a :class:`Reserver`.
WINDOW = 200
# A reservation this close to a whole number of tokens is that number.
WHOLE = 1e-6

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Workload:
    """The requests of one replay, the same for every policy.

    Parameters
    ----------
    lengths : (I, n) int, realised output lengths of n requests per class, tokens, in order of arrival.
    routing_seed : seeds the routing draws, one stream per class.
    """

    lengths: Ints
    routing_seed: int

    def __post_init__(self) -> None:
        lengths = np.array(self.lengths, dtype=np.int64)
        if lengths.ndim != 2 or lengths.size == 0:
            raise ValueError(
                f"lengths: shape {lengths.shape}; expected (classes, requests), neither of them 0"
            )
        if lengths.min() < 0:
            raise ValueError(f"lengths: {lengths.min()}; expected >= 0 tokens")
        lengths.flags.writeable = False
        object.__setattr__(self, "lengths", lengths)

    @classmethod
    def draw(
        cls,
        distributions: Sequence[LengthDistribution],
        rng: np.random.Generator,
        requests: int = REQUESTS,
    ) -> Workload:
        """``requests`` independent lengths per class.

        Lengths are drawn by inversion from one stream per class, so that workloads drawn with equal
        generators from distributions that differ (a shift, say) are comonotone.
        """
        streams = rng.spawn(len(distributions))
        lengths = [d.sample(stream, requests) for d, stream in zip(distributions, streams, strict=True)]
        return cls(np.array(lengths), int(rng.integers(2**63)))


class Reserver(Protocol):
    """An online rule for the reservation. All it ever learns is in the arguments."""

    def reserve(self, request_class: int, finished: Ints, rng: np.random.Generator) -> float:
        """Output tokens eta to reserve for the next requests of a class.

        ``finished`` is a copy of the lengths of the class's earlier requests, oldest first.
        """
        ...


@dataclass(frozen=True, eq=False)
class Replay:
    """What the replay of one policy measured. Arrays are over classes (I,) or configurations (K,).

    Token counts are of output tokens, summed over the simulated requests that were served:
    reserved = used + wasted, generated = used + overflow.

    Attributes
    ----------
    arrived, rejected, oversized, preempted : (I,) requests; rejected includes the oversized ones.
    served : (I, K) requests.
    reserved, used, wasted, overflow : (I,) tokens.
    utilisation, waits : (K,) realised v_k (not capped) and W_k in seconds (capped).
    unstable : names of the configurations with v_k >= 1.
    terms : cost per second by term, as in ``policy.evaluate``, at the realised lengths.
    mismatch_cost : preemption and waste cost per arrival.
    cost_per_arrival, total_cost : all terms, per arrival and per second.
    preemption_rate, slo_violation : shares of the served requests; rejection : share of the arrivals.
    latency_p50, latency_p95, latency_p99, mean_latency, mean_wait : seconds, over the served requests.
    goodput : requests/s that are served within their deadline.
    gpus : GPUs in use.
    """

    class_names: tuple[str, ...]
    config_names: tuple[str, ...]
    arrived: Ints
    rejected: Ints
    oversized: Ints
    preempted: Ints
    served: Ints
    reserved: Floats
    used: Floats
    wasted: Floats
    overflow: Floats
    utilisation: Floats
    waits: Floats
    unstable: tuple[str, ...]
    terms: Mapping[str, float]
    mismatch_cost: float
    cost_per_arrival: float
    preemption_rate: float
    slo_violation: float
    rejection: float
    latency_p50: float
    latency_p95: float
    latency_p99: float
    mean_latency: float
    mean_wait: float
    goodput: float
    gpus: int

    @property
    def total_cost(self) -> float:
        """Cost per second, in units of c_w."""
        return float(sum(self.terms.values()))

    def row(self) -> dict[str, float | int | str]:
        """The scalars as one row of a table; unstable configurations joined by a plus sign."""
        return {
            "reservation_cost": self.mismatch_cost,
            "cost_per_arrival": self.cost_per_arrival,
            "total_cost": self.total_cost,
            "preemption_rate": self.preemption_rate,
            "p50_s": self.latency_p50,
            "p95_s": self.latency_p95,
            "p99_s": self.latency_p99,
            "mean_wait_s": self.mean_wait,
            "goodput": self.goodput,
            "slo_violation": self.slo_violation,
            "rejection": self.rejection,
            "gpus": self.gpus,
            "max_utilisation": float(self.utilisation.max()),
            "unstable": "+".join(self.unstable),
        }


def _reservations(policy: Policy, inputs: Floats, workload: Workload, reserver, window: int) -> Floats:
    """(I, n) eta of every request: the policy's own, or one decision of the reserver per window."""
    count, requests = workload.lengths.shape
    if reserver is None:
        eta = policy.reservations - inputs
        # r - L_in of a whole eta is not always whole again; a request of just that length must fit.
        whole = np.round(eta)
        eta = np.where(np.abs(eta - whole) < WHOLE, whole, eta)
        return np.repeat(eta[:, None], requests, axis=1)
    eta = np.empty((count, requests))
    for i in range(count):
        rng = np.random.default_rng([workload.routing_seed, count + i])
        for start in range(0, requests, window):
            # A copy: a view would lead to the requests still to come through its base.
            finished = workload.lengths[i, :start].copy()
            decision = float(reserver.reserve(i, finished, rng))
            if not (np.isfinite(decision) and decision >= 0):
                raise ValueError(f"class {i} request {start}: reserved {decision}; expected >= 0 tokens")
            eta[i, start : start + window] = decision
    return eta


def _weighted_quantiles(values: Floats, weights: Floats, levels: Sequence[float]) -> list[float]:
    """The smallest value at which the share of weight reaches each level; nan without values."""
    if values.size == 0:
        return [float("nan")] * len(levels)
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    at = np.searchsorted(reached, np.asarray(levels) * reached[-1] * (1 - 1e-12))
    return values[order][at].tolist()


def replay(
    problem: Problem,
    policy: Policy,
    workload: Workload,
    *,
    reserver: Reserver | None = None,
    window: int = WINDOW,
    preemption_factor: float = PREEMPTION_FACTOR,
    cap: float = UTILISATION_CAP,
) -> Replay:
    """Replay a policy on a workload; see the module for the rules.

    Parameters
    ----------
    problem : rates, prompts, deadlines, costs and configurations; its length distributions are not used.
    policy : groups, routing, prefix caching, and the reservations unless a ``reserver`` is given.
    workload : one row of lengths per class of the problem.
    reserver : online reservation rule, asked once per class and ``window`` requests.
    preemption_factor : service time of a preempted request over the undisturbed one, >= 1.
    cap : utilisation in (0, 1) beyond which waits are not evaluated.

    Raises
    ------
    ValueError
        If workload, policy and problem differ in their classes or configurations, or a parameter is
        out of range.
    """
    shape = (len(problem.classes), len(problem.configs))
    if policy.routing.shape != shape:
        raise ValueError(f"policy is for {policy.routing.shape} classes x configurations; expected {shape}")
    if workload.lengths.shape[0] != shape[0]:
        raise ValueError(f"workload has {workload.lengths.shape[0]} classes; expected {shape[0]}")
    if not 0 < cap < 1:
        raise ValueError(f"cap: {cap}; expected a utilisation within (0, 1)")
    if not preemption_factor >= 1:
        raise ValueError(f"preemption_factor: {preemption_factor}; expected >= 1")
    if window < 1:
        raise ValueError(f"window: {window}; expected at least one request")

    classes, requests = workload.lengths.shape
    rates, inputs, prefixes = problem.arrival_rates, problem.input_tokens, problem.prefix_tokens
    eta = _reservations(policy, inputs, workload, reserver, window).ravel()
    xi = workload.lengths.ravel()
    cls = np.repeat(np.arange(classes), requests)
    chosen = np.concatenate(
        [
            policy.route(np.full(requests, i), np.random.default_rng([workload.routing_seed, i]))
            for i in range(classes)
        ]
    )
    chosen[(chosen >= 0) & (policy.groups[chosen] == 0)] = -1
    oversized = (chosen >= 0) & (inputs[cls] + xi > problem.kv_tokens[chosen])

    # From here on: one entry per served request.
    on = np.flatnonzero((chosen >= 0) & ~oversized)
    i, k, xi, eta = cls[on], chosen[on], xi[on], eta[on]
    rate = rates[i] / requests
    preempted = xi > eta
    prefill = np.array([c.prefill_s_per_token for c in problem.configs])
    decode = np.array([c.decode_s_per_token for c in problem.configs])
    overhead = np.array([c.overhead_s for c in problem.configs])
    service = prefill[k] * inputs[i] + decode[k] * xi + overhead[k]
    service = np.where(preempted, preemption_factor * service, service)

    def per_config(values: Floats) -> Floats:
        return np.bincount(k, weights=values, minlength=shape[1])

    def per_class(values: Floats) -> Floats:
        return np.bincount(i, weights=values, minlength=shape[0])

    groups = policy.groups
    held = inputs[i] + eta - policy.prefix_cache[i, k] * prefixes[i]
    cached = np.where(groups > 0, prefixes @ policy.prefix_cache, 0.0)
    utilisation = (per_config(rate * service * held) / np.maximum(groups, 1) + cached) / problem.kv_tokens
    flow = per_config(rate)
    busy = flow > 0
    per_request = np.where(busy, flow, 1.0)
    residual = mean_residual(
        per_config(rate * service) / per_request, per_config(rate * service**2) / per_request
    )
    unstable = busy & (utilisation >= 1)
    waits = np.where(busy, wait_at(np.minimum(utilisation, cap), residual), 0.0)

    latency = waits[k] + service
    used, wasted = np.minimum(xi, eta), np.maximum(eta - xi, 0.0)
    overflow = np.maximum(xi - eta, 0.0)
    costs = problem.costs
    served = np.bincount(i * shape[1] + k, minlength=shape[0] * shape[1]).reshape(shape)
    share = served.sum(axis=1) / requests
    tardiness = np.maximum(per_class(latency) / requests - share * problem.latency_slos, 0.0)
    mismatch = float(rate @ (costs.preemption * overflow + costs.waste * wasted))
    terms = {
        "gpu": float(costs.gpu * (groups @ problem.group_gpus)),
        "mismatch": mismatch,
        "slo": float(costs.slo * (rates @ tardiness)),
        "rejection": float(costs.rejection * (rates @ (1 - share))),
    }
    arrivals, admitted = float(rates.sum()), float(rate.sum())
    late = latency > problem.latency_slos[i]
    p50, p95, p99 = _weighted_quantiles(latency, rate, (0.5, 0.95, 0.99))

    def mean(values: Floats) -> float:
        return float(rate @ values / admitted) if admitted > 0 else float("nan")

    return Replay(
        class_names=tuple(c.name for c in problem.classes),
        config_names=tuple(c.name for c in problem.configs),
        arrived=np.full(classes, requests),
        rejected=requests - served.sum(axis=1),
        oversized=np.bincount(cls[oversized], minlength=classes),
        preempted=np.bincount(i[preempted], minlength=classes),
        served=served,
        reserved=per_class(eta),
        used=per_class(used),
        wasted=per_class(wasted),
        overflow=per_class(overflow),
        utilisation=utilisation,
        waits=waits,
        unstable=tuple(c.name for c, bad in zip(problem.configs, unstable, strict=True) if bad),
        terms=terms,
        mismatch_cost=mismatch / arrivals,
        cost_per_arrival=sum(terms.values()) / arrivals,
        preemption_rate=mean(preempted),
        slo_violation=mean(late),
        rejection=float(rates @ (1 - share)) / arrivals,
        latency_p50=p50,
        latency_p95=p95,
        latency_p99=p99,
        mean_latency=mean(latency),
        mean_wait=mean(waits[k]),
        goodput=float(rate @ ~late),
        gpus=int(groups @ problem.group_gpus),
    )
