"""The closed form beside the linear program (8c)-(8g) with one theta per sample, and what kept sums save."""

import time
from dataclasses import replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import eye_array, hstack, vstack

from kvcache import LengthDistribution, Wasserstein1, evaluate
from kvcache.ambiguity import _KNOWN
from kvcache.paper import builders
from kvcache.paper.digests import load_digest
from kvcache.paper.methods import solve

N, UPPER, C_P, C_W = 2000, 4096, 10.0, 1.0


def program(samples, radius):
    """(8a) for one class over its N samples, handed to HiGHS as a sparse program."""
    n, x = samples.size, samples.astype(float)
    identity = eye_array(n, format="csr")

    def rows(eta, gamma):
        return hstack([np.full((n, 1), eta), gamma.reshape(n, 1), -identity], format="csr")

    still = np.zeros(n)
    matrix = vstack(
        [rows(-C_P, still), rows(C_W, still), rows(-C_P, x - UPPER), rows(C_W, -x)],
        format="csr",
    )
    bounds = np.concatenate([-C_P * x, C_W * x, np.full(n, -C_P * UPPER), np.zeros(n)])
    objective = np.concatenate([[0.0, radius], np.full(n, 1 / n)])
    answer = linprog(
        objective, A_ub=matrix, b_ub=bounds, bounds=[(0, UPPER)] + [(0, None)] * (n + 1), method="highs"
    )
    assert answer.status == 0, answer.message
    return answer.fun


def best_of(repeats, call):
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - start)
    return value, min(seconds)


def test_closed_form_is_a_thousand_times_faster_than_the_program():
    rng = np.random.default_rng(0)
    samples = np.minimum(rng.lognormal(4.5, 1.2, N).astype(int) + 1, UPPER)
    dist = LengthDistribution.from_samples(samples, UPPER)
    S, S2 = Wasserstein1.thresholds(dist, C_P, C_W)
    ratios = {}
    for radius in (0.5 * S, 0.5 * (S + S2), 2 * S2):
        ball = Wasserstein1(radius)
        solution, closed = best_of(200, lambda ball=ball: ball.solve(dist, C_P, C_W))
        value, solver = best_of(3, lambda radius=radius: program(samples, radius))
        np.testing.assert_allclose(solution.value, value, rtol=1e-8)
        ratios[str(solution.regime)] = solver / closed
        print(
            f"\n{solution.regime}: closed form {closed * 1e6:.0f} us, LP with N = {N} {solver:.3f} s, "
            f"ratio {solver / closed:,.0f}",
            end="",
        )
    print()
    assert min(ratios.values()) >= 1000, ratios


def test_partial_sums_of_a_distribution_are_computed_once():
    """The worst case at one reservation, and `evaluate` at new ones, with the sums kept and made anew."""
    dist, ball = load_digest("burstgpt-week1"), Wasserstein1(0.15, relative=True)
    x = builders.scalability(15, 12, 2000, 48, seed=0)
    start = solve(x, "bcd", block3="literal").policy
    # Values at reservations once seen are kept by the problem: every policy has its own.
    policies = [replace(start, reservations=start.reservations - 0.01 * n) for n in range(200)]

    def evaluated():
        waiting, fresh = iter(policies), x.replace()
        return lambda: evaluate(fresh, next(waiting)).objective

    for what, calls in (
        (f"worst case, {dist.tokens.size} atoms", lambda: lambda: ball.worst_case(dist, 300.0, C_P, C_W)),
        (f"evaluate on {x.name}", evaluated),
    ):
        first, again = calls(), calls()

        def anew(call=first):
            _KNOWN.clear()
            return call()

        before, slow = best_of(200, anew)
        after, quick = best_of(200, again)
        assert before == after
        print(
            f"\n{what}: sums made anew {slow * 1e6:.0f} us, kept {quick * 1e6:.0f} us, "
            f"ratio {slow / quick:.1f}",
            end="",
        )
        assert slow > quick
    print()
