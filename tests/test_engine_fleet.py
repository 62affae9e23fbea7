"""Several groups: each request goes where it is told, and a group knows nothing of the others."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvcache.engine import StepCost, Watermark, simulate
from kvcache.engine.fleet import by_shares, round_robin, simulate_groups

COST = StepCost(t0=0.03, per_sequence=1e-4, per_cached_token=4e-7, per_prefill_token=2e-4)


def busy(count=200):
    rng = np.random.default_rng(8)
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.1, count)),
            "input_tokens": rng.integers(1, 150, count),
            "output_tokens": rng.integers(1, 200, count),
            "class": rng.choice(["chat", "code"], count),
        },
        index=rng.permutation(count),
    )


def test_groups_are_simulations_of_their_own_requests():
    requests = busy()
    to = np.random.default_rng(1).integers(-1, 2, len(requests))
    groups = [
        {"pool": 1_600, "step_cost": COST},
        {"pool": 3_200, "step_cost": COST, "admission": Watermark(0.05)},
    ]
    fleet = simulate_groups(requests, groups, to)
    assert fleet.requests.index.equals(requests.index)
    assert fleet.requests["group"].tolist() == to.tolist()
    assert (fleet.requests["status"] == np.where(to < 0, "rejected", "finished")).all()
    for k, group in enumerate(groups):
        alone = simulate(requests[to == k], **group).requests
        pd.testing.assert_frame_equal(fleet.requests[to == k].drop(columns="group"), alone, check_dtype=False)
    done = fleet.requests["finish_s"].max() - requests["arrival_s"].min()
    assert fleet.seconds == pytest.approx(done)
    assert fleet.throughput == pytest.approx((to >= 0).sum() / done)
    assert fleet.preemptions == fleet.requests["preemptions"].sum() > 0


def test_in_turn_by_arrival():
    requests = pd.DataFrame({"arrival_s": [3.0, 1.0, 2.0, 0.0]})
    assert round_robin(requests, 3).tolist() == [0, 1, 2, 0]


def test_shares_are_kept_and_the_rest_is_rejected():
    requests = busy(20_000)
    to = by_shares(requests, {"chat": [0.5, 0.2], "code": [0.0, 1.0]}, np.random.default_rng(0))
    chat = to[(requests["class"] == "chat").to_numpy()]
    assert np.bincount(chat + 1) / chat.size == pytest.approx([0.3, 0.5, 0.2], abs=0.02)
    assert (to[(requests["class"] == "code").to_numpy()] == 1).all()
    same = by_shares(requests, [0.5, 0.5], np.random.default_rng(0))
    assert np.bincount(same) / same.size == pytest.approx([0.5, 0.5], abs=0.02)


def test_what_cannot_be_is_named():
    requests, rng = busy(3), np.random.default_rng(0)
    with pytest.raises(ValueError, match="expected a group from -1 to 0 per request"):
        simulate_groups(requests, [{"pool": 1_600, "step_cost": COST}], [0, 1, 0])
    with pytest.raises(ValueError, match="no shares for class"):
        by_shares(requests, {"other": [1.0]}, rng)
    with pytest.raises(ValueError, match="at most 1 in all"):
        by_shares(requests, [0.8, 0.8], rng)


def test_nobody_is_let_in():
    fleet = simulate_groups(busy(3), [{"pool": 1_600, "step_cost": COST}], [-1, -1, -1])
    assert (fleet.seconds, fleet.throughput, fleet.preemptions) == (0.0, 0.0, 0)
