"""All solvers of the joint problem agree, where each part of it decides."""

import numpy as np
import pytest
from solver_cases import case, shows

from kvcache import Costs, LengthDistribution, Problem, RequestClass, ServingConfig, evaluate
from kvcache.paper.methods import METHODS, solve

# Seeds where the optimum shows what the kind stands for; the test asserts it.
CASES = [
    ("memory", 0),
    ("memory", 2),
    ("memory", 4),
    ("slo", 1),
    ("slo", 2),
    ("rejection", 2),
    ("rejection", 6),
    ("prefix", 0),
    ("prefix", 3),
    ("split", 0),
    ("split", 6),
    ("queue", 0),
    ("queue", 4),
]


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_certified_per_sample_and_compact_programs_agree(kind, seed):
    x = case(kind, seed)
    certified = solve(x, gap=5e-5)
    scip = solve(x, "miblp", solver="scip", gap=5e-5)
    gurobi = solve(x, "miblp", solver="gurobi", compact=True, gap=5e-5)
    solutions = [certified, scip, gurobi]
    assert {s.status for s in solutions} == {"optimal"}
    assert shows(kind, x, certified.policy)
    for s in solutions:
        assert evaluate(x, s.policy).feasible
        assert s.objective == pytest.approx(certified.objective, rel=1e-4)
        # No policy lies below another solver's bound.
        for other in solutions:
            assert s.objective >= other.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_algorithm_1_is_never_below_the_certified_bound(kind, seed):
    x = case(kind, seed)
    bound = solve(x, gap=1e-4).lower_bound
    for block3 in ("resolve", "literal"):
        assert solve(x, "bcd", block3=block3).objective >= bound * (1 - 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_prescribed_reservations_stay(method):
    x = case("queue", 0)
    r = x.input_tokens + np.array([c.output.quantile(0.7) for c in x.classes])
    found = solve(x, method, reservations=r)
    np.testing.assert_allclose(found.policy.reservations, r, rtol=1e-6)
    assert found.objective >= solve(x).lower_bound


@pytest.mark.parametrize("method", ["certified", "bcd"])
def test_a_start_is_not_made_worse(method):
    x = case("split", 2)
    first = solve(x, "bcd", block3="literal")
    assert solve(x, method, start=first).objective <= first.objective * (1 + 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_without_gpus_everything_is_rejected(method):
    x = case("memory", 1, gpus=0)
    found = solve(x, method)
    assert not found.policy.routing.any()
    assert found.objective == pytest.approx(x.costs.rejection * x.arrival_rates.sum())


@pytest.mark.parametrize("method", METHODS)
def test_a_class_dearer_to_serve_than_to_reject_is_rejected(method):
    output = LengthDistribution.from_samples([100, 900], 1000)
    x = Problem(
        (RequestClass("dear", 1.0, 10.0, 0.0, 1e-3, output),),
        (ServingConfig("k", 1, 1e6, 0.0, 1.0),),
        2,
        costs=Costs(rejection=10.0),
    )
    found = solve(x, method)
    assert found.policy.admission[0] == pytest.approx(0, abs=1e-6)
    assert found.objective == pytest.approx(10.0, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_an_slo_that_nothing_meets_is_served_late_when_rejection_costs_more(method):
    output = LengthDistribution.from_samples([100, 120], 200)
    x = Problem(
        (RequestClass("late", 0.1, 10.0, 0.0, 1e-3, output),),
        (ServingConfig("k", 1, 1e6, 0.0, 1.0),),
        2,
        costs=Costs(rejection=1e6),
    )
    found = solve(x, method)
    assert found.policy.admission[0] == pytest.approx(1)
    assert found.terms["slo"] == pytest.approx(0.1 * 5 * 110, rel=1e-2)


def test_unknown_methods_and_useless_starts_are_named():
    x = case("slo", 0)
    with pytest.raises(ValueError, match="method is 'guess'"):
        solve(x, "guess")
    with pytest.raises(ValueError, match="takes none"):
        solve(x, "miblp", start=solve(x, "bcd"))
