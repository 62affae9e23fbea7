import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from solver_cases import KINDS, case, shows

from kvcache import Costs, LengthDistribution, Policy, Problem, RequestClass, ServingConfig, Wasserstein1
from kvcache.paper import builders
from kvcache.paper.methods.miblp import solve as general
from kvcache.policy import evaluate
from kvcache.solvers import certify as module
from kvcache.solvers.certify import Certificate
from kvcache.solvers.certify import solve as certify
from kvcache.solvers.levels import Levels, grid
from kvcache.solvers.polish import fit, polish
from kvcache.solvers.relaxation import Box, Data, Relaxation


def contains(data, policy):
    """Whether the rules that lose no optimum leave this policy in the root box's relaxation."""
    u, z = data.problem.offered_loads, policy.groups
    per_group = np.where(z > 0, u * policy.routing / np.maximum(z, 1), 0.0)
    headroom = 1 + data.problem.headroom
    useful = data.prefix_useful & (z > 0)
    return bool(
        np.all(headroom * per_group[policy.prefix_cache] >= 1)
        and np.all(per_group[useful & ~policy.prefix_cache] <= 1)
    )


def random_policy(data, rng):
    """A feasible policy that follows the rules on prefixes and configurations."""
    problem = data.problem
    classes, configs = problem.offered_loads.shape
    z = np.zeros(configs)
    while True:
        fits = np.flatnonzero(problem.group_gpus @ z + problem.group_gpus <= problem.gpus)
        if fits.size == 0 or (z.any() and rng.random() < 0.2):
            break
        z[rng.choice(fits)] += 1
    pi = rng.dirichlet(np.ones(configs + 1), size=classes)[:, :configs] * (z > 0)
    eta = data.low + rng.random(classes) * (data.high - data.low)
    return fit(data, z, eta, pi, (rng.random((classes, configs)) < 0.5) & data.prefix_useful)


@pytest.fixture(scope="module")
def solved():
    """A queueing problem with rejection, and its certified solution."""
    x = case("rejection", 10)
    return x, certify(x)


def drifted(x, rng, size=0.05):
    """Rates, lengths and deadlines off by some ``size`` each."""
    rates, lengths, deadlines = np.exp(rng.normal(0, size, (3, len(x.classes))))
    return x.replace(
        classes=[
            replace(
                c,
                arrival_rate=c.arrival_rate * a,
                output=c.output.scale(b, upper=c.output.upper),
                latency_slo=c.latency_slo * d,
            )
            for c, a, b, d in zip(x.classes, rates, lengths, deadlines, strict=True)
        ]
    )


def brute_force(problem, steps):
    """The best policy over all groups and prefix decisions and a grid of routings and reservations.

    Two classes and two configurations; every grid point is brought into the constraints by `fit`.
    """
    data = Data.of(problem)
    best = None
    shares = [s for s in itertools.product(np.linspace(0, 1, steps), repeat=2) if sum(s) <= 1 + 1e-9]
    etas = [np.linspace(0.7 * high, high, 2) for high in data.high]
    groups = itertools.product(*(range(m + 1) for m in problem.max_groups))
    for z in (np.array(g, dtype=float) for g in groups if problem.group_gpus @ g <= problem.gpus):
        cached = [[False, True] if useful else [False] for useful in (data.prefix_useful & (z > 0)).ravel()]
        for delta in itertools.product(*cached):
            for pi in itertools.product(shares, repeat=2):
                for eta in itertools.product(*etas):
                    policy = fit(data, z, np.array(eta), np.array(pi), np.array(delta).reshape(2, 2))
                    cost = evaluate(problem, policy).objective
                    if best is None or cost < best[0]:
                        best = cost, policy
    return polish(data, best[1])


@pytest.mark.parametrize("kind", ["memory", "queue", "rejection"])
def test_equals_brute_force_on_two_classes_and_two_configurations(kind):
    x = case(kind, 4, gpus=2)
    found = certify(x, gap=1e-5)
    best = evaluate(x, brute_force(x, 3)).objective
    assert found.lower_bound <= best
    assert found.objective == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [21, 22])
def test_agrees_with_scip(kind, seed):
    x = case(kind, seed, classes=2 + seed % 2, gpus=3 + seed % 2)
    if seed == 22:
        x = x.replace(headroom=0.0)
    ours = certify(x, gap=5e-5)
    theirs = general(x, solver="scip", compact=True, gap=1e-5, time_limit=1)
    assert ours.status == "optimal"
    assert ours.lower_bound <= theirs.objective * (1 + 1e-6)
    assert theirs.lower_bound <= ours.objective * (1 + 1e-6)
    result = evaluate(x, ours.policy)
    assert result.feasible
    assert result.objective == ours.objective


def test_every_kind_of_instance_is_seen():
    for kind in KINDS:
        cases = (case(kind, seed) for seed in range(3))
        assert any(shows(kind, x, certify(x, gap=1e-3).policy) for x in cases), kind


@settings(deadline=None, max_examples=15)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10_000))
def test_the_bound_is_below_random_policies(kind, seed):
    x = case(kind, seed)
    solution = certify(x, gap=1e-3, node_limit=60)
    rng = np.random.default_rng(seed)
    data = Data.of(x)
    for _ in range(20):
        policy = polish(data, random_policy(data, rng), steps=2)
        assert evaluate(x, policy).objective >= solution.lower_bound * (1 - 1e-9)


@settings(deadline=None, max_examples=15)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10_000))
def test_the_relaxations_on_a_box_are_below_the_policies_in_it(kind, seed):
    """A box around one policy: the linear programs must not exceed that policy's cost."""
    x = case(kind, seed)
    rng = np.random.default_rng(seed)
    data = Data.of(x)
    root = Box.root(data)
    relaxation = Relaxation(data, root, {})
    levels = Levels(data, root, grid(data, root, 3))
    levels.solve()
    levels = Levels(data, root, levels.refined())
    for _ in range(4):
        policy = random_policy(data, rng)
        result = evaluate(x, policy)
        if not (contains(data, policy) and np.isfinite(result.objective)):
            continue
        z, pi, v = policy.groups.astype(float), policy.routing, result.utilisation
        eta = policy.reservations - x.input_tokens
        width = rng.choice([0.0, 0.05, 1.0])
        box = Box(
            zl=np.maximum(z - (width > 0), 0),
            zu=np.minimum(z + (width == 1), root.zu),
            vl=np.where(z > 0, np.maximum(v - width, 0), 0),
            vu=np.where(z > 0, np.minimum(v + width, 1), root.vu),
            el=np.maximum(eta - 20 * width, 0),
            eu=np.minimum(eta + 20 * width, data.high),
            pl=np.maximum(pi - width, 0),
            pu=np.minimum(pi + width, 1),
            dl=policy.prefix_cache & (width == 0),
            du=policy.prefix_cache | (root.du & (width > 0)),
            gl=0.0,
            gu=float(x.gpus),
        )
        relaxation.load_box(box)
        point = relaxation.solve()
        assert point is not None
        assert point.bound <= result.objective * (1 + 1e-7)
        for frame in (None, root):
            levels.load_box(box, frame)
            assert levels.solve().bound <= result.objective * (1 + 1e-7)
        if width == 0:
            assert point.bound == pytest.approx(result.objective, rel=1e-4)


def crowded(seed, kind):
    """A problem whose optimum fills its groups beyond 1/2, or beyond 1/(1 + kappa) by cached prefixes."""
    rng = np.random.default_rng(seed)
    x = case("prefix", seed, gpus=int(rng.integers(1, 4)))
    if kind == "late":
        shares, rates, deadlines = rng.uniform(((0.5,), (0.5,), (0.5,)), ((0.98,), (3.0,), (10.0,)), (3, 2))
        memory, headroom = 1.0, float(rng.choice([0.0, 0.2, 0.5]))
        slo, rejection = float(np.exp(rng.uniform(np.log(50), np.log(5000)))), float(rng.uniform(500, 5000))
    else:
        shares, rates, deadlines = np.full((3, 2), [[0.95], [3.0], [20.0]])
        memory, headroom, slo, rejection = 0.25, 1.0, x.costs.slo, x.costs.rejection
    classes = [
        replace(
            c,
            prefix_tokens=float(np.floor(share * c.input_tokens)),
            arrival_rate=rate * c.arrival_rate,
            latency_slo=deadline * c.latency_slo,
        )
        for c, share, rate, deadline in zip(x.classes, shares, rates, deadlines, strict=True)
    ]
    configs = [replace(k, kv_tokens=memory * k.kv_tokens) for k in x.configs]
    costs = replace(x.costs, slo=slo, rejection=rejection)
    return x.replace(classes=classes, configs=configs, headroom=headroom, costs=costs)


@pytest.mark.parametrize(("kind", "seeds"), [("late", (34, 60, 94, 107, 113)), ("prefixes", (3, 4, 10, 11))])
def test_the_bound_is_below_the_fullest_groups_that_pay(kind, seeds):
    """Against local searches, which know no highest utilisation but 1."""
    for seed in seeds:
        x, rng = crowded(seed, kind), np.random.default_rng(seed)
        data = Data.of(x)
        found = [polish(data, random_policy(data, rng), steps=8) for _ in range(20)]
        best = min((evaluate(x, policy) for policy in found), key=lambda result: result.objective)
        assert best.utilisation.max() > (0.5 if kind == "late" else 1 / (1 + x.headroom))
        bound = certify(x, gap=1e-3, node_limit=20).lower_bound
        assert bound <= best.objective * (1 + 1e-9)


def test_the_solver_s_duals_prove_the_bound():
    """Weak duality evaluated outside of the solver, at the root."""
    data = Data.of(case("queue", 1))
    relaxation = Relaxation(data, Box.root(data).tightened(data), {})
    point = relaxation.solve()
    solution, lp = relaxation.highs.getSolution(), relaxation.highs.getLp()
    y = np.array(solution.row_dual)
    matrix = lp.a_matrix_
    rows = relaxation.highs.getNumRow()
    reduced = np.array(lp.col_cost_)
    start, index, value = (np.array(part) for part in (matrix.start_, matrix.index_, matrix.value_))
    major = np.repeat(np.arange(start.size - 1), np.diff(start))
    by_row = str(matrix.format_).endswith("kRowwise")
    row, column = (major, index) if by_row else (index, major)
    np.subtract.at(reduced, column, y[row] * value)

    def least(price, low, high):
        end = np.where(price > 0, low, high)
        return price * np.where(np.abs(price) < 1e-9, 0.0, end)

    proven = least(y, np.array(lp.row_lower_), np.array(lp.row_upper_))[:rows].sum()
    proven += least(reduced, np.array(lp.col_lower_), np.array(lp.col_upper_)).sum()
    proven = relaxation.offset + relaxation.scale * proven
    assert np.isfinite(proven)
    assert point.bound <= proven


def test_more_levels_hide_less():
    data = Data.of(case("queue", 1, classes=3, gpus=4))
    root = Box.root(data).tightened(data)
    edges, bounds = grid(data, root, 2), []
    for _ in range(3):
        levels = Levels(data, root, edges)
        bounds.append(levels.solve(rounds=20).bound)
        edges = levels.refined()
    assert np.all(np.diff(bounds) > 0)


@pytest.mark.parametrize("kind", ["memory", "prefix", "queue"])
def test_prescribed_reservations(kind):
    x = case(kind, 7)
    free = certify(x)
    reservations = x.input_tokens + 0.8 * x.unconstrained_reservations()
    fixed = certify(x, reservations=reservations)
    assert fixed.status == "optimal"
    assert np.allclose(fixed.policy.reservations, reservations)
    assert fixed.objective >= free.lower_bound
    again = certify(x, reservations=free.policy.reservations)
    assert again.objective == pytest.approx(free.objective, rel=2e-4)


def test_prescribed_reservations_above_the_minimiser_are_kept():
    x = case("rejection", 3)
    whole = x.input_tokens + x.max_output_tokens
    assert np.allclose(certify(x, reservations=whole).policy.reservations, whole)


def test_the_root_has_a_bound_before_the_search():
    """So that a time limit that strikes early still leaves something proven."""
    x = builders.scalability(4, 4, 150, 8, 0)
    search = module._Search(Data.of(x), 1e-3)
    nothing = np.zeros(x.offered_loads.shape)
    search.offer(Policy.of(x, np.zeros(4), search.data.high, nothing, nothing))
    search.begin(None)
    best = certify(x, gap=1e-4)
    assert 0.9 * best.lower_bound < search.lower_bound <= best.objective


@pytest.mark.parametrize("kind", ["memory", "prefix", "queue"])
def test_prescribed_groups(kind):
    """The best of all partitions is the optimum, and no policy on one is below its bound."""
    x, rng = case(kind, 5), np.random.default_rng(5)
    free = certify(x)
    costs = []
    for z in ((a, b) for a in range(4) for b in range(2) if a + 2 * b <= 3):
        solution = certify(x, groups=z)
        assert solution.policy.groups.tolist() == list(z)
        assert solution.gap <= 1e-4
        costs.append(solution.objective)
        data = Data.of(x, groups=z)
        for _ in range(10):
            start = random_policy(Data.of(x), rng)
            at = polish(
                data,
                fit(
                    data,
                    np.array(z, dtype=float),
                    start.reservations - x.input_tokens,
                    rng.dirichlet(np.ones(2), len(x.classes)),
                    start.prefix_cache,
                ),
                steps=2,
            )
            assert evaluate(x, at).objective >= solution.lower_bound * (1 - 1e-9)
    assert min(costs) == pytest.approx(free.objective, rel=2e-4)


def test_prescribed_groups_may_be_worse_in_all_than_others():
    """Without a free z nothing dominates: a configuration that would never be chosen is used as told."""
    x = case("slo", 3)
    slow = replace(x.configs[0], name="slow", decode_s_per_token=2 * x.configs[0].decode_s_per_token)
    x = x.replace(configs=(*x.configs, slow))
    alone = certify(x, groups=(0, 0, 2))
    assert alone.policy.groups.tolist() == [0, 0, 2]
    assert alone.gap <= 1e-4
    assert alone.objective > certify(x).objective


def test_no_gpus_means_a_policy_that_rejects():
    x = case("memory", 0, gpus=0)
    solution = certify(x)
    assert solution.status == "optimal"
    assert solution.objective == pytest.approx(x.costs.rejection * x.arrival_rates.sum())
    assert not solution.policy.routing.any()


def test_cheap_rejection_is_taken():
    x = case("queue", 0).replace(costs=Costs(rejection=0.0))
    solution = certify(x)
    assert solution.objective == 0
    assert solution.lower_bound == 0


@pytest.mark.parametrize("rejection", [5e6, 5e9])
def test_a_gap_closes_however_dear_rejection_is(rejection):
    """Nothing is rejected at 5,000 per request, so nothing changes beyond it."""
    x = builders.paper()
    dear = certify(x.replace(costs=replace(x.costs, rejection=rejection)), node_limit=200)
    assert dear.gap <= 1e-4
    assert dear.objective == pytest.approx(certify(x).objective, rel=1e-4)


def test_a_dear_rejection_that_cannot_be_avoided_is_proven_too():
    x = case("rejection", 3, gpus=1).replace(costs=Costs(rejection=1e7))
    solution = certify(x, gap=1e-3, node_limit=300)
    assert solution.gap <= 1e-3
    assert solution.policy.admission.min() < 0.99


def test_a_gap_below_floating_point_ends_the_search():
    solution = certify(case("queue", 0), gap=1e-12, node_limit=1000)
    assert solution.iterations < 1000
    assert solution.status == "feasible"
    assert solution.message.startswith("no box is left: the linear programs tell costs apart by")
    assert solution.gap < 1e-6


def test_a_deadline_that_no_configuration_meets():
    x = case("slo", 2)
    late = [
        RequestClass(c.name, c.arrival_rate, c.input_tokens, c.prefix_tokens, 1e-3, c.output)
        for c in x.classes
    ]
    solution = certify(x.replace(classes=late))
    assert solution.status == "optimal"
    assert solution.terms["slo"] > 0


def test_the_same_twice():
    x = case("queue", 12, classes=3, gpus=4)
    one, two = certify(x), certify(x)
    assert one.objective == two.objective
    assert one.lower_bound == two.lower_bound
    assert one.history == two.history
    assert np.array_equal(one.policy.routing, two.policy.routing)


def test_history_falls_to_the_objective():
    solution = certify(case("rejection", 1))
    assert all(np.diff(solution.history) < 0)
    assert solution.history[-1] == solution.objective


def test_limits_give_a_policy_and_a_bound(solved):
    x, best = solved
    limits = ({"node_limit": 0}, "0 boxes"), ({"node_limit": 2}, "2 boxes"), ({"time_limit": 0.0}, "time")
    for limit, why in limits:
        limited = certify(x, **limit)
        assert why in limited.message
        assert limited.status == "feasible"
        assert limited.lower_bound <= best.objective
        assert limited.objective >= best.lower_bound
        assert evaluate(x, limited.policy).feasible


@pytest.mark.parametrize("calls", [1, 4, 9])
def test_ctrl_c_gives_a_policy_and_a_bound(monkeypatch, solved, calls):
    x, best = solved
    left = calls
    solve = Relaxation.solve

    def interrupted(self, *arguments, **options):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return solve(self, *arguments, **options)

    for program in (module.Relaxation, module.Levels):
        monkeypatch.setattr(program, "solve", interrupted)
    for start in (None, best):
        left = calls
        stopped = certify(x, start=start)
        assert stopped.status == "feasible" or left > 0
        assert stopped.lower_bound <= best.objective
        assert evaluate(x, stopped.policy).feasible
        assert covers(stopped.certificate, x)


def test_a_start_is_used_and_never_lost(solved):
    x, best = solved
    other = drifted(x, np.random.default_rng(1))
    kept = certify(other, start=best, node_limit=0)
    assert evaluate(other, kept.policy).feasible
    cold = certify(other, gap=1e-3)
    assert kept.objective == pytest.approx(cold.objective, rel=5e-3)
    warm = certify(other, gap=1e-3, start=best.policy)
    assert warm.objective == pytest.approx(cold.objective, rel=2e-3)


def covers(certificate, problem, count=20):
    """Whether some part of the certificate holds each of some random policies of the problem."""
    data, rng = Data.of(problem), np.random.default_rng(0)
    for _ in range(count):
        policy = random_policy(data, rng)
        v, eta = evaluate(problem, policy).utilisation, policy.reservations - problem.input_tokens
        gpus = float(problem.group_gpus @ policy.groups)
        inside = [
            np.all((part.zl <= policy.groups) & (policy.groups <= part.zu))
            and np.all((part.vl <= v) & (v <= part.vu))
            and np.all((part.el <= eta) & (eta <= part.eu))
            and np.all((part.pl <= policy.routing) & (policy.routing <= part.pu))
            and not np.any(part.dl & ~policy.prefix_cache)
            and not np.any(policy.prefix_cache & ~part.du)
            and part.gl <= gpus <= part.gu
            for part in certificate.parts
        ]
        if not any(inside):
            return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_proof_holds_for_what_the_instance_is_now(kind):
    """Warm and cold agree within their gaps after a drift; every bound is below both costs."""
    rng = np.random.default_rng(5)
    x = case(kind, 31)
    before = pickle.loads(pickle.dumps(certify(x, gap=1e-3)))
    assert covers(before.certificate, x)
    for size, costs, headroom in ((0.05, x.costs, x.headroom), (0.4, Costs(slo=1.0, rejection=900.0), 0.1)):
        y = drifted(x, rng, size).replace(costs=costs, headroom=headroom)
        assert covers(before.certificate, y)
        warm, cold = certify(y, gap=1e-3, start=before), certify(y, gap=1e-3)
        assert warm.status == cold.status == "optimal"
        assert warm.gap <= 1e-3
        assert warm.lower_bound <= cold.objective * (1 + 1e-9)
        assert cold.lower_bound <= warm.objective * (1 + 1e-9)
        assert evaluate(y, warm.policy).feasible
        assert covers(warm.certificate, y)
        before = warm


@pytest.mark.parametrize("kind", ["queue", "prefix"])
def test_a_foreign_certificate_proves_nothing_wrong(kind):
    """The proof of an unrelated problem of the same shape, of another budget, against SCIP's bounds."""
    x = case(kind, 22)
    foreign = certify(case("memory", 8, gpus=4), gap=1e-3)
    ours = certify(x, gap=1e-3, start=foreign)
    theirs = general(x, solver="scip", compact=True, gap=1e-5, time_limit=1)
    assert ours.status == "optimal"
    assert ours.lower_bound <= theirs.objective * (1 + 1e-6)
    assert theirs.lower_bound <= ours.objective * (1 + 1e-6)


@settings(deadline=None, max_examples=15)
@given(
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS))] * 2),
    seed=st.integers(0, 10_000),
    gpus=st.tuples(*[st.integers(1, 5)] * 2),
    boxes=st.integers(0, 100),
)
@example(kinds=("rejection", "memory"), seed=3, gpus=(1, 4), boxes=100)
def test_proofs_go_from_instance_to_instance_and_back(kinds, seed, gpus, boxes):
    """Budgets too small for a configuration, proofs cut short, and parts that are empty in between."""
    x, y = (case(kind, seed, gpus=n) for kind, n in zip(kinds, gpus, strict=True))
    options = {"gap": 1e-3, "node_limit": 100}
    here, there = certify(x, gap=1e-3, node_limit=boxes), certify(y, **options)
    warm = certify(y, start=here, **options)
    back = certify(x, start=warm, **options)
    for one, other in ((warm, there), (back, here)):
        assert one.lower_bound <= other.objective * (1 + 1e-9)
        assert other.lower_bound <= one.objective * (1 + 1e-9)


def test_a_proof_is_only_repeated_where_its_boxes_hold_all_policies():
    x = case("queue", 3)
    before = certify(x, gap=1e-3)
    assert isinstance(before.certificate, Certificate)
    assert before.certificate.fits(Data.of(x))
    larger = replace(x.configs[1], gpus=3)
    other = x.replace(configs=(x.configs[0], larger), gpus=3)
    assert not before.certificate.fits(Data.of(other))
    cold, warm = certify(other, gap=1e-3), certify(other, gap=1e-3, start=before)
    assert warm.lower_bound <= cold.objective
    assert cold.lower_bound <= warm.objective


@pytest.mark.parametrize("change", ["added", "removed"])
def test_a_solution_of_other_classes_is_left_aside(change):
    x = case("queue", 3)
    fewer = x.replace(classes=x.classes[:1])
    before, after = (fewer, x) if change == "added" else (x, fewer)
    cold, warm = certify(after, gap=1e-3), certify(after, gap=1e-3, start=certify(before, gap=1e-3))
    assert warm.objective == cold.objective
    assert warm.lower_bound == cold.lower_bound


def test_a_start_beyond_the_budget_is_ignored():
    x = case("memory", 5)
    start = certify(x).policy
    smaller = x.replace(gpus=1)
    assert smaller.group_gpus @ start.groups > 1
    assert certify(smaller, start=start).policy.groups @ smaller.group_gpus <= 1


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match=r"groups: \[1.0\]; expected a whole number per configuration"):
        certify(case("memory", 1), groups=[1])
    with pytest.raises(ValueError, match=r"groups: .* use 4 GPUs; expected at most 3"):
        certify(case("memory", 1), groups=[0, 2])
    x = case("memory", 5)
    with pytest.raises(ValueError, match="gap: 0"):
        certify(x, gap=0)
    with pytest.raises(ValueError, match="one per class"):
        certify(x, reservations=[1.0])
    with pytest.raises(ValueError, match="one per class"):
        certify(x, reservations=x.input_tokens - 1)
    other = Policy(np.zeros(1), np.ones(2), np.zeros((2, 1)), np.zeros((2, 1)))
    with pytest.raises(ValueError, match="one per class"):
        certify(x, reservations=x.input_tokens[0])
    with pytest.raises(TypeError, match="reservations: 'many'; expected an array of numbers"):
        certify(x, reservations="many")
    with pytest.raises(TypeError, match="start: list; expected a Policy or a Solution"):
        certify(x, start=[1, 0])
    with pytest.raises(ValueError, match="start: routing of shape"):
        certify(x, start=other)


def test_equal_configurations_do_not_matter():
    """A copy of a configuration changes nothing that the optimum could use beyond one of them."""
    x = case("memory", 6)
    copy = ServingConfig(
        "copy",
        *[
            getattr(x.configs[1], f)
            for f in ("gpus", "kv_tokens", "prefill_s_per_token", "decode_s_per_token", "overhead_s")
        ],
    )
    more = x.replace(configs=(*x.configs, copy))
    assert certify(more).objective <= certify(x).objective * (1 + 1e-4)


def test_a_configuration_that_is_worse_in_all_is_needed_only_beside_the_better():
    lengths = LengthDistribution.from_samples([10, 20, 40], 80)
    classes = [RequestClass("a", 5.0, 50.0, 0.0, 3.0, lengths)]
    good, bad = ServingConfig("good", 1, 900, 0.001, 0.03), ServingConfig("bad", 1, 800, 0.001, 0.05)
    x = Problem(classes, (good, bad), 2, ambiguity=Wasserstein1(1.0))
    assert Data.of(x).better.tolist() == [[False, True], [False, False]]
    box = Box.root(Data.of(x))
    assert box.with_("zl", 1, 1).tightened(Data.of(x)).zl.tolist() == [1, 1]
    assert box.with_("zu", 0, 0).tightened(Data.of(x)).zu.tolist() == [0, 0]


def test_a_configuration_whose_queue_is_longer_is_not_better_in_all():
    """Every class is served sooner on k, but the spread of its lengths makes others wait longer there."""
    lengths = LengthDistribution.from_samples([10, 80], 80)
    classes = [RequestClass("a", 5.0, 50.0, 0.0, 9.0, lengths)]
    k, j = ServingConfig("k", 1, 900, 0.0, 0.06), ServingConfig("j", 1, 900, 0.05, 0.03)
    x = Problem(classes, (k, j), 2, ambiguity=Wasserstein1(1.0))
    assert np.all(x.service_times[:, 0] < x.service_times[:, 1])
    assert x.queueing_factors[0] > x.queueing_factors[1]
    assert not Data.of(x).better.any()


@pytest.mark.parametrize(
    ("name", "share", "decided"),
    [
        # u pi requests per group, from which on a prefix must be cached
        ("pl", 0.95, {"dl": False}),
        ("pl", 1.05, {"dl": True}),
        # (1 + kappa) u pi, up to which it must not be
        ("pu", 0.95 / 1.2, {"du": False}),
        ("pu", 1.05 / 1.2, {"du": True}),
    ],
)
def test_prefixes_are_decided_where_a_share_leaves_no_choice(name, share, decided):
    x = case("prefix", 1, gpus=1)
    data = Data.of(x)
    u = x.offered_loads[0, 0]
    assert x.headroom == 0.2
    assert u > 1.2
    box = replace(Box.root(data), zl=np.array([1.0, 0.0]), zu=np.array([1.0, 0.0]))
    tight = box.with_(name, (0, 0), share / u).tightened(data)
    for bound, value in decided.items():
        assert getattr(tight, bound)[0, 0] == value


def test_what_is_not_cached_has_at_most_one_request_per_group():
    x = case("prefix", 1, gpus=1)
    data = Data.of(x)
    box = replace(Box.root(data), zl=np.array([1.0, 0.0]), zu=np.array([1.0, 0.0]))
    tight = box.with_("du", (0, 0), False).tightened(data)
    assert tight.pu[0, 0] == pytest.approx(1 / x.offered_loads[0, 0])
    tight = box.with_("dl", (0, 0), True).tightened(data)
    assert tight.pl[0, 0] == pytest.approx(1 / (1.2 * x.offered_loads[0, 0]))
