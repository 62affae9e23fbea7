"""README says what the tables say."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvcache
import kvcache.paper
from kvcache.paper.pages.readme import fill, main
from kvcache.paper.results import write_table

ROOT = Path(__file__).resolve().parents[3]


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


# ---- what the committed README promises ---------------------------------------------------------

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_every_file_of_the_map_exists_and_every_notebook_is_in_it():
    section = SECTIONS["Figure and table, notebook, output"]
    rows = [line.split("|")[2:5] for line in section.splitlines() if line.startswith("|")][2:]
    mentioned = []
    for notebook, tables, figures in rows:
        (name,) = re.findall("`(.+?)`", notebook)
        mentioned.append(name)
        source = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
        for table in re.findall("`(.+?)`", tables):
            assert (ROOT / "data" / "results" / table).is_file(), table
            assert Path(table).stem in source, f"{name} does not name {table}"
        for figure in re.findall("`(.+?)`", figures):
            assert (ROOT / "figures" / f"{figure}.png").is_file(), figure
            assert (ROOT / "figures" / f"{figure}.svg").is_file(), figure
            assert figure in source, f"{name} does not draw {figure}"
    assert mentioned == sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))


def test_no_value_starts_a_line():
    """Markdown takes a comment at the start of a line for a block of its own, and the sentence breaks."""
    assert re.findall(r"^ *(?:[-*] )?<!-- value.*", TEXT, re.MULTILINE) == []


def test_links_and_images_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) > 3
    assert [t for t in targets if "://" not in t and not (ROOT / t).is_file()] == []


def test_every_part_of_the_package_is_in_the_reading_order_once():
    named = re.findall("`([a-z_0-9]+)`", SECTIONS["Reading the code"])
    assert sorted(named) == sorted(set(named)), "named twice"
    package = ROOT / "kvcache"
    parts = {path.stem for folder in (package, package / "paper") for path in folder.glob("*.py")}
    parts |= {path.parent.name for depth in ("*", "paper/*") for path in package.glob(f"{depth}/__init__.py")}
    parts -= {"__init__", "__main__"}
    assert [name for name in sorted(parts) if name not in named] == []
    assert set(named) <= parts | {path.stem for path in package.rglob("*.py")}


@pytest.mark.parametrize("package", [kvcache, kvcache.paper], ids=lambda package: package.__name__)
def test_the_package_tells_the_same_order(package):
    first = re.findall("`([a-z_0-9]+)`", package.__doc__)
    order = re.findall("`([a-z_0-9]+)`", SECTIONS["Reading the code"])
    assert first == [name for name in order if name in first]
    parts = {path.stem for path in Path(package.__file__).parent.glob("[a-z]*.py")}
    assert parts <= set(first)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    count = 2000
    requests = pd.DataFrame(
        {
            "Timestamp": np.sort(rng.uniform(0, 3600, count)),
            "Model": "ChatGPT",
            "Request tokens": rng.integers(10, 800, count),
            "Response tokens": rng.integers(1, 900, count),
            "Total tokens": 0,
            "Log Type": "Conversation log",
        }
    )
    requests.to_csv(tmp_path / "requests.csv", index=False)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", SECTIONS["Use it on your own trace"], re.DOTALL)
    assert len(examples) == 3
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    solution, lengths = names["solution"], names["lengths"]
    assert solution.status == "optimal"
    assert solution.gap <= 1e-4
    # W1 with a small radius reserves the fractile, and so does the optimum where memory is plenty
    fractile = lengths.quantile(10 / 11)
    assert fractile == np.quantile(requests["Response tokens"], 10 / 11, method="inverted_cdf")
    printed = capsys.readouterr().out.splitlines()
    reserved = [line for line in printed if line.replace(".", "").isdigit()]
    assert float(reserved[0]) == float(reserved[-1]) == fractile
    assert printed[0].startswith("Plan(")
    prompt = requests["Request tokens"].mean()
    assert names["policy"].reservation("chat") == pytest.approx(prompt + fractile, abs=1e-6)
