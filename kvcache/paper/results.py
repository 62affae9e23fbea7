"""Tables of results: CSV files with the same bytes on every machine."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd

from kvcache.files import atomic_path
from kvcache.paper.project import output_root

__all__ = [
    "PROFILES",
    "figures_dir",
    "read_table",
    "results_dir",
    "table_path",
    "write_table",
]

#: ``quick`` is what is committed; ``full`` runs the paper's sizes through the same notebooks.
PROFILES = ("quick", "full")


def _profile_dir(base: Path, profile: str) -> Path:
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}; expected one of {', '.join(PROFILES)}")
    return base if profile == "quick" else base / profile


def results_dir(profile: str) -> Path:
    """The folder of a profile's tables: ``data/results``, and ``data/results/full`` for ``full``."""
    return _profile_dir(output_root() / "data" / "results", profile)


def figures_dir(profile: str) -> Path:
    """The folder of a profile's figures: ``figures``, and ``figures/full`` for ``full``."""
    return _profile_dir(output_root() / "figures", profile)


def table_path(name: str | os.PathLike[str], profile: str | None = None) -> Path:
    """The path of a table: an absolute path as it is, a name within the profile's folder.

    Raises
    ------
    ValueError
        For a name without ``.csv``, and for a relative name without a profile.
    """
    path = Path(name)
    if path.suffix != ".csv":
        raise ValueError(f"table {name}: expected a name that ends in .csv")
    if path.is_absolute():
        return path
    if profile is None:
        raise ValueError(f"table {name}: a relative name needs profile=, one of {', '.join(PROFILES)}")
    return results_dir(profile) / path


def _cell(value: object) -> str:
    """One CSV cell: floats as ``%.6g`` without a negative zero, missing values as nothing."""
    if value is None or value is pd.NA or value is pd.NaT:
        return ""
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return ""
        text = f"{float(value):.6g}"
        return "0" if text == "-0" else text
    return str(value)


def write_table(frame: pd.DataFrame, name: str | os.PathLike[str], profile: str | None = None) -> Path:
    """Write a table as CSV: whole or not at all, and with the same bytes on every machine.

    Floats have six significant digits, lines end in LF, text is UTF-8, a missing value is an empty
    cell. What depends on the clock or on a licence belongs in a file named ``*_timings.csv``, which
    the comparison of fresh with committed results leaves out.

    Parameters
    ----------
    frame : DataFrame
        One row per record under plain column names; its index is not written, so it must carry
        nothing (a ``RangeIndex``, or any unnamed one).
    name : path
        A file name within the profile's folder (``"table2.csv"``), or an absolute path.
    profile : {"quick", "full"}
        Which folder a name refers to.

    Returns
    -------
    Path
        Where the table now lies.

    Raises
    ------
    ValueError
        For a named index, for column names that repeat or are no text, and as `table_path` does.
    """
    path = table_path(name, profile)
    if frame.index.nlevels > 1 or frame.index.name is not None:
        raise ValueError(
            f"table {path.name}: index {list(frame.index.names)} would be lost; call reset_index() first"
        )
    odd = [column for column in frame.columns if not isinstance(column, str)]
    if odd or not frame.columns.is_unique:
        raise ValueError(
            f"table {path.name}: columns are {list(frame.columns)}; expected text, each name once"
        )
    with atomic_path(path) as partial, partial.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(frame.columns)
        columns = [[_cell(value) for value in frame[column]] for column in frame.columns]
        writer.writerows(zip(*columns, strict=True))
    return path


def read_table(name: str | os.PathLike[str], profile: str | None = None) -> pd.DataFrame:
    """Read a table that `write_table` wrote; only an empty cell counts as missing.

    Raises
    ------
    FileNotFoundError
        When no notebook has written the table yet; the message names the file.
    """
    path = table_path(name, profile)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such table; `make notebooks` writes the results")
    return pd.read_csv(path, keep_default_na=False, na_values=[""])
