"""Admission rules: what they let in, and that the group asks them as it should."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from gate_cases import COST, busy, running, same, table
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.engine import BurstRule, Bursts, Headroom, MaxRunning, Reserve, Watermark, simulate
from kvcache.engine.admission import Candidate, Gate, per_row
from kvcache.lengths import LengthDistribution


class Share(Gate):
    """A watermark that looks at the free blocks itself."""

    def __init__(self, share):
        self.share = share

    def gate(self, requests, blocks, block):
        self.keep, self.block = int(self.share * (blocks + 1)), block
        return self

    def admits(self, running, candidate):
        need = -(-(candidate.input_tokens + candidate.generated) // self.block)
        return running.free_blocks - need >= self.keep


@pytest.mark.parametrize("share", [0.0, 0.03, 0.2])
def test_a_rule_sees_what_the_group_sees(share):
    requests = busy(3)
    same(
        simulate(requests, pool=2_000, step_cost=COST, admission=Share(share)),
        simulate(requests, pool=2_000, step_cost=COST, admission=Watermark(share)),
    )


class Witness(Gate):
    """Admits all, and writes down what it is shown."""

    def __init__(self):
        self.seen = []

    def gate(self, requests, blocks, block):
        return self

    def admits(self, running, candidate):
        self.seen.append((running, candidate))
        return True


def test_a_rule_sees_progress_and_not_the_future():
    requests = table([(0.0, 5, 6), (0.0, 4, 3), (0.13, 7, 2)])
    result = simulate(requests, pool=160, step_cost=COST, admission=(witness := Witness()))
    (first, second), (later, third) = witness.seen
    assert (first.rows.tolist(), first.generated.tolist(), first.fresh) == ([0], [0], 1)
    assert (second.row, second.input_tokens, second.step) == (1, 4, 0)
    # By then the short one has gone, and the long one has made a token per iteration.
    assert (later.rows.tolist(), later.input_tokens.tolist(), later.fresh) == ([0], [5], 0)
    assert later.generated.tolist() == [third.step]
    assert later.finished == [3, 6, 2]  # a live list: by now it has all
    assert result.preemptions == 0


@pytest.mark.parametrize("rule", [Reserve({"chat": 30, "code": 120}), MaxRunning(7)])
def test_a_jump_changes_nothing(rule):
    requests = busy(2)
    jumps = simulate(requests, pool=1_600, step_cost=COST, admission=rule)
    same(jumps, simulate(requests, pool=1_600, step_cost=COST, admission=rule, jump=False))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_with_the_limit_reserved_nothing_is_evicted(seed):
    requests = busy(seed, count=40)
    result = simulate(requests, pool=1_200, step_cost=COST, admission=Reserve(200))
    assert result.preemptions == 0


def test_reservations_fill_the_pool_and_no_more():
    requests = table([(0.0, 16, 32)] * 12)
    # A prompt of a block and 2 blocks reserved: 5 of 15 blocks.
    result = simulate(requests, pool=240, step_cost=COST, admission=Reserve(32))
    assert result.timeline["running"].max() == 5
    # One whose length outgrows its reservation counts with what it holds.
    gate = Reserve([16, 16]).gate(table([(0, 16, 64)] * 2), 5, 16)
    assert gate.admits(running([0], [16], [16]), Candidate(1, 16, 0, 0)) is True
    assert gate.admits(running([0], [16], [48]), Candidate(1, 16, 0, 0)) is False


def test_a_limit_on_running_requests_is_the_engines_own():
    requests = busy(9)
    same(
        simulate(requests, pool=2_000, step_cost=COST, admission=MaxRunning(6)),
        simulate(requests, pool=2_000, step_cost=COST, max_running=6),
    )


def test_a_burst_of_alike_requests_is_held_back_and_mixed_traffic_is_not():
    law = LengthDistribution.from_samples(np.arange(400, 601))
    alike = pd.DataFrame({"arrival_s": 0.0, "input_tokens": 50, "output_tokens": np.arange(400, 601)})
    rule = Bursts(BurstRule(law, pool=8_000, theta=0.004, headroom=300), patience=4)
    default = simulate(alike, pool=8_000, step_cost=COST)
    held = simulate(alike, pool=8_000, step_cost=COST, admission=rule)
    kept = simulate(alike, pool=8_000, step_cost=COST, admission=Headroom(300))
    assert default.preemptions > kept.preemptions > 8 * held.preemptions
    assert held.throughput > 0.75 * default.throughput
    same(held, simulate(alike, pool=8_000, step_cost=COST, admission=rule, jump=False))
    # Two kinds, one of them known to end at once: it is let in where the other is not.
    short = LengthDistribution.from_samples([1, 2])
    two = BurstRule((law, short), pool=8_000, theta=0.004, headroom=300)
    gate = Bursts(two, classes=("long", "short")).gate(
        pd.DataFrame({"class": ["long"] * 20 + ["short"]}), 500, 16
    )
    view = running(range(16), [50] * 16, [0] * 16)
    assert gate.admits(view, Candidate(20, 50, 0, 0)) is True
    assert gate.admits(view, Candidate(19, 50, 0, 0)) is False


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match="no value for class 'code'; expected one of chat"):
        simulate(busy(1), pool=1_600, step_cost=COST, admission=Reserve({"chat": 5}))
    with pytest.raises(ValueError, match="3 values for 2 requests"):
        per_row([1, 2, 3], table([(0, 1, 1)] * 2))
    with pytest.raises(ValueError, match="tokens is -1"):
        Reserve(-1)
    with pytest.raises(ValueError, match="limit is 0"):
        MaxRunning(0)
    with pytest.raises(ValueError, match="patience is 0"):
        Bursts(BurstRule(LengthDistribution.from_samples([5]), 100, 0.1, 0), patience=0)
