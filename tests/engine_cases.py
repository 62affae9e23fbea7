"""Small workloads on which vLLM's own scheduler was run, and how: what `test_engine_vllm` compares with.

``python tests/engine_cases.py`` runs them again where vLLM is installed and writes ``engine_cases.csv``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from kvcache.engine import StepCost

TABLE = Path(__file__).with_name("engine_cases.csv")
#: A100, TP4, 70B with 8 KV heads; tokens of 64 KV heads.
COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
SUMS = ["first_token_s", "finish_s", "worst_gap_s", "preemptions", "recomputed_tokens"]

#: name: requests (seed, count, mean prompt, mean output, requests/s or None for all at once), and the group.
CASES = {
    "default": ((1, 160, 400, 200, None), {"pool": 16_000}),
    "watermark": ((1, 160, 400, 200, None), {"pool": 16_000, "watermark": 0.02}),
    "no cache": ((1, 160, 400, 200, None), {"pool": 16_000, "prefix_cache": False}),
    "arrivals": ((2, 160, 700, 260, 1.2), {"pool": 16_000}),
    "arrivals, watermark": ((3, 160, 700, 260, 1.2), {"pool": 16_000, "watermark": 0.05}),
    "long prompts": ((4, 120, 2_500, 60, 1.0), {"pool": 10_000, "max_batched_tokens": 512}),
    "small batch": ((5, 160, 300, 150, None), {"pool": 56_000, "max_running": 24}),
    "long outputs": ((6, 80, 100, 900, None), {"pool": 12_000}),
    "large blocks": ((7, 120, 300, 200, 2.0), {"pool": 4_800, "block": 64}),
    "calm": ((8, 120, 500, 200, 0.4), {"pool": 56_000}),
}


def requests(seed: int, count: int, prompt: float, output: float, rate: float | None) -> pd.DataFrame:
    """Lognormal lengths, and Poisson arrivals."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(-0.32, 0.8, (2, count))) * [[prompt], [output]]
    inputs, outputs = np.clip(lengths.round().astype(int), 1, 4_000)
    arrival = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1 / rate, count))
    return pd.DataFrame({"arrival_s": arrival, "input_tokens": inputs, "output_tokens": outputs})


def summary(name: str, rows: pd.DataFrame, steps: int, seconds: float) -> dict[str, object]:
    """A row of the table."""
    return {
        "case": name,
        "steps": steps,
        "seconds": seconds,
        **{column: rows[column].sum() for column in SUMS},
    }


if __name__ == "__main__":
    from kvcache.paper.engine.driver import drive

    runs = []
    for name, (workload, group) in CASES.items():
        run = drive(requests(*workload), step_cost=COST, **group)
        runs.append(summary(name, run.requests, run.steps, run.seconds))
    pd.DataFrame(runs).to_csv(TABLE, index=False, float_format="%.9f")
