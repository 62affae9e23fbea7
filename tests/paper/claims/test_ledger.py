"""The ledger is whole, follows from the tables, and says what is missing."""

from __future__ import annotations

import pandas as pd
import pytest

from kvcache.paper.claims import ledger as module
from kvcache.paper.claims.ledger import Results, as_html, by_verdict, collected, headlines, rejudged, untested
from kvcache.paper.claims.verdicts import PARTS, Outcome, Verdict, save_verdicts
from kvcache.paper.published import CLAIMS
from kvcache.paper.results import read_table, results_dir, write_table


@pytest.fixture
def committed(monkeypatch) -> Results:
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    return Results("quick")


def verdict(claim: str, outcome: Outcome = Outcome.PARTLY) -> Verdict:
    return Verdict(claim, outcome, "1", "2", "10 %", "Twice as much.", "table: cell")


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    return tmp_path


# ---- whole or an error --------------------------------------------------------------------------


def test_a_claim_without_verdict_is_an_error_that_names_it(output):
    with pytest.raises(ValueError, match=r"no verdict on C01, C02, .*, C22: .* has those of no notebook"):
        collected("quick")
    save_verdicts([verdict(c) for c in CLAIMS if c not in ("C05", "C22")], "one", "quick")
    with pytest.raises(ValueError, match=r"no verdict on C05, C22: .* has those of one; run the notebooks"):
        collected("quick")
    save_verdicts([verdict("C05"), verdict("C22")], "other", "quick")
    table = collected("quick")
    assert table["id"].tolist() == list(CLAIMS)
    assert table.set_index("id")["notebook"][["C04", "C05"]].tolist() == ["one", "other"]


def test_a_claim_judged_twice_is_an_error(output):
    save_verdicts([verdict(c) for c in CLAIMS], "one", "quick")
    write_table(pd.DataFrame([verdict("C07").row()]), f"{PARTS}/two.csv", "quick")
    with pytest.raises(ValueError, match="claim C07: judged in one and two"):
        collected("quick")


def test_counts_have_every_verdict_and_every_claim(output):
    outcomes = [Outcome.REPRODUCED, Outcome.NOT_REPRODUCED]
    save_verdicts([verdict(c, outcomes[n % 2]) for n, c in enumerate(CLAIMS)], "one", "quick")
    counts = by_verdict(collected("quick")).set_index("verdict")
    assert counts["claims"].to_dict() == {
        "reproduced": 11, "partly": 0, "not reproduced": 11, "not testable": 0,
    }  # fmt: skip
    assert counts.loc["partly", "ids"] == ""
    assert sorted(" ".join(counts["ids"]).split()) == list(CLAIMS)


# ---- what is committed --------------------------------------------------------------------------


def test_every_claim_has_a_committed_verdict_and_claims_csv_is_put_together_from_them(committed):
    table = collected("quick")
    assert table["id"].tolist() == list(CLAIMS)
    assert table.drop(columns="notebook").equals(read_table("claims.csv", "quick"))
    assert by_verdict(table).equals(
        committed["claims_by_verdict"].assign(ids=committed["claims_by_verdict"]["ids"].fillna(""))
    ), "run notebook 08"


def test_verdicts_follow_from_the_committed_tables(committed):
    again = rejudged(collected("quick"), committed)
    assert again[~again["same"]].to_dict("records") == []


def test_sources_of_verdicts_are_tables_or_figures_that_exist(committed):
    folder = results_dir("quick")
    for claim in collected("quick").itertuples():
        names = [part.strip().partition(":")[0].split(" ")[0] for part in claim.source.split(";")]
        names = [name for part in names for name in part.replace(",", " ").split()]
        assert names, claim.id
        assert [n for n in names if not (folder / f"{n}.csv").is_file()] == [], claim.id


def test_headlines_are_what_the_tables_say(committed):
    fresh = headlines(committed).set_index("name")["value"]
    saved = committed["headlines"].set_index("name")["value"]
    assert saved.to_dict() == pytest.approx(fresh.to_dict(), rel=1e-5), "run notebook 08"
    cells = committed["table2"].query("trace != 'published'")
    assert fresh["cells"] == len(cells) == 6 * cells["trace"].nunique()
    assert 0 < fresh["cells_at_fractile"] < fresh["cells"]
    worst = max((cells["dro"] / cells["p90"]).max(), (cells["dro"] / cells["p95"]).max())
    # a gain of -x % over the baseline is a cost that is x % higher
    assert 100 * (worst - 1) == pytest.approx(fresh["dearer_pct"], rel=1e-4)


def test_what_is_untested_has_a_reason(committed):
    table = untested()
    assert len(table) == len(module.UNTESTED) == table["what"].nunique()
    assert {"Fig. 1", "Table I"} <= set(table["what"])
    assert table.map(str.strip).ne("").all().all()


# ---- small things -------------------------------------------------------------------------------


def test_results_are_read_by_name_and_once(output):
    write_table(pd.DataFrame({"x": [1]}), "a.csv", "quick")
    tables = Results("quick")
    assert list(tables) == ["a"]
    assert len(tables) == 1
    assert tables["a"] is tables["a"]
    with pytest.raises(FileNotFoundError, match=r"b\.csv"):
        tables["b"]


def test_html_of_sentences_is_escaped():
    page = as_html(pd.DataFrame({"a<b": ["x & y", "<i>"]})).data
    assert "a&lt;b" in page
    assert "<td style='text-align:left;vertical-align:top;white-space:normal'>x &amp; y</td>" in page
    assert "&lt;i&gt;" in page
