"""The engine notebook's tables on tiny grids, against counts made here and against what must hold."""

import numpy as np
import pandas as pd
import pytest

from kvcache.engine import Demand, Watermark, lundberg_exponent, simulate
from kvcache.paper.experiments import engine
from kvcache.paper.experiments.engine import COST, Setting, lengths, point, requests, scores, steady


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    monkeypatch.setenv("EXECUTOR", "serial")
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))


def test_rules_are_made_from_one_half_and_judged_on_the_other():
    for name in engine.WORKLOADS:
        past, law = lengths(name, 0), lengths(name, 1)
        assert past.mean_output == pytest.approx(law.mean_output, rel=0.05)
        assert past.weights.size != law.weights.size or (past.weights != law.weights).any()
        assert law.longest <= (16_384 if name == "W3" else 8_192)


def test_requests_are_the_same_at_every_load():
    law = lengths("W1", 1)
    slow, fast = (requests(law, 50, 3, rate) for rate in (1.0, 4.0))
    pd.testing.assert_frame_equal(slow.drop(columns="arrival_s"), fast.drop(columns="arrival_s"))
    np.testing.assert_allclose(slow["arrival_s"], 4 * fast["arrival_s"])
    assert (requests(law, 5, 3)["arrival_s"] == 0).all()


def test_scores_by_hand():
    # Two requests alone, one after the other, in a group that has room: 5 iterations for 10 + 5 tokens.
    table = pd.DataFrame({"arrival_s": [0.0, 100.0], "input_tokens": [10, 10], "output_tokens": [5, 40_000]})
    found = scores(simulate(table, pool=1_600, step_cost=COST), 1_600)
    assert found["refused"] == 1
    assert found["goodput"] == 0.5, "a refused request is not good"
    assert found["preemptions"] == 0
    assert found["recomputing"] == 0
    first = COST.seconds(0, 0, 10)
    assert found["ttft_p99_s"] == pytest.approx(first)
    rest = [COST.seconds(1, 10 + k) for k in range(4)]
    assert found["tpot_p99_s"] == pytest.approx(np.mean(rest), rel=1e-3)
    assert found["latency_p99_s"] == pytest.approx(first + sum(rest), rel=1e-3)


def test_every_rule_serves_every_request_that_fits():
    table = pd.DataFrame(point("W2", 24_000, 1.0, 0, 40, list(engine.RULES)))
    assert table["rule"].tolist() == list(engine.RULES)
    assert (table["refused"] == 0).all()
    assert table["realised"].nunique() == 1
    assert table["goodput"].between(0, 1).all()
    assert (table["throughput"] > 0).all()
    rows = table.set_index("rule")
    assert rows.loc["no evict (L_max)", "preemptions"] == 0
    assert rows.loc["no evict (L_max)", "used"] < rows.loc["default", "used"]
    at = Setting(lengths("W2", 0), 24_000)
    assert at.fixed("DRO") >= at.fixed("SAA") == pytest.approx(at.law.output_lengths.quantile(10 / 11))
    assert Setting(at.law, 24_000, ratio=100).fixed("SAA") > at.fixed("SAA")


def test_longer_outputs_and_what_was_known_of_them():
    plain, longer, known = (
        pd.DataFrame(point("W1", 24_000, 0.4, 1, 40, ["SAA"], scale=scale, known=known)).iloc[0]
        for scale, known in ((1.0, 1.0), (2.0, 1.0), (2.0, 2.0))
    )
    assert longer["latency_p99_s"] > plain["latency_p99_s"]
    assert longer["realised"] > 1.5 * plain["realised"]
    assert known["preempted"] <= longer["preempted"]


def test_the_picture_counts_what_happened():
    line, rows = engine.picture("W1", 16_000, 1.0, 0, 80)
    evicted, entered = int(line["evicted"].sum()), int(line["entered"].sum())
    assert line["finished"].sum() == 80 == line["arrived"].sum()
    assert entered - evicted == 80
    assert evicted == pytest.approx(rows["preemptions"].sum(), abs=1)
    assert line["used"].between(0, 1).all()


def test_an_operating_point_near_what_is_simulated():
    row = engine.operating_task("W1", 200_000, 0.5, 0, 300)
    assert row["predicted_tpot_s"] == pytest.approx(row["tpot_median_s"], rel=0.15)
    assert row["preempted"] == 0


def test_the_middle_of_a_run_in_which_all_are_alike():
    table = pd.DataFrame({"arrival_s": 0.0, "input_tokens": [160] * 200, "output_tokens": [160] * 200})
    run = simulate(table, pool=100_000, step_cost=COST, max_running=4)
    preemptions, throughput = steady(run)
    assert preemptions == 0
    assert throughput == pytest.approx(run.throughput, rel=0.06)


def test_the_law_and_its_errors():
    table = engine.law_of_overflow([("W1", 16_000)], (0, 1, 3), 2, 400)
    assert table.groupby("multiple")["preemptions"].mean().is_monotonic_decreasing
    ratio = table.groupby("multiple")["predicted"].first()
    assert ratio[1] / ratio[0] == pytest.approx(np.exp(-1))
    assert (table["corrected"] < table["predicted"]).all()
    made = pd.DataFrame(
        {"workload": "W1", "pool": 1, "multiple": [0, 0, 1, 1], "requests": 100,
         "preemptions": [0.4, 0.2, 0.01, 0.01], "predicted": 0.2, "corrected": 0.3}
    )  # fmt: skip
    errors = engine.law_errors(made)
    assert errors["error"].tolist() == [pytest.approx(0.5), pytest.approx(np.nan, nan_ok=True)]
    assert errors["error_corrected"].iloc[0] == pytest.approx(0.0)
    assert engine.told(errors).startswith("1 cells: median error 50%, 0 within 15 %, 0 within 20 %")


def test_memory_is_scarce_where_it_binds():
    assert engine.scarce("W1", 56_000)
    assert not engine.scarce("W1", 1_000_000), "the limit on running requests binds"
    assert not engine.scarce("mooncake-conversation", 56_000), "its longest request does not fit"


def test_newsvendor_costs_and_the_best_of_a_grid():
    saturated = engine.law_of_overflow([("W1", 56_000)], (0, 3, 8), 2, 500)
    curves = engine.newsvendor(saturated)
    np.testing.assert_allclose(curves["sum_pct"], curves["idle_pct"] + curves["recomputed_pct"])
    assert curves.loc[curves["best"], "lost_pct"].item() == 0
    assert (curves["lost_pct"] >= -1e-9).all()
    row = engine.best_headroom(curves).iloc[0]
    assert 0 < row["u_star_share"] < 0.05
    assert row["gain_best_pct"] >= row["gain_pct"] - 1e-9
    assert row["gain_predicted_pct"] > 0


def test_ratios_give_the_headroom():
    table = engine.engine_ratios(["W1", "W3"], [("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 4)])
    theta = {name: lundberg_exponent(lengths(name, 0)) for name in ("W1", "W3")}
    expected = np.log(table["rho"]) / table["workload"].map(theta)
    np.testing.assert_allclose(table["u_star"], expected, rtol=1e-6)
    cached = table[table["prefix_cache"]].set_index("workload")["rho"]
    assert (cached < table[~table["prefix_cache"]].set_index("workload")["rho"]).all()


def test_intervals_are_students():
    table = pd.DataFrame({"rule": "a", "seed": range(4), "x": [1.0, 2.0, 3.0, 4.0]})
    row = engine.intervals(table, ["rule"], ["x"]).iloc[0]
    assert (row["seeds"], row["x"]) == (4, 2.5)
    assert row["x_high"] - row["x"] == pytest.approx(3.182446 * np.sqrt(5 / 3) / 2)


def test_gains_and_the_watermark_that_was_picked_afterwards():
    rows = [
        {"workload": "W1", "pool": 1, "load": load, "seed": seed, "rule": rule,
         "goodput": good + 0.001 * seed,
         **dict.fromkeys(("throughput", "preempted", "worst_gap_p99_s", "ttft_p99_s", "refused"), 0.0)}
        for load, goods in ((0.6, (0.5, 0.6, 0.4)), (0.9, (0.3, 0.2, 0.4)))
        for rule, good in zip(("default", "watermark 0.01", "watermark 0.05"), goods, strict=True)
        for seed in range(3)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    found = engine.overall(table).set_index("rule")
    assert found.loc["best watermark, picked after", "goodput"] == pytest.approx(0.501)
    assert found.loc["watermark 0.01", ["above", "below"]].tolist() == [1, 1]
    assert found.loc["default", ["above", "below"]].tolist() == [0, 0]
    wins = engine.clear_wins(engine.rates_against_default(table), "watermark 0.05")
    assert wins.loc[("W1", 1)].tolist() == [1, 0, 1]


def test_bursts_are_as_reported():
    for watermark, within in ((0.0, 0.15), (0.02, 0.15), (0.1, 0.25)):
        runs = pd.DataFrame([engine.burst_task(watermark, seed) for seed in range(3)])
        assert runs["preemptions"].mean() == pytest.approx(runs["reported"].iloc[0], rel=within)


def test_a_watermark_is_what_the_name_says():
    at = Setting(lengths("W1", 0), 56_000)
    assert engine.RULES["watermark 0.01"](at) == Watermark(0.01)
    assert engine.RULES["default"](at) is None
    few = engine.RULES["max running"](at).limit
    assert few == int(56_000 / (at.law.mean_input + at.law.output_lengths.quantile(0.9)))
    assert few < 56_000 / Demand.of(at.law).context


def test_below_saturation_and_systems_on_a_few_requests():
    table = engine.below([("W1", 16_000)], (0.7,), 2, 300)
    assert (table["predicted"] > 0).all()
    assert {"preemptions_error", "ttft_p99_error", "tpot_p99_error"} <= set(table)
    rows = engine.systems(("W1",), (56_000,), (0.5,), 1, 20)
    assert rows["system"].nunique() == len(rows) == 11
    assert rows["goodput"].between(0, 1).all()
