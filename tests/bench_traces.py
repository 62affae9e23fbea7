"""Readers against their targets: at least 1 million rows/s and under 1 GB of memory for 44 million rows.

KVCACHE_BENCH_ROWS sets the size of the generated Azure 2024 file: 2,000,000 by default, 44,000,000
(1.8 GB of text, some minutes to write) to measure the real case.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from kvcache.paper.digests import load_digest, load_digests

ROWS = int(os.environ.get("KVCACHE_BENCH_ROWS", 2_000_000))
TARGET_ROWS_PER_S = 1e6
TARGET_BYTES = 1e9
BLOCK = 200_000

REDUCE = """
from kvcache.traces import reduce_trace
counts, report = reduce_trace(path, window_s=21_600, align_s=86_400)
rows, check = report.rows_kept, int(counts.query("field == 'output'")["requests"].sum())
"""
READ = """
from kvcache.traces import read_trace
trace = read_trace(path)
rows, check = trace.report.rows_kept, len(trace.requests)
assert trace.requests["arrival_s"].is_monotonic_increasing
"""
MEASURE = """
import json, resource, sys, time
path = sys.argv[1]
import kvcache.traces
start = time.perf_counter()
{}
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps(dict(rows=rows, check=check, seconds=seconds, peak=peak)))
"""


@pytest.fixture(scope="module")
def azure_file(tmp_path_factory):
    """A week at ROWS requests, times to the microsecond, every thousandth a little late."""
    path = tmp_path_factory.mktemp("bench") / "azure.csv"
    rng = np.random.default_rng(2024)
    lengths = load_digest("azure-2024-conv"), load_digest("azure-2024-conv", field="input")
    step = 7 * 86_400 * 10**6 // ROWS
    start = np.datetime64("2024-05-10T00:00:00.009930", "us")
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        for begin in range(0, ROWS, BLOCK):
            n = min(BLOCK, ROWS - begin)
            ticks = (begin + np.arange(n)) * step
            ticks[1::1000] += 3 * step
            stamps = np.datetime_as_string(start + ticks.astype("timedelta64[us]"))
            outputs, inputs = (d.sample(rng, n).tolist() for d in lengths)
            file.writelines(
                f"{stamp[:10]} {stamp[11:]}+00:00,{i},{o}\n"
                for stamp, i, o in zip(stamps.tolist(), inputs, outputs, strict=True)
            )
    return path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("what", "code"), [("reduce_trace", REDUCE), ("read_trace", READ)])
def test_azure_week(azure_file, what, code):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE.format(code), str(azure_file)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["rows"] == found["check"] == ROWS
    speed = found["rows"] / found["seconds"]
    print(
        f"\n{what}: {ROWS:,} rows in {found['seconds']:.1f} s: {speed / 1e6:.2f} million rows/s, "
        f"{speed / TARGET_ROWS_PER_S:.1f} x target; peak {found['peak'] / 1e6:.0f} MB, "
        f"{found['peak'] / TARGET_BYTES:.2f} of the limit"
    )
    assert found["peak"] < TARGET_BYTES


def test_load_digest():
    for name in ("burstgpt", "servegen-m-mid"):
        start = time.perf_counter()
        load_digest(name)
        first = time.perf_counter() - start
        start = time.perf_counter()
        windows = load_digests("servegen-m-mid", "window")
        every = time.perf_counter() - start
        print(
            f"\n{name}: {first * 1e3:.1f} ms; {len(windows)} windows of servegen-m-mid: {every * 1e3:.0f} ms"
        )
