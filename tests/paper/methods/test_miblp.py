import numpy as np
import pytest
from scipy.optimize import minimize
from solver_cases import case

from kvcache import CVaR, Wasserstein1, evaluate, solve
from kvcache.paper import builders
from kvcache.paper.methods import bcd, miblp
from kvcache.policy import Policy, Status


def test_the_literal_form_has_a_theta_per_sample_and_the_compact_form_none():
    sizes = {}
    for samples in (20, 200):
        x = builders.scalability(3, 4, samples, 8, seed=0)
        for compact in (False, True):
            model = miblp.build(x, compact=compact)
            sizes[samples, compact] = model.nvariables(), model.nconstraints()
    assert sizes[200, False][0] - sizes[20, False][0] == 3 * 180
    assert sizes[200, False][1] - sizes[20, False][1] == 3 * 180 * 4
    assert sizes[200, True] == sizes[20, True]


def test_utilisation_bound_covers_full_groups_with_prefixes():
    x = case("prefix", 0)
    top = x.utilisation_bounds
    rng = np.random.default_rng(0)
    for _ in range(200):
        delta = rng.random((2, 2)) < 0.7
        share = x.prefix_tokens @ delta / x.kv_tokens
        fullest = share + (1 - share) / (1 + x.headroom)
        assert np.all((fullest <= top + 1e-12) | (share > 1))


def brute_force(x):
    """The best policy of all z and delta, continuous variables by local search from a grid."""
    best = np.inf
    sums = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)]
    for z1 in range(x.gpus + 1):
        for z2 in range((x.gpus - z1) // 2 + 1):
            z = np.array([z1, z2])
            if not z.any():
                continue
            open_ = np.flatnonzero(z > 0)
            for bits in range(4 ** len(open_)):
                delta = np.zeros((2, 2), dtype=bool)
                for b, (i, k) in enumerate((i, k) for i in range(2) for k in open_):
                    delta[i, k] = bits >> b & 1

                def unpack(v, z=z, delta=delta):
                    pi = np.clip(v[:4].reshape(2, 2), 0, 1) * (z > 0)
                    pi /= np.maximum(pi.sum(axis=1, keepdims=True), 1)
                    return Policy.of(x, z, np.clip(v[4:], 0, 1) * x.max_output_tokens, pi, delta)

                def cost(v, unpack=unpack):
                    result = evaluate(x, unpack(v))
                    return result.objective + 1e6 * max(result.violation - 1e-9, 0)

                starts = []
                for first in sums:
                    for second in sums:
                        pi = np.array([first, second]) * (z > 0)
                        eta = x.unconstrained_reservations() / x.max_output_tokens
                        starts.append(np.concatenate([pi.ravel(), eta]))
                starts = sorted(starts, key=cost)[:2]
                for start in starts:
                    if cost(start) < best * 3:
                        for _ in range(3):
                            found = minimize(
                                cost, start, method="Nelder-Mead", options={"maxiter": 600, "fatol": 1e-9}
                            )
                            start = found.x
                        best = min(best, found.fun)
    return best


@pytest.mark.parametrize(("kind", "seed"), [("queue", 1), ("slo", 1)])
def test_scip_and_the_certified_optimum_equal_brute_force(kind, seed):
    x = case(kind, seed, gpus=2)
    best = brute_force(x)
    assert miblp.solve(x, gap=1e-6).objective == pytest.approx(best, rel=1e-4)
    assert solve(x, gap=1e-5).objective == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("solver", sorted(miblp.SOLVERS))
def test_other_sets_have_the_compact_form_only(solver):
    x = case("queue", 2).replace(ambiguity=CVaR(0.3))
    with pytest.raises(ValueError, match="not of CVaR; use compact=True"):
        miblp.solve(x)
    solution = miblp.solve(x, solver=solver, compact=True)
    assert solution.status == "optimal"
    assert evaluate(x, solution.policy).feasible


def test_a_model_beyond_gurobis_free_size_gives_a_plain_message():
    gurobipy = pytest.importorskip("gurobipy")
    x = builders.scalability(3, 4, 100, 8, seed=0)
    model = gurobipy.Model(env=gurobipy.Env(params={"OutputFlag": 0}))
    model.addVars(2001)
    try:
        model.optimize()
    except gurobipy.GurobiError:
        solution = miblp.solve(x, solver="gurobi")
        assert solution.status is Status.TOO_LARGE
        assert "compact=True" in solution.message
        assert "scip" in solution.message
        assert solution.policy is None
        assert solution.gap == np.inf
    else:
        pytest.skip("a licence without size limits")


def test_the_compact_form_fits_gurobis_free_size_at_6x6x300():
    x = builders.scalability(6, 6, 300, 8, seed=0)
    model = miblp.build(x, compact=True)
    assert model.nvariables() <= 200
    assert model.nconstraints() <= 2000


def test_time_limits_return_a_bound_and_at_most_a_policy():
    x = builders.scalability(5, 5, 60, 8, seed=1)
    solution = miblp.solve(x, time_limit=0.0)
    assert solution.policy is None
    assert solution.status is Status.NO_POLICY
    assert solution.message == "no policy within 0.0 s"


def test_node_limits_stop_without_the_clock():
    x = builders.scalability(3, 4, 60, 8, seed=1)
    runs = [miblp.solve(x, compact=True, solver_options={"limits/nodes": 1}, gap=1e-9) for _ in range(2)]
    assert runs[0].objective == runs[1].objective
    assert runs[0].lower_bound == runs[1].lower_bound


def test_prescribed_reservations_stay():
    x = case("queue", 0)
    r = x.input_tokens + np.array([c.output.quantile(0.5) for c in x.classes])
    for compact in (False, True):
        solution = miblp.solve(x, compact=compact, reservations=r)
        np.testing.assert_allclose(solution.policy.reservations, r, rtol=1e-9)
        assert solution.status == "optimal"


@pytest.mark.parametrize("wrong", ["one too few", "below the prompt"])
@pytest.mark.parametrize("solver", [miblp.solve, bcd.solve])
def test_reservations_that_do_not_fit_are_refused(solver, wrong):
    x = case("queue", 0)
    r = x.input_tokens[:-1] + 5 if wrong == "one too few" else x.input_tokens - 1
    with pytest.raises(ValueError, match=r"reservations: .*expected one per class within"):
        solver(x, reservations=r)


@pytest.mark.parametrize(("message", "ends"), [("SCIP: error in LP solver!", True), ("a bug", False)])
def test_a_solver_that_gives_up_says_so(monkeypatch, message, ends):
    class GivesUp:
        def available(self):
            return True

        def solve(self, *_, **__):
            raise Exception(message)

    monkeypatch.setattr(miblp, "SolverFactory", lambda _: GivesUp())
    if not ends:
        with pytest.raises(Exception, match="a bug"):
            miblp.solve(case("queue", 0))
        return
    solution = miblp.solve(case("queue", 0))
    assert solution.status is Status.FAILED
    assert solution.message == message
    assert solution.policy is None


def test_without_radius_the_worst_case_is_the_mean():
    x = case("slo", 2).replace(ambiguity=Wasserstein1(0.0))
    solution = miblp.solve(x)
    eta = solution.policy.reservations - x.input_tokens
    means = [c.output.cost(e, x.costs.preemption, x.costs.waste) for c, e in zip(x.classes, eta, strict=True)]
    assert solution.terms["mismatch"] == pytest.approx(
        x.arrival_rates @ (solution.policy.admission * means), rel=1e-9
    )


def test_unknown_solvers_are_named():
    with pytest.raises(ValueError, match="solver is 'cplex'"):
        miblp.solve(case("slo", 0), solver="cplex")


def test_a_long_log_of_scip_does_not_block():
    """A line per node is far more than a pipe holds; the test's time limit ends it otherwise."""
    x = builders.scalability(4, 4, 150, 8, 0)
    solution = miblp.solve(x, time_limit=6.0, solver="scip", solver_options={"display/freq": 1})
    assert solution.status in ("feasible", "optimal")
    assert solution.lower_bound <= solution.objective
