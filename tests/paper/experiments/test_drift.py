"""Tables of drift against hand-made runs and direct sums, and the verdicts on the claims about shifts."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvcache import Wasserstein1
from kvcache.paper.claims.verdicts import Outcome, judge
from kvcache.paper.digests import load_digest, load_digests
from kvcache.paper.experiments.drift import (
    DEFAULT,
    ELSEWHERE,
    GRID,
    TRACES,
    advantage,
    by_day,
    choice,
    default_beside_best,
    elsewhere,
    joint_path,
    left_out,
    limits,
    margins,
    path,
    point,
    policies,
    ratios_to_hindsight,
    shrinking,
    splits,
    wide,
)


def run(policy: str, excess: list[float], trace: str = "m-mid", requests: float = 2.0) -> pd.DataFrame:
    """Windows 4, 5, ... of a trace whose optimum costs 1 per request, and where a policy costs 1 + excess."""
    n = len(excess)
    return pd.DataFrame(
        {
            "trace": trace,
            "policy": policy,
            "window": np.arange(4, 4 + n),
            "requests": requests,
            "rho": 10.0,
            "reservation": 5.0,
            "cost": 1.0 + np.array(excess),
            "hindsight_reservation": 4.0,
            "hindsight": 1.0,
        }
    )


@pytest.fixture
def runs() -> pd.DataFrame:
    """Days 2 to 5 are windows 4 to 19, days 6 to 14 the 36 windows after them."""
    return pd.concat(
        [
            run(DEFAULT, [0.1] * 16 + [0.2] * 36),
            run("grid: last", [0.3] * 16 + [0.1] * 36),
            run("grid: half-life 1", [0.0] * 16 + [0.4] * 36),
            run("oracle: best within the forecasts", [0.0] * 52),
        ],
        ignore_index=True,
    )


def test_the_ledger_takes_the_best_of_the_grid_per_period(runs):
    table = ratios_to_hindsight(runs).set_index(["period", "policy"])
    assert table.loc[("days 2-5", DEFAULT), "ratio"] == pytest.approx(1.1)
    assert table.loc[("days 6-14", DEFAULT), "ratio"] == pytest.approx(1.2)
    assert table.loc[("days 2-14", DEFAULT), "ratio"] == pytest.approx(1 + (1.6 + 7.2) / 52)
    assert table.loc[("days 2-5", GRID), ["ratio", "chosen"]].tolist() == [1.0, "half-life 1"]
    assert table.loc[("days 6-14", GRID), "chosen"] == "last"
    assert not table.index.get_level_values("policy").str.startswith("grid: ").any()
    assert wide(ratios_to_hindsight(runs), "days 6-14", [DEFAULT]).loc[("m-mid", DEFAULT), 10.0] == 1.2


def test_the_choice_is_ordered_by_the_earlier_days(runs):
    table = choice(runs)
    assert table["policy"].tolist() == ["grid: half-life 1", DEFAULT, "grid: last"]
    assert table["days 6-14"].tolist() == pytest.approx([40.0, 20.0, 10.0])
    assert table["worst_later"].tolist() == pytest.approx([40.0, 20.0, 10.0])


def test_standing_by_hand(runs):
    row = default_beside_best(runs).set_index("period").loc["days 6-14"]
    assert row["default"] == pytest.approx(20.0)
    assert row["best_member"] == pytest.approx(10.0)
    assert row["grid"] == pytest.approx(10.0)
    assert row[["oracle", "wins", "reached", "reachable"]].tolist() == pytest.approx([0, 0, 0, 1])
    assert row["worst_window"] == pytest.approx(1 / 36)


def test_margins_by_hand(runs):
    runs = pd.concat([runs, run("rolling SAA, last day", [0.3] * 52)], ignore_index=True)
    found = margins(runs, "days 6-14", np.random.default_rng(0), 50).set_index("rival")
    # Every day is like the others, so every resample is like the period itself.
    leads = {
        "rolling SAA, last window": -10,
        "rolling SAA, last day": 10,
        "best member of the grid": -10,
        GRID: -10,
    }
    for rival, lead in leads.items():
        assert found.loc[rival, ["lead", "low", "high"]].tolist() == pytest.approx([lead] * 3)
        assert found.loc[rival, "ahead"] == (lead > 0)


def test_margins_are_wide_where_one_day_decides(runs):
    lucky = runs["policy"].eq(DEFAULT) & runs["window"].between(20, 23)
    runs.loc[runs["policy"].eq(DEFAULT) & runs["window"].ge(20), "cost"] = 1.11
    runs.loc[lucky, "cost"] = 1.0
    runs = pd.concat([runs, run("rolling SAA, last day", [0.3] * 52)], ignore_index=True)
    row = margins(runs, "days 6-14", np.random.default_rng(0), 500).set_index("rival").loc[GRID]
    assert row["lead"] == pytest.approx(10 - 11 * 8 / 9)
    assert row["low"] == pytest.approx(-1.0)  # the lucky day is not drawn
    assert row["ahead"] == pytest.approx(1 - (8 / 9) ** 9, abs=0.07)


def test_constants_chosen_on_the_other_traces():
    def cell(policy: str, trace: str, early: float, late: float) -> pd.DataFrame:
        return run(policy, [early] * 16 + [late] * 36, trace)

    table = left_out(
        pd.concat(
            [
                cell("as it is", "m-large", 0.2, 0.5),
                cell("as it is", "m-mid", 0.2, 0.4),
                cell("calm 4", "m-large", 0.1, 0.7),
                cell("calm 4", "m-mid", 0.3, 0.6),
            ]
        )
    ).set_index("trace")
    assert table.loc["m-large"].tolist() == ["as it is", pytest.approx(50.0), pytest.approx(50.0)]
    assert table.loc["m-mid"].tolist() == ["calm 4", pytest.approx(60.0), pytest.approx(40.0)]


def test_elsewhere_by_hand():
    frames = []
    for kind, drifts in ELSEWHERE.items():
        for drift in drifts:
            for policy, excess in (
                (DEFAULT, 0.2),
                ("grid: last", 0.1 if "m-mid" in drift.name else 0.4),
                ("grid: half-life 1", 0.3),
                ("rolling SAA, last window", 0.5),
                ("rolling SAA, last day", 0.6 if kind == "small windows" else 0.7),
            ):
                frames.append(run(policy, [excess] * 10, drift.name))
    table = elsewhere(pd.concat(frames)).set_index("series")
    row = table.loc["backwards"]
    assert row[["default", "last_window", "last_day"]].tolist() == pytest.approx([20, 50, 70])
    assert row[["best_member", "grid", "wins"]].tolist() == pytest.approx([30, 70 / 3, 2 / 3])
    assert row["over_grid"] == pytest.approx((2 / 3 * 2 / 3 * 2) ** (1 / 3))
    assert table.loc["small windows", "last_day"] == pytest.approx(60)


def test_series_elsewhere_are_what_their_kind_says():
    six = TRACES["m-large"].windows()
    back = ELSEWHERE["backwards"][0]
    assert back.windows() == six[::-1]
    halves = ELSEWHERE["12-hour windows"][0].windows()
    assert [w.total for w in halves] == [six[i].total + six[i + 1].total for i in range(0, 56, 2)]
    assert halves[1].mean == pytest.approx(
        (six[2].total * six[2].mean + six[3].total * six[3].mean) / halves[1].total
    )
    inputs = ELSEWHERE["input lengths"][0].windows()
    assert ELSEWHERE["input lengths, backwards"][0].windows() == inputs[::-1]
    whole = list(load_digests("servegen-m-large", "window", field="input").values())
    assert len(inputs) == 56
    assert inputs[3].mean * 16 == pytest.approx(whole[3].mean, rel=0.01)
    for drift in ELSEWHERE["small windows"]:
        windows = drift.windows()
        assert len(windows) == 28
        assert len({w.upper for w in windows}) == 1
    rows = pd.DataFrame(point(trace=back.name, group="paper", ratios=(2.0,)))
    assert rows["window"].min() == back.warm_up


def test_days_add_up_to_the_excess(runs):
    daily = by_day(runs, [DEFAULT])
    assert daily["day"].tolist() == list(range(2, 15))
    assert daily["excess"].sum() == pytest.approx(100 * (1.6 + 7.2) / 52)


def test_a_path_carries_the_optimum_as_a_policy(runs):
    found = path(runs, "m-mid", 10.0, (DEFAULT,))
    optimum = found[found["policy"] == "hindsight optimum"]
    assert len(found) == 104
    assert (optimum["reservation"] == 4.0).all()
    assert (optimum["cost"] == 1.0).all()


@pytest.mark.parametrize("name", sorted(TRACES))
def test_every_trace_has_windows_under_one_bound(name):
    drift = TRACES[name]
    windows = drift.windows()
    assert len({w.upper for w in windows}) == 1
    assert len(windows) > drift.warm_up
    assert drift.later is None or drift.warm_up < drift.later < len(windows)
    names = [policy for group in policies(drift).values() for policy in group]
    assert len(names) == len(set(names))
    assert DEFAULT in names


def test_points_are_judged_after_the_warm_up():
    rows = pd.DataFrame(point(trace="BurstGPT GPT-4, daily", group="paper", ratios=(10.0,)))
    assert rows["window"].unique().tolist() == [1, 2, 3, 4, 5, 6]
    days = load_digests("burstgpt-week1", "day", model="GPT-4")
    static = rows[rows["policy"] == "static"]
    assert (static["reservation"] == days[0].quantile(10 / 11)).all()
    assert static["cost"].tolist() == pytest.approx(
        [days[d].cost(float(days[0].quantile(10 / 11)), 10.0, 1.0) for d in range(1, 7)]
    )


def test_the_oracles_are_no_dearer_than_what_they_look_at():
    trace = "Azure conversation, 10 min"
    groups = [pd.DataFrame(point(trace=trace, group=g, ratios=(10.0,))) for g in ("grid", "default")]
    forecasts = pd.concat(groups, ignore_index=True)
    found = limits(forecasts, ratios=(10.0,))
    best = found[found["policy"] == "oracle: best within the forecasts"].set_index("window")["cost"]
    assert (forecasts.groupby("window")["cost"].min() >= best - 1e-9).all()
    around = found[found["policy"] == "oracle: window before and after"]
    assert around["window"].tolist() == [1, 2, 3, 4]
    assert (found["cost"] >= found["hindsight"] - 1e-9).all()


def test_shrinking_by_direct_sums():
    table = shrinking("azure-2023-code", to=0.5, steps=8)
    assert table["scale"].iloc[:7].tolist() == pytest.approx([1, 1, 0.5**0.25, 0.5**0.5, 0.5**0.75, 0.5, 0.5])
    dist = load_digest("azure-2023-code")
    row = table[(table["policy"] == "static") & (table["window"] == 7)].iloc[0]
    now = dist.scale(0.5, upper=dist.upper)
    eta = dist.quantile(10 / 11)
    assert row["reservation"] == eta
    assert row["used"] == pytest.approx((np.minimum(now.tokens, eta) @ now.probabilities) / eta)
    rolling = table[(table["policy"] == "rolling SAA") & (table["window"] == 7)].iloc[0]
    assert rolling["cost"] == pytest.approx(rolling["hindsight"])
    assert row["cost"] > 1.1 * row["hindsight"]


def test_the_joint_path_is_set_for_the_window_before():
    table = joint_path((1.0, 0.8, 0.5))
    assert table[table["policy"] == "static DRO"]["trained"].tolist() == [1.0, 1.0]
    assert table[table["policy"] == "rolling DRO"][["trained", "shift"]].to_numpy().tolist() == [
        [1.0, 0.8],
        [0.8, 0.5],
    ]


def test_the_advantage_by_direct_sums():
    table = advantage(("azure-2023-conv",), (1.0, 2.0), ratios=(50.0,))
    dist = load_digest("azure-2023-conv")
    eta, saa = Wasserstein1(0.15, relative=True).reservation(dist, 50.0, 1.0), dist.quantile(50 / 51)
    longer = np.minimum(2 * dist.tokens, dist.upper)

    def cost(reserved):
        return (50 * np.maximum(longer - reserved, 0) + np.maximum(reserved - longer, 0)) @ dist.probabilities

    row = table[(table["set"] == "W1") & (table["baseline"] == "SAA") & (table["shift"] == 2.0)].iloc[0]
    assert eta > 1.7 * saa
    assert row["advantage"] == pytest.approx(1 - cost(eta) / cost(saa))


def test_splits_train_on_the_first_half():
    table = splits((10.0,)).set_index(["trace", "method"])
    windows = list(load_digests("azure-2023-conv", "window").values())
    pooled = sum(w.total for w in windows[:3])
    below = sum(w.total * w.cdf(table.loc[("Azure conversation", "P90"), "reservation"]) for w in windows[:3])
    assert below / pooled >= 0.9
    assert table.loc[("Azure conversation", "DRO"), "over_dro"] == 1


# ---- verdicts ---------------------------------------------------------------------------------------


def shares(static_end: float, rolling_end: float, policies=("static", "rolling DRO", "rolling SAA")):
    rows = []
    for policy in policies:
        end = static_end if policy.startswith("static") else rolling_end
        rows += [(policy, 1, 0.5, 1.0), (policy, 5, end, 0.4)]
    table = pd.DataFrame(rows, columns=["policy", "window", "used", "scale"])
    return table.assign(cost=2.0, hindsight=1.0)


@pytest.mark.parametrize(
    ("static_end", "rolling_end", "outcome"),
    [
        (0.2, 0.5, Outcome.REPRODUCED),
        (0.2, 0.2, Outcome.NOT_REPRODUCED),
        (0.5, 0.5, Outcome.NOT_REPRODUCED),
    ],
)
def test_c11_follows_the_tables(static_end, rolling_end, outcome):
    tables = {
        "fig5a": shares(static_end, rolling_end),
        "fig5a_joint": shares(static_end, rolling_end, ("static DRO", "rolling DRO")),
    }
    assert judge("C11", tables).verdict == outcome


def test_c11_is_partly_when_only_one_setting_shows_it():
    tables = {"fig5a": shares(0.2, 0.5), "fig5a_joint": shares(0.5, 0.5, ("static DRO", "rolling DRO"))}
    assert judge("C11", tables).verdict == Outcome.PARTLY


def grid(gain) -> pd.DataFrame:
    rows = [
        ("a", "W1", 0.15, rho, shift, baseline, gain(rho, shift))
        for rho in (2.0, 10.0)
        for shift in (0.5, 1.0, 2.0, 3.0)
        for baseline in ("SAA", "P90")
    ]
    return pd.DataFrame(rows, columns=["digest", "set", "radius", "rho", "shift", "baseline", "advantage"])


@pytest.mark.parametrize(
    ("gain", "outcome"),
    [
        (lambda rho, shift: 0.01 * rho * shift, Outcome.REPRODUCED),
        (lambda rho, shift: 0.1 * shift if rho > 5 else 0.0, Outcome.PARTLY),
        (lambda rho, shift: -0.1 * shift, Outcome.NOT_REPRODUCED),
    ],
)
def test_c12_follows_the_table(gain, outcome):
    if outcome == Outcome.REPRODUCED:
        table = grid(gain)
        table["advantage"] *= 3
    else:
        table = grid(gain)
    assert judge("C12", {"fig5b": table}).verdict == outcome


@pytest.mark.parametrize(
    ("p95", "outcome"), [(1.02, Outcome.REPRODUCED), (1.2, Outcome.PARTLY), (None, Outcome.NOT_REPRODUCED)]
)
def test_c19_follows_the_tables(p95, outcome):
    over = {"DRO": 1.0, "SAA": 1.0, "P90": 1.01, "P95": p95 or 1.2}
    if p95 is None:
        over |= {"SAA": 1.3, "P90": 1.4}
    split = pd.DataFrame(
        [("t", 10.0, m, v) for m, v in over.items()], columns=["trace", "rho", "method", "over_dro"]
    )
    joint = pd.DataFrame({"method": list(over), "cost_per_arrival": 2.0, "p99_s": 3.0})
    real = pd.DataFrame(
        [("m-mid", "days 2-14", "static", 10.0, 2.5)], columns=["trace", "period", "policy", "rho", "ratio"]
    )
    verdict = judge("C19", {"splits": split, "splits_joint": joint, "drift": real})
    assert verdict.verdict == outcome
    assert "2.50 (m-mid)" in verdict.evidence
