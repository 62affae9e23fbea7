"""Reservations worked out by hand, and one optimiser for every method."""

import numpy as np
import pytest

from kvcache.hardware import ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.paper.methods.baselines import (
    ENGINE_RULES,
    FIXED_RULES,
    PAPER_METHODS,
    SETS,
    PastFuture,
    in_blocks,
    optimise,
    reservations,
    reserver_of,
)
from kvcache.policy import evaluate
from kvcache.problem import Costs, Problem, RequestClass
from kvcache.replay import Workload, replay

# 100 requests: 50 of 10 tokens, 35 of 40, 10 of 100, 4 of 300, 1 of 1,000.
LENGTHS = LengthDistribution.from_counts([10, 40, 100, 300, 1000], [50, 35, 10, 4, 1], 2_048)
MEAN = 5 + 14 + 10 + 12 + 10
STD = np.sqrt(0.5 * 10**2 + 0.35 * 40**2 + 0.1 * 100**2 + 0.04 * 300**2 + 0.01 * 1000**2 - MEAN**2)


def problem(rho: float = 10.0, rate: float = 1.0) -> Problem:
    return Problem(
        (
            RequestClass("a", rate, 100, 40, 6.0, LENGTHS),
            RequestClass("b", 2 * rate, 300, 0, 8.0, LENGTHS.scale(0.5)),
        ),
        (ServingConfig("small", 2, 2_500, 1e-3, 2e-2), ServingConfig("large", 4, 20_000, 5e-4, 1e-2)),
        gpus=8,
        costs=Costs(preemption=rho),
    )


@pytest.mark.parametrize(
    ("method", "eta"),
    [
        ("Mean", MEAN),
        ("P90", 100),
        ("P95", 112),  # 100 in blocks of 16
        ("P99", 300),
        ("Max", 2_048),
        ("TensorRT-LLM", 2_048),
        ("LP+1sigma", MEAN + STD),
        ("LP+2sigma", MEAN + 2 * STD),
        ("SAA", 100),  # q* = 10 / 11
        ("vLLM", 0),
        ("SGLang", 0.098 * 2_048),
        ("LightLLM", (200 * MEAN + 2_048) / 201),
    ],
)
def test_fixed_reservations(method, eta):
    assert reservations(method, problem())[0] == pytest.approx(eta)


def test_only_saa_and_the_sets_look_at_the_costs():
    cheap, dear = problem(rho=2.0), problem(rho=100.0)
    moved = {
        m
        for m in ("DRO", *FIXED_RULES, *ENGINE_RULES, *SETS)
        if reservations(m, cheap)[0] != reservations(m, dear)[0]
    }
    assert moved == {"DRO", "SAA", *SETS}
    assert reservations("SAA", cheap)[0] == 40
    assert reservations("SAA", dear)[0] == 1_000


def test_a_rule_beyond_the_bound_is_cut_there():
    short = LengthDistribution.from_counts([1, 90], [1, 1], 90)
    inst = problem().replace(classes=(RequestClass("a", 1.0, 10, 0, 5.0, short),))
    assert short.mean + 2 * short.std > 90
    assert reservations("LP+2sigma", inst)[0] == 90
    assert reservations("P95", inst)[0] == 90  # 96 in blocks


def test_blocks():
    assert [in_blocks(x) for x in (0, 1, 16, 17, 32.5)] == [0, 16, 16, 32, 48]


def test_a_reconstructible_past_future_draw():
    rule = PastFuture((500,), window=4)
    rng = np.random.default_rng(0)
    assert rule.reserve(0, np.array([], dtype=np.int64), rng) == 500
    past = np.array([9, 9, 9, 1, 2, 3, 4])
    draws = [rule.reserve(0, past, rng) for _ in range(2_000)]
    values, counts = np.unique(draws, return_counts=True)
    assert values.tolist() == [1, 2, 3, 4, 500]
    assert np.all(np.abs(counts / 2_000 - 0.2) < 0.05)


def test_past_future_in_a_replay():
    inst = problem()
    policy = optimise("P90", inst).policy
    work = Workload.draw([c.output for c in inst.classes], np.random.default_rng(0), 1_000)
    assert reserver_of("P90", inst) is None
    rule = reserver_of("LightLLM", inst)
    assert rule == PastFuture((2_048, 1_024))
    result = replay(inst, policy, work, reserver=rule, window=1)
    # Two independent lengths from one distribution: the later one is longer in under half of the draws.
    assert 0.2 < result.preemption_rate < 0.5
    assert result.reserved[0] / 1_000 == pytest.approx(MEAN + 2_048 / 200, rel=0.3)


@pytest.mark.parametrize("method", ["DRO", *FIXED_RULES])
def test_the_same_optimiser_for_every_method(method):
    inst = problem()
    solution = optimise(method, inst)
    result = evaluate(inst, solution.policy)
    assert result.feasible
    assert result.objective == pytest.approx(solution.objective)
    assert solution.gap < 1e-3
    if method != "DRO":
        eta = solution.policy.reservations - inst.input_tokens
        np.testing.assert_allclose(eta, reservations(method, inst))
        # The robust policy may choose any reservation under the same objective, this one included.
        assert optimise("DRO", inst).objective <= solution.objective * (1 + 1e-4)


@pytest.mark.parametrize("method", SETS)
def test_a_set_is_solved_under_its_own_worst_case(method):
    inst = problem(rate=0.2)
    solution = optimise(method, inst)
    own = inst.replace(ambiguity=SETS[method])
    assert evaluate(own, solution.policy).objective == pytest.approx(solution.objective)
    # Memory is plentiful here, so the reservation is the closed form's.
    eta = solution.policy.reservations - inst.input_tokens
    np.testing.assert_allclose(eta, reservations(method, inst), rtol=2e-3, atol=0.5)


def test_names():
    assert set(PAPER_METHODS) == {"DRO", *FIXED_RULES}
    with pytest.raises(ValueError, match="method 'P50'; expected one of"):
        reservations("P50", problem())
