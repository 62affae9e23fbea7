"""Digests: whole traces as counts of requests per length, small enough to be committed.

One Parquet file per trace under ``data/digests`` holds ``(field, class, window, tokens, requests)``,
sorted, one row group per field; ``data/sources.toml`` tells where each comes from.
``python -m kvcache.paper.digests build --raw DIR`` makes them from the originals, or the reduced
files, in DIR.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvcache.lengths import LengthDistribution
from kvcache.paper.digests.sources import load_sources
from kvcache.paper.project import project_root
from kvcache.traces.prefixes import PrefixStats

__all__ = [
    "digest_counts",
    "digest_windows",
    "list_digests",
    "load_digest",
    "load_digests",
    "load_prefix_stats",
]

DAY_S = 86_400
METADATA = b"kvcache"
_KEYS = ("class", "model", "log", "window", "day")


@dataclass(frozen=True)
class _Digest:
    """One field of a digest in memory: the columns as arrays, sorted by class, window and tokens."""

    name: str
    field: str
    labels: tuple[str, ...]
    codes: NDArray[np.int32]
    windows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    requests: NDArray[np.int64]
    facts: Mapping[str, Any]

    @property
    def days(self) -> NDArray[np.int64]:
        return self.windows.astype(np.int64) * (self.facts["window_s"] or DAY_S) // DAY_S


def load_digest(
    name: str,
    *,
    field: str = "output",
    class_: str | Iterable[str] | None = None,
    model: str | Iterable[str] | None = None,
    log: str | Iterable[str] | None = None,
    window: int | Iterable[int] | None = None,
    day: int | Iterable[int] | None = None,
) -> LengthDistribution:
    """The length distribution of a trace, or of the part of it that the filters leave.

    Parameters
    ----------
    name : as `list_digests` lists them; case and ``_`` for ``-`` do not matter.
    field : ``"output"`` or ``"input"`` tokens, or ``"prefix"`` (leading prompt tokens that an earlier
        request has brought) where the trace tells.
    class_, model, log : classes of requests; a class ``"GPT-4/API log"`` is of model ``"GPT-4"`` and
        log ``"API log"``.
    window : time windows, counted from 0; `digest_windows` tells when they begin.
    day : days, counted from 0.
        Every filter takes one value or several, which are pooled.

    Returns
    -------
    LengthDistribution. Its weights are requests; ``upper`` is the trace's own L_max (see
    ``data/sources.toml``) whatever the filters; ``reconstructed`` is True where it was made from
    published quantiles.

    Raises
    ------
    ValueError
        For a name or a filter value that does not exist, with the choices, and for filters that
        leave no request.
    """
    digest = _load(name, field)
    filters = {"class": class_, "model": model, "log": log, "window": window, "day": day}
    chosen = _select(digest, filters)
    shown = "".join(f", {key} {_shown(given)}" for key, given in filters.items() if given is not None)
    label = digest.name + shown + ("" if field == "output" else f", {field}")
    return _distribution(digest, chosen, label)


def load_digests(name: str, by: str, field: str = "output", **filters: Any) -> dict[Any, LengthDistribution]:
    """Distributions of a trace by ``"window"``, ``"day"``, ``"class"``, ``"model"`` or ``"log"``.

    ``field`` and ``filters`` are those of `load_digest`. Keys come in order of time, or of the
    classes; parts without a request are left out.
    """
    filters = {key.rstrip("_"): given for key, given in filters.items()}
    for key in filters:
        if key not in _KEYS:
            raise TypeError(f"unknown filter {key!r}; expected field, class_, model, log, window or day")
    if by not in _KEYS:
        raise ValueError(f"by: {by!r}; expected one of {', '.join(map(repr, _KEYS))}")
    digest = _load(name, field)
    chosen = _select(digest, filters)
    values, at = _levels(digest, by)
    parts = ((value, chosen & (at == i)) for i, value in enumerate(values))
    return {
        value: _distribution(digest, mask, f"{digest.name}, {by} {value}")
        for value, mask in parts
        if mask.any()
    }


def digest_counts(name: str, field: str = "output") -> pd.DataFrame:
    """A digest as a table: class, window, day, tokens, requests."""
    digest = _load(name, field)
    return pd.DataFrame(
        {
            "class": pd.Categorical.from_codes(digest.codes, digest.labels),
            "window": digest.windows,
            "day": digest.days,
            "tokens": digest.tokens,
            "requests": digest.requests,
        }
    )


def digest_windows(name: str) -> pd.DataFrame:
    """The time windows of a digest: window, start_s and end_s (seconds from the start of the first
    one, NaN without windows), day, requests."""
    digest = _load(name, "output")
    windows, at = np.unique(digest.windows, return_inverse=True)
    width = digest.facts["window_s"]
    return pd.DataFrame(
        {
            "window": windows,
            "start_s": windows * width if width else np.nan,
            "end_s": (windows + 1) * width if width else np.nan,
            "day": windows.astype(np.int64) * (width or DAY_S) // DAY_S,
            "requests": np.bincount(at, weights=digest.requests).astype(np.int64),
        }
    )


def list_digests() -> pd.DataFrame:
    """One row per committed digest: name, title, requests, classes, windows and their width, days,
    bounds, whether it is reconstructed, and the licence."""
    sources = load_sources()
    rows = []
    for name in _names():
        facts = read_facts(digest_path(name))
        source = sources.digests.get(name)
        rows.append(
            {
                "name": name,
                "title": source.title if source else name,
                "requests": facts["requests"],
                "classes": len(facts["classes"]),
                "windows": facts["windows"],
                "window_s": facts["window_s"],
                "days": facts["days"],
                "upper_output": facts["upper"]["output"],
                "upper_input": facts["upper"]["input"],
                "reconstructed": facts["reconstructed"],
                "prefixes": "prefix" in facts["upper"],
                "licence": source.licence if source else "",
            }
        )
    return pd.DataFrame(rows).astype({"window_s": "Int64"})


def load_prefix_stats(name: str) -> PrefixStats:
    """The prefix-sharing statistics of a digest whose trace has block ids (ValueError otherwise)."""
    path = digest_path(name)
    found = read_facts(path).get("prefix_stats")
    if found is None:
        having = [n for n in _names() if "prefix_stats" in read_facts(digest_path(n))]
        raise ValueError(
            f"digest {path.stem!r}: its trace has no prefix blocks; {', '.join(having) or 'none'} has"
        )
    return PrefixStats(**{key: tuple(v) if isinstance(v, list) else v for key, v in found.items()})


def digests_dir() -> Path:
    """The folder of the digests."""
    return project_root() / "data" / "digests"


def _names() -> list[str]:
    found = {path.stem for path in digests_dir().glob("*.parquet")}
    known = [name for name in load_sources().digests if name in found]
    return known + sorted(found - set(known))


def digest_path(name: str) -> Path:
    """The file of a digest; ValueError with the choices where there is none."""
    path = digests_dir() / f"{name.strip().lower().replace('_', '-')}.parquet"
    if not path.is_file():
        names = _names()
        choices = (
            ", ".join(names) if names else f"none in {digests_dir()}; make digests RAW=folder builds them"
        )
        raise ValueError(f"digest {name!r}: no such digest; there are {choices}")
    return path


def read_facts(path: Path) -> dict[str, Any]:
    """What a digest file says of itself: rows, bounds, windows, what it was made from."""
    return json.loads(pq.read_metadata(path).metadata[METADATA])


def _load(name: str, field: str) -> _Digest:
    path = digest_path(name)
    return _read(path, path.stat().st_mtime_ns, field)


@lru_cache(maxsize=32)
def _read(path: Path, _modified: int, field: str) -> _Digest:
    with pq.ParquetFile(path) as file:
        facts = json.loads(file.metadata.metadata[METADATA])
        fields = list(facts["upper"])
        if field not in fields:
            raise ValueError(f"field: {field!r}; digest {path.stem!r} has {', '.join(map(repr, fields))}")
        table = file.read_row_group(fields.index(field), columns=["class", "window", "tokens", "requests"])
    column = table.column("class").combine_chunks()
    labels = tuple(column.dictionary.to_pylist())
    return _Digest(
        path.stem,
        field,
        labels,
        column.indices.to_numpy().astype(np.int32),
        *(table.column(c).to_numpy() for c in ("window", "tokens", "requests")),
        facts,
    )


def _levels(digest: _Digest, key: str) -> tuple[list[Any], NDArray[np.intp]]:
    """The values of a key, in order of time or of the classes, and which of them each row has."""
    if key in ("window", "day"):
        at, values = pd.factorize(digest.windows if key == "window" else digest.days, sort=True)
        return values.tolist(), at
    split = [(label, *label.partition("/")[::2]) for label in digest.labels]
    parts = [row[_KEYS.index(key)] for row in split]
    values = list(dict.fromkeys(parts))
    return values, np.array([values.index(part) for part in parts])[digest.codes]


def _values(given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]
    return list(given)


def _shown(given: Any) -> str:
    values = _values(given)
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return "+".join(map(str, values))


def _select(digest: _Digest, filters: Mapping[str, Any]) -> NDArray[np.bool_]:
    chosen = np.ones(digest.tokens.size, bool)
    for key, given in filters.items():
        if given is None:
            continue
        name = "class_" if key == "class" else key
        values, at = _levels(digest, key)
        wanted = _values(given)
        if not wanted:
            raise ValueError(f"{name}: empty; digest {digest.name!r} has {_choices(values)}")
        for value in wanted:
            if value not in values:
                raise ValueError(f"{name}: {value!r}; digest {digest.name!r} has {_choices(values)}")
        chosen &= np.isin(at, [values.index(value) for value in wanted])
    return chosen


def _choices(choices: Sequence[Any]) -> str:
    if len(choices) > 8 and list(choices) == list(range(choices[0], choices[-1] + 1)):
        return f"{choices[0]} to {choices[-1]}"
    return ", ".join(map(repr, choices))


def _distribution(digest: _Digest, chosen: NDArray[np.bool_], label: str) -> LengthDistribution:
    if not chosen.any():
        raise ValueError(f"{label}: no request is left by these filters together")
    return LengthDistribution.from_counts(
        digest.tokens[chosen],
        digest.requests[chosen],
        digest.facts["upper"][digest.field],
        name=label,
        reconstructed=digest.facts["reconstructed"],
    )
