"""The table of claims in plain text, and the notebooks' durations."""

from __future__ import annotations

import nbformat
import pandas as pd
import pytest

from kvcache.paper.pages.summary import claims_summary, durations, main
from kvcache.paper.results import read_table, write_table

CLAIMS = pd.DataFrame(
    {
        "id": ["C01", "C02"],
        "where": ["Table II", "Fig. 2(a)"],
        "paper": ["gains of 28 to 50 % at the first of the six cost ratios", "P90"],
        "ours": [None, "P89"],
        "verdict": ["reproduced", "partly"],
        "evidence": ["not shown", "not shown"],
    }
)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_summary_keeps_every_word_within_the_width(width):
    lines = claims_summary(CLAIMS, width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["id", "where", "verdict", "paper", "ours"]
    assert lines[-1] == "2 claims: reproduced 1, partly 1"
    body = " ".join(line[lines[0].index("paper") : lines[0].index("ours")].strip() for line in lines[2:-2])
    assert " ".join(body.split()) == " ".join(CLAIMS["paper"])
    assert "not shown" not in "".join(lines)


@pytest.fixture
def executed(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    paths = []
    for name, seconds in [("01_data", 30.04), ("02_fractile", 60.0)]:
        book = nbformat.v4.new_notebook(metadata={"papermill": {"duration": seconds}})
        paths.append(tmp_path / f"{name}.ipynb")
        nbformat.write(book, paths[-1])
    return paths


def test_durations_add_up(executed):
    frame = durations(executed)
    assert frame["notebook"].tolist() == ["01_data", "02_fractile", "total"]
    assert frame["seconds"].tolist() == [30.0, 60.0, 90.0]
    assert frame["minutes"].tolist() == [0.5, 1.0, 1.5]


def test_the_command_writes_what_it_prints(executed, tmp_path, capsys):
    target = tmp_path / "claims.txt"
    arguments = [str(target), *map(str, executed), "--profile", "full"]
    assert main(arguments) == 0
    assert "no claim has been judged yet" in target.read_text()
    write_table(CLAIMS, "claims.csv", "full")
    capsys.readouterr()
    assert main(arguments) == 0
    assert target.read_text() == capsys.readouterr().out
    assert target.read_text().endswith("partly 1\n2 notebooks took 1.5 min (full)\n")
    assert len(read_table("notebooks_timings.csv", "full")) == 3
