"""Prefix sharing: how much of the prompts a prefix cache could have served.

An id stands for a block of prompt tokens and all blocks before it, so a prompt is a chain of ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

__all__ = ["PrefixStats", "prefix_stats"]

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
    capacity: int | None = None,
) -> tuple[PrefixStats, NDArray[np.int64]]:
    """Prefix sharing of requests in order of arrival.

    Parameters
    ----------
    blocks : per request, the ids of its prompt's blocks in order.
    input_tokens : (n,) prompt lengths; the last block of a prompt may be partly filled.
    windows : (n,) time window of each request, all 0 by default.
    capacities : sizes, in blocks, of the least-recently-used caches to try.
    capacity : size of the cache that ``leading`` and the stats assume; None: unlimited.

    Returns
    -------
    stats : PrefixStats
    leading : (n,) tokens in leading blocks that an earlier request has brought.
    """
    lengths = np.asarray(input_tokens, np.int64)
    slots = np.zeros(lengths.size, np.int64) if windows is None else np.asarray(windows, np.int64)
    chains = [np.asarray(ids, np.int64).tolist() for ids in blocks]
    if len(chains) != lengths.size:
        raise ValueError(f"blocks: {len(chains)} requests; expected {lengths.size} as input_tokens")
    leading = _cached_tokens(chains, lengths, block_tokens, capacity)
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
