"""Admission rules of other engines and papers, as rules of the simulation; each with its source.

A ``limit`` is what the client allows a request to generate (``max_tokens``): the same for all, by class, or
one for each request; none of these rules but `ShortestFirst` sees a true length before the request has ended.
Simplified for all: the group is vLLM's in all else (chunked prompts beside decoding requests, blocks of one
size, a prefix cache of a request's own blocks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvcache.engine.admission import Candidate, Gate, Headroom, Reserve, Running, per_row

__all__ = [
    "DynamicBatching",
    "PastFuture",
    "SGLang",
    "ShortestFirst",
    "exclusive_batching",
    "prompt_and_share",
]

Floats = NDArray[np.float64]
Limit = float | Mapping[str, float] | Sequence[float]


@dataclass(frozen=True)
class PastFuture:
    """LightLLM: admit if the peak of memory over drawn futures of all requests stays within a share of it.

    A running request's output is drawn from the last finished ones that are longer than what it has made,
    with its limit as one more value. In one future, the peak is at the end of a request: the k that end last
    hold their tokens now and k times the remainder of the k-th. Asked each iteration, as the engine does
    between batches. Source: arXiv:2507.10150 and https://github.com/ModelTC/lightllm.

    Parameters
    ----------
    limit : ``max_tokens``. window : finished requests to draw from. share : of the pool. seed : of the draws.
    draws, samples : futures per decision, min(draws, samples // running + 1).
    """

    limit: Limit
    window: int = 1_000
    share: float = 0.97
    draws: int = 5
    samples: int = 200
    seed: int = 0

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        return _PastFuture(self, per_row(self.limit, requests), self.share * blocks * block)


class _PastFuture(Gate):
    patience = 1  # each iteration draws anew

    def __init__(self, rule: PastFuture, limits: Floats, room: float) -> None:
        self.rule, self.limits, self.room = rule, limits, room
        self.rng = np.random.default_rng(rule.seed)

    def admits(self, running: Running, candidate: Candidate) -> bool:
        past = np.sort(np.array(running.finished[-self.rule.window :], dtype=float))
        made = np.append(running.generated, candidate.generated)
        held = np.append(running.input_tokens, candidate.input_tokens) + made
        limits = np.append(self.limits[running.rows], self.limits[candidate.row])
        draws = min(self.rule.draws, self.rule.samples // len(running) + 1)
        longer = np.searchsorted(past, made, side="right")
        at = longer + np.floor(self.rng.random((draws, made.size)) * (past.size - longer + 1)).astype(int)
        output = np.append(past, np.inf)[at]
        left = np.maximum(np.minimum(output, limits) - made, 0)
        order = np.argsort(-left, axis=1, kind="stable")
        ends = np.take_along_axis(left, order, axis=1) * np.arange(1, made.size + 1)
        return bool((ends + np.cumsum(held[order], axis=1)).max() < self.room)


@dataclass(frozen=True)
class SGLang:
    """SGLang: a falling share of what running requests may still generate is kept free.

    Admitted if prompt, allowance and a page are below the free tokens less ratio x the running requests'
    allowances, and less the whole allowances of those admitted in the same pass; an allowance is
    min(limit - generated, ``clip``). The ratio falls linearly to ``floor`` of itself over ``decay``
    iterations, starts again when the group was idle, and is estimated anew when memory runs out: then the
    requests with the fewest generated tokens leave (among equals, the longest prompt) and go to the end of
    the queue. Source: ``PrefillAdder``, ``NewTokenRatioTracker`` and ``retract_decode`` of
    https://github.com/sgl-project/sglang.

    Parameters
    ----------
    limit : ``max_new_tokens``. conservativeness : ``--schedule-conservativeness``, a factor of ``ratio``.
    """

    limit: Limit
    conservativeness: float = 1.0
    ratio: float = 0.7
    floor: float = 0.14
    decay: int = 600
    clip: int = 4_096
    margin: int = 20

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        return _SGLang(self, per_row(self.limit, requests), block)


class _SGLang(Gate):
    patience = 1  # the ratio falls each iteration
    to_back = True

    def __init__(self, rule: SGLang, limits: Floats, block: int) -> None:
        self.rule, self.limits, self.block = rule, limits, block
        self.start = self.current = min(rule.conservativeness * rule.ratio, 1.0)
        self.lowest = rule.floor * self.start
        self.since = 0

    def at(self, step: int) -> float:
        """The ratio in that iteration."""
        fall = (self.start - self.lowest) / self.rule.decay
        return max(self.current - fall * (step - self.since), self.lowest)

    def allowance(self, rows, generated):
        return np.clip(self.limits[rows] - generated, 0, self.rule.clip)

    def admits(self, running: Running, candidate: Candidate) -> bool:
        share = np.full(len(running), self.at(candidate.step))
        share[len(running) - running.fresh :] = 1.0
        ahead = (share * self.allowance(running.rows, running.generated)).sum()
        own = candidate.input_tokens + candidate.generated
        own += self.allowance(candidate.row, candidate.generated) + self.block
        return bool(own < running.free_blocks * self.block - ahead)

    def enters(self, candidate: Candidate, running: int) -> None:
        if not running:
            self.current, self.since = self.start, candidate.step

    def victim(self, running: Running) -> int:
        return int(np.lexsort((-running.input_tokens, running.generated))[0])

    def evicted(self, running: Running, step: int) -> None:
        ahead = running.generated.sum() + self.rule.margin * len(running)
        self.current = min(1.0, float(ahead / (self.limits[running.rows].sum() + 1)))
        self.since = step


def exclusive_batching(mean_input: float, mean_output: float, risk: float = 0.01) -> Headroom:
    """Proposition 3 of threshold-based exclusive batching, as a headroom: ln(1 / risk) / (p0^2 mu_L) tokens.

    p0 = 1 / ``mean_output`` for geometric outputs, mu_L = ``mean_input``. Source: arXiv:2606.00516; its
    buffer is taken, its phases of prefill and decode are not.
    """
    return Headroom(np.log(1 / risk) * mean_output**2 / mean_input)


@dataclass(frozen=True)
class DynamicBatching:
    """Memory-aware dynamic batching: at most floor(share x blocks / (blocks per running request)) run.

    Source: arXiv:2503.05248; the blocks per request are those of the moment.
    """

    share: float = 0.95

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for a pool of this size."""
        return _DynamicBatching(self.share, blocks)


class _DynamicBatching(Gate):
    def __init__(self, share: float, blocks: int) -> None:
        self.share, self.blocks = share, blocks

    def admits(self, running: Running, candidate: Candidate) -> bool:
        each = (self.blocks - running.free_blocks) / len(running)
        return len(running) < np.floor(self.share * self.blocks / each)


@dataclass(frozen=True)
class ShortestFirst:
    """MC-SF with perfect lengths: the shortest output first, if no future peak exceeds the pool.

    Every request ends at a known iteration; used memory is highest just before one of those ends, and is
    counted in whole blocks. Source: arXiv:2502.07115.
    """

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests, whose true lengths it knows."""
        return _ShortestFirst(requests["output_tokens"].to_numpy(), blocks, block)


class _ShortestFirst(Gate):
    def __init__(self, outputs: NDArray[np.int64], blocks: int, block: int) -> None:
        self.ranks, self.blocks, self.block = outputs, blocks, block

    def admits(self, running: Running, candidate: Candidate) -> bool:
        rows = np.append(running.rows, candidate.row)
        made = np.append(running.generated, candidate.generated)
        held = np.append(running.input_tokens, candidate.input_tokens) + made
        left = self.ranks[rows] - made
        later = left[:, None]  # the iteration (from now) that somebody finishes in, by row
        there = np.ceil((held + later - 1) / self.block)
        return bool(np.where(left >= later, there, 0).sum(axis=1).max() <= self.blocks)


def prompt_and_share(limit: Limit, share: float) -> Reserve:
    """Reserve prompts and that share of what requests may generate.

    Raises
    ------
    ValueError
        For a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"prompt and share: share is {share}; expected a value in [0, 1]")
    if isinstance(limit, Mapping):
        return Reserve({name: share * value for name, value in limit.items()})
    return Reserve(share * np.asarray(limit, dtype=float))
