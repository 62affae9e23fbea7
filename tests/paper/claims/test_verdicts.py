"""How verdicts are made, checked and kept."""

import multiprocessing
import re

import pandas as pd
import pytest

from kvcache.paper.claims import verdicts as module
from kvcache.paper.claims.verdicts import Outcome, Verdict, judge, judges_claim, save_verdicts, verdicts_html
from kvcache.paper.published import CLAIMS
from kvcache.paper.results import read_table

GIVEN = {
    "paper": "1",
    "ours": "2",
    "tolerance": "10 %",
    "evidence": "It is twice as much.",
    "source": "table: cell",
}


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    return tmp_path / "data" / "results"


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(module, "_JUDGES", {})
    monkeypatch.setattr(module, "_load_judges", lambda: None)


def test_a_verdict_is_checked_when_made():
    verdict = Verdict("C01", "partly", **GIVEN, assumptions=("A1", "A2"))
    assert verdict.verdict is Outcome.PARTLY
    row = verdict.row()
    assert (row["where"], row["verdict"], row["assumptions"]) == ("Table II", "partly", "A1 A2")
    with pytest.raises(ValueError, match="claim 'C99'; known are C01"):
        Verdict("C99", "partly", **GIVEN)
    with pytest.raises(ValueError, match="'maybe' is not a valid Outcome"):
        Verdict("C01", "maybe", **GIVEN)
    with pytest.raises(ValueError, match="claim C01: evidence empty"):
        Verdict("C01", "partly", **(GIVEN | {"evidence": " "}))
    with pytest.raises(KeyError, match="A99"):
        Verdict("C01", "partly", **GIVEN, assumptions=("A99",))


def test_a_judge_computes_from_tables(registry):
    @judges_claim("C22")
    def constant_work(tables):
        ours = tables["online"]["growth"].max()
        outcome = Outcome.REPRODUCED if ours < 1.1 else Outcome.NOT_REPRODUCED
        return Verdict("C22", outcome, **(GIVEN | {"ours": f"{ours:.2f}"}))

    assert judge("C22", {"online": pd.DataFrame({"growth": [1.0, 1.05]})}).verdict is Outcome.REPRODUCED
    assert judge("C22", {"online": pd.DataFrame({"growth": [1.0, 3.0]})}).verdict is Outcome.NOT_REPRODUCED
    with pytest.raises(KeyError, match="result table 'online'; given are table2"):
        judge("C22", {"table2": pd.DataFrame()})
    with pytest.raises(KeyError, match="claim 'C21' has no judge; judged are C22"):
        judge("C21", {})


def test_a_claim_has_one_judge(registry):
    @judges_claim("C01")
    def first(tables):
        return Verdict("C02", "partly", **GIVEN)

    with pytest.raises(ValueError, match=r"claim C01: judged by .*test_verdicts already"):

        @judges_claim("C01")
        def second(tables):
            raise AssertionError

    with pytest.raises(ValueError, match="claim 'C00'"):
        judges_claim("C00")(first)
    with pytest.raises(ValueError, match="claim C01: its judge returned a verdict on C02"):
        judge("C01", {})


def test_judges_of_the_package_are_found():
    module._load_judges()
    assert {"C01", "C02", "C03", "C04", "C20"} <= set(module._JUDGES)


# ---- the ledger ---------------------------------------------------------------------------------


def verdict(claim, outcome="partly", **changed):
    return Verdict(claim, outcome, **(GIVEN | changed))


def test_each_notebook_replaces_its_own_verdicts_only(output):
    save_verdicts([verdict("C20"), verdict("C01")], "02_fractile", "quick")
    save_verdicts([verdict("C05", "not testable")], "03_miblp_vs_bcd", "quick")
    rows = save_verdicts([verdict("C01", "reproduced"), verdict("C20")], "02_fractile", "quick")
    assert rows["id"].tolist() == ["C01", "C20"]
    table = read_table(output / "claims.csv")
    assert table["id"].tolist() == ["C01", "C05", "C20"]
    assert table["verdict"].tolist() == ["reproduced", "not testable", "partly"]
    assert table.columns.tolist()[:6] == ["id", "where", "claim", "verdict", "paper", "ours"]
    save_verdicts([verdict("C02")], "02_fractile", "full")
    assert read_table(output / "full" / "claims.csv")["id"].tolist() == ["C02"]
    assert len(read_table(output / "claims.csv")) == 3


def test_the_ledger_has_the_same_bytes_whatever_the_order(output):
    parts = {"a": [verdict("C03"), verdict("C01")], "b": [verdict("C02")], "c": [verdict("C10")]}
    found = set()
    for order in ("abc", "cba", "bac"):
        for name in order:
            save_verdicts(parts[name], name, "quick")
        found.add((output / "claims.csv").read_bytes())
        for path in output.rglob("*.csv"):
            path.unlink()
    assert len(found) == 1


def test_a_claim_judged_by_two_notebooks_is_refused(output):
    save_verdicts([verdict("C01")], "02_fractile", "quick")
    with pytest.raises(ValueError, match="claim C01: judged twice, in 04_sensitivity and 02_fractile"):
        save_verdicts([verdict("C01")], "04_sensitivity", "quick")
    with pytest.raises(ValueError, match="claim C02: judged twice"):
        save_verdicts([verdict("C02"), verdict("C02")], "04_sensitivity", "quick")
    assert read_table(output / "claims.csv")["id"].tolist() == ["C01"]


def _save(claim):
    save_verdicts([verdict(claim)], f"notebook_{claim}", "quick")


def test_notebooks_in_parallel_lose_no_verdict(output):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_save, list(CLAIMS), chunksize=1)
    assert read_table(output / "claims.csv")["id"].tolist() == list(CLAIMS)


def test_verdicts_are_shown_as_text(output):
    rows = save_verdicts([verdict("C01", evidence="a < b & c", paper="<none>")], "x", "quick")
    page = verdicts_html(rows).data
    assert "a &lt; b &amp; c" in page
    assert "&lt;none&gt;" in page
    assert re.search(r"◐ partly", page)
    assert verdicts_html(read_table(output / "claims.csv")).data == page
