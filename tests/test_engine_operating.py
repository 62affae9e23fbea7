"""Operating points by hand, against fixed points and a simulated queue without servers."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq, linprog

from kvcache.engine import (
    Demand,
    JointLengths,
    StepCost,
    capacity_rows,
    operating_point,
    saturation,
    simulate,
)

COST = StepCost(0.0310602, 9.11623e-5, 5.31738e-8, 2.2082e-4)
CHAT = JointLengths.from_counts([100, 100, 900], [400, 50, 10], [2, 1, 1])
CODE = JointLengths.from_counts([2000, 3000], [20, 40], [1, 1])


def test_demand_by_hand():
    d = Demand.of(CHAT, block=16, cached=30)
    assert d.prompt == (2 * 100 + 100 + 900) / 4 - 30
    assert d.output == (800 + 50 + 10) / 4
    steps = [100 * 400 + 400**2 / 2] * 2 + [100 * 50 + 50**2 / 2, 900 * 10 + 50]
    assert d.held == pytest.approx(sum(steps) / 4 + 8 * 215)
    assert d.context == pytest.approx(d.held / 215)
    squares = sum(w * ((L + x) ** 3 - L**3) / 3 for L, x, w in ((100, 400, 2), (100, 50, 1), (900, 10, 1)))
    assert d.held_squares == pytest.approx(squares / 4), "the integral of (L + t)^2 over 0..xi"
    assert d.longest == 910
    assert d.seconds(StepCost(1, 2, 3, 5)) == pytest.approx(5 * d.prompt + 2 * d.output + 3 * d.held)
    with pytest.raises(ValueError, match="cached: 301"):
        Demand.of(CHAT, cached=301)
    with pytest.raises(ValueError, match="no request has output"):
        Demand.of(JointLengths.from_samples([5], [0]))


def test_operating_point_is_the_fixed_point_of_the_step_cost():
    demands = [Demand.of(CHAT), Demand.of(CODE)]
    rates = np.array([1.1, 0.7])
    point = operating_point(demands, rates, COST)

    def excess(tau):
        flow = [
            tau * sum(r * getattr(d, what) for r, d in zip(rates, demands, strict=True))
            for what in ("output", "held", "prompt")
        ]
        return COST.seconds(*flow) - tau

    assert point.tpot == pytest.approx(brentq(excess, 1e-3, 1e3), rel=1e-9)
    assert COST.seconds(point.running, point.cached, point.prefill) == pytest.approx(point.tpot)


def test_loads_are_an_axis_and_beyond_saturation_nothing_settles():
    demands = [Demand.of(CHAT)]
    full = 1 / demands[0].seconds(COST)
    points = operating_point(demands, full * np.array([[0.0], [0.5], [1.0], [2.0]]), COST)
    assert points.load.tolist() == pytest.approx([0, 0.5, 1, 2])
    assert points.tpot[:2].tolist() == pytest.approx([COST.t0, 2 * COST.t0])
    assert np.all(np.isinf([points.tpot[2:], points.cached[2:], points.deviation[2:]]))
    with pytest.raises(ValueError, match="of 1 classes"):
        operating_point(demands, [1.0, 2.0], COST)


def test_held_memory_of_a_poisson_stream_at_a_fixed_pace():
    demand = Demand.of(CHAT, block=1)
    point = operating_point([demand], [2.0], COST)
    # What iterations add that grow longer with the batch: the next test.
    pace = point.cached**2 * demand.seconds(COST) / demand.output / COST.t0
    # Requests that stay xi iterations of tau seconds, seen at many moments, without a server in their way.
    rng = np.random.default_rng(5)
    horizon = 60_000.0
    n = rng.poisson(2.0 * horizon)
    arrivals = rng.uniform(0, horizon, n)
    L, xi = CHAT.sample(rng, n)
    seen = np.arange(500, horizon, 20.0)
    held = np.zeros(seen.size)
    for start, prompt, output in zip(arrivals, L, xi, strict=True):
        a, b = np.searchsorted(seen, [start, start + output * point.tpot])
        held[a:b] += prompt + (seen[a:b] - start) / point.tpot
    assert point.cached - 0.5 * point.running == pytest.approx(held.mean(), rel=0.02)
    assert np.sqrt(point.deviation**2 - pace) == pytest.approx(held.std(), rel=0.05)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_memory_fluctuates_as_in_a_simulated_engine(load):
    rng = np.random.default_rng(21)
    lengths = JointLengths.from_samples(rng.integers(50, 800, 4_000), rng.geometric(1 / 200, 4_000))
    demand = Demand.of(lengths)
    rate = load / demand.seconds(COST)
    inputs, outputs = lengths.sample(rng, 16_000)
    arrivals = np.cumsum(rng.exponential(1 / rate, 16_000))
    table = pd.DataFrame({"arrival_s": arrivals, "input_tokens": inputs, "output_tokens": outputs})
    line = simulate(table, pool=10**7, step_cost=COST, max_running=4_000, max_batched_tokens=8_192).timeline
    during = line["time_s"].between(0.1 * arrivals[-1], arrivals[-1])
    seconds, held = np.diff(line["time_s"], append=0)[during], 16 * line["used_blocks"][during]
    mean = np.average(held, weights=seconds)
    point = operating_point([demand], [rate], COST)
    assert point.cached == pytest.approx(mean, rel=0.06)
    assert point.deviation == pytest.approx(np.average((held - mean) ** 2, weights=seconds) ** 0.5, rel=0.2)
    fixed = point.deviation**2 - point.cached**2 * demand.seconds(COST) / demand.output / COST.t0
    assert np.sqrt(fixed) < 0.75 * point.deviation, "the two formulas must be told apart"


def test_saturation_by_hand_and_by_its_limits():
    d = Demand.of(CODE)
    free = saturation(d, COST, 56_000)
    assert free.running == pytest.approx(56_000 / d.context)
    tau = COST.t0 + COST.per_sequence * free.running + COST.per_cached_token * 56_000
    tau += COST.per_prefill_token * free.running * d.prompt / d.output
    assert free.throughput == pytest.approx(free.running / (d.output * tau))
    assert saturation(d, COST, 56_000, max_running=10).running == 10
    tight = saturation(d, COST, 56_000, max_batched_tokens=1000)
    assert tight.running * (1 + d.prompt / d.output) == pytest.approx(1000)
    pools = saturation(d, COST, np.array([16_000, 56_000.0]))
    assert pools.throughput[1] == pytest.approx(free.throughput)
    assert pools.throughput[0] < pools.throughput[1]


def test_rows_hold_exactly_where_the_operating_point_keeps_the_bounds():
    demands = [Demand.of(CHAT), Demand.of(CODE)]
    bounds = {"tpot": 0.12, "pool": 9_000, "max_running": 14, "max_batched_tokens": 400}
    rows = capacity_rows(demands, COST, **bounds)
    assert rows.names == ("tpot", "memory", "running", "batch")
    rng = np.random.default_rng(6)
    kept = np.zeros((2, 4), int)
    for rates in rng.uniform(0, 4, (400, 2)):
        z = int(rng.integers(1, 4))
        point = operating_point(demands, rates / z, COST)
        values = [point.tpot, point.cached, point.running, point.prefill]
        ok = np.array(values) <= [0.12, 9_000, 14, 400]
        np.testing.assert_array_equal(rows.flows @ rates <= rows.groups * z, ok)
        kept[ok.astype(int), np.arange(4)] += 1
    assert kept.min() > 20, "each bound must have been kept and broken"


def test_most_is_the_answer_of_a_linear_program():
    demands = [Demand.of(CHAT), Demand.of(CODE)]
    rows = capacity_rows(demands, COST, pool=20_000, tpot=0.1, max_running=64)
    mix = np.array([3.0, 1.0])
    answer = linprog([-1], A_ub=(rows.flows @ mix)[:, None], b_ub=rows.groups)
    assert rows.most(mix)[0] == pytest.approx(answer.x[0])
    assert operating_point(demands, rows.most(mix)[0] * mix, COST).tpot <= 0.1 + 1e-12
    assert capacity_rows(demands, COST, pool=np.inf).names == ("tpot",)
    with pytest.raises(ValueError, match="max_running: 0"):
        capacity_rows(demands, COST, pool=1, max_running=0)
