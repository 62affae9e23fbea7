"""vLLM's scheduler against the simulation, cell by cell, and against the committed runs.

``python -m kvcache.paper.engine.check`` runs all cells in the engine environment (``make engine-check``),
with ``--small`` those that take seconds; ``--write`` writes ``data/engine/vllm.csv`` and compares with no
earlier runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from kvcache.engine import Bursts, Headroom, PoolPolicy, Simulation, simulate
from kvcache.files import atomic_path
from kvcache.paper.engine.driver import EngineRun, drive
from kvcache.paper.engine.workloads import A100, CONTEXT, burst, lengths, requests
from kvcache.paper.project import project_root

__all__ = ["CELLS", "Cell", "committed", "measure", "simulated"]

PLUG_IN = "PooledScheduler"
#: How far the simulation may be from a scheduler that decides one iteration at a time, as it does.
STEPS, PREEMPTIONS, THROUGHPUT = 0.03, 0.03, 0.01


@dataclass(frozen=True)
class Cell:
    """A run: workload, requests (half 1 of it, all at once unless ``rate`` is given) and the engine.

    headroom : tokens kept free on admission, handed to vLLM as a watermark. rule : of the plug-in, whose
    policy is made from half 0. small : whether ``--small`` runs it.
    """

    workload: str
    pool: int
    headroom: float = 0.0
    scheduler: str = "Scheduler"
    rule: str = ""
    rate: float = np.inf
    requests: int = 2000
    seed: int = 0
    prefix_cache: bool = True
    max_running: int = 256
    small: bool = False

    @property
    def table(self) -> pd.DataFrame:
        """The requests."""
        if self.workload == "burst":
            return burst(self.seed, self.requests)
        rate = None if self.rate == np.inf else self.rate
        return requests(self.workload, self.requests, self.seed, rate)

    @property
    def policy(self) -> PoolPolicy:
        """What the plug-in reads; the headroom is u*."""
        law = lengths(self.workload, 0)
        return PoolPolicy.of({"all": law}, self.pool, A100, prefix_cache=self.prefix_cache, rule=self.rule)

    @property
    def group(self) -> Mapping[str, object]:
        """What `drive` and `simulate` are told alike."""
        return {
            "pool": self.pool,
            "step_cost": A100,
            "prefix_cache": self.prefix_cache,
            "max_running": self.max_running,
        }


def _burst(headroom: float) -> Cell:
    return Cell("burst", 299_584, headroom, requests=450, prefix_cache=False, max_running=128)


CELLS = (
    *(Cell("W1", 16_000, u) for u in (0, 160, 320, 800)),
    *(Cell("W1", 56_000, u) for u in (0, 560, 1120)),
    *(Cell("W2", 16_000, u) for u in (0, 160, 320)),
    *(Cell("W2", 56_000, u) for u in (0, 272)),
    *(Cell("W3", 56_000, u, requests=1000) for u in (0, 1120, 2800)),
    Cell("W1", 56_000, rate=2.1),
    Cell("W1", 56_000, 1120, rate=2.1),
    Cell("W2", 56_000, rate=1.9),
    Cell("W1", 56_000, scheduler="AsyncScheduler"),
    Cell("W2", 56_000, scheduler="AsyncScheduler"),
    Cell("W1", 56_000, scheduler=PLUG_IN, rule="headroom"),
    Cell("W1", 56_000, scheduler=PLUG_IN, rule="bursts"),
    *(_burst(share * 299_584) for share in (0, 0.02, 0.05, 0.10)),
    Cell("W1", 16_000, requests=150, seed=1, small=True),
    Cell("W2", 56_000, 272, requests=300, seed=1, small=True),
    Cell("W1", 16_000, requests=150, seed=1, scheduler="AsyncScheduler", small=True),
    Cell("W1", 56_000, requests=200, seed=1, scheduler=PLUG_IN, rule="bursts", small=True),
)

MEASURES = ("steps", "seconds", "preemptions", "recomputed_tokens", "throughput", "p99_ttft_s", "p99_gap_s")


def measure(run: EngineRun | Simulation) -> dict[str, float]:
    """The figures of a run: `MEASURES`."""
    rows = run.requests
    done = rows["finish_s"].notna()
    return {
        "steps": run.steps,
        "seconds": run.seconds,
        "preemptions": run.preemptions,
        "recomputed_tokens": int(rows["recomputed_tokens"].sum()),
        "throughput": done.sum() / run.seconds,
        "p99_ttft_s": float((rows["first_token_s"] - rows["arrival_s"])[done].quantile(0.99)),
        "p99_gap_s": float(rows["worst_gap_s"].quantile(0.99)),
    }


def simulated(cell: Cell) -> Simulation:
    """The cell in the simulation."""
    rule: Headroom | Bursts = Headroom(cell.headroom)
    if cell.rule:
        policy = cell.policy
        rule = Headroom(policy.headroom) if cell.rule == "headroom" else Bursts(policy.burst_rule())
    return simulate(cell.table, admission=rule, **cell.group)


def _driven(cell: Cell, folder: Path) -> EngineRun:
    """The cell in vLLM's scheduler."""
    scheduler: str | type = cell.scheduler
    extra = {}
    if cell.rule:
        from kvcache.vllm import PooledScheduler

        path = folder / "policy.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        cell.policy.write(path)
        scheduler, extra = PooledScheduler, {"kvcache_policy": str(path)}
    return drive(
        cell.table,
        watermark=cell.headroom / cell.pool,
        scheduler=scheduler,
        max_model_len=CONTEXT.get(cell.workload, 8192),
        additional_config=extra,
        **cell.group,
    )


def _table_path() -> Path:
    return project_root() / "data" / "engine" / "vllm.csv"


def committed() -> pd.DataFrame:
    """The committed runs: one row per cell of `CELLS`, in order, with its columns and `MEASURES`."""
    return pd.read_csv(_table_path(), keep_default_na=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and compare; 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m kvcache.paper.engine.check", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the cells that take seconds")
    parser.add_argument("--write", action="store_true", help="write the committed runs")
    asked = parser.parse_args(arguments)
    old = None if asked.write else committed()
    rows, wrong = [], 0
    for at, cell in enumerate(CELLS):
        if asked.small and not cell.small:
            continue
        started = time.perf_counter()
        found = measure(_driven(cell, project_root() / "build" / "engine"))
        there = time.perf_counter() - started
        started = time.perf_counter()
        ours = measure(simulated(cell))
        here = time.perf_counter() - started
        rows.append({**asdict(cell), **found})
        troubles = _off(cell, found, ours)
        if old is not None:
            was = old.iloc[at]
            troubles += [
                f"{name} was {was[name]:g}"
                for name in MEASURES
                if not np.isclose(float(was[name]), found[name], rtol=1e-6, atol=1e-9, equal_nan=True)
            ]
        wrong += bool(troubles)
        print(
            f"{cell.workload:5} {cell.pool:7,} u {cell.headroom:7,.0f} {cell.scheduler:15} {cell.rule:8} "
            f"rate {cell.rate:4g}: {found['steps']:6,} steps, {found['preemptions']:4} preemptions, "
            f"{found['throughput']:.3f}/s; simulated {ours['steps']:6,}, {ours['preemptions']:4}, "
            f"{ours['throughput']:.3f}/s; {there:.1f} s against {here:.2f} s  "
            + ("; ".join(troubles) or "ok"),
            flush=True,
        )
    if asked.write:
        if asked.small:
            parser.error("--write wants all cells")
        _table_path().parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(_table_path()) as partial:
            pd.DataFrame(rows).to_csv(partial, index=False, float_format="%.9g")
    print(f"engine-check: {len(rows) - wrong} of {len(rows)} cells as expected")
    return int(wrong > 0)


def _off(cell: Cell, found: Mapping[str, float], ours: Mapping[str, float]) -> list[str]:
    """What the simulation misses by more than it may; ahead by an iteration, evictions fall out otherwise."""
    limits = {"steps": STEPS, "throughput": THROUGHPUT}
    if cell.scheduler == "Scheduler":
        limits["preemptions"] = PREEMPTIONS
    return [
        f"simulated {name} {ours[name] / found[name] - 1:+.1%}"
        for name, limit in limits.items()
        if abs(ours[name] - found[name]) > limit * found[name]
    ]


if __name__ == "__main__":
    sys.exit(main())
