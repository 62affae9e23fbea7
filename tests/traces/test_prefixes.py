"""Prefix sharing against hand-worked cases and a slow cache."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.traces.prefixes import prefix_stats


def slow_cache(chains, lengths, block, capacity):
    """Leading tokens found, by a list ordered from least to most recently used."""
    cache, found = [], []
    for chain, length in zip(chains, lengths, strict=True):
        hits = 0
        for block_id in chain:
            if block_id not in cache:
                break
            hits += 1
        found.append(min(hits * block, length))
        for block_id in chain[::-1]:
            if block_id in cache:
                cache.remove(block_id)
            cache.append(block_id)
        cache = cache[max(len(cache) - capacity, 0) :]
    return sum(found)


def test_by_hand():
    chains = [[1, 2, 3], [1, 2, 4], [1], [9], [1, 2, 3]]
    lengths = [25, 25, 7, 10, 30]
    stats, leading = prefix_stats(
        chains, lengths, block_tokens=10, windows=[0, 0, 0, 2, 2], capacities=[0, 1, 2, 4, 8]
    )
    assert leading.tolist() == [0, 20, 7, 0, 30]
    assert (stats.requests, stats.input_tokens, stats.shared_tokens, stats.sharing_requests) == (5, 97, 57, 3)
    assert stats.mean_prefix_tokens == 57 / 5
    assert stats.mean_input_tokens == 97 / 5
    assert stats.shared_share == 57 / 97
    assert stats.window_table()[["window", "requests", "shared_tokens"]].values.tolist() == [
        [0, 3, 27],
        [2, 2, 30],
    ]
    # Of two blocks, the first two of a chain stay; block 9 then pushes out block 2.
    assert stats.cache_table()["shared_tokens"].tolist() == [0, 17, 37, 47, 57]
    assert stats.cache_table()["capacity_tokens"].tolist() == [0, 10, 20, 40, 80]


CHAINS = st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), min_size=1, max_size=25)


@given(CHAINS, st.integers(1, 12))
def test_every_capacity_against_a_slow_cache(chains, capacity):
    lengths = [4 * len(chain) for chain in chains]
    stats, leading = prefix_stats(chains, lengths, block_tokens=4, capacities=[capacity, 1000])
    assert stats.by_cache[0]["shared_tokens"] == slow_cache(chains, lengths, 4, capacity)
    assert stats.by_cache[1]["shared_tokens"] == stats.shared_tokens == leading.sum()
    assert (leading <= np.array(lengths)).all()


def test_lengths_that_do_not_match():
    with pytest.raises(ValueError, match="blocks: 1 requests; expected 2"):
        prefix_stats([[1]], [1, 2])
