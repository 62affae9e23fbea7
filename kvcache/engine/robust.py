"""The engine's formulas when the length distribution itself is uncertain.

The sets are those of `kvcache.ambiguity`, around the outputs; prompts are what they are. What a plan needs
of a class is a mean E f(L, xi) with f convex and nowhere falling in xi: for the time that a request adds to a
server, f is a combination of xi, L xi and xi^2. Over each set such a mean is largest at a law that is known
in closed form, so the answer here is always a law, `JointLengths`, to which every other formula applies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.ambiguity import AmbiguitySet, Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.engine.headroom import lundberg_exponent
from kvcache.engine.joint import JointLengths
from kvcache.engine.steps import StepCost

__all__ = ["costliest_lengths", "fullest_lengths", "worst_lengths"]

Floats = NDArray[np.float64]
Gain = Callable[[Floats, Floats], Floats]


def worst_lengths(lengths: JointLengths, ambiguity: AmbiguitySet, gain: Gain) -> JointLengths:
    """The law of the set at which E f(L, xi) is largest, f = ``gain`` convex and not falling in xi.

    ================  ==============================================================================
    scale shift       every output times the high factor: f does not fall
    W-infinity        every output longer by the radius, up to L_max
    contamination     a share of requests, whatever their prompt, at L_max
    CVaR              the 1 - level share of requests whose f is largest
    W1                a fractional knapsack: a transport of radius tokens in all moves outputs to L_max,
                      first those that gain most per token, (f(L, L_max) - f(L, xi)) / (L_max - xi);
                      f is convex, so no move that stops before L_max gains more per token
    ================  ==============================================================================

    Parameters
    ----------
    gain : of arrays of prompt and output tokens.

    Raises
    ------
    TypeError
        For another set.
    """
    outputs, upper = lengths.output_lengths, lengths.upper
    match ambiguity:
        case ScaleShift():
            return lengths.scale(ambiguity.high)
        case WassersteinInf():
            longer = np.rint(lengths.outputs + ambiguity.radius_tokens(outputs)).astype(np.int64)
            moved = np.minimum(longer, upper)
            return JointLengths.from_counts(lengths.inputs, moved, lengths.weights, upper, name=lengths.name)
        case Contamination():
            return _moved(lengths, np.full(lengths.weights.shape, ambiguity.share))
        case CVaR():
            order = np.argsort(-_values(gain, lengths.inputs, lengths.outputs), kind="stable")
            kept = _knapsack(lengths.probabilities, np.ones(order.size), order, 1 - ambiguity.level)
            weights = lengths.weights * kept
            return JointLengths.from_counts(
                lengths.inputs, lengths.outputs, weights, upper, name=lengths.name
            )
        case Wasserstein1():
            room = (upper - lengths.outputs).astype(float)
            won = _values(gain, lengths.inputs, np.full(room.shape, upper))
            won -= _values(gain, lengths.inputs, lengths.outputs)
            rate = np.divide(won, room, out=np.full(room.shape, -np.inf), where=room > 0)
            order = np.argsort(-rate, kind="stable")
            return _moved(
                lengths, _knapsack(lengths.probabilities, room, order, ambiguity.radius_tokens(outputs))
            )
    raise TypeError(f"worst lengths: {ambiguity!r}; expected a set of kvcache.ambiguity")


def costliest_lengths(
    lengths: JointLengths,
    ambiguity: AmbiguitySet,
    cost: StepCost,
    block: int = 16,
    *,
    memory: float = 0.0,
) -> JointLengths:
    """The law at which a request asks most of a group.

    The most server time g = a E[L] + s_B E[xi] + s_K E[xi (L + xi / 2 + b / 2)], plus ``memory`` seconds per
    token held for an iteration: t0 / M' for the memory row of `capacity_rows`, 0 for its other rows.
    """
    per_token = cost.per_cached_token + memory
    return worst_lengths(
        lengths, ambiguity, lambda L, xi: xi * (cost.per_sequence + per_token * (L + xi / 2 + block / 2))
    )


def fullest_lengths(lengths: JointLengths, ambiguity: AmbiguitySet, block: int = 16) -> JointLengths:
    """The law at which overflow decays slowest: the one of least theta.

    theta is the root of h(x) = E[x G - 1 + exp(-x J)], and h > 0 exactly above the root. So the least
    theta over a set is the root of sup h, and the inside of h is convex in xi and does not fall. Dinkelbach's
    steps find it: the law that is worst at theta has a root that is not above theta; repeat there. For b > 1
    the W1 answer is exact up to the rounding to blocks, which bends the inside of h.

    The headroom for this law is a plug-in, the u* for the slowest decay, and not a minimax over the set.
    """
    worst, theta = lengths, lundberg_exponent(lengths, block)
    while 0 < theta < np.inf:

        def inside(L: Floats, xi: Floats, x: float = theta) -> Floats:
            peak, prompt = block * np.ceil((L + xi) / block), block * np.ceil(L / block)
            return x * (peak - prompt) + np.exp(-x * peak)

        found = worst_lengths(lengths, ambiguity, inside)
        if not lundberg_exponent(found, block) < theta * (1 - 1e-12):
            break
        worst, theta = found, lundberg_exponent(found, block)
    return worst


def _values(gain: Gain, inputs: NDArray[np.int64], outputs: NDArray[np.int64]) -> Floats:
    return np.array(gain(inputs.astype(float), outputs.astype(float)), dtype=float)


def _knapsack(mass: Floats, size: Floats, order: NDArray[np.intp], budget: float) -> Floats:
    """The share of each atom that a budget of mass times size takes, in that order."""
    spent = np.cumsum((mass * size)[order])
    before = spent - (mass * size)[order]
    share = np.divide(budget - before, spent - before, out=np.ones(spent.shape), where=spent > before)
    taken = np.empty(spent.shape)
    taken[order] = np.clip(share, 0.0, 1.0)
    return taken


def _moved(lengths: JointLengths, share: Floats) -> JointLengths:
    """The law after that share of each pair has got the longest output."""
    return JointLengths.from_counts(
        np.tile(lengths.inputs, 2),
        np.concatenate([lengths.outputs, np.full(share.shape, lengths.upper)]),
        np.concatenate([lengths.weights * (1 - share), lengths.weights * share]),
        lengths.upper,
        name=lengths.name,
    )
