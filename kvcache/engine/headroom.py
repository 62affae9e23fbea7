"""How much of a pool to keep free: the newsvendor of a paged engine.

An engine pools the memory of all requests in blocks, admits the head of the queue while ``used <= M - u``,
lets every running request grow and, when the pool of M tokens is full, evicts the one admitted last, which is
computed again. The headroom u is what the pool reserves for growth. Too little costs recomputation, too
much throughput: the paper's newsvendor, once for the pool instead of once per request.

The law of overflow
-------------------
Measure time in tokens of growth of all running requests together. A request grows by G tokens from its
admission to its finish and then frees J = G + the blocks of its prompt, so at saturation finishes come at
rate 1 / E[G] per token: the number of running requests cancels. Take them as memoryless. Above M - u, where
nothing is admitted, the level of used memory is then a spectrally negative Levy process: drift 1, jumps -J,

    log E exp(theta level(t)) = t (theta - (1 - E exp(-theta J)) / E[G]),

which has one positive zero, theta (the Lundberg exponent), since E[J] > E[G]. So exp(theta level) is a
martingale between admissions and evictions. In steady state, per finished request, what admissions add to
it and what evictions take from it must balance. Measure levels from M - u. A request is admitted when the
gap below M - u is at least its prompt, so the gap it leaves is the stationary excess L_e of the prompts,
independent of its own prompt L; an eviction at level u frees about a fresh prompt L (the victim has just
come):

    E exp(-theta L_e) (1 - E exp(-theta L)) = preemptions exp(theta u) (1 - E exp(-theta L)),
    preemptions = C exp(-theta u),   C = E exp(-theta L_e) = (1 - E exp(-theta L)) / (theta E[L]).

The exponential supremum is textbook (Bertoin, Levy Processes, 1996, chapter VII; Asmussen and Albrecher, Ruin
Probabilities, 2010); for geometric outputs and short prompts it is the token buffer of Threshold-Based
Exclusive Batching (arXiv 2606.00516, Proposition 3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.engine.joint import JointLengths
from kvcache.engine.operating import Demand, saturation
from kvcache.engine.steps import StepCost

__all__ = [
    "headroom",
    "lundberg_exponent",
    "overflow_constant",
    "preemptions_per_request",
    "throughput_losses",
    "watermark",
]

Floats = NDArray[np.float64]


def lundberg_exponent(lengths: JointLengths, block: int = 16) -> float:
    """theta per token, the positive root of theta E[G] = 1 - E exp(-theta J); see the module.

    1 / theta is the headroom, in tokens, that divides preemptions by e. It depends on the lengths alone and
    neither on the pool nor on the load. Computed once per block size and kept with the lengths.

    Returns
    -------
    theta : infinite where no request outgrows the blocks of its prompt (nothing can overflow), and 0 where
        prompts are empty (finishes only give back what has grown: the level has no downward drift).
    """
    return lengths.remember(("theta", block), lambda: _root(lengths, block))


def _root(lengths: JointLengths, block: int) -> float:
    law = lengths.in_blocks(block)
    peak, p, growth = law.peak, law.peak_probability, law.growth
    if growth == 0:
        return np.inf
    if not law.prompt.any():
        return 0.0
    # f(x) = x E[G] - 1 + E exp(-x J) is convex, f(0) = 0, f'(0) < 0 and f(1 / E[G]) > 0: from there Newton's
    # steps fall monotonically to the root.
    theta = 1 / growth
    while True:
        decay = p * np.exp(-theta * peak)
        step = (theta * growth - 1 + decay.sum()) / (growth - peak @ decay)
        theta -= step
        if not step > 1e-13 * theta:
            return float(theta)


def overflow_constant(lengths: JointLengths, block: int = 16) -> float:
    """C = (1 - E exp(-theta L)) / (theta E[L]): preemptions per request without headroom; see the module."""

    def constant() -> float:
        law, theta = lengths.in_blocks(block), lundberg_exponent(lengths, block)
        if theta in (0, np.inf):
            return 1.0 if theta == 0 else 0.0
        held = law.prompt_probability @ law.prompt
        return float(law.prompt_probability @ -np.expm1(-theta * law.prompt) / (theta * held))

    return lengths.remember(("constant", block), constant)


def preemptions_per_request(
    lengths: JointLengths, headroom: ArrayLike, block: int = 16, running: ArrayLike = 0.0
) -> Floats | float:
    """Preemptions per request of a saturated pool, C exp(-theta (u + B)), for a headroom u (tokens).

    Parameters
    ----------
    headroom : u, tokens, or an array.
    running : B, the requests that run (``saturation(...).running``), or 0 for the law of the module, which
        looks at the level at every token. An engine looks once per iteration, after all B have grown: the
        level then overshoots M by up to B tokens when it overflows, and an eviction takes the more from the
        balance, E exp(theta overshoot) = (exp(theta B) - 1) / (theta B); played out, the gap that admissions
        leave is wider by about B / 2 as well (measured, not derived). Together that is about exp(-theta B).

    Raises
    ------
    ValueError
        For a negative headroom or number of requests.
    """
    u = _tokens(headroom, "headroom", least=0) + _tokens(running, "running", least=0)
    theta, constant = lundberg_exponent(lengths, block), overflow_constant(lengths, block)
    value = np.zeros(u.shape) if theta == np.inf else constant * np.exp(-theta * u)
    return _plain(value)


def throughput_losses(
    lengths: JointLengths,
    headroom: ArrayLike,
    pool: ArrayLike,
    step_cost: StepCost,
    block: int = 16,
    prefix_cache: bool = True,
    max_running: float = np.inf,
) -> tuple[Floats | float, Floats | float]:
    """The two costs of a headroom at saturation, as shares of the throughput: (idle, recomputed).

    idle = e u / M with e = d ln X / d ln M = t0 / tau: a pool of u tokens fewer runs fewer requests per
    iteration, and only the constant part of an iteration is worth sharing. recomputed = X a R times the
    preemptions per request: the server time that goes into computing R tokens again for each.
    R = min(1 / theta, E[L]), what has been overwritten of the victim's blocks, or E[L] without prefix cache.

    Parameters
    ----------
    headroom, pool : u and M, tokens; they broadcast.
    max_running : where this limit binds and not memory, room costs nothing: idle is 0.
    """
    u, m = np.broadcast_arrays(_tokens(headroom, "headroom", least=0), _tokens(pool, "pool"))
    state = saturation(Demand.of(lengths, block), step_cost, m, max_running)
    scarce = state.running < max_running
    idle = np.where(scarce, step_cost.t0 / state.tpot * u / m, 0.0)
    again = step_cost.per_prefill_token * _recomputed(lengths, block, prefix_cache)
    lost = state.throughput * again * preemptions_per_request(lengths, u, block)
    return _plain(idle), _plain(lost)


def headroom(
    lengths: JointLengths,
    pool: ArrayLike,
    step_cost: StepCost,
    block: int = 16,
    prefix_cache: bool = True,
) -> Floats | float:
    """u* in tokens: the headroom at which the next token costs as much throughput as it saves.

    The two costs of `throughput_losses`, e u / M and K_0 exp(-theta u) with K_0 = X C a R, have equal
    slopes where

        exp(-theta u*) = e / (theta M K_0) = c E[xi] t0 / (a C R theta M^2),

    since X = M / (c E[xi] tau) and e = t0 / tau: the length of an iteration cancels. u* is 0 where the right
    side is above 1, that is in small pools, where room is dearer than recomputation.

    Parameters
    ----------
    pool : M, tokens of one group's memory, or an array of them.
    step_cost : its t0 and a; only their ratio matters.
    prefix_cache : whether an evicted request finds its own blocks again (R, see `throughput_losses`).

    Returns
    -------
    tokens, of the shape of ``pool``, within [0, M].
    """
    m = _tokens(pool, "pool")
    theta, constant = lundberg_exponent(lengths, block), overflow_constant(lengths, block)
    if theta == np.inf or step_cost.per_prefill_token == 0:
        return _plain(np.zeros(m.shape))
    if theta == 0:
        raise ValueError("headroom: prompts are empty, so no headroom bounds overflow; expected L > 0")
    demand = Demand.of(lengths, block)
    again = step_cost.per_prefill_token * constant * _recomputed(lengths, block, prefix_cache)
    u = np.log(again * theta * m**2 / (demand.held * step_cost.t0)) / theta
    return _plain(np.clip(u, 0.0, m))


def watermark(
    lengths: JointLengths, pool: ArrayLike, step_cost: StepCost, block: int = 16, prefix_cache: bool = True
) -> Floats | float:
    """u* / M: the share of blocks to keep free when requests are admitted (vLLM's ``--watermark``)."""
    return headroom(lengths, pool, step_cost, block, prefix_cache) / _plain(_tokens(pool, "pool"))


def _recomputed(lengths: JointLengths, block: int, prefix_cache: bool) -> float:
    """R, prompt tokens that a preemption costs: with a prefix cache only those overwritten since."""
    theta = lundberg_exponent(lengths, block)
    return min(1 / theta, lengths.mean_input) if prefix_cache else lengths.mean_input


def _tokens(values: ArrayLike, what: str, least: float | None = None) -> Floats:
    array = np.asarray(values, dtype=float)
    good = array > 0 if least is None else array >= least
    if not np.all(good & np.isfinite(array)):
        wanted = "> 0" if least is None else f">= {least}"
        raise ValueError(f"{what}: {array[~(good & np.isfinite(array))].flat[0]}; expected tokens {wanted}")
    return array


def _plain(value: Floats) -> Floats | float:
    return float(value) if np.ndim(value) == 0 else value
