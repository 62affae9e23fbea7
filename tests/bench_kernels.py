"""What a data sheet's roofline is worth against measured kernels, and how long a group takes to describe.

``make bench`` prints the error on every carried GPU left out of the fit in turn, and the constants of the
fit to all; `kvcache.kernels.ROOFLINE` has them.
"""

from dataclasses import astuple

import numpy as np
import pytest
from scipy.optimize import least_squares

from kvcache.groups import group
from kvcache.hardware import ParallelConfig
from kvcache.kernels import ROOFLINE, Roofline, carried_gpu, carried_gpus, kernel_steps, roofline
from kvcache.models import read_model

pytest.importorskip("aiconfigurator_core")

CASES = (
    ("meta-llama/Meta-Llama-3.1-8B", 1),
    ("Qwen/Qwen3-32B", 2),
    ("Qwen/Qwen3-32B", 4),
    ("meta-llama/Meta-Llama-3.1-70B", 4),
    ("meta-llama/Meta-Llama-3.1-70B", 8),
    ("Qwen/Qwen3-30B-A3B", 2),
)
BATCH, CONTEXT, PROMPT = (
    axis.ravel().astype(float)
    for axis in np.meshgrid([1, 8, 32, 128], [256, 1024, 4096], [0, 512, 2048], indexing="ij")
)
WORK = (BATCH, BATCH * CONTEXT, PROMPT)


def measured():
    """Every GPU whose kernels were measured for vLLM: (gpu, model, parallel, seconds)."""
    found = []
    for gpu in carried_gpus():
        for name, tensor in CASES:
            model, parallel = read_model(name), ParallelConfig(tensor)
            try:
                steps, _ = kernel_steps(model, gpu, "vllm", parallel)
            except ValueError as error:
                assert "no measured kernels" in str(error)  # noqa: PT017
                continue
            found.append((gpu, model, parallel, steps(*WORK)))
    return found


def logs(reached, cases):
    """Log of formula over kernels at every iteration of these cases."""
    return np.concatenate(
        [
            np.log(roofline(model, carried_gpu(gpu), parallel, reached=reached)(*WORK) / seconds)
            for gpu, model, parallel, seconds in cases
        ]
    )


def fitted(cases):
    """The constants with the least soft-L1 of those logs."""
    start = np.log(astuple(ROOFLINE))
    result = least_squares(lambda x: logs(Roofline(*np.exp(x)), cases), start, loss="soft_l1", f_scale=0.2)
    return Roofline(*np.exp(result.x))


def test_roofline(benchmark, capsys):
    cases = measured()
    reached = benchmark.pedantic(fitted, args=(cases,), rounds=1)
    assert astuple(reached) == pytest.approx(astuple(ROOFLINE), rel=0.02)
    error = np.abs(np.expm1(logs(ROOFLINE, cases)))
    lines = [f"all: median {np.median(error):.2f}, 90th {np.quantile(error, 0.9):.2f}, {error.max():.2f}"]
    for gpu in sorted({case[0] for case in cases}):
        apart = [case for case in cases if case[0] == gpu]
        error = np.abs(np.expm1(logs(fitted([case for case in cases if case[0] != gpu]), apart)))
        decoding = np.tile(PROMPT == 0, len(apart))
        lines.append(f"{gpu} left out: {np.median(error):.2f}, decoding {np.median(error[decoding]):.2f}")
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.parametrize(
    ("name", "gpu", "parallel"),
    [
        ("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", (4,)),
        ("Qwen/Qwen3-32B", "h200_sxm", (2,)),
        ("deepseek-ai/DeepSeek-R1", "h200_sxm", (8, 1, 8)),
        ("meta-llama/Meta-Llama-3.1-8B", "l40s", (1,)),
    ],
)
def test_group(benchmark, name, gpu, parallel):
    found = benchmark(group, name, gpu, parallel=ParallelConfig(*parallel))
    near = found.refit(64, 1024)
    benchmark.extra_info |= {
        "kv_tokens": [found.kv_tokens_low, found.kv_tokens, found.kv_tokens_high],
        "cost": astuple(near.cost),
        "error": [near.cost_error.median, near.cost_error.largest],
    }
