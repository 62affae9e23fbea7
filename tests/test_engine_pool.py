"""The pool's policy as a file, and the plug-in on a scheduler that only looks like vLLM's."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache import vllm
from kvcache.engine import JointLengths, PoolPolicy, StepCost, headroom, lundberg_exponent

COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
POOL = 16_000
RNG = np.random.default_rng(0)
CHAT = JointLengths.from_samples(RNG.integers(100, 900, 2000), RNG.geometric(1 / 250, 2000).clip(1, 1500))
CODE = JointLengths.from_samples(RNG.integers(500, 4000, 1000), RNG.integers(1, 60, 1000))


def policy(**changed) -> PoolPolicy:
    options = {"rates": {"chat": 3.0, "code": 1.0}, "priorities": {2: "code"}, **changed}
    return PoolPolicy.of({"chat": CHAT, "code": CODE}, POOL, COST, **options)


def test_headroom_and_theta_are_those_of_the_mixture():
    made, mixed = policy(), JointLengths.mix([CHAT, CODE], [3, 1])
    assert made.headroom == headroom(mixed, POOL, COST) > 0
    assert made.theta == lundberg_exponent(mixed)
    assert made.shares == (0.75, 0.25)
    assert made.pooled.mean == pytest.approx(0.75 * CHAT.mean_output + 0.25 * CODE.mean_output)
    by_counts = PoolPolicy.of({"chat": CHAT, "code": CODE}, POOL, COST)
    assert by_counts.shares == pytest.approx((2 / 3, 1 / 3))


def test_where_nothing_overflows_the_headroom_is_the_rule():
    short = JointLengths.from_samples([100, 110], [1, 1])
    made = PoolPolicy.of({"all": short}, POOL, COST, block=128)
    assert (made.headroom, made.rule, made.theta) == (0, "headroom", 0)


def test_a_written_policy_reads_the_same(tmp_path):
    made, path = policy(), tmp_path / "policy.json"
    made.write(path)
    read = PoolPolicy.read(path)
    assert read.to_dict() == made.to_dict()
    assert read.priorities == {2: "code"}
    assert read.classes["code"] == made.classes["code"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(kvcache_pool_policy=9), "kvcache_pool_policy is 9; expected 1"),
        (lambda d: d.pop("theta"), "theta missing"),
        (lambda d: d["classes"][1].pop("weights"), r"classes\[1\].weights missing"),
        (lambda d: d.update(theta=0), "theta is 0"),
        (lambda d: d.update(headroom=99_999), r"headroom is 99999 tokens; expected within \[0, 16000\)"),
        (lambda d: d.update(rule="hope"), "rule is 'hope'"),
        (lambda d: d.update(classes=[]), "no classes"),
        (lambda d: d.update(classes=[7]), "policy.json"),
        (lambda d: d.update(priorities={"1": "art"}), "priority 1 is class 'art'"),
        (lambda d: d["classes"][0].update(share=0), "shares are"),
        (lambda d: d.update(block=0), "blocks of 0"),
        (lambda d: d.update(pool="many"), "policy.json"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, change, message):
    path = tmp_path / "policy.json"
    data = policy().to_dict()
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        PoolPolicy.read(path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"policy.json: not JSON"):
        PoolPolicy.read(path)


@pytest.mark.parametrize(
    ("request_id", "name"),
    [("chat/7", "chat"), ("cmpl-chat/7-0", "chat"), ("chatcmpl-code/a/b", "code"), ("cmpl-77", None)],
)
def test_a_class_is_what_an_id_begins_with(request_id, name):
    assert vllm.class_name(request_id) == name


def test_importing_the_plug_in_loads_no_engine():
    code = "import sys, kvcache.vllm; print(any(m == 'vllm' or m.startswith('torch') for m in sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


class Base:
    """What the plug-in sees of vLLM's scheduler."""

    def __init__(self, blocks: int, block: int, extra: dict) -> None:
        self.cache_config = SimpleNamespace(num_gpu_blocks=blocks + 1)
        self.vllm_config = SimpleNamespace(additional_config=extra)
        self.block_size, self.running, self.asked = block, [], []
        self.kv_cache_manager = SimpleNamespace(watermark_blocks=0, allocate_slots=self.allocate)

    def allocate(self, request, tokens, **kwargs):
        self.asked.append(request)
        return "blocks"


Plugged = type("Plugged", (vllm._Pooled, Base), {})


def request(name="chat/1", status="WAITING", prompt=500, age=0, priority=0):
    return SimpleNamespace(
        request_id=name,
        status=SimpleNamespace(name=status),
        num_prompt_tokens=prompt,
        num_output_tokens=age,
        priority=priority,
    )


def plugged(tmp_path, made: PoolPolicy, blocks: int = POOL // 16) -> Base:
    path = tmp_path / "policy.json"
    made.write(path)
    return Plugged(blocks, 16, {"kvcache_policy": str(path)})


def test_newcomers_are_refused_when_the_rule_says_so_and_only_they(tmp_path):
    engine = plugged(tmp_path, made := policy())
    allocate = engine.kv_cache_manager.allocate_slots
    assert allocate(request(prompt=15_900), 1) == "blocks"  # nothing runs: never refused
    answers, rule = [], made.burst_rule()
    for k in range(40):
        answer = allocate(newcomer := request(f"chat/{k}"), 500)
        prompts, zeros = [500] * (len(engine.running) + 1), [0] * (len(engine.running) + 1)
        admitted = not engine.running or rule.admits(prompts, zeros, zeros)
        assert (answer == "blocks") == admitted
        answers.append(admitted)
        if admitted:
            engine.running.append(newcomer)
    assert 5 < sum(answers) < 40
    assert allocate(request(status="PREEMPTED"), 1) is None
    assert allocate(request(status="RUNNING"), 1) == "blocks"


def test_the_headroom_is_a_watermark_in_whole_blocks(tmp_path):
    engine = plugged(tmp_path, policy(rule="headroom"))
    assert engine.kv_cache_manager.watermark_blocks == -(-policy().headroom // 16)
    assert engine.kv_cache_manager.allocate_slots(request(), 1) == "blocks"


def test_classes_by_id_then_priority_else_the_law_of_all_with_one_warning(tmp_path, caplog):
    engine = plugged(tmp_path, policy())
    kinds = [
        engine._kind(request(name, priority=priority))
        for name, priority in (("cmpl-code/1-0", 0), ("x", 2), ("x", 0), ("art/1", 0), ("art/2", 0))
    ]
    assert kinds == [1, 1, 2, 2, 2]
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "class 'art', unknown to the policy (chat, code)" in warnings[0].getMessage()


@pytest.mark.parametrize("trouble", ["missing", "broken", "binary", "too small", "unset"])
def test_without_a_policy_the_engine_is_vllm_after_one_warning(tmp_path, caplog, monkeypatch, trouble):
    monkeypatch.delenv(vllm.POLICY, raising=False)
    path = tmp_path / "policy.json"
    policy().write(path)
    blocks = POOL // 16
    if trouble == "missing":
        path.unlink()
    elif trouble == "broken":
        path.write_text(path.read_text()[:300])
    elif trouble == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif trouble == "too small":
        blocks = int(policy().headroom / 16)
    engine = Plugged(blocks, 16, {} if trouble == "unset" else {"kvcache_policy": str(path)})
    engine.running = [request()] * 500
    assert engine.kv_cache_manager.allocate_slots(request(), 1) == "blocks"
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "no policy" in record.getMessage()
    assert "admitting as vLLM does" in record.getMessage()


def test_another_pool_is_said_and_its_own_size_counts(tmp_path, caplog, monkeypatch):
    engine = plugged(tmp_path, policy(), blocks=4 * POOL // 16)
    assert engine._rule.pool == 4 * POOL
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "made for a pool of 16000 tokens, the engine has 64000" in record.getMessage()
    monkeypatch.setenv(vllm.POLICY, str(tmp_path / "policy.json"))
    assert Plugged(POOL // 16, 16, {})._rule.pool == POOL
