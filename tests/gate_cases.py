"""Small workloads and states of a group on which admission rules are tried."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvcache.engine import StepCost
from kvcache.engine.admission import Running

COST = StepCost(t0=0.03, per_sequence=1e-4, per_cached_token=4e-7, per_prefill_token=2e-4)
COLUMNS = ["admitted_s", "first_token_s", "finish_s", "preemptions", "worst_gap_s", "recomputed_tokens"]


def table(rows):
    return pd.DataFrame(rows, columns=["arrival_s", "input_tokens", "output_tokens"])


def busy(seed, count=120, longest=200):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(0.15, count)),
            "input_tokens": rng.integers(1, 150, count),
            "output_tokens": rng.integers(1, longest + 1, count),
            "class": rng.choice(["chat", "code"], count),
        }
    )


def running(rows, inputs, generated, *, fresh=0, free=0, finished=()):
    arrays = (np.array(x, dtype=np.int64) for x in (rows, inputs, generated))
    return Running(*arrays, fresh, free, list(finished))


def same(one, other):
    assert one.steps == other.steps
    np.testing.assert_allclose(
        one.requests[COLUMNS].astype(float), other.requests[COLUMNS].astype(float), rtol=1e-9
    )
