import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest

from kvcache import kernels
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.kernels import carried_gpu, carried_gpus, group, parallel_choices, read_kv_tokens, roofline
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
    ("model", "gpu", "tensor", "engine", "utilisation", "logged"),
    [
        (Model("32B", 64, 64, 8, 128, 32_762_123_264), None, 2, "vllm", 0.95, 342_999),
        (
            Model("235B-FP8", 94, 64, 4, 128, 235_093_634_560, 1.006, experts=128, experts_per_token=8),
            None,
            4,
            "vllm",
            0.9,
            178_880,
        ),
        (
            Model("235B-FP8", 94, 64, 4, 128, 235_093_634_560, 1.006, experts=128, experts_per_token=8),
            None,
            4,
            "sglang",
            0.93,
            367_404,
        ),
        (LLAMA_8B, RTX_3090, 1, "vllm", 0.9, 31_232),
    ],
)
def test_the_interval_holds_what_engines_logged(model, gpu, tensor, engine, utilisation, logged):
    gpu = gpu or GPU("H100", memory_bytes=80 * 2**30, flops=989e12, bandwidth=3.35e12)
    found = group(model, gpu, engine, ParallelConfig(tensor), memory_utilisation=utilisation)
    assert found.kv_tokens_low < logged < found.kv_tokens_high
    assert found.provenance["kv_tokens"].label == "modelled"
    told = group(
        model, gpu, engine, ParallelConfig(tensor), kv_tokens=f"GPU KV cache size: {logged:,} tokens\n"
    )
    assert told.kv_tokens == told.kv_tokens_low == told.kv_tokens_high == logged
    assert told.provenance["kv_tokens"].label == "measured"


@needs_kernels
def test_what_a_roofline_is_worth():
    """The figures in its docstring, on a part of what it was fitted to."""
    batch, context, prompt = (
        axis.ravel()
        for axis in np.meshgrid([1, 8, 32, 128], [256, 1024, 4096], [0, 512, 2048], indexing="ij")
    )
    errors = []
    for gpu in ("a100_sxm", "h100_sxm", "l40s", "b200_sxm"):
        for name, tensor in (
            ("meta-llama/Meta-Llama-3.1-8B", 1),
            ("Qwen/Qwen3-32B", 2),
            ("meta-llama/Meta-Llama-3.1-70B", 8),
            ("Qwen/Qwen3-30B-A3B", 2),
        ):
            model, parallel = kernels.read_model(name), ParallelConfig(tensor)
            exact, _ = kernels._kernels(model, gpu, "vllm", parallel, 1024)
            work = (batch.astype(float), (batch * context).astype(float), prompt.astype(float))
            errors.append(np.abs(roofline(model, carried_gpu(gpu), parallel)(*work) / exact(*work) - 1))
    errors = np.concatenate(errors)
    assert errors.size == 4 * 4 * 36
    assert 0.15 < np.median(errors) < 0.26
    assert np.quantile(errors, 0.9) < 0.65
    assert errors.max() < 1


def test_a_roofline_by_hand():
    gpu = GPU("toy", memory_bytes=1e12, flops=1e12, bandwidth=1e11)
    model = Model("toy", 10, 4, 2, 8, 1e9, experts=4, experts_per_token=1, expert_parameters=0.8e9)
    reached = kernels.Roofline(bandwidth=0.5, flops=0.5, layer_s=1e-3, all_reduce_s=1e-4)
    step = roofline(model, gpu, ParallelConfig(2), prompt_tokens=100, reached=reached)
    # two requests meet 1 - (3/4)^2 = 7/16 of the experts; they keep 2 x 10 layers x 2 heads x 8 in 16 bits
    read = (2 * 0.2e9 + 7 / 16 * 2 * 0.8e9) / 1e11
    assert step(2.0, 50.0, 0.0) == pytest.approx(read + 50 * 640 / 1e11 + 10e-3 + 20e-4)
    # 1,000 prompt tokens: 2 x 1e9 operations each, and attention of 4 x 10 x 4 x 8 x 50 more
    assert step(0.0, 0.0, 1000.0) == pytest.approx(1000 * (2e9 + 64_000) / 1e12 + 10e-3 + 20e-4, rel=1e-6)


def test_a_benchmark_scales_the_steps():
    plain = group(LLAMA_8B, RTX_3090)
    rows = pd.DataFrame({"batch": [1, 1, 32], "context": [100, 500, 100]})
    known = np.array(plain.table.seconds(rows.batch, rows.batch * rows.context))
    told = group(LLAMA_8B, RTX_3090, steps=rows.assign(seconds=known * [1.2, 1.2, 2.0]))
    assert told.provenance["steps"].label == "measured"
    assert told.table.seconds(1, 300) == pytest.approx(1.2 * plain.table.seconds(1, 300))
    assert told.table.seconds(32, 9000, 64) == pytest.approx(2 * plain.table.seconds(32, 9000, 64))
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


def test_without_the_extra_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    carried_gpus.cache_clear()
    try:
        with pytest.raises(ModuleNotFoundError, match=r"kvcache\[hardware\]"):
            group(LLAMA_8B, "h100_sxm")
        assert group(LLAMA_8B, RTX_3090).provenance["steps"].label == "modelled"
    finally:
        carried_gpus.cache_clear()
