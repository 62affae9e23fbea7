"""SGLang's flag: against draws, its simulated rule, and its own source where the package is installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvcache.engine import JointLengths, StepCost, headroom, simulate
from kvcache.engine.sglang import reserved_tokens, schedule_conservativeness
from kvcache.paper.methods.rivals import SGLang

COST = StepCost(0.0310602, 9.11623e-5, 8 * 5.31738e-8, 2.2082e-4)
POOL = 200_000


def law(seed: int = 0, n: int = 4000) -> JointLengths:
    rng = np.random.default_rng(seed)
    return JointLengths.from_samples(rng.integers(100, 900, n), rng.geometric(1 / 250, n).clip(1, 500))


@pytest.mark.parametrize("limit", [500, 6000])
def test_the_tokens_reserved_are_those_of_drawn_running_requests(limit):
    lengths, rng = law(), np.random.default_rng(1)
    outputs = rng.choice(
        lengths.outputs, 400_000, p=lengths.probabilities * lengths.outputs / lengths.mean_output
    )
    age = rng.integers(0, outputs)  # as found at a random iteration
    context = np.average(
        lengths.inputs + lengths.outputs / 2 + 0.5, weights=lengths.probabilities * lengths.outputs
    )
    allowance = np.minimum(limit - age, 4096).mean()
    expected = 0.098 * POOL / context * allowance + min(limit, 4096)
    assert reserved_tokens(lengths, POOL, limit) == pytest.approx(expected, rel=0.01)
    assert reserved_tokens(lengths, POOL, limit, 9.0) > reserved_tokens(lengths, POOL, limit)


def test_the_flag_reserves_the_headroom_or_is_at_its_end():
    lengths = law()
    u = headroom(lengths, POOL, COST, 1)
    x = schedule_conservativeness(lengths, POOL, COST, 500)
    assert 0 < x < 1 / 0.7
    assert reserved_tokens(lengths, POOL, 500, x) == pytest.approx(u, rel=1e-9)
    assert schedule_conservativeness(lengths, POOL, COST, 4096) == 0  # one request's allowance is beyond u*
    assert u < 4096
    with pytest.raises(ValueError, match="conservativeness: -1"):
        reserved_tokens(lengths, POOL, 500, -1)


def test_a_simulated_group_keeps_about_that_many_tokens_free():
    rng = np.random.default_rng(3)
    inputs, outputs = law().sample(rng, 3000)
    table = pd.DataFrame({"arrival_s": 0.0, "input_tokens": inputs, "output_tokens": outputs})
    free = []
    for x in (0.2, 1.2):
        run = simulate(table, pool=POOL, step_cost=COST, admission=SGLang(500, x), block=1, max_running=2000)
        line = run.timeline
        middle = line[(line["time_s"] > 0.3 * run.seconds) & (line["time_s"] < 0.7 * run.seconds)]
        free.append(POOL - middle["used_blocks"].mean())
    expected = reserved_tokens(law(), POOL, 500, 1.2) - reserved_tokens(law(), POOL, 500, 0.2)
    assert free[1] - free[0] == pytest.approx(expected, rel=0.25)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
@pytest.mark.parametrize("x", [0.0, 0.3, 1.0, 5.0])
def test_the_ratio_is_that_of_sglang_itself(x, monkeypatch):
    """Its tracker alone is loaded, from the installed files: the package wants a GPU's libraries."""
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
    stubs = {name: types.ModuleType(name) for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context")}
    stubs["sglang.srt.runtime_context"].get_schedule = lambda: types.SimpleNamespace(
        schedule_conservativeness=x
    )
    for name, path in (
        ("sglang.srt.environ", "environ.py"),
        ("tracker", "managers/scheduler_components/new_token_ratio_tracker.py"),
    ):
        spec = importlib.util.spec_from_file_location(name, root / path)
        stubs[name] = importlib.util.module_from_spec(spec)
        for known, module in stubs.items():
            monkeypatch.setitem(sys.modules, known, module)
        spec.loader.exec_module(stubs[name])
    tracker = stubs["tracker"].NewTokenRatioTracker.from_config()
    for _ in range(600):
        tracker.decay_step()
    lengths = law()
    own = reserved_tokens(lengths, POOL, 500, 0.0)
    ahead = (reserved_tokens(lengths, POOL, 500, 1.0) - own) / 0.098
    assert reserved_tokens(lengths, POOL, 500, x) == pytest.approx(own + tracker.current * ahead, rel=1e-9)
