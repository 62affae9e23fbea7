from importlib.util import find_spec

import numpy as np
import pytest

from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.kernels import Provenance, Roofline, carried_gpu, kernel_steps, roofline
from kvcache.models import read_model

needs_kernels = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="aiconfigurator-core is not installed"
)


@needs_kernels
@pytest.mark.parametrize("prompt", [0, 1024, 2048])
def test_iterations_are_those_of_the_librarys_own_scheduler_interface(prompt):
    """Its forward-pass model takes what a scheduler reports of an iteration and prices it in one piece."""
    from aiconfigurator_core.sdk import RustForwardPassPerfModel

    config = {
        "schema_version": 1,
        "model_name": "Qwen/Qwen3-32B",
        "system_name": "h200_sxm",
        "backend": "vllm",
        "backend_version": "0.24.0",
        "tp_size": 2,
        "pp_size": 1,
    }
    judge = RustForwardPassPerfModel.from_native(config)
    steps, _ = kernel_steps(read_model("Qwen/Qwen3-32B"), "h200_sxm", "vllm", ParallelConfig(2), 1024)
    for batch, context in ((1, 1024), (32, 1024), (128, 1024), (64, 4096)):
        scheduled = {
            "num_prefill_requests": prompt // 1024,
            "sum_prefill_tokens": prompt,
            "sum_prefill_kv_tokens": 0,
            "num_decode_requests": batch,
            "sum_decode_kv_tokens": batch * context,
            "var_decode_kv_tokens": 0.0,
            "var_prefill_length": 0.0,
        }
        iteration = {
            "version": 1,
            "worker_id": "w",
            "dp_rank": 0,
            "counter_id": 0,
            "wall_time": 0.0,
            "scheduled_requests": scheduled,
            "queued_requests": {},
        }
        told = judge.estimate_forward_pass_time_ms(iteration) / 1e3
        assert steps(batch, batch * context, prompt) == pytest.approx(told, rel=0.002)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "gpu", "parallel", "constants", "errors"),
    [
        # t0 ms, s_B us, s_K ns and the errors' median and largest, fitted elsewhere to the same library
        ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", (4,), (15.2, 32.6, 26.7), (0.013, 0.033)),
        ("Qwen/Qwen3-32B", "h200_sxm", (2,), (10.7, 25.1, 29.2), (0.016, 0.046)),
        ("meta-llama/Meta-Llama-3.1-8B", "l40s", (1,), (22.2, 42.9, 184), (0.019, 0.063)),
    ],
)
def test_decoding_is_nearly_linear(name, gpu, parallel, constants, errors):
    steps, _ = kernel_steps(read_model(name), gpu, "vllm", ParallelConfig(*parallel))
    batch, context = (
        axis.ravel().astype(float)
        for axis in np.meshgrid([1, 2, 4, 8, 16, 32, 64, 128, 256], [256, 512, 1024, 2048, 4096])
    )
    times = steps(batch, batch * context, np.zeros_like(batch))
    design = np.stack([np.ones_like(batch), batch, batch * context], axis=1)
    fitted = np.linalg.lstsq(design / times[:, None], np.ones_like(times), rcond=None)[0]
    assert fitted * [1e3, 1e6, 1e9] == pytest.approx(constants, rel=0.15)
    error = np.abs(design @ fitted / times - 1)
    assert np.median(error) == pytest.approx(errors[0], abs=0.006)
    assert error.max() == pytest.approx(errors[1], abs=0.02)


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
            model, parallel = read_model(name), ParallelConfig(tensor)
            exact, _ = kernel_steps(model, gpu, "vllm", parallel, 1024)
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
    reached = Roofline(bandwidth=0.5, flops=0.5, layer_s=1e-3, all_reduce_s=1e-4)
    step = roofline(model, gpu, ParallelConfig(2), prompt_tokens=100, reached=reached)
    # two requests meet 1 - (3/4)^2 = 7/16 of the experts; they keep 2 x 10 layers x 2 heads x 8 in 16 bits
    read = (2 * 0.2e9 + 7 / 16 * 2 * 0.8e9) / 1e11
    assert step(2.0, 50.0, 0.0) == pytest.approx(read + 50 * 640 / 1e11 + 10e-3 + 20e-4)
    # 1,000 prompt tokens: 2 x 1e9 operations each, and attention of 4 x 10 x 4 x 8 x 50 more
    assert step(0.0, 0.0, 1000.0) == pytest.approx(1000 * (2e9 + 64_000) / 1e12 + 10e-3 + 20e-4, rel=1e-6)


def test_a_label_is_one_of_three():
    with pytest.raises(ValueError, match="label is 'guessed'"):
        Provenance("guessed", "nowhere")
