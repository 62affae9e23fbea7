"""README says what the tables say."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvcache.readme import fill, main
from kvcache.results import write_table

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    frame = pd.DataFrame({"rho": [2, 10], "dro": [184.25, 587.0], "note": ["a|b", None]})
    write_table(frame, "t.csv", "quick")
    write_table(frame.assign(dro=0.5), "t.csv", "full")
    write_table(pd.DataFrame({"minutes": [7.25]}), "run_timings.csv", "quick")
    return tmp_path


def test_readme_is_what_the_committed_tables_say(monkeypatch):
    monkeypatch.delenv("KVCACHE_OUTPUT", raising=False)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert fill(text, timings=False) == text, "run `make readme`"


def test_a_table_replaces_what_stood_between_its_markers(tables):
    marker = '<!-- table: t.csv columns=dro:cost,rho query="rho > 1" format=.1f -->'
    assert fill(f"Before.\n{marker}\nold\n<!-- end -->\nAfter.") == (
        f"Before.\n{marker}\n"
        "| cost | rho |\n| --: | --: |\n| 184.2 | 2 |\n| 587.0 | 10 |\n<!-- end -->\nAfter."
    )


def test_all_columns_text_and_missing_values(tables):
    filled = fill(
        "<!-- table: t.csv head=1 -->\n<!-- end -->\n<!-- table: t.csv columns=note --><!-- end -->"
    )
    assert "| rho | dro | note |\n| --: | --: | :-- |\n| 2 | 184.25 | a\\|b |\n<!-- end -->" in filled
    assert filled.endswith("| note |\n| :-- |\n| a\\|b |\n|  |\n<!-- end -->")


def test_values_within_a_sentence(tables):
    text = (
        'It is <!-- value: t.csv column=dro query="rho == 10" format=.0f -->?<!-- end --> or '
        '<!-- value: t.csv column=dro query="rho == 2" profile=full --><!-- end -->.'
    )
    filled = fill(text)
    assert "-->587<!-- end --> or" in filled
    assert filled.endswith("-->0.5<!-- end -->.")
    assert fill(filled) == filled


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("<!-- value: t.csv column=dro -->", "2 rows; expected one"),
        ("<!-- table: t.csv colums=dro -->", "unknown colums"),
    ],
)
def test_a_wrong_marker_is_named(tables, marker, message):
    with pytest.raises(ValueError, match=message):
        fill(f"{marker}<!-- end -->")


def test_a_marker_without_its_end_is_an_error(tables):
    with pytest.raises(ValueError, match="has no <!-- end --> of its own"):
        fill("<!-- table: t.csv -->\n<!-- table: t.csv head=1 -->\n<!-- end -->")


def test_a_missing_table_is_an_error(tables):
    with pytest.raises(FileNotFoundError, match=r"none\.csv"):
        fill("<!-- table: none.csv --><!-- end -->")


def test_the_command_rewrites_or_checks_and_a_check_leaves_timings_out(tables, capsys):
    path = tables / "README.md"
    path.write_text("<!-- value: run_timings.csv column=minutes format=.0f -->9<!-- end --> min")
    assert main(["--check", str(path)]) == 0
    assert main([str(path)]) == 0
    assert path.read_text().endswith("-->7<!-- end --> min")
    path.write_text("<!-- table: t.csv columns=rho --><!-- end -->")
    assert main(["--check", str(path)]) == 1
    assert "run `make readme`" in capsys.readouterr().out
    assert path.read_text() == "<!-- table: t.csv columns=rho --><!-- end -->"
