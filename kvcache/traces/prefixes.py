"""Prefix sharing: how much of the prompts a prefix cache could have served.

An id stands for a block of prompt tokens and all blocks before it, so a prompt is a chain of ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from kvcache.traces import Trace

__all__ = ["PrefixStats", "cached_tokens", "prefix_hits", "prefix_stats"]

_CACHE_BLOCKS = tuple(2**k for k in range(8, 19))


@dataclass(frozen=True)
class PrefixStats:
    """How much of the prompts a prefix cache could serve.

    Attributes
    ----------
    requests, block_tokens : requests of the trace; tokens of a full block.
    input_tokens, shared_tokens : prompt tokens in all, and those in leading blocks that an earlier
        request has brought. The cache is unlimited, and blocks count from the arrival on.
    sharing_requests : requests with at least one shared leading block.
    by_window : per time window of the digest: window, requests, input_tokens, shared_tokens.
    by_cache : per capacity of a least-recently-used cache in blocks: capacity_blocks, shared_tokens.
    """

    requests: int
    block_tokens: int
    input_tokens: int
    shared_tokens: int
    sharing_requests: int
    by_window: tuple[Mapping[str, int], ...]
    by_cache: tuple[Mapping[str, int], ...]

    @property
    def shared_share(self) -> float:
        """``shared_tokens`` over ``input_tokens``."""
        return self.shared_tokens / self.input_tokens

    @property
    def mean_prefix_tokens(self) -> float:
        """Mean leading shared-prefix tokens of a request, the L_pre of MODEL (1)-(6e)."""
        return self.shared_tokens / self.requests

    @property
    def mean_input_tokens(self) -> float:
        """Mean prompt length, tokens: the L_in beside that L_pre."""
        return self.input_tokens / self.requests

    def window_table(self) -> pd.DataFrame:
        """``by_window`` as a table, with the share of shared prompt tokens."""
        table = pd.DataFrame(list(self.by_window))
        return table.assign(shared_share=table.shared_tokens / table.input_tokens)

    def cache_table(self) -> pd.DataFrame:
        """``by_cache`` as a table, with the capacity in tokens and the share of shared prompt tokens."""
        table = pd.DataFrame(list(self.by_cache))
        return table.assign(
            capacity_tokens=table.capacity_blocks * self.block_tokens,
            shared_share=table.shared_tokens / self.input_tokens,
        )


def prefix_stats(
    blocks: Sequence[ArrayLike],
    input_tokens: ArrayLike,
    *,
    block_tokens: int = 512,
    windows: ArrayLike | None = None,
    capacities: Sequence[int] = _CACHE_BLOCKS,
) -> tuple[PrefixStats, NDArray[np.int64]]:
    """Prefix sharing of requests in order of arrival.

    Parameters
    ----------
    blocks : per request, the ids of its prompt's blocks in order.
    input_tokens : (n,) prompt lengths; the last block of a prompt may be partly filled.
    windows : (n,) time window of each request, all 0 by default.
    capacities : sizes, in blocks, of the least-recently-used caches to try.

    Returns
    -------
    stats : PrefixStats
    leading : (n,) tokens in leading blocks that an earlier request has brought (unlimited cache).
    """
    lengths = np.asarray(input_tokens, np.int64)
    slots = np.zeros(lengths.size, np.int64) if windows is None else np.asarray(windows, np.int64)
    chains = [np.asarray(ids, np.int64).tolist() for ids in blocks]
    if len(chains) != lengths.size:
        raise ValueError(f"blocks: {len(chains)} requests; expected {lengths.size} as input_tokens")
    leading = _cached_tokens(chains, lengths, block_tokens, None)
    columns = {"window": slots, "requests": 1, "input_tokens": lengths, "shared_tokens": leading}
    by_window = pd.DataFrame(columns).groupby("window", as_index=False).sum().to_dict("records")
    by_cache = tuple(
        {
            "capacity_blocks": int(capacity),
            "shared_tokens": int(_cached_tokens(chains, lengths, block_tokens, capacity).sum()),
        }
        for capacity in capacities
    )
    stats = PrefixStats(
        lengths.size,
        block_tokens,
        int(lengths.sum()),
        int(leading.sum()),
        int((leading > 0).sum()),
        tuple(by_window),
        by_cache,
    )
    return stats, leading


def cached_tokens(
    requests: Trace | pd.DataFrame,
    capacity_tokens: float | None,
    *,
    block_tokens: int | None = None,
    engine_block: int = 16,
) -> NDArray[np.int64]:
    """Prompt tokens of each request that an engine's prefix cache would hold on its arrival.

    The engine finds whole blocks of its own and computes at least the last token of a prompt. Only prompts
    are known by ids, so what a later turn finds of an earlier answer is in its own ids or not counted.

    Parameters
    ----------
    requests : a trace or its table, in order of arrival, with ``input_tokens`` and ``prefix_blocks``.
    capacity_tokens : what the cache may hold, least recently used blocks going first; None: all of it.
    block_tokens : tokens of a block in ``prefix_blocks``; by default what the trace's report says.
    engine_block : tokens of the engine's own blocks.

    Returns
    -------
    (n,) int64

    Raises
    ------
    ValueError
        Without ``prefix_blocks``, or where nothing tells the size of a block.
    """
    table = requests if isinstance(requests, pd.DataFrame) else requests.requests
    if block_tokens is None:
        block_tokens = None if isinstance(requests, pd.DataFrame) else requests.report.block_tokens
    if "prefix_blocks" not in table:
        raise ValueError("requests: no prefix_blocks; expected block ids per request")
    if block_tokens is None:
        raise ValueError("block_tokens: not known from the trace; expected a number, such as 16 or 512")
    lengths = table["input_tokens"].to_numpy(np.int64)
    chains = [np.asarray(ids, np.int64).tolist() for ids in table["prefix_blocks"]]
    capacity = None if capacity_tokens is None else int(capacity_tokens // block_tokens)
    found = _cached_tokens(chains, lengths, block_tokens, capacity)
    return np.minimum(found, np.maximum(lengths - 1, 0)) // engine_block * engine_block


def prefix_hits(
    requests: Trace | pd.DataFrame, capacity_tokens: float | None, **options: Any
) -> pd.DataFrame:
    """Mean prompt tokens found in a prefix cache by class of request, the h_i of MODEL 9.2.

    Parameters are those of `cached_tokens`. The cache is shared by all classes, in order of arrival.

    Returns
    -------
    DataFrame, one row per ``class``: ``requests``, ``input_tokens`` (mean), ``cached_tokens`` (mean, h_i).
    """
    table = requests if isinstance(requests, pd.DataFrame) else requests.requests
    found = pd.DataFrame(
        {
            "class": table["class"].to_numpy() if "class" in table else "all",
            "input_tokens": table["input_tokens"].to_numpy(),
            "cached_tokens": cached_tokens(requests, capacity_tokens, **options),
        }
    ).groupby("class", observed=True)
    return (
        found.mean()
        .assign(requests=found.size())[["requests", "input_tokens", "cached_tokens"]]
        .reset_index()
    )


def _cached_tokens(
    chains: Sequence[list[int]], lengths: NDArray[np.int64], block_tokens: int, capacity: int | None
) -> NDArray[np.int64]:
    """(n,) prompt tokens found in a cache of ``capacity`` blocks (None: unlimited) on arrival."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = np.zeros(lengths.size, np.int64)
    for i, chain in enumerate(chains):
        hits = 0
        while hits < len(chain) and chain[hits] in cache:
            hits += 1
        found[i] = min(hits * block_tokens, lengths[i])
        # Last to first, so that a block is evicted before the blocks it depends on.
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return found
