"""A policy (z, r, pi, delta), its one evaluation, and what a solver returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.problem import Problem
from kvcache.queueing import wait_at

__all__ = ["Evaluation", "Policy", "Solution", "Status", "evaluate", "repaired"]

Floats = NDArray[np.float64]

# Relative slack within which a constraint counts as met.
FEASIBILITY_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Policy:
    """What the online side executes: nothing here depends on a realised output length.

    Parameters
    ----------
    groups : (K,) int, z_k: serving groups per configuration.
    reservations : (I,) r_i = L_in + eta_i, tokens reserved for a request of each class.
    routing : (I, K) pi_ik, share of class i sent to configuration k; what is missing to 1 is rejected.
    prefix_cache : (I, K) bool, delta_ik: the shared prefix of i is kept on every group of k.
    class_names, config_names : labels, in the order of the axes.
    """

    groups: NDArray[np.int64]
    reservations: Floats
    routing: Floats
    prefix_cache: NDArray[np.bool_]
    class_names: tuple[str, ...] = ()
    config_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        groups = np.asarray(self.groups)
        if np.any(groups != np.round(groups)) or np.any(groups < 0):
            raise ValueError(f"groups: {groups.tolist()}; expected whole numbers >= 0")
        routing = np.asarray(self.routing, dtype=float)
        reservations = np.asarray(self.reservations, dtype=float)
        shape = (reservations.size, groups.size)
        if routing.shape != shape or np.shape(self.prefix_cache) != shape:
            raise ValueError(
                f"routing has shape {routing.shape}, prefix_cache "
                f"{np.shape(self.prefix_cache)}; expected {shape}"
            )
        if not (np.all(np.isfinite(routing)) and np.all(np.isfinite(reservations))):
            raise ValueError("routing and reservations must be finite")
        for name, value in (
            ("groups", np.round(groups).astype(np.int64)),
            ("reservations", reservations.copy()),
            ("routing", routing.copy()),
            ("prefix_cache", np.array(self.prefix_cache, dtype=bool)),
        ):
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        object.__setattr__(self, "class_names", tuple(self.class_names))
        object.__setattr__(self, "config_names", tuple(self.config_names))
        # Cumulative shares make routing one uniform number and one search per request.
        object.__setattr__(self, "_cumulative", np.cumsum(routing, axis=1))

    @classmethod
    def of(
        cls,
        problem: Problem,
        groups: ArrayLike,
        eta: ArrayLike,
        routing: ArrayLike,
        prefix_cache: ArrayLike,
    ) -> Policy:
        """From output reservations eta (tokens), with the problem's labels.

        Prefix caching on a configuration without groups means nothing and is dropped.
        """
        groups = np.asarray(groups)
        return cls(
            groups=groups,
            reservations=problem.input_tokens + np.asarray(eta, dtype=float),
            routing=routing,
            prefix_cache=np.asarray(prefix_cache, dtype=bool) & (groups > 0)[None, :],
            class_names=tuple(c.name for c in problem.classes),
            config_names=tuple(k.name for k in problem.configs),
        )

    @property
    def admission(self) -> Floats:
        """(I,) a_i, the admitted share of each class."""
        return self.routing.sum(axis=1)

    def _index(self, request_class: int | str) -> int:
        if isinstance(request_class, str):
            try:
                return self.class_names.index(request_class)
            except ValueError:
                raise KeyError(
                    f"class {request_class!r}; this policy knows {list(self.class_names)}"
                ) from None
        return int(request_class)

    def reservation(self, request_class: int | str | NDArray) -> float | Floats:
        """r_i in tokens for a class (index or name), or for an array of class indices. O(1) per request."""
        if isinstance(request_class, np.ndarray):
            return self.reservations[request_class]
        return float(self.reservations[self._index(request_class)])

    def route(self, request_class: int | str | NDArray, rng: np.random.Generator) -> int | NDArray[np.int64]:
        """The configuration that serves a request, or -1 to reject it: one draw and one binary search.

        ``request_class`` is an index, a name, or an array of indices (one draw per entry).
        """
        if isinstance(request_class, np.ndarray):
            classes = self.reservations.size
            if request_class.size and not 0 <= request_class.min() <= request_class.max() < classes:
                raise IndexError(f"class indices go beyond 0..{classes - 1}")
            draws = rng.random(request_class.shape)
            chosen = np.empty(request_class.shape, dtype=np.int64)
            for i, cumulative in enumerate(self._cumulative):
                mine = request_class == i
                chosen[mine] = np.searchsorted(cumulative, draws[mine], side="right")
            chosen[chosen == self.groups.size] = -1
            return chosen
        cumulative = self._cumulative[self._index(request_class)]
        chosen = int(np.searchsorted(cumulative, rng.random(), side="right"))
        return -1 if chosen == self.groups.size else chosen


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The objective (6a) by term and the slack of every constraint; see :func:`evaluate`."""

    terms: Mapping[str, float]
    slacks: Mapping[str, Floats]
    utilisation: Floats
    waits: Floats
    tardiness: Floats
    worst_case: Floats

    @property
    def objective(self) -> float:
        """Cost per second, in units of c_w."""
        return float(sum(self.terms.values()))

    @property
    def violation(self) -> float:
        """The largest relative violation of a constraint; 0 when all hold."""
        return max(0.0, -min(float(np.min(s, initial=0.0)) for s in self.slacks.values()))

    @property
    def feasible(self) -> bool:
        """Every constraint holds within a relative 1e-6."""
        return self.violation <= FEASIBILITY_TOLERANCE


def evaluate(problem: Problem, policy: Policy) -> Evaluation:
    """Objective and constraint slacks of a policy: the only place where they are computed.

    Terms (cost per second): ``gpu``, ``mismatch`` (worst-case preemption and waste), ``slo``,
    ``rejection``. Slacks (>= 0 when met, relative to the right-hand side): ``gpus`` (6b), ``deployed``
    (6c), ``admission`` (6d), ``routing`` (pi >= 0), ``memory`` (6e), ``eta`` (0 <= eta <= L_max),
    ``stable`` (v_k < 1 where requests are served). The tardiness s_i is the smallest that (6f) allows.
    Where v_k >= 1 the wait is infinite, and so is the objective if tardiness costs anything.
    """
    z = policy.groups.astype(float)
    pi, delta = policy.routing, policy.prefix_cache
    if pi.shape != (len(problem.classes), len(problem.configs)):
        raise ValueError(
            f"policy is for {pi.shape} classes x configurations; the problem has "
            f"{(len(problem.classes), len(problem.configs))}"
        )
    eta = policy.reservations - problem.input_tokens
    admitted = pi.sum(axis=1)
    costs = problem.costs

    deployed = z > 0
    per_group = np.where(deployed, pi / np.where(deployed, z, 1.0), 0.0)
    concurrent = problem.offered_loads * per_group
    held = policy.reservations[:, None] - delta * problem.prefix_tokens[:, None]
    requests = (concurrent * held).sum(axis=0)
    prefixes = np.where(deployed, problem.prefix_tokens @ delta, 0.0)
    utilisation = (requests + prefixes) / problem.kv_tokens
    serving = deployed & (pi.sum(axis=0) > 0)
    stable = utilisation < 1
    waits = wait_at(np.maximum(utilisation, 0.0), problem.queueing_factors)

    response = np.where(pi > 0, pi * (np.where(pi > 0, waits[None, :], 0.0) + problem.service_times), 0.0)
    tardiness = np.maximum(response.sum(axis=1) - admitted * problem.latency_slos, 0.0)
    inside = np.clip(eta, 0.0, problem.max_output_tokens)
    worst_case = np.array([problem.worst_case(i, float(e)) for i, e in enumerate(inside)])
    rates = problem.arrival_rates
    late = tardiness[tardiness > 0] @ rates[tardiness > 0] if costs.slo > 0 else 0.0
    terms = {
        "gpu": float(costs.gpu * (z @ problem.group_gpus)),
        "mismatch": float(rates @ (admitted * worst_case)),
        "slo": float(costs.slo * late) if costs.slo > 0 else 0.0,
        "rejection": float(costs.rejection * (rates @ (1 - admitted))),
    }
    budget = max(problem.gpus, 1)
    bound = np.maximum(problem.max_output_tokens, 1.0)
    slacks = {
        "gpus": np.array([(problem.gpus - z @ problem.group_gpus) / budget]),
        "deployed": z[None, :] - pi,
        "admission": 1 - admitted,
        "routing": pi,
        "memory": np.where(
            deployed, 1 - ((1 + problem.headroom) * requests + prefixes) / problem.kv_tokens, 0.0
        ),
        "eta": np.minimum(eta, problem.max_output_tokens - eta) / bound,
        "stable": np.where(serving & ~stable, -1.0, 0.0),
    }
    return Evaluation(terms, slacks, utilisation, waits, tardiness, worst_case)


def repaired(
    problem: Problem,
    groups: ArrayLike,
    eta: ArrayLike,
    routing: ArrayLike,
    prefix_cache: ArrayLike,
    *,
    trim: bool = False,
) -> Policy:
    """The policy of a solver's numbers, with what its tolerance left beyond a constraint taken off.

    Reservations are cut to [0, L_max], routing to deployed configurations and to a total of one, and
    where (6e) does not hold the routing to that configuration shrinks by the factor that makes it hold.
    With ``trim``, an excess that a 1e-3 smaller reservation makes good is taken off the reservations
    instead, which costs less than to reject. GPUs are not touched.
    """
    groups = np.asarray(groups)
    deployed = groups > 0
    eta = np.clip(np.asarray(eta, dtype=float), 0.0, problem.max_output_tokens)
    delta = np.asarray(prefix_cache, dtype=bool) & deployed
    routing = np.clip(np.asarray(routing, dtype=float), 0.0, 1.0) * deployed
    routing = routing / np.maximum(routing.sum(axis=1, keepdims=True), 1.0)
    concurrent = (1 + problem.headroom) * problem.offered_loads * routing
    prompts = (concurrent * (problem.input_tokens[:, None] - delta * problem.prefix_tokens[:, None])).sum(0)
    outputs = (concurrent * eta[:, None]).sum(axis=0)
    free = groups * (problem.kv_tokens - problem.prefix_tokens @ delta)
    over = prompts + outputs > free
    if trim and over.any():
        share = np.min((free - prompts)[over] / np.where(outputs > 0, outputs, np.inf)[over])
        if share > 1 - 1e-3:
            eta, outputs = eta * share, outputs * share
            over = prompts + outputs > free * (1 + 1e-15)
    needed = prompts + outputs
    shrink = np.where(over, np.maximum(free, 0.0) / np.where(needed > 0, needed, 1.0), 1.0)
    return Policy.of(problem, groups, eta, routing * shrink, delta)


class Status(StrEnum):
    """How a solver ended. There is a policy with the first two alone."""

    OPTIMAL = "optimal"  # the gap is closed as asked
    FEASIBLE = "feasible"  # stopped before, or a heuristic
    NO_POLICY = "no policy"  # none was found within the limits
    TOO_LARGE = "does not fit"  # the licence of the solver does not admit the program
    NOT_INSTALLED = "not installed"
    FAILED = "failed"  # the solver gave up

    @property
    def solved(self) -> bool:
        """Whether there is a policy."""
        return self in (Status.OPTIMAL, Status.FEASIBLE)


@dataclass(frozen=True, eq=False)
class Solution:
    """What every solver returns.

    ``lower_bound`` is a proven bound on (6) or -inf; ``gap`` = (objective - lower_bound) / |objective|.
    ``status`` is a `Status`; where it is not ``optimal``, ``message`` may say why. Without a policy
    ``policy`` is None and ``objective`` inf.
    ``history`` holds the objective after each accepted step. ``certificate`` is what a solver may want to
    know again when it starts from this solution: opaque, picklable, None where there is none.
    """

    policy: Policy | None
    objective: float
    terms: Mapping[str, float]
    lower_bound: float
    seconds: float
    status: Status
    method: str
    iterations: int = 0
    history: Sequence[float] = field(default_factory=tuple)
    certificate: object = field(default=None, repr=False)
    message: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        if self.status.solved != (self.policy is not None):
            found = "without a policy" if self.policy is None else "with a policy"
            raise ValueError(f"status: {self.status}, {found}; expected both or neither")

    @property
    def gap(self) -> float:
        """Relative distance between the objective and the proven lower bound; inf without a bound."""
        if not (np.isfinite(self.objective) and np.isfinite(self.lower_bound)):
            return float("inf")
        return max(0.0, self.objective - self.lower_bound) / max(abs(self.objective), 1e-12)

    @classmethod
    def of(
        cls,
        problem: Problem,
        policy: Policy,
        *,
        seconds: float,
        status: Status,
        method: str,
        lower_bound: float = -np.inf,
        iterations: int = 0,
        history: Sequence[float] = (),
        certificate: object = None,
        message: str = "",
    ) -> Solution:
        """The solution with its objective taken from :func:`evaluate`."""
        result = evaluate(problem, policy)
        return cls(
            policy,
            result.objective,
            dict(result.terms),
            lower_bound,
            seconds,
            status,
            method,
            iterations,
            tuple(history),
            certificate,
            message,
        )
