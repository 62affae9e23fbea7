import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from solver_cases import KINDS, case

from kvcache import CVaR, evaluate, solve
from kvcache.paper import builders
from kvcache.paper.methods import bcd
from kvcache.policy import Policy, repaired

sizes = pytest.mark.parametrize("block3", bcd.BLOCK3)


def same_path(fast, per_sample):
    np.testing.assert_array_equal(fast.policy.groups, per_sample.policy.groups)
    np.testing.assert_array_equal(fast.policy.prefix_cache, per_sample.policy.prefix_cache)
    np.testing.assert_allclose(fast.history, per_sample.history, rtol=1e-6)
    np.testing.assert_allclose(fast.policy.reservations, per_sample.policy.reservations, rtol=1e-5)


@sizes
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_literal_and_fast_take_the_same_path(kind, block3):
    for seed in range(2):
        x = case(kind, seed)
        same_path(bcd.solve(x, block3=block3), bcd.solve(x, block3=block3, per_sample=True))


@sizes
@pytest.mark.parametrize("size", [(3, 4, 100, 8), (5, 5, 150, 12)])
def test_literal_and_fast_take_the_same_path_on_drawn_traces(size, block3):
    x = builders.scalability(*size, seed=3, load=0.9)
    same_path(bcd.solve(x, block3=block3), bcd.solve(x, block3=block3, per_sample=True))


@given(st.sampled_from(sorted(KINDS)), st.integers(0, 10_000), st.sampled_from(bcd.BLOCK3), st.integers(0, 4))
def test_history_falls_and_the_policy_is_feasible(kind, seed, block3, gpus):
    x = case(kind, seed, gpus=gpus)
    solution = bcd.solve(x, block3=block3)
    assert np.all(np.diff(solution.history) < 0)
    result = evaluate(x, solution.policy)
    assert result.feasible
    assert solution.objective == solution.history[-1] == result.objective
    assert solution.iterations < 100


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_lp2_is_the_linear_program_with_thetas(kind):
    """LP2 at a fixed routing without tardiness cost, against scipy on (8c)-(8g) written out again."""
    x = case(kind, 1)
    x = x.replace(costs=type(x.costs)(x.costs.preemption, 1.0, 0.0, x.costs.rejection))
    z, delta = np.array([1, 1]), np.zeros((2, 2), dtype=bool)
    policy = repaired(x, z, [c.output.mean for c in x.classes], [[0.3, 0.6], [0.5, 0.4]], delta)
    inner = bcd._Block1(x, per_sample=False, fixed=None, deadline=None)
    eta = inner.reserve(policy, evaluate(x, policy))
    found = evaluate(x, repaired(x, z, eta, policy.routing, delta)).terms["mismatch"]

    c_p, radius = x.costs.preemption, x.ambiguity.radius
    rows, right, cost, n = [], [], [], 2
    weights = x.arrival_rates * policy.admission
    lengths = [np.repeat(c.output.tokens, c.output.weights.astype(int)) for c in x.classes]
    total = 2 + sum(1 + s.size for s in lengths)
    for i, drawn in enumerate(lengths):
        top = x.classes[i].output.upper
        cost += [weights[i] * radius] + [weights[i] / drawn.size] * drawn.size
        for j, xi in enumerate(drawn):
            for eta_c, gamma_c, b in (
                (-c_p, 0, -c_p * xi),
                (1, 0, xi),
                (-c_p, xi - top, -c_p * top),
                (1, -xi, 0),
            ):
                row = np.zeros(total)
                row[[i, n, n + 1 + j]] = eta_c, gamma_c, -1
                rows.append(row)
                right.append(b)
        n += 1 + drawn.size
    per_token = (1 + x.headroom) * x.offered_loads * policy.routing / (x.kv_tokens * z)
    for k in range(2):
        rows.append(np.concatenate([per_token[:, k], np.zeros(total - 2)]))
        right.append(1 - per_token[:, k] @ x.input_tokens)
    bounds = [(0, c.output.upper) for c in x.classes] + [(0, None)] * (total - 2)
    answer = linprog(np.concatenate([[0, 0], cost]), A_ub=np.array(rows), b_ub=right, bounds=bounds)
    assert found == pytest.approx(answer.fun, rel=1e-7)


def test_lp1_is_the_linear_program_when_nobody_pays_for_time():
    x = case("memory", 2)
    x = x.replace(costs=type(x.costs)(x.costs.preemption, 1.0, 0.0, x.costs.rejection))
    z, delta = np.array([1, 1]), np.zeros((2, 2), dtype=bool)
    eta = x.unconstrained_reservations()
    start = Policy.of(x, z, eta, np.zeros((2, 2)), delta)
    inner = bcd._Block1(x, per_sample=False, fixed=eta, deadline=None)
    policy, result = inner.run(start)
    value = x.arrival_rates * (result.worst_case - x.costs.rejection)
    needs = (1 + x.headroom) * x.offered_loads * (x.input_tokens + eta)[:, None] / x.kv_tokens
    a_ub = [[1, 1, 0, 0], [0, 0, 1, 1], [needs[0, 0], 0, needs[1, 0], 0], [0, needs[0, 1], 0, needs[1, 1]]]
    answer = linprog(np.repeat(value, 2), A_ub=a_ub, b_ub=[1, 1, 1, 1], bounds=(0, 1))
    expected = answer.fun + x.costs.rejection * x.arrival_rates.sum() + 3 * x.costs.gpu
    assert result.objective == pytest.approx(expected, rel=1e-9)
    np.testing.assert_allclose(policy.reservations, x.input_tokens + eta)


@pytest.mark.parametrize("seed", range(3))
def test_literal_block_3_is_the_best_z_for_the_rest(seed):
    rng = np.random.default_rng(seed)
    x = builders.scalability(4, 3, 40, 20, seed=seed, load=0.4)
    x = x.replace(costs=type(x.costs)(10, 1, 200, 5000, gpu=30.0))
    policy = bcd.solve(x, block3="resolve", max_iterations=1).policy
    pi = policy.routing * rng.uniform(0.5, 1, policy.routing.shape)
    policy = Policy.of(x, policy.groups, policy.reservations - x.input_tokens, pi, policy.prefix_cache)
    z = bcd._literal_groups(x, policy)

    def cost(z):
        r = evaluate(x, Policy.of(x, z, policy.reservations - x.input_tokens, pi, policy.prefix_cache))
        return r.objective if r.feasible else np.inf

    every = bcd._partitions(x, 10_000)
    assert cost(z) == pytest.approx(min(cost(other) for other in every), rel=1e-9)


def test_partitions_are_all_within_the_budget():
    x = builders.paper()
    found = {tuple(z) for z in bcd._partitions(x, 1000)}
    expected = {
        (a, b, c, d)
        for a in range(5)
        for b in range(3)
        for c in range(3)
        for d in range(2)
        if 2 * a + 4 * b + 4 * c + 8 * d <= 8
    }
    assert found == expected
    assert bcd._partitions(x, len(expected) - 1) is None


@pytest.mark.parametrize("seed", range(3))
def test_adjacent_partitions_are_within_the_budget_and_differ(seed):
    x = builders.scalability(2, 8, 10, 40, seed=seed)
    z = bcd.first_groups(x)
    near = [n.copy() for n in bcd._adjacent_partitions(x, z)]
    assert near
    for n in near:
        assert np.all(n >= 0)
        assert x.group_gpus @ n <= x.gpus
        assert 1 <= np.count_nonzero(n != z) <= 2


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_no_partition_that_block_1_would_improve_is_excluded(kind):
    x = case(kind, 4)
    inner = bcd._Block1(x, per_sample=False, fixed=None, deadline=None)
    eta = np.array([c.output.mean for c in x.classes])
    for z in bcd._partitions(x, 100):
        _, result = inner.run(Policy.of(x, z, eta, np.zeros((2, 2)), np.zeros((2, 2))))
        assert inner.relaxed(z, z, result.objective * (1 + 1e-6) + 1e-9) is not None


@pytest.mark.parametrize("seed", range(3))
def test_resolve_finds_the_best_z_for_block_1(seed):
    """One Block 3, against Block 1 from the same policy for every z."""
    x = builders.scalability(3, 4, 40, 12, seed=seed, load=0.8)
    inner = bcd._Block1(x, per_sample=False, fixed=None, deadline=None)
    z = bcd.first_groups(x)
    eta = np.array([c.output.mean for c in x.classes])
    policy, result = inner.run(Policy.of(x, z, eta, np.zeros((3, 4)), np.zeros((3, 4))))
    found = bcd._resolve(inner, policy, result, 2000, settled=True)[1].objective
    eta = policy.reservations - x.input_tokens
    each = [
        inner.run(repaired(x, z, eta, policy.routing, policy.prefix_cache))[1].objective
        for z in bcd._partitions(x, 2000)
    ]
    assert found <= min(each) * (1 + 1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_no_neighbour_is_better_where_not_all_are_tried(seed):
    x = builders.scalability(3, 4, 40, 12, seed=seed, load=0.8)
    solution = bcd.solve(x, enumerate_up_to=0)
    inner = bcd._Block1(x, per_sample=False, fixed=None, deadline=None)
    eta = solution.policy.reservations - x.input_tokens
    for z in bcd._adjacent_partitions(x, solution.policy.groups):
        start = repaired(x, z, eta, solution.policy.routing, solution.policy.prefix_cache)
        assert inner.run(start)[1].objective >= solution.objective * (1 - 1e-8)


@pytest.mark.parametrize("seed", range(3))
def test_priced_groups_are_the_best_of_all_partitions(seed):
    """The branch and bound over z and pi, against a linear program for each z."""
    x = builders.scalability(3, 4, 40, 12, seed=seed, load=0.8)
    inner = bcd._Block1(x, per_sample=False, fixed=None, deadline=None)
    policy, result = inner.run(bcd._start(x, None, None))
    policy, result = bcd._cache_prefixes(x, policy, result)
    assert policy.prefix_cache.any()
    u, L, lam, c = x.offered_loads, x.prefix_tokens, x.arrival_rates, x.costs
    mostly = policy.prefix_cache[:, policy.groups > 0].all(axis=1)
    delta = np.where(policy.groups > 0, policy.prefix_cache, mostly[:, None])
    worth = lam * (result.worst_case - c.rejection)

    def cheapest(z, caps):
        """Rows memory, utilisation, admission and tardiness over columns pi, s."""
        needs = u * (policy.reservations[:, None] - delta * L[:, None])
        wait = x.queueing_factors * caps / (1 - caps)
        late = x.service_times + wait - x.latency_slos[:, None]
        rows = np.zeros((4 + 4 + 3 + 3, 15))
        for k in range(4):
            rows[k, k:12:4] = (1 + x.headroom) * needs[:, k]
            rows[4 + k, k:12:4] = needs[:, k]
        for i in range(3):
            rows[8 + i, 4 * i : 4 * i + 4] = 1
            rows[11 + i, 4 * i : 4 * i + 4], rows[11 + i, 12 + i] = late[i], -1
        free = np.r_[
            z * (x.kv_tokens - L @ delta), z * (caps * x.kv_tokens - L @ delta), np.ones(3), np.zeros(3)
        ]
        cost = np.r_[np.repeat(worth, 4), c.slo * lam]
        answer = linprog(cost, A_ub=rows, b_ub=np.maximum(free, 0), bounds=[(0, 1)] * 12 + [(0, None)] * 3)
        return answer.fun + c.rejection * lam.sum() + c.gpu * (x.group_gpus @ z)

    for caps in list(bcd._caps(x, policy, result))[::3]:
        z, routing, cached = bcd._priced_groups(inner, policy, result, caps)
        np.testing.assert_array_equal(cached, delta)
        least = min(cheapest(z, caps) for z in bcd._partitions(x, 2000))
        assert cheapest(z, caps) <= least + 1.01e-4 * result.objective
        kept = evaluate(x, repaired(x, z, policy.reservations - x.input_tokens, routing, delta))
        # What the program promises holds, a lower utilisation is only better.
        assert kept.objective <= cheapest(z, caps) + 1.01e-4 * result.objective


@pytest.mark.parametrize("seed", range(2))
def test_prices_alone_take_the_same_path_and_fall(seed, monkeypatch):
    monkeypatch.setattr(bcd, "_NEIGHBOURHOOD", 0)
    x = builders.scalability(4, 6, 60, 40, seed=seed, load=0.9)
    fast = bcd.solve(x, enumerate_up_to=0)
    same_path(fast, bcd.solve(x, enumerate_up_to=0, per_sample=True))
    assert np.all(np.diff(fast.history) < 0)
    assert fast.objective <= bcd.solve(x, block3="literal").objective


def test_512_gpus_and_24_configurations():
    x = builders.scalability(12, 24, 44_000_000, 512, seed=0, load=1.0)
    solution = bcd.solve(x)
    assert evaluate(x, solution.policy).feasible
    assert solve(x, gap=1e-2, node_limit=1).lower_bound <= solution.objective
    assert solution.objective < 0.99 * bcd.solve(x, block3="literal").objective


@pytest.mark.parametrize("seed", range(4))
def test_a_program_that_highs_gives_up_on_is_solved_again(seed):
    """Costs of 1 to 1e12 beside a tolerance of 1e-9, on which the dual simplex ends with an error."""
    rng = np.random.default_rng(seed)
    cost = -rng.uniform(0.1, 1, 40) * 10 ** rng.uniform(0, 12, 40)
    rows = rng.uniform(0, 1, (20, 40)) * (rng.random((20, 40)) < 0.3)
    program = bcd._Program(cost, np.ones(40))
    program.add_rows(rows, np.ones(20))
    answer = linprog(cost / 1e12, A_ub=rows, b_ub=np.ones(20), bounds=(0, 1))
    assert cost @ program.solve() == pytest.approx(answer.fun * 1e12, rel=1e-6)


def test_block_2_follows_its_rule():
    x = case("prefix", 1)
    policy = bcd.solve(x).policy
    shared = x.offered_loads * policy.routing / np.maximum(policy.groups, 1)
    np.testing.assert_array_equal(policy.prefix_cache, (shared > 1) & (policy.groups > 0))
    assert policy.prefix_cache.any()


@pytest.mark.parametrize(("requests", "cached"), [(0.95, False), (1.05, True)])
def test_block_2_caches_from_one_request_per_group_on(requests, cached):
    x = case("prefix", 1)
    z, routing = np.array([1, 0]), np.zeros((2, 2))
    routing[0, 0] = requests / x.offered_loads[0, 0]
    policy = Policy.of(x, z, np.zeros(2), routing, np.zeros((2, 2)))
    found, _ = bcd._cache_prefixes(x, policy, evaluate(x, policy))
    assert found.prefix_cache[0, 0] == cached


def test_a_configuration_without_groups_never_enters_in_the_literal_reading():
    x = case("split", 0)
    z = np.array([1, 0])
    assert bcd.solve(x, block3="literal", start=z).policy.groups[1] == 0
    assert bcd.solve(x, block3="resolve", start=z).policy.groups[1] == 1


def test_starts_from_a_policy_a_solution_or_groups():
    x = case("queue", 4)
    first = bcd.solve(x)
    for start in (first, first.policy):
        again = bcd.solve(x, start=start)
        assert again.history[0] == first.objective
        assert again.objective <= first.objective
    with pytest.raises(ValueError, match="within 3 GPUs"):
        bcd.solve(x, start=[4, 0])
    with pytest.raises(ValueError, match="expected"):
        bcd.solve(builders.paper(), start=first)


def test_prescribed_reservations_stay():
    x = case("queue", 0)
    r = x.input_tokens + 20
    np.testing.assert_array_equal(bcd.solve(x, reservations=r).policy.reservations, r)


@sizes
@pytest.mark.parametrize("change", [{"rho": 200.0}, {"headroom": 0.0}, {"rho": 200.0, "headroom": 0.0}])
def test_a_start_that_seems_too_dear_is_no_reason_to_reject_everything(block3, change):
    """Mean reservations that cost more than to reject; no headroom, and so no end to the first waits."""
    x = builders.scalability(3, 4, 100, 8, 0, **change)
    solution = bcd.solve(x, block3=block3)
    assert solution.policy.admission.min() > 0.99
    assert solution.objective <= solve(x, gap=1e-3).objective * (1 + 1e-3)


def test_block_1_ends_where_it_has_converged():
    """Here it takes more than forty alternations; started again from its result, it finds nothing more."""
    x = builders.scalability(3, 4, 60, 12, 15, load=1.5)
    found = bcd.solve(x, block3="literal")
    again = bcd.solve(x, block3="literal", start=found)
    assert again.objective >= found.objective * (1 - 1e-6)


def test_no_gpus_means_no_service():
    solution = bcd.solve(case("memory", 0, gpus=0))
    assert not solution.policy.routing.any()
    assert evaluate(case("memory", 0, gpus=0), solution.policy).feasible


def test_a_time_limit_returns_a_feasible_policy():
    x = builders.scalability(6, 12, 100, 48, seed=0)
    solution = bcd.solve(x, time_limit=0.05)
    assert evaluate(x, solution.policy).feasible


def test_other_sets():
    x = case("queue", 0).replace(ambiguity=CVaR(0.5))
    assert evaluate(x, bcd.solve(x).policy).feasible
    with pytest.raises(ValueError, match="not of CVaR"):
        bcd.solve(x, per_sample=True)
    with pytest.raises(ValueError, match="block3 is 'other'"):
        bcd.solve(x, block3="other")
