"""Trace formats, and how a file is recognised by its content.

Compression shows in the first bytes, the format in the header, the Parquet schema or the first JSON
value; names and suffixes of files play no part.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FORMATS", "UNITS", "Format", "Head", "TraceError", "has_zone", "open_text", "plain_reason"]

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

_SNIFF_BYTES = 1 << 16
_LONGEST_FIRST_LINE = 16 << 20
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
}
_CONTAINERS = {
    "csv": "CSV",
    "jsonl": "JSON objects, one a line",
    "json": "a JSON array of conversations",
    "parquet": "a Parquet file",
}


class TraceError(ValueError):
    """A trace that cannot be read: says which file and row, what was found and what was expected."""


@dataclass(frozen=True)
class Format:
    """How one kind of file maps to the tidy table.

    Attributes
    ----------
    name, about : key in ``FORMATS``; what it is.
    container : ``"csv"``, ``"jsonl"``, ``"json"`` or ``"parquet"``.
    columns : from the tidy names (``arrival_s``, ``input_tokens``, ``output_tokens``, ``class``,
        ``prefix_blocks``) to the file's; ``class`` may be several columns, joined by a slash.
    unit : of a numeric arrival.
    zone : whether dates of arrival must (True) or must not (False) carry a zone; None: as the first one.
    generic : whether it stands for any file of its container.
    """

    name: str
    container: str
    about: str
    columns: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    unit: str = "s"
    zone: bool | None = None
    generic: bool = False

    def __post_init__(self) -> None:
        if self.container not in _CONTAINERS or self.unit not in UNITS:
            raise ValueError(f"format {self.name!r}: container {self.container!r}, unit {self.unit!r}")

    def sources(self) -> list[str]:
        """The file's columns that are read, each once, in tidy order."""
        several = ((source,) if isinstance(source, str) else source for source in self.columns.values())
        return list(dict.fromkeys(chain.from_iterable(several)))

    def mapped(self, mapping: Mapping[str, Any], unit: str | None) -> Format:
        """This format with single columns replaced; a column mapped to None is not read."""
        merged = {tidy: source for tidy, source in {**self.columns, **mapping}.items() if source is not None}
        return replace(self, columns=merged, unit=unit or self.unit)


_TIDY = {"arrival_s": "arrival_s", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}
_AZURE = {"arrival_s": "TIMESTAMP", "input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}
_BURSTGPT = {
    "arrival_s": "Timestamp",
    "input_tokens": "Request tokens",
    "output_tokens": "Response tokens",
    "class": ("Model", "Log Type"),
}
_VIDUR = {
    "arrival_s": "arrived_at",
    "input_tokens": "num_prefill_tokens",
    "output_tokens": "num_decode_tokens",
}
_MOONCAKE = {
    "arrival_s": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_blocks": "hash_ids",
}

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("burstgpt", "csv", "BurstGPT 1-3, with or without Session ID and Elapsed time", _BURSTGPT),
        Format(
            "azure-2023", "csv", "Azure LLM inference trace 2023, dates without a zone", _AZURE, zone=False
        ),
        Format("azure-2024", "csv", "Azure LLM inference trace 2024, dates with a zone", _AZURE, zone=True),
        Format("vidur", "csv", "Vidur request trace", _VIDUR),
        Format("mooncake", "jsonl", "Mooncake, with hash ids of prefix blocks", _MOONCAKE, unit="ms"),
        Format("sharegpt", "json", "ShareGPT, one array of conversations, streamed and tokenised"),
        Format("csv", "csv", "any CSV with a column mapping", _TIDY, generic=True),
        Format("jsonl", "jsonl", "any JSON lines with a column mapping", _TIDY, generic=True),
        Format("parquet", "parquet", "any Parquet file with a column mapping", _TIDY, generic=True),
    )
}


@dataclass(frozen=True)
class Head:
    """The beginning of a file: its compression and its first text (None for Parquet)."""

    path: Path
    compression: str | None
    text: str | None

    @classmethod
    def of(cls, path: Path) -> Head:
        """Look at the beginning of a file.

        Raises
        ------
        TraceError
            If there is none, or it is empty, binary, not UTF-8 or packed in a way that is not read.
        """
        name = path.name
        if path.is_dir():
            raise TraceError(f"{path}: a folder; expected a file")
        try:
            with open(path, "rb") as file:
                start = file.read(8)
        except FileNotFoundError:
            raise TraceError(f"{path}: no such file") from None
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
        if not start:
            raise TraceError(f"{name}: empty file; expected requests")
        if start[:4] == b"PAR1":
            return cls(path, None, None)
        for magic, what in _REFUSED.items():
            if start.startswith(magic):
                raise TraceError(
                    f"{name}: {what}; expected CSV, JSON lines, JSON or Parquet, text also in gzip or zstd"
                )
        compression = next((kind for magic, kind in _COMPRESSIONS.items() if start.startswith(magic)), None)
        return cls(path, compression, _first_text(path, compression))

    @property
    def container(self) -> str:
        """Which of csv, jsonl, json and parquet it is."""
        if self.text is None:
            return "parquet"
        return {"[": "json", "{": "jsonl"}.get(self.text.lstrip()[0], "csv")

    def columns(self) -> list[str]:
        """Columns by the header, the schema or the first object (none for an array or a damaged object)."""
        if self.text is None:
            try:
                return pq.read_schema(self.path).names
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise TraceError(f"{self.path.name}: {plain_reason(error)}") from error
        if self.container == "csv":
            try:
                return next(self._records(), [])
            except csv.Error as error:
                raise TraceError(f"{self.path.name}: header: {error}") from error
        if self.container == "jsonl":
            try:
                first = json.loads(self.text.lstrip().split("\n", 1)[0])
            except (ValueError, RecursionError):
                return []
            return list(first) if isinstance(first, dict) else []
        return []

    def recognise(self, mapping: Mapping[str, Any]) -> Format:
        """The format of the file; ``mapping`` tells that the user has named columns of a generic one."""
        if self.container == "json":
            return FORMATS["sharegpt"]
        columns = self.columns()
        for known in FORMATS.values():
            if (
                known.container == self.container
                and not known.generic
                and set(known.sources()) <= set(columns)
            ):
                zone = known.name == "azure-2023" and self._first_date_has_zone()
                return FORMATS["azure-2024"] if zone else known
        generic = FORMATS[self.container]
        if columns and not mapping and not set(generic.sources()) <= set(columns):
            known_names = ", ".join(name for name, known in FORMATS.items() if not known.generic)
            raise TraceError(
                f"{self.path.name}: columns {_listed(columns)} fit none of {known_names}; name them: "
                'read_trace(path, arrival_s="...", input_tokens="...", output_tokens="...")'
            )
        return generic

    def check(self, layout: Format) -> None:
        """Refuse a file that is not of the layout's container or lacks its columns (TraceError)."""
        name = self.path.name
        if self.container != layout.container:
            found = {"json": "a JSON array", "csv": "text that is not JSON"}
            raise TraceError(
                f"{name}: {found.get(self.container, _CONTAINERS[self.container])}; "
                f"format {layout.name!r} expects {_CONTAINERS[layout.container]}"
            )
        columns = self.columns()
        if self.container == "json" or (self.container == "jsonl" and not columns):
            return  # a damaged first object is named, with its row, by the reader
        for column in layout.sources():
            if column not in columns:
                raise TraceError(f"{name}: no column {column!r}; found {_listed(columns)}")
            if columns.count(column) > 1:
                raise TraceError(
                    f"{name}: column {column!r} occurs {columns.count(column)} times; expected once"
                )

    def _records(self) -> Any:
        assert self.text is not None
        return (row for row in csv.reader(io.StringIO(self.text, newline="")) if row)

    def _first_date_has_zone(self) -> bool:
        try:
            records = self._records()
            at = next(records).index(_AZURE["arrival_s"])
            return has_zone(next(records)[at])
        except (StopIteration, IndexError, csv.Error):
            return False


def open_text(path: Path, compression: str | None) -> pa.NativeFile:
    """The unpacked bytes of a file; a truncated gzip or zstd file raises OSError where it ends."""
    return pa.input_stream(os.fspath(path), compression=compression)


def plain_reason(error: BaseException) -> str:
    """A short one-line reason from a library's error."""
    message = " ".join(str(error).split())[:200]
    if "Truncated compressed stream" in message:
        return "the compressed file ends too early; copy or download it again"
    return message or type(error).__name__


def has_zone(text: str) -> bool:
    """Whether a date and time ends in ``Z`` or an offset."""
    return bool(re.search(r"(Z|:\d\d(\.\d+)?\s*[+-]\d\d(:?\d\d)?)\s*$", text, re.ASCII))


def _first_text(path: Path, compression: str | None) -> str:
    name = path.name
    try:
        with open_text(path, compression) as stream:
            head = stream.read(_SNIFF_BYTES)
            # The first JSON object must be whole to be recognised, however long its line.
            while (
                head.lstrip()[:1] == b"{" and b"\n" not in head.lstrip() and len(head) < _LONGEST_FIRST_LINE
            ):
                more = stream.read(_SNIFF_BYTES)
                if not more:
                    break
                head += more
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{name}: {plain_reason(error)}") from error
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TraceError(f"{name}: UTF-16 text; expected UTF-8 (save or convert it so)")
    if b"\0" in head:
        raise TraceError(f"{name}: binary data; expected CSV, JSON lines, JSON or Parquet")
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head.removeprefix(codecs.BOM_UTF8))
    try:
        # Further on, it is the reader that names the row.
        codecs.getincrementaldecoder("utf-8")().decode(head.lstrip().split(b"\n", 1)[0])
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: its first line is no UTF-8; expected UTF-8 text") from error
    if not text.strip():
        raise TraceError(f"{name}: {'only blank lines' if text else 'empty file'}; expected requests")
    return text


def _listed(columns: list[str]) -> str:
    shown = ", ".join(repr(column[:40]) for column in columns[:12])
    return shown + (f" and {len(columns) - 12} more" if len(columns) > 12 else "")
