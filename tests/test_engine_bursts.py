"""The burst rule against its formula term by term, a sampled future and a burst played out."""

import math

import numpy as np
import pytest

from kvcache import LengthDistribution
from kvcache.engine import JointLengths, lundberg_exponent
from kvcache.engine.bursts import BurstRule

OUTPUTS = LengthDistribution.from_counts(np.arange(1, 900), 0.99 ** np.arange(1, 900))
RULE = BurstRule(OUTPUTS, pool=9_000, theta=1 / 300, headroom=200)


def running(n, seed):
    rng = np.random.default_rng(seed)
    xi = OUTPUTS.sample(rng, n)
    return rng.integers(50, 600, n), (rng.random(n) * xi).astype(int)


@pytest.mark.parametrize("n", [1, 16, 37])
def test_bound_is_the_formula(n):
    prompt, age = running(n, n)
    times, exponents, expected = [1, 16, 70, 400, 899], [RULE.theta / 2**k for k in range(8)], []
    for x in exponents:
        expected.append([])
        for t in times:
            total = -x * 9_000
            for L, a in zip(prompt.tolist(), age.tolist(), strict=True):
                pi = (1 - OUTPUTS.cdf(a + t)) / (1 - OUTPUTS.cdf(a))
                total += math.log1p(pi * math.expm1(x * (L + a + t + 8)))
            expected[-1].append(total)
    found = RULE.log_overflow(prompt, age, times=times, x=np.array(exponents)[:, None])
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    aligned = RULE.log_overflow(prompt, age, times=times, x=exponents[:5])
    np.testing.assert_allclose(aligned, np.diag(np.array(expected)[:5]), rtol=1e-9)


@pytest.mark.parametrize("pool", [7_000, 8_000, 8_400, 9_000])
def test_admits_where_some_exponent_of_theta_halved_keeps_every_horizon(pool):
    rule, answers = BurstRule(OUTPUTS, pool=pool, theta=1 / 300, headroom=200), []
    for seed in range(20):
        prompt, age = running(22, seed)
        x = rule.theta * 0.5 ** np.arange(8)[:, None]
        bound = rule.log_overflow(prompt, age, times=np.arange(900), x=x).min(axis=0)
        margin = bound.max() + rule.theta * rule.headroom
        answers.append(rule.admits(prompt, age))
        if abs(margin) > 0.02:  # horizons are a grid
            assert answers[-1] == (margin < 0)
    assert pool in (7_000, 9_000) or len(set(answers)) == 2


def test_overflow_of_sampled_futures_stays_below_the_bound():
    prompt, age = running(24, 5)
    rule = BurstRule(OUTPUTS, pool=8_600, theta=1 / 300, headroom=0, block=1)
    times = np.array([20, 60, 150, 400])
    x = rule.theta * 0.5 ** np.arange(8)[:, None]
    bound = rule.log_overflow(prompt, age, times=times, x=x).min(axis=0)
    rng = np.random.default_rng(6)
    trials = 40_000
    u = rng.random((trials, 24))
    # An output beyond a is drawn by inversion of the tail.
    start = OUTPUTS.cdf(age)
    xi = OUTPUTS.tokens[np.searchsorted(OUTPUTS.cumulative, start + u * (1 - start), side="right")]
    seen = 0
    for t, log_bound in zip(times, bound, strict=True):
        held = np.where(xi > age + t, prompt + age + t, 0).sum(axis=1)
        overflow = np.mean(held > 8_600)
        assert overflow <= np.exp(log_bound) + 4 * np.sqrt(overflow / trials)
        seen += overflow > 0.01
    assert seen, "some horizon must overflow, or the bound is not tested"


def test_long_sums_do_not_underflow_and_old_requests_go_on():
    sure = BurstRule(LengthDistribution.from_samples([5]), pool=1e6, theta=0.01, headroom=0)
    prompt = np.full(300, 4_000)
    # All are older than any length known: they hold 4,000 + 50 + 8 + t each, for certain.
    bound = sure.log_overflow(prompt, np.full(300, 50), times=[20, 90], x=0.01)
    np.testing.assert_allclose(bound, 0.01 * (300 * (4_058 + np.array([20, 90])) - 1e6), rtol=1e-9)
    assert not sure.admits(prompt, np.full(300, 50))
    # All fit now, and none outlives its fifth token: nothing is held then, whatever was.
    roomy = BurstRule(LengthDistribution.from_samples([5]), pool=1.21e6, theta=0.01, headroom=0)
    assert roomy.admits(prompt, np.zeros(300, int))
    assert not roomy.admits(prompt, np.full(300, 50))
    # What does not fit now is refused, however soon it ends.
    assert not sure.admits(prompt, np.zeros(300, int))


def test_kinds_have_their_own_laws():
    long = LengthDistribution.from_samples([800, 899])
    both = BurstRule((OUTPUTS, long), pool=9_000, theta=1 / 300, headroom=200)
    prompt, age = running(10, 3)
    at = {"times": [50, 500], "x": RULE.theta}
    np.testing.assert_allclose(both.log_overflow(prompt, age, **at), RULE.log_overflow(prompt, age, **at))
    alone = BurstRule(long, pool=9_000, theta=1 / 300, headroom=200)
    found = both.log_overflow(prompt, age, np.ones(10, int), **at)
    np.testing.assert_allclose(found, alone.log_overflow(prompt, age, **at))
    with pytest.raises(ValueError, match="theta is 0"):
        BurstRule(OUTPUTS, pool=9_000, theta=0, headroom=200)


def play_burst(rule, pool, seed):
    """Evictions when 90 alike requests come at once; every running request a token an iteration."""
    rng = np.random.default_rng(seed)
    waiting = list(zip(rng.integers(90, 110, 90).tolist(), rng.integers(400, 600, 90).tolist(), strict=True))
    running, evicted = [], 0  # [prompt, output, age]
    while waiting or running:
        while waiting:
            used = sum(L + a for L, _, a in running)
            prompts, ages = [L for L, _, _ in running] + [waiting[-1][0]], [a for *_, a in running] + [0]
            fits = used + prompts[-1] <= pool and (rule is None or rule.admits(prompts, ages))
            if running and not fits:
                break
            running.append([*waiting.pop(), 0])
        running = [[L, xi, a + 1] for L, xi, a in running if a + 1 < xi]
        while sum(L + a for L, _, a in running) > pool:
            L, xi, _ = running.pop()
            waiting.append((L, xi))
            evicted += 1
    return evicted


def test_a_burst_of_alike_requests_is_not_evicted():
    lengths = JointLengths.from_samples(np.full(200, 100), np.arange(400, 600))
    theta = lundberg_exponent(lengths, block=1)
    rule = BurstRule(lengths.output_lengths, pool=12_000, theta=theta, headroom=1 / theta, block=1)
    assert play_burst(None, 12_000, seed=1) > 20
    assert play_burst(rule, 12_000, seed=1) <= 1
