"""The workloads that the engine's claims rest on, drawn from the joint digests.

W1 is chat (BurstGPT's first week); W2 one third each of it and of Azure's code and conversations of 2023; W3
half Azure code and half DeepSeek-R1 of ServeGen, whose prompts and outputs are known apart only and are drawn
independently. Half 0 is for choosing, half 1 for judging; of DeepSeek-R1 both halves are the same law.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from kvcache.engine import JointLengths, StepCost
from kvcache.paper.digests import load_digest
from kvcache.paper.digests.joint import load_joint

__all__ = ["A100", "CONTEXT", "WORKLOADS", "burst", "lengths", "requests"]

#: A100-80GB, TP4, 70B with 8 KV heads, of which a pool's token counts 64: seconds of an iteration.
A100 = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
#: The longest request of each workload, tokens: vLLM's ``--max-model-len``.
CONTEXT = {"W1": 8192, "W2": 8192, "W3": 16384}
WORKLOADS = tuple(CONTEXT)
_PARTS = {
    "W1": ("burstgpt-week1",),
    "W2": ("burstgpt-week1", "azure-2023-code", "azure-2023-conv"),
    "W3": ("azure-2023-code", "servegen-deepseek-r1"),
}


@cache
def lengths(workload: str, half: int) -> JointLengths:
    """The joint law of a workload, within its context."""
    laws = [_law(name, half) for name in _PARTS[workload]]
    law = JointLengths.mix(laws, np.ones(len(laws)), name=workload)
    return law.within(CONTEXT[workload])


def _law(name: str, half: int) -> JointLengths:
    if name == "servegen-deepseek-r1":
        law = JointLengths.independent(load_digest(name, field="input"), load_digest(name), bucket=0.02)
        return law.renamed(name)
    return load_joint(name, half)


def requests(workload: str, count: int, seed: int, rate: float | None = None, half: int = 1) -> pd.DataFrame:
    """``count`` requests drawn independently: all at once, or Poisson at ``rate`` per second."""
    rng = np.random.default_rng(seed)
    inputs, outputs = lengths(workload, half).sample(rng, count)
    arrival = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return pd.DataFrame(
        {"arrival_s": arrival, "input_tokens": np.maximum(inputs, 1), "output_tokens": np.maximum(outputs, 1)}
    )


def burst(seed: int, count: int = 450) -> pd.DataFrame:
    """A public report's load (vllm-project/vllm pull request 44594): alike requests that start together.

    Prompts of about 1,000 tokens, outputs of 5,000 +- 20 %, both uniform.
    """
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "arrival_s": np.zeros(count),
            "input_tokens": rng.integers(950, 1051, count),
            "output_tokens": rng.integers(4000, 6001, count),
        }
    )
