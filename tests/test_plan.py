"""A plan from end to end, on a GPU described by hand so that no measured kernels are needed."""

import json

import numpy as np
import pandas as pd
import pytest

from kvcache import GPU, Model, PlanError, plan
from kvcache.engine import PoolPolicy
from kvcache.hardware import ParallelConfig

MODEL = Model("8B", 32, 32, 8, 128, 8_030_261_248, hidden_size=4096, vocabulary=128256, max_position=131072)
CARD = GPU("own", memory_bytes=48e9, flops=362e12, bandwidth=864e9)


def requests(n=20_000, rate=20.0, seed=0, long=0.0):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, n)),
            "input_tokens": 1 + np.minimum(rng.lognormal(5.5, 0.8, n), 4000).astype(int),
            "output_tokens": 1 + np.minimum(rng.lognormal(4.5, 0.7, n), 1000).astype(int),
        }
    )
    table["class"] = np.where(rng.random(n) < 0.5, "chat", "code")
    if long:
        table.loc[0, "input_tokens"] = int(long)
    return table


def made(table, **options):
    given = {"model": MODEL, "gpu": CARD, "gpus": 4, "parallel": [ParallelConfig(1), ParallelConfig(2)]}
    return plan(table, **{**given, "split": False, **options})


@pytest.fixture(scope="module")
def light():
    return made(requests(), rate=10.0)


@pytest.fixture(scope="module")
def heavy():
    return made(requests(), rate=200.0)


def test_all_is_served_where_there_is_room(light):
    assert light.meets
    assert light.predicted["rejected"] == 0
    assert light.predicted["capacity_per_s"] > 10
    row = light.replayed.loc["plan"]
    assert row["within_deadlines"] >= 0.95
    assert row["throughput"] == pytest.approx(light.predicted["requests_per_s"], rel=0.1)
    assert row["tpot_mean"] == pytest.approx(light.predicted["tpot"], rel=0.15)
    assert (light.groups["gpus"].sum()) <= 4
    assert np.allclose(light.routing[light.groups["label"]].sum(axis=1), 1)


def test_what_cannot_be_served_in_time_is_rejected(heavy):
    assert heavy.meets
    assert 0.1 < heavy.predicted["rejected"] < 1
    row, default = heavy.replayed.loc["plan"], heavy.replayed.loc["engine defaults"]
    assert row["within_deadlines"] >= 0.95
    assert row["goodput"] > 1.5 * default["goodput"]
    assert row["throughput"] == pytest.approx(heavy.predicted["requests_per_s"], rel=0.1)
    assert row["tpot_mean"] == pytest.approx(heavy.predicted["tpot"], rel=0.15)
    assert heavy.predicted["gpu_worth"] > 0


def test_one_line_per_group_with_every_assumption(heavy):
    lines = heavy.launch(port=9000)
    assert len(lines) == heavy.groups["groups"].sum()
    for at, line in enumerate(lines):
        assert line.endswith(f"--port {9000 + at}")
        for flag in (
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--gpu-memory-utilization 0.9",
            "--kv-cache-dtype auto",
            "--max-model-len",
            "--max-num-batched-tokens 2048",
            "--max-num-seqs 1024",
            "--enable-prefix-caching",
            "--watermark",
        ):
            assert flag in line


def test_json_is_plain(heavy, tmp_path):
    heavy.to_json(tmp_path / "plan.json")
    read = json.loads((tmp_path / "plan.json").read_text())
    assert read["groups"][0]["kv_tokens"] == heavy.groups["kv_tokens"].iloc[0]
    assert read["groups"][0]["provenance"]["steps"]["label"] == "modelled"
    policy = heavy.policies()[heavy.groups["label"].iloc[0]]
    policy.write(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text()) == read["groups"][0]["policy"]
    assert PoolPolicy.read(tmp_path / "policy.json").pool == heavy.groups["kv_tokens"].iloc[0]
    assert sum(len(g["launch"]) for g in read["groups"]) == len(heavy.launch())


def test_cheapest_groups_that_serve_all():
    found = made(requests(), rate=10.0, gpus=8, objective="cost")
    assert found.meets
    assert found.predicted["gpus"] < 8
    assert found.predicted["rejected"] == 0


def test_update_follows_the_load(light):
    more = light.update(requests(rate=30.0, seed=1))
    assert more.predicted["offered_per_s"] == pytest.approx(30, rel=0.05)
    assert any("requests/s" in change for change in more.changes)
    same = light.update(requests(rate=10.0))
    assert not any("groups" in change for change in same.changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpot": 0.001}, r"class 'chat': tpot is 1 ms, but an empty iteration .* takes \d+\.\d ms"),
        ({"ttft": 0.01}, r"class 'chat': ttft is 0.01 s, but a prompt of [\d,]+ tokens alone takes"),
        ({"gpus": 1, "parallel": [ParallelConfig(2)]}, "gpus is 1; one group of 8B needs 2"),
        ({"rate": 1000.0, "objective": "cost"}, r"need \d+ GPUs; 4 are given"),
        ({"deadlines": {"codes": (0.1, 5)}}, r"no class \['codes'\]; the classes are"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "max_num_seqs is 512; expected at most"),
        ({"share": 95}, "share is 95; expected within"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        made(requests(400), judge=False, **{"rate": 10.0, **options})


def test_a_class_that_fits_no_pool_is_refused():
    with pytest.raises(PlanError, match=r"class '\w+': its longest request has 13\d,\d+ tokens; 8B takes"):
        made(requests(400, long=135_000), judge=False)
    with pytest.raises(
        PlanError, match=r"its longest request has 12\d,\d+ tokens, the largest pool .* 50,000"
    ):
        pools = {"TP1xPP1": 20_000, "TP2xPP1": 50_000}
        made(requests(400, long=125_000), judge=False, kv_tokens=pools)


def test_one_instant_is_refused():
    table = requests(400).assign(arrival_s=5.0)
    with pytest.raises(ValueError, match="all 400 arrive at one instant"):
        made(table, judge=False)
    assert made(table, judge=False, rate=1.0).predicted["requests_per_s"] == pytest.approx(1.0)


def test_few_requests_warn():
    assert any("400 requests: too few" in note for note in made(requests(400), judge=False).warnings)
