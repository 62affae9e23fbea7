"""Serving systems: each does what sets it apart."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.engine import Reserve, StepCost, simulate
from kvcache.paper.methods.systems import (
    SYSTEMS,
    Padded,
    Predicted,
    SharedBudget,
    distserve,
    gracekv,
    growpage,
    h2o,
    orca,
    predictions,
    sarathi,
    snapkv,
    vllm,
    whole_prompts,
)

COST = StepCost(t0=0.03, per_sequence=1e-4, per_cached_token=4e-7, per_prefill_token=2e-4)
COLUMNS = ["admitted_s", "first_token_s", "finish_s", "preemptions", "worst_gap_s", "recomputed_tokens"]


def table(rows):
    return pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"])


def busy(seed=0, count=150, gap=0.12):
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(gap, count))
    return table(
        {
            "arrival_s": arrival,
            "input_tokens": rng.integers(1, 400, count),
            "output_tokens": rng.integers(1, 200, count),
        }
    )


def same(one, other):
    np.testing.assert_allclose(
        one.requests[COLUMNS].astype(float), other.requests[COLUMNS].astype(float), rtol=1e-9
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_serves_all_and_fits_its_pool(name):
    requests = busy()
    system = SYSTEMS[name]
    options = {"pool": 4_000, "step_cost": COST, "limit": 200}
    run = system.run(requests, rng=np.random.default_rng(1), **options)
    assert (run.requests["status"] == "finished").all()
    assert (run.requests["first_token_s"] <= run.requests["finish_s"]).all()
    assert (run.requests["first_token_s"] > requests["arrival_s"]).all()
    assert run.timeline["used_blocks"].max() <= 250
    assert run.steps > 0
    assert system.source
    assert system.simplified
    again = system.run(requests, rng=np.random.default_rng(1), **options)
    pd.testing.assert_frame_equal(run.requests, again.requests)


def test_table_one_is_there():
    table_one = {"vLLM", "Orca", "DistServe", "Sarathi-Serve", "H2O", "SnapKV"}
    assert table_one <= set(SYSTEMS)


def test_orca_holds_the_limit_from_the_start():
    requests = table([(0.0, 16, 5)] * 40)
    run = orca(requests, pool=1_600, step_cost=COST, limit=144)
    assert run.timeline["running"].max() == 10  # 1600 / (16 + 144)
    assert run.preemptions == 0


def test_chunks_spare_the_decoding_requests_and_whole_prompts_do_not():
    requests = table([(0.0, 100, 60), (0.5, 3_000, 10), (0.6, 3_000, 10)])
    chunked = sarathi(requests, pool=80_000, step_cost=COST).requests
    whole = whole_prompts(requests, pool=80_000, step_cost=COST).requests
    # With 512 tokens per iteration, 511 beside one decoding request, or 510 beside two.
    assert chunked["worst_gap_s"][0] < COST.seconds(3, 7_000, 512)
    assert whole["worst_gap_s"][0] > COST.seconds(0, 0, 3_000)
    assert whole["first_token_s"][1] < chunked["first_token_s"][1]


def test_distserve_never_lets_a_prompt_delay_a_token():
    requests = busy(3, gap=0.5)
    run = distserve(requests, pool=200_000, step_cost=COST).requests
    alone = simulate(
        requests.assign(output_tokens=1),
        pool=200_000,
        step_cost=COST,
        prompts="alone",
        max_batched_tokens=4_096,
    ).requests
    np.testing.assert_allclose(run["first_token_s"], alone["finish_s"])
    # Between two tokens: an iteration that decodes, and before the second one the move and the wait for it.
    longest = 2 * COST.seconds(60, 60 * 600) + 400 * 328e3 / 25e9
    assert run["worst_gap_s"].max() < longest
    assert vllm(requests, pool=200_000, step_cost=COST).requests["worst_gap_s"].max() > longest


def test_the_move_takes_its_time():
    requests = table([(0.0, 100, 3)])
    run = distserve(requests, pool=1_600, step_cost=COST, move_s_per_token=0.01, move_s=2.0).requests
    first = COST.seconds(0, 0, 100)
    second = first + 3.0 + COST.seconds(1, 100, 0)
    assert run["first_token_s"][0] == pytest.approx(first)
    assert run["finish_s"][0] == pytest.approx(second + COST.seconds(1, 101, 0))
    assert run["worst_gap_s"][0] == pytest.approx(second - first)


def test_who_outgrows_a_prediction_leaves_and_gets_twice_as_much():
    requests = busy(5)
    lengths = predictions(requests["output_tokens"], 0.5, np.random.default_rng(2))
    rule = Predicted(lengths, 0.5, 0.2)
    result = simulate(requests, pool=6_000, step_cost=COST, admission=rule).requests
    reserved = np.maximum(np.ceil(lengths * 1.1), 1)
    doublings = np.maximum(np.ceil(np.log2(requests["output_tokens"] / reserved)), 0)
    assert result["preemptions"].tolist() == doublings.tolist()
    assert doublings.max() >= 2


def test_who_outgrows_the_papers_reservation_gets_its_limit():
    requests = busy(5).assign(**{"class": "chat"})
    rule = Predicted({"chat": 120.0}, limit={"chat": 200.0})
    result = simulate(requests, pool=4_000, step_cost=COST, admission=rule).requests
    assert result["preemptions"].tolist() == (requests["output_tokens"] > 120).astype(int).tolist()


def test_perfect_predictions_evict_nobody():
    requests = busy(6)
    truth = requests["output_tokens"].to_numpy()
    assert (predictions(truth, 0.0, np.random.default_rng(0)) == truth).all()
    same(
        simulate(requests, pool=3_000, step_cost=COST, admission=Predicted(truth)),
        simulate(requests, pool=3_000, step_cost=COST, admission=Reserve(truth)),
    )


def test_predictions_have_the_error_that_they_state():
    lengths = predictions(np.full(200_000, 100), 0.2, np.random.default_rng(3))
    assert lengths.mean() == pytest.approx(100, rel=0.01)
    assert lengths.std() == pytest.approx(20, rel=0.03)


def test_padding_is_less_in_a_rush():
    calm, rush = np.arange(100) * 1.0, 100 + np.arange(100) * 0.1
    requests = table({"arrival_s": np.append(calm, rush), "input_tokens": 10, "output_tokens": 10})
    gate = Padded(100.0, spread=0.5, risk=0.05, reserve=0.0).gate(requests, 100, 1)
    padding = np.sqrt(np.log(20) / 2)
    assert gate.eta[99] == np.ceil(100 * (1 + padding))
    assert 100 < gate.eta[-1] < 100 * (1 + 0.5 * padding)


def test_kept_tokens_bound_the_memory():
    lone = table([(0.0, 640, 400)])
    for run, held in (
        (vllm(lone, pool=1_600, step_cost=COST), 65),
        (h2o(lone, pool=1_600, step_cost=COST, share=0.25), 10),
        (snapkv(lone, pool=1_600, step_cost=COST, most=160), 35),
        (growpage(lone, pool=1_600, step_cost=COST, start=160, share=0.5), 22),
    ):
        # The whole prompt first (40 blocks), then what is kept of it and of 399 generated tokens: for the
        # last system, 12 of 24 limits bring a page of 16 to its 10 blocks.
        assert run.timeline["used_blocks"].tolist()[-3] == held


def test_a_limit_that_does_not_bind_is_none():
    requests = busy(7)
    plain = simulate(requests, pool=3_000, step_cost=COST, prefix_cache=False)
    assert plain.preemptions > 0
    same(snapkv(requests, pool=3_000, step_cost=COST, most=1_000), plain)
    same(growpage(requests, pool=3_000, step_cost=COST, start=400, share=1.0), plain)
    roomy = simulate(requests, pool=300_000, step_cost=COST, prefix_cache=False)
    same(gracekv(requests, pool=300_000, step_cost=COST), roomy)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 3_000), st.integers(1, 200), st.integers(1, 3_000))
def test_a_shared_budget_sums_up(decoding, cached, steps, budget):
    shared = SharedBudget(COST, budget)
    each = sum(COST.seconds(decoding, min(cached + decoding * k, budget)) for k in range(steps))
    assert shared.span(decoding, cached, steps) == pytest.approx(each)
