import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_cases import KINDS, case

from kvcache import (
    Costs,
    LengthDistribution,
    Policy,
    Problem,
    RequestClass,
    ServingConfig,
    Solution,
    evaluate,
)
from kvcache.ambiguity import Wasserstein1
from kvcache.policy import Status, repaired

OUTPUT = LengthDistribution.from_counts([2, 6], [1, 1], 10)


def problem(**changes):
    """Service takes 1 s on ``k`` and 2 s on ``l``, whatever the length: round numbers by hand."""
    values = {
        "classes": (
            RequestClass("a", 3.0, 6.0, 5.0, 1.0, OUTPUT),
            RequestClass("b", 1.0, 2.0, 0.0, 4.0, OUTPUT),
        ),
        "configs": (
            ServingConfig("k", 2, 40.0, 0.0, 0.25),
            ServingConfig("l", 3, 50.0, 0.0, 0.5),
        ),
        "gpus": 7,
        "costs": Costs(preemption=3, waste=1, slo=2, rejection=100, gpu=0.5),
        "headroom": 0.25,
        "ambiguity": Wasserstein1(0.0),
    }
    return Problem(**(values | changes))


def policy(x, z=(1, 1), eta=(4.0, 2.0), pi=((0.5, 0.25), (0.0, 1.0)), delta=((1, 0), (0, 0))):
    return Policy.of(x, np.array(z), eta, np.array(pi), np.array(delta))


def test_objective_by_hand():
    x = problem()
    r = evaluate(x, policy(x))
    # T = 4 x 0.25 = 1 and 4 x 0.5 = 2; u = [[3, 6], [1, 2]]
    # k: 3 x 0.5 requests of 6 + 4 - 5 tokens, and one prefix of 5: v = (7.5 + 5) / 40
    # l: 6 x 0.25 of 10 and 2 of 4 tokens: v = (15 + 8) / 50
    np.testing.assert_allclose(r.utilisation, [12.5 / 40, 23 / 50])
    # phi = E T^2 / (2 E T) with Var xi = 4: (1 + 0.25) / 2 and (4 + 1) / 4
    np.testing.assert_allclose(r.waits, [0.625 * 12.5 / 27.5, 1.25 * 23 / 27])
    late_a = 0.5 * (r.waits[0] + 1) + 0.25 * (r.waits[1] + 2) - 0.75
    late_b = 1.0 * (r.waits[1] + 2) - 4.0
    assert late_b < 0
    np.testing.assert_allclose(r.tardiness, [late_a, 0.0])
    # E Q(4) = 0.5 x 3 x 2 + 0.5 x 2 = 4;  E Q(2) = 0.5 x 3 x 4 = 6
    np.testing.assert_allclose(r.worst_case, [4.0, 6.0])
    assert r.terms == pytest.approx(
        {"gpu": 2.5, "mismatch": 3 * 0.75 * 4 + 6, "slo": 2 * 3 * late_a, "rejection": 100 * 3 * 0.25}
    )
    assert r.objective == pytest.approx(sum(r.terms.values()))


def test_slacks_by_hand():
    x = problem()
    r = evaluate(x, policy(x))
    assert r.slacks["gpus"][0] == pytest.approx(2 / 7)
    np.testing.assert_allclose(r.slacks["memory"], [1 - (1.25 * 7.5 + 5) / 40, 1 - 1.25 * 23 / 50])
    np.testing.assert_allclose(r.slacks["admission"], [0.25, 0.0])
    np.testing.assert_allclose(r.slacks["eta"], [0.4, 0.2])
    assert r.feasible
    assert r.violation == 0


def test_two_groups_halve_the_load():
    x = problem()
    one, two = (evaluate(x, policy(x, z=z)) for z in ((1, 1), (2, 1)))
    assert two.utilisation[0] == pytest.approx((3.75 + 5) / 40)  # each group keeps the prefix
    assert two.terms["gpu"] - one.terms["gpu"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"z": (1, 2)}, "gpus"),
        ({"z": (0, 1)}, "deployed"),
        ({"pi": ((0.8, 0.3), (0, 1))}, "admission"),
        ({"pi": ((-0.2, 0.3), (0, 1))}, "routing"),
        ({"eta": (11.0, 2.0)}, "eta"),
        ({"eta": (-1.0, 2.0)}, "eta"),
        ({"pi": ((0.0, 1.0), (0, 1))}, "memory"),
    ],
)
def test_each_violation_is_seen(changes, constraint):
    x = problem()
    r = evaluate(x, policy(x, **changes))
    assert not r.feasible
    assert r.slacks[constraint].min() < -1e-3


def test_a_full_group_waits_for_ever():
    x = problem(headroom=0.0)
    full = policy(x, z=(1, 0), eta=(10.0, 0.0), pi=((1.0, 0.0), (0.0, 0.0)), delta=((0, 0), (0, 0)))
    r = evaluate(x, full)
    assert r.utilisation[0] == pytest.approx(48 / 40)
    assert r.waits[0] == np.inf
    assert r.objective == np.inf
    assert r.slacks["stable"][0] == -1
    free = problem(headroom=0.0, costs=Costs(slo=0.0))
    assert np.isfinite(evaluate(free, full).objective)


def test_rejecting_everything_is_feasible():
    x = problem()
    r = evaluate(x, policy(x, z=(0, 0), pi=np.zeros((2, 2)), delta=np.zeros((2, 2))))
    assert r.feasible
    assert r.terms == {"gpu": 0, "mismatch": 0, "slo": 0, "rejection": 400}


def test_a_policy_of_another_shape_is_refused():
    x = problem()
    other = Policy(np.array([1]), np.array([1.0]), np.array([[1.0]]), np.array([[False]]))
    with pytest.raises(ValueError, match="the problem has"):
        evaluate(x, other)


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 30), st.integers(0, 2**32 - 1))
def test_repaired_policies_are_feasible(kind, seed, numbers):
    x = case(kind, seed)
    rng = np.random.default_rng(numbers)
    z = np.array([[1, 1], [3, 0], [0, 1], [0, 0]][rng.integers(4)])
    eta, pi = rng.uniform(-10, 100, 2), rng.uniform(-0.1, 1.2, (2, 2))
    delta = rng.random((2, 2)) < 0.5
    fixed = repaired(x, z, eta, pi, delta)
    if all(x.prefix_tokens @ fixed.prefix_cache <= x.kv_tokens):
        assert evaluate(x, fixed).feasible
    again = repaired(x, z, fixed.reservations - x.input_tokens, fixed.routing, fixed.prefix_cache)
    np.testing.assert_allclose(again.routing, fixed.routing, rtol=1e-12, atol=1e-15)


def test_repair_trims_reservations_by_a_tolerance_and_no_more():
    x = problem()
    eta = np.array([4.0, 2.0])
    pi = np.array([[0.0, 0.5], [0.0, 1.0]])
    room = x.replace(configs=(x.configs[0], ServingConfig("l", 3, 1.25 * 38 * (1 - 1e-6), 0.0, 0.5)))
    kept = repaired(room, (0, 1), eta, pi, np.zeros((2, 2)), trim=True)
    np.testing.assert_array_equal(kept.routing, pi)
    assert np.all(kept.reservations < x.input_tokens + eta)
    assert evaluate(room, kept).violation <= 1e-12
    tight = x.replace(configs=(x.configs[0], ServingConfig("l", 3, 30.0, 0.0, 0.5)))
    shrunk = repaired(tight, (0, 1), eta, pi, np.zeros((2, 2)), trim=True)
    np.testing.assert_allclose(shrunk.reservations, x.input_tokens + eta)
    assert evaluate(tight, shrunk).slacks["memory"][1] == pytest.approx(0, abs=1e-12)


# ---- the online side --------------------------------------------------------------------------------


def test_route_follows_the_shares():
    p = policy(problem())
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 2, 400_000)
    chosen = p.route(classes, rng)
    shares = [[np.mean(chosen[classes == i] == k) for k in (0, 1, -1)] for i in range(2)]
    np.testing.assert_allclose(shares, [[0.5, 0.25, 0.25], [0, 1, 0]], atol=4e-3)


def test_one_request_and_many_draw_the_same():
    p = policy(problem())
    many = p.route(np.zeros(200, dtype=int), np.random.default_rng(5))
    rng = np.random.default_rng(5)
    assert [p.route("a", rng) for _ in range(200)] == many.tolist()


def test_a_share_of_nothing_is_never_chosen():
    x = problem()
    p = policy(x, pi=((0.0, 1.0), (0.0, 0.0)), delta=np.zeros((2, 2)))
    rng = np.random.default_rng(1)
    assert set(p.route(np.zeros(10_000, dtype=int), rng)) == {1}
    assert set(p.route(np.ones(10_000, dtype=int), rng)) == {-1}


def test_reservation_by_index_name_and_array():
    p = policy(problem())
    assert p.reservation("b") == p.reservation(1) == 4.0
    np.testing.assert_array_equal(p.reservation(np.array([1, 0, 1])), [4.0, 10.0, 4.0])


def test_unknown_classes_are_errors():
    p = policy(problem())
    rng = np.random.default_rng(0)
    with pytest.raises(KeyError, match=r"class 'c'; this policy knows \['a', 'b'\]"):
        p.route("c", rng)
    for bad in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError, match=r"0\.\.1"):
            p.route(np.array(bad), rng)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"groups": [0.5, 1]}, "whole numbers"),
        ({"groups": [-1, 1]}, "whole numbers"),
        ({"routing": [[0.5, 0.5]]}, "expected"),
        ({"routing": [[np.nan, 0], [0, 1]]}, "finite"),
        ({"reservations": [np.inf, 1.0]}, "finite"),
    ],
)
def test_bad_policies_are_refused(values, message):
    good = {
        "groups": [1, 1],
        "reservations": [10.0, 4.0],
        "routing": np.eye(2),
        "prefix_cache": np.zeros((2, 2)),
    }
    with pytest.raises(ValueError, match=message):
        Policy(**(good | values))


def test_policies_are_frozen():
    p = policy(problem())
    with pytest.raises(ValueError, match="read-only"):
        p.routing[0, 0] = 1.0


def test_solution_takes_its_numbers_from_evaluate():
    x = problem()
    p = policy(x)
    s = Solution.of(x, p, seconds=1.0, status="feasible", method="by hand", lower_bound=90.0)
    assert s.objective == evaluate(x, p).objective
    assert s.gap == pytest.approx((s.objective - 90) / s.objective)
    assert Solution.of(x, p, seconds=1.0, status="feasible", method="by hand").gap == np.inf


def test_a_status_is_one_of_few_and_tells_whether_there_is_a_policy():
    x = problem()
    p = policy(x)
    solution = Solution.of(x, p, seconds=1.0, status="feasible", method="by hand", message="why")
    assert solution.status is Status.FEASIBLE
    assert solution.message == "why"
    with pytest.raises(ValueError, match="'good enough' is not a valid Status"):
        Solution.of(x, p, seconds=1.0, status="good enough", method="by hand")
    with pytest.raises(ValueError, match="status: does not fit, with a policy"):
        Solution.of(x, p, seconds=1.0, status=Status.TOO_LARGE, method="by hand")
    with pytest.raises(ValueError, match="status: optimal, without a policy"):
        Solution(None, np.inf, {}, -np.inf, 0.0, Status.OPTIMAL, "by hand")
