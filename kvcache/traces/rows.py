"""Rows of traces: each container's reader, and the checks that every row passes.

A reader yields chunks of unchecked columns in the order of the file; `Cleaner` turns them into
numbers, keeps the tally of rows, and refuses or drops the bad ones.

The cleaner is written by hand on Arrow's kernels. Libraries that validate tables (pandera, Great
Expectations) check a table that is in memory, and a schema's coercion (Arrow, Polars) fails on a file
without the row that is wrong; here 44 million rows stream through constant memory, at millions of rows a
second, and each row that goes is named or counted.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ijson
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvcache.traces.formats import Dialect, Format, Head, TraceError, open_text, plain_reason
from kvcache.traces.times import UNITS, Clock, Doubt, block_size, decide_unit, is_text, numbers

__all__ = ["ASSISTANTS", "MAX_TOKENS", "MISSHAPEN", "ZERO_OUTPUT", "Chunk", "Cleaner", "RawRows", "raw_rows"]

MAX_TOKENS = 2**31 - 1
ZERO_OUTPUT = "0 output tokens"
MISSHAPEN = "misshapen row"
FAILED = "failed request"
NO_RESPONSE = "conversation without a response"
UNKNOWN_SPEAKER = "turn of an unknown speaker"
#: Speakers of a conversation whose turns are responses, and those whose turns are (part of) prompts.
ASSISTANTS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model", "bot", "claude")
PROMPTERS = ("human", "user", "system", "developer", "tool", "function", "observation")

_BLOCK_BYTES = 1 << 19
_PYTHON_ROWS = 20_000
_PARQUET_ROWS = 1 << 17


@dataclass(frozen=True)
class RawRows:
    """Unchecked rows: one Arrow array per source column, in the order of the file.

    ``passed`` more rows were passed over, by reason. Where a row's number is not its place in the file,
    ``labels`` gives each row's number of ``unit``.
    """

    columns: Mapping[str, pa.Array]
    rows: int
    passed: Mapping[str, int] = field(default_factory=dict)
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
    head: Head,
    layout: Format,
    drop_bad: bool,
    token_counter: Callable[[], Callable[[str], int]],
    note: Callable[[str], None],
) -> Iterator[RawRows]:
    """The rows of a file of the given layout.

    ``token_counter`` makes one where texts are counted; ``note`` takes what the reader should know.
    """
    path, name = head.path, head.path.name
    if head.container == "csv":
        return _csv_rows(path, layout, head.compression, head.dialect, drop_bad)
    if head.container == "parquet" and _is_plain(head, layout):
        return _parquet_rows(path, layout)
    if head.container == "parquet":
        records = _parquet_records(path)
    elif head.container == "jsonl":
        records = _jsonl_records(path, head.compression)
    else:
        array = (head.text or "").lstrip().startswith("[")
        unit = "conversation" if layout.name == "sharegpt" else "row"
        records = _json_records(path, head.compression, "item" if array else "", unit)
    if layout.name == "sharegpt":
        rows = _responses(records, token_counter(), layout.columns["turns"])
        layout = Format("responses", "", {t: t for t in ("input_tokens", "output_tokens", "class")})
        return _record_rows(name, layout, rows, drop_bad, "conversation")
    prepare = {"mooncake": _with_turns, "weka": _sessions, "aiperf": _answered}.get(layout.name)
    if prepare is not None:
        records = prepare(records, layout, note)
    return _record_rows(name, layout, records, drop_bad, "row")


# ---- containers -----------------------------------------------------------------------------------


def _csv_rows(
    path: Path, layout: Format, compression: str | None, dialect: Dialect, drop_bad: bool
) -> Iterator[RawRows]:
    misshapen = 0

    def pass_over(_row: Any) -> str:
        nonlocal misshapen
        misshapen += 1
        return "skip"

    sources = layout.sources()
    # Everything is read as text and converted afterwards, so that a bad value can be named with its row.
    options = {
        "read_options": pa_csv.ReadOptions(
            block_size=_BLOCK_BYTES, use_threads=False, column_names=list(dialect.names)
        ),
        "parse_options": pa_csv.ParseOptions(
            delimiter=dialect.separator,
            newlines_in_values=True,
            invalid_row_handler=pass_over if drop_bad else None,
        ),
        "convert_options": pa_csv.ConvertOptions(
            include_columns=sources,
            column_types=dict.fromkeys(sources, pa.string()),
            strings_can_be_null=False,
        ),
    }
    with open_text(path, compression) as packed:
        packed.read(dialect.preamble)
        stream = pa.TransformInputStream(packed, _Mended()) if drop_bad else packed
        try:
            for batch in pa_csv.open_csv(stream, **options):
                yield RawRows({c: batch.column(c) for c in sources}, batch.num_rows, {MISSHAPEN: misshapen})
                misshapen = 0
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return  # a header without rows
            problem = _locate(path, compression, dialect, sources)
            raise TraceError(problem or f"{path.name}: {plain_reason(error)}") from error
        if misshapen:
            yield RawRows({}, 0, {MISSHAPEN: misshapen})


class _Mended:
    """Replaces what is no UTF-8, block by block."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, block: pa.Buffer) -> bytes:
        return self._decoder.decode(block.to_pybytes()).encode()


def _locate(path: Path, compression: str | None, dialect: Dialect, sources: list[str]) -> str | None:
    """Name the first CSV row that has another number of columns than the header, or is not UTF-8.

    This second pass is made only after a failure.
    """
    with open_text(path, compression) as stream:
        stream.read(dialect.preamble)
        text = io.TextIOWrapper(
            io.BufferedReader(stream), encoding="utf-8", errors="surrogateescape", newline=""
        )
        wanted = [dialect.names.index(column) for column in sources]
        width = len(dialect.names)
        try:
            records = (record for record in csv.reader(text, delimiter=dialect.separator) if record)
            for row, record in enumerate(records, 1):
                if len(record) != width:
                    return f"{path.name} row {row}: {len(record)} columns; expected {width}"
                for at in wanted:
                    if re.search("[\udc80-\udcff]", record[at]):
                        return f"{path.name} row {row}: {dialect.names[at]} is no UTF-8; expected UTF-8 text"
        except (csv.Error, OSError):
            pass
    return None


def _is_plain(head: Head, layout: Format) -> bool:
    """Whether a Parquet file can be read by column: no list but that of the blocks, nothing to prepare."""
    columns = set(head.columns())
    if layout.name in ("sharegpt", "aiperf", "weka") or (layout.name == "mooncake" and "delay" in columns):
        return False
    for source in layout.sources():
        kind: Any = pa.struct(list(head.schema))
        for key in [source] if source in head.schema.names else source.split("."):
            if not pa.types.is_struct(kind):
                return False
            kind = kind.field(key).type
        if pa.types.is_nested(kind) and source != layout.columns.get("prefix_blocks"):
            return False
    return True


def _parquet_rows(path: Path, layout: Format) -> Iterator[RawRows]:
    sources = layout.sources()
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=sources):
            columns = {source: _member(batch, source) for source in sources}
            plain = {
                s: c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for s, c in columns.items()
            }
            yield RawRows(plain, batch.num_rows)


def _member(batch: pa.RecordBatch, source: str) -> pa.Array:
    if source in batch.schema.names:
        return batch.column(source)
    first, *rest = source.split(".")
    return pc.struct_field(batch.column(first), rest)


# ---- records --------------------------------------------------------------------------------------

#: A record with its number in the file, or what is wrong with it.
_Records = Iterator[tuple[int, Any]]


def _lines(path: Path, compression: str | None) -> Iterator[bytes]:
    with open_text(path, compression) as stream:
        rest = b""
        while block := stream.read(_BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
        yield rest


def _jsonl_records(path: Path, compression: str | None) -> _Records:
    row = 0
    for line in _lines(path, compression):
        if row == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        row += 1
        try:
            yield row, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield row, ValueError(f"no JSON ({plain_reason(error)[:80]}); expected one object a line")


def _json_records(path: Path, compression: str | None, prefix: str, unit: str) -> _Records:
    number = 0
    with open_text(path, compression) as stream:
        try:
            items = ijson.items(_WithoutMark(stream), prefix, multiple_values=not prefix)
            for number, record in enumerate(items, 1):
                yield number, record
        except (ijson.JSONError, UnicodeDecodeError, OverflowError, ArithmeticError) as error:
            raise TraceError(f"{path.name} {unit} {number + 1}: no JSON ({plain_reason(error)})") from error


def _parquet_records(path: Path) -> _Records:
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=_PYTHON_ROWS)
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), 1)


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


def _record_rows(
    name: str, layout: Format, records: _Records, drop_bad: bool, unit: str
) -> Iterator[RawRows]:
    """Records as columns of text; a record whose tokens are lists is as many rows."""
    sources = layout.sources()
    nested = layout.columns.get("prefix_blocks")
    tokens = layout.columns["input_tokens"], layout.columns["output_tokens"]
    keys = {source: source.split(".") for source in sources}
    values: dict[str, list[Any]] = {source: [] for source in sources}
    labels: list[int] = []
    passed: dict[str, int] = {}

    def chunk() -> RawRows:
        kinds = {s: pa.list_(pa.int64()) if s == nested else pa.string() for s in sources}
        columns = {s: pa.array(values[s], kinds[s]) for s in sources}
        return RawRows(columns, len(labels), dict(passed), unit, np.array(labels, np.int64))

    for number, record in records:
        try:
            if isinstance(record, _Passed):
                passed[record.reason] = passed.get(record.reason, 0) + 1
                continue
            if isinstance(record, ValueError):
                raise record
            found = _found_in(record, keys)
            rows = 1
            if isinstance(found[tokens[0]], list) and isinstance(found[tokens[1]], list):
                rows = _spread(found, tokens, nested)
            else:
                found = {s: [_blocks(v, s) if s == nested else _cell(v, s)] for s, v in found.items()}
        except ValueError as error:
            if not drop_bad:
                raise TraceError(f"{name} {unit} {number}: {error}") from None
            passed[MISSHAPEN] = passed.get(MISSHAPEN, 0) + 1
            continue
        for source in sources:
            values[source] += found[source]
        labels += [number] * rows
        if len(labels) >= _PYTHON_ROWS:
            yield chunk()
            values = {source: [] for source in sources}
            labels.clear()
            passed.clear()
    yield chunk()


class _Passed(ValueError):
    """A row that is passed over and counted, whether or not bad rows are refused."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _found_in(record: Any, keys: Mapping[str, list[str]]) -> dict[str, Any]:
    """The wanted members of a record; ValueError where one is missing."""
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}; expected an object")
    found = {}
    for source, path in keys.items():
        if source in record:
            found[source] = record[source]
            continue
        try:
            found[source] = _at(record, path)
        except (KeyError, TypeError):
            there = ", ".join(repr(c[:40]) for c in list(record)[:12]) or "nothing"
            raise ValueError(f"no {source!r}; found {there}") from None
    return found


def _at(value: Any, keys: list[str]) -> Any:
    for i, key in enumerate(keys):
        if isinstance(value, list):
            return [_at(element, keys[i:]) for element in value]
        value = value[key]
    return value


def _spread(found: dict[str, Any], tokens: tuple[Any, Any], nested: Any) -> int:
    """Make each member of a record a list with a value per row, in place; the number of rows."""
    for source, value in found.items():
        while source != nested and isinstance(value, list) and any(isinstance(v, list) for v in value):
            value = [x for v in value for x in (v if isinstance(v, list) else [v])]  # lists in lists
        found[source] = value
    rows = len(found[tokens[0]])
    for source, value in found.items():
        if not isinstance(value, list):
            value = [value] * rows
        elif len(value) != rows:
            raise ValueError(f"{source} has {len(value)} values; expected {rows} as {tokens[0]}")
        found[source] = [_blocks(v, source) if source == nested else _cell(v, source) for v in value]
    return rows


def _cell(value: Any, source: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        # JSON may hold lone surrogates, which are no text.
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, (dict, list)):
        raise ValueError(f"{source} is a JSON {type(value).__name__}; expected a number or text")
    return json.dumps(value) if isinstance(value, (bool, float)) else str(value)


def _blocks(ids: Any, source: str) -> list[int]:
    """Block ids within int64; hashes of 64 bits without a sign keep their bits."""
    if isinstance(ids, list) and all(type(i) is int for i in ids):
        if not ids or (min(ids) >= -(2**63) and max(ids) < 2**63):
            return ids
        if min(ids) >= 0 and max(ids) < 2**64:
            return [i - 2**64 if i >= 2**63 else i for i in ids]
    raise ValueError(f"{source} is {str(ids)[:40]}; expected a list of whole numbers")


# ---- layouts that need more than their columns ----------------------------------------------------


def _with_turns(records: _Records, layout: Format, note: Callable[[str], None]) -> _Records:
    """Mooncake's sessions: a turn with a delay and no time arrives so long after the turn before it."""
    arrival = layout.columns.get("arrival_s", "")
    latest: dict[Any, Any] = {}
    for number, record in records:
        if isinstance(record, dict) and "session_id" in record:
            session = str(record["session_id"])
            if record.get(arrival) is None and record.get("delay") is not None and session in latest:
                note(
                    "turns without a time arrive their delay after the turn before, whose answer takes no "
                    "time; lengths are the file's, without the history that a replay adds"
                )
                with suppress(TypeError):
                    record = {**record, arrival: latest[session] + record["delay"]}
            latest[session] = record.get(arrival)
        yield number, record


def _sessions(records: _Records, layout: Format, note: Callable[[str], None]) -> _Records:
    """Weka's sessions, the requests of their subagents among their own; local block ids made different."""
    timed = "arrival_s" in layout.columns
    fresh: dict[Any, int] = {}
    for number, record in records:
        if isinstance(record, dict) and isinstance(record.get("requests"), list):
            if timed and number > 1:
                raise Doubt(
                    "several sessions, each with times from its own beginning, which stands nowhere",
                    "arrival_s",
                )
            requests = list(_leaf_requests(record["requests"]))
            if record.get("hash_id_scope") == "local" and "prefix_blocks" in layout.columns:
                requests = [
                    {**r, "hash_ids": [fresh.setdefault((number, i), len(fresh)) for i in r["hash_ids"]]}
                    if isinstance(r, dict) and isinstance(r.get("hash_ids"), list)
                    else r
                    for r in requests
                ]
            record = {**record, "requests": requests}
        yield number, record


def _leaf_requests(requests: Iterable[Any]) -> Iterator[Any]:
    for request in requests:
        if isinstance(request, dict) and isinstance(request.get("requests"), list):
            yield from _leaf_requests(request["requests"])
        else:
            yield request


def _answered(records: _Records, layout: Format, note: Callable[[str], None]) -> _Records:
    """AIPerf's records, those with an error passed over."""
    for number, record in records:
        failed = isinstance(record, dict) and record.get("error")
        yield number, _Passed(FAILED) if failed else record


def _responses(records: _Records, count: Callable[[str], int], turns: Any) -> _Records:
    """One row per response of an assistant; its input is all that the conversation holds before it."""
    for number, conversation in records:
        try:
            if isinstance(conversation, ValueError):
                raise conversation
            said = _turns(conversation, turns)
        except ValueError as error:
            yield number, error
            continue
        context = 0
        for speaker, text in said:
            tokens = int(count(text)) if text else 0
            if speaker in ASSISTANTS:
                yield number, {"input_tokens": context, "output_tokens": tokens, "class": speaker}
            elif speaker not in PROMPTERS:
                yield number, _Passed(UNKNOWN_SPEAKER)
            context += tokens
        if said and all(speaker in PROMPTERS for speaker, _ in said):
            yield number, _Passed(NO_RESPONSE)


def _turns(conversation: Any, turns: str) -> list[tuple[str, str]]:
    """(speaker, text) of every turn; ValueError for another layout."""
    found = conversation.get(turns) if isinstance(conversation, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"no list {turns!r}; expected ShareGPT's layout")
    said = [
        (t.get("from", t.get("role")), t.get("value", t.get("content"))) for t in found if isinstance(t, dict)
    ]
    if len(said) != len(found) or not all(isinstance(s, str) and isinstance(t, str) for s, t in said):
        raise ValueError("a turn without text in 'from' and 'value'; expected ShareGPT's layout")
    return said


# ---- checks ---------------------------------------------------------------------------------------


class Cleaner:
    """Turns unchecked rows into checked ones and keeps the tally.

    Attributes
    ----------
    rows_read, rows_kept, out_of_order : rows so far; those that arrive before an earlier row.
    dropped : rows by reason.
    classes : labels in order of first appearance; a code is a position in it.
    origin_s : arrival of the first kept row, seconds on the file's own clock.
    unit, reason : what arrivals are in ("date", a unit, None without times) and how that is known.
    block_tokens : tokens of a prefix block, where the file has ids and lengths tell.
    """

    def __init__(
        self, name: str, layout: Format, drop_bad: bool, clock: Clock, unit: str | None = None
    ) -> None:
        self.rows_read = self.rows_kept = self.out_of_order = 0
        self.dropped: dict[str, int] = {}
        self.classes: list[str] = []
        self.origin_s = 0.0
        self.unit, self.reason = unit, "as the caller says" if unit else ""
        self.block_tokens: int | None = None
        self._name, self._layout, self._drop_bad, self._clock = name, layout, drop_bad, clock
        self._codes: dict[str, int] = {}
        self._origin: Any = None
        self._latest = -math.inf

    def clean(self, raw: RawRows) -> Chunk:
        """Check one chunk of rows; TraceError names the first bad row unless bad rows are dropped."""
        first = self.rows_read + 1
        self.rows_read += raw.rows
        for reason, rows in raw.passed.items():
            self.rows_read += rows
            self._drop(reason, rows)
        if not raw.rows:
            return _nothing()
        columns = self._layout.columns
        if "input_tokens" not in columns:
            columns = {tidy: tidy for tidy in raw.columns}
        bad: dict[str, dict[int, str]] = {}
        inputs, bad["input_tokens"] = whole_numbers(raw.columns[columns["input_tokens"]])
        outputs, bad["output_tokens"] = whole_numbers(raw.columns[columns["output_tokens"]])
        arrival: NDArray[Any] = np.full(raw.rows, np.nan)
        if "arrival_s" in columns:
            arrival, bad["arrival_s"] = self._clock.read(raw.columns[columns["arrival_s"]])
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
            self._since_first(arrival, inputs, blocks),
            inputs.astype(np.int32),
            outputs.astype(np.int32),
            codes,
            blocks,
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

    def _since_first(
        self, times: NDArray[Any], inputs: NDArray[np.int64], blocks: list[NDArray[np.int64]] | None
    ) -> NDArray[np.float64]:
        if times.size == 0 or np.isnan(times[0]):
            return times.astype(np.float64)
        scale = self._scale(times, inputs, blocks)
        if self._origin is None:
            self._origin = times[0]
            self.origin_s = float(times[0]) * scale
        seconds = (times - self._origin) * scale
        latest = np.maximum.accumulate(np.concatenate([[self._latest], seconds]))
        self.out_of_order += int((seconds < latest[:-1]).sum())
        self._latest = float(latest[-1])
        return seconds

    def _scale(
        self, times: NDArray[Any], inputs: NDArray[np.int64], blocks: list[NDArray[np.int64]] | None
    ) -> float:
        if blocks and self.block_tokens is None:
            self.block_tokens = block_size(inputs, blocks)
        if times.dtype == np.int64:
            self.unit, self.reason = "date", self._clock.style or ""
            return 1e-9
        if self.unit is None:
            column, documented = str(self._layout.columns["arrival_s"]), self._layout.unit
            known = times if self._origin is None else np.append(times, self._origin)
            decided = decide_unit(column, known, documented, self.block_tokens)
            if decided is None:  # nothing but one instant so far, 0 s after itself in any unit
                self.reason = "all at one instant"
                return UNITS[documented or "s"]
            self.unit, self.reason = decided
            if self._origin is not None:
                self.origin_s = float(self._origin) * UNITS[self.unit]
        return UNITS[self.unit]


def _nothing() -> Chunk:
    whole = np.zeros(0, np.int32)
    return Chunk(np.zeros(0), whole, whole, whole, None)


def _text(array: pa.Array) -> pa.Array:
    try:
        return array.cast(pa.string()).fill_null("")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TraceError(f"class of type {array.type}; expected text ({plain_reason(error)})") from error


def whole_numbers(array: pa.Array) -> tuple[NDArray[np.int64], dict[int, str]]:
    """Whole numbers within 0..2^31-1, zero where there is none, and by row what was found and expected."""
    if array.null_count == 0 and (is_text(array) or pa.types.is_integer(array.type)):
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
    if is_text(array):
        array = _lists_in_text(array)
    kind = array.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(
        kind.value_type
    ):
        what = f"of type {kind}; expected lists of whole numbers"
        return [np.zeros(0, np.int64)] * len(array), dict.fromkeys(range(len(array)), f"is {what}")
    lists: list[NDArray[np.int64]] = []
    bad: dict[int, str] = {}
    kept = np.uint64 if pa.types.is_uint64(kind.value_type) else np.int64
    for i, ids in enumerate(array.to_pylist()):
        if ids is None or None in ids:
            bad[i] = f"is {str(ids)[:40]}; expected a list of whole numbers" if ids else "is empty"
        lists.append(np.array(ids if i not in bad else [], kept).view(np.int64))
    return lists, bad


def _lists_in_text(array: pa.Array) -> pa.Array:
    """Lists of whole numbers as a CSV holds them, ``[0, 1]`` or ``[0 1]``; null for other text."""
    shaped = re.compile(r"\[?[\d\s,;-]*\]?")
    texts = ((text or "").strip() for text in array.to_pylist())
    lists = [[int(i) for i in re.findall(r"-?\d+", t)] if t and shaped.fullmatch(t) else None for t in texts]
    wide = any(ids and max(ids) >= 2**63 for ids in lists)
    return pa.array(lists, pa.list_(pa.uint64() if wide else pa.int64()))
