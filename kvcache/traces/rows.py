"""Rows of traces: each container's reader, and the checks that every row passes.

A reader yields chunks of unchecked columns in the order of the file; `Cleaner` turns them into
numbers, keeps the tally of rows, and refuses or drops the bad ones.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvcache.traces.formats import UNITS, Format, TraceError, has_zone, open_text, plain_reason

__all__ = ["ASSISTANTS", "MAX_TOKENS", "MISSHAPEN", "ZERO_OUTPUT", "Chunk", "Cleaner", "RawRows", "raw_rows"]

MAX_TOKENS = 2**31 - 1
ZERO_OUTPUT = "0 output tokens"
MISSHAPEN = "misshapen row"
#: Speakers of a ShareGPT conversation whose turns are responses.
ASSISTANTS = ("gpt", "chatgpt", "bing", "bard")

_BLOCK_BYTES = 1 << 19
_PYTHON_ROWS = 20_000
_PARQUET_ROWS = 1 << 17
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Dates outside would overflow differences of nanoseconds, or are a mistake anyway.
_EARLIEST_NS, _LATEST_NS = -2_208_988_800 * 10**9, 7_258_118_400 * 10**9  # 1900 .. 2200


@dataclass(frozen=True)
class RawRows:
    """Unchecked rows: one Arrow array per source column, in the order of the file.

    ``misshapen`` more rows were passed over (only where bad rows are dropped). Where a row is not
    what a user counts, ``labels`` gives each row's number of ``unit``.
    """

    columns: Mapping[str, pa.Array]
    rows: int
    misshapen: int = 0
    unit: str = "row"
    labels: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Chunk:
    """Checked rows: arrival (float64 s from the file's first kept row), input and output tokens
    (int32), class codes (int32), and per row the ids of its prefix blocks, if the file has them."""

    arrival: NDArray[np.float64]
    inputs: NDArray[np.int32]
    outputs: NDArray[np.int32]
    codes: NDArray[np.int32]
    blocks: list[NDArray[np.int64]] | None


def raw_rows(
    path: Path,
    layout: Format,
    compression: str | None,
    drop_bad: bool,
    token_counter: Callable[[], Callable[[str], int]],
) -> Iterator[RawRows]:
    """The rows of a file of the given layout; ``token_counter`` makes one where texts are counted."""
    if layout.container == "csv":
        return _csv_rows(path, layout, compression, drop_bad)
    if layout.container == "jsonl":
        return _jsonl_rows(path, layout, compression, drop_bad)
    if layout.container == "parquet":
        return _parquet_rows(path, layout)
    return _sharegpt_rows(path, compression, drop_bad, token_counter())


# ---- containers -----------------------------------------------------------------------------------


def _csv_rows(path: Path, layout: Format, compression: str | None, drop_bad: bool) -> Iterator[RawRows]:
    misshapen = 0

    def pass_over(_row: Any) -> str:
        nonlocal misshapen
        misshapen += 1
        return "skip"

    sources = layout.sources()
    # Everything is read as text and converted afterwards, so that a bad value can be named with its row.
    options = {
        "read_options": pa_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
        "parse_options": pa_csv.ParseOptions(
            newlines_in_values=True, invalid_row_handler=pass_over if drop_bad else None
        ),
        "convert_options": pa_csv.ConvertOptions(
            include_columns=sources,
            column_types=dict.fromkeys(sources, pa.string()),
            strings_can_be_null=False,
        ),
    }
    with open_text(path, compression) as packed:
        stream = pa.TransformInputStream(packed, _Mended()) if drop_bad else packed
        try:
            for batch in pa_csv.open_csv(stream, **options):
                yield RawRows({c: batch.column(c) for c in sources}, batch.num_rows, misshapen)
                misshapen = 0
        except pa.ArrowInvalid as error:
            problem = _locate(path, compression, sources)
            raise TraceError(problem or f"{path.name}: {plain_reason(error)}") from error
        if misshapen:
            yield RawRows({}, 0, misshapen)


class _Mended:
    """Replaces what is no UTF-8, block by block."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, block: pa.Buffer) -> bytes:
        return self._decoder.decode(block.to_pybytes()).encode()


def _locate(path: Path, compression: str | None, sources: list[str]) -> str | None:
    """Name the first CSV row that has another number of columns than the header, or is not UTF-8.

    This second pass is made only after a failure.
    """
    with open_text(path, compression) as stream:
        text = io.TextIOWrapper(
            io.BufferedReader(stream), encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        try:
            records = (record for record in csv.reader(text) if record)
            header = next(records, [])
            wanted = [header.index(column) for column in sources if column in header]
            for row, record in enumerate(records, 1):
                if len(record) != len(header):
                    return f"{path.name} row {row}: {len(record)} columns; expected {len(header)}"
                for at in wanted:
                    if re.search("[\udc80-\udcff]", record[at]):
                        return f"{path.name} row {row}: {header[at]} is no UTF-8; expected UTF-8 text"
        except (csv.Error, OSError):
            pass
    return None


def _lines(path: Path, compression: str | None) -> Iterator[bytes]:
    with open_text(path, compression) as stream:
        rest = b""
        while block := stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        yield rest


def _jsonl_rows(path: Path, layout: Format, compression: str | None, drop_bad: bool) -> Iterator[RawRows]:
    sources = layout.sources()
    nested = layout.columns.get("prefix_blocks")
    values: dict[str, list[Any]] = {column: [] for column in sources}
    row = misshapen = 0

    def chunk() -> RawRows:
        kinds = {c: pa.list_(pa.int64()) if c == nested else pa.string() for c in sources}
        return RawRows(
            {c: pa.array(values[c], kinds[c]) for c in sources}, len(values[sources[0]]), misshapen
        )

    for line in _lines(path, compression):
        if row == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        row += 1
        try:
            record = _record(line, sources, nested)
        except ValueError as error:
            if not drop_bad:
                raise TraceError(f"{path.name} row {row}: {error}") from None
            misshapen += 1
            continue
        for column in sources:
            values[column].append(record[column])
        if len(values[sources[0]]) == _PYTHON_ROWS:
            yield chunk()
            values = {column: [] for column in sources}
            misshapen = 0
    yield chunk()


def _record(line: bytes, sources: list[str], nested: Any) -> dict[str, Any]:
    """The wanted members of one JSON object as text, prefix blocks as a list; ValueError for a bad one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({plain_reason(error)[:80]}); expected one object a line") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}; expected an object")
    found = {}
    for column in sources:
        if column not in record:
            raise ValueError(
                f"no {column!r}; found {', '.join(repr(c[:40]) for c in list(record)[:12]) or 'nothing'}"
            )
        value = record[column]
        if column == nested:
            if not isinstance(value, list) or not all(
                type(i) is int and -(2**63) <= i < 2**63 for i in value
            ):
                raise ValueError(f"{column} is {str(value)[:40]}; expected a list of whole numbers")
        elif isinstance(value, (dict, list)):
            raise ValueError(f"{column} is a JSON {type(value).__name__}; expected a number or text")
        elif value is not None and not isinstance(value, str):
            value = json.dumps(value)
        # JSON may hold lone surrogates, which are no text.
        found[column] = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    return found


def _parquet_rows(path: Path, layout: Format) -> Iterator[RawRows]:
    sources = layout.sources()
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=sources):
            columns = {source: batch.column(source) for source in sources}
            plain = {
                s: c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for s, c in columns.items()
            }
            yield RawRows(plain, batch.num_rows)


def _sharegpt_rows(
    path: Path, compression: str | None, drop_bad: bool, count: Callable[[str], int]
) -> Iterator[RawRows]:
    """One row per response of an assistant; its input is all that the conversation holds before it."""
    rows: list[tuple[int, str, int, int]] = []
    number = misshapen = 0

    def chunk() -> RawRows:
        labels, speakers, inputs, outputs = zip(*rows, strict=True) if rows else ((), (), (), ())
        columns = {
            "class": pa.array(speakers, pa.string()),
            "input_tokens": pa.array(inputs, pa.int64()),
            "output_tokens": pa.array(outputs, pa.int64()),
        }
        return RawRows(columns, len(rows), misshapen, "conversation", np.array(labels, np.int64))

    with open_text(path, compression) as stream:
        try:
            for number, conversation in enumerate(ijson.items(_WithoutMark(stream), "item"), 1):
                try:
                    rows.extend((number, *turn) for turn in _responses(conversation, count))
                except ValueError as error:
                    if not drop_bad:
                        raise TraceError(f"{path.name} conversation {number}: {error}") from None
                    misshapen += 1
                if len(rows) >= _PYTHON_ROWS:
                    yield chunk()
                    rows.clear()
                    misshapen = 0
        except (ijson.JSONError, UnicodeDecodeError, OverflowError, ArithmeticError) as error:
            raise TraceError(
                f"{path.name} conversation {number + 1}: no JSON ({plain_reason(error)})"
            ) from error
    yield chunk()


def _responses(conversation: Any, count: Callable[[str], int]) -> list[tuple[str, int, int]]:
    """(speaker, tokens before it, its tokens) of every assistant's turn; ValueError for another layout."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise ValueError("no list 'conversations'; expected ShareGPT's layout")
    for turn in turns:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
            raise ValueError("a turn without text in 'from' and 'value'; expected ShareGPT's layout")
    found, context = [], 0
    for turn in turns:
        tokens = int(count(turn["value"])) if turn["value"] else 0
        if turn["from"] in ASSISTANTS:
            found.append((turn["from"], context, tokens))
        context += tokens
    return found


class _WithoutMark:
    """A readable stream without its byte-order mark, if it has one."""

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self._begun = False

    def read(self, size: int = -1) -> bytes:
        if size == 0 or self._begun:
            return self._stream.read(size)
        self._begun = True
        block = self._stream.read(max(size, _BLOCK_BYTES))
        return block.removeprefix(codecs.BOM_UTF8)


# ---- checks ---------------------------------------------------------------------------------------


class Cleaner:
    """Turns unchecked rows into checked ones and keeps the tally.

    Attributes
    ----------
    rows_read, rows_kept, out_of_order : rows so far; those that arrive before an earlier row.
    dropped : rows by reason.
    classes : labels in order of first appearance; a code is a position in it.
    origin_s : arrival of the first kept row, seconds on the file's own clock.
    """

    def __init__(self, name: str, layout: Format, drop_bad: bool) -> None:
        self.rows_read = self.rows_kept = self.out_of_order = 0
        self.dropped: dict[str, int] = {}
        self.classes: list[str] = []
        self.origin_s = 0.0
        self._name, self._layout, self._drop_bad = name, layout, drop_bad
        self._codes: dict[str, int] = {}
        self._origin: Any = None
        self._latest = -math.inf
        self._zone = layout.zone
        self._dates: bool | None = None if layout.zone is None else True

    def clean(self, raw: RawRows) -> Chunk:
        """Check one chunk of rows; TraceError names the first bad row unless bad rows are dropped."""
        first = self.rows_read + 1
        self.rows_read += raw.rows + raw.misshapen
        self._drop(MISSHAPEN, raw.misshapen)
        if not raw.rows:
            return _nothing()
        columns = self._layout.columns or {tidy: tidy for tidy in raw.columns}
        bad: dict[str, dict[int, str]] = {}
        inputs, bad["input_tokens"] = whole_numbers(raw.columns[columns["input_tokens"]])
        outputs, bad["output_tokens"] = whole_numbers(raw.columns[columns["output_tokens"]])
        arrival: NDArray[Any] = np.full(raw.rows, np.nan)
        if "arrival_s" in columns:
            arrival, bad["arrival_s"] = self._times(raw.columns[columns["arrival_s"]])
        blocks = None
        if "prefix_blocks" in columns:
            blocks, bad["prefix_blocks"] = _block_lists(raw.columns[columns["prefix_blocks"]])
        good = np.ones(raw.rows, bool)
        for tidy, problems in bad.items():
            rows = np.fromiter(problems, np.int64, len(problems))
            self._drop(f"bad {tidy}", int(good[rows].sum()))
            good[rows] = False
        if not good.all() and not self._drop_bad:
            at = int(np.flatnonzero(~good)[0])
            problem = next(f"{columns[tidy]} {found[at]}" for tidy, found in bad.items() if at in found)
            number = first + at if raw.labels is None else int(raw.labels[at])
            raise TraceError(f"{self._name} {raw.unit} {number}: {problem}")

        failed = good & (outputs == 0)
        self._drop(ZERO_OUTPUT, int(failed.sum()))
        keep = good & ~failed
        codes = self._class_codes(raw, columns.get("class"), keep)
        if not keep.all():
            inputs, outputs, arrival = inputs[keep], outputs[keep], arrival[keep]
            blocks = None if blocks is None else [blocks[i] for i in np.flatnonzero(keep)]
        self.rows_kept += inputs.size
        return Chunk(
            self._since_first(arrival), inputs.astype(np.int32), outputs.astype(np.int32), codes, blocks
        )

    def _drop(self, reason: str, rows: int) -> None:
        if rows:
            self.dropped[reason] = self.dropped.get(reason, 0) + rows

    def _class_codes(
        self, raw: RawRows, source: str | tuple[str, ...] | None, keep: NDArray[np.bool_]
    ) -> NDArray[np.int32]:
        if source is None:
            self.classes[:] = ["all"]
            return np.zeros(int(keep.sum()), np.int32)
        parts = [_text(raw.columns[column]) for column in ([source] if isinstance(source, str) else source)]
        labels = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, "/")
        encoded = labels.filter(pa.array(keep)).dictionary_encode()
        lookup = np.zeros(len(encoded.dictionary), np.int32)
        for i, label in enumerate(encoded.dictionary.to_pylist()):
            if label not in self._codes:
                self._codes[label] = len(self.classes)
                self.classes.append(label)
            lookup[i] = self._codes[label]
        return lookup[encoded.indices.to_numpy()]

    def _times(self, array: pa.Array) -> tuple[NDArray[Any], dict[int, str]]:
        """Times as int64 nanoseconds (dates) or float64 in the file's unit, and what is wrong by row."""
        if pa.types.is_timestamp(array.type):
            empty = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
            stamps = array.fill_null(0).cast(pa.timestamp("ns", array.type.tz)).cast(pa.int64()).to_numpy()
            return _within_range(stamps, dict.fromkeys(empty.tolist(), "is empty; expected a date"), array)
        if _is_text(array) and self._dates is None:
            first = next((text.strip() for text in array.to_pylist() if text and text.strip()), "")
            self._dates = bool(_DATE.fullmatch(first))
            self._zone = has_zone(first)
        if _is_text(array) and self._dates:
            return self._date_times(array)
        values, bad = numbers(array)
        return values, {i: f"{found}; expected a number ({self._layout.unit})" for i, found in bad.items()}

    def _date_times(self, array: pa.Array) -> tuple[NDArray[np.int64], dict[int, str]]:
        kind = pa.timestamp("ns", "UTC" if self._zone else None)
        try:
            return _within_range(pc.cast(array, kind).cast(pa.int64()).to_numpy(), {}, array)
        except (pa.ArrowInvalid, ValueError):
            pass
        stamps, bad = np.zeros(len(array), np.int64), {}
        expected = "a date with a zone" if self._zone else "a date without a zone"
        for i, text in enumerate(array.to_pylist()):
            text = (text or "").strip()
            if not text:
                bad[i] = f"is empty; expected {expected}"
            elif not _DATE.fullmatch(text):
                bad[i] = f"is {text[:40]!r}; expected {expected}"
            elif has_zone(text) != self._zone:
                zone = "has a zone" if has_zone(text) else "has no zone"
                bad[i] = f"is {text!r}, which {zone}; expected {expected}, as elsewhere in {self._authority}"
            else:
                try:
                    stamps[i] = pc.cast(pa.array([text]), kind).cast(pa.int64())[0].as_py()
                except (pa.ArrowInvalid, ValueError):
                    bad[i] = f"is {text[:40]!r}; expected {expected}"
        return _within_range(stamps, bad, array)

    @property
    def _authority(self) -> str:
        return "this file" if self._layout.zone is None else f"files of format {self._layout.name!r}"

    def _since_first(self, times: NDArray[Any]) -> NDArray[np.float64]:
        if times.size == 0:
            return np.zeros(0)
        scale = 1e-9 if times.dtype == np.int64 else UNITS[self._layout.unit]
        if self._origin is None:
            self._origin = times[0]
            self.origin_s = float(times[0]) * scale
        seconds = (times - self._origin) * scale
        if not np.isnan(seconds[0]):
            latest = np.maximum.accumulate(np.concatenate([[self._latest], seconds]))
            self.out_of_order += int((seconds < latest[:-1]).sum())
            self._latest = float(latest[-1])
        return seconds


def _nothing() -> Chunk:
    whole = np.zeros(0, np.int32)
    return Chunk(np.zeros(0), whole, whole, whole, None)


def _is_text(array: pa.Array) -> bool:
    return pa.types.is_string(array.type) or pa.types.is_large_string(array.type)


def _text(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.string()).fill_null("")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TraceError(f"class of type {array.type}; expected text ({plain_reason(error)})") from error


def _within_range(
    stamps: NDArray[np.int64], bad: dict[int, str], array: pa.Array
) -> tuple[NDArray[np.int64], dict[int, str]]:
    for i in np.flatnonzero((stamps < _EARLIEST_NS) | (stamps > _LATEST_NS)).tolist():
        bad.setdefault(i, f"is {str(array[i])[:40]!r}; expected a date within 1900-2199")
    return stamps, bad


def numbers(array: pa.Array) -> tuple[NDArray[np.float64], dict[int, str]]:
    """Finite floats, NaN where there is none, and by row what was found in its place."""
    values = None
    if not pa.types.is_boolean(array.type):
        trimmed = pc.utf8_trim_whitespace(array) if _is_text(array) else array
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            values = pc.cast(trimmed, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if values is None:
        values = np.array([_number(value) for value in array.to_pylist()], np.float64)
    wrong = np.flatnonzero(~np.isfinite(values)).tolist()
    return values, {i: _found(array[i].as_py()) for i in wrong}


def _number(value: Any) -> float:
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value := value.strip()) else math.nan
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _found(value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        return "is empty"
    return f"is {value[:40]!r}" if isinstance(value, str) else f"is {str(value)[:40]}"


def whole_numbers(array: pa.Array) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Whole numbers within 0..2^31-1, zero where there is none, and by row what was found and expected."""
    if array.null_count == 0 and (_is_text(array) or pa.types.is_integer(array.type)):
        try:
            values = pc.cast(array, pa.int64()).to_numpy()
        except pa.ArrowInvalid:
            pass
        else:
            if values.size == 0 or (values.min() >= 0 and values.max() <= MAX_TOKENS):
                return values, {}
    values, found = numbers(array)
    bad = {i: f"{what}; expected a whole number" for i, what in found.items()}
    values = np.where(np.isfinite(values), values, 0.0)
    fractional = values != np.floor(values)
    for wrong, expected in (
        (values < 0, ">= 0"),
        ((values >= 0) & fractional, "a whole number"),
        ((values > MAX_TOKENS) & ~fractional, f"<= {MAX_TOKENS}"),
    ):
        for i in np.flatnonzero(wrong).tolist():
            bad[i] = f"is {str(array[i].as_py()).strip()[:40]}; expected {expected}"
    values[list(bad)] = 0.0
    return values.astype(np.int64), bad


def _block_lists(array: pa.Array) -> tuple[list[NDArray[np.int64]], dict[int, str]]:
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        what = f"of type {kind}; expected lists of whole numbers"
        return [np.zeros(0, np.int64)] * len(array), dict.fromkeys(range(len(array)), f"is {what}")
    lists: list[NDArray[np.int64]] = []
    bad: dict[int, str] = {}
    for i, ids in enumerate(array.to_pylist()):
        if ids is None or None in ids:
            bad[i] = f"is {str(ids)[:40]}; expected a list of whole numbers" if ids else "is empty"
        lists.append(np.array(ids if i not in bad else [], np.int64))
    return lists, bad
