"""The simulation of a paged group: seconds, beside vLLM's own scheduler where it is installed."""

import time
import tracemalloc
from importlib.util import find_spec

import pytest

from kvcache.engine import simulate
from kvcache.paper.engine.workloads import A100, requests

COUNT, RUNS = 2_000, 5


@pytest.mark.parametrize("pool", [16_000, 56_000])
def test_two_thousand_requests(pool):
    table = requests("W1", COUNT, seed=0)
    seconds = []
    for _ in range(RUNS):
        start = time.process_time()
        run = simulate(table, pool=pool, step_cost=A100)
        seconds.append(time.process_time() - start)
    tokens = int(table["output_tokens"].sum())
    print(f"\n{COUNT:,} requests, {tokens:,} tokens, pool {pool:,}: {run}; {min(seconds):.3f} s of CPU")
    assert min(seconds) < 1
    if find_spec("vllm") is None:
        return
    from kvcache.paper.engine.driver import drive

    start = time.process_time()
    known = drive(table, pool=pool, step_cost=A100)
    theirs = time.process_time() - start
    print(f"vLLM's scheduler: {theirs:.1f} s, {theirs / min(seconds):.0f} times as long; {known}")
    assert (known.steps, known.preemptions) == (run.steps, run.preemptions)
    assert theirs > 20 * min(seconds)


def test_memory_grows_with_requests_and_not_with_tokens():
    peaks = {}
    for scale in (1, 20):
        table = requests("W1", 20_000, seed=0, rate=2.0 / scale)
        table["output_tokens"] *= scale
        tracemalloc.start()
        simulate(table, pool=56_000 * scale, step_cost=A100)
        peaks[scale] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(
        f"\n20,000 requests: {peaks[1] / 1e6:.1f} MB; with outputs 20 times as long {peaks[20] / 1e6:.1f} MB"
    )
    assert peaks[20] < 1.5 * peaks[1]
