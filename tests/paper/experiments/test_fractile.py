"""The single-class study: known lines, and Table II read backwards."""

import numpy as np
import pandas as pd
import pytest

from kvcache import LengthDistribution, Wasserstein1
from kvcache.paper.claims.verdicts import Outcome, judge
from kvcache.paper.digests import load_digest
from kvcache.paper.experiments import fractile
from kvcache.paper.experiments.fractile import DEFAULT_RADIUS, RATIOS


@pytest.fixture(scope="module")
def burstgpt():
    return load_digest("burstgpt")


@pytest.fixture(scope="module")
def implied(burstgpt):
    return fractile.with_published_costs(burstgpt)


@pytest.fixture(scope="module")
def small():
    return LengthDistribution.from_samples([10, 20, 30, 40, 200], 400, name="small")


def test_table2_recomputed_by_hand(small):
    table = fractile.table2({"small": small}).set_index(["trace", "rho"])
    assert len(table) == 2 * len(RATIOS)
    row = table.loc[("small", 10)]
    # q* = 10/11 lies in the last atom, P90 too; S = 200/11 > 0.15 * 60.
    assert row["reservation"] == 200
    assert row["regime"] == "fractile"
    assert row["dro"] == row["saa"] == row["p90"] == pytest.approx((190 + 180 + 170 + 160) / 5)
    # P95 in whole blocks of 16: 208.
    assert row["p95"] == pytest.approx(row["p90"] + 8)
    assert row["max"] == 340
    assert row["mean"] == pytest.approx((10 * 140 + 50 + 40 + 30 + 20) / 5)
    assert row["gain_p95_pct"] == pytest.approx(100 * (1 - 140 / 148))
    assert table.loc[("published", 100), "gain_p90_pct"] == pytest.approx(100 * (1 - 1919 / 4328))


def test_costs_by_ratio_are_least_for_the_fractile(small):
    table = fractile.costs_by_ratio({"small": small}, [1, 5, 50])
    assert (table["excess_pct"] >= -1e-9).all()
    saa = table[table["policy"] == "SAA"]
    assert (saa["excess_pct"] == 0).all()
    assert saa["reservation"].tolist() == [30, 200, 200]
    assert saa["quantile"].tolist() == pytest.approx([0.6, 1, 1])


def test_critical_radii_and_the_least_bound(small):
    table = fractile.critical_radii({"small": small}).set_index("rho")
    for rho, row in table.iterrows():
        answer = DEFAULT_RADIUS.solve(small, rho, 1)
        assert row["critical"] * 60 == pytest.approx(answer.S)
        assert row["regime"] == answer.regime
        at, below = int(row["least_upper"]), int(row["least_upper"]) - 1
        assert DEFAULT_RADIUS.solve(small.with_upper(at), rho, 1).regime == "fractile"
        if below >= 200:
            assert DEFAULT_RADIUS.solve(small.with_upper(below), rho, 1).regime != "fractile"


def test_regimes_step_where_they_should(small):
    table = fractile.regimes(small, [400, 100], [4], np.linspace(0, 6, 61))
    for upper, rows in table.groupby("upper"):
        bounded = fractile.with_bound(small, upper)
        S, S2 = Wasserstein1.thresholds(bounded, 4, 1)
        tokens = rows["radius"] * bounded.mean
        expected = np.select([tokens <= S, tokens <= S2], ["fractile", "jump"], "support")
        assert rows["regime"].tolist() == expected.tolist()
        assert rows["reservation"].nunique() == 3
        assert bounded.upper == upper


def test_growth_hedged_starts_at_the_fractile(small):
    table = fractile.growth_hedged(small, [2, 10])
    first = table.groupby(["set", "rho"]).first()
    assert first["growth"].tolist() == pytest.approx([1] * len(first))
    assert (table["excess_pct"] >= -1e-9).all()
    scale = table[(table["set"] == "Scale shift") & (table["rho"] == 2)]
    assert scale["growth"].is_monotonic_increasing


# ---- Table II read backwards --------------------------------------------------------------------


def test_published_costs_of_each_baseline_are_one_line():
    found = fractile.implied_by_baselines()
    assert found["consistent"].all()
    for row in found.itertuples():
        rho, cost = fractile._published_costs(row.policy)
        slope, start = np.polyfit(rho, cost, 1)
        assert row.excess_low - 0.02 <= slope <= row.excess_high + 0.02
        assert row.unused_low - 0.5 <= start <= row.unused_high + 0.5
        assert row.offset_high - row.offset_low < 1


def test_intervals_hold_what_made_the_costs(monkeypatch, burstgpt):
    """Costs of known reservations on a known trace, rounded, are read back."""
    r = {"P90": 276, "P95": 480}
    rows = [
        {"rho": rho, "DRO": round(burstgpt.cost(burstgpt.quantile(rho / (1 + rho)), rho, 1))}
        | {name: round(burstgpt.cost(eta, rho, 1)) for name, eta in r.items()}
        for rho in RATIOS
    ]
    monkeypatch.setattr(fractile, "published", lambda part: {"rows": rows})
    for row in fractile.implied_by_baselines().itertuples():
        eta = r[row.policy]
        assert row.consistent
        assert row.excess_low <= burstgpt.excess(eta) <= row.excess_high
        assert row.unused_low <= burstgpt.shortfall(eta) <= row.unused_high
        assert row.offset_low <= eta - burstgpt.mean <= row.offset_high
    for row in fractile.implied_by_dro().itertuples():
        eta = burstgpt.quantile(row.rho / (1 + row.rho))
        assert row.concave
        assert row.excess_low <= burstgpt.excess(eta) <= row.excess_high
        assert row.offset_low <= eta - burstgpt.mean <= row.offset_high


def test_costs_that_are_no_line_are_found_out(monkeypatch):
    rows = [
        {"rho": rho, "P90": 100 + 3 * rho, "P95": 100 + 3 * rho + (5 if rho == 20 else 0)} for rho in RATIOS
    ]
    monkeypatch.setattr(fractile, "published", lambda part: {"rows": rows})
    assert fractile.implied_by_baselines()["consistent"].tolist() == [True, False]


def test_the_stated_mean_does_not_go_with_the_costs(burstgpt):
    table = fractile.implied_trace(burstgpt).set_index("quantity")
    mean = table.loc["mean, if P90 is as stated"]
    assert not mean["agrees"]
    assert 145 <= mean["implied_low"] <= mean["implied_high"] <= 146
    blocks = table.loc["P95 in blocks, if P90 is as stated"]
    assert blocks["implied_low"] <= 416 <= blocks["implied_high"]


def test_one_distribution_has_all_18_published_costs(implied):
    table = fractile.table2({"implied": implied}).set_index(["trace", "rho"])
    for rho in RATIOS:
        ours, theirs = table.loc[("implied", rho)], table.loc[("published", rho)]
        for name in ("p90", "p95"):
            assert ours[name] == pytest.approx(theirs[name], abs=0.5001)
        assert ours["saa"] == pytest.approx(theirs["dro"], abs=0.5001)
    assert implied.quantile([0.9, 0.99]).tolist() == [276, 1586]
    assert implied.reconstructed


def test_on_it_dro_is_the_fractile_and_above_the_fractile_it_would_cost_more(implied):
    """With the bound of the whole file the paper's DRO column shows no robustness at all."""
    for rho in RATIOS:
        answer = DEFAULT_RADIUS.solve(implied, rho, 1)
        assert answer.regime == "fractile"
        assert implied.cost(answer.eta * 1.2, rho, 1) > implied.cost(answer.eta, rho, 1)


def test_excess_curves_are_those_of_the_distributions(small):
    table = fractile.excess_curves({"small": small})
    assert table["offset"].iloc[0] == -60
    assert table["excess"].iloc[0] == 60
    assert table["excess"].iloc[-1] == 0
    assert np.all(np.diff(table["excess"]) < 0)


# ---- verdicts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tables():
    traces = fractile.all_traces()
    conversation = traces["azure-2023-conv"]
    return {
        "table2": fractile.table2(traces),
        "fig2b": fractile.costs_by_ratio(traces, RATIOS),
        "critical_radius": fractile.critical_radii(traces),
        "regimes": fractile.regimes(conversation, (1000, 4096), (10,), np.geomspace(0.01, 20, 60)),
        "kv_cache": fractile.kv_cache_sizes(),
    }


@pytest.mark.parametrize(
    ("claim", "outcome"),
    [
        ("C01", Outcome.PARTLY),
        ("C02", Outcome.REPRODUCED),
        ("C03", Outcome.PARTLY),
        ("C04", Outcome.NOT_REPRODUCED),
        ("C20", Outcome.PARTLY),
    ],
)
def test_verdicts_on_the_committed_traces(tables, claim, outcome):
    assert judge(claim, tables).verdict is outcome


def test_verdicts_follow_the_tables(tables):
    """Other results lead to other verdicts."""
    table = tables["table2"]
    published = table[table["trace"] == "published"]
    as_published = published.assign(trace="burstgpt", regime="fractile", saa=published["dro"])
    only = tables | {"table2": pd.concat([published, as_published])}
    assert judge("C01", only).verdict is Outcome.REPRODUCED
    assert judge("C03", only).verdict is Outcome.REPRODUCED
    dear = table.assign(gain_p90_pct=table["gain_p90_pct"].where(table["trace"] != "burstgpt", -1.0))
    assert judge("C01", tables | {"table2": dear}).verdict is Outcome.NOT_REPRODUCED
    flat = table.assign(p90=table["saa"])
    assert judge("C02", tables | {"table2": flat}).verdict is Outcome.PARTLY
    jumped = table.assign(regime="jump")
    assert judge("C03", tables | {"table2": jumped}).verdict is Outcome.NOT_REPRODUCED
    growing = tables["regimes"].assign(regime="jump", reservation=lambda t: t["fractile"] * (1 + t["radius"]))
    assert judge("C04", tables | {"table2": jumped, "regimes": growing}).verdict is Outcome.REPRODUCED
    grouped = tables["kv_cache"].assign(mb_per_token=2.5)
    assert judge("C20", tables | {"kv_cache": grouped}).verdict is Outcome.REPRODUCED
