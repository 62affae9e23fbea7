"""The replay of a plan against the simulation of its groups one by one, and against cases by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kvcache.engine import StepCost, simulate
from kvcache.planner.judge import FIGURES, Station, arrivals, replay

STEP = StepCost(0.01, 1e-4, 1e-7, 1e-4)


def station(**change):
    usual = Station("s", 1, STEP, pool=50_000, headroom=0.0, max_running=64, max_batched=2048)
    return replace(usual, **change)


def table(n=400, rate=5.0, classes=1, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, n)),
            "input_tokens": rng.integers(1, 800, n),
            "output_tokens": rng.integers(1, 200, n),
            "class": rng.integers(0, classes, n),
        }
    )


def run(requests, stations, shares, tpot=0.1, ttft=5.0, **options):
    shares = np.asarray(shares, dtype=float)
    classes = shares.shape[0]
    rng = np.random.default_rng(0)
    return replay(requests, stations, shares, np.full(classes, tpot), np.full(classes, ttft), rng, **options)


def test_one_group_is_its_simulation():
    requests = table()
    figures, served = run(requests, [station()], [[1.0]])
    alone = simulate(requests, pool=50_000, step_cost=STEP, max_running=64, max_batched_tokens=2048).requests
    for name in ("first_token_s", "finish_s"):
        np.testing.assert_allclose(served[name], alone[name])
    late = requests["arrival_s"] >= 0.2 * requests["arrival_s"].iloc[-1]
    ttft = alone["first_token_s"] - alone["arrival_s"]
    tpot = (alone["finish_s"] - alone["first_token_s"]) / np.maximum(alone["output_tokens"] - 1, 1)
    assert figures["within_deadlines"] == pytest.approx(np.mean((ttft <= 5)[late] & (tpot <= 0.1)[late]))
    assert figures["tpot_mean"] == pytest.approx(tpot[late & (alone["output_tokens"] > 1)].mean())
    assert figures["offered"] == pytest.approx(400 / requests["arrival_s"].iloc[-1])
    assert list(figures.index) == list(FIGURES)


def test_shares_reject_and_route():
    requests = table(4000, classes=2)
    stations = [station(name="a"), station(name="b")]
    figures, served = run(requests, stations, [[0.5, 0.25], [0.0, 1.0]])
    first = (requests["class"] == 0).mean()
    assert figures["admitted"] / figures["offered"] == pytest.approx(1 - 0.25 * first, abs=0.02)
    on_a = served[served["station"] == 0]
    assert (on_a["class"] == 0).all()
    assert len(on_a) / (requests["class"] == 0).sum() == pytest.approx(0.5, abs=0.03)


def test_groups_of_a_kind_take_turns():
    requests = table(900)
    _, all_three = run(requests, [station(groups=3)], [[1.0]], sample=3)
    figures, one = run(requests, [station(groups=3)], [[1.0]], sample=1)
    assert len(all_three) == 900
    assert len(one) == 300
    assert np.array_equal(one["arrival_s"], requests["arrival_s"][::3])
    assert (one["weight"] == 3).all()
    assert figures["throughput"] == pytest.approx(figures["offered"], rel=0.1)


def test_prefill_apart_from_decode():
    """A lone request: prefilled, moved, then decoded."""
    request = pd.DataFrame({"arrival_s": [1.0], "input_tokens": [500], "output_tokens": [11], "class": [0]})
    stations = [station(name="p", phase="prefill", transfer=1e-3), station(name="d", phase="decode")]
    _, served = run(request, stations, [[1.0, 1.0]])
    moved = 1.0 + STEP.t0 + 500 * 1e-4 + 500 * 1e-3
    assert served["first_token_s"][0] == pytest.approx(moved)
    held = sum(STEP.seconds(1, 501 + k) for k in range(10))
    assert served["finish_s"][0] == pytest.approx(moved + held, rel=1e-3)
    many, whole = run(table(2000), stations, [[1.0, 1.0]]), run(table(2000), [station()], [[1.0]])
    assert many[0]["tpot_p95"] < whole[0]["tpot_p95"]


def test_what_no_pool_holds_is_late_for_ever():
    requests = table(50).assign(input_tokens=60_000)
    figures, _ = run(requests, [station()], [[1.0]])
    assert figures["within_deadlines"] == 0
    assert figures["goodput"] == 0


def test_nothing_admitted():
    figures, served = run(table(50), [station()], [[0.0]])
    assert figures["offered"] > 0
    assert figures["goodput"] == 0
    assert served.empty


def test_arrivals():
    requests = table(1000, classes=2)
    rng = np.random.default_rng(0)
    same = arrivals(
        requests,
        np.array([5.0, 5.0]) * requests["class"].value_counts(normalize=True).sort_index().to_numpy(),
        2500,
        rng,
    )
    assert same["input_tokens"].to_numpy()[1000:2000].tolist() == requests["input_tokens"].tolist()
    other = arrivals(requests, np.array([9.0, 1.0]), 5000, rng)
    assert (other["class"] == 0).mean() == pytest.approx(0.9, abs=0.02)
    assert 5000 / other["arrival_s"].iloc[-1] == pytest.approx(10, rel=0.05)
    assert 2500 / same["arrival_s"].iloc[-1] == pytest.approx(5, rel=0.1)
    busy = requests.assign(
        arrival_s=np.r_[np.arange(500.0), 500 + 0.1 * np.arange(100), 600 + np.arange(400.0)]
    )
    stretch = arrivals(busy, np.ones(2), 100, rng, recorded=True)
    assert stretch["arrival_s"].iloc[-1] == pytest.approx(9.9)
