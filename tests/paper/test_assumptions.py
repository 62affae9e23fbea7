"""The choices are named defaults of the code, each measured, and the page says what both say."""

from __future__ import annotations

import inspect
from pathlib import Path

import pandas as pd
import pytest

from kvcache.paper import assumptions
from kvcache.paper.assumptions import ASSUMPTIONS, assumption_table, default, main, page
from kvcache.paper.results import read_table

ROOT = Path(__file__).resolve().parents[2]
REFERENCES = [(a.id, reference) for a in ASSUMPTIONS for reference in a.references]


def effects(*ids: str) -> pd.DataFrame:
    rows = [
        {
            "id": i,
            "metric": "cost per second",
            "default": "this",
            "alternative": "that",
            "baseline": 1000.0 * n,
            "changed": 1100.0 * n,
            "relative": 0.1,
        }
        for n, i in enumerate(ids, start=1)
    ]
    return pd.DataFrame(rows)


CLAIMS = pd.DataFrame({"id": ["C01", "C02", "C03"], "assumptions": ["A1 A10", None, "A1"]})


@pytest.mark.parametrize(("id_", "reference"), REFERENCES, ids=[f"{i} {r}" for i, r in REFERENCES])
def test_the_named_default_exists(id_, reference):
    default(reference)


def test_ids_are_numbered_without_gaps():
    assert [a.id for a in ASSUMPTIONS] == [f"A{n}" for n in range(1, len(ASSUMPTIONS) + 1)]


def test_a_default_is_what_the_code_holds():
    assert default("paper.builders.RADIUS") == 0.15
    assert default("paper.builders.paper(relative=)") is True
    assert default("problem.Costs.gpu") == 1.0
    assert default("lengths.LengthDistribution.tokens") is inspect.Parameter.empty
    assert default("data/sources.toml") == ROOT / "data" / "sources.toml"


@pytest.mark.parametrize(
    "reference",
    [
        "paper.builders.RADIUSES",
        "paper.builders.paper(radii=)",
        "nothing.here",
        "data/none.toml",
        "builders",
        "a b",
    ],
)
def test_a_default_that_does_not_exist_is_named(reference):
    with pytest.raises(LookupError, match=reference.split("(")[0]):
        default(reference)


def test_the_page_gives_number_choice_and_the_verdicts_that_rest_on_it():
    text = page(effects(*[a.id for a in ASSUMPTIONS]), CLAIMS)
    first = text[text.index("**A1 ") : text.index("**A2 ")]
    assert "`paper.builders.RADIUS = 0.15`" in first
    assert "`paper.builders.paper(relative=True)`" in first
    assert "Verdicts that rest on it: C01, C03." in first
    assert "- cost per second: 1,000 with this; 1,100 with that, +10 %\n" in first
    second = text[text.index("**A2 ") : text.index("**A3 ")]
    assert "Verdicts" not in second
    assert "Verdicts that rest on it: C01." in text[text.index("**A10 ") :]


def test_the_page_shows_what_has_no_bound_no_change_and_multiples():
    table = effects(*[a.id for a in ASSUMPTIONS])
    table.loc[0, ["changed", "relative"]] = None
    table.loc[1, ["changed", "relative"]] = [2000.0, 1e-5]
    table.loc[2, ["changed", "relative"]] = [60000.0, 19.0]
    text = page(table, CLAIMS)
    assert "without bound with that\n" in text
    assert "2,000 with that, no change\n" in text
    assert "60,000 with that, x 20\n" in text


def test_an_assumption_without_effect_is_an_error():
    ids = [a.id for a in ASSUMPTIONS]
    with pytest.raises(
        ValueError, match=f"without a measured effect: {ids[-1]}; effects of no assumption: none"
    ):
        page(effects(*ids[:-1]), CLAIMS)
    with pytest.raises(ValueError, match="effects of no assumption: A99"):
        page(effects(*ids, "A99"), CLAIMS)


def test_the_committed_page_is_what_code_and_tables_say(monkeypatch):
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    assert main(["--check"]) == 0, "run `make readme`"


def test_the_command_writes_once_and_a_check_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    target = tmp_path / "assumptions.md"
    assert main([str(target), "--check"]) == 1
    assert not target.exists()
    assert main([str(target)]) == 0
    assert target.read_text() == (ROOT / "docs" / "assumptions.md").read_text()
    assert "rewritten" in capsys.readouterr().out
    assert main([str(target)]) == 0
    assert capsys.readouterr().out == ""


def test_every_assumption_that_a_verdict_names_has_a_measured_effect(monkeypatch):
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    table = read_table(assumptions.EFFECTS, "quick")
    named = read_table("claims.csv", "quick")["assumptions"].dropna().str.split().explode()
    assert set(named) <= set(table["id"]) == set(assumption_table()["id"])
    assert table.groupby("id").size().min() >= 1
