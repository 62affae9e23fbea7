"""Prefix sharing against hand-worked cases and a slow cache."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import read_trace
from kvcache.traces.prefixes import cached_tokens, prefix_hits, prefix_stats


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


@given(CHAINS, st.integers(1, 12))
def test_hits_of_each_class_against_a_slow_cache(chains, blocks):
    lengths = np.array([16 * len(chain) for chain in chains])
    classes = ["ab"[i % 2] for i in range(len(chains))]
    table = pd.DataFrame({"input_tokens": lengths, "class": classes, "prefix_blocks": chains})
    ours = cached_tokens(table, 16 * blocks + 15, block_tokens=16)
    before = 0
    for i, length in enumerate(lengths):  # the slow cache tells totals: each request is a difference
        total = slow_cache(chains[: i + 1], lengths[: i + 1], 16, blocks)
        assert ours[i] == min(total - before, max(length - 16, 0))
        before = total
    hits = prefix_hits(table, 16 * blocks, block_tokens=16).set_index("class")
    for name in set(classes):
        mine = np.array(classes) == name
        assert hits.loc[name, "requests"] == mine.sum()
        assert hits.loc[name, "cached_tokens"] == pytest.approx(ours[mine].mean())


def test_hits_of_a_trace_by_hand(tmp_path):
    ids = [[0, 1], [0, 1], [0, 2], [0, 1]]
    records = [
        {"timestamp": i * 500, "input_length": n, "output_length": 1, "hash_ids": chain}
        for i, (n, chain) in enumerate(zip([1000, 1000, 700, 1024], ids, strict=True))
    ]
    (tmp_path / "t").write_text("".join(json.dumps(record) + "\n" for record in records))
    trace = read_trace(tmp_path / "t")
    # All of a prompt but its last token, in blocks of 16; block 0; again all of it.
    assert cached_tokens(trace, None).tolist() == [0, 992, 512, 1008]
    assert cached_tokens(trace, None, engine_block=1).tolist() == [0, 999, 512, 1023]
    assert cached_tokens(trace, 512).tolist() == [0, 512, 512, 512]  # one block, and its chain's first stays
    assert prefix_hits(trace, None).to_dict("records") == [
        {"class": "all", "requests": 4, "input_tokens": 931.0, "cached_tokens": 628.0}
    ]
    with pytest.raises(ValueError, match="no prefix_blocks"):
        prefix_hits(trace.requests.drop(columns="prefix_blocks"), None)
    with pytest.raises(ValueError, match="block_tokens: not known"):
        prefix_hits(trace.requests, None)


def test_lengths_that_do_not_match():
    with pytest.raises(ValueError, match="blocks: 1 requests; expected 2"):
        prefix_stats([[1]], [1, 2])
