"""Tables have one form on every machine, and appear whole or not at all."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.files import atomic_path
from kvcache.paper.project import project_root
from kvcache.paper.results import figures_dir, read_table, results_dir, table_path, write_table


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCACHE_OUTPUT", str(tmp_path))
    return tmp_path


def test_bytes_of_a_table(output):
    frame = pd.DataFrame(
        {
            "name": ["a", "b, c", "None"],
            "cost": [1 / 3, -0.0, np.nan],
            "tokens": [1, 20_000_000, 3],
            "mixed": [0.1 + 0.2, "text", None],
            "held": [True, False, True],
        }
    )
    path = write_table(frame, "t.csv", profile="quick")
    assert path == output / "data/results/t.csv"
    assert path.read_bytes() == (
        b'name,cost,tokens,mixed,held\na,0.333333,1,0.3,True\n"b, c",0,20000000,text,False\nNone,,3,,True\n'
    )


def test_a_value_that_rounds_to_negative_zero_is_zero(output):
    path = write_table(pd.DataFrame({"x": [-0.0, np.float32(-0.0), -1e-9]}), "z.csv", "quick")
    assert path.read_text() == "x\n0\n0\n-1e-09\n"


def test_read_gives_back_text_numbers_and_missing_values(output):
    frame = pd.DataFrame({"policy": ["NA", "None", "P90"], "x": [1.5, np.nan, 2.0], "n": [1, 2, 3]})
    write_table(frame, "t.csv", "full")
    pd.testing.assert_frame_equal(read_table("t.csv", "full"), frame, check_dtype=False)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_writing_what_was_read_gives_the_same_bytes(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    write_table(pd.DataFrame({"x": values}), path)
    first = path.read_bytes()
    write_table(read_table(path), path)
    assert path.read_bytes() == first


def test_profiles_have_folders_of_their_own(output):
    assert results_dir("quick") == output / "data/results"
    assert results_dir("full") == output / "data/results/full"
    assert figures_dir("quick") == output / "figures"
    assert figures_dir("full") == output / "figures/full"
    with pytest.raises(ValueError, match="'fast'; expected one of quick, full"):
        results_dir("fast")


def test_a_relative_name_needs_a_profile(tmp_path):
    with pytest.raises(ValueError, match="needs profile="):
        table_path("t.csv")
    with pytest.raises(ValueError, match=r"ends in \.csv"):
        table_path("t.parquet", "quick")
    assert table_path(tmp_path / "t.csv") == tmp_path / "t.csv"


def test_an_index_that_would_be_lost_is_refused(tmp_path):
    frame = pd.DataFrame({"x": [1]}, index=pd.Index(["a"], name="policy"))
    with pytest.raises(ValueError, match=r"\['policy'\] would be lost"):
        write_table(frame, tmp_path / "t.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", [["x", "x"], [0, 1]])
def test_odd_column_names_are_refused(tmp_path, columns):
    with pytest.raises(ValueError, match="expected text, each name once"):
        write_table(pd.DataFrame([[1, 2]], columns=columns), tmp_path / "t.csv")


def test_a_missing_table_is_named(output):
    with pytest.raises(FileNotFoundError, match=r"table9\.csv: no such table"):
        read_table("table9.csv", "quick")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_file_leaves_the_old_one(tmp_path, error):
    target = tmp_path / "new" / "t.txt"
    with atomic_path(target) as partial:
        partial.write_text("old")
    with pytest.raises(error), atomic_path(target) as partial:
        partial.write_text("ne")
        raise error
    assert target.read_text() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["t.txt"]


def test_nothing_written_is_an_error(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"t\.png: nothing was written"),
        atomic_path(tmp_path / "t.png"),
    ):
        pass


def test_atomic_path_keeps_the_suffix(tmp_path):
    with atomic_path(tmp_path / "fig2a.png") as partial:
        assert partial.suffix == ".png"
        assert partial.parent == tmp_path
        partial.touch()


def test_project_root(tmp_path, monkeypatch):
    monkeypatch.delenv("KVCACHE_ROOT", raising=False)
    assert (project_root() / "kvcache" / "files.py").is_file()
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path))
    assert project_root() == tmp_path
    monkeypatch.setenv("KVCACHE_ROOT", str(tmp_path / "none"))
    with pytest.raises(NotADirectoryError, match="KVCACHE_ROOT is"):
        project_root()
