"""What an operator starts, against hand-worked cases and the constraint that it must respect."""

import numpy as np
import pandas as pd
import pytest

from kvcache import Costs, LengthDistribution, Policy, Problem, RequestClass, ServingConfig, solve
from kvcache.deployment import group_table, launch_arguments, routing_table
from kvcache.paper import builders


@pytest.fixture
def small():
    """Two classes on one TP2 and two TP4xPP2 groups; 10 s per request, whatever its length."""
    output = LengthDistribution([100], [1.0], 1000)
    classes = tuple(
        RequestClass(name, rate, 200.0, prefix, 60.0, output)
        for name, rate, prefix in (("chat", 2.0, 100.0), ("code", 1.0, 0.0))
    )
    configs = (
        ServingConfig("TP2xPP1", 2, 10_000.0, 0.0, 0.1),
        ServingConfig("TP4xPP2", 8, 50_000.0, 0.0, 0.1),
        ServingConfig("TP8xPP1", 8, 60_000.0, 0.0, 0.1),
    )
    problem = Problem(classes, configs, 32, Costs())
    routing = [[0.25, 0.75, 0.0], [0.0, 0.8, 0.0]]
    prefix = [[False, True, False], [False, False, False]]
    return problem, Policy.of(problem, [1, 2, 0], [300.0, 800.0], routing, prefix)


def test_groups_by_hand(small):
    table = group_table(*small).set_index("config")
    assert list(table.index) == ["TP2xPP1", "TP4xPP2"]
    assert table["gpus"].tolist() == [2, 16]
    # TP2: 2/s x 0.25 x 10 s = 5 requests of 200 + 300 tokens
    assert table.loc["TP2xPP1", ["running", "mean_reservation", "max_running"]].tolist() == [5, 500, 20]
    # TP4xPP2, per group: 2 x 0.75 x 10 / 2 = 7.5 of 500 - 100 tokens, and 1 x 0.8 x 10 / 2 = 4 of 1,000
    mean = (7.5 * 400 + 4 * 1000) / 11.5
    assert table.loc["TP4xPP2", "mean_reservation"] == pytest.approx(mean)
    assert table.loc["TP4xPP2", "max_running"] == int((50_000 - 100) / mean)
    assert table["utilisation"].tolist() == pytest.approx([0.25, (11.5 * mean + 100) / 50_000])
    assert table["caches_prefixes"].tolist() == [False, True]


def test_routing_adds_up(small):
    table = routing_table(*small).set_index("class")
    assert list(table.columns) == ["reservation", "rejected", "TP2xPP1", "TP4xPP2"]
    assert table.loc["code", "rejected"] == pytest.approx(0.2)
    np.testing.assert_allclose(table.drop(columns="reservation").sum(axis=1), 1.0)


def test_arguments(small):
    groups = group_table(*small)
    vllm, sglang = (launch_arguments(groups, engine) for engine in ("vllm", "sglang"))
    limit = groups.set_index("config").loc["TP4xPP2", "max_running"]
    assert vllm["TP4xPP2"] == (
        f"--tensor-parallel-size 4 --pipeline-parallel-size 2 --max-num-seqs {limit} --enable-prefix-caching"
    )
    assert vllm["TP2xPP1"].endswith("--max-num-seqs 20")
    assert sglang == {
        "TP2xPP1": "--tp-size 2 --pp-size 1 --max-running-requests 20",
        "TP4xPP2": f"--tp-size 4 --pp-size 2 --max-running-requests {limit}",
    }


def test_what_cannot_be_told_is_refused(small):
    groups = group_table(*small)
    with pytest.raises(ValueError, match="engine is 'tgi'; expected one of"):
        launch_arguments(groups, "tgi")
    with pytest.raises(ValueError, match="configuration 'big'; expected a name such as TP4xPP2"):
        launch_arguments(groups.replace("TP4xPP2", "big"), "vllm")


@pytest.mark.parametrize("load", [0.3, 0.9, 2.0])
def test_an_optimal_policy_has_room_for_what_it_runs(load):
    """(6e) with its head room: the limit is never below the mean number in service."""
    problem = builders.paper(load=load)
    table = group_table(problem, solve(problem, gap=1e-3).policy)
    assert (table["max_running"] >= np.floor((1 + problem.headroom) * table["running"] - 1e-6)).all()
    assert isinstance(table, pd.DataFrame)
