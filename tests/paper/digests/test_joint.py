"""Joint digests: what is committed, how it is built, and the published numbers of the engine from them."""

import numpy as np
import pytest

from kvcache.engine import (
    Demand,
    JointLengths,
    StepCost,
    headroom,
    lundberg_exponent,
    preemptions_per_request,
    saturation,
)
from kvcache.paper.digests import digests_dir, load_digest
from kvcache.paper.digests import joint as joint_digests
from kvcache.paper.digests.__main__ import main
from kvcache.paper.digests.joint import JOINT, load_joint

#: A100-80GB, TP 4, a 70B model; the pool in tokens of 64 heads.
COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)


@pytest.mark.parametrize("name", JOINT)
def test_marginals_are_the_digest_and_halves_make_the_whole(name):
    joint = load_joint(name)
    for law, field in ((joint.output_lengths, "output"), (joint.input_lengths, "input")):
        digest = load_digest(name, field=field)
        np.testing.assert_array_equal(law.tokens, digest.tokens)
        np.testing.assert_array_equal(law.weights, digest.weights)
    assert joint.upper == load_digest(name).upper
    halves = [load_joint(name, half) for half in (0, 1)]
    assert halves[0].total - halves[1].total in (0, 1)
    whole = JointLengths.mix(halves)
    np.testing.assert_array_equal(whole.weights, joint.weights)
    np.testing.assert_array_equal(whole.inputs * 10**6 + whole.outputs, joint.inputs * 10**6 + joint.outputs)


def test_all_are_small_and_what_is_missing_is_named():
    assert sum(path.stat().st_size for path in (digests_dir() / "joint").iterdir()) < 250_000
    with pytest.raises(ValueError, match="'burstgpt': no joint digest; there are burstgpt-week1"):
        load_joint("burstgpt")
    with pytest.raises(ValueError, match="half: 2"):
        load_joint("sharegpt", 2)


def test_built_from_rows_in_order(tmp_path, monkeypatch):
    rows = [(100, 7), (50, 3), (100, 7), (50, 4), (100, 7), (9, 1)]
    lines = [f"2023-11-16 18:00:{i:02d}.0000000,{a},{b}" for i, (a, b) in enumerate(rows)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n"
    (tmp_path / "azure_2023_code.csv").write_text(text)
    committed = digests_dir()
    made = tmp_path / "digests"
    made.mkdir()
    (made / "azure-2023-code.parquet").write_bytes((committed / "azure-2023-code.parquet").read_bytes())
    for module in ("kvcache.paper.digests", "kvcache.paper.digests.build", "kvcache.paper.digests.joint"):
        monkeypatch.setattr(f"{module}.digests_dir", lambda: made)
    assert main(["build", "--raw", str(tmp_path), "azure-2023-code"]) == 0
    first = load_joint("azure-2023-code", 0)
    assert [first.inputs.tolist(), first.outputs.tolist(), first.weights.tolist()] == [[100], [7], [3]]
    content = joint_digests._joint_path("azure-2023-code").read_bytes()
    main(["build", "--raw", str(tmp_path), "azure-2023-code"])
    assert joint_digests._joint_path("azure-2023-code").read_bytes() == content


# ---- numbers measured on vLLM's scheduler in virtual time, and by the closed forms, elsewhere ----------


def workloads():
    week, code, conv = (load_joint(f"{n}") for n in ("burstgpt-week1", "azure-2023-code", "azure-2023-conv"))
    return {"W1": week, "W2": JointLengths.mix([week, code, conv], [1, 1, 1]).within(8192)}


@pytest.mark.parametrize(("name", "tokens"), [("W1", 330), ("W2", 179)])
def test_decay_of_the_published_workloads(name, tokens):
    assert 1 / lundberg_exponent(workloads()[name]) == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize(
    ("name", "u", "closed"),
    [
        ("W1", 0, 0.323),
        ("W1", 160, 0.199),
        ("W1", 320, 0.123),
        ("W1", 560, 0.059),
        ("W1", 800, 0.029),
        ("W2", 0, 0.122),
        ("W2", 160, 0.050),
        ("W2", 272, 0.027),
    ],
)
def test_preemptions_by_the_published_closed_form(name, u, closed):
    assert preemptions_per_request(workloads()[name], u) == pytest.approx(closed, rel=0.06)


@pytest.mark.parametrize(
    ("name", "pool", "measured", "share"),
    [
        ("W1", 56_000, 2.245, 0.0181),
        ("W1", 16_000, 1.208, 0.0116),
        ("W2", 56_000, 1.978, 0.0083),
        ("W2", 16_000, 1.211, 0.0010),
    ],
)
def test_throughput_of_the_scheduler_and_published_headroom(name, pool, measured, share):
    lengths = workloads()[name]
    assert saturation(Demand.of(lengths), COST, pool).throughput == pytest.approx(measured, rel=0.065)
    # The published u* is from half of the requests; a token of headroom is 1/16,000 here.
    assert headroom(lengths, pool, COST) / pool == pytest.approx(share, abs=0.0032)
