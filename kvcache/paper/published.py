"""What the paper says: its published numbers and its claims, which are data beside it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import pandas as pd

__all__ = ["CLAIMS", "Claim", "claims_table", "published"]


def _data(name: str) -> str:
    return files("kvcache.paper").joinpath("data", name).read_text(encoding="utf-8")


def published(part: str) -> Any:
    """A part of the published numbers, as a copy that nobody else holds.

    The parts are ``table_2`` to ``table_5``, ``figure_3``, ``figure_6``, ``traces`` and ``setup``. Raises
    KeyError for another name.
    """
    numbers = json.loads(_data("published.json"))
    if part not in numbers:
        raise KeyError(f"published part {part!r}; known are {list(numbers)}")
    return numbers[part]


@dataclass(frozen=True)
class Claim:
    """One checkable statement of the paper: its id, where it stands, and what it says in short."""

    id: str
    where: str
    claim: str


CLAIMS: Mapping[str, Claim] = {
    row["id"]: Claim(**row) for row in csv.DictReader(_data("claims.csv").splitlines())
}


def claims_table() -> pd.DataFrame:
    """All claims: id, where, claim."""
    return pd.DataFrame([vars(claim) for claim in CLAIMS.values()])
