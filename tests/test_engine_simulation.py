"""The simulation against a plain one: every token of every iteration, every block by its number."""

from __future__ import annotations

from collections import deque

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.engine import Headroom, StepCost, Watermark, group, simulate
from kvcache.engine.blocks import FreeBlocks
from kvcache.engine.group import Kept

COST = StepCost(t0=0.03, per_sequence=1e-4, per_cached_token=4e-7, per_prefill_token=2e-4)
COLUMNS = ["admitted_s", "first_token_s", "finish_s", "preemptions", "worst_gap_s", "recomputed_tokens"]


def table(rows):
    return pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"])


def plain(
    requests,
    *,
    pool,
    spare,
    block,
    max_running,
    budget,
    prefix_cache,
    prompts="chunked",
    received=False,
    kept=None,
):
    """The scheduler in its own words: lists of numbered blocks, one token at a time.

    Gives the rows that the simulation reports, the iterations, and the most blocks ever used.
    """
    blocks = pool // block
    free = list(range(blocks))  # from the first to be taken
    content = {}  # block -> (request, place) of what it holds
    zero = {"done": 0, "cache": 0, "sum": 0, "preemptions": 0, "limits": 0, "until": None, "most": np.inf}
    jobs = [
        {"id": k, "in": int(i), "out": int(o), "at": a, "made": int(received), "admitted": np.nan}
        | {"held": [], "times": [], **zero}
        for k, (a, i, o) in enumerate(requests.to_numpy())
    ]
    coming = deque(sorted(jobs, key=lambda j: j["at"]))
    waiting, running, clock, steps, most = deque(), [], 0.0, 0, 0

    def fill(job, tokens):
        """Blocks for so many tokens in all; the full ones are known by what they hold."""
        job["cache"] = tokens
        while len(job["held"]) * block < tokens:
            job["held"].append(free.pop(0))
            content.pop(job["held"][-1], None)
        if prefix_cache and kept is None:
            content.update({job["held"][k]: (job["id"], k) for k in range(tokens // block)})

    def release(job, place=0):
        gone = job["held"][place:][::-1]
        known = [b for b in gone if b in content]
        free[:] = [b for b in gone if b not in content] + free + known
        del job["held"][place:]

    def reach(job):
        """At a limit of what is kept: a page more in that share of the cases, or a page of tokens that take
        the place of others."""
        if job["cache"] < job["most"] or (job["until"] and not (kept.share and job["made"] >= job["until"])):
            return
        job["limits"] += 1
        more = int(job["limits"] * kept.share) > int((job["limits"] - 1) * kept.share)
        job["most"] += kept.page * more
        job["until"] = None if more else job["made"] + kept.page

    def admit(left, chunks):
        while waiting and left > 0 and len(running) < max_running:
            job = waiting[0]
            tokens = job["in"] + job["made"]
            if -(-tokens // block) + (spare if running else 0) > len(free):
                return
            known = {v: b for b, v in content.items() if v[0] == job["id"] and b in free}
            hit = 0
            while (job["id"], hit) in known:
                hit += 1
            if prompts != "chunked" and tokens > left and any(new > 1 or kind for _, new, kind in chunks):
                return
            waiting.popleft()
            running.append(job)
            for place in range(hit):
                job["held"].append(known[job["id"], place])
                free.remove(job["held"][-1])
            job["done"] = hit * block
            if received and not job["preemptions"]:
                job["done"] = job["in"]
            new = tokens - job["done"]
            new = min(new, left) if prompts == "chunked" else new
            fill(job, job["done"] + new)
            chunks.append((job, new, True))
            left -= new
            job["admitted"] = clock if np.isnan(job["admitted"]) else job["admitted"]

    while coming or waiting or running:
        if not (waiting or running):
            clock = max(clock, coming[0]["at"])
        while coming and coming[0]["at"] <= clock:
            waiting.append(coming.popleft())
        left, chunks, evicted, k = budget, [], False, 0
        if prompts == "alone":
            admit(left, chunks)
        while k < len(running) and not (prompts == "alone" and chunks and chunks[0][2]):
            job = running[k]
            new = min(job["in"] + job["made"] - job["done"], left)
            decodes = job["done"] >= job["in"] + job["made"] - 1 and job["ready"]
            need = job["cache"] + (job["cache"] < job["most"]) if decodes else job["done"] + new
            while len(job["held"]) * block + len(free) * block < need:
                victim = running.pop()
                release(victim)
                victim["done"], victim["ready"], evicted = 0, False, True
                victim["preemptions"] += 1
                waiting.appendleft(victim)
                if victim is job:
                    break
            else:
                job["before"] = job["cache"]
                fill(job, need)
                chunks.append((job, new, not decodes))
                left -= new
                k += 1
        if not evicted and prompts != "alone":
            admit(left, chunks)
        assert len(free) + sum(len(j["held"]) for j in running) == blocks
        most = max(most, blocks - len(free))
        decoding = [j["before"] for j, _, prompt in chunks if not prompt]
        decoding += [j["done"] for j, new, prompt in chunks if prompt and new == 1 and j["done"] >= j["in"]]
        clock += COST.seconds(len(decoding), sum(decoding), sum(new for _, new, _ in chunks) - len(decoding))
        steps += 1
        for job, new, prompt in chunks:
            job["done"] += new
            job["sum"] += new
            if job["done"] == job["in"] + job["made"]:
                job["made"] += 1
                job["times"].append(clock)
                if prompt and kept is not None:
                    job["most"] = kept.most[job["id"]] + int(job["limits"] * kept.share) * kept.page
                    fill(job, int(min(job["cache"], kept.prompts[job["id"]], job["most"])))
                    release(job, -(-job["cache"] // block))
                    job["until"] = None
                if kept is not None:
                    reach(job)
                job["ready"] = True
                if job["made"] == job["out"]:
                    running.remove(job)
                    release(job)
            else:
                job["ready"] = False
    rows = []
    for j in jobs:
        gap, again = max(np.diff(j["times"]), default=np.nan), j["sum"] - (j["in"] + j["out"] - 1)
        again += received * j["in"]
        rows.append((j["admitted"], j["times"][0], j["times"][-1], j["preemptions"], gap, again))
    return pd.DataFrame(rows, columns=COLUMNS), steps, most


def crowd(seed):
    """Requests enough to fill a small pool, some at once and some later."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(4, 30))
    arrival = np.where(rng.random(count) < 0.3, 0.0, rng.uniform(0, rng.choice([0.5, 3.0, 12.0]), count))
    return table(np.column_stack([arrival, rng.integers(1, 41, count), rng.integers(1, 51, count)]))


few = st.lists(
    st.tuples(st.sampled_from([0.0, 0.05, 0.1, 0.37, 1.0]), st.integers(1, 40), st.integers(1, 50)),
    min_size=1,
    max_size=6,
).map(table)
workloads = few | st.integers(0, 2**32 - 1).map(crowd)
limits = st.fixed_dictionaries(
    {
        "pool": st.integers(96, 400),
        "block": st.sampled_from([1, 4, 16]),
        "max_running": st.integers(1, 12),
        "prefix_cache": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(workloads, limits, st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([12, 19, 64]), st.booleans())
def test_every_decision_is_that_of_the_plain_scheduler(requests, limit, share, budget, jump):
    result = simulate(
        requests,
        step_cost=COST,
        admission=Watermark(share),
        max_batched_tokens=budget,
        jump=jump,
        **limit,
    )
    limit = dict(limit)
    spare = int(share * (limit["pool"] // limit["block"] + 1))
    expected, steps, most = plain(requests, spare=spare, budget=budget, **limit)
    assert result.steps == steps
    np.testing.assert_allclose(result.requests[COLUMNS].astype(float), expected, rtol=1e-9, atol=1e-12)
    assert result.timeline["used_blocks"].max() <= most <= limit["pool"] // limit["block"]


def compare(requests, limit, share, prompts, received, kept, jump):
    """The simulation of other systems against the plain one."""
    if received:
        requests = requests.assign(output_tokens=requests["output_tokens"] + 1)
        limit = {**limit, "pool": limit["pool"] + 16}
        prompts = "whole" if prompts == "alone" else prompts
    if kept is not None:
        most, least = (np.full(len(requests), float(n)) for n in kept[:2])
        kept = Kept(least, most, kept[2], page=4)
    other = {"prompts": prompts, "received": received, "kept": kept}
    rule = Watermark(share)
    result = simulate(
        requests, step_cost=COST, admission=rule, max_batched_tokens=24, jump=jump, **other, **limit
    )
    spare = rule.free_blocks(limit["pool"] // limit["block"], limit["block"])
    expected, steps, most = plain(requests, spare=spare, budget=24, **other, **limit)
    assert result.steps == steps
    np.testing.assert_allclose(result.requests[COLUMNS].astype(float), expected, rtol=1e-9, atol=1e-12)
    assert result.timeline["used_blocks"].max() <= most <= limit["pool"] // limit["block"]


@settings(max_examples=60, deadline=None)
@given(
    workloads,
    limits,
    st.sampled_from([0.0, 0.1]),
    st.sampled_from(["chunked", "whole", "alone"]),
    st.booleans(),
    st.none() | st.tuples(st.integers(1, 60), st.integers(1, 60), st.sampled_from([0.0, 0.3, 1.0])),
    st.booleans(),
)
def test_so_is_that_of_other_systems(requests, limit, share, prompts, received, kept, jump):
    compare(requests, limit, share, prompts, received, kept, jump)


@pytest.mark.parametrize("prompts", ["chunked", "whole", "alone"])
@pytest.mark.parametrize("kept", [None, (20, 30, 0.0), (15, 25, 0.3)])
def test_so_it_is_in_crowds(prompts, kept):
    for seed in range(12):
        rng = np.random.default_rng(seed)
        limit = {
            "pool": int(rng.integers(96, 160)),
            "block": int(rng.choice([1, 4, 16])),
            "max_running": int(rng.integers(2, 9)),
            "prefix_cache": bool(rng.random() < 0.5),
        }
        compare(crowd(seed), limit, 0.0, prompts, prompts != "alone" and seed % 3 == 0, kept, seed % 2 == 0)


@settings(max_examples=60, deadline=None)
@given(workloads, limits, st.sampled_from([0.0, 0.2]))
def test_everyone_ends_in_turn_and_nothing_is_lost(requests, limit, share):
    result = simulate(requests, step_cost=COST, admission=Watermark(share), max_batched_tokens=32, **limit)
    rows = result.requests
    assert (rows["status"] == "finished").all()
    assert (rows["arrival_s"] <= rows["admitted_s"]).all()
    assert (rows["admitted_s"] < rows["first_token_s"]).all()
    assert (rows["first_token_s"] <= rows["finish_s"]).all()
    # First come, first served: who came earlier is never admitted later.
    order = rows.sort_values("arrival_s", kind="stable")
    assert (np.diff(order["admitted_s"]) >= 0).all()
    assert result.timeline["used_blocks"].iloc[-1] == result.timeline["running"].iloc[-1] == 0
    assert result.seconds == pytest.approx(rows["finish_s"].max() - rows["arrival_s"].min())


def test_prompts_alone_stall_those_that_decode_and_not_those_that_join():
    requests = table([(0.0, 10, 40), (0.1, 200, 9), (0.1, 100, 9)])
    rows = simulate(requests, pool=1_600, step_cost=COST, prompts="alone", max_batched_tokens=256).requests
    one, other = COST.seconds(0, 0, 200), COST.seconds(0, 0, 100)
    # Both prompts are computed before the first request goes on; the last to join waits for nobody.
    assert rows["worst_gap_s"][0] == pytest.approx(one + other + COST.seconds(3, 10 + 3 + 200 + 100))
    assert rows["worst_gap_s"][1] == pytest.approx(other + COST.seconds(3, 313))
    assert rows["worst_gap_s"][2] == pytest.approx(COST.seconds(3, 313 + 8 * 3 + 1), rel=1e-3)
    assert rows["first_token_s"][2] - rows["first_token_s"][1] == pytest.approx(other)


def test_a_large_prompt_enters_an_empty_group_whatever_the_watermark():
    requests = table([(0.0, 10, 30), (0.1, 60, 3)])
    rows = simulate(requests, pool=64, step_cost=COST, block=4, admission=Watermark(0.2)).requests
    assert rows["admitted_s"][1] == rows["finish_s"][0]


def test_long_records_of_iterations_are_shortened_without_loss(monkeypatch):
    requests = crowd(3)
    options = {"pool": 200, "step_cost": COST, "block": 4}
    whole = simulate(requests, **options)
    monkeypatch.setattr(group, "PEAKS", 3)
    pd.testing.assert_frame_equal(simulate(requests, **options).requests, whole.requests)


def test_what_is_dropped_makes_room_at_once():
    # The first prompt fills 10 of 17 blocks and keeps 2 of them: the second enters in the next iteration.
    requests = table([(0.0, 40, 20), (0.0, 30, 5)])
    kept = Kept([8.0, 8.0], [8.0, 8.0])
    rows = simulate(requests, pool=68, block=4, step_cost=COST, kept=kept).requests
    assert rows["admitted_s"][1] == rows["first_token_s"][0]


def test_a_hand_worked_eviction():
    # Two blocks of 4: both prompts of 3 enter in iteration 1 (6 prompt tokens) and make a token. Iteration 2
    # fills both blocks. Iteration 3 needs two more: the second leaves, the first takes its block.
    requests = table([(0.0, 3, 4), (0.0, 3, 4)])
    result = simulate(requests, pool=8, step_cost=COST, block=4)
    first = COST.seconds(0, 0, 6)
    second = first + COST.seconds(2, 6, 0)
    third = second + COST.seconds(1, 4, 0)
    fourth = third + COST.seconds(1, 5, 0)
    # It comes back with 5 tokens, of which the first block is lost: all are computed, 4 of them again.
    fifth = fourth + COST.seconds(0, 0, 5)
    sixth = fifth + COST.seconds(1, 5, 0)
    rows = result.requests
    assert rows["preemptions"].tolist() == [0, 1]
    assert rows["recomputed_tokens"].tolist() == [0, 4]
    assert rows["finish_s"].tolist() == pytest.approx([fourth, sixth])
    assert rows["worst_gap_s"].tolist() == pytest.approx([second - first, fifth - second])
    assert result.steps == 6


def test_a_request_larger_than_the_pool_is_refused_by_name_and_the_rest_goes_on():
    requests = table([(0.0, 10, 10), (0.1, 2_000, 500), (0.2, 10, 10)])
    result = simulate(requests, pool=1_600, step_cost=COST)
    rows = result.requests
    assert rows["status"].tolist() == ["finished", "refused", "finished"]
    assert rows["reason"][1] == "2,000 + 500 tokens; the pool holds 1,600"
    assert rows.loc[1, ["admitted_s", "finish_s"]].isna().all()
    assert rows["preemptions"][1] == 0


def test_headroom_is_the_watermark_of_its_share():
    rng = np.random.default_rng(5)
    count = 300
    requests = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.3, count)),
            "input_tokens": rng.integers(10, 400, count),
            "output_tokens": rng.integers(1, 600, count),
        }
    )
    one = simulate(requests, pool=8_000, step_cost=COST, admission=Headroom(400))
    other = simulate(requests, pool=8_000, step_cost=COST, admission=Watermark(0.05))
    without = simulate(requests, pool=8_000, step_cost=COST)
    pd.testing.assert_frame_equal(one.requests, other.requests)
    assert one.preemptions < without.preemptions


def test_a_time_line_is_bounded_and_the_order_given_is_kept():
    rng = np.random.default_rng(1)
    requests = table(
        np.column_stack(
            [rng.uniform(0, 2_000, 6_000), rng.integers(1, 50, 6_000), rng.integers(1, 30, 6_000)]
        )
    )
    result = simulate(requests, pool=3_200, step_cost=COST)
    assert 1_000 < len(result.timeline) <= 4_096
    assert result.timeline["time_s"].is_monotonic_increasing
    pd.testing.assert_series_equal(result.requests["arrival_s"], requests["arrival_s"])
    assert (result.requests["first_token_s"] > requests["arrival_s"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_tokens": 0}, "requests row 0: output_tokens is 0.*expected a whole number >= 1"),
        ({"input_tokens": 1.5}, "requests row 0: input_tokens is 1.5"),
        ({"arrival_s": np.nan}, "requests row 0: arrival_s is nan"),
    ],
)
def test_a_row_that_cannot_be_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        simulate(table([(0.0, 3, 4)]).assign(**change), pool=160, step_cost=COST)


def test_limits_that_make_no_sense_are_refused():
    requests = table([(0.0, 3, 4)])
    with pytest.raises(ValueError, match="expected input_tokens among them"):
        simulate(requests.drop(columns="input_tokens"), pool=160, step_cost=COST)
    with pytest.raises(ValueError, match="at least one block"):
        simulate(requests, pool=15, step_cost=COST)
    with pytest.raises(ValueError, match="max_running is 300"):
        simulate(requests, pool=160, step_cost=COST, max_running=300, max_batched_tokens=256)
    with pytest.raises(ValueError, match=r"share is 1\.0"):
        Watermark(1.0)
    with pytest.raises(ValueError, match="tokens is -1"):
        Headroom(-1)


def test_nobody_to_serve():
    result = simulate(table([]), pool=160, step_cost=COST)
    assert (len(result.requests), result.seconds, result.steps) == (0, 0.0, 0)


def test_surviving_blocks_are_a_prefix_and_the_longest_unused_goes_first():
    free = FreeBlocks(10)
    free.take(10)
    free.give(4, 1, owner=7)  # four full blocks, one in part
    free.give(3, 0)
    free.take(1)  # the empty one
    free.take(2)  # two of the four, from their end
    assert free.count == 5
    assert free.revive(7) == 2
    assert free.revive(7) == 0
    assert free.count == 3
