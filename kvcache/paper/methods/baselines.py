"""The policies that are compared: how each chooses its reservations, and one optimiser for all the rest.

A *fixed rule* turns a length distribution into a reservation; groups, routing and prefix caching are
then optimised around it exactly as for the robust policies, so that only the reservations differ. A
*set* replaces the ambiguity set of the problem, and the solver chooses the reservations too.

The serving engines do not choose a number of tokens once and for all. What their rules amount to in a
model where a request holds its reservation from start to end, and is preempted beyond it:

``vLLM``
    Pages are allocated as tokens come; nothing is held ahead (`PagedAttention
    <https://arxiv.org/abs/2309.06180>`_). Here eta = 0: every request outgrows it. The engine preempts
    only when memory is full, so this row is an upper bound on its preemptions; `rivals` has the
    full rule.
``TensorRT-LLM``
    ``GUARANTEED_NO_EVICT``, the default, admits a request only if its longest possible output fits:
    eta = L_max.
``SGLang``
    Holds a share of the remaining budget ``min(max_new_tokens, 4096)``; the share starts at 0.7, falls to
    0.14 of that over 600 decoding steps and is raised again when memory runs out
    (``SGLANG_INIT_NEW_TOKEN_RATIO``, ``SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR``). Here eta is the share at
    which it rests, 0.098, of that budget; again `rivals` has the full rule.
``LightLLM``
    The past-future scheduler draws a request's length from those of the requests that finished lately
    (``PastFutureQueue``, a window of 200). Here requests reserve such draws: :class:`PastFuture` is a
    :class:`kvcache.replay.Reserver`, and the optimiser plans with the mean of its draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kvcache.ambiguity import AmbiguitySet, Contamination, CVaR, ScaleShift, WassersteinInf
from kvcache.lengths import LengthDistribution
from kvcache.paper.methods import solve
from kvcache.policy import Solution
from kvcache.problem import Costs, Problem

__all__ = [
    "BLOCK",
    "ENGINE_RULES",
    "FIXED_RULES",
    "PAPER_METHODS",
    "SETS",
    "PastFuture",
    "optimise",
    "reservations",
    "reserver_of",
]

#: Tokens of one KV page, to a multiple of which P95 is rounded up.
BLOCK = 16
#: SGLang's share of the remaining budget: at the start, the part of it that is its floor, steps between
#: the two, and the budget beyond which it does not look.
SGLANG_RATIO, SGLANG_FLOOR, SGLANG_DECAY_STEPS, SGLANG_CLIP = 0.7, 0.14, 600, 4096
#: Finished requests that LightLLM's past-future scheduler remembers.
PAST_FUTURE_WINDOW = 200

Rule = Callable[[LengthDistribution, Costs], float]


def in_blocks(tokens: float, block: int = BLOCK) -> int:
    """Tokens rounded up to whole blocks."""
    return int(np.ceil(tokens / block)) * block


#: Reservation eta (output tokens) of each fixed rule, before the cut at L_max.
FIXED_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "Mean": lambda dist, costs: dist.mean,
        "P90": lambda dist, costs: dist.quantile(0.90),
        "P95": lambda dist, costs: in_blocks(dist.quantile(0.95)),
        "P99": lambda dist, costs: dist.quantile(0.99),
        "Max": lambda dist, costs: dist.upper,
        "LP+1sigma": lambda dist, costs: dist.mean + dist.std,
        "LP+2sigma": lambda dist, costs: dist.mean + 2 * dist.std,
        "SAA": lambda dist, costs: dist.quantile(costs.fractile),
    }
)

#: The engines' rules as reservations; the module says what is lost.
ENGINE_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "vLLM": lambda dist, costs: 0.0,
        "TensorRT-LLM": FIXED_RULES["Max"],
        "SGLang": lambda dist, costs: SGLANG_RATIO * SGLANG_FLOOR * min(dist.upper, SGLANG_CLIP),
        "LightLLM": lambda dist, costs: (
            (PAST_FUTURE_WINDOW * dist.mean + dist.upper) / (PAST_FUTURE_WINDOW + 1)
        ),
    }
)

#: The sets beyond the paper, at sizes that mean about the same drift as its radius of 0.15 x mean.
SETS: Mapping[str, AmbiguitySet] = MappingProxyType(
    {
        "W-infinity": WassersteinInf(0.15, relative=True),
        "CVaR": CVaR(0.05),
        "Contamination": Contamination(0.01),
        "Scale shift": ScaleShift(0.85, 1.15),
    }
)

#: The order of Table IV.
PAPER_METHODS = ("DRO", "P90", "P95", "P99", "Mean", "Max", "LP+1sigma", "LP+2sigma", "SAA")


def reservations(method: str, problem: Problem) -> NDArray[np.float64]:
    """(I,) output tokens eta that a method reserves while memory is no constraint.

    ``DRO`` is the problem's own ambiguity set; otherwise a name in `FIXED_RULES`, `ENGINE_RULES` or
    `SETS`.

    Raises
    ------
    ValueError
        For a name that is none of them.
    """
    rule = FIXED_RULES.get(method) or ENGINE_RULES.get(method)
    if rule is not None:
        eta = [rule(c.output, problem.costs) for c in problem.classes]
        return np.minimum(np.array(eta, dtype=float), problem.max_output_tokens)
    return _with_set(method, problem).unconstrained_reservations()


def _with_set(method: str, problem: Problem) -> Problem:
    if method == "DRO":
        return problem
    if method not in SETS:
        known = ["DRO", *FIXED_RULES, *ENGINE_RULES, *SETS]
        raise ValueError(f"method {method!r}; expected one of {known}")
    return problem.replace(ambiguity=SETS[method])


def optimise(method: str, problem: Problem, *, solver: str = "certified", **options: object) -> Solution:
    """The joint optimum of (z, pi, delta), and of the reservations unless the method fixes them.

    Fixed rules price their reservations as the problem does, so one objective judges all that share
    its ambiguity set; a method of `SETS` is solved, and its objective stated, under its own set.

    Parameters
    ----------
    method : as in `reservations`.
    solver, options : of `kvcache.paper.methods.solve`.
    """
    if method in FIXED_RULES or method in ENGINE_RULES:
        reserved = problem.input_tokens + reservations(method, problem)
        return solve(problem, method=solver, reservations=reserved, **options)
    return solve(_with_set(method, problem), method=solver, **options)


@dataclass(frozen=True)
class PastFuture:
    """LightLLM's past-future rule as a reservation: a length drawn from those that finished lately.

    A request's remaining need is drawn from the last ``window`` finished lengths and the limit
    ``max_output_tokens`` as one more possible value; before anything has finished the limit is reserved.

    Parameters
    ----------
    max_output_tokens : (I,) limit per class, tokens.
    window : finished requests that are remembered.
    """

    max_output_tokens: tuple[int, ...]
    window: int = PAST_FUTURE_WINDOW

    def reserve(self, request_class: int, finished: NDArray[np.int64], rng: np.random.Generator) -> float:
        """Output tokens to reserve for the next request of the class."""
        limit = self.max_output_tokens[request_class]
        recent = finished[-self.window :]
        draw = int(rng.integers(recent.size + 1))
        return float(min(recent[draw], limit)) if draw < recent.size else float(limit)


def reserver_of(method: str, problem: Problem) -> PastFuture | None:
    """The reserver of a method that decides request by request; None for one that decides beforehand."""
    if method != "LightLLM":
        return None
    return PastFuture(tuple(c.max_output_tokens for c in problem.classes))
