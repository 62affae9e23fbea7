"""Each judge on made-up tables: it agrees where the claim is true in them, and not where it is false."""

import numpy as np
import pandas as pd
import pytest

from kvcache.paper.claims.verdicts import Outcome, judge
from kvcache.paper.experiments.comparison import decoded_table4
from kvcache.paper.experiments.runner import VARIANTS
from kvcache.paper.methods.baselines import PAPER_METHODS

CLASSES = ("chat", "code", "conversation")


def load_table(rejects_at=1.0, shrinks=False):
    """Cost 100 x load up to capacity; then rejection, or smaller reservations first."""
    loads = np.arange(1, 21) / 8
    extra = np.maximum(loads - 1, 0) * 1000
    rejected = np.where(loads > rejects_at, extra, 0.0)
    frame = pd.DataFrame({"load": loads, "rejection_term": rejected, "objective": 100 * loads + extra})
    for c in CLASSES:
        frame[f"quantile_{c}"] = np.where(shrinks & (loads > 1), 0.5, 0.91)
    return {"fig3a": frame}


def test_c08():
    assert judge("C08", load_table()).verdict is Outcome.REPRODUCED
    late = judge("C08", load_table(rejects_at=2.0, shrinks=True))
    assert late.verdict is Outcome.PARTLY
    assert "50% quantile" in late.evidence
    assert judge("C08", load_table(rejects_at=9.0)).verdict is Outcome.NOT_REPRODUCED


def premium_tables(tokens=0.004, relative=0.004):
    rows = [
        {"trace": trace, "rho": rho, "unit": unit, "radius": radius, "premium": value * rho / 10,
         "holds": value * rho / 10 < (0.013 if radius == 0.5 else 0.005)}
        for trace in ("BurstGPT", "other")
        for rho in (2, 10, 50)
        for unit, value in (("tokens", tokens), ("mean output", relative))
        for radius in (0.2, 0.5)
    ]  # fmt: skip
    solved = pd.DataFrame({"premium": [0.1], "predicted": [0.1], "classes_jumped": [0]})
    return {"fig3b": solved, "fig3b_limits": pd.DataFrame(rows)}


def test_c09():
    assert judge("C09", premium_tables(0.0005, 0.0005)).verdict is Outcome.REPRODUCED
    assert judge("C09", premium_tables(0.0005, 0.5)).verdict is Outcome.PARTLY
    assert judge("C09", premium_tables(0.5, 0.5)).verdict is Outcome.NOT_REPRODUCED


def weight_tables(quantile=0.909, cost=1.0, shed_at=0.5):
    rows = []
    for weight in ("c_slo", "c_rej", "kappa"):
        for multiple in (0.1, 0.2, 0.5, 1.0, 2.0, 5.0):
            shed = weight == "c_rej" and multiple <= shed_at
            row = {"weight": weight, "multiple": multiple, "objective": cost if multiple == 5 else 1.0}
            row |= {"p99_s": 1.0, **{f"quantile_{c}": quantile for c in CLASSES}}
            rows.append(row | {f"admitted_{c}": 0.0 if shed and c == "chat" else 1.0 for c in CLASSES})
    threshold = pd.DataFrame(
        {"class": CLASSES, "worst_case_cost": [900.0, 100.0, 500.0], "share_of_default": [0.18, 0.02, 0.1]}
    )
    return {"fig4": pd.DataFrame(rows), "rejection_threshold": threshold}


def test_c10():
    assert judge("C10", weight_tables()).verdict is Outcome.REPRODUCED
    assert judge("C10", weight_tables(shed_at=0.1)).verdict is Outcome.PARTLY
    moved = judge("C10", weight_tables(quantile=0.7, cost=3.0))
    assert moved.verdict is Outcome.PARTLY
    assert "cost within 200.0%" in moved.ours


def cost_tables(bounded=("DRO",), p90=0.99, high=1.6, map_high=1.6, lp=(1.1, 3.0)):
    slopes = dict(zip(("LP+1sigma", "LP+2sigma"), lp, strict=True))
    rows = [
        {"method": m, "rho": rho, "admission": "forced",
         "reservation_cost": 100.0 * (slopes[m] if m in slopes and rho == 100 else 1.0)}
        for m in PAPER_METHODS
        for rho in (2, 10, 100)
    ]  # fmt: skip
    p99 = {"P90": p90, "LP+1sigma": p90, "P99": high, "Max": high}
    table = pd.DataFrame(
        {"method": m, "p99_s": 10 * p99.get(m, 1.0), "preemption_pct": 9.0, "cost_rho100": 100.0}
        for m in PAPER_METHODS
    )
    over = {"P90": 0.99, "LP+1sigma": 0.99, "P99": map_high, "Max": map_high, "DRO": 1.0}
    grid = pd.DataFrame(
        [{"trace": "t", "load": 0.5, "factor": 2.5, "method": m, "p99_over_dro": v} for m, v in over.items()]
    )
    worst = pd.DataFrame(
        [
            {"trace": "t", "method": m, "largest": 1.5 if m in bounded else 5.0}
            for m in (*PAPER_METHODS, "W-infinity")
        ]
    )
    return {
        "cost_rho": pd.DataFrame(rows),
        "table4": table,
        "table4_decoded": decoded_table4(),
        "latency_map": grid,
        "bounded": worst,
    }


def test_c13():
    assert judge("C13", cost_tables()).verdict is Outcome.REPRODUCED
    assert judge("C13", cost_tables(bounded=("DRO", "P95"))).verdict is Outcome.NOT_REPRODUCED
    partly = judge("C13", cost_tables(bounded=("DRO", "SAA", "W-infinity")))
    assert partly.verdict is Outcome.PARTLY
    assert "so do SAA, W-infinity" in partly.ours


def test_c14():
    assert judge("C14", cost_tables()).verdict is Outcome.REPRODUCED
    assert judge("C14", cost_tables(high=0.5)).verdict is Outcome.PARTLY
    assert judge("C14", cost_tables(high=0.5, map_high=0.5)).verdict is Outcome.NOT_REPRODUCED


def test_c21():
    assert judge("C21", cost_tables(lp=(2.0, 3.0))).verdict is Outcome.REPRODUCED
    assert judge("C21", cost_tables(lp=(3.0, 1.1))).verdict is Outcome.PARTLY
    assert judge("C21", cost_tables(lp=(1.0, 1.1))).verdict is Outcome.NOT_REPRODUCED


def ablation_tables(routing=7.0, saa=1.85, cost=1.0, tail=1.22, mixed=7.0):
    factors = {
        "full": (1.0, 1.0, 1.0),
        "-Routing": (1.0, routing, 1.0),
        "-DRO (SAA)": (saa, 1.0, 1.0),
        "-Prefix caching": (cost, 1.0, tail),
    }
    seeds = pd.DataFrame(
        [
            {"load": 0.02, "seed": seed, "variant": v, "reservation_cost": 100 * a, "total_cost": 10 * b,
             "p99_s": c}
            for v, (a, b, c) in factors.items()
            for seed in range(3)
        ]
    )  # fmt: skip
    prefix = pd.DataFrame(
        [
            {"shift": 1.0, "load": 0.5, "variant": v, "p99_s": tail if v != "full" else 1.0,
             "reservation_cost": 100 * (cost if v != "full" else 1.0)}
            for v in ("full", "-Prefix caching")
        ]
    )  # fmt: skip
    return {
        "table5_seeds": seeds,
        "partitions": pd.DataFrame({"ratio": [1.0, mixed], "uniform_unstable": ["", "TP2xPP1"]}),
        "fig6_regimes": pd.DataFrame({"classes_jumped": [0, 1, 2], "saa_over_dro": [1.0, 1.8, 3.0]}),
        "prefix": prefix,
    }


def test_the_ablation_tables_name_the_variants():
    assert set(ablation_tables()["table5_seeds"]["variant"]) == set(VARIANTS)


@pytest.mark.parametrize(
    ("claim", "changed", "outcome"),
    [
        ("C15", {}, Outcome.REPRODUCED),
        ("C15", {"routing": 1.0}, Outcome.PARTLY),
        ("C15", {"routing": 1.0, "mixed": 1.1}, Outcome.NOT_REPRODUCED),
        ("C16", {}, Outcome.REPRODUCED),
        ("C16", {"saa": 1.4}, Outcome.PARTLY),
        ("C16", {"saa": 1.0}, Outcome.NOT_REPRODUCED),
        ("C17", {}, Outcome.REPRODUCED),
        ("C17", {"tail": 1.02}, Outcome.PARTLY),
        ("C17", {"cost": 1.3}, Outcome.NOT_REPRODUCED),
    ],
)
def test_c15_to_c17(claim, changed, outcome):
    assert judge(claim, ablation_tables(**changed)).verdict is outcome


def tail_table(dro=(3.0, 9.1), saa=(5.4, 18.0)):
    rows = [
        {"policy": policy, "shift": shift, "p99_s": value}
        for policy, ends in {"DRO": dro, "SAA": saa, "other": (1.0, 2.0)}.items()
        for shift, value in zip((1.0, 3.0), ends, strict=True)
    ]
    return {"fig6": pd.DataFrame(rows)}


def test_c18():
    assert judge("C18", tail_table()).verdict is Outcome.REPRODUCED
    assert judge("C18", tail_table(saa=(3.0, 9.5))).verdict is Outcome.PARTLY
    assert judge("C18", tail_table(dro=(3.0, 3.1))).verdict is Outcome.NOT_REPRODUCED
