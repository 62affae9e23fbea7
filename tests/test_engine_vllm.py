"""The simulation against committed runs of vLLM 0.32's own scheduler (how: `engine_cases`)."""

from __future__ import annotations

import pandas as pd
import pytest
from engine_cases import CASES, COST, TABLE, requests, summary

from kvcache.engine import Watermark, simulate

EXPECTED = pd.read_csv(TABLE, index_col="case")


@pytest.mark.parametrize("name", CASES)
def test_every_run_is_that_of_vllm(name):
    workload, group = CASES[name]
    rule = Watermark(group.get("watermark", 0.0))
    group = {key: value for key, value in group.items() if key != "watermark"}
    run = simulate(requests(*workload), step_cost=COST, admission=rule, **group)
    found = summary(name, run.requests, run.steps, run.seconds)
    for column, expected in EXPECTED.loc[name].items():
        assert found[column] == pytest.approx(expected, rel=1e-9, abs=1e-6), column


def test_the_cases_are_all_there_and_evict():
    assert list(EXPECTED.index) == list(CASES)
    assert (EXPECTED["preemptions"] > 0).sum() >= 7
    assert (EXPECTED["recomputed_tokens"] > 0).sum() >= 7
