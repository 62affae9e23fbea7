"""Worst laws of the engine's formulas against linear programs and members drawn at random."""

import numpy as np
import pytest
from scipy.optimize import linprog

from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.engine import Demand, JointLengths, StepCost, headroom, lundberg_exponent
from kvcache.engine.robust import costliest_lengths, fullest_lengths, worst_lengths

COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
RNG = np.random.default_rng(11)
LENGTHS = JointLengths.from_samples(RNG.integers(20, 400, 60), RNG.geometric(0.02, 60), upper=240)
SETS = [
    Wasserstein1(9.0),
    Wasserstein1(0.4, relative=True),
    WassersteinInf(15),
    ScaleShift(0.8, 1.3),
    Contamination(0.07),
    CVaR(0.25),
]


def largest_over_w1_ball(lengths, radius, value):
    """sup E f over outputs moved anywhere on a grid by a transport of radius tokens: a linear program."""
    grid = np.arange(0, lengths.upper + 1)
    n, m = lengths.weights.size, grid.size
    gain = value(np.repeat(lengths.inputs, m).astype(float), np.tile(grid, n).astype(float))
    distance = np.abs(lengths.outputs[:, None] - grid).ravel().astype(float)
    rows = np.kron(np.eye(n), np.ones(m))
    found = linprog(-gain, A_ub=distance[None], b_ub=[radius], A_eq=rows, b_eq=lengths.probabilities)
    return -found.fun


@pytest.mark.parametrize("radius", [0.0, 3.0, 30.0, 1e4])
@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (5, 1, 0.5)])
def test_w1_worst_moments_are_the_linear_programs(radius, weights):
    def value(L, xi):
        return weights[0] * xi + weights[1] * L * xi + weights[2] * xi**2

    worst = worst_lengths(LENGTHS, Wasserstein1(radius), value)
    found = worst.mean(value(worst.inputs.astype(float), worst.outputs.astype(float)))
    assert found == pytest.approx(largest_over_w1_ball(LENGTHS, radius, value), rel=1e-7)


def test_least_theta_over_a_w1_ball_is_where_the_linear_programs_change_sign():
    worst = fullest_lengths(LENGTHS, Wasserstein1(9.0), block=1)
    theta = lundberg_exponent(worst, 1)

    def h(x):
        return largest_over_w1_ball(LENGTHS, 9.0, lambda L, xi: x * xi - 1 + np.exp(-x * (L + xi)))

    assert theta < lundberg_exponent(LENGTHS, 1)
    assert h(theta) == pytest.approx(0, abs=1e-7)
    assert h(0.99 * theta) < 0 < h(1.01 * theta)
    moved = sum(
        abs(worst.output_lengths.cdf(t) - LENGTHS.output_lengths.cdf(t)) for t in range(LENGTHS.upper)
    )
    assert moved <= 9.0 + 1e-9, "the worst law is in the ball"


def members(ambiguity, rng):
    """Laws of the set, drawn at random."""
    for _ in range(30):
        L, xi, p = LENGTHS.inputs, LENGTHS.outputs.astype(float), LENGTHS.probabilities
        match ambiguity:
            case Wasserstein1():
                to = rng.integers(0, LENGTHS.upper + 1, xi.size)
                cost = p @ np.abs(to - xi)
                share = min(1.0, ambiguity.radius_tokens(LENGTHS.output_lengths) / cost)
                L, xi = np.tile(L, 2), np.concatenate([xi, to])
                p = np.concatenate([p * (1 - share), p * share])
            case WassersteinInf():
                xi = np.clip(xi + rng.integers(-15, 16, xi.size), 0, LENGTHS.upper)
            case ScaleShift():
                xi = np.floor(xi * rng.uniform(ambiguity.low, ambiguity.high) + 0.5)
            case Contamination():
                runs = rng.uniform(0, ambiguity.share)
                L, xi = np.tile(L, 2), np.concatenate([xi, np.full(xi.size, LENGTHS.upper)])
                p = np.concatenate([p * (1 - runs), p * runs])
            case CVaR():
                density = rng.permutation(p.size) < 0.76 * p.size
                p = np.where(density, p, 1e-12)
        yield JointLengths.from_counts(L, xi, p)


@pytest.mark.parametrize("ambiguity", SETS, ids=repr)
def test_no_member_is_worse(ambiguity):
    theta = lundberg_exponent(fullest_lengths(LENGTHS, ambiguity))
    g = Demand.of(costliest_lengths(LENGTHS, ambiguity, COST)).seconds(COST)
    a = COST.per_prefill_token
    for member in members(ambiguity, np.random.default_rng(12)):
        assert lundberg_exponent(member) >= theta * (1 - 1e-9)
        # The set leaves prompts as they are, but for CVaR; compare what outputs cost.
        added = Demand.of(member).seconds(COST) - a * member.mean_input
        assert added <= g - a * costliest_lengths(LENGTHS, ambiguity, COST).mean_input + 1e-12


@pytest.mark.parametrize("ambiguity", SETS, ids=repr)
def test_headroom_for_the_slowest_decay_is_enough_for_every_member_drawn(ambiguity):
    enough = headroom(fullest_lengths(LENGTHS, ambiguity), 9_000, COST)
    assert 0 < headroom(LENGTHS, 9_000, COST) < enough
    for member in members(ambiguity, np.random.default_rng(13)):
        assert headroom(member, 9_000, COST) <= enough * (1 + 1e-9)


def test_scale_shift_moments_by_hand_and_other_sets_are_refused():
    worst = worst_lengths(JointLengths.from_samples([5, 7], [10, 30]), ScaleShift(0.5, 2), lambda L, xi: xi)
    assert worst.outputs.tolist() == [20, 60]
    with pytest.raises(TypeError, match="expected a set of"):
        worst_lengths(LENGTHS, None, lambda L, xi: xi)
