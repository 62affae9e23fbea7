"""The vectorised replay against a slow one, conservation laws, and what a policy is allowed to see."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.hardware import ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy, evaluate
from kvcache.problem import Costs, Problem, RequestClass
from kvcache.queueing import wait_at
from kvcache.replay import PREEMPTION_FACTOR, UTILISATION_CAP, WHOLE, Workload, replay

CHAT = LengthDistribution.from_counts([1, 20, 60, 200, 500], [3, 8, 5, 3, 1], 600, name="chat")
CODE = LengthDistribution.from_counts([5, 100, 900], [10, 5, 2], 1000, name="code")
SMALL = ServingConfig("small", 2, 1_200, 1e-3, 2e-2, 0.05)
LARGE = ServingConfig("large", 4, 30_000, 5e-4, 1e-2, 0.02)


def problem(rate: float = 1.0, costs: Costs | None = None, headroom: float = 0.2) -> Problem:
    return Problem(
        classes=(
            RequestClass("chat", 2.0 * rate, 150, 100, 4.0, CHAT),
            RequestClass("code", 0.7 * rate, 400, 0, 9.0, CODE),
        ),
        configs=(SMALL, LARGE),
        gpus=8,
        costs=costs or Costs(),
        headroom=headroom,
    )


def policy(groups=(1, 1), eta=(200, 900), routing=((0.2, 0.7), (0.1, 0.8)), prefix=((1, 0), (0, 0))):
    return Policy.of(problem(), groups, eta, routing, np.array(prefix))


def workload(seed: int = 3, requests: int = 2_000, scale: float = 1.0) -> Workload:
    lengths = [CHAT, CODE] if scale == 1 else [CHAT.scale(scale), CODE.scale(scale)]
    return Workload.draw(lengths, np.random.default_rng(seed), requests)


def slow_replay(problem, policy, workload):
    """Request by request, with plain numbers: what section by section of the rules says."""
    n = workload.lengths.shape[1]
    served, rejected = [], []
    for i, cls in enumerate(problem.classes):
        rng = np.random.default_rng([workload.routing_seed, i])
        draws = rng.random(n)
        for xi, u in zip(workload.lengths[i], draws, strict=True):
            k, total = -1, 0.0
            for option in range(len(problem.configs)):
                total += policy.routing[i, option]
                if u < total:
                    k = option
                    break
            if k < 0 or policy.groups[k] == 0 or cls.input_tokens + xi > problem.configs[k].kv_tokens:
                rejected.append(i)
                continue
            config = problem.configs[k]
            eta = policy.reservations[i] - cls.input_tokens
            time = (
                config.prefill_s_per_token * cls.input_tokens
                + config.decode_s_per_token * xi
                + config.overhead_s
            )
            served.append(
                {
                    "i": i,
                    "k": k,
                    "rate": cls.arrival_rate / n,
                    "preempted": xi > eta,
                    "time": time * (2.5 if xi > eta else 1.0),
                    "held": policy.reservations[i] - policy.prefix_cache[i, k] * cls.prefix_tokens,
                    "cost": problem.costs.preemption * max(xi - eta, 0)
                    + problem.costs.waste * max(eta - xi, 0),
                }
            )
    waits, utilisations = [], []
    for k, config in enumerate(problem.configs):
        mine = [r for r in served if r["k"] == k]
        rate = sum(r["rate"] for r in mine)
        if not mine:
            waits.append(0.0)
            utilisations.append(0.0)
            continue
        tokens = sum(r["rate"] * r["time"] * r["held"] for r in mine) / policy.groups[k]
        tokens += sum(c.prefix_tokens for i, c in enumerate(problem.classes) if policy.prefix_cache[i, k])
        v = tokens / config.kv_tokens
        mean = sum(r["rate"] * r["time"] for r in mine) / rate
        second = sum(r["rate"] * r["time"] ** 2 for r in mine) / rate
        utilisations.append(v)
        capped = min(v, 0.99)
        waits.append(second / (2 * mean) * capped / (1 - capped))
    for r in served:
        r["latency"] = waits[r["k"]] + r["time"]
    admitted = sum(r["rate"] for r in served)
    arrivals = sum(c.arrival_rate for c in problem.classes)
    total = sum(p * c.gpus for p, c in zip(policy.groups, problem.configs, strict=True)) * problem.costs.gpu
    total += sum(r["rate"] * r["cost"] for r in served)
    for i, cls in enumerate(problem.classes):
        mine = [r for r in served if r["i"] == i]
        overrun = sum(r["latency"] for r in mine) / n - len(mine) / n * cls.latency_slo
        total += problem.costs.slo * cls.arrival_rate * max(overrun, 0.0)
        total += problem.costs.rejection * cls.arrival_rate * (1 - len(mine) / n)
    by_latency = sorted(served, key=lambda r: r["latency"])
    reached, p99 = 0.0, None
    for r in by_latency:
        reached += r["rate"]
        if reached >= 0.99 * admitted * (1 - 1e-12):
            p99 = r["latency"]
            break
    on_time = sum(r["rate"] for r in served if r["latency"] <= problem.classes[r["i"]].latency_slo)
    return {
        "reservation_cost": sum(r["rate"] * r["cost"] for r in served) / arrivals,
        "total_cost": total,
        "preemption_rate": sum(r["rate"] for r in served if r["preempted"]) / admitted,
        "p99_s": p99,
        "mean_wait_s": sum(r["rate"] * waits[r["k"]] for r in served) / admitted,
        "goodput": on_time,
        "slo_violation": 1 - on_time / admitted,
        "rejection": 1 - admitted / arrivals,
        "gpus": sum(p * c.gpus for p, c in zip(policy.groups, problem.configs, strict=True)),
        "max_utilisation": max(utilisations),
    }


@pytest.mark.parametrize("rate", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("eta", [(20, 100), (200, 900), (600, 1000)])
def test_equals_a_request_by_request_replay(rate, eta):
    inst, pol, work = problem(rate), policy(eta=eta), workload()
    fast, slow = replay(inst, pol, work).row(), slow_replay(inst, pol, work)
    for key, value in slow.items():
        assert fast[key] == pytest.approx(value, rel=1e-9), key


@st.composite
def cases(draw):
    shares = st.floats(0, 1)
    routing = np.array([[draw(shares), draw(shares)], [draw(shares), draw(shares)]])
    routing /= np.maximum(routing.sum(axis=1, keepdims=True), 1.0)
    groups = (draw(st.integers(0, 2)), draw(st.integers(0, 1)))
    eta = (draw(st.floats(0, 600)), draw(st.floats(0, 1000)))
    prefix = [[draw(st.booleans()), draw(st.booleans())], [False, False]]
    return (
        problem(draw(st.floats(0.01, 20))),
        policy(groups, eta, routing, prefix),
        workload(draw(st.integers(0, 9)), draw(st.integers(1, 60)), draw(st.sampled_from([0.5, 1, 2.5]))),
    )


@settings(max_examples=200, deadline=None)
@given(cases())
def test_conservation(case):
    inst, pol, work = case
    r = replay(inst, pol, work)
    assert np.array_equal(r.arrived, r.served.sum(axis=1) + r.rejected)
    assert np.all(r.oversized <= r.rejected)
    assert np.all(r.preempted <= r.served.sum(axis=1))
    np.testing.assert_allclose(r.reserved, r.used + r.wasted, atol=1e-6)
    eta = pol.reservations - inst.input_tokens
    # Reservations within WHOLE of a whole number count as that number.
    np.testing.assert_allclose(r.reserved, eta * r.served.sum(axis=1), atol=WHOLE * work.lengths.shape[1])
    assert np.all(r.overflow >= 0)
    assert np.all(r.wasted >= 0)
    assert np.all(r.waits >= 0)
    assert np.all(np.isfinite(r.waits))
    assert r.served[:, pol.groups == 0].sum() == 0
    arrivals = inst.arrival_rates.sum()
    assert r.total_cost == pytest.approx(r.cost_per_arrival * arrivals)
    if r.served.sum():
        admitted = inst.arrival_rates @ r.served.sum(axis=1) / work.lengths.shape[1]
        assert r.goodput + r.slo_violation * admitted == pytest.approx(admitted)
        assert r.rejection + admitted / arrivals == pytest.approx(1)
        assert r.latency_p50 <= r.latency_p95 <= r.latency_p99
        assert r.mean_latency >= r.mean_wait
    else:
        assert np.isnan(r.latency_p99)
        assert r.goodput == 0


def test_generated_tokens_are_used_or_overflow():
    work = workload()
    r = replay(problem(), policy(groups=(0, 1), routing=((0, 1), (0, 1))), work)
    np.testing.assert_allclose(r.used + r.overflow, work.lengths.sum(axis=1))


def test_agrees_with_the_objective_where_both_describe_the_same_thing():
    """One configuration, everything admitted, nothing preempted: the replay converges on evaluate()."""
    one = dataclasses.replace(problem(), configs=(LARGE,))
    pol = Policy.of(one, [1], [600, 1000], [[1.0], [1.0]], np.zeros((2, 1)))
    simulated = replay(one, pol, workload(requests=100_000))
    expected = evaluate(one, pol)
    assert simulated.utilisation == pytest.approx(expected.utilisation, rel=0.02)
    assert simulated.waits == pytest.approx(expected.waits, rel=0.04)
    nominal = sum(
        rate * d.cost(eta, 10, 1)
        for rate, d, eta in zip(one.arrival_rates, (CHAT, CODE), (600, 1000), strict=True)
    )
    assert simulated.terms["mismatch"] == pytest.approx(nominal, rel=0.01)
    assert simulated.terms["gpu"] == expected.terms["gpu"]


def test_common_random_numbers():
    """Another reservation changes no routing and no length; a shift scales every length."""
    work = workload()
    a, b = replay(problem(), policy(eta=(20, 20)), work), replay(problem(), policy(eta=(600, 900)), work)
    assert np.array_equal(a.served, b.served)
    np.testing.assert_allclose(a.used + a.overflow, b.used + b.overflow)
    shifted = workload(scale=2.0)
    assert np.array_equal(shifted.lengths, 2 * work.lengths)
    assert shifted.routing_seed == work.routing_seed


def test_an_unstable_group_is_named_and_its_wait_capped():
    r = replay(problem(rate=50), policy(), workload())
    assert r.unstable == ("small", "large")
    assert r.utilisation.min() > 1
    cap = UTILISATION_CAP
    lower = replay(problem(rate=50), policy(), workload(), cap=0.9)
    np.testing.assert_allclose(r.waits / lower.waits, wait_at(cap, 1.0) / wait_at(0.9, 1.0))
    assert replay(problem(rate=0.1), policy(), workload()).unstable == ()


def test_a_request_larger_than_its_group_is_rejected_there():
    r = replay(problem(), policy(routing=((1, 0), (1, 0))), workload())
    too_long = (400 + workload().lengths[1] > SMALL.kv_tokens).sum()
    assert too_long > 0
    assert r.oversized.tolist() == [0, too_long]
    assert r.rejected.tolist() == [0, too_long]


def test_preempted_requests_serve_longer():
    calm = replay(problem(), policy(), workload(), preemption_factor=1.0)
    hurt = replay(problem(), policy(), workload())
    assert hurt.preemption_rate == calm.preemption_rate > 0
    assert hurt.latency_p99 > calm.latency_p99
    assert PREEMPTION_FACTOR == 2.5


def test_a_request_of_exactly_the_reserved_length_is_not_preempted():
    inst = problem()
    # What r - L_in leaves of 200 when L_in is no short binary fraction.
    nearly = np.array([200, 900]) * (1 - 1e-15)
    pol = Policy.of(inst, (1, 1), nearly, np.full((2, 2), 0.5), np.zeros((2, 2)))
    assert (pol.reservations - inst.input_tokens < (200, 900)).all()
    exact = replay(inst, pol, Workload(np.array([[200, 200], [900, 900]]), 0))
    assert exact.preemption_rate == 0
    assert replay(inst, pol, Workload(np.array([[201, 201], [901, 901]]), 0)).preemption_rate == 1


class Recorder:
    """Reserves the longest length it has seen, and keeps what it was shown."""

    def __init__(self):
        self.seen = []

    def reserve(self, request_class, finished, rng):
        self.seen.append((request_class, finished))
        return float(finished.max(initial=0))


def test_a_reserver_sees_only_copies_of_what_has_finished():
    work = workload(requests=1_000)
    recorder = Recorder()
    r = replay(problem(), policy(), work, reserver=recorder, window=100)
    assert len(recorder.seen) == 20
    for step, (i, finished) in enumerate(recorder.seen):
        assert np.array_equal(finished, work.lengths[i, : 100 * (step % 10)])
        # No way from the argument to the requests still to come.
        assert finished.base is None
        assert not np.shares_memory(finished, work.lengths)
    assert r.preemption_rate < 0.2  # only records preempt, after the first window


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_decisions_do_not_depend_on_lengths_to_come(step, seed):
    """Replace everything after a window: the decisions up to it stay as they were."""
    original = workload(requests=1_000)
    later = np.array(original.lengths)
    rng = np.random.default_rng(seed)
    later[:, 100 * step :] = rng.integers(0, 1000, later[:, 100 * step :].shape)
    shown = []
    for lengths in (original.lengths, later):
        recorder = Recorder()
        replay(
            problem(),
            policy(),
            Workload(lengths, original.routing_seed),
            reserver=recorder,
            window=100,
        )
        shown.append([f for i, f in recorder.seen if i == 0][: step + 1])
    assert all(np.array_equal(a, b) for a, b in zip(*shown, strict=True))


def test_workload_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        workload().lengths[0, 0] = 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Workload(np.array([[1, -2]]), 0), "lengths: -2"),
        (lambda: Workload(np.array([1, 2]), 0), r"lengths: shape \(2,\)"),
        (lambda: replay(problem(), policy(), Workload(np.array([[1, 2]]), 0)), "workload has 1 classes"),
        (lambda: replay(problem(), policy(), workload(), cap=1.0), "cap: 1.0"),
        (lambda: replay(problem(), policy(), workload(), preemption_factor=0.5), "preemption_factor: 0.5"),
        (lambda: replay(problem(), policy(), workload(), window=0), "window: 0"),
        (
            lambda: replay(dataclasses.replace(problem(), configs=(SMALL,)), policy(), workload()),
            r"policy is for \(2, 2\)",
        ),
    ],
)
def test_errors_say_what_was_found(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_reserver_cannot_reserve_nonsense():
    class Broken:
        def reserve(self, request_class, finished, rng):
            return -1.0

    with pytest.raises(ValueError, match=r"class 0 request 0: reserved -1"):
        replay(problem(), policy(), workload(), reserver=Broken())
