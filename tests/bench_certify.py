"""Seconds to a certified gap at every size of Table III and beyond it, each beside its target, in one run."""

import resource
import sys
from dataclasses import replace

import numpy as np
import pytest

from kvcache import instances
from kvcache.solvers.certify import certify

#: Classes, configurations, samples per class, GPUs, load; gap and seconds that must be met, gap aimed at.
ROWS = [
    *[(*size, 0.6, 1e-4, 20.0, 1e-4) for size in instances.TABLE3_SIZES[:5]],
    (10, 8, 1000, 24, 0.6, 1e-3, 60.0, 1e-4),
    *[(15, 12, 2000, 48, load, 1e-3, 120.0, 1e-4) for load in (0.2, 0.6, 1.0, 2.0)],
    (50, 24, 44_000_000, 512, 0.6, 2e-2, 300.0, 1e-3),
]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "x".join(map(str, row[:3])) + f"-load{row[4]}")
def test_seconds_to_the_gap(row):
    *size, load, gap, limit, aim = row
    x = instances.scalability(*size, 0, load=load)
    met = certify(x, gap=gap, time_limit=limit)
    share = met.seconds / limit
    line = f"\ngap {met.gap:.1e} in {met.seconds:.2f} s, {met.iterations} boxes, {share:.3f} of the limit"
    if aim < gap:
        more = certify(x, gap=aim, time_limit=30.0)
        line += f"; gap {more.gap:.1e} in {more.seconds:.2f} s, {more.iterations} boxes"
    print(line, end="")
    assert met.gap <= gap


@pytest.mark.timeout(400)
def test_a_warm_start_after_a_drift():
    """All lengths 5 % longer, rates off by some 5 %: the policy in force is improved before any proof."""
    x = instances.scalability(15, 12, 2000, 48, 0, load=1.0)
    before = certify(x, gap=1e-3, time_limit=120.0)
    factors = np.exp(np.random.default_rng(1).normal(0, 0.05, len(x.classes)))
    drifted = x.replace(
        classes=tuple(
            replace(c, arrival_rate=c.arrival_rate * f, output=c.output.scale(1.05, upper=c.output.upper))
            for c, f in zip(x.classes, factors, strict=True)
        )
    )
    cold = certify(drifted, gap=1e-3, time_limit=120.0)
    policy = certify(drifted, gap=1e-3, start=before, node_limit=0)
    warm = certify(drifted, gap=1e-3, start=before, time_limit=120.0)
    print(
        f"\ncold {cold.seconds:.2f} s; warm policy {policy.seconds:.2f} s, ratio "
        f"{cold.seconds / policy.seconds:.0f}, {policy.objective / cold.objective - 1:+.1e} of its cost; "
        f"warm with proof {warm.seconds:.2f} s, ratio {cold.seconds / warm.seconds:.1f}",
        end="",
    )
    assert policy.objective <= cold.objective * (1 + 1e-3)


def test_memory_stays_below_two_gigabytes():
    """Of the whole process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"\npeak memory {peak / 1e9:.2f} GB", end="")
    assert peak < 2e9
