"""The engines' rules on groups small enough to follow by hand, and what must hold for all of them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hardware import ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.paper.methods.engines import RULES, FixedReservation, OnDemand, RemainingShare, View, simulate
from kvcache.problem import Problem, RequestClass
from kvcache.replay import Workload

LENGTHS = LengthDistribution.from_counts([16, 64, 160, 400], [6, 5, 3, 1], 512)


def problem(kv_tokens: float = 4_000, rate: float = 0.5, output: LengthDistribution = LENGTHS) -> Problem:
    return Problem(
        (RequestClass("chat", rate, 96, 0, 20.0, output),),
        (ServingConfig("k", 2, kv_tokens, 1e-3, 0.05, 0.01),),
        gpus=2,
    )


def workload(requests: int = 300, seed: int = 1) -> Workload:
    return Workload.draw([LENGTHS], np.random.default_rng(seed), requests)


def alone(lengths):
    return Workload(np.array([lengths]), 0)


MAKERS = {**RULES, "DRO": lambda i, c: FixedReservation(i, c, "DRO")}


@pytest.mark.parametrize("name", MAKERS)
def test_a_request_alone_takes_its_service_time(name):
    run = simulate(problem(), alone([150]), MAKERS[name])
    # The fractile of the lengths is 160 tokens at rho 10, which 150 do not outgrow.
    assert run.latency == pytest.approx([0.01 + 96e-3 + 150 * 0.05])
    assert run.queued == [0]
    assert run.evictions == [0]


def test_what_outgrows_its_reservation_starts_again():
    small = FixedReservation(problem(), 4_000)
    small.eta = np.array([64.0])
    run = simulate(problem(), alone([100]), lambda i, c: small)
    # One page (16 tokens, 0.8 s) after another: at 4.8 s it would have 93 tokens, more than 64. It then
    # has 77 (those of 4.0 s) less those beyond the step before, and rebuilds prompt and tokens.
    first = 0.106
    kept = int((4.0 - first) / 0.05)
    assert kept == 77
    kept = int((3.2 - first) / 0.05)
    assert kept == 61
    assert run.recomputed == [96 + 61]
    assert run.latency == pytest.approx([4.0 + 0.01 + (96 + 61) * 1e-3 + (100 - 61) * 0.05])


def test_vllm_evicts_only_when_memory_is_full():
    roomy = simulate(problem(1e6, rate=5.0), workload(), OnDemand)
    assert roomy.evictions.sum() == 0
    tight = simulate(problem(1_000, rate=5.0), workload(), OnDemand)
    assert tight.evictions.sum() > 0
    assert tight.latency.mean() > roomy.latency.mean()
    assert tight.unused.max() < 16


def test_a_guarantee_never_evicts_and_holds_more():
    guaranteed = simulate(problem(2_000, rate=5.0), workload(), RULES["TensorRT-LLM"])
    on_demand = simulate(problem(2_000, rate=5.0), workload(), OnDemand)
    assert guaranteed.evictions.sum() == 0
    assert guaranteed.unused.mean() == pytest.approx(512 - workload().lengths[0].mean(), rel=0.05)
    assert guaranteed.throughput < on_demand.throughput
    assert guaranteed.occupancy < on_demand.occupancy


def test_sglang_share_falls_and_comes_back():
    engine = RemainingShare(problem(), 4_000)
    busy = View(*(np.array([v]) for v in (0, 96.0, 100, 512, False, 0)))
    empty = View(*(np.array([]) for _ in range(6)))
    assert engine.share == 0.7
    for _ in range(1_000):
        engine.stepped(busy, evicted=False)
    assert engine.share == pytest.approx(0.7 * 0.14)
    engine.stepped(busy, evicted=True)
    assert engine.share == pytest.approx((100 + 20) / 512)
    engine.stepped(empty, evicted=False)
    assert engine.share == 0.7


def test_rules_cannot_see_a_length_to_come():
    names = {f.name for f in dataclasses.fields(View)}
    assert names == {"classes", "inputs", "generated", "limits", "fresh", "evicted"}

    seen = []

    class Watcher(OnDemand):
        def stepped(self, view, evicted):
            seen.append(view.generated.copy())

    # Two futures that agree up to 64 tokens: until then the rule has seen the same.
    runs = []
    for length in (80, 400):
        seen.clear()
        simulate(problem(), alone([length]), Watcher)
        runs.append([g for g in seen if g.size and g[0] <= 64])
    assert len(runs[0]) > 3
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.integers(200, 3_000),
    st.floats(0.2, 20),
    st.integers(0, 5),
)
def test_conservation(name, kv_tokens, rate, seed):
    work = workload(60, seed)
    inst = problem(kv_tokens, rate)
    run = simulate(inst, work, MAKERS[name], seed=seed)
    assert run.served + run.oversized == 60
    assert np.all(np.isfinite(run.latency))
    # Nobody is faster than alone, and whoever was evicted rebuilt at least the prompt.
    assert np.all(run.latency >= run.queued + 0.106 + 16 * 0.05 - 1e-9)
    assert np.array_equal(run.recomputed > 0, run.evictions > 0)
    assert np.all(run.recomputed >= 96 * run.evictions)
    assert 0 < run.occupancy <= 1 + 1e-9
    assert np.all(run.unused >= -1e-9)


@pytest.mark.parametrize("name", RULES)
def test_runs_are_reproducible_and_meet_the_same_requests(name):
    a, b = (simulate(problem(1_500, 3.0), workload(), RULES[name], seed=4) for _ in range(2))
    assert np.array_equal(a.latency, b.latency)
    assert a.served == simulate(problem(1_500, 3.0), workload(), OnDemand, seed=4).served


def test_requests_larger_than_the_group_are_counted_and_left_out():
    run = simulate(problem(kv_tokens=300), workload(), OnDemand)
    assert run.oversized == (workload().lengths[0] > 300 - 96).sum() > 0
    with pytest.raises(ValueError, match="configuration 'k': no request fits its 100 tokens"):
        simulate(problem(kv_tokens=100), workload(), OnDemand)
    with pytest.raises(ValueError, match="workload has 2 classes; expected 1"):
        simulate(problem(), Workload(np.ones((2, 3), int), 0), OnDemand)
