"""Readers of request traces: any supported file becomes the same tidy table and a report.

A file is recognised by its content, never by its name: compression by the first bytes, the format by
the header or the first JSON value. Rows are read in chunks, checked, and either kept, dropped for a
counted reason, or refused with the row that is wrong.

Row numbers, in errors and in this module, count records from 1: a CSV's header and blank lines are
not counted, nor are blank lines in JSON lines. In a ShareGPT file the conversations are counted.
"""

from __future__ import annotations

import codecs
import csv
import html
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from kvcache.lengths import LengthDistribution

__all__ = [
    "FORMATS",
    "ReadReport",
    "Trace",
    "TraceError",
    "TraceScan",
    "mistral_token_counter",
    "read_trace",
    "reduce_trace",
    "scan_trace",
]

MAX_TOKENS = 2**31 - 1
ZERO_OUTPUT = "0 output tokens"
ASSISTANTS = ("gpt", "chatgpt", "bing", "bard")

_SNIFF_BYTES = 1 << 16
_BLOCK_BYTES = 4 << 20
_JSON_ROWS = 20_000
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_REFUSED_MAGIC = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x7fELF": "a program",
    b"%PDF": "a PDF",
}
_DATE = re.compile(
    r"\s*\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:?(\d\d)?)?)?\s*", re.ASCII
)


class TraceError(ValueError):
    """A trace that cannot be read: says which file, which row, what was found and what was expected."""


@dataclass(frozen=True)
class Format:
    """How one kind of file maps to the tidy table.

    ``columns`` maps the tidy names (``arrival_s``, ``input_tokens``, ``output_tokens``, ``class``,
    ``prefix_blocks``) to the file's; ``class`` may be several columns, joined by a slash. ``unit`` is
    of a numeric arrival. ``zone`` says whether date arrivals must (True) or must not (False) carry one.
    """

    name: str
    container: str
    about: str
    columns: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    unit: str = "s"
    zone: bool | None = None

    def required(self) -> list[str]:
        """The file's columns that must be there, in tidy order."""
        names: list[str] = []
        for source in self.columns.values():
            names.extend([source] if isinstance(source, str) else source)
        return names


_TIDY = {"arrival_s": "arrival_s", "input_tokens": "input_tokens", "output_tokens": "output_tokens"}
_AZURE = {"arrival_s": "TIMESTAMP", "input_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "burstgpt",
            "csv",
            "BurstGPT releases 1-3, with or without Session ID and Elapsed time",
            {
                "arrival_s": "Timestamp",
                "input_tokens": "Request tokens",
                "output_tokens": "Response tokens",
                "class": ("Model", "Log Type"),
            },
        ),
        Format(
            "azure-2023", "csv", "Azure LLM inference trace 2023 (dates without a zone)", _AZURE, zone=False
        ),
        Format("azure-2024", "csv", "Azure LLM inference trace 2024 (dates with a zone)", _AZURE, zone=True),
        Format(
            "vidur",
            "csv",
            "Vidur request trace",
            {
                "arrival_s": "arrived_at",
                "input_tokens": "num_prefill_tokens",
                "output_tokens": "num_decode_tokens",
            },
        ),
        Format(
            "mooncake",
            "jsonl",
            "Mooncake JSON lines with the hash ids of prefix blocks",
            {
                "arrival_s": "timestamp",
                "input_tokens": "input_length",
                "output_tokens": "output_length",
                "prefix_blocks": "hash_ids",
            },
            unit="ms",
        ),
        Format("sharegpt", "json", "ShareGPT: one JSON array of conversations, streamed and tokenised"),
        Format("csv", "csv", "any CSV, with a column mapping", _TIDY),
        Format("jsonl", "jsonl", "any JSON lines, with a column mapping", _TIDY),
        Format("parquet", "parquet", "any Parquet file, with a column mapping", _TIDY),
    )
}
_GENERIC = ("csv", "jsonl", "parquet")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_COLUMN_KEYWORDS = {
    "arrival_s": "arrival_s",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "class_": "class",
    "prefix_blocks": "prefix_blocks",
}


# ---- results --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadReport:
    """What became of the rows of a file.

    ``rows_read = rows_kept + sum(dropped.values())``. ``out_of_order`` counts kept rows that arrive
    before an earlier row of the file; the table of ``read_trace`` is sorted, a scan is not.
    """

    path: str
    format: str
    rows_read: int
    rows_kept: int
    dropped: Mapping[str, int]
    out_of_order: int
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        dropped = (
            ", ".join(f"{n:,} dropped ({reason})" for reason, n in self.dropped.items()) or "none dropped"
        )
        order = f", {self.out_of_order:,} out of order" if self.out_of_order else ""
        return (
            f"{Path(self.path).name} [{self.format}]: {self.rows_read:,} rows read, {self.rows_kept:,} kept, "
            f"{dropped}{order}"
        )

    def _repr_html_(self) -> str:
        rows = {
            "file": Path(self.path).name,
            "format": self.format,
            "rows read": f"{self.rows_read:,}",
            "rows kept": f"{self.rows_kept:,}",
            **{f"dropped: {reason}": f"{n:,}" for reason, n in self.dropped.items()},
            "out of order": f"{self.out_of_order:,}",
            "classes": ", ".join(self.classes),
        }
        body = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items()
        )
        return f"<table><caption>read report</caption>{body}</table>"


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace in memory.

    Attributes
    ----------
    requests : DataFrame, one row per request in order of arrival (ties in the order of the file):
        ``arrival_s`` float64, seconds from the first request (NaN where the file has no times);
        ``input_tokens``, ``output_tokens`` int32; ``class`` categorical; ``prefix_blocks``, where
        the file has them, an int64 array of block ids per request.
    report : ReadReport
    """

    requests: pd.DataFrame
    report: ReadReport

    def distribution(
        self, field: str = "output", *, class_: str | None = None, upper: int | None = None
    ) -> LengthDistribution:
        """The empirical distribution of output (or ``"input"``) lengths, of all requests or of one class.

        ``upper`` is the support bound L_max in tokens; by default the longest length of the whole trace.
        """
        if field not in ("output", "input"):
            raise ValueError(f"field: {field!r}; expected 'output' or 'input'")
        lengths = self.requests[f"{field}_tokens"]
        bound = (int(lengths.max()) if len(lengths) else None) if upper is None else upper
        name = Path(self.report.path).name
        if class_ is not None:
            if class_ not in self.report.classes:
                raise ValueError(
                    f"class_: {class_!r}; {name} has {', '.join(map(repr, self.report.classes))}"
                )
            lengths, name = lengths[self.requests["class"] == class_], f"{name}, {class_}"
        return LengthDistribution.from_samples(lengths.to_numpy(), bound, name=name)

    def __repr__(self) -> str:
        return f"Trace({self.report!r})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_() + self.requests.head().to_html(max_cols=8)


# ---- public functions -----------------------------------------------------------------------------


def read_trace(
    path: str | Path,
    format: str = "auto",
    *,
    unit: str | None = None,
    invalid: str = "raise",
    token_counter: Callable[[str], int] | None = None,
    **columns: str | tuple[str, ...] | None,
) -> Trace:
    """Read a trace into a tidy table; the report tells what was kept and what was dropped, and why.

    Parameters
    ----------
    path : a CSV, JSON lines, JSON or Parquet file; text may be compressed with gzip or zstd.
    format : ``"auto"`` recognises the file by its content; else a key of ``FORMATS``.
    unit : of numeric arrivals, ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``; by default the format's own.
    invalid : ``"raise"`` refuses a file with a bad value, naming its row; ``"drop"`` drops and counts
        such rows. Requests with 0 output tokens (failures) are dropped and counted in both.
    token_counter : text -> tokens, for ShareGPT; by default `mistral_token_counter()`.
    **columns : which column of the file holds ``arrival_s``, ``input_tokens``, ``output_tokens``,
        ``class_`` (a name or several), ``prefix_blocks``. For files of a known format they replace
        single columns of its mapping. ``arrival_s=None`` reads a file without times.

    Returns
    -------
    Trace. 17 bytes per request are held, so a file of 44 million rows fits in 1 GB; where counts are
    enough, `reduce_trace` needs some 200 MB for any number of rows.

    Raises
    ------
    TraceError
        Wrong, empty or damaged file; missing column; a count that is negative, fractional or no
        number; dates with and without a zone in one file.

    Examples
    --------
    >>> trace = read_trace("log.csv", arrival_s="ts", input_tokens="prompt",
    ...                    output_tokens="gen", class_="app")  # doctest: +SKIP
    """
    scan = scan_trace(path, format, unit=unit, invalid=invalid, token_counter=token_counter, **columns)
    table = _Table()
    for chunk in scan._chunks():
        table.append(chunk)
    requests = table.frame(scan.report.classes)
    return Trace(requests, scan.report)


def scan_trace(
    path: str | Path,
    format: str = "auto",
    *,
    unit: str | None = None,
    invalid: str = "raise",
    token_counter: Callable[[str], int] | None = None,
    **columns: str | tuple[str, ...] | None,
) -> TraceScan:
    """Iterate over a trace of any size in Arrow record batches; parameters and errors as `read_trace`.

    The batches have the columns of ``Trace.requests`` in the order of the file, with ``arrival_s``
    in seconds from the file's first kept row (so negative where a later row arrives before it).
    """
    path = Path(path)
    if unit is not None and unit not in _UNITS:
        raise ValueError(f"unit: {unit!r}; expected one of {', '.join(map(repr, _UNITS))}")
    if invalid not in ("raise", "drop"):
        raise ValueError(f"invalid: {invalid!r}; expected 'raise' or 'drop'")
    unknown = sorted(set(columns) - set(_COLUMN_KEYWORDS))
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}; columns are {', '.join(_COLUMN_KEYWORDS)}")
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format: {format!r}; expected 'auto' or one of {', '.join(map(repr, FORMATS))}")
    head = _Head.of(path)
    mapping = {_COLUMN_KEYWORDS[keyword]: source for keyword, source in columns.items()}
    recognised = head.recognise(mapping) if format == "auto" else FORMATS[format]
    merged = {**recognised.columns, **mapping}
    if recognised.name in _GENERIC and "class" not in merged and "class" in head.columns():
        merged["class"] = "class"
    layout = replace(
        recognised,
        columns={tidy: source for tidy, source in merged.items() if source is not None},
        unit=unit or recognised.unit,
    )
    for tidy in ("input_tokens", "output_tokens"):
        if layout.name != "sharegpt" and tidy not in layout.columns:
            raise TypeError(f"{tidy}: None; a column is needed (only arrival_s and class_ may be left out)")
    head.check(layout)
    return TraceScan(path, layout, head.compression, invalid, token_counter)


def reduce_trace(
    path: str | Path,
    format: str = "auto",
    *,
    window_s: float | None = None,
    align_s: float | None = None,
    until_s: float | None = None,
    **options: Any,
) -> tuple[pd.DataFrame, ReadReport]:
    """Reduce a trace of any size to counts of requests per length, in one pass and constant memory.

    Parameters
    ----------
    path, format, **options : as in `read_trace`.
    window_s : width of a time window in seconds; without it there is one window, 0.
    align_s : the first window starts at the last multiple of ``align_s`` seconds on the file's clock
        that is not after its first row (86,400 aligns windows of dates to midnight); by default at the first row.
    until_s : rows that arrive later than this many seconds after the start of the first window are left out
        of the counts and counted in the report as ``"after the period"``.

    Returns
    -------
    counts : DataFrame sorted by ``class``, ``window``, ``field`` (``"input"``, ``"output"``) and
        ``tokens``, with the number of ``requests``. Windows count from 0, the earliest one.
    report : ReadReport
    """
    scan = scan_trace(path, format, **options)
    counts: dict[tuple[int, int, str], dict[int, int]] = {}
    late = 0
    for chunk in scan._chunks():
        arrival = chunk.arrival + (scan.origin_s % align_s if align_s else 0.0)
        codes, inputs, outputs = chunk.codes, chunk.inputs, chunk.outputs
        if until_s is not None:
            keep = ~(arrival >= until_s)
            late += int(keep.size - keep.sum())
            arrival, codes, inputs, outputs = arrival[keep], codes[keep], inputs[keep], outputs[keep]
        window = np.zeros(codes.size, np.int64)
        if window_s is not None:
            if np.isnan(arrival).any():
                raise TraceError(f"{scan.name}: no arrival times; windows need them")
            window = np.floor(arrival / window_s).astype(np.int64)
        cell = window * (int(codes.max(initial=0)) + 1) + codes
        for key in np.unique(cell):
            at = slice(None) if key == cell[0] and (cell == key).all() else cell == key
            code, slot = int(codes[at][0]), int(window[at][0])
            for name, lengths in (("input", inputs), ("output", outputs)):
                into = counts.setdefault((code, slot, name), {})
                for token, n in zip(*(a.tolist() for a in np.unique(lengths[at], return_counts=True))):
                    into[token] = into.get(token, 0) + n
    report = scan.report
    if late:
        dropped = {**report.dropped, "after the period": late}
        report = replace(report, rows_kept=report.rows_kept - late, dropped=dropped)
    earliest = min((slot for _, slot, _ in counts), default=0)
    parts = [
        pd.DataFrame(
            {
                "class": report.classes[code],
                "window": np.int32(slot - earliest),
                "field": name,
                "tokens": np.fromiter(found.keys(), np.int32, len(found)),
                "requests": np.fromiter(found.values(), np.int64, len(found)),
            }
        )
        for (code, slot, name), found in counts.items()
    ]
    keys = ["class", "window", "field", "tokens"]
    if not parts:
        raise TraceError(f"{scan.name}: no request left; {report!r}")
    return pd.concat(parts).sort_values(keys, ignore_index=True), report


def mistral_token_counter() -> Callable[[str], int]:
    """The tokenizer of Mistral v1 (sentencepiece, 32,000 pieces), whose model comes inside a package.

    It is the optional extra ``tokenizer`` and needs no network once installed.

    Raises
    ------
    ImportError
        If the extra is not installed; the message says how to.
    """
    try:
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
    except ImportError as error:
        raise ImportError(
            "counting tokens needs a tokenizer: install the extra with  pip install 'kvcache[tokenizer]'  "
            "or pass token_counter=, any function from text to a number of tokens"
        ) from error
    tokenizer = MistralTokenizer.v1().instruct_tokenizer.tokenizer
    return lambda text: len(tokenizer.encode(text, bos=False, eos=False))


# ---- scanning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chunk:
    """Checked rows: arrival (float64 s from the first kept row), counts (int32), class codes (int8 up)."""

    arrival: NDArray[np.float64]
    inputs: NDArray[np.int32]
    outputs: NDArray[np.int32]
    codes: NDArray[np.int32]
    blocks: list[NDArray[np.int64]] | None


class TraceScan:
    """One pass over a trace; see `scan_trace`. The report is complete once the scan is exhausted."""

    def __init__(
        self,
        path: Path,
        layout: Format,
        compression: str | None,
        invalid: str,
        token_counter: Callable[[str], int] | None,
    ) -> None:
        self.path = path
        self.name = path.name
        self.layout = layout
        self.origin_s = 0.0
        self._compression = compression
        self._invalid = invalid
        self._token_counter = token_counter
        self._report: ReadReport | None = None

    @property
    def report(self) -> ReadReport:
        """The ReadReport; RuntimeError until the scan has come to its end."""
        if self._report is None:
            raise RuntimeError(
                f"{self.name}: the report is complete only after the scan; iterate to its end first"
            )
        return self._report

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        classes: list[str] = []
        for chunk in self._chunks(classes):
            arrays = {
                "arrival_s": pa.array(chunk.arrival),
                "input_tokens": pa.array(chunk.inputs),
                "output_tokens": pa.array(chunk.outputs),
                "class": pa.DictionaryArray.from_arrays(
                    pa.array(chunk.codes), pa.array(classes, pa.string())
                ),
            }
            if chunk.blocks is not None:
                arrays["prefix_blocks"] = pa.array(chunk.blocks, pa.list_(pa.int64()))
            yield pa.RecordBatch.from_pydict(arrays)

    def _chunks(self, classes: list[str] | None = None) -> Iterator[_Chunk]:
        classes = [] if classes is None else classes
        cleaner = _Cleaner(self.name, self.layout, self._invalid, classes)
        try:
            for raw in self._raw():
                chunk = cleaner.clean(raw)
                self.origin_s = cleaner.origin_s
                if chunk.arrival.size:
                    yield chunk
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{self.name} after row {cleaner.rows_read}: {_plain(error)}") from error
        if cleaner.rows_read == 0:
            raise TraceError(f"{self.name}: no rows; expected at least one request after the header")
        self._report = ReadReport(
            str(self.path),
            self.layout.name,
            cleaner.rows_read,
            cleaner.rows_kept,
            dict(sorted(cleaner.dropped.items())),
            cleaner.out_of_order,
            tuple(classes),
        )

    def _raw(self) -> Iterator[_Raw]:
        reader = {"csv": _csv_rows, "jsonl": _jsonl_rows, "parquet": _parquet_rows}.get(self.layout.container)
        if reader is not None:
            return reader(self.path, self.layout, self._compression, self._invalid)
        return _sharegpt_rows(self.path, self._compression, self._token_counter or mistral_token_counter())


# ---- recognition ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """The beginning of a file: its compression and its first bytes as text, None for Parquet."""

    path: Path
    compression: str | None
    text: str | None

    @classmethod
    def of(cls, path: Path) -> _Head:
        name = path.name
        if path.is_dir():
            raise TraceError(f"{name}: a folder; expected a file")
        try:
            with open(path, "rb") as file:
                start = file.read(8)
        except FileNotFoundError:
            raise TraceError(f"{path}: no such file") from None
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from error
        if not start:
            raise TraceError(f"{name}: empty file")
        if start[:4] == b"PAR1":
            return cls(path, None, None)
        for magic, what in _REFUSED_MAGIC.items():
            if start.startswith(magic):
                raise TraceError(
                    f"{name}: {what}; expected CSV, JSON lines, JSON or Parquet, plain, gzip or zstd"
                )
        compression = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
        try:
            with _open(path, compression) as stream:
                head = stream.read(_SNIFF_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{name}: {_plain(error)}") from error
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise TraceError(f"{name}: UTF-16 text; expected UTF-8 (save or convert it as UTF-8)")
        head = head.removeprefix(codecs.BOM_UTF8)
        if b"\0" in head:
            raise TraceError(f"{name}: binary data; expected CSV, JSON lines, JSON or Parquet")
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(head)
        except UnicodeDecodeError as error:
            raise TraceError(f"{name}: not UTF-8 text (byte {error.start})") from error
        if not text.strip():
            raise TraceError(f"{name}: empty file" if not text else f"{name}: only blank lines")
        return cls(path, compression, text)

    def container(self) -> str:
        if self.text is None:
            return "parquet"
        return {"[": "json", "{": "jsonl"}.get(self.text.lstrip()[0], "csv")

    def columns(self) -> list[str]:
        """Column names of the header, the schema or the first JSON object (empty for a JSON array)."""
        container = self.container()
        if container == "parquet":
            try:
                return pa.parquet.read_schema(self.path).names
            except (pa.ArrowException, OSError) as error:
                raise TraceError(f"{self.path.name}: {_plain(error)}") from error
        assert self.text is not None
        if container == "csv":
            try:
                return next(csv.reader(io.StringIO(self.text.lstrip("\r\n"), newline="")), [])
            except csv.Error as error:
                raise TraceError(f"{self.path.name}: header: {error}") from error
        if container == "jsonl":
            try:
                first = json.loads(self.text.lstrip().split("\n", 1)[0])
            except (ValueError, RecursionError):
                return []
            return list(first) if isinstance(first, dict) else []
        return []

    def recognise(self, mapping: Mapping[str, Any]) -> Format:
        container, columns = self.container(), self.columns()
        if container == "json":
            return FORMATS["sharegpt"]
        for known in FORMATS.values():
            if known.name in _GENERIC or known.container != container:
                continue
            if not set(known.required()) <= set(columns):
                continue
            return (
                FORMATS["azure-2024"] if known.name == "azure-2023" and self._first_row_has_zone() else known
            )
        generic = FORMATS[container]
        needed = {**generic.columns, **mapping}.values()
        if columns and not mapping and not set(filter(None, needed)) <= set(columns):
            raise TraceError(
                f"{self.path.name}: columns {_listed(columns)} fit no known format "
                f"({', '.join(n for n in FORMATS if n not in _GENERIC)}); name them, e.g. "
                f'read_trace(path, arrival_s="...", input_tokens="...", output_tokens="...")'
            )
        return generic

    def _first_row_has_zone(self) -> bool:
        assert self.text is not None
        rows = csv.DictReader(io.StringIO(self.text.lstrip("\r\n"), newline=""))
        try:
            stamp = next(rows, {}).get("TIMESTAMP") or ""
        except csv.Error:
            return False
        return bool(re.search(r":\d\d(\.\d+)?(Z|[+-]\d\d)", stamp))

    def check(self, layout: Format) -> None:
        """Refuse a file that does not have the columns of the layout."""
        name, container = self.path.name, self.container()
        if container != layout.container:
            found = {"json": "a JSON array", "jsonl": "JSON objects", "csv": "text that is not JSON"}
            what = found.get(container, "a Parquet file")
            raise TraceError(f"{name}: {what}; format {layout.name!r} expects {_article(layout.container)}")
        if container == "json":
            return
        columns = self.columns()
        if container == "jsonl" and not columns:
            return  # the first line is damaged or longer than the head: the reader names the row
        missing = [column for column in layout.required() if column not in columns]
        if missing:
            raise TraceError(f"{name}: no column {missing[0]!r}; found {_listed(columns)}")
        for column in layout.required():
            if columns.count(column) > 1:
                raise TraceError(
                    f"{name}: column {column!r} occurs {columns.count(column)} times; expected once"
                )


def _article(container: str) -> str:
    return {
        "json": "a JSON array of conversations",
        "jsonl": "JSON objects, one a line",
        "csv": "CSV",
        "parquet": "Parquet",
    }[container]


def _listed(columns: list[str]) -> str:
    shown = ", ".join(repr(c[:40]) for c in columns[:12])
    return shown + (f" and {len(columns) - 12} more" if len(columns) > 12 else "") if columns else "none"


def _plain(error: BaseException) -> str:
    message = " ".join(str(error).split())[:200]
    if re.search("Truncated compressed stream", message):
        return "the compressed file ends too early (truncated); copy or download it again"
    return message or type(error).__name__


def _open(path: Path, compression: str | None) -> pa.NativeFile:
    return pa.input_stream(os.fspath(path), compression=compression)


# ---- containers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Raw:
    """Unchecked rows: one Arrow array per source column, in the order of the file."""

    columns: Mapping[str, pa.Array]
    rows: int
    label: str = "row"
    first_label: NDArray[np.int64] | None = None


def _csv_rows(path: Path, layout: Format, compression: str | None, invalid: str) -> Iterator[_Raw]:
    wanted = layout.required()
    ragged: list[tuple[int, int]] = []

    def on_ragged(row: Any) -> str:
        ragged.append((row.expected_columns, row.actual_columns))
        return "skip" if invalid == "drop" else "error"

    rows = 0
    with _open(path, compression) as stream:
        try:
            reader = pa.csv.open_csv(
                stream,
                read_options=pa.csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
                parse_options=pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=on_ragged),
                convert_options=pa.csv.ConvertOptions(
                    include_columns=list(dict.fromkeys(wanted)),
                    column_types={column: pa.string() for column in wanted},
                    strings_can_be_null=False,
                ),
            )
            for batch in reader:
                yield _Raw({c: batch.column(c) for c in batch.schema.names}, batch.num_rows)
                rows += batch.num_rows
                if ragged and invalid == "drop":
                    yield _Raw({_RAGGED: pa.nulls(len(ragged))}, len(ragged))
                    ragged.clear()
        except pa.ArrowInvalid as error:
            if ragged and invalid == "raise":
                raise TraceError(_first_ragged(path, compression, ragged[0])) from error
            raise
        if ragged:
            yield _Raw({_RAGGED: pa.nulls(len(ragged))}, len(ragged))


_RAGGED = "\0ragged"


def _first_ragged(path: Path, compression: str | None, shape: tuple[int, int]) -> str:
    """Name the first row whose number of columns is not the header's (a second pass, on failure only)."""
    expected, found = shape
    with _open(path, compression) as stream:
        text = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", errors="replace", newline="")
        row = 0
        try:
            records = (record for record in csv.reader(text) if record)
            expected = len(next(records, []))
            for row, record in enumerate(records, 1):
                if len(record) != expected:
                    return f"{path.name} row {row}: {len(record)} columns; expected {expected}"
        except (csv.Error, OSError):
            pass
    return f"{path.name} after row {row}: {found} columns; expected {expected}"


def _lines(path: Path, compression: str | None) -> Iterator[bytes]:
    with _open(path, compression) as stream:
        rest = b""
        while block := stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        yield rest


def _jsonl_rows(path: Path, layout: Format, compression: str | None, invalid: str) -> Iterator[_Raw]:
    wanted = layout.required()
    nested = {layout.columns.get("prefix_blocks")}
    values: dict[str, list[Any]] = {column: [] for column in wanted}

    def raw(bad: int) -> Iterator[_Raw]:
        count = len(values[wanted[0]])
        if count:
            yield _Raw(
                {
                    c: pa.array(v, pa.list_(pa.int64()) if c in nested else pa.string())
                    for c, v in values.items()
                },
                count,
            )
            for column in values.values():
                column.clear()
        if bad:
            yield _Raw({_RAGGED: pa.nulls(bad)}, bad)

    row = bad = 0
    for line in _lines(path, compression):
        line = line.removeprefix(codecs.BOM_UTF8) if row == 0 else line
        if not line.strip():
            continue
        row += 1
        problem, record = None, None
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({str(error)[:80]})"
        if problem is None and not isinstance(record, dict):
            problem = f"a JSON {type(record).__name__}; expected an object"
        if problem is None:
            missing = [column for column in wanted if column not in record]
            if missing:
                problem = f"no {missing[0]!r}; found {_listed(list(record))}"
            for column in nested & set(record):
                ids = record[column]
                good = isinstance(ids, list) and all(type(i) is int and abs(i) < 2**63 for i in ids)
                if not good and problem is None:
                    problem = f"{column} is {json.dumps(ids)[:40]}; expected a list of whole numbers"
        if problem is not None:
            if invalid == "raise":
                raise TraceError(f"{path.name} row {row}: {problem}")
            bad += 1
            continue
        for column in wanted:
            value = record[column]
            if column not in nested and value is not None and not isinstance(value, str):
                value = json.dumps(value)
            values[column].append(_encodable(value))
        if len(values[wanted[0]]) >= _JSON_ROWS:
            yield from raw(bad)
            bad = 0
    yield from raw(bad)


def _encodable(value: Any) -> Any:
    """JSON may hold lone surrogates, which are no text; they are replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _parquet_rows(path: Path, layout: Format, compression: str | None, invalid: str) -> Iterator[_Raw]:
    wanted = list(dict.fromkeys(layout.required()))
    with pa.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1 << 17, columns=wanted):
            yield _Raw({c: batch.column(c) for c in wanted}, batch.num_rows)


def _sharegpt_rows(path: Path, compression: str | None, count: Callable[[str], int]) -> Iterator[_Raw]:
    """One row per answer of an assistant; its input is all that the conversation holds before it."""
    labels: list[int] = []
    values: dict[str, list[Any]] = {"class": [], "input_tokens": [], "output_tokens": []}

    def raw() -> _Raw:
        columns = {
            "class": pa.array(values["class"], pa.string()),
            "input_tokens": pa.array(values["input_tokens"], pa.int64()),
            "output_tokens": pa.array(values["output_tokens"], pa.int64()),
        }
        chunk = _Raw(columns, len(labels), "conversation", np.array(labels, np.int64))
        labels.clear()
        for column in values.values():
            column.clear()
        return chunk

    number = 0
    with _open(path, compression) as stream:
        head = stream.peek(3) if hasattr(stream, "peek") else b""
        del head
        try:
            for number, conversation in enumerate(ijson.items(_WithoutBom(stream), "item"), 1):
                where = f"{path.name} conversation {number}"
                turns = conversation.get("conversations") if isinstance(conversation, dict) else None
                if not isinstance(turns, list):
                    raise TraceError(f"{where}: no list 'conversations'; expected ShareGPT's layout")
                context = 0
                for turn in turns:
                    speaker, text = (
                        (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
                    )
                    if not isinstance(speaker, str) or not isinstance(text, str):
                        raise TraceError(f"{where}: a turn without text in 'from' and 'value'")
                    tokens = int(count(text)) if text else 0
                    if speaker in ASSISTANTS:
                        values["class"].append(speaker)
                        values["input_tokens"].append(context)
                        values["output_tokens"].append(tokens)
                        labels.append(number)
                    context += tokens
                if len(labels) >= _JSON_ROWS:
                    yield raw()
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{path.name} conversation {number + 1}: damaged JSON ({_plain(error)})"
            ) from error
    yield raw()


class _WithoutBom:
    """A readable stream whose byte-order mark, if any, is left out."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._first = True

    def read(self, size: int = -1) -> bytes:
        block = self._stream.read(size)
        if self._first and size != 0:
            self._first = False
            while 0 < len(block) < 3 and (more := self._stream.read(3)):
                block += more
            block = block.removeprefix(codecs.BOM_UTF8) or self._stream.read(size)
        return block


# ---- cleaning -------------------------------------------------------------------------------------


class _Cleaner:
    """Turns unchecked rows into checked ones and keeps the tally."""

    def __init__(self, name: str, layout: Format, invalid: str, classes: list[str]) -> None:
        self.name, self.layout, self.invalid, self.classes = name, layout, invalid, classes
        self.rows_read = self.rows_kept = self.out_of_order = 0
        self.dropped: dict[str, int] = {}
        self.origin_s = 0.0
        self._origin: int | float | None = None
        self._latest = -math.inf
        self._codes: dict[str, int] = {}
        self._zone = layout.zone
        self._dates: bool | None = None

    def clean(self, raw: _Raw) -> _Chunk:
        first = self.rows_read + 1
        self.rows_read += raw.rows
        if _RAGGED in raw.columns:
            self._drop("wrong number of columns or no JSON", raw.rows)
            return _empty()
        columns = self.layout.columns or {tidy: tidy for tidy in raw.columns}
        good = np.ones(raw.rows, bool)
        problems: list[tuple[int, str]] = []
        counts = {}
        for tidy in ("input_tokens", "output_tokens"):
            values, bad = _whole(raw.columns[columns[tidy]])
            self._note(raw, columns[tidy], bad, good, problems, tidy)
            counts[tidy] = values
        if "arrival_s" in columns:
            arrival, bad = self._arrival(raw.columns[columns["arrival_s"]])
            self._note(raw, columns["arrival_s"], bad, good, problems, "arrival_s")
        else:
            arrival = np.full(raw.rows, np.nan)
        blocks = None
        if "prefix_blocks" in columns:
            blocks, bad = _block_lists(raw.columns[columns["prefix_blocks"]])
            self._note(raw, columns["prefix_blocks"], bad, good, problems, "prefix_blocks")
        if problems and self.invalid == "raise":
            at, problem = min(problems)
            number = first + at if raw.first_label is None else int(raw.first_label[at])
            raise TraceError(f"{self.name} {raw.label} {number}: {problem}")

        failed = good & (counts["output_tokens"] == 0)
        self._drop(ZERO_OUTPUT, int(failed.sum()))
        keep = good & ~failed
        codes = self._class_codes(raw, columns.get("class"), keep)
        everything = bool(keep.all())
        pick = (lambda a: a) if everything else (lambda a: a[keep])
        seconds = self._since_first(pick(arrival))
        if blocks is not None and not everything:
            blocks = [ids for ids, kept in zip(blocks, keep) if kept]
        self.rows_kept += seconds.size
        return _Chunk(
            seconds,
            pick(counts["input_tokens"]).astype(np.int32),
            pick(counts["output_tokens"]).astype(np.int32),
            codes,
            blocks,
        )

    def _drop(self, reason: str, rows: int) -> None:
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def _note(
        self,
        raw: _Raw,
        column: str,
        bad: Mapping[int, str],
        good: NDArray[np.bool_],
        problems: list[tuple[int, str]],
        tidy: str,
    ) -> None:
        if not bad:
            return
        at = min(bad)
        problems.append((at, f"{column} {bad[at]}"))
        rows = np.fromiter(bad, np.int64, len(bad))
        self._drop(f"bad {tidy}", int(good[rows].sum()))
        good[rows] = False

    def _class_codes(
        self, raw: _Raw, source: str | tuple[str, ...] | None, keep: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        if source is None:
            if not self.classes:
                self.classes.append("all")
            return np.zeros(int(keep.sum()), np.int32)
        parts = [_text(raw.columns[c]) for c in ([source] if isinstance(source, str) else source)]
        labels = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "/")
        if not keep.all():
            labels = labels.filter(pa.array(keep))
        encoded = labels.dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        lookup = np.zeros(max(len(encoded.dictionary), 1), np.int32)
        for i, label in enumerate(encoded.dictionary.to_pylist()):
            if label not in self._codes:
                self._codes[label] = len(self.classes)
                self.classes.append(label)
            lookup[i] = self._codes[label]
        return lookup[encoded.indices.to_numpy(zero_copy_only=False)]

    def _arrival(self, array: pa.Array) -> tuple[NDArray[Any], dict[int, str]]:
        """Times as int64 nanoseconds (dates) or float64 in the file's unit, and what is wrong by row."""
        if pa.types.is_timestamp(array.type):
            self._dates = True
            null = array.is_null().to_numpy(zero_copy_only=False)
            stamps = array.fill_null(0).cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64())
            return stamps.to_numpy(), {int(i): "is empty; expected a time" for i in np.flatnonzero(null)}
        if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
            values, bad = _numbers(array)
            return values, {i: f"{what}; expected a number ({self.layout.unit})" for i, what in bad.items()}
        if self._dates is None:
            first = next((t for t in array.to_pylist() if t and t.strip()), "")
            self._dates = self.layout.zone is not None or bool(_DATE.fullmatch(first))
            if self._dates and self._zone is None:
                self._zone = _has_zone(first)
        if not self._dates:
            values, bad = _numbers(array)
            return values, {i: f"{what}; expected a number ({self.layout.unit})" for i, what in bad.items()}
        kind = pa.timestamp("ns", "UTC" if self._zone else None)
        try:
            return pc.cast(array, kind).cast(pa.int64()).to_numpy(zero_copy_only=array.null_count == 0), {}
        except (pa.ArrowInvalid, ValueError):
            return self._dates_one_by_one(array, kind)

    def _dates_one_by_one(
        self, array: pa.Array, kind: pa.DataType
    ) -> tuple[NDArray[np.int64], dict[int, str]]:
        stamps, bad = np.zeros(len(array), np.int64), {}
        expected = "a date with a zone" if self._zone else "a date without a zone"
        for i, text in enumerate(array.to_pylist()):
            text = (text or "").strip()
            if not text:
                bad[i] = f"is empty; expected {expected}"
            elif _DATE.fullmatch(text) and _has_zone(text) != self._zone:
                have = "a zone" if _has_zone(text) else "no zone"
                rest = "the file's other dates do not" if _has_zone(text) else "the file's other dates do"
                if self.layout.zone is not None:
                    rest = f"format {self.layout.name!r} {'has one' if self._zone else 'has none'}"
                bad[i] = f"is {text!r} with {have}; {rest}; expected {expected} in every row"
            else:
                try:
                    stamps[i] = pc.cast(pa.array([text]), kind).cast(pa.int64())[0].as_py()
                except (pa.ArrowInvalid, ValueError):
                    bad[i] = f"is {text[:40]!r}; expected {expected}, years 1678 to 2261"
        return stamps, bad

    def _since_first(self, times: NDArray[Any]) -> NDArray[np.float64]:
        if times.size == 0:
            return np.zeros(0)
        scale = 1e-9 if times.dtype == np.int64 else _UNITS[self.layout.unit]
        if self._origin is None:
            self._origin = times[0]
            self.origin_s = float(times[0]) * scale
        seconds = (times - self._origin) * scale if scale != 1.0 else times - self._origin
        latest = np.maximum.accumulate(np.concatenate([[self._latest], seconds]))
        if latest[-1] == latest[-1]:
            self.out_of_order += int((seconds < latest[:-1]).sum())
            self._latest = float(latest[-1])
        return np.asarray(seconds, np.float64)


def _empty() -> _Chunk:
    whole = np.zeros(0, np.int32)
    return _Chunk(np.zeros(0), whole, whole, whole, None)


def _text(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.string()).fill_null("")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TraceError(f"class column of type {array.type}; expected text ({_plain(error)})") from error


def _has_zone(text: str) -> bool:
    return bool(re.search(r"(Z|:\d\d(\.\d+)?[+-]\d\d:?(\d\d)?)\s*$", text))


def _numbers(array: pa.Array) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Finite floats, and for each other row what was found."""
    try:
        if pa.types.is_boolean(array.type):
            raise pa.ArrowInvalid("boolean")
        values = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        values = np.array([_number(v) for v in array.to_pylist()], np.float64)
    wrong = np.flatnonzero(~np.isfinite(values))
    return values, {int(i): _found(array[int(i)].as_py()) for i in wrong}


def _number(value: Any) -> float:
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return (
            float(value)
            if not isinstance(value, str) or re.fullmatch(r"[\s\d.eE+-]+", value, re.ASCII)
            else math.nan
        )
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _found(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return "is empty"
    return f"is {str(value)[:40]!r}" if isinstance(value, str) else f"is {str(value)[:40]}"


def _whole(array: pa.Array) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Whole numbers within 0..2^31-1, and for each other row what was found and expected."""
    if array.null_count == 0 and not pa.types.is_floating(array.type) and not pa.types.is_boolean(array.type):
        try:
            values = pc.cast(array, pa.int64()).to_numpy(zero_copy_only=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            pass
        else:
            low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
            if low >= 0 and high <= MAX_TOKENS:
                return values, {}
    floats, bad = _numbers(array)
    bad = {i: f"{what}; expected a whole number" for i, what in bad.items()}
    finite = np.isfinite(floats)
    floats[~finite] = 0.0
    texts = {
        "; expected >= 0": floats < 0,
        "; expected a whole number": (floats >= 0) & (floats != np.floor(floats)),
    }
    texts[f"; expected <= {MAX_TOKENS}"] = (floats > MAX_TOKENS) & (floats == np.floor(floats))
    for expected, wrong in texts.items():
        for i in np.flatnonzero(wrong):
            bad[int(i)] = f"is {str(array[int(i)].as_py()).strip()[:40]}{expected}"
    floats[list(bad)] = 0.0
    return floats.astype(np.int64), bad


def _block_lists(array: pa.Array) -> tuple[list[NDArray[np.int64]], dict[int, str]]:
    lists: list[NDArray[np.int64]] = []
    bad: dict[int, str] = {}
    for i, ids in enumerate(array.to_pylist()):
        if isinstance(ids, list) and all(isinstance(block, int) for block in ids):
            lists.append(np.array(ids, np.int64))
        else:
            lists.append(np.zeros(0, np.int64))
            bad[i] = f"{_found(ids)}; expected a list of whole numbers"
    return lists, bad


# ---- tables ---------------------------------------------------------------------------------------


class _Table:
    """A growing table, sorted by arrival, that never holds two copies of its columns.

    Rows that come a little late are merged into the tail; a file that is far from sorted is sorted
    once at the end.
    """

    _COLUMNS = (("arrival", np.float64), ("inputs", np.int32), ("outputs", np.int32), ("codes", np.int8))

    def __init__(self) -> None:
        self._arrays = {name: np.zeros(0, dtype) for name, dtype in self._COLUMNS}
        self._blocks: list[NDArray[np.int64]] | None = None
        self._size = 0
        self._sort_at_end = False

    def append(self, chunk: _Chunk) -> None:
        size = self._size + chunk.arrival.size
        for name, array in self._arrays.items():
            values = getattr(chunk, name)
            if name == "codes" and array.dtype == np.int8 and values.max(initial=0) > 127:
                array = self._arrays[name] = array.astype(np.int32)
            if size > array.size:
                # refcheck: nothing else refers to these arrays, and resize grows them in place.
                array.resize(max(size, array.size + array.size // 8), refcheck=False)
            array[self._size : size] = values
        if chunk.blocks is not None:
            self._blocks = (self._blocks or []) + [] if self._blocks is None else self._blocks
            self._blocks.extend(chunk.blocks)
        start, self._size = self._size, size
        if not self._sort_at_end and not np.isnan(chunk.arrival[0]):
            self._merge(start, chunk)

    def _merge(self, start: int, chunk: _Chunk) -> None:
        arrival = self._arrays["arrival"]
        earliest = chunk.arrival.min()
        late = start and earliest < arrival[start - 1]
        if not late and (np.diff(chunk.arrival) >= 0).all():
            return
        begin = int(np.searchsorted(arrival[:start], earliest, side="right")) if late else start
        if self._size - begin > 4 * chunk.arrival.size + 100_000:
            self._sort_at_end = True
            return
        self._sort(begin)

    def _sort(self, begin: int) -> None:
        order = np.argsort(self._arrays["arrival"][begin : self._size], kind="stable")
        for array in self._arrays.values():
            array[begin : self._size] = array[begin : self._size][order]
        if self._blocks is not None:
            tail = self._blocks[begin:]
            self._blocks[begin:] = [tail[i] for i in order]

    def frame(self, classes: tuple[str, ...]) -> pd.DataFrame:
        if self._sort_at_end:
            self._sort(0)
        for array in self._arrays.values():
            array.resize(self._size, refcheck=False)
        arrival = self._arrays["arrival"]
        if self._size and not np.isnan(arrival[0]):
            arrival -= arrival[0]
        columns = {
            "arrival_s": arrival,
            "input_tokens": self._arrays["inputs"],
            "output_tokens": self._arrays["outputs"],
            "class": pd.Categorical.from_codes(
                self._arrays["codes"], list(classes) or ["all"], validate=False
            ),
        }
        frame = pd.DataFrame(columns, copy=False)
        if self._blocks is not None:
            blocks = np.empty(self._size, object)
            blocks[:] = self._blocks
            frame["prefix_blocks"] = blocks
        return frame
