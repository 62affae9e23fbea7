"""Occupancy below saturation against textbook queues and the simulated engine."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import nbinom

from kvcache.engine import Demand, Headroom, JointLengths, StepCost, saturation, simulate
from kvcache.engine.waiting import occupancy, sample_latencies, waiting_share

COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
DRAW = np.random.default_rng(31)
LENGTHS = JointLengths.from_samples(DRAW.integers(50, 1_200, 4_000), DRAW.geometric(1 / 220, 4_000))


def test_without_limits_it_is_processor_sharing():
    cost = StepCost(0.03, 1e-4, 4e-7, 0.0)
    demand = Demand.of(LENGTHS)
    gamma, rate = demand.seconds(cost) / demand.output, 0.7 / demand.seconds(cost)
    found = occupancy(LENGTHS, rate, cost, pool=1e9)
    expected = nbinom(cost.t0 / gamma + 1, 0.3).pmf(np.arange(found.probability.size))
    np.testing.assert_allclose(found.probability, expected, atol=1e-9)


def test_with_steps_of_one_length_and_a_limit_it_is_erlangs_queue():
    # Each of c places serves 1 / (E[xi] t0) requests/s: M/M/c.
    cost, places = StepCost(0.05, 0, 0, 0), 8
    rate = 0.8 * places / (LENGTHS.mean_output * 0.05)
    found = occupancy(LENGTHS, rate, cost, pool=1e9, max_running=places)
    load = 0.8 * places
    tail = load**places / math.factorial(places) / 0.2
    erlang_c = tail / (sum(load**k / math.factorial(k) for k in range(places)) + tail)
    assert found.probability[places:].sum() == pytest.approx(erlang_c, rel=1e-6)
    assert found.throughput == pytest.approx(places / (LENGTHS.mean_output * 0.05))
    assert found.short.max() < 1e-12, "no one waits for memory here"


def table(rate, n, seed):
    rng = np.random.default_rng(seed)
    inputs, outputs = LENGTHS.sample(rng, n)
    arrivals = np.cumsum(rng.exponential(1 / rate, n)) if np.isfinite(rate) else np.zeros(n)
    return pd.DataFrame({"arrival_s": arrivals, "input_tokens": inputs, "output_tokens": outputs})


def test_preemptions_below_saturation_are_that_share_of_those_at_saturation():
    pool, u = 20_000, 100
    full = simulate(table(np.inf, 12_000, 1), pool=pool, step_cost=COST, admission=Headroom(u)).requests
    steady = full.sort_values("admitted_s")["preemptions"].iloc[2_000:10_000].mean()
    finish = np.sort(full["finish_s"])
    throughput = 8_000 / (finish[10_000] - finish[2_000])
    shares = []
    for load in (0.75, 0.9):
        served = simulate(
            table(load * throughput, 20_000, 2), pool=pool, step_cost=COST, admission=Headroom(u)
        )
        counted = served.requests["preemptions"].iloc[1_000:].mean()
        shares.append(waiting_share(LENGTHS, load * throughput, COST, pool - u, throughput=throughput))
        assert counted == pytest.approx(shares[-1] * steady, rel=0.25)
    assert shares[1] > 2 * shares[0]
    assert waiting_share(LENGTHS, 2 * throughput, COST, pool - u) == 1


def test_latencies_as_in_a_simulated_engine():
    rate = 0.6 * saturation(Demand.of(LENGTHS), COST, 56_000).throughput
    served = simulate(table(rate, 12_000, 3), pool=56_000, step_cost=COST).requests.iloc[1_000:]
    first = served["first_token_s"] - served["arrival_s"]
    long = served["output_tokens"] > 1
    each = ((served["finish_s"] - served["first_token_s"]) / (served["output_tokens"] - 1))[long]
    ttft, tpot = sample_latencies(LENGTHS, rate, COST, 56_000, np.random.default_rng(4), max_running=256)
    assert np.median(tpot) == pytest.approx(np.median(each), rel=0.05)
    assert np.quantile(tpot, 0.99) == pytest.approx(np.quantile(each, 0.99), rel=0.15)
    assert np.median(ttft) == pytest.approx(np.median(first), rel=0.15)
    assert np.quantile(ttft, 0.99) == pytest.approx(np.quantile(first, 0.99), rel=0.25)


def test_room_for_one_more_prompt_as_drawn():
    pool, n = 8_000, 9
    found = occupancy(LENGTHS, 0.2, COST, pool)
    rng = np.random.default_rng(5)
    # Seen at a random iteration: pairs in proportion to their outputs, at a uniform age.
    at = rng.choice(
        LENGTHS.weights.size,
        (20_000, n),
        p=LENGTHS.weights * LENGTHS.outputs / LENGTHS.total / LENGTHS.mean_output,
    )
    held = LENGTHS.inputs[at] + rng.random(at.shape) * LENGTHS.outputs[at] + 8
    new = LENGTHS.sample(rng, 20_000)[0]
    assert found.short[n] == pytest.approx(np.mean(held.sum(axis=1) + new > pool), abs=0.02)
    assert 0.1 < found.short[n] < 0.9


def test_prompts_computed_all_at_once_widen_the_number_of_requests():
    lengths = JointLengths.from_samples(DRAW.integers(200, 6_000, 4_000), DRAW.integers(20, 120, 4_000))
    rate = 0.75 / Demand.of(lengths).seconds(COST)
    inputs, outputs = lengths.sample(np.random.default_rng(6), 30_000)
    arrivals = np.cumsum(np.random.default_rng(7).exponential(1 / rate, 30_000))
    requests = pd.DataFrame({"arrival_s": arrivals, "input_tokens": inputs, "output_tokens": outputs})
    line = simulate(requests, pool=10**7, step_cost=COST, max_running=2_000).timeline
    seconds = np.diff(line["time_s"], append=line["time_s"].iloc[-1])
    n = line["running"] + line["waiting"]
    mean = np.average(n, weights=seconds)
    variance = np.average((n - mean) ** 2, weights=seconds)
    found = occupancy(lengths, rate, COST, 10**7)
    states = np.arange(found.probability.size)
    predicted = found.probability @ states**2 - (found.probability @ states) ** 2
    plain = Demand.of(lengths).seconds(COST) / lengths.mean_output
    assert predicted == pytest.approx(variance, rel=0.3)
    assert nbinom(COST.t0 / plain + 1, 0.25).var() < 0.6 * variance, "the two must be told apart"


def test_rates_beyond_saturation_have_no_stationary_state():
    with pytest.raises(ValueError, match="the saturated throughput"):
        occupancy(LENGTHS, 100.0, COST, 20_000)
    with pytest.raises(ValueError, match="rate: 0"):
        occupancy(LENGTHS, 0, COST, 20_000)
