"""Admission rules of other engines and papers: what they let in, worked by hand or token by token."""

from __future__ import annotations

import numpy as np
import pytest
from gate_cases import COST, busy, running, same, table

from kvcache.engine import MaxRunning, Reserve, simulate
from kvcache.engine.admission import Candidate
from kvcache.paper.methods.rivals import (
    DynamicBatching,
    PastFuture,
    SGLang,
    ShortestFirst,
    exclusive_batching,
    prompt_and_share,
)


@pytest.mark.parametrize(
    "rule",
    [
        Reserve(200),
        Reserve({"chat": 30, "code": 120}),
        MaxRunning(7),
        PastFuture(200),
        SGLang(200),
        DynamicBatching(),
        ShortestFirst(),
        exclusive_batching(75, 100),
        prompt_and_share(200, 0.3),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_rule_serves_all_and_a_jump_changes_nothing(rule, seed):
    requests = busy(seed)
    result = simulate(requests, pool=1_600, step_cost=COST, admission=rule)
    assert (result.requests["status"] == "finished").all()
    assert result.timeline["used_blocks"].max() <= 100
    same(result, simulate(requests, pool=1_600, step_cost=COST, admission=rule, jump=False))


def test_the_shortest_goes_first_and_none_is_evicted():
    rng = np.random.default_rng(0)
    outputs = rng.permutation(np.arange(1, 41))
    requests = table([(0.0, 10, int(n)) for n in outputs])
    result = simulate(requests, pool=320, step_cost=COST, admission=ShortestFirst())
    order = result.requests.sort_values("output_tokens")
    assert (np.diff(order["admitted_s"]) >= 0).all()
    assert result.preemptions == 0
    assert simulate(requests, pool=320, step_cost=COST).preemptions > 0


def test_shortest_first_finds_the_highest_peak_of_the_future():
    requests = table([(0.0, 10, 30), (0.0, 20, 5), (0.0, 5, 12)])
    made = [4, 1, 0]

    def peak():
        """Token by token: a request holds what it had, and one more each iteration until its last."""
        levels = []
        for later in range(1, 40):
            there = [
                i + g + later - 1
                for (_, i, o), g in zip(requests.to_numpy(), made, strict=True)
                if g + later <= o
            ]
            levels.append(sum(-(-int(tokens) // 4) for tokens in there))
        return max(levels)

    view, head = running([0, 1], [10, 20], made[:2]), Candidate(2, 5, 0, 9)
    assert ShortestFirst().gate(requests, peak(), 4).admits(view, head)
    assert not ShortestFirst().gate(requests, peak() - 1, 4).admits(view, head)


def test_past_and_future_of_equal_lengths():
    # All of the past is 10 long: 3 running with 2, 6 and 9 made, and a newcomer. The most is held at the end
    # of one of them, the shorter ones gone: found token by token.
    requests = table([(0.0, 5, 10)] * 4)
    inputs, made = [5, 7, 3], [2, 6, 9]
    levels = [
        sum(i + min(g + later, 10) for i, g in zip([*inputs, 4], [*made, 0], strict=True) if g + later <= 10)
        for later in range(11)
    ]
    view = running([0, 1, 2], inputs, made, finished=[10] * 50)
    head = Candidate(3, 4, 0, 0)
    top = max(levels)
    assert PastFuture(10, share=(top + 0.5) / 100).gate(requests, 100, 1).admits(view, head)
    assert not PastFuture(10, share=(top - 0.5) / 100).gate(requests, 100, 1).admits(view, head)
    # Nothing has ended yet: everybody goes to its limit.
    view = running([0, 1, 2], inputs, made)
    assert not PastFuture(1_000).gate(requests, 100, 1).admits(view, head)


def test_the_ratio_of_sglang_falls_and_is_estimated_anew():
    requests = table([(0.0, 10, 100)] * 4)
    gate = SGLang(100).gate(requests, 100, 1)
    assert gate.at(0) == 0.7
    assert gate.at(300) == pytest.approx((0.7 + 0.098) / 2)
    assert gate.at(10_000) == pytest.approx(0.098)
    # Two run, one of them new: 0.7 x 60 and the whole 100 are kept; the head asks for 10 + 100 + a page of 1.
    view = running([0, 1], [10, 10], [40, 0], fresh=1, free=42 + 100 + 111)
    head = Candidate(2, 10, 0, 0)
    assert not gate.admits(view, head)
    assert gate.admits(running([0, 1], [10, 10], [40, 0], fresh=1, free=42 + 100 + 112), head)
    assert gate.victim(running([0, 1, 2], [10, 10, 30], [5, 2, 2])) == 2
    gate.evicted(running([0, 1], [10, 10], [40, 20]), 500)
    assert gate.at(500) == pytest.approx((60 + 2 * 20) / 201)
    gate.enters(Candidate(3, 10, 0, 700), 0)
    assert gate.at(700) == 0.7


def test_dynamic_batching_divides_the_pool_by_a_request():
    gate = DynamicBatching().gate(table([]), 100, 16)
    head = Candidate(0, 1, 0, 0)
    # 3 requests hold 40 blocks: 13.3 each, so floor(95 / 13.3) = 7 may run.
    assert gate.admits(running([0] * 6, [1] * 6, [1] * 6, free=100 - 80), head)
    assert not gate.admits(running([0] * 7, [1] * 7, [1] * 7, free=100 - 94), head)


def test_buffers_in_closed_form():
    assert exclusive_batching(100, 1_000, risk=np.exp(-1)).tokens == pytest.approx(10_000)
    requests = busy(4)
    same(
        simulate(requests, pool=2_000, step_cost=COST, admission=prompt_and_share(200, 0.25)),
        simulate(requests, pool=2_000, step_cost=COST, admission=Reserve(50)),
    )
    with pytest.raises(ValueError, match="share is 2"):
        prompt_and_share(100, 2)
