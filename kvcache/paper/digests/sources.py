"""Where the data come from: ``data/sources.toml`` as frozen records.

The file is the one place for origin, address, licence, citation, checksum, rows and how a digest is
reduced; this module only reads and validates it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvcache.paper.project import project_root

__all__ = ["DigestSource", "PublishedQuantiles", "RawFile", "Sources", "load_sources"]

QUANTILES = "quantiles"


@dataclass(frozen=True)
class RawFile:
    """A file that digests are made from: ``url`` are its addresses in order of preference, none where
    it was reduced elsewhere; ``also`` other names it goes by; ``sha256`` and ``bytes`` are of the
    unpacked file, None where unknown."""

    name: str
    url: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    sha256: str | None = None
    bytes: int | None = None
    rows: int | None = None
    how: str = ""

    def __post_init__(self) -> None:
        if self.sha256 is not None and (len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef")):
            raise ValueError(f"file {self.name!r}: sha256 is {self.sha256!r}; expected 64 hexadecimal digits")
        if any(not address.startswith(("https://", "http://")) for address in self.url):
            raise ValueError(f"file {self.name!r}: url is {self.url}; expected http(s) addresses")


@dataclass(frozen=True)
class PublishedQuantiles:
    """What was published of one field: minimum, maximum, mean (tokens) and quantiles by probability."""

    minimum: int
    maximum: int
    mean: float
    points: Mapping[float, int]
    requests: int
    source: str


@dataclass(frozen=True)
class DigestSource:
    """How one digest is made; the fields are those of ``[digest.NAME]`` in ``data/sources.toml``.

    ``first_hours_output`` are published quantiles of the output of single hours, by probability.
    """

    name: str
    title: str
    origin: str
    licence: str
    citation: str
    how: str
    inputs: tuple[str, ...]
    upper_output: int
    upper_input: int
    upper_note: str
    window_s: int | None = None
    align_s: int | None = None
    until_s: int | None = None
    prefix_block_tokens: int | None = None
    model: str | None = None
    rows_read: int | None = None
    rows_kept: int | None = None
    quantiles: Mapping[str, PublishedQuantiles] = field(default_factory=dict)
    first_hours_output: Mapping[float, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError(f"digest {self.name!r}: no inputs")
        if self.upper_output < 1 or self.upper_input < 1:
            raise ValueError(f"digest {self.name!r}: an upper bound is below 1 token")
        if (QUANTILES in self.inputs) != bool(self.quantiles):
            raise ValueError(f"digest {self.name!r}: inputs and [quantiles] disagree on a reconstruction")


@dataclass(frozen=True)
class Sources:
    """All files and digests of ``data/sources.toml``, by name, in the order of the file."""

    files: Mapping[str, RawFile]
    digests: Mapping[str, DigestSource]


def load_sources(path: str | Path | None = None) -> Sources:
    """Read ``data/sources.toml`` (or another file of the same layout).

    Raises
    ------
    FileNotFoundError
        When there is no such file: the package is used outside its project (set ``KVCACHE_ROOT``).
    ValueError
        For an unknown key or a value that makes no sense; the message names the table.
    """
    path = project_root() / "data" / "sources.toml" if path is None else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; set KVCACHE_ROOT to the project's folder")
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, _modified: int) -> Sources:
    with path.open("rb") as handle:
        tables = tomllib.load(handle)
    files = {name: _record(RawFile, f"file {name!r}", name, table) for name, table in tables["file"].items()}
    digests = {}
    for name, table in tables["digest"].items():
        published = table.pop(QUANTILES, {})
        source, requests = published.pop("source", ""), published.pop("requests", 0)
        hours = {float(p): tuple(x) for p, x in published.pop("first_hours_output", {}).items()}
        quantiles = {
            tidy: PublishedQuantiles(
                **{**stated, "points": {float(p): int(x) for p, x in stated["points"].items()}},
                requests=requests,
                source=source,
            )
            for tidy, stated in published.items()
        }
        table = {**table, QUANTILES: quantiles, "first_hours_output": hours}
        digests[name] = _record(DigestSource, f"digest {name!r}", name, table)
        unknown = set(digests[name].inputs) - set(files) - {QUANTILES}
        if unknown:
            raise ValueError(f"digest {name!r}: inputs {sorted(unknown)} have no [file] table")
    return Sources(files, digests)


def _record(kind: type, where: str, name: str, table: Mapping[str, Any]) -> Any:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    try:
        return kind(name=name, **values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
