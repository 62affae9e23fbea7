"""Closed forms against linear programs, brute force, another library and hand-worked answers."""

import gc
import os
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from kvcache import Contamination, CVaR, LengthDistribution, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.ambiguity import _KNOWN, Regime, critical_fractile
from kvcache.paper.digests import load_digest

settings.register_profile("kvcache", deadline=None, max_examples=150)
settings.load_profile("kvcache")

COSTS = [(10.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, 4.0), (0.7, 2.3), (100.0, 1.0)]


def newsvendor(eta, x, c_p, c_w):
    return c_p * np.maximum(x - eta, 0) + c_w * np.maximum(eta - x, 0)


def random_instance(rng):
    """A small distribution, costs and a radius; ties, one atom, zero and huge radii come up often."""
    upper = int(rng.integers(1, 60))
    atoms = 1 if rng.random() < 0.08 else int(rng.integers(2, 12))
    # Few distinct weights, so that the fractile often falls on a cumulative probability.
    dist = LengthDistribution.from_counts(rng.integers(0, upper + 1, atoms), rng.integers(1, 4, atoms), upper)
    c_p, c_w = COSTS[rng.integers(len(COSTS))] if rng.random() < 0.5 else rng.uniform(0.1, 10, 2)
    S, S2 = Wasserstein1.thresholds(dist, c_p, c_w)
    radius = [0.0, rng.uniform(0, S), S, rng.uniform(S, S2), S2, rng.uniform(S2, 2 * upper), 50.0 * upper]
    return dist, float(c_p), float(c_w), float(radius[rng.integers(len(radius))])


def dual_program(dist, c_p, c_w, radius):
    """Minimum of (8a) for one class: eta in [0, L], gamma and theta_n >= 0, under (8c)-(8g)."""
    x, p, upper = dist.tokens.astype(float), dist.probabilities, dist.upper
    n = x.size
    eye, one, zero = np.eye(n), np.ones((n, 1)), np.zeros((n, 1))
    rows = np.vstack(
        [
            np.hstack([-c_p * one, zero, -eye]),
            np.hstack([c_w * one, zero, -eye]),
            np.hstack([-c_p * one, -(upper - x)[:, None], -eye]),
            np.hstack([c_w * one, -x[:, None], -eye]),
        ]
    )
    bounds = np.concatenate([-c_p * x, c_w * x, np.full(n, -c_p * upper), np.zeros(n)])
    objective = np.concatenate([[0.0, radius], p])
    limits = [(0, upper), (0, None)] + [(0, None)] * n
    answer = linprog(objective, A_ub=rows, b_ub=bounds, bounds=limits, method="highs")
    assert answer.status == 0
    return answer.fun


def transport_program(dist, eta, c_p, c_w, radius):
    """sup of E Q(eta, .) over couplings of dist with the whole grid 0..L: the primal, with no duality."""
    x, p, grid = dist.tokens, dist.probabilities, np.arange(dist.upper + 1)
    gain = np.tile(newsvendor(eta, grid, c_p, c_w), x.size)
    distance = np.abs(x[:, None] - grid[None, :]).ravel()
    marginal = np.kron(np.eye(x.size), np.ones(grid.size))
    answer = linprog(-gain, A_ub=[distance], b_ub=[radius], A_eq=marginal, b_eq=p, method="highs")
    assert answer.status == 0
    return -answer.fun


def test_wasserstein1_equals_the_linear_program_over_1200_instances():
    rng = np.random.default_rng(1)
    seen = Counter()
    for _ in range(1200):
        dist, c_p, c_w, radius = random_instance(rng)
        ball = Wasserstein1(radius)
        answer = ball.solve(dist, c_p, c_w)
        program = dual_program(dist, c_p, c_w, radius)
        assert answer.value == pytest.approx(program, rel=1e-9, abs=1e-9)
        assert ball.worst_case(dist, answer.eta, c_p, c_w) == pytest.approx(program, rel=1e-9, abs=1e-9)
        q = critical_fractile(c_p, c_w)
        seen[answer.regime] += 1
        seen["c_p < c_w"] += c_p < c_w
        seen["c_p = c_w"] += c_p == c_w
        seen["tie"] += bool(np.any(np.abs(dist.cumulative[:-1] - q) < 1e-12))
        seen["one atom"] += dist.tokens.size == 1
        seen["radius 0"] += radius == 0
        seen["radius huge"] += radius > 2 * dist.upper
    assert min(seen.values()) >= 30, seen
    assert set(Regime) <= set(seen)


def test_worst_case_equals_the_transport_program():
    rng = np.random.default_rng(2)
    for _ in range(250):
        dist, c_p, c_w, radius = random_instance(rng)
        eta = rng.uniform(0, dist.upper) if rng.random() < 0.7 else float(rng.integers(0, dist.upper + 1))
        # The grid holds the kink only where eta is whole; the worst lengths never need it.
        expected = transport_program(dist, eta, c_p, c_w, radius)
        assert Wasserstein1(radius).worst_case(dist, eta, c_p, c_w) == pytest.approx(
            expected, rel=1e-9, abs=1e-9
        )


@pytest.mark.parametrize(("c_p", "c_w"), [(2.0, 1.0), (10.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("place", ["below S", "between", "above S2"])
def test_wasserstein1_equals_rsome(c_p, c_w, place):
    from rsome import E, dro

    dist = LengthDistribution.from_counts([3, 8, 12, 20, 37], [2, 5, 3, 1, 1], 40)
    S, S2 = Wasserstein1.thresholds(dist, c_p, c_w)
    radius = {"below S": S / 2, "between": (S + S2) / 2, "above S2": S2 + 3}[place]
    model = dro.Model(dist.tokens.size)
    length, moved = model.rvar(), model.rvar()
    around = model.ambiguity()
    for n, x in enumerate(dist.tokens.tolist()):
        around[n].suppset(length >= 0, length <= dist.upper, abs(length - x) <= moved, moved <= dist.upper)
    around.exptset(E(moved) <= radius)
    around.probset(model.p == dist.probabilities)
    eta, cost = model.dvar(), model.dvar()
    cost.adapt(length)
    cost.adapt(moved)
    for n in range(dist.tokens.size):
        cost.adapt(n)
    model.minsup(E(cost), around)
    model.st(cost >= c_p * (length - eta), cost >= c_w * (eta - length), eta >= 0, eta <= dist.upper)
    model.solve(display=False)
    assert Wasserstein1(radius).solve(dist, c_p, c_w).value == pytest.approx(model.get(), rel=1e-7)


def test_wasserstein1_worked_by_hand():
    """Lengths 2 and 6 with equal chance, L = 10, c_p = 3, c_w = 1: q* = 3/4, F = 6.

    The tail of mass 1/4 lies at 6, so S = (10 - 6)/4 = 1; the rest is 2 w.p. 1/2 and 6 w.p. 1/4, so
    S2 = 1 + 1 + 1.5 = 3.5. Jump: (2 * 10 + 2 * 6)/4 = 8; support: 3 * 10/4 = 7.5.
    Cost at 6: 4/2 = 2. With radius 1/2 all of it moves mass from 6 up: 2 + 3/2 = 3.5.
    At 8 with radius 2: of the mass at 6, up to 1/2, moving to 10 costs 4 of transport and gains
    6 - 2 = 4; moving 2 to 0 costs 2 and gains 2. Both give 1 a token: (6 + 2)/2 + 2 = 6.
    """
    dist = LengthDistribution.from_samples([2, 6], 10)
    assert Wasserstein1.thresholds(dist, 3, 1) == pytest.approx((1, 3.5))
    assert Wasserstein1(0.5).solve(dist, 3, 1) == pytest.approx((6, 3.5, 3, Regime.FRACTILE, 1, 3.5))
    assert Wasserstein1(1).solve(dist, 3, 1)[:4] == (6, 5, 3, Regime.FRACTILE)
    assert Wasserstein1(2).solve(dist, 3, 1) == pytest.approx((8, 6, 1, Regime.JUMP, 1, 3.5))
    assert Wasserstein1(3.6).solve(dist, 3, 1) == pytest.approx((7.5, 7.5, 0, Regime.SUPPORT, 1, 3.5))
    assert Wasserstein1(2).worst_case(dist, 8, 3, 1) == pytest.approx(6)


def test_the_robust_reservation_does_not_grow_with_the_radius():
    """The stated closed form: flat, one jump, and then a fall."""
    dist = LengthDistribution.from_samples([1, 2, 3, 4, 5, 6, 7, 8, 9, 30], 100)
    S, S2 = Wasserstein1.thresholds(dist, 4, 1)
    etas = {r: Wasserstein1(r).reservation(dist, 4, 1) for r in (0, S / 2, S, S * 1.001, S2, S2 * 1.001)}
    assert list(etas.values()) == [8, 8, 8, pytest.approx(63.2), pytest.approx(63.2), 80]
    # c_p L / (c_p + c_w) is above or below the jump according to where the fractile lies.
    late = LengthDistribution.from_samples([90, 95], 100)
    assert Wasserstein1(1e3).reservation(late, 4, 1) < Wasserstein1(
        Wasserstein1.thresholds(late, 4, 1)[1]
    ).reservation(late, 4, 1)


def test_relative_radius_is_in_means():
    dist = LengthDistribution.from_samples([10, 20, 60], 100)
    assert Wasserstein1(0.1, relative=True).radius_tokens(dist) == pytest.approx(3)
    assert Wasserstein1(0.1, relative=True).solve(dist, 10, 1) == Wasserstein1(3).solve(dist, 10, 1)
    assert WassersteinInf(0.1, relative=True).reservation(dist, 10, 1) == WassersteinInf(3).reservation(
        dist, 10, 1
    )


# ---- the other sets against brute force ---------------------------------------------------------


def brute_cvar(dist, eta, c_p, c_w, level):
    cost = newsvendor(eta, dist.tokens, c_p, c_w)
    order = np.argsort(-cost)
    taken = np.diff(np.minimum(np.cumsum(dist.probabilities[order]), 1 - level), prepend=0)
    return float(taken @ cost[order]) / (1 - level)


def brute_infinity(dist, eta, c_p, c_w, radius):
    worst = [
        newsvendor(eta, np.arange(max(x - radius, 0), min(x + radius, dist.upper) + 1), c_p, c_w).max()
        for x in dist.tokens
    ]
    return float(dist.probabilities @ worst)


def brute_contamination(dist, eta, c_p, c_w, share, lengths):
    given = dist.probabilities @ newsvendor(eta, dist.tokens, c_p, c_w)
    return (1 - share) * given + share * newsvendor(eta, lengths, c_p, c_w).max()


def brute_scale(dist, eta, c_p, c_w, low, high):
    factors = np.linspace(low, high, 101)
    return max(dist.probabilities @ newsvendor(eta, s * dist.tokens, c_p, c_w) for s in factors)


def brute_pairs(rng):
    """Each set beside a brute-force worst case of (dist, eta, c_p, c_w)."""
    radius, level, share = (
        int(rng.integers(0, 15)),
        float(rng.choice([0, 0.1, 0.5, 0.9])),
        float(rng.choice([0, 0.05, 0.3])),
    )
    low, high = sorted(rng.uniform(0.3, 3, 2))
    return [
        (WassersteinInf(radius), lambda *a: brute_infinity(*a, radius)),
        (CVaR(level), lambda *a: brute_cvar(*a, level)),
        (Contamination(share), lambda *a: brute_contamination(*a, share, np.array([a[0].upper]))),
        (
            Contamination(share, two_sided=True),
            lambda *a: brute_contamination(*a, share, np.arange(a[0].upper + 1)),
        ),
        (ScaleShift(low, high), lambda *a: brute_scale(*a, low, high)),
    ]


def test_other_sets_equal_brute_force():
    rng = np.random.default_rng(3)
    for _ in range(60):
        dist, c_p, c_w, _ = random_instance(rng)
        grid = np.concatenate([np.linspace(0, dist.upper, 101), dist.tokens])
        for ambiguity, brute in brute_pairs(rng):
            some = rng.choice(grid, 5)
            expected = [brute(dist, eta, c_p, c_w) for eta in some]
            assert ambiguity.worst_case(dist, some, c_p, c_w) == pytest.approx(expected, rel=1e-9, abs=1e-9)
            eta = ambiguity.reservation(dist, c_p, c_w)
            best = ambiguity.worst_case(dist, grid, c_p, c_w).min()
            assert brute(dist, eta, c_p, c_w) <= best * (1 + 1e-9) + 1e-9, ambiguity


def test_cvar_reservation_equals_the_rockafellar_uryasev_program():
    rng = np.random.default_rng(4)
    for _ in range(100):
        dist, c_p, c_w, _ = random_instance(rng)
        level = float(rng.uniform(0, 0.99))
        x, p, n = dist.tokens, dist.probabilities, dist.tokens.size
        eye, one = np.eye(n), np.ones((n, 1))
        # eta, alpha, excess_n >= Q(eta, x_n) - alpha
        rows = np.vstack([np.hstack([-c_p * one, -one, -eye]), np.hstack([c_w * one, -one, -eye])])
        answer = linprog(
            np.concatenate([[0, 1], p / (1 - level)]),
            A_ub=rows,
            b_ub=np.concatenate([-c_p * x, c_w * x]),
            bounds=[(0, dist.upper), (None, None)] + [(0, None)] * n,
            method="highs",
        )
        eta = CVaR(level).reservation(dist, c_p, c_w)
        assert CVaR(level).worst_case(dist, eta, c_p, c_w) == pytest.approx(answer.fun, rel=1e-9, abs=1e-9)


def test_infinity_ball_worked_by_hand():
    """F = 6, L = 10, c_p = 3, c_w = 1: (3 min(6 + r, 10) + max(6 - r, 0)) / 4."""
    dist = LengthDistribution.from_samples([2, 6], 10)
    found = [WassersteinInf(r).reservation(dist, 3, 1) for r in (0, 1, 4, 5, 6, 60)]
    assert found == pytest.approx([6, 6.5, 8, 7.75, 7.5, 7.5])


def test_contamination_worked_by_hand():
    """Ten equal lengths 1..10, q* = 3/4: F^{-1}(3/4) = 8, a share of 0.1 asks for F^{-1}(0.8333) = 9."""
    dist = LengthDistribution.from_samples(range(1, 11), 40)
    shares = (0, 0.1, 0.25, 0.26)
    assert [Contamination(b).reservation(dist, 3, 1) for b in shares] == [8, 9, 10, 40]
    # With L = 40 the mixture leaves no reason to go beyond q* L = 30 when lengths may also be short.
    assert [Contamination(b, two_sided=True).reservation(dist, 3, 1) for b in shares] == [8, 9, 10, 30]


def test_scale_shift_worked_by_hand():
    """One length 10, factors 1 and 2, c_p = 3, c_w = 1: costs meet where 3 (20 - eta) = eta - 10."""
    dist = LengthDistribution.from_samples([10], 40)
    assert ScaleShift(1, 2).reservation(dist, 3, 1) == pytest.approx(17.5)
    assert ScaleShift(1, 2).worst_case(dist, 17.5, 3, 1) == pytest.approx(7.5)
    assert ScaleShift(2, 2).reservation(dist, 3, 1) == 20
    assert ScaleShift(8, 9).reservation(dist, 3, 1) == 40


# ---- properties ---------------------------------------------------------------------------------


@st.composite
def distributions(draw, highest=80):
    upper = draw(st.integers(1, highest))
    atoms = draw(st.dictionaries(st.integers(0, upper), st.integers(1, 5), min_size=1, max_size=12))
    return LengthDistribution.from_counts(list(atoms), list(atoms.values()), upper)


costs = st.floats(0.05, 50)
shares = st.floats(0, 0.95)
radii = st.one_of(st.just(0.0), st.floats(0, 60), st.floats(60, 1e6))
sets = st.one_of(
    st.builds(Wasserstein1, radii),
    st.builds(Wasserstein1, st.floats(0, 3), st.just(True)),
    st.builds(WassersteinInf, radii),
    st.builds(CVaR, shares),
    st.builds(Contamination, shares, st.booleans()),
    st.tuples(st.floats(0.2, 3), st.floats(0.2, 3)).map(lambda ends: ScaleShift(min(ends), max(ends))),
)
inside = st.lists(st.floats(0, 1), min_size=2, max_size=8)


@given(distributions(), sets, costs, costs, inside)
def test_every_cut_supports_a_convex_worst_case(dist, ambiguity, c_p, c_w, where):
    eta = np.concatenate([np.array(where) * dist.upper, dist.tokens])
    value, slope = ambiguity.cut(dist, eta, c_p, c_w)
    below = value[:, None] + slope[:, None] * (eta[None, :] - eta[:, None])
    assert np.all(below <= value[None, :] + 1e-8 * max(1.0, value.max()))
    assert np.all((slope <= c_w * (1 + 1e-9)) & (slope >= -c_p * (1 + 1e-9)))


@given(distributions(), sets, costs, costs, inside)
def test_reservation_minimises_the_worst_case(dist, ambiguity, c_p, c_w, where):
    eta = ambiguity.reservation(dist, c_p, c_w)
    assert 0 <= eta <= dist.upper
    others = ambiguity.worst_case(dist, np.concatenate([np.array(where) * dist.upper, dist.tokens]), c_p, c_w)
    assert ambiguity.worst_case(dist, eta, c_p, c_w) <= others.min() + 1e-8 * max(1.0, others.max())


@given(distributions(), sets, costs, costs, inside)
def test_arrays_and_numbers_agree(dist, ambiguity, c_p, c_w, where):
    eta = np.array(where) * dist.upper
    table = ambiguity.worst_case(dist, eta.reshape(-1, 1), c_p, c_w)
    assert table.shape == (eta.size, 1)
    one_by_one = [ambiguity.worst_case(dist, e, c_p, c_w) for e in eta.tolist()]
    assert isinstance(one_by_one[0], float)
    np.testing.assert_array_equal(table.ravel(), one_by_one)
    np.testing.assert_array_equal(
        ambiguity.subgradient(dist, eta, c_p, c_w), [ambiguity.cut(dist, e, c_p, c_w)[1] for e in eta]
    )


@given(distributions(), costs, costs, st.floats(0, 1), radii, radii)
def test_wasserstein1_grows_with_the_radius_between_its_bounds(dist, c_p, c_w, where, one, other):
    eta, (small, large) = where * dist.upper, sorted([one, other])
    low, high = (Wasserstein1(r).worst_case(dist, eta, c_p, c_w) for r in (small, large))
    slack = 1e-9 * max(1.0, high)
    nominal = dist.cost(eta, c_p, c_w)
    assert nominal - slack <= low <= high + slack
    assert high <= nominal + max(c_p, c_w) * large + slack
    assert high <= max(c_w * eta, c_p * (dist.upper - eta)) + slack


@given(distributions(), costs, costs, st.floats(0, 1))
def test_ends_of_the_radius(dist, c_p, c_w, where):
    eta = where * dist.upper
    ends = max(c_w * eta, c_p * (dist.upper - eta))
    for ball in (Wasserstein1, WassersteinInf):
        assert ball(0).worst_case(dist, eta, c_p, c_w) == pytest.approx(dist.cost(eta, c_p, c_w), abs=1e-9)
        assert ball(dist.upper).worst_case(dist, eta, c_p, c_w) == pytest.approx(ends, abs=1e-9)
        assert ball(0).reservation(dist, c_p, c_w) == dist.quantile(critical_fractile(c_p, c_w))


@given(distributions(), costs, costs, st.floats(0, 1), st.floats(0, 40))
def test_wasserstein1_is_contained_between_its_neighbours(dist, c_p, c_w, where, radius):
    """The infinity ball of a radius lies inside the Wasserstein-1 ball of it."""
    eta = where * dist.upper
    inner = WassersteinInf(radius).worst_case(dist, eta, c_p, c_w)
    outer = Wasserstein1(radius).worst_case(dist, eta, c_p, c_w)
    assert inner <= outer + 1e-9 * max(1.0, outer)


@given(distributions(), costs, costs, st.floats(0, 1), radii, st.integers(2, 7))
def test_wasserstein1_scales_with_tokens_and_costs(dist, c_p, c_w, where, radius, factor):
    eta = where * dist.upper
    value = Wasserstein1(radius).worst_case(dist, eta, c_p, c_w)
    longer = Wasserstein1(radius * factor).worst_case(dist.scale(factor), eta * factor, c_p, c_w)
    dearer = Wasserstein1(radius).worst_case(dist, eta, c_p * factor, c_w * factor)
    assert [longer, dearer] == pytest.approx([value * factor] * 2, rel=1e-9, abs=1e-9)


@given(distributions(), costs, costs, st.floats(0, 1), radii)
def test_wasserstein1_mirrors(dist, c_p, c_w, where, radius):
    mirror = LengthDistribution.from_counts(dist.upper - dist.tokens, dist.weights, dist.upper)
    eta = where * dist.upper
    value = Wasserstein1(radius).worst_case(dist, eta, c_p, c_w)
    other = Wasserstein1(radius).worst_case(mirror, dist.upper - eta, c_w, c_p)
    assert other == pytest.approx(value, rel=1e-9, abs=1e-9)
    a, b = Wasserstein1(radius).solve(dist, c_p, c_w), Wasserstein1(radius).solve(mirror, c_w, c_p)
    assert (a.value, a.S2) == pytest.approx((b.value, b.S2), rel=1e-9, abs=1e-9)
    if c_p != c_w:  # at equal costs the first two regimes are one, and S is either tail
        np.testing.assert_allclose(a.S, b.S, rtol=1e-9, atol=1e-9)


@given(distributions(), costs, costs)
def test_the_premium_up_to_the_critical_radius_is_the_larger_cost_times_the_radius(dist, c_p, c_w):
    ball = Wasserstein1(0)
    S = ball.critical_radius(dist, c_p, c_w)
    fractile, nominal = dist.quantile(critical_fractile(c_p, c_w)), ball.solve(dist, c_p, c_w).value
    for radius in (S / 2, S):
        answer = Wasserstein1(radius).solve(dist, c_p, c_w)
        assert answer.eta == fractile
        assert answer.value == pytest.approx(nominal + max(c_p, c_w) * radius, rel=1e-9, abs=1e-9)
    assert Wasserstein1(S + 1e-9 * dist.upper).solve(dist, c_p, c_w).regime is not Regime.FRACTILE


# ---- known values, size, errors -----------------------------------------------------------------

KNOWN = {2: 0.91, 5: 0.43, 10: 0.22, 20: 0.10, 50: 0.03, 100: 0.01}


@pytest.mark.parametrize("rho", KNOWN)
def test_critical_radius_of_azure_2023_conversation(rho):
    dist = load_digest("azure-2023-conv").clip(1000)
    assert round(Wasserstein1(0).critical_radius(dist, rho, 1) / dist.mean, 2) == KNOWN[rho]


@pytest.mark.skipif("KVCACHE_RAW" not in os.environ, reason="KVCACHE_RAW names no folder of original traces")
def test_critical_radius_from_the_original_file():
    lengths = pd.read_csv(Path(os.environ["KVCACHE_RAW"]) / "azure_2023_conv.csv.gz")["GeneratedTokens"]
    dist = LengthDistribution.from_samples(lengths.to_numpy(), 1000)
    found = {rho: round(Wasserstein1(0).critical_radius(dist, rho, 1) / dist.mean, 2) for rho in KNOWN}
    assert found == KNOWN


@given(distributions(), costs, costs, st.floats(0, 1), radii)
def test_partial_sums_that_are_kept_change_no_bit(dist, c_p, c_w, where, radius):
    ball, eta = Wasserstein1(radius), where * dist.upper * np.array([1.0, 0.5, 0.1])
    first = ball.cut(dist, eta, c_p, c_w), ball.solve(dist, c_p, c_w)
    again = ball.cut(dist, eta, c_p, c_w), ball.solve(dist, c_p, c_w)
    _KNOWN.clear()
    other = pickle.loads(pickle.dumps(dist))
    fresh = ball.cut(other, eta, c_p, c_w), ball.solve(other, c_p, c_w)
    for found in (again, fresh):
        np.testing.assert_array_equal(found[0], first[0])
        assert found[1] == first[1]


def test_partial_sums_are_read_only_and_live_with_the_distribution():
    dist = LengthDistribution.from_samples([3, 5, 5, 9], 12)
    twin = pickle.loads(pickle.dumps(dist))
    before = hash(dist), pickle.dumps(dist)
    Wasserstein1(1.0).cut(dist, [0.0, 11.0], 3.0, 1.0)
    assert (hash(dist), pickle.dumps(dist)) == before
    assert dist == twin
    assert id(dist) in _KNOWN
    assert id(twin) not in _KNOWN
    kept = _KNOWN[id(dist)][1]
    for atoms in (kept, kept.reflected):
        arrays = [value for value in vars(atoms).values() if isinstance(value, np.ndarray)]
        assert len(arrays) == 7
        assert not any(array.flags.writeable for array in arrays)
    # An array that the distribution hands out can be written to, and is another.
    assert not np.shares_memory(kept.p, dist.probabilities)
    gone = id(dist)
    del dist
    gc.collect()
    assert gone not in _KNOWN


def test_many_requests_cost_no_more_than_their_atoms():
    tokens = np.arange(4097)
    counts = np.exp(-tokens / 200) * 44e6
    few, many = (LengthDistribution.from_counts(tokens, counts * k) for k in (1, 1e3))
    a, b = (Wasserstein1(0.15, relative=True).solve(d, 10, 1) for d in (few, many))
    assert a.regime is b.regime
    assert a[:3] == pytest.approx(b[:3])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Wasserstein1(-1), "radius: -1; expected a finite number of tokens >= 0"),
        (lambda: Wasserstein1(float("nan")), "radius: nan"),
        (lambda: Wasserstein1(float("inf"), relative=True), "multiples of the mean"),
        (lambda: WassersteinInf(-0.1), "radius: -0.1"),
        (lambda: CVaR(1), r"level: 1; expected within \[0, 1\)"),
        (lambda: CVaR(float("nan")), "level: nan"),
        (lambda: Contamination(-0.2), r"share: -0.2; expected within \[0, 1\)"),
        (lambda: ScaleShift(0, 1), "low, high: 0, 1; expected 0 < low <= high"),
        (lambda: ScaleShift(2, 1), "low, high: 2, 1"),
        (lambda: ScaleShift(1, float("inf")), "low, high: 1, inf"),
    ],
)
def test_a_set_that_cannot_exist_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("eta", "c_p", "c_w", "words"),
    [
        (-1, 1, 1, r"eta: -1.0; expected a reservation within \[0, 10\] tokens"),
        ([0, 10.1], 1, 1, "eta: 10.1"),
        (float("nan"), 1, 1, "eta: nan"),
        (1, 0, 1, "c_p: 0; expected a positive number"),
        (1, 1, float("nan"), "c_w: nan"),
    ],
)
@pytest.mark.parametrize(
    "ambiguity", [Wasserstein1(1), WassersteinInf(1), CVaR(0.1), Contamination(0.1), ScaleShift(1, 2)]
)
def test_a_wrong_argument_is_named(ambiguity, eta, c_p, c_w, words):
    dist = LengthDistribution.from_samples([2, 6], 10)
    with pytest.raises(ValueError, match=words):
        ambiguity.worst_case(dist, eta, c_p, c_w)
