"""Second verdicts, on made-up tables: for the claim where it is true in them, against it where it is not."""

import pandas as pd
import pytest

from kvcache.paper.claims import verdicts as module
from kvcache.paper.claims.judges.engine import PAPER_RULES
from kvcache.paper.claims.verdicts import Outcome, judge, save_engine_verdicts
from kvcache.paper.results import read_table

LOADS = (0.6, 0.9, 1.1)


def rules(goodput=None, preempted=None, latency=None):
    """The same at every point, but for the rules given."""
    rows = [
        {"workload": workload, "pool": 56_000, "load": load, "seed": seed, "rule": rule,
         "goodput": (goodput or {}).get(rule, 0.5), "preempted": (preempted or {}).get(rule, 0.1),
         "latency_p99_s": (latency or {}).get(rule, 10.0)}
        for workload in ("W1", "W2")
        for load in LOADS
        for seed in range(2)
        for rule in (*PAPER_RULES, "default", "u*")
    ]  # fmt: skip
    return {"engine_rules": pd.DataFrame(rows), "engine_ratios": pd.DataFrame({"rho": [20.0, 3000.0]})}


def test_c02():
    assert judge("C02", rules(), engine=True).verdict is Outcome.NOT_REPRODUCED
    assert judge("C02", rules({"P90": 0.6}), engine=True).verdict is Outcome.PARTLY
    assert judge("C02", rules({"P90": 0.6, "P95": 0.7}), engine=True).verdict is Outcome.REPRODUCED


@pytest.mark.parametrize(
    ("late", "slow", "outcome"),
    [(0.5, 1.5, Outcome.REPRODUCED), (0.2, 1.5, Outcome.PARTLY), (0.2, 9.0, Outcome.NOT_REPRODUCED)],
)
def test_c08(late, slow, outcome):
    tables = rules({"default": 0.5})
    table = tables["engine_rules"]
    table.loc[(table["rule"] == "default") & (table["load"] == 0.6), "goodput"] = late
    loads = pd.DataFrame(
        {"workload": "W1", "load": [0.4, 0.6], "realised": [0.4, 0.6], "tpot_median_s": [1, slow]}
    )
    assert judge("C08", tables | {"engine_operating": loads}, engine=True).verdict is outcome


def shrink(reserved, headroom):
    rows = [
        {"rule": rule, "known": known, "used": 0.5 * factor, "throughput": factor, "scale": 0.4}
        for rule, gain in (("default", 1.0), ("SAA", reserved), ("u*", headroom))
        for known, factor in ((1.0, 1.0), (0.4, gain))
    ]
    return {"engine_shrink": pd.DataFrame(rows)}


def test_c11():
    assert judge("C11", shrink(1.3, 1.1), engine=True).verdict is Outcome.REPRODUCED
    assert judge("C11", shrink(1.3, 1.0), engine=True).verdict is Outcome.PARTLY
    assert judge("C11", shrink(1.01, 1.2), engine=True).verdict is Outcome.NOT_REPRODUCED


FIXED = ("P90", "P95", "P99", "Mean", "LP+1sigma", "LP+2sigma")


def growth(lead=lambda scale, ratio: 0.0, latency=lambda rule, scale: scale * 10.0):
    rows = [
        {"rule": rule, "scale": scale, "ratio": ratio, "seed": 0, "latency_p99_s": latency(rule, scale),
         "goodput": 0.4 + (lead(scale, ratio) if rule == "DRO" else 0.0)}
        for rule in (*FIXED, "DRO", "SAA", "default", "u*")
        for scale in (1.0, 2.5, 3.0)
        for ratio in (2.0, 10.0, 100.0)
    ]  # fmt: skip
    aware = [{"rule": rule, "known": known, "goodput": 0.5} for rule in ("SAA", "u*", "default")
             for known in (1.0, 2.5)]  # fmt: skip
    return {"engine_growth": pd.DataFrame(rows), "engine_aware": pd.DataFrame(aware)}


def test_c12():
    def both(scale, ratio):
        return 0.05 * scale * ratio**0.2

    assert judge("C12", growth(both), engine=True).verdict is Outcome.REPRODUCED
    assert (
        judge("C12", growth(lambda scale, ratio: 0.05 * scale), engine=True).verdict is Outcome.NOT_REPRODUCED
    )
    assert judge("C12", growth(), engine=True).verdict is Outcome.NOT_REPRODUCED


def test_c13():
    only = dict.fromkeys((*PAPER_RULES, "default", "u*"), 0.3) | {"SAA": 0.5}
    assert judge("C13", rules(only), engine=True).verdict is Outcome.REPRODUCED
    assert judge("C13", rules(), engine=True).verdict is Outcome.PARTLY
    assert judge("C13", rules({"u*": 0.9}), engine=True).verdict is Outcome.NOT_REPRODUCED


def test_c14():
    paper = {"SAA": 10.0, "P90": 9.5, "LP+1sigma": 9.8, "P99": 12.0, "no evict (L_max)": 20.0}
    assert judge("C14", rules(latency=paper), engine=True).verdict is Outcome.REPRODUCED
    assert judge("C14", rules(latency=paper | {"P90": 12.0}), engine=True).verdict is Outcome.PARTLY
    assert judge("C14", rules(latency={"P90": 12.0}), engine=True).verdict is Outcome.NOT_REPRODUCED


def test_c16_and_c18():
    def slow_saa(rule, scale):
        return (2.0 if rule == "SAA" else 1.0) * 10 * scale

    assert judge("C16", growth(latency=slow_saa), engine=True).verdict is Outcome.REPRODUCED
    assert judge("C18", growth(latency=slow_saa), engine=True).verdict is Outcome.REPRODUCED
    same = growth()
    assert judge("C16", same, engine=True).verdict is Outcome.NOT_REPRODUCED
    assert judge("C18", same, engine=True).verdict is Outcome.PARTLY
    flat = growth(latency=lambda rule, scale: 10.0)
    assert judge("C18", flat, engine=True).verdict is Outcome.NOT_REPRODUCED


def test_c21():
    assert judge("C21", rules(preempted={"LP+1sigma": 0.4}), engine=True).verdict is Outcome.REPRODUCED
    assert judge("C21", rules(preempted={"LP+1sigma": 0.0}), engine=True).verdict is Outcome.NOT_REPRODUCED


def test_second_verdicts_stay_apart_from_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    rows = save_engine_verdicts(
        [judge("C21", rules(), engine=True), judge("C02", rules(), engine=True)], "quick"
    )
    assert rows["id"].tolist() == ["C02", "C21"]
    assert read_table("engine_claims.csv", "quick")["verdict"].tolist() == rows["verdict"].tolist()
    assert not (tmp_path / "data" / "results" / "claims").exists()
    module._load_judges()
    assert set(module._ENGINE_JUDGES) == {"C02", "C08", "C11", "C12", "C13", "C14", "C16", "C18", "C21"}
    assert module._JUDGES["C02"] is not module._ENGINE_JUDGES["C02"]
    with pytest.raises(KeyError, match="claim 'C01' has no judge; judged are C02"):
        judge("C01", {}, engine=True)
