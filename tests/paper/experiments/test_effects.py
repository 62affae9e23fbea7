"""What a choice does: checked by hand where that is possible, and against the committed table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.hardware import GPU, Model, ParallelConfig, kv_capacity
from kvcache.paper.assumptions import ASSUMPTIONS
from kvcache.paper.experiments import effects
from kvcache.paper.experiments.effects import allen_cunneen, measure
from kvcache.paper.results import read_table
from kvcache.queueing import mean_residual, mean_wait


def rows(assumption: str) -> dict[tuple[str, str], dict]:
    return {(row["metric"], row["alternative"]): row for row in measure(assumption)}


# ---- M/G/c --------------------------------------------------------------------------------------


@given(st.floats(0.01, 0.99), st.floats(0.1, 50), st.floats(0, 4))
def test_one_server_is_pollaczek_khinchin(load, mean, scv):
    second = (1 + scv) * mean**2
    expected = mean_wait(load / mean, mean, second)
    assert allen_cunneen(1, load, mean_residual(mean, second)) == pytest.approx(expected, rel=1e-9)


def test_exponential_service_is_erlang_c():
    # M/M/2 at offered load 1.5: P(wait) = 9/14, wait = P / (2 mu - lambda) with mu = 1
    assert allen_cunneen(2, 1.5, 1.0) == pytest.approx((9 / 14) / 0.5)
    # a hundred servers by the recursion of Erlang's B
    servers, offered, blocked = 100, 95.0, 1.0
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waiting = blocked / (1 - offered / servers * (1 - blocked))
    assert allen_cunneen(100.9, offered, 1.0) == pytest.approx(waiting / (servers - offered))
    assert math.isinf(allen_cunneen(2, 2.0, 1.0))


# ---- the experiments ----------------------------------------------------------------------------


def test_every_assumption_has_an_experiment_and_no_other():
    assert list(effects._EXPERIMENTS) == [a.id for a in ASSUMPTIONS]
    with pytest.raises(KeyError, match="assumption 'A99' has no experiment"):
        measure("A99")


def test_a_number_that_does_not_exist_has_no_change():
    row = effects._effect("wait", "a", "b", 2.0, math.inf)
    assert (row["baseline"], row["changed"], row["relative"]) == (2.0, None, None)
    assert effects._effect("share", "a", "b", 0.0, 3.0)["relative"] is None
    assert effects._effect("cost", "a", "b", 4.0, 5.0)["relative"] == 0.25
    row = effects._effect("cost", "a", "b", 123456.0, 123457.0)
    assert (row["baseline"], row["changed"], row["relative"]) == (123500.0, 123500.0, 0.0)
    assert effects._effect("wait", "a", "b", 3.0, 1e-27)["changed"] == 0


def test_kv_bytes_and_memory_by_hand():
    found = rows("A9")["M_k of TP4xPP2, tokens", "8 KV heads"]
    left = 0.9 * 8 * 80e9 - 140e9
    assert found["baseline"] == pytest.approx(left / 2_621_440, rel=1e-3)
    grouped = Model.preset("Llama-3-70B")
    assert found["changed"] == pytest.approx((0.9 * 8 * 80e9 - grouped.weight_bytes) / 327_680, rel=1e-3)
    memory = rows("A12")["M_k of TP2, tokens", "1 GB per GPU"]
    parallel = ParallelConfig(2, 1)
    gpu, model = GPU.preset("A100-80GB"), Model.preset("70B-MHA")
    assert memory["changed"] == pytest.approx(kv_capacity(gpu, model, parallel, overhead_bytes=1e9), rel=1e-3)


def test_dro_is_never_dearer_once_all_are_priced_at_their_worst_case():
    found = rows("A6")
    metric = next(metric for metric, _ in found if metric.startswith("cells of"))
    assert found[metric, "all at their worst case"]["changed"] == 0
    assert (
        found[metric, "DRO at its worst case"]["changed"]
        > found[metric, "DRO at its worst case"]["baseline"]
        > 0
    )


def test_a_radius_in_tokens_reserves_the_fractile():
    found = rows("A1")["tokens for conversation, rho 20", "0.15 tokens"]
    from kvcache.paper.digests import load_digest

    assert found["changed"] == load_digest("azure-2023-conv").quantile(20 / 21)
    assert found["baseline"] > 1.5 * found["changed"]


@pytest.mark.parametrize("assumption", ["A6", "A10", "A14", "A15"])
def test_the_committed_numbers_are_measured_again(assumption, monkeypatch):
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    committed = read_table("assumptions.csv", "quick")
    committed = committed[committed["id"] == assumption]
    fresh = measure(assumption)
    assert [row["metric"] for row in fresh] == committed["metric"].tolist()
    for name in ("baseline", "changed"):
        assert [row[name] for row in fresh] == pytest.approx(committed[name].tolist(), rel=1e-5), (
            "run notebook 08"
        )
