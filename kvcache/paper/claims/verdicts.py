"""Verdicts on the paper's claims.

A claim is judged by a function of the result tables, never by hand: the functions live in
`kvcache.paper.claims.judges`, one module per group of notebooks, and register themselves with
`judges_claim`. Each notebook saves its own verdicts; ``claims.csv`` is put together from all of them.
"""

from __future__ import annotations

import fcntl
import html
import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from pathlib import Path

import pandas as pd
from IPython.display import HTML

from kvcache.paper.assumptions import assumption_table
from kvcache.paper.published import CLAIMS
from kvcache.paper.results import read_table, results_dir, write_table

__all__ = [
    "CLAIMS_TABLE",
    "ENGINE_TABLE",
    "PARTS",
    "Outcome",
    "Tables",
    "Verdict",
    "judge",
    "judges_claim",
    "save_engine_verdicts",
    "save_verdicts",
    "verdicts_html",
]

Tables = Mapping[str, pd.DataFrame]
Judge = Callable[[Tables], "Verdict"]

#: Folder of the notebooks' own verdicts, within a profile's results; and what is made from them.
PARTS, CLAIMS_TABLE = "claims", "claims.csv"
#: The second verdicts.
ENGINE_TABLE = "engine_claims.csv"


class Outcome(StrEnum):
    """What became of a claim."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    NOT_REPRODUCED = "not reproduced"
    NOT_TESTABLE = "not testable"

    @classmethod
    def of(cls, whole: bool, part: bool) -> Outcome:
        """Reproduced where the whole claim holds, partly where some of it does, else not."""
        return cls.REPRODUCED if whole else cls.PARTLY if part else cls.NOT_REPRODUCED


@dataclass(frozen=True)
class Verdict:
    """The outcome of one claim, with what led to it. All texts are made from result tables.

    Parameters
    ----------
    id : of the claim.
    verdict : an `Outcome`.
    paper, ours : the paper's number and the one found here, as text with units.
    tolerance : how far apart they may be for ``reproduced``.
    evidence : one sentence that names what was found.
    source : the tables or figures, and the cells in them, that show it.
    assumptions : ids of the choices (``A1`` ...) on which the verdict depends.
    """

    id: str
    verdict: Outcome
    paper: str
    ours: str
    tolerance: str
    evidence: str
    source: str
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.id not in CLAIMS:
            raise ValueError(f"claim {self.id!r}; known are {', '.join(CLAIMS)}")
        object.__setattr__(self, "verdict", Outcome(self.verdict))
        texts = {field.name: getattr(self, field.name) for field in fields(self)}
        empty = [name for name, text in texts.items() if isinstance(text, str) and not text.strip()]
        if empty:
            raise ValueError(f"claim {self.id}: {', '.join(empty)} empty; a verdict says what led to it")
        if self.assumptions:
            assumption_table(*self.assumptions)

    def row(self) -> dict[str, str]:
        """The verdict with its claim, as one row of ``claims.csv``."""
        claim = CLAIMS[self.id]
        return {
            "id": self.id,
            "where": claim.where,
            "claim": claim.claim,
            "verdict": str(self.verdict),
            "paper": self.paper,
            "ours": self.ours,
            "tolerance": self.tolerance,
            "evidence": self.evidence,
            "source": self.source,
            "assumptions": " ".join(self.assumptions),
        }


_JUDGES: dict[str, Judge] = {}
#: Judges of the claims that mean something in a serving engine too: a second verdict.
_ENGINE_JUDGES: dict[str, Judge] = {}


def judges_claim(claim: str, *, engine: bool = False) -> Callable[[Judge], Judge]:
    """Decorator: the function judges this claim. It gets the result tables and returns a `Verdict`.

    ``engine`` registers the judge of its second verdict, in a serving engine.

    Raises
    ------
    ValueError
        For an unknown claim, and for a second judge of the same claim.
    """

    def register(function: Judge) -> Judge:
        if claim not in CLAIMS:
            raise ValueError(f"claim {claim!r}; known are {', '.join(CLAIMS)}")
        name = f"{function.__module__}.{function.__qualname__}"
        registry = _ENGINE_JUDGES if engine else _JUDGES
        other = registry.get(claim)
        if other is not None and f"{other.__module__}.{other.__qualname__}" != name:
            raise ValueError(f"claim {claim}: judged by {other.__module__} already; {name} is a second judge")
        registry[claim] = function
        return function

    return register


@cache
def _load_judges() -> None:
    from kvcache.paper.claims import judges as package  # here, because the judges import this module

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


class _Named(dict):
    """Result tables by name; a missing one is named together with those at hand."""

    def __missing__(self, name: str) -> pd.DataFrame:
        raise KeyError(f"result table {name!r}; given are {', '.join(self) or 'none'}")


def judge(claim: str, tables: Tables, *, engine: bool = False) -> Verdict:
    """The verdict on a claim, or the second one, in a serving ``engine``.

    Parameters
    ----------
    claim : its id, ``"C01"`` ...
    tables : result tables by the name they are saved under, without ``.csv``: ``{"table2": ...}``.

    Raises
    ------
    KeyError
        When nothing judges the claim, or a table that its judge reads is not given.
    """
    _load_judges()
    registry = _ENGINE_JUDGES if engine else _JUDGES
    if claim not in registry:
        raise KeyError(f"claim {claim!r} has no judge; judged are {', '.join(sorted(registry))}")
    verdict = registry[claim](_Named(tables))
    if verdict.id != claim:
        raise ValueError(f"claim {claim}: its judge returned a verdict on {verdict.id}")
    return verdict


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time: notebooks run in parallel and share ``claims.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def save_engine_verdicts(verdicts: Sequence[Verdict], profile: str) -> pd.DataFrame:
    """Save the second verdicts, those in a serving engine, as ``engine_claims.csv``; its rows."""
    rows = pd.DataFrame([verdict.row() for verdict in verdicts]).sort_values("id", ignore_index=True)
    write_table(rows, ENGINE_TABLE, profile)
    return rows


def save_verdicts(verdicts: Sequence[Verdict], notebook: str, profile: str) -> pd.DataFrame:
    """Save a notebook's verdicts, and put ``claims.csv`` together from those of all notebooks.

    They go to ``claims/<notebook>.csv`` and take the place of what this notebook saved before. Several
    processes may do so at once. ``claims.csv`` is sorted by claim.

    Returns
    -------
    DataFrame
        This notebook's rows.

    Raises
    ------
    ValueError
        For a claim that is judged twice, here or by another notebook.
    """
    rows = pd.DataFrame([verdict.row() for verdict in verdicts]).sort_values("id", ignore_index=True)
    folder = results_dir(profile) / PARTS
    with _locked(folder):
        parts = {path.stem: path for path in sorted(folder.glob("*.csv")) if path.stem != notebook}
        others = {name: read_table(path.resolve()) for name, path in parts.items()}
        everything = pd.concat([rows, *others.values()]).sort_values("id", ignore_index=True)
        twice = everything.loc[everything["id"].duplicated(), "id"].tolist()
        if twice:
            every = {notebook: rows, **others}
            where = [name for name, table in every.items() if twice[0] in set(table["id"])]
            raise ValueError(f"claim {twice[0]}: judged twice, in {' and '.join(where)}")
        write_table(rows, f"{PARTS}/{notebook}.csv", profile)
        write_table(everything, CLAIMS_TABLE, profile)
    return rows


_MARKS = {
    Outcome.REPRODUCED: ("#00704f", "✔"),
    Outcome.PARTLY: ("#8a5a00", "◐"),
    Outcome.NOT_REPRODUCED: ("#b03a00", "✘"),
    Outcome.NOT_TESTABLE: ("#555555", "–"),
}


def verdicts_html(rows: pd.DataFrame) -> HTML:
    """Rows of ``claims.csv`` as a table to read in a notebook: one claim per row, wrapped text."""

    def line(row: pd.Series) -> str:
        color, mark = _MARKS[Outcome(row["verdict"])]
        cells = {name: html.escape(str(row[name])) for name in rows.columns}
        style = "text-align:left;vertical-align:top;white-space:normal;"
        return (
            f"<tr><td style='{style}'><b>{cells['id']}</b><br>{cells['where']}</td>"
            f"<td style='{style}min-width:9em'>{cells['claim']}</td>"
            f"<td style='{style}color:{color};font-weight:bold'>{mark} {cells['verdict']}</td>"
            f"<td style='{style}min-width:8em'>{cells['paper']}</td>"
            f"<td style='{style}min-width:8em'>{cells['ours']}</td>"
            f"<td style='{style}min-width:14em'>{cells['evidence']}<br>"
            f"<small>tolerance: {cells['tolerance']} · from: {cells['source']}"
            f"{' · choices: ' + cells['assumptions'] if row['assumptions'] else ''}</small></td></tr>"
        )

    names = ("claim", "says", "verdict", "paper", "here", "evidence")
    head = "".join(f"<th style='text-align:left'>{name}</th>" for name in names)
    body = "".join(line(row) for _, row in rows.astype(object).fillna("").iterrows())
    return HTML(f"<table style='font-size:0.9em'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
