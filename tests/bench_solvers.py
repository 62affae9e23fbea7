"""Seconds and ratios of the solvers at Table III's sizes and beyond, in one run; `make bench` prints them."""

import resource
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from kvcache import evaluate
from kvcache.paper import builders
from kvcache.paper.experiments.solvers import online
from kvcache.paper.methods import solve

LARGE = (15, 12, 2000, 48)


def timed(call):
    start = time.perf_counter()
    value = call()
    return value, time.perf_counter() - start


def show(what, solution, seconds):
    print(
        f"\n{what}: {seconds:.2f} s, cost {solution.objective:,.1f}, gap {solution.gap:.1e} "
        f"({solution.status})",
        end="",
    )


@pytest.mark.parametrize("size", builders.TABLE3_SIZES[:5], ids=str)
def test_small_sizes_are_certified_to_1e_4(size):
    x = builders.scalability(*size, seed=0)
    solution, seconds = timed(lambda: solve(x, gap=1e-4, time_limit=60))
    show(x.name, solution, seconds)
    assert solution.gap <= 1e-4
    assert seconds < 20


def test_10x8x1000_is_certified_to_1e_3():
    x = builders.scalability(*builders.TABLE3_SIZES[5], seed=0)
    solution, seconds = timed(lambda: solve(x, gap=1e-3, time_limit=120))
    show(x.name, solution, seconds)
    assert solution.gap <= 1e-3
    assert seconds < 60


@pytest.mark.parametrize("load", [0.2, 0.6, 1.0, 2.0])
def test_15x12x2000_is_certified_to_1e_3(load):
    x = builders.scalability(*LARGE, seed=0, load=load)
    solution, seconds = timed(lambda: solve(x, gap=1e-3, time_limit=180))
    show(f"{x.name} at load {load:g}", solution, seconds)
    assert solution.gap <= 1e-3
    assert seconds < 120


@pytest.mark.timeout(600)
def test_50x24_with_44_million_requests_per_class():
    x = builders.scalability(50, 24, 44_000_000, 512, seed=0)
    solution, seconds = timed(lambda: solve(x, gap=2e-2, time_limit=300))
    show(x.name, solution, seconds)
    assert solution.gap <= 2e-2
    assert seconds < 310


@pytest.mark.timeout(900)
def test_fast_algorithm_1_against_one_theta_per_sample():
    """The literal reading of Block 3, so that the N-variable programs are few enough to wait for."""
    x = builders.scalability(*LARGE, seed=0)
    fast, quick = timed(lambda: solve(x, "bcd", block3="literal"))
    slow, long = timed(lambda: solve(x, "bcd", block3="literal", per_sample=True))
    print(
        f"\n{x.name}, Algorithm 1: N thetas {long:.1f} s, closed form {quick:.3f} s, "
        f"ratio {long / quick:,.0f}; objectives differ by {abs(fast.objective / slow.objective - 1):.0e}",
        end="",
    )
    assert fast.objective == pytest.approx(slow.objective, rel=1e-6)
    assert long / quick >= 50


def test_algorithm_1_at_full_size():
    x = builders.scalability(*LARGE, seed=0)
    solution, seconds = timed(lambda: solve(x, "bcd"))
    print(
        f"\n{x.name}, Algorithm 1 with Block 3 resolved: {seconds:.2f} s, cost {solution.objective:,.1f}",
        end="",
    )
    assert evaluate(x, solution.policy).feasible


@pytest.mark.timeout(900)
def test_algorithm_1_on_512_gpus_and_24_configurations():
    """Both readings of Block 3 beside what the certified solver finds and proves in a minute."""
    for load in (0.6, 1.0, 2.0):
        x = builders.scalability(50, 24, 44_000_000, 512, seed=0, load=load)
        certified = solve(x, gap=1e-3, time_limit=60)
        for block3 in ("literal", "resolve"):
            solution, seconds = timed(lambda x=x, block3=block3: solve(x, "bcd", block3=block3))
            print(
                f"\n{x.name} at load {load:g}, Algorithm 1, Block 3 {block3}: {seconds:.1f} s, "
                f"cost {solution.objective:,.0f}, {solution.objective / certified.lower_bound - 1:.1e} over "
                f"the bound, {solution.objective / certified.objective - 1:+.1e} to the certified policy "
                f"({certified.seconds:.0f} s)",
                end="",
            )
            assert evaluate(x, solution.policy).feasible
            assert solution.objective >= certified.lower_bound
        assert seconds < 60


@pytest.mark.timeout(600)
def test_reoptimising_after_a_drift_takes_a_tenth_of_a_cold_start():
    x = builders.scalability(*LARGE, seed=0)
    before = solve(x, gap=1e-3, time_limit=120)
    rng = np.random.default_rng(0)
    drifted = x.replace(
        classes=tuple(
            replace(c, arrival_rate=c.arrival_rate * rng.uniform(0.95, 1.05), output=c.output.scale(1.05))
            for c in x.classes
        )
    )
    cold, cold_s = timed(lambda: solve(drifted, gap=1e-3, time_limit=120))
    warm, warm_s = timed(lambda: solve(drifted, gap=1e-3, time_limit=120, start=before))
    bcd, bcd_s = timed(lambda: solve(drifted, "bcd", start=before, block3="literal"))
    print(
        f"\n5 % drift of {x.name}: cold {cold_s:.2f} s, warm {warm_s:.2f} s (ratio {cold_s / warm_s:.1f}), "
        f"Algorithm 1 from the old policy {bcd_s:.2f} s ({bcd.objective / warm.objective - 1:+.1e})",
        end="",
    )
    assert warm.gap <= max(cold.gap, 1e-3) * 1.1


def test_millions_of_requests_per_second_online():
    table = online(2_000_000)
    print("\n" + table.round(1).to_string(index=False), end="")
    assert table["million_per_s"].min() > 1


def test_memory_stays_below_2_gb():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform != "darwin" else 2**30)
    print(f"\npeak memory of the whole run: {peak:.2f} GB")
    assert peak < 2
