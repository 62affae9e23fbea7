"""Studies that need no sweep, against what is known of them; and the tables that sweeps are turned into."""

import numpy as np
import pandas as pd
import pytest

from kvcache.paper.experiments import comparison, runner
from kvcache.paper.experiments.comparison import engine_point
from kvcache.paper.methods.baselines import PAPER_METHODS, reservations
from kvcache.paper.published import published


def test_decoded_table4_is_a_line_through_the_published_costs():
    table = comparison.decoded_table4().set_index("method")
    for row in published("table_4")["rows"]:
        waste, overflow = table.loc[row["method"], ["waste", "overflow"]]
        assert waste + 2 * overflow == pytest.approx(row["cost"][0])
        assert waste + 100 * overflow == pytest.approx(row["cost"][2])
    fixed = table.drop(index="DRO")
    assert (fixed["error"].abs() < 2e-4).all()
    # What the lines say about the reservations must be consistent with their names.
    assert abs(fixed.loc["Mean", "above_mean"]) < 10
    assert fixed.loc["LP+2sigma", "above_mean"] == pytest.approx(
        2 * fixed.loc["LP+1sigma", "above_mean"], rel=0.01
    )
    assert fixed.loc[["P90", "P95", "P99", "Max"], "above_mean"].is_monotonic_increasing


def test_premium_limits_are_rho_times_the_radius_below_the_critical_one():
    table = comparison.premium_limits()
    tokens = table[(table["unit"] == "tokens") & (table["radius"] == 0.2)]
    inside = tokens[tokens["rho"] <= 50]
    np.testing.assert_allclose(
        inside["premium"] / inside["radius"], inside["target"] / inside["largest_radius"], rtol=1e-9
    )
    assert (table["holds"] == (table["premium"] < table["target"])).all()


def test_support_bound_follows_the_critical_radius():
    table = comparison.support_bound("quick")
    jumped = table["regime"] != "fractile"
    assert (jumped == (table["radius"] > table["critical_radius"])).all()
    assert (table.loc[~jumped, "eta"] == table.loc[~jumped, "fractile"]).all()
    assert (table.loc[jumped, "eta"] > table.loc[jumped, "fractile"]).all()
    assert (table["nominal_cost"] >= table["fractile_cost"] - 1e-9).all()
    assert jumped.any()
    assert (~jumped).any()


def test_no_method_beats_the_fractile_in_exact_cost():
    table = comparison.bounded_map()
    assert (table["largest"] >= 1 - 1e-12).all()
    assert table.loc[table["method"] == "SAA", "largest"].eq(1).all()
    assert set(PAPER_METHODS) < set(table["method"])


def test_saa_and_dro_agree_until_a_class_jumps():
    table = comparison.ablation_regimes("quick")
    calm = table["classes_jumped"] == 0
    np.testing.assert_allclose(table.loc[calm, "saa_over_dro"], 1)
    assert (table.loc[~calm, "saa_over_dro"] > 1.2).all()
    assert table.loc[table["radius"] == 0, "classes_jumped"].eq(0).all()


def test_admission_threshold_is_where_the_solver_starts_to_shed():
    table = comparison.admission_threshold().set_index("class")
    limit = table.loc["chat", "worst_case_cost"]
    admitted = []
    for factor in (0.97, 1.1):
        row = runner.point(
            problem={"arguments": {"load": 0.1}, "costs": {"rejection": factor * limit}}, requests=100
        )[0]
        admitted.append(row["admitted_chat"])
    assert admitted == pytest.approx([0, 1], abs=1e-6)


def test_the_predicted_premium_is_the_solved_one():
    row = comparison.premium_point(trace="instance", rho=10.0, radius=5.0, relative=False, load=0.3)
    assert row["classes_jumped"] == 0
    assert row["premium"] == pytest.approx(row["predicted"], rel=2e-3)


def synthetic_costs():
    rows = []
    for m, method in enumerate(PAPER_METHODS):
        for rho in (2, 10, 100):
            rows.append(
                {
                    "method": method,
                    "rho": rho,
                    "admission": "forced",
                    "reservation_cost": 100 * (m + 1) + rho,
                    "p99_s": 10 + m,
                    "slo_violation": 0.1,
                    "rejection": 0.0,
                    "preemption_rate": 0.05,
                }
            )
    return pd.DataFrame(rows)


def test_table4_stands_beside_the_published_one():
    table = comparison.table4(synthetic_costs()).set_index("method")
    assert table.loc["DRO", ["over_dro_rho2", "over_dro_rho10", "over_dro_rho100"]].eq(1).all()
    assert table.loc["P90", "over_dro_rho10"] == pytest.approx(210 / 110)
    assert table.loc["P90", "paper_cost_rho100"] == 17080
    assert np.isnan(table.loc["SAA", "paper_p99_s"])
    assert table.loc["Max", "slo_violation_pct"] == pytest.approx(10)


def test_table5_has_means_and_deviations():
    rows = [
        {"load": 0.1, "variant": v, "seed": s, "reservation_cost": 10 * s, "total_cost": 1.0, "p99_s": 2.0,
         "goodput": 3.0, "slo_violation": 0.5, "max_utilisation": 0.1}
        for v in runner.VARIANTS
        for s in range(5)
    ]  # fmt: skip
    table = comparison.table5(pd.DataFrame(rows)).set_index("variant")
    assert table["seeds"].eq(5).all()
    assert table.loc["full", "reservation_cost_mean"] == 20
    assert table.loc["full", "reservation_cost_std"] == pytest.approx(np.std([0, 10, 20, 30, 40], ddof=1))
    assert table.loc["-Routing", "paper_reservation_cost_mean"] == 93878
    assert table.loc["full", "slo_violation_pct_mean"] == 50


def test_the_deadline_is_the_one_that_makes_the_first_row_as_late_as_published():
    late = pd.DataFrame(
        [
            {"table": "V", "row": row, "seed": seed, "deadline": d, "slo_violation": min(1.0, share / d)}
            for row, share in (("full", 0.528), ("-DRO (SAA)", 0.9))
            for seed in (0, 1)
            for d in (1.0, 2.0, 4.0)
        ]
    )
    table = comparison.late_at_paper(late).set_index("row")
    assert table["deadline"].tolist() == pytest.approx([2.0, 2.0])
    assert table.loc["full", "late_pct"] == pytest.approx(table.loc["full", "paper_late_pct"])
    assert table.loc["-DRO (SAA)", "late_pct"] == pytest.approx(45.0)


def test_an_engine_in_the_papers_world_by_hand():
    # A calm group: nobody waits but for the iteration that runs, so a latency is prompt and tokens.
    row = engine_point(engine="P99", load=0.05, requests=60, seed=1)
    problem = runner.build(arguments={"load": 0.05})
    served_by = problem.configs[3]
    assert row["refused"] == 0
    assert 0 <= row["mean_queued_s"] < served_by.decode_s_per_token
    held = problem.input_tokens + reservations("P99", problem)
    v = float(problem.offered_loads[:, 3] @ held / served_by.kv_tokens)
    assert row["equation7_wait_s"] == pytest.approx(problem.queueing_factors[3] * v / (1 - v))
    # The 180 requests end about when the last has come, at the arrival rate of all three classes.
    assert row["throughput"] == pytest.approx(problem.arrival_rates.sum(), rel=0.3)


def test_engines_take_what_memory_has_at_high_load():
    rows = pd.DataFrame(
        [engine_point(engine=e, load=1.5, requests=250, seed=0) for e in ("vLLM", "TensorRT-LLM", "P99")]
    ).set_index("engine")
    assert rows.loc["TensorRT-LLM", "evicted_share"] == 0
    assert 0 < rows.loc["P99", "evicted_share"] < 0.05  # those beyond their class's P99
    assert rows["throughput"]["vLLM"] > rows["throughput"]["P99"] > rows["throughput"]["TensorRT-LLM"]
    assert rows["mean_queued_s"]["vLLM"] < rows["mean_queued_s"]["P99"]
