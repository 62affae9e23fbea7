"""Overflow of a pool: theta, its constant and the headroom against simulations and numerical solutions."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar

from kvcache import LengthDistribution
from kvcache.engine import (
    Demand,
    Headroom,
    JointLengths,
    StepCost,
    headroom,
    lundberg_exponent,
    preemptions_per_request,
    saturation,
    simulate,
    watermark,
)
from kvcache.engine.headroom import overflow_constant, throughput_losses

COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
SPREAD = JointLengths.independent(
    LengthDistribution.from_samples(np.random.default_rng(1).integers(100, 900, 300)),
    LengthDistribution.from_counts(np.arange(1, 3000), 0.995 ** np.arange(1, 3000)),
)
pairs = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 2000)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(pairs, st.sampled_from([1, 16, 64]))
def test_theta_is_the_positive_root(requests, block):
    L, xi = np.array(requests).T
    J, prompt = block * np.ceil((L + xi) / block), block * np.ceil(L / block)
    growth = np.mean(J - prompt)
    theta = lundberg_exponent(JointLengths.from_samples(L, xi), block)
    if growth == 0:
        assert theta == np.inf
        return
    # Below sup (1 - E exp(-x J)) / (x J)... the root lies in (0, 1 / growth].
    root = brentq(lambda x: x * growth - 1 + np.mean(np.exp(-x * J)), 1e-9, 1 / growth + 1e-12, xtol=1e-15)
    assert theta == pytest.approx(root, rel=1e-6)


def test_one_kind_of_request_by_hand():
    # J = 2 growth: x = 1 - exp(-2 x) with x = theta E[G], the final size of an epidemic of R0 = 2.
    lengths = JointLengths.from_samples([64], [64])
    assert lundberg_exponent(lengths) * 64 == pytest.approx(0.7968121300200200)
    theta = 0.79681213002002 / 64
    assert preemptions_per_request(lengths, 0) == pytest.approx((1 - np.exp(-theta * 64)) / (theta * 64))
    u = np.array([[0, 64], [128, 256]])
    np.testing.assert_allclose(
        preemptions_per_request(lengths, u), overflow_constant(lengths) * np.exp(-theta * u), rtol=1e-12
    )
    with pytest.raises(ValueError, match="headroom: -1"):
        preemptions_per_request(lengths, -1)


def test_what_never_grows_never_overflows_and_empty_prompts_always_do():
    still = JointLengths.from_samples([1, 17], [15, 15])
    assert lundberg_exponent(still) == np.inf
    assert preemptions_per_request(still, 0) == 0
    assert headroom(still, 56_000, COST) == 0
    empty = JointLengths.from_samples([0, 0], [100, 300])
    assert lundberg_exponent(empty) == 0
    assert preemptions_per_request(empty, 1e6) == 1
    with pytest.raises(ValueError, match="prompts are empty"):
        headroom(empty, 56_000, COST)


def level_process(lengths, u, finishes, seed):
    """Overflows per finish of the level that the law is about, played out; levels from M - u."""
    rng = np.random.default_rng(seed)
    n, block = 3 * finishes, 16
    L, xi = lengths.sample(rng, n)
    J = (block * np.ceil((L + xi) / block)).tolist()
    heads = iter((block * np.ceil(lengths.sample(rng, n)[0] / block)).tolist())
    growth = iter(rng.exponential(lengths.in_blocks(block).growth, n).tolist())
    level, head, overflows, done = 0.0, next(heads), 0, 0
    newest = head
    while done < finishes:
        level += next(growth)
        if level >= u:  # what grew beyond u does not matter: the next finish is memoryless
            overflows += 1
            level, head = u - newest, newest + block
        else:
            level -= J[done]
            done += 1
        while level + head <= 0:
            level, newest, head = level + head, head, next(heads)
    return overflows / finishes


@pytest.mark.parametrize("times", [1.0, 2.0, 3.0])
def test_overflows_of_the_played_level_fall_as_the_law_says(times):
    u = times / lundberg_exponent(SPREAD)
    assert level_process(SPREAD, u, 200_000, seed=8) == pytest.approx(
        preemptions_per_request(SPREAD, u), rel=0.12
    )


def test_decay_of_the_played_level_is_theta():
    theta = lundberg_exponent(SPREAD)
    near, far = (level_process(SPREAD, k / theta, 300_000, seed=9) for k in (1.0, 3.0))
    assert np.log(near / far) * theta / 2 == pytest.approx(theta, rel=0.05)


def saturated_engine(lengths, pool, u, requests, seed, block=16):
    """Preemptions per request of an engine in lockstep: every running request a token an iteration."""
    rng = np.random.default_rng(seed)
    L, xi = (x.tolist() for x in lengths.sample(rng, requests))
    waiting, running = list(range(requests))[::-1], []
    age, preempted, used = [0] * requests, 0, 0

    def held(j):
        return -(-(L[j] + age[j]) // block) * block

    while waiting:
        while waiting and (not running or used + held(waiting[-1]) <= pool - u):
            used += held(waiting[-1])
            running.append(waiting.pop())
        for j in list(running):
            if j not in running:
                continue
            used -= held(j)
            age[j] += 1
            used += held(j)
            while used > pool:
                last = running.pop()
                used -= held(last)
                preempted += 1
                waiting.append(last)
                if last == j:
                    age[j] -= 1
                    break
            if j in running and age[j] == xi[j]:
                running.remove(j)
                used -= held(j)
    return preempted / requests


@pytest.mark.parametrize("times", [0.5, 1.5])
def test_an_engine_of_memoryless_requests_preempts_as_often(times):
    u = times / lundberg_exponent(SPREAD)
    counted = saturated_engine(SPREAD, 20_000, u, 6_000, seed=10)
    assert counted == pytest.approx(preemptions_per_request(SPREAD, u), rel=0.25)


def test_an_engine_that_looks_once_per_iteration_needs_that_much_less_headroom():
    pool, u = 120_000, 0.5 / lundberg_exponent(SPREAD)
    inputs, outputs = SPREAD.sample(np.random.default_rng(14), 20_000)
    table = pd.DataFrame({"arrival_s": 0.0, "input_tokens": inputs, "output_tokens": outputs})
    limits = {"max_running": 2_000, "max_batched_tokens": 8_192}
    served = simulate(table, pool=pool, step_cost=COST, admission=Headroom(u), **limits).requests
    steady = served.sort_values("admitted_s")["preemptions"].iloc[4_000:16_000].mean()
    running = saturation(Demand.of(SPREAD), COST, pool).running
    assert steady == pytest.approx(preemptions_per_request(SPREAD, u, running=running), rel=0.2)
    assert preemptions_per_request(SPREAD, u) > 1.6 * steady
    with pytest.raises(ValueError, match="running: -1"):
        preemptions_per_request(SPREAD, u, running=-1)


def test_headroom_minimises_the_two_costs():
    pools = np.array([16_000, 56_000, 200_000.0])
    best = headroom(SPREAD, pools, COST)
    for pool, u in zip(pools, best, strict=True):
        found = minimize_scalar(
            lambda u, m=pool: sum(throughput_losses(SPREAD, u, m, COST)),
            bounds=(0, pool / 2),
            method="bounded",
            options={"xatol": 1e-6},
        )
        assert u == pytest.approx(found.x, rel=1e-3)
    np.testing.assert_allclose(watermark(SPREAD, pools, COST), best / pools)
    assert headroom(SPREAD, 16_000, COST, prefix_cache=False) > best[0]
    assert headroom(SPREAD, 900, COST) == 0, "in a small pool room is dearer than recomputation"
    idle, _ = throughput_losses(SPREAD, 500, 56_000, COST, max_running=4)
    assert idle == 0


def test_headroom_needs_theta_only_once():
    lengths = JointLengths.from_samples(*SPREAD.sample(np.random.default_rng(2), 20_000))
    headroom(lengths, 56_000, COST)
    laws = set(lengths._memory)
    headroom(lengths, 16_000, COST)
    assert {("theta", 16), ("constant", 16), ("blocks", 16)} <= laws == set(lengths._memory)
