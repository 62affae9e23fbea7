"""The plug-in on vLLM's own server: a tiny Llama with dummy weights on the CPU, loaded by `vllm bench serve`.

`make engine-test` runs it, in `.venv-engine`. All stays on the loopback address; requests are few.
``ENGINE_TEST=small`` runs the comparison with the default and one broken policy only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvcache.engine import JointLengths, PoolPolicy, StepCost
from kvcache.paper.engine.driver import TINY_LLAMA
from kvcache.paper.project import project_root

ROOT = project_root()
PYTHON = Path(os.environ.get("ENGINE_PYTHON", ""))
pytestmark = [
    pytest.mark.skipif(not PYTHON.is_file(), reason="needs the engine environment: make engine engine-test"),
    pytest.mark.timeout(1800),
]
whole = pytest.mark.skipif(os.environ.get("ENGINE_TEST") == "small", reason="ENGINE_TEST=small")

BLOCK, BLOCKS = 32, 128
POOL = BLOCK * BLOCKS
# About what an iteration of that model takes on one core; only t0 and a matter to the headroom.
STEP = StepCost(5e-3, 1e-4, 1e-7, 1e-4)
START_S, BENCH_S = 300, 300


def lengths(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and outputs of n requests: geometric, so that many end early and some late."""
    rng = np.random.default_rng(7)
    return 16 + rng.geometric(1 / 24, n).clip(max=100), rng.geometric(1 / 60, n).clip(8, 400)


def law() -> JointLengths:
    return JointLengths.from_samples(*lengths(20_000))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with the configuration of a tiny Llama and a tokenizer of 512 words."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "max_position_embeddings": 1024}))
    words = {f"t{i}": i for i in range(TINY_LLAMA["vocab_size"])}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
            }
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"})
    )
    return folder


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Path:
    """The same 200 requests for every server."""
    path = tmp_path_factory.mktemp("load") / "requests.jsonl"
    rng = np.random.default_rng(8)
    with path.open("w") as out:
        for prompt, output in zip(*lengths(200), strict=True):
            text = " ".join(f"t{i}" for i in rng.integers(3, 512, prompt))
            out.write(json.dumps({"prompt": text, "output_tokens": int(output)}) + "\n")
    return path


@pytest.fixture
def policy(tmp_path) -> Path:
    path = tmp_path / "policy.json"
    PoolPolicy.of({"chat": law()}, POOL, STEP, block=BLOCK).write(path)
    return path


class Server:
    """A running server and what it wrote."""

    def __init__(self, model: Path, port: int, log: Path, process: subprocess.Popen) -> None:
        self.model, self.port, self.log, self.process = model, port, log, process

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=10) as answer:
            return answer.read().decode()

    def healthy(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True

    def metric(self, name: str) -> int:
        return int(sum(float(x) for x in re.findall(rf"^{name}{{.*}} (\S+)$", self.get("/metrics"), re.M)))

    def said(self) -> list[str]:
        """The plug-in's own lines."""
        return re.findall(r"\] (kvcache: .*)", self.log.read_text())

    def bench(self, load: Path, prefix: str = "chat/", requests: int = 200) -> dict:
        """What `vllm bench serve` measured with these requests, all sent at once."""
        result = self.log.with_suffix(".json")
        result.unlink(missing_ok=True)
        command = [
            *(PYTHON, "-m", "kvcache.paper.engine.cli", "bench", "serve", "--base-url", self.address),
            *("--model", self.model, "--endpoint", "/v1/completions", "--backend", "openai"),
            *("--dataset-name", "custom", "--dataset-path", load, "--custom-output-len", "-1"),
            *("--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--disable-tqdm"),
            *("--num-prompts", requests, "--request-id-prefix", prefix, "--seed", "0"),
            *("--save-result", "--result-dir", result.parent, "--result-filename", result.name),
        ]
        done = subprocess.run(
            [str(word) for word in command],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=BENCH_S,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(result.read_text())

    def end(self, how: signal.Signals) -> None:
        """End the server and its engine; they are one process group."""
        for sign in (how, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
            if how == signal.SIGKILL:
                return


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "KVCACHE_POLICY"}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **(extra or {}),
    }


@contextmanager
def serving(model: Path, log: Path, *flags: object, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "kvcache.paper.engine.cli", "serve", model, "--load-format", "dummy"),
        *("--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", port),
        *("--max-model-len", 1024, "--block-size", BLOCK, "--num-gpu-blocks-override", BLOCKS + 1),
        *("--max-num-seqs", 128, "--max-num-batched-tokens", 1024),
        *("--distributed-executor-backend", "uni", *flags),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(word) for word in command],
            env=environment(env),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(model, port, log, process)
    try:
        deadline = time.monotonic() + START_S
        while not server.healthy():
            assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"no answer in {START_S} s:\n{log.read_text()[-4000:]}"
            time.sleep(0.5)
        yield server
    finally:
        server.end(signal.SIGTERM)


def report(name: str, server: Server, result: dict) -> int:
    preemptions = server.metric("vllm:num_preemptions_total")
    print(
        f"\n{name}: {result['completed']} completed, {preemptions} preemptions, "
        f"{result['output_throughput']:.0f} tokens/s, p99 TTFT {result['p99_ttft_ms']:.0f} ms, "
        f"p99 of gaps {result['p99_itl_ms']:.0f} ms",
        *server.said(),
        sep="\n  ",
        file=sys.stderr,
    )
    return preemptions


PLUG_IN = ("--scheduler-cls", "kvcache.vllm.PooledScheduler")


def test_the_plug_in_preempts_less_than_the_default(model, load, policy, tmp_path):
    told = PoolPolicy.read(policy)
    assert 0 < told.headroom < POOL / 4
    with serving(model, tmp_path / "default.log") as server:
        default = report("default", server, (base := server.bench(load)))
    cases = {"plug-in": (PLUG_IN, {"KVCACHE_POLICY": str(policy)})}
    if os.environ.get("ENGINE_TEST") != "small":
        share = f"{told.headroom / POOL:.4f}"
        cases = {f"watermark {share}": (("--watermark", share), {}), **cases}
    assert base["completed"] == 200
    assert default >= 20
    for name, (flags, env) in cases.items():
        with serving(model, tmp_path / f"{name}.log", *flags, env=env) as server:
            preemptions = report(name, server, (result := server.bench(load)))
            if name == "plug-in":
                assert any("rule bursts" in line for line in server.said())
                assert not any("unknown" in line for line in server.said())
        assert result["completed"] == 200
        assert result["total_output_tokens"] == base["total_output_tokens"]
        assert preemptions < default / 2


def broken(tmp_path: Path, policy: Path) -> Path:
    path = tmp_path / "broken.json"
    path.write_text(policy.read_text()[:200])
    return path


def test_a_broken_policy_is_said_and_requests_are_served(model, load, policy, tmp_path):
    path = broken(tmp_path, policy)
    with serving(model, tmp_path / "broken.log", *PLUG_IN, env={"KVCACHE_POLICY": str(path)}) as server:
        result = server.bench(load, requests=40)
        report("broken policy", server, result)
        assert result["completed"] == 40
        (line,) = server.said()
        assert f"no policy: {path}: not JSON" in line
        assert "admitting as vLLM does" in line


@whole
def test_killed_and_started_again_without_its_policy(model, load, policy, tmp_path):
    with serving(model, tmp_path / "killed.log", *PLUG_IN, env={"KVCACHE_POLICY": str(policy)}) as server:
        assert server.bench(load, requests=20)["completed"] == 20
        server.end(signal.SIGKILL)
        assert not server.healthy()
    policy.rename(tmp_path / "gone.json")
    with serving(model, tmp_path / "again.log", *PLUG_IN, env={"KVCACHE_POLICY": str(policy)}) as server:
        result = server.bench(load, requests=40)
        report("started again, policy missing", server, result)
        assert result["completed"] == 40
        (line,) = server.said()
        assert "No such file" in line
        assert str(policy) in line


@whole
def test_a_policy_of_another_pool_and_an_unknown_class(model, load, tmp_path):
    path = tmp_path / "policy.json"
    PoolPolicy.of({"chat": law()}, 2 * POOL, STEP, block=BLOCK).write(path)
    extra = json.dumps({"kvcache_policy": str(path)})
    with serving(model, tmp_path / "pool.log", *PLUG_IN, "--additional-config", extra) as server:
        result = server.bench(load, prefix="code/", requests=40)
        report("policy of another pool, unknown class", server, result)
        assert result["completed"] == 40
        lines = server.said()
        assert sum("was made for a pool of" in line for line in lines) == 1
        assert sum("unknown to the policy" in line for line in lines) == 1
