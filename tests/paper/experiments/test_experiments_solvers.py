import numpy as np
import pandas as pd
import pytest

from kvcache.paper import builders
from kvcache.paper.claims.verdicts import Outcome, judge
from kvcache.paper.experiments import solvers as study
from kvcache.paper.plots import solvers as plots
from kvcache.paper.published import published


@pytest.fixture(scope="module")
def small():
    """Table III with its two smallest sizes, fewer samples, under the names of the paper's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builders, "TABLE3_SIZES", ((3, 4, 20, 8), (4, 4, 20, 8)))
        rows = published("table_3")["rows"][:2]
        for row, (i, k, n, _) in zip(rows, builders.TABLE3_SIZES, strict=True):
            row["size"] = f"{i}x{k}x{n}"
        patch.setattr(study, "published", lambda part: {"rows": rows})
        values, timings = study.table3("quick")
        yield {
            "values": values,
            "timings": timings,
            "seconds": study.table3_seconds(timings),
            "factors": study.factors(timings),
        }


@pytest.fixture(scope="module")
def optimum():
    return study.structure()


def test_table_3_compares_what_neither_clock_nor_licence_decides(small):
    values = small["values"]
    assert "seconds" not in values
    assert not values["method"].str.contains("Gurobi").any()
    assert values["proven_gap"].between(0, 2e-4).all()
    for _, own in values.groupby("size"):
        assert own["objective"].max() <= own["objective"].min() * (1 + 2e-4)
        assert own["lower_bound"].max() <= own["objective"].min() * (1 + 1e-9)


def test_seconds_stand_beside_the_papers(small):
    table = small["seconds"]
    assert table["size"].tolist() == ["3x4x20", "4x4x20"]
    assert table["paper: MIBLP"].tolist() == [0.07, 1.2]
    assert table["certified"].notna().all()
    factors = small["factors"]
    np.testing.assert_allclose(factors["machine"] * factors["method"], factors["paper_s"] / factors["fast_s"])


def test_every_profile_names_every_method():
    for profile in ("quick", "full"):
        sizes = study.Study.of(profile).sizes
        assert set(sizes) == set(study.METHODS)
    assert study.Study.of("full").limit == published("table_3")["limit_s"]
    assert study.Study.of("quick").limit is None


def test_online_costs():
    table = study.online(20_000)
    assert (table[["one_by_one_ns", "vectorised_ns"]] > 0).all(axis=None)
    np.testing.assert_allclose(table["million_per_s"] * table["vectorised_ns"], 1000)


def test_structure_is_one_policy(optimum):
    groups, routing, reservations = (optimum[part] for part in ("groups", "routing", "reservations"))
    assert groups["gpus"].sum() <= study.SHOWN[3]
    assert (groups["groups"] > 0).sum() > 1
    shares = routing.groupby("class")["share"].sum()
    # Each share is rounded to a millionth, so a sum may be off by half of that per configuration.
    rounding = 0.5e-6 * routing["config"].nunique()
    np.testing.assert_allclose(
        shares[reservations["class"]], reservations["admitted"], rtol=0, atol=rounding + 1e-9
    )
    assert (reservations["eta"] <= reservations["robust"] + 1e-6).all()


def test_figures_are_drawn(small, optimum):
    growing = pd.DataFrame(
        [
            (a, v, m, 0.1 * v)
            for a in ("classes", "samples")
            for v in (2, 4)
            for m in ("certified", "BCD, fast")
        ],
        columns=["axis", "value", "method", "seconds"],
    )
    growing = pd.concat([growing, growing[growing["axis"] == "classes"].assign(axis="configurations")])
    steps = pd.DataFrame({"block3": "resolve", "start": "spread", "step": [1, 2], "objective": [3.0, 2.0]})
    runs = pd.DataFrame(
        [(b, s, 1.0, 0.1) for b in ("resolve", "literal") for s in ("fewest GPUs", "spread")],
        columns=["block3", "start", "load", "above"],
    )
    for figure in (
        plots.table3(small["seconds"]),
        plots.growth(growing),
        plots.descent(steps.assign(lower_bound=1.5)),
        plots.readings(runs),
        plots.structure(**optimum),
    ):
        figure.draw_without_rendering()
        assert all(ax.has_data() for ax in figure.axes)


# ---- verdicts ---------------------------------------------------------------------------------------


def tables(**changes):
    """Results under which all four claims hold."""
    sizes = ["3x4x100", "15x12x2000"]
    values = pd.DataFrame(
        {
            "size": sizes * 2,
            "method": ["certified"] * 2 + ["BCD, fast"] * 2,
            "status": ["optimal"] * 2 + ["feasible"] * 2,
            "proven_gap": 1e-4,
        }
    )
    timings = pd.DataFrame(
        {
            "size": [*sizes, "6x6x300"],
            "method": ["BCD, fast", "BCD, fast", "literal MIBLP, SCIP"],
            "status": ["feasible", "feasible", "feasible"],
            "seconds": [0.1, 5.0, 300.0],
        }
    )
    block3 = pd.DataFrame(
        {
            "block3": ["resolve", "literal"],
            "start": "fewest GPUs",
            "above": [0.0, 0.5],
            "falls": True,
            "blockwise": True,
            "iterations": 3,
        }
    )
    descent = pd.DataFrame({"block3": "resolve", "start": "spread", "objective": [2.0, 1.0]})
    online = pd.DataFrame(
        {
            "classes": [3, 50],
            "configurations": [4, 24],
            "million_per_s": [9.0, 5.0],
            "one_by_one_ns": [3e3, 4e3],
        }
    )
    named = {
        "table3": values,
        "table3_timings": timings,
        "block3": block3,
        "descent": descent,
        "online_timings": online,
    }
    for name, edit in changes.items():
        named[name] = named[name].assign(**edit)
    return named


@pytest.mark.parametrize("claim", ["C05", "C06", "C07", "C22"])
def test_claims_that_hold_are_reproduced(claim):
    assert judge(claim, tables()).verdict is Outcome.REPRODUCED


@pytest.mark.parametrize(
    ("claim", "changes", "outcome"),
    [
        ("C05", {"block3": {"above": 0.05}}, Outcome.PARTLY),
        ("C05", {"table3": {"proven_gap": 0.05}}, Outcome.NOT_REPRODUCED),
        ("C05", {"table3_timings": {"status": "optimal"}}, Outcome.PARTLY),
        ("C06", {"table3_timings": {"seconds": 1000.0}}, Outcome.NOT_REPRODUCED),
        ("C07", {"descent": {"objective": [1.0, 2.0]}}, Outcome.PARTLY),
        ("C07", {"block3": {"blockwise": False}}, Outcome.PARTLY),
        ("C22", {"online_timings": {"million_per_s": 0.5}}, Outcome.PARTLY),
        (
            "C22",
            {"online_timings": {"million_per_s": 0.5, "one_by_one_ns": [1.0, 99.0]}},
            Outcome.NOT_REPRODUCED,
        ),
    ],
)
def test_claims_that_do_not_hold_are_told(claim, changes, outcome):
    assert judge(claim, tables(**changes)).verdict is outcome


def test_no_verdict_prints_seconds_that_differ_between_machines():
    slow, fast = tables(), tables(table3_timings={"seconds": 0.123}, online_timings={"one_by_one_ns": 1234.0})
    for claim in ("C05", "C06", "C07", "C22"):
        assert judge(claim, slow) == judge(claim, fast)
