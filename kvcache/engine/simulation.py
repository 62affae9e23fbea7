"""A paged serving group, request by request: vLLM's scheduler from event to event.

The time and memory of a simulation grow with requests and not with tokens; what a group does, and why it
may jump, is in `kvcache.engine.group`. Left out: prefixes shared between requests, speculative decoding,
swapping, scheduling one iteration ahead, the CPU's own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvcache.engine.admission import FreeBlocksRule, GateRule
from kvcache.engine.group import Group, Kept
from kvcache.engine.steps import StepCost

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulated group did.

    Attributes
    ----------
    requests : one row per request, in the order given, with what was given and

        - ``status``: "finished" or "refused", and ``reason`` (why it was refused, else empty);
        - ``admitted_s, first_token_s, finish_s``: on the clock of ``arrival_s``; NaN if refused;
        - ``preemptions``: how often it was evicted;
        - ``worst_gap_s``: the longest time between two of its tokens; NaN with less than two;
        - ``recomputed_tokens``: tokens that were computed once more after an eviction.
    seconds : from the first arrival to the last finish.
    steps : iterations.
    timeline : ``time_s, used_blocks, running, waiting`` at events, a few thousand rows at most.
    """

    requests: pd.DataFrame
    seconds: float
    steps: int
    timeline: pd.DataFrame

    @property
    def preemptions(self) -> int:
        """Evictions of running requests, all together."""
        return int(self.requests["preemptions"].sum())

    @property
    def throughput(self) -> float:
        """Requests finished per second, from the first arrival to the last finish."""
        return float((self.requests["status"] == "finished").sum() / self.seconds) if self.seconds else 0.0

    def __repr__(self) -> str:
        refused = int((self.requests["status"] == "refused").sum())
        return (
            f"{len(self.requests):,} requests ({refused:,} refused): {self.steps:,} steps, "
            f"{self.preemptions:,} preemptions, {self.seconds:,.1f} s"
        )


def simulate(
    requests: pd.DataFrame,
    *,
    pool: int,
    step_cost: StepCost,
    admission: FreeBlocksRule | GateRule | None = None,
    block: int = 16,
    max_running: int = 256,
    max_batched_tokens: int = 2048,
    prefix_cache: bool = True,
    prompts: str = "chunked",
    received: bool = False,
    kept: Kept | None = None,
    jump: bool = True,
) -> Simulation:
    """Serve ``requests`` by one group until each has ended.

    Parameters
    ----------
    requests : ``arrival_s, input_tokens, output_tokens``; more columns (``class``) are handed through. Served
        first come first served, those of the same second in the order given.
    pool : tokens of KV cache, rounded down to blocks of ``block`` tokens.
    step_cost : a `StepCost` or `StepTable`, or whatever has their ``seconds`` and ``span``.
    admission : None admits what fits (vLLM's default); or a rule of `kvcache.engine.admission`.
    max_running, max_batched_tokens : vLLM's ``--max-num-seqs`` and ``--max-num-batched-tokens``.
    prefix_cache : whether an evicted request finds those of its blocks that nobody has taken.
    prompts : how they are computed: "chunked"; "whole" (never in part, beside the decoding requests) or
        "alone" (never in part, and nobody decodes meanwhile). One that exceeds max_batched_tokens goes first.
    received : prompts come with their cache and first token, computed elsewhere; ``first_token_s`` is then
        the first made here, and ``worst_gap_s`` starts with it.
    kept : how much of its cache a request keeps, if not all; then there is no prefix cache.
    jump : False takes every iteration on its own: the same decisions, much slower.

    Returns
    -------
    The `Simulation`. A request that no empty pool could hold is refused, at once; the others go on.

    Raises
    ------
    ValueError
        If a column is missing or has a value that cannot be, or a limit makes no sense.
    """
    arrival, inputs, outputs = _columns(requests)
    blocks = int(pool) // block
    if block < 1 or blocks < 1:
        raise ValueError(f"pool is {pool} tokens in blocks of {block}; expected at least one block")
    if not 1 <= max_running <= max_batched_tokens:
        raise ValueError(
            f"max_running is {max_running}; expected from 1 to max_batched_tokens = {max_batched_tokens}"
        )
    if prompts not in ("chunked", "whole", "alone"):
        raise ValueError(f"prompts is {prompts!r}; expected 'chunked', 'whole' or 'alone'")
    if received and prompts == "alone":
        raise ValueError("prompts are received and computed alone; expected one of the two")
    served = inputs + outputs <= blocks * block
    order = np.flatnonzero(served)
    order = order[np.argsort(arrival[order], kind="stable")]
    gate = admission.gate(requests, blocks, block) if hasattr(admission, "gate") else None
    group = Group(
        order,
        arrival[order].tolist(),
        inputs[order].tolist(),
        outputs[order].tolist(),
        blocks=blocks,
        block=block,
        step_cost=step_cost,
        spare=admission.free_blocks(blocks, block) if hasattr(admission, "free_blocks") else 0,
        gate=gate,
        max_running=max_running,
        budget=max_batched_tokens,
        prefix_cache=prefix_cache and kept is None,
        prompts=prompts,
        received=received,
        kept=kept,
        jump=jump,
    )
    group.run()

    def column(values: list[float] | list[int], missing: float) -> np.ndarray:
        whole = np.full(len(requests), missing)
        whole[order] = values
        return whole

    reason = np.full(len(requests), "", dtype=object)
    for row in np.flatnonzero(~served):
        reason[row] = f"{inputs[row]:,} + {outputs[row]:,} tokens; the pool holds {blocks * block:,}"
    table = requests.assign(
        status=np.where(served, "finished", "refused"),
        reason=reason,
        admitted_s=column(group.admitted, np.nan),
        first_token_s=column(group.first, np.nan),
        finish_s=column(group.finish, np.nan),
        preemptions=column(group.preemptions, 0),
        worst_gap_s=column(group.worst, np.nan),
        recomputed_tokens=column(group.recomputed, 0),
    )
    start = float(arrival[order[0]]) if order.size else 0.0
    return Simulation(table, group.clock - start, group.iterations, _timeline(group))


def _columns(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, prompts and outputs, checked row by row."""
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        if name not in requests:
            raise ValueError(
                f"requests have columns {', '.join(map(str, requests))}; expected {name} among them"
            )
    arrival = requests["arrival_s"].to_numpy(float)
    inputs = requests["input_tokens"].to_numpy()
    outputs = requests["output_tokens"].to_numpy()
    bad = ~np.isfinite(arrival)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"requests row {row}: arrival_s is {arrival[row]}; expected a finite time")
    for name, values in (("input_tokens", inputs), ("output_tokens", outputs)):
        bad = ~((values >= 1) & (values == np.floor(values)))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(f"requests row {row}: {name} is {values[row]}; expected a whole number >= 1")
    return arrival, inputs.astype(np.int64), outputs.astype(np.int64)


def _timeline(group: Group) -> pd.DataFrame:
    return pd.DataFrame(group.line.rows, columns=["time_s", "used_blocks", "running", "waiting"])
