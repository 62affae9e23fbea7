import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from kvcache import groups, kernels, models
from kvcache.groups import bundle, group, parallel_choices, read_kv_tokens, second_opinion
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.kernels import bundled, carried_gpu, carried_gpus
from kvcache.models import carried_models

needs_kernels = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)
LLAMA_8B = Model(
    "8B", 32, 32, 8, 128, 8_030_261_248, hidden_size=4096, vocabulary=128256, max_position=131072
)
RTX_3090 = GPU("RTX 3090", memory_bytes=24 * 2**30, flops=71e12, bandwidth=936e9)


@needs_kernels
@pytest.mark.parametrize(
    ("model", "gpu", "tensor", "steps_ms", "prefill_ms"),
    [
        # as the library's facade gives them: decode at 1,024 tokens, batch 1, 32, 128; a 2,048-token prompt
        ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 4, (14.9, 16.9, 22.8), 130),
        ("meta-llama/Meta-Llama-3.1-70B", "a100_sxm", 4, (27.2, 33.1, 45.9), 337),
        ("meta-llama/Meta-Llama-3.1-8B", "h100_sxm", 1, (6.2, 8.3, 12.8), 44),
        ("Qwen/Qwen3-32B", "h200_sxm", 2, (10.7, 12.4, 17.3), 103),
        ("meta-llama/Meta-Llama-3.1-70B", "b200_sxm", 2, (14.4, 15.5, 21.8), 113),
    ],
)
def test_steps_are_the_kernels(model, gpu, tensor, steps_ms, prefill_ms):
    found = group(model, gpu, parallel=ParallelConfig(tensor))
    batch = np.array([1, 32, 128])
    assert 1e3 * found.table.seconds(batch, batch * 1024) == pytest.approx(steps_ms, rel=0.01)
    whole = group(model, gpu, parallel=ParallelConfig(tensor), prompt_tokens=2048)
    assert 1e3 * whole.table.seconds(0, 0, 2048) == pytest.approx(prefill_ms, rel=0.015)
    assert found.provenance["steps"].label == "calibrated"
    assert "0.12.0" in found.provenance["steps"].source
    assert found.cost_error.median < 0.08
    near = found.refit(64, 1024)
    assert near.cost_error.largest < found.cost_error.largest
    assert near.cost.seconds(64, 64 * 1024, 256) == pytest.approx(
        found.table.seconds(64, 64 * 1024, 256), rel=0.15
    )


@needs_kernels
def test_two_stages_hold_twice_as_many_requests_a_token_time():
    one = group("Qwen/Qwen3-32B", "h200_sxm", parallel=ParallelConfig(2))
    two = group("Qwen/Qwen3-32B", "h200_sxm", parallel=ParallelConfig(2, 2))
    assert two.gpus == 4
    for batch, context, prompt in ((32, 1024, 0), (64, 512, 512)):
        alone = one.table.seconds(batch, batch * context, prompt)
        piped = two.table.seconds(2 * batch, 2 * batch * context, 2 * prompt)
        assert piped == pytest.approx(alone, rel=0.1)


@needs_kernels
def test_a_model_of_the_same_shapes_has_the_same_steps(tmp_path):
    named = group("meta-llama/Meta-Llama-3.1-8B", "h100_sxm")
    config = json.loads(carried_models()["meta-llama/Meta-Llama-3.1-8B"].read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["MistralForCausalLM"]}))
    for same in (LLAMA_8B, tmp_path):
        assert group(same, "h100_sxm").table.measured == pytest.approx(named.table.measured, rel=1e-9)


@needs_kernels
def test_gpus_and_models_without_kernels_are_refused():
    with pytest.raises(ValueError, match=r"l4 for vllm: no measured kernels.*carried_gpu\('l4'\)"):
        group(LLAMA_8B, "l4")
    with pytest.raises(KeyError, match=r"measured kernels exist for .*h100_sxm"):
        group(LLAMA_8B, "h100")
    hybrid = replace(LLAMA_8B, state_bytes=1e6)
    with pytest.raises(ValueError, match="no config to find them by"):
        group(hybrid, "h100_sxm")
    assert group(hybrid, carried_gpu("l4")).provenance["steps"].label == "modelled"


@needs_kernels
@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_other_engines(engine):
    found = group("Qwen/Qwen3-32B", "h200_sxm", engine, ParallelConfig(2))
    assert 10 < 1e3 * found.table.seconds(32, 32 * 1024) < 15
    assert found.provenance["steps"].source.count(engine) == 1


@needs_kernels
def test_experts_spread_or_split():
    for expert in (1, 4):
        found = group("Qwen/Qwen3-30B-A3B", "h100_sxm", parallel=ParallelConfig(4, 1, expert))
        # a mixture's step grows with the batch as more experts are read
        few, many = found.table.seconds(np.array([1, 64]), np.array([1024, 64 * 1024]))
        assert many > 1.5 * few


# Start-up logs: vllm#21348 (vLLM and SGLang on the same GPUs), an RTX 3090, Qwen3-32B on two H100.
@pytest.mark.parametrize(
    ("model", "gpu", "tensor", "engine", "utilisation", "logged", "off"),
    [
        (Model("32B", 64, 64, 8, 128, 32_762_123_264), None, 2, "vllm", 0.95, 342_999, -0.003),
        (
            Model("235B-FP8", 94, 64, 4, 128, 235_093_634_560, 1.006, experts=128, experts_per_token=8),
            None,
            4,
            "vllm",
            0.9,
            178_880,
            0.42,
        ),
        (
            Model("235B-FP8", 94, 64, 4, 128, 235_093_634_560, 1.006, experts=128, experts_per_token=8),
            None,
            4,
            "sglang",
            0.93,
            367_404,
            0.006,
        ),
        (LLAMA_8B, RTX_3090, 1, "vllm", 0.9, 31_232, -0.24),
    ],
)
def test_the_interval_holds_what_engines_logged(model, gpu, tensor, engine, utilisation, logged, off):
    gpu = gpu or GPU("H100", memory_bytes=80 * 2**30, flops=989e12, bandwidth=3.35e12)
    found = group(model, gpu, engine, ParallelConfig(tensor), memory_utilisation=utilisation)
    assert found.kv_tokens_low < logged < found.kv_tokens_high
    assert found.kv_tokens / logged - 1 == pytest.approx(off, abs=0.005)
    assert found.provenance["kv_tokens"].label == "modelled"
    told = group(
        model, gpu, engine, ParallelConfig(tensor), kv_tokens=f"GPU KV cache size: {logged:,} tokens\n"
    )
    assert told.kv_tokens == told.kv_tokens_low == told.kv_tokens_high == logged
    assert told.provenance["kv_tokens"].label == "measured"


def test_a_benchmark_scales_the_steps():
    plain = group(LLAMA_8B, RTX_3090)
    rows = pd.DataFrame({"batch": [1, 1, 32], "context": [100, 500, 100]})
    known = np.array(plain.table.seconds(rows.batch, rows.batch * rows.context))
    told = group(LLAMA_8B, RTX_3090, steps=rows.assign(seconds=known * [1.2, 1.2, 2.0]))
    assert told.provenance["steps"].label == "measured"
    assert told.table.seconds(1, 300) == pytest.approx(1.2 * plain.table.seconds(1, 300))
    assert told.table.seconds(32, 9000, 64) == pytest.approx(2 * plain.table.seconds(32, 9000, 64))
    mixed = pd.DataFrame({"batch": [32, 32], "context": 100, "prefill": [0, 512]})
    alone, both = plain.table.seconds(32, 3200, [0, 512])
    told = group(LLAMA_8B, RTX_3090, steps=mixed.assign(seconds=[1.1 * alone, 1.1 * alone + 2 * both]))
    assert told.table.seconds(32, 3200) == pytest.approx(1.1 * alone)
    assert told.table.seconds(32, 3200, 512) == pytest.approx(1.1 * alone + 2 * both)
    with pytest.raises(ValueError, match="columns seconds missing"):
        group(LLAMA_8B, RTX_3090, steps=rows)
    with pytest.raises(ValueError, match="steps row 2"):
        group(LLAMA_8B, RTX_3090, steps=rows.assign(seconds=[1, 1, np.nan]))


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("INFO [kv_cache_utils.py:634] GPU KV cache size: 178,880 tokens", 178_880),
        ("# GPU blocks: 1952, # CPU blocks: 2048", 31_232),
        ("max_total_num_tokens=367404, chunked_prefill_size=8192", 367_404),
        ("KV Cache is allocated. #tokens: 367404, K size: 8.23 GB", 367_404),
        ("Allocated 10.00 GiB for max tokens in paged KV cache (81920).", 81_920),
    ],
)
def test_start_up_lines(line, tokens, tmp_path):
    assert read_kv_tokens(line) == tokens
    log = tmp_path / "log"
    log.write_text(f"first\n{line}\nlast\n")
    assert read_kv_tokens(log) == read_kv_tokens(str(log)) == tokens


def test_the_least_of_several_ranks_and_no_line_at_all():
    assert read_kv_tokens("GPU KV cache size: 900 tokens\nGPU KV cache size: 800 tokens") == 800
    with pytest.raises(ValueError, match="no line of a pool"):
        read_kv_tokens("Uvicorn running")


def test_what_an_engine_would_refuse():
    def check(message, parallel=ParallelConfig(1), model=LLAMA_8B, **options):  # noqa: B008 - frozen
        with pytest.raises(ValueError, match=message):
            group(model, RTX_3090, parallel=parallel, **options)

    for share in (90, 1.2, 0, -0.5, float("nan")):
        check("share within", memory_utilisation=share)
    check("32 heads; expected a multiple of TP = 3", ParallelConfig(3))
    check("expected at least PP = 33", ParallelConfig(1, 33))
    check("0 experts", ParallelConfig(2, 1, 2))
    check("leaves nothing for the KV cache", memory_utilisation=0.7)
    check("max_num_seqs is 0", max_num_seqs=0)
    check("max_num_seqs is 1.5", max_num_seqs=1.5)
    check("expected at most 131072", max_model_len=200_000)
    check("engine is 'tgi'", engine="tgi")
    check("kv_tokens is 0", kv_tokens=0)
    check("cache_dtype is 'int2'", cache_dtype="int2")


def test_each_engine_shares_the_memory_in_its_own_way():
    gpu = GPU("toy", memory_bytes=100e9, flops=1e15, bandwidth=1e12)
    weights, token = LLAMA_8B.weight_bytes, LLAMA_8B.kv_bytes_per_token
    left = {
        "vllm": 0.5 * 100e9 - weights - 4e9,
        "sglang": 0.5 * 100e9 - weights - 3e9,
        "trtllm": 0.5 * (100e9 - weights - 4e9),
    }
    for engine, room in left.items():
        found = group(LLAMA_8B, gpu, engine, memory_utilisation=0.5)
        assert found.kv_tokens == room // token // 16 * 16


def test_an_eight_bit_cache_holds_twice_as_many():
    plain, eight = (group(LLAMA_8B, RTX_3090, cache_dtype=kind) for kind in ("auto", "fp8"))
    assert eight.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=32)


def test_choices_split_heads_fit_the_memory_and_the_budget():
    found = parallel_choices(LLAMA_8B, RTX_3090, max_gpus=4)
    assert [(p.tensor, p.pipeline) for p in found] == [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4)]
    odd = Model("28 heads", 28, 28, 4, 128, 7.6e9)
    assert max(p.tensor for p in parallel_choices(odd, RTX_3090, max_gpus=8)) == 4
    with pytest.raises(ValueError, match="no split of big over 2 x RTX 3090"):
        parallel_choices(Model("big", 80, 64, 8, 128, 70e9), RTX_3090, max_gpus=2)


@pytest.fixture
def without_the_extra(monkeypatch):
    for module in (kernels, groups, models):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    carried_gpus.cache_clear()
    yield
    carried_gpus.cache_clear()


def test_without_the_extra_there_are_coarse_tables(without_the_extra):
    found = group("Qwen/Qwen3-32B", "h200_sxm", parallel=ParallelConfig(2))
    assert found.model.parameters == 32_762_123_264
    assert found.provenance["steps"].label == "calibrated"
    assert found.provenance["steps"].source.endswith("coarse table of the package")
    assert 1e3 * found.table.seconds(32, 32 * 1024) == pytest.approx(12.4, rel=0.03)
    staged = group("Qwen/Qwen3-32B", "h200_sxm", parallel=ParallelConfig(2, 2))
    assert staged.table.seconds(64, 64 * 1024) == pytest.approx(found.table.seconds(32, 32 * 1024), rel=0.05)
    latent = group("deepseek-ai/DeepSeek-R1", "h200_sxm", parallel=ParallelConfig(8, 1, 8))
    assert latent.model.kv_bytes_per_token == 61 * 576 * 2
    assert group(LLAMA_8B, RTX_3090).provenance["steps"].label == "modelled"


def test_without_the_extra_the_message_says_what_to_do(without_the_extra):
    for model, gpu in ((LLAMA_8B, "gb300"), (LLAMA_8B, "h100_sxm"), ("Qwen/Qwen3-32B", "b300_sxm")):
        with pytest.raises(ModuleNotFoundError, match=r"kvcache\[hardware\].*Qwen3-32B.*own"):
            group(model, gpu)


@needs_kernels
def test_coarse_tables_are_the_kernels():
    """The committed file is what the installed kernels give, and near them between its points."""
    rows = {tuple(row["of"]): row for row in bundled()["tables"]}
    assert len(rows) == len(bundled()["tables"]) > 50
    of = ("Qwen/Qwen3-32B", "h200_sxm", "vllm", 2, 1)
    exact = group(of[0], of[1], parallel=ParallelConfig(2), memory_utilisation=0.95, max_num_seqs=512).table
    axes = [np.array(axis) for axis in rows[of]["axes"]]
    kept = np.reshape(rows[of]["us"], [axis.size for axis in axes]) / 1e6
    grid = np.meshgrid(*axes, indexing="ij")
    assert kept == pytest.approx(exact.seconds(*grid), rel=1e-3)
    assert all(
        bundled()["gpus"][name] == {k: carried_gpus()[name]["gpu"][k] for k in sheet}
        for name, sheet in bundled()["gpus"].items()
    )
    coarse = replace(exact, decoding=axes[0], cached_tokens=axes[1], prefill_tokens=axes[2], measured=kept)
    batch, context, prompt = np.meshgrid([4, 24, 100, 200], [500, 1500, 6000], [0, 256, 1500], indexing="ij")
    error = np.abs(
        coarse.seconds(batch, batch * context, prompt) / exact.seconds(batch, batch * context, prompt) - 1
    )
    assert np.median(error) < 0.04
    assert error.max() < 0.2


@needs_kernels
def test_the_tables_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(
        groups,
        "parallel_choices",
        lambda name, gpu, max_gpus: [ParallelConfig(8)] if "32B" in name else [],
    )
    bundle(tmp_path / "kernels.json")
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written.keys() == bundled().keys()
    assert written["models"] == bundled()["models"]
    committed = {tuple(row["of"]): row for row in bundled()["tables"]}
    assert all(committed[tuple(row["of"])] == row for row in written["tables"])


def test_the_constants_of_another_simulator_are_a_second_opinion():
    llama = Model("70B", 80, 64, 8, 128, 70_553_706_496, hidden_size=8192, vocabulary=128256)
    a100 = GPU("a100_sxm", memory_bytes=80e9, flops=312e12, bandwidth=2.04e12)
    told = second_opinion(group(llama, a100, parallel=ParallelConfig(4)))
    # the constants of the fit at 64 key-value heads, an eighth of whose bytes eight heads read
    assert told.t0 == pytest.approx(0.0310602)
    assert told.per_cached_token == pytest.approx(5.31738e-8, rel=1e-3)
    assert told.per_prefill_token == pytest.approx(2.2082e-4)
    assert second_opinion(group(LLAMA_8B, RTX_3090)) is None
