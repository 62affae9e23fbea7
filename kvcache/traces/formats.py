"""Trace formats, and how a file is recognised by its content.

Compression shows in the first bytes, the container in the first text, the layout in the columns: the header
of a CSV, the schema of a Parquet file, the members of the first JSON records, nested ones by their path
(``usage.prompt_tokens``). Names and suffixes of files play no part, and any container carries any layout.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvcache.traces.times import UNITS, has_zone, is_number, is_time

__all__ = ["FORMATS", "Dialect", "Format", "Head", "TraceError", "open_text", "plain_reason"]

_SNIFF_BYTES = 1 << 16
_LONGEST_FIRST_RECORD = 16 << 20
_SAMPLE_RECORDS = 20
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ": "xz data",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
}
_CONTAINERS = {
    "csv": "text that is not JSON",
    "jsonl": "JSON objects, one a line",
    "json": "a JSON array or an object over several lines",
    "parquet": "a Parquet file",
}
_SEPARATORS = ",;\t|"
_SERVEGEN_RATES = ("Gamma", "Weibull", "Exponential", "Poisson")


class TraceError(ValueError):
    """A trace that cannot be read: says which file and row, what was found and what was expected."""


@dataclass(frozen=True)
class Format:
    """How one kind of file maps to the tidy table.

    Attributes
    ----------
    name, about : key in ``FORMATS``; what it is.
    columns : from the tidy names (``arrival_s``, ``input_tokens``, ``output_tokens``, ``class``,
        ``prefix_blocks``) to the file's; ``class`` may be several columns, joined by a slash. Nested
        members are paths with dots. In ``FORMATS``, "a|b" is the first of both that the file has, and
        a "|" at the end means that the file may have none.
    unit : that numeric arrivals are documented to be in; None where the format does not say.
    zone : whether dates of arrival must (True) or must not (False) carry a zone; None: as the first one.
    container : the one that a generic format is for, None for a known layout.
    marks : columns that tell the format from others and are not read.
    """

    name: str
    about: str
    columns: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    unit: str | None = None
    zone: bool | None = None
    container: str | None = None
    marks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in (None, *UNITS) or self.container not in (None, *_CONTAINERS):
            raise ValueError(f"format {self.name!r}: container {self.container!r}, unit {self.unit!r}")

    @property
    def generic(self) -> bool:
        """Whether it stands for any file of its container."""
        return self.container is not None

    def sources(self) -> list[str]:
        """The file's columns that are read, each once, in tidy order."""
        several = ((source,) if isinstance(source, str) else source for source in self.columns.values())
        return list(dict.fromkeys(chain.from_iterable(several)))

    def fitted(self, columns: Iterable[str], given: Iterable[str] = ()) -> Format | None:
        """This format for a file of these columns, None if it lacks some.

        The tidy names in ``given`` are mapped by the caller; theirs are left as they are.
        """
        there, found = set(columns), {}
        if not set(self.marks) <= there:
            return None
        for tidy, source in self.columns.items():
            names = source.split("|") if isinstance(source, str) else [source]
            match = next((n for n in names if n and ({n} if isinstance(n, str) else set(n)) <= there), None)
            if match is not None:
                found[tidy] = match
            elif names[-1] and tidy not in given:
                return None
        return replace(self, columns=found)

    def first(self) -> Format:
        """This format with the first choice of each column that a file must have, for what it lacks."""
        must = {t: s for t, s in self.columns.items() if not isinstance(s, str) or not s.endswith("|")}
        chosen = {t: s.split("|")[0] if isinstance(s, str) else s for t, s in must.items()}
        return replace(self, columns=chosen)

    def mapped(self, mapping: Mapping[str, Any]) -> Format:
        """This format with single columns replaced; a column mapped to None is not read."""
        merged = {tidy: source for tidy, source in {**self.columns, **mapping}.items() if source is not None}
        return replace(self, columns=merged)


_TIDY = {
    "arrival_s": "arrival_s|arrival_ms|arrival_us|arrival_ns",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "class": "class|",
    "prefix_blocks": "prefix_blocks|",
}
_AZURE = {"arrival_s": "TIMESTAMP", "input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}
_MOONCAKE = {
    "arrival_s": "timestamp",
    "input_tokens": "input_length",
    "output_tokens": "output_length",
    "prefix_blocks": "hash_ids|",
}

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(
            "burstgpt",
            "BurstGPT 1-3, with or without Session ID and Elapsed time",
            {
                "arrival_s": "Timestamp",
                "input_tokens": "Request tokens",
                "output_tokens": "Response tokens",
                "class": ("Model", "Log Type"),
            },
            "s",
        ),
        Format("azure-2023", "Azure LLM inference trace 2023, dates without a zone", _AZURE, zone=False),
        Format("azure-2024", "Azure LLM inference trace 2024, dates with a zone", _AZURE, zone=True),
        Format(
            "vidur",
            "Vidur request trace",
            {
                "arrival_s": "arrived_at",
                "input_tokens": "num_prefill_tokens",
                "output_tokens": "num_decode_tokens",
            },
            "s",
        ),
        Format(
            "bailian",
            "Alibaba Bailian (Qwen) usage traces, with hash ids of blocks of 16 tokens",
            {**_MOONCAKE, "class": "type"},
            "s",
            marks=("chat_id",),
        ),
        Format("mooncake", "Mooncake, with or without hash ids; sessions with delays", _MOONCAKE, "ms"),
        Format(
            "aibrix",
            "AIBrix workload, lists of requests per instant",
            {
                "arrival_s": "timestamp",
                "input_tokens": "requests.Prompt Length|requests.prompt_length|requests.input_length",
                "output_tokens": "requests.Output Length|requests.output_length",
            },
            "ms",
        ),
        Format(
            "weka",
            "Weka agent sessions, lists of requests per session",
            {
                "arrival_s": "requests.t",
                "input_tokens": "requests.in",
                "output_tokens": "requests.out",
                "prefix_blocks": "requests.hash_ids|",
            },
            "s",
        ),
        Format(
            "aiperf",
            "AIPerf records of single requests",
            {
                "arrival_s": "metadata.request_start_ns",
                "input_tokens": "metrics.input_sequence_length.value",
                "output_tokens": "metrics.output_sequence_length.value",
            },
        ),
        Format(
            "bench",
            "results of vLLM's and SGLang's serving benchmarks with details",
            {"arrival_s": "start_times|", "input_tokens": "input_lens", "output_tokens": "output_lens"},
            "s",
        ),
        Format(
            "openai",
            "logs with the usage of OpenAI's API",
            {
                **_TIDY,
                "arrival_s": "arrival_s|arrival_ms|created|created_at|timestamp|startTime",
                "input_tokens": "usage.prompt_tokens|usage.input_tokens|prompt_tokens",
                "output_tokens": "usage.completion_tokens|usage.output_tokens|completion_tokens",
            },
        ),
        Format(
            "sharegpt",
            "conversations as ShareGPT's, tokenised; a row is a response",
            {"turns": "conversations|messages|conversation"},
        ),
        Format(
            "headerless",
            "a CSV of three columns without a header: arrival, input and output tokens",
            {"arrival_s": "1", "input_tokens": "2", "output_tokens": "3"},
        ),
        *(
            Format(container, f"any {what} with a column mapping", _TIDY, container=container)
            for container, what in (
                ("csv", "CSV"),
                ("jsonl", "JSON lines"),
                ("json", "JSON array"),
                ("parquet", "Parquet file"),
            )
        ),
    )
}


@dataclass(frozen=True)
class Dialect:
    """How a CSV is written: separator, names of its columns (numbers from 1 where it has no header),
    and the bytes before its first row."""

    separator: str
    names: tuple[str, ...]
    preamble: int
    headed: bool


@dataclass(frozen=True)
class Head:
    """The beginning of a file: its compression and its first text (None for Parquet), mark aside."""

    path: Path
    compression: str | None
    text: str | None
    mark: int = 0

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
        return cls(path, compression, *_first_text(path, compression))

    @cached_property
    def container(self) -> str:
        """Which of csv, jsonl, json and parquet it is."""
        if self.text is None:
            return "parquet"
        start = self.text.lstrip()
        if start[0] not in "[{":
            return "csv"
        if start[0] == "[":
            return "json"
        end = _first_record(start)[1]
        return "json" if end and "\n" in start[:end].strip() else "jsonl"

    @cached_property
    def dialect(self) -> Dialect:
        """How a CSV is written."""
        assert self.text is not None
        try:
            return _dialect(self.text, self.mark)
        except csv.Error as error:
            raise TraceError(f"{self.path.name}: header: {error}") from error

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of a Parquet file."""
        try:
            return pq.read_schema(self.path)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{self.path.name}: {plain_reason(error)}") from error

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The first records of a JSON or CSV file (none of a damaged one), a CSV's with text."""
        if self.container == "csv":
            return [dict(zip(self.dialect.names, row, strict=False)) for row in self._rows()]
        if self.container == "parquet":
            try:
                with pq.ParquetFile(self.path) as file:
                    batch = next(file.iter_batches(batch_size=_SAMPLE_RECORDS), None)
            except (pa.ArrowException, OSError, UnicodeDecodeError):
                return []
            return [] if batch is None else batch.to_pylist()
        return list(islice(_records(self.text or ""), _SAMPLE_RECORDS))

    def columns(self) -> list[str]:
        """Columns by the header, the schema or the first records; those with members come before them."""
        if self.container == "csv":
            return list(self.dialect.names)
        if self.container == "parquet":
            return list(chain.from_iterable(_fields(f, "") for f in self.schema))
        return list(dict.fromkeys(chain.from_iterable(_paths(record, "") for record in self.records)))

    def recognise(self, mapping: Mapping[str, Any]) -> Format:
        """The format of the file, its columns fitted; ``mapping`` are the columns that the user has named."""
        columns = self.columns()
        generic = FORMATS[self.container]
        for known in FORMATS.values():
            if known.generic or (known.name == "headerless" and not self._three_columns()):
                continue
            fitted = known.fitted(columns)
            if fitted is not None:
                zone = known.name == "azure-2023" and self._first_date_has_zone()
                return replace(FORMATS["azure-2024"], columns=fitted.columns) if zone else fitted
        if set(columns) - {""} <= set(_TIDY) and "arrival_s" not in columns and columns:
            mapping = {"arrival_s": None, **mapping}  # nothing in it could be a time
        fitted = generic.fitted(columns, mapping)
        if fitted is None and columns and not mapping:
            raise TraceError(f"{self.path.name}: {self._unknown(columns)}")
        return fitted or generic.first()

    def check(self, layout: Format) -> None:
        """Refuse a file that is not of a generic layout's container or lacks its columns (TraceError)."""
        name = self.path.name
        if layout.generic and self.container != layout.container:
            raise TraceError(
                f"{name}: {_CONTAINERS[self.container]}; format {layout.name!r} expects "
                f"{_CONTAINERS[layout.container or '']}"
            )
        columns = self.columns()
        if layout.name == "sharegpt" and self.container == "csv":
            raise TraceError(f"{name}: a CSV; format 'sharegpt' expects a JSON array, JSON lines or Parquet")
        if self.container in ("json", "jsonl") and not columns:
            return  # a damaged first object is named, with its row, by the reader
        for column in layout.sources():
            if column not in columns:
                raise TraceError(
                    f"{name}: no column {column!r}; found {_listed(_leaves(columns))}"
                    + ("; arrival_s=None reads a file without times" if column == "arrival_s" else "")
                )
            if columns.count(column) > 1:
                raise TraceError(
                    f"{name}: column {column!r} occurs {columns.count(column)} times; expected once"
                )

    def call(self, **options: Any) -> str:
        """The call of `read_trace` for this file with some options, as text."""
        arguments = [repr(os.fspath(self.path)), *(f"{name}={value!r}" for name, value in options.items())]
        return f"read_trace({', '.join(arguments)})"

    # ---- guesses, for messages only

    def _unknown(self, columns: list[str]) -> str:
        if self.container == "csv" and len(columns) == 6 and columns[3] == "4" and self._servegen_rates():
            return (
                "a chunk of ServeGen's arrival rates (start, rate, CV, distribution), not of requests; "
                "expected requests, such as those that ServeGen generates from it"
            )
        leaves = _leaves(columns)
        known = ", ".join(name for name, form in FORMATS.items() if not form.generic)
        what = (
            f"columns {_listed(leaves)}"
            if self.container != "csv" or self.dialect.headed
            else (
                f"no header, and {len(columns)} columns (numbered from 1), the first row "
                f"{', '.join(map(repr, islice(self.records[0].values(), 12)))}"
            )
        )
        guess = _guess(self.records, leaves)
        return f"{what} fit none of {known}; name them: {self.call(**guess)}"

    def _servegen_rates(self) -> bool:
        return any(record.get("4") in _SERVEGEN_RATES for record in self.records)

    def _three_columns(self) -> bool:
        """Whether a CSV without header is of arrivals that never fall and two whole numbers."""
        if self.container != "csv" or self.dialect.headed or len(self.dialect.names) != 3:
            return False
        rows = [list(record.values()) for record in self.records]
        if not rows or not all(
            len(row) == 3 and row[1].strip().isdigit() and row[2].strip().isdigit() for row in rows
        ):
            return False
        first = [row[0] for row in rows]
        return not all(map(is_number, first)) or bool((np.diff([float(x) for x in first]) >= 0).all())

    def _rows(self) -> Iterator[list[str]]:
        assert self.text is not None
        data = self.text.encode("utf-8", "surrogateescape")[self.dialect.preamble - self.mark :]
        text = io.StringIO(data.decode("utf-8", "replace"), newline="")
        try:
            rows = (row for row in csv.reader(text, delimiter=self.dialect.separator) if row)
            yield from islice(rows, _SAMPLE_RECORDS)
        except csv.Error:
            return

    def _first_date_has_zone(self) -> bool:
        first = next((record.get(_AZURE["arrival_s"]) for record in self.records), "")
        return has_zone(first) if isinstance(first, str) else getattr(first, "tzinfo", None) is not None


def open_text(path: Path, compression: str | None) -> pa.NativeFile:
    """The unpacked bytes of a file; a truncated gzip or zstd file raises OSError where it ends."""
    return pa.input_stream(os.fspath(path), compression=compression)


def plain_reason(error: BaseException) -> str:
    """A short one-line reason from a library's error."""
    message = " ".join(str(error).split())[:200]
    if "Truncated compressed stream" in message:
        return "the compressed file ends too early; copy or download it again"
    return message or type(error).__name__


# ---- the first text -------------------------------------------------------------------------------


def _first_text(path: Path, compression: str | None) -> tuple[str, int]:
    """The first text, and the bytes of the mark before it; what is no UTF-8 is kept as surrogates."""
    name = path.name
    try:
        with open_text(path, compression) as stream:
            head = stream.read(_SNIFF_BYTES)
            # The first JSON record must be whole to be recognised, however long it is.
            while len(head) < _LONGEST_FIRST_RECORD and head.lstrip(codecs.BOM_UTF8).lstrip()[:1] in (
                b"[",
                b"{",
            ):
                if _first_record(_text_of(head))[1] or not (more := stream.read(len(head))):
                    break
                head += more
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{name}: {plain_reason(error)}") from error
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TraceError(f"{name}: UTF-16 text; expected UTF-8 (save or convert it so)")
    if b"\0" in head:
        raise TraceError(f"{name}: binary data; expected CSV, JSON lines, JSON or Parquet")
    text = _text_of(head)
    if not text.strip():
        raise TraceError(f"{name}: {'only blank lines' if text else 'empty file'}; expected requests")
    # Further on, it is the reader that names the row.
    if re.search("[\udc80-\udcff]", text.lstrip().split("\n", 1)[0]):
        raise TraceError(f"{name}: its first line is no UTF-8; expected UTF-8 text")
    return text, len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


def _text_of(head: bytes) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    return decoder.decode(head.removeprefix(codecs.BOM_UTF8))


def _first_record(text: str) -> tuple[Any, int]:
    """The first record of a JSON text or array, and where it ends; 0 if it is damaged or not whole."""
    start = len(text) - len(text.lstrip(" \t\r\n["))
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


def _records(text: str) -> Iterator[dict[str, Any]]:
    while True:
        record, end = _first_record(text)
        if not end or not isinstance(record, dict):
            return
        yield record
        text = text[end:].lstrip(" \t\r\n,")
        if not text:
            return


def _dialect(text: str, mark: int) -> Dialect:
    separator, comment, at = "", "", 0
    lines = io.StringIO(text, newline="")
    line = ""
    for line in lines:
        if given := re.fullmatch(r'"?sep=(.)"?\s*', line):
            separator = given[1]
        elif line.lstrip().startswith("#"):
            comment = line.lstrip().lstrip("#")
        elif line.strip():
            break
        at += len(line)
    if not separator:
        separator = max(_SEPARATORS, key=lambda mark: len(next(csv.reader([line], delimiter=mark), [])))
    used = 0

    def counted() -> Iterator[str]:
        nonlocal used
        for line in io.StringIO(text[at:], newline=""):
            used += len(line)
            yield line

    first = next(csv.reader(counted(), delimiter=separator), [])
    names = [name.strip() for name in first]
    # A table without names is written with 0, 1, 2 ... for them.
    headed = not any(map(is_time, names)) or names == [str(i) for i in range(len(names))]
    if not headed:
        used = 0
        said = [name.strip() for name in next(csv.reader([comment], delimiter=separator), [])]
        headed = len(said) == len(names)
        names = said if headed else [str(i) for i in range(1, len(names) + 1)]
    preamble = len(text[: at + used].encode("utf-8", "surrogateescape"))
    return Dialect(separator, tuple(names), mark + preamble, headed)


# ---- columns --------------------------------------------------------------------------------------


def _paths(value: Any, path: str) -> Iterator[str]:
    """The paths of all members of a record; a list stands for its first element."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):
        for key, member in value.items():
            yield f"{path}{key}"
            yield from _paths(member, f"{path}{key}.")


def _fields(column: pa.Field, path: str) -> Iterator[str]:
    yield f"{path}{column.name}"
    kind = column.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        for member in kind:
            yield from _fields(member, f"{path}{column.name}.")


def _leaves(columns: list[str]) -> list[str]:
    """Columns without members of their own."""
    parents = {column.rpartition(".")[0] for column in columns}
    return [column for column in columns if column not in parents]


def _listed(columns: list[str]) -> str:
    shown = ", ".join(repr(column[:80]) for column in columns[:12])
    return shown + (f" and {len(columns) - 12} more" if len(columns) > 12 else "")


_LIKELY = {
    "arrival_s": r"^(ts?|when|at|sent)(_?(s|ms|us|ns))?$|time|date|stamp|start|arriv|created",
    "input_tokens": r"^(in|isl|p)$|input|prompt|prefill|context|request",
    "output_tokens": r"^(out|osl|g)$|output|generat|gen\b|completion|decode|response|answer",
}


def _guess(records: list[dict[str, Any]], columns: list[str]) -> dict[str, str | None]:
    """Which columns may be the arrival and the tokens, to be confirmed by the user.

    "..." where several may or none can; None for the arrival where nothing is left that could be a time.
    """
    samples = {column: [_sample(record, column.split(".")) for record in records] for column in columns}
    whole = [
        c
        for c, found in samples.items()
        if found and all(re.fullmatch(r"\s*\d+(\.0*)?\s*", x) for x in found)
    ]
    times = [c for c, found in samples.items() if found and all(map(is_time, found))]
    guess: dict[str, str | None] = {}
    for tidy, pattern in _LIKELY.items():
        among = [c for c in (times if tidy == "arrival_s" else whole) if c not in guess.values()]
        likely = [c for c in among if re.search(pattern, c.rpartition(".")[2], re.IGNORECASE)]
        guess[tidy] = likely[0] if likely else None
    rest = [c for c in whole if c not in guess.values()]
    if guess["arrival_s"] is None:
        dates = [c for c in times if c not in whole and c not in guess.values()]
        guess["arrival_s"] = dates[0] if len(dates) == 1 else rest.pop(0) if len(rest) == 3 else None
    missing = [tidy for tidy, column in guess.items() if column is None]
    if len(rest) == len(missing):  # in the order that all formats have
        guess |= dict(zip(missing, rest, strict=True))
    timeless = guess["arrival_s"] is None and not set(times) - set(guess.values())
    return {tidy: None if timeless and tidy == "arrival_s" else c or "..." for tidy, c in guess.items()}


def _sample(record: Any, keys: list[str]) -> str:
    if isinstance(record, dict) and ".".join(keys) in record:
        record, keys = record[".".join(keys)], []
    for key in keys:
        while isinstance(record, list):
            record = record[0] if record else None
        record = record.get(key) if isinstance(record, dict) else None
    return str(record)
