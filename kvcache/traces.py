"""Request traces: any supported file becomes the same tidy table and a report of what became of its rows.

Rows are read in chunks, checked, and either kept, dropped for a counted reason, or refused with the
row that is wrong. Row numbers count records from 1: a CSV's header is not counted, nor are blank
lines. In a ShareGPT file, conversations are counted instead.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from kvcache.formats import FORMATS, UNITS, Format, Head, TraceError, plain_reason
from kvcache.lengths import LengthDistribution
from kvcache.rows import Chunk, Cleaner, raw_rows

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

AFTER_PERIOD = "after the period"

_NOWHERE = np.iinfo(np.int64).max

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
    """What became of the rows of a file: ``rows_read = rows_kept + sum(dropped.values())``.

    ``out_of_order`` counts kept rows that arrive before an earlier row of the file (the table of
    `read_trace` is sorted all the same); ``classes`` are in order of appearance.
    """

    path: str
    format: str
    rows_read: int
    rows_kept: int
    dropped: Mapping[str, int]
    out_of_order: int
    classes: tuple[str, ...]

    def __repr__(self) -> str:
        dropped = ", ".join(f"{rows:,} dropped ({reason})" for reason, rows in self.dropped.items())
        order = f", {self.out_of_order:,} out of order" if self.out_of_order else ""
        return (
            f"{Path(self.path).name} [{self.format}]: {self.rows_read:,} rows read, {self.rows_kept:,} kept, "
            f"{dropped or 'none dropped'}{order}"
        )

    def _repr_html_(self) -> str:
        rows = {
            "format": self.format,
            "rows read": f"{self.rows_read:,}",
            "rows kept": f"{self.rows_kept:,}",
            **{f"dropped: {reason}": f"{rows:,}" for reason, rows in self.dropped.items()},
            "out of order": f"{self.out_of_order:,}",
            "classes": ", ".join(self.classes[:8]) + (", ..." if len(self.classes) > 8 else ""),
        }
        body = "".join(
            f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items()
        )
        return f"<table><caption>{html.escape(Path(self.path).name)}</caption>{body}</table>"


@dataclass(frozen=True, repr=False)
class Trace:
    """A trace in memory.

    Attributes
    ----------
    requests : DataFrame, one row per request in order of arrival (ties as in the file):
        ``arrival_s`` float64, seconds from the first request (NaN where the file has no times);
        ``input_tokens``, ``output_tokens`` int32; ``class`` categorical; and ``prefix_blocks``, an
        int64 array of block ids per request, where the file has them.
    report : ReadReport
    """

    requests: pd.DataFrame
    report: ReadReport

    def distribution(
        self, field: str = "output", *, class_: str | None = None, upper: int | None = None
    ) -> LengthDistribution:
        """The empirical distribution of ``"output"`` or ``"input"`` tokens, of all requests or of one class.

        ``upper`` is the support bound L_max in tokens, by default the longest length in the whole trace.
        ValueError for an unknown field or class, and for a trace without requests.
        """
        if field not in ("output", "input"):
            raise ValueError(f"field: {field!r}; expected 'output' or 'input'")
        name = Path(self.report.path).name
        lengths = self.requests[f"{field}_tokens"]
        if lengths.empty:
            raise ValueError(f"{name}: no requests are left")
        upper = int(lengths.max()) if upper is None else upper
        if class_ is not None:
            if class_ not in self.report.classes:
                raise ValueError(
                    f"class_: {class_!r}; {name} has {', '.join(map(repr, self.report.classes))}"
                )
            lengths, name = lengths[self.requests["class"] == class_], f"{name}, {class_}"
        return LengthDistribution.from_samples(lengths.to_numpy(), upper, name=name)

    def __repr__(self) -> str:
        return f"Trace({self.report!r})"

    def _repr_html_(self) -> str:
        return self.report._repr_html_() + self.requests.head().to_html()


# ---- public functions -----------------------------------------------------------------------------


def read_trace(
    path: str | Path,
    format: str = "auto",
    *,
    unit: str | None = None,
    invalid: str = "raise",
    token_counter: Callable[[str], int] | None = None,
    progress: bool = False,
    **columns: str | tuple[str, ...] | None,
) -> Trace:
    """Read a trace into a tidy table, with a report of the rows kept and dropped.

    Parameters
    ----------
    path : a CSV, JSON lines, JSON or Parquet file; text may be packed with gzip or zstd.
    format : ``"auto"`` recognises the file by its content; else a key of ``FORMATS``.
    unit : of arrivals that are numbers, ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``; by default the format's.
    invalid : ``"raise"`` refuses a file with a bad value and names its row; ``"drop"`` drops such
        rows and counts them. Requests with 0 output tokens are failures: dropped and counted in both.
    token_counter : text -> tokens, for ShareGPT; by default `mistral_token_counter()`.
    progress : show the rows read so far on stderr.
    **columns : the file's columns for ``arrival_s``, ``input_tokens``, ``output_tokens``, ``class_``
        (one or several) and ``prefix_blocks``. For a known format they replace single columns of
        its mapping. ``arrival_s=None`` reads a file without times.

    Returns
    -------
    Trace. It holds 17 bytes a request, so that 44 million requests fit in 1 GB; a file far from
    sorted by time needs twice that while it is sorted. Where counts are enough, `reduce_trace` needs
    constant memory.

    Raises
    ------
    TraceError
        For a wrong, empty, damaged or truncated file, a missing column, a count that is negative,
        fractional or no number, and dates with and without a zone in one file.

    Examples
    --------
    >>> read_trace("log.csv", arrival_s="ts", input_tokens="prompt", output_tokens="gen")  # doctest: +SKIP
    """
    scan = scan_trace(
        path,
        format,
        unit=unit,
        invalid=invalid,
        token_counter=token_counter,
        progress=progress,
        **columns,
    )
    table = _Table()
    for chunk in scan.chunks():
        table.append(chunk)
    return Trace(table.frame(scan.report.classes), scan.report)


def scan_trace(
    path: str | Path,
    format: str = "auto",
    *,
    unit: str | None = None,
    invalid: str = "raise",
    token_counter: Callable[[str], int] | None = None,
    progress: bool = False,
    **columns: str | tuple[str, ...] | None,
) -> TraceScan:
    """Iterate over a trace of any size in Arrow record batches; parameters and errors as `read_trace`.

    The batches have the columns of ``Trace.requests`` in the order of the file, ``arrival_s``
    counting from the file's first kept row (so it is negative for a later row that arrives earlier).
    """
    path = Path(path)
    if unit is not None and unit not in UNITS:
        raise ValueError(f"unit: {unit!r}; expected one of {', '.join(map(repr, UNITS))}")
    if invalid not in ("raise", "drop"):
        raise ValueError(f"invalid: {invalid!r}; expected 'raise' or 'drop'")
    if format != "auto" and format not in FORMATS:
        raise ValueError(f"format: {format!r}; expected 'auto' or one of {', '.join(map(repr, FORMATS))}")
    for keyword in columns:
        if keyword not in _COLUMN_KEYWORDS:
            raise TypeError(
                f"unknown keyword {keyword!r}; columns are named by {', '.join(_COLUMN_KEYWORDS)}"
            )
    mapping = {_COLUMN_KEYWORDS[keyword]: source for keyword, source in columns.items()}
    for tidy in ("input_tokens", "output_tokens"):
        if tidy in mapping and mapping[tidy] is None:
            raise TypeError(
                f"{tidy}: None; expected a column (only arrival_s, class_, prefix_blocks can be left out)"
            )
    head = Head.of(path)
    layout = head.recognise(mapping) if format == "auto" else FORMATS[format]
    if layout.name == "sharegpt" and mapping:
        raise TypeError(f"{next(iter(columns))}: a ShareGPT file has no columns")
    if layout.generic and "class" not in mapping and "class" in head.columns():
        mapping["class"] = "class"
    layout = layout.mapped(mapping, unit)
    head.check(layout)
    return TraceScan(path, layout, head.compression, invalid == "drop", token_counter, progress)


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
    window_s : width of a time window, seconds; without it all requests are in window 0.
    align_s : the first window starts at the last multiple of ``align_s`` seconds on the file's clock
        before its first row (86,400 aligns dates to midnight); without it at the first row.
    until_s : length of the period from the start of the first window, seconds; later rows are
        dropped and counted.

    Returns
    -------
    counts : DataFrame sorted by its columns ``class``, ``window``, ``field`` (``"input"``, ``"output"``)
        and ``tokens``, with the number of ``requests``. The earliest window is 0.
    report : ReadReport
    """
    scan = scan_trace(path, format, **options)
    tally = _Tally()
    late = 0
    for chunk in scan.chunks():
        arrival = chunk.arrival + (scan.origin_s % align_s if align_s else 0.0)
        if window_s is not None and np.isnan(arrival[0]):
            raise TraceError(f"{scan.path.name}: no arrival times; expected them for windows")
        slot = np.zeros(arrival.size, np.int64)
        if window_s is not None:
            slot = np.floor(arrival / window_s).astype(np.int64)
        classes = int(chunk.codes.max()) + 1
        key = slot * classes + chunk.codes
        if until_s is not None:
            after = arrival >= until_s
            late += int(after.sum())
            key[after] = _NOWHERE
        for value in np.unique(key).tolist():
            if value == _NOWHERE:
                continue
            window, code = divmod(value, classes)
            at = key == value
            tally.add((code, window, "input"), chunk.inputs[at])
            tally.add((code, window, "output"), chunk.outputs[at])
    report = scan.report
    if late:
        dropped = {**report.dropped, AFTER_PERIOD: late}
        report = replace(report, rows_kept=report.rows_kept - late, dropped=dropped)
    cells = tally.counts()
    if not cells:
        raise TraceError(f"{scan.path.name}: no requests are left; {report!r}")
    earliest = min(window for _, window, _ in cells)
    parts = [
        pd.DataFrame(
            {
                "class": report.classes[code],
                "window": np.int32(window - earliest),
                "field": name,
                "tokens": np.fromiter(cell.keys(), np.int32, len(cell)),
                "requests": np.fromiter(cell.values(), np.int64, len(cell)),
            }
        )
        for (code, window, name), cell in cells.items()
    ]
    counts = pd.concat(parts).sort_values(["class", "window", "field", "tokens"], ignore_index=True)
    return counts, report


def mistral_token_counter() -> Callable[[str], int]:
    """Count tokens as Mistral v1 does (sentencepiece, 32,000 pieces); its vocabulary comes in a package.

    Needs the optional extra ``tokenizer`` and, once that is installed, no network.

    Raises
    ------
    ImportError
        Without the extra; the message tells how to install it.
    """
    try:
        from importlib.resources import files

        from sentencepiece import SentencePieceProcessor

        model = files("mistral_common") / "data" / "tokenizer.model.v1"
    except ImportError as error:
        raise ImportError(
            "counting tokens needs the extra 'tokenizer': run python -m pip install '.[tokenizer]' in the "
            "project's folder, or pass token_counter=, any function from a text to its number of tokens"
        ) from error
    processor = SentencePieceProcessor(model_proto=model.read_bytes())
    return lambda text: len(processor.encode(text))


# ---- scanning and collecting ----------------------------------------------------------------------


class TraceScan:
    """One pass over a trace, made by `scan_trace`. The report is there once the scan has come to its end.

    ``origin_s`` is the arrival of the first kept row on the file's own clock, seconds (for dates,
    since 1970), known from the first batch on.
    """

    def __init__(
        self,
        path: Path,
        layout: Format,
        compression: str | None,
        drop_bad: bool,
        token_counter: Callable[[str], int] | None,
        progress: bool,
    ) -> None:
        self.path = path
        self.layout = layout
        self.origin_s = 0.0
        self._classes: list[str] = []
        self._compression = compression
        self._drop_bad = drop_bad
        self._token_counter = token_counter
        self._progress = progress
        self._report: ReadReport | None = None

    @property
    def report(self) -> ReadReport:
        """What became of the rows; RuntimeError before the end of the scan."""
        if self._report is None:
            raise RuntimeError(f"{self.path.name}: the report is complete only at the end of the scan")
        return self._report

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for chunk in self.chunks():
            classes = pa.array(self._classes, pa.string())
            arrays = {
                "arrival_s": pa.array(chunk.arrival),
                "input_tokens": pa.array(chunk.inputs),
                "output_tokens": pa.array(chunk.outputs),
                "class": pa.DictionaryArray.from_arrays(pa.array(chunk.codes), classes),
            }
            if chunk.blocks is not None:
                arrays["prefix_blocks"] = pa.array(chunk.blocks, pa.list_(pa.int64()))
            yield pa.RecordBatch.from_pydict(arrays)

    def chunks(self) -> Iterator[Chunk]:
        """The checked rows as NumPy arrays; codes are positions in the report's classes."""
        name = self.path.name
        cleaner = Cleaner(name, self.layout, self._drop_bad)
        self._classes = cleaner.classes
        rows = raw_rows(
            self.path,
            self.layout,
            self._compression,
            self._drop_bad,
            lambda: self._token_counter or mistral_token_counter(),
        )
        bar = tqdm(desc=name, unit=" rows", unit_scale=True, disable=not self._progress)
        try:
            for raw in rows:
                chunk = cleaner.clean(raw)
                bar.update(raw.rows)
                self.origin_s = cleaner.origin_s
                if chunk.arrival.size:
                    yield chunk
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{name} after row {cleaner.rows_read}: {plain_reason(error)}") from error
        finally:
            bar.close()
        if cleaner.rows_read == 0:
            raise TraceError(f"{name}: no rows; expected at least one request")
        self._report = ReadReport(
            str(self.path),
            self.layout.name,
            cleaner.rows_read,
            cleaner.rows_kept,
            dict(sorted(cleaner.dropped.items())),
            cleaner.out_of_order,
            tuple(cleaner.classes),
        )


class _Tally:
    """Requests per length in each cell, a (class code, window, field)."""

    _AT_ONCE = 1_000_000

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int, str], dict[int, int]] = {}
        self._waiting: dict[tuple[int, int, str], list[NDArray[np.int32]]] = {}
        self._size = 0

    def add(self, cell: tuple[int, int, str], lengths: NDArray[np.int32]) -> None:
        self._waiting.setdefault(cell, []).append(lengths)
        self._size += lengths.size
        if self._size > self._AT_ONCE:
            self._count()

    def _count(self) -> None:
        for cell, parts in self._waiting.items():
            known = self._counts.setdefault(cell, {})
            tokens, requests = np.unique(np.concatenate(parts), return_counts=True)
            for token, count in zip(tokens.tolist(), requests.tolist(), strict=True):
                known[token] = known.get(token, 0) + count
        self._waiting, self._size = {}, 0

    def counts(self) -> dict[tuple[int, int, str], dict[int, int]]:
        self._count()
        return self._counts


class _Table:
    """A growing table, sorted by arrival, of which there is never a second copy.

    Rows that come a little late are merged into the tail; a file that is far from sorted is sorted
    once at the end.
    """

    _LITTLE = 100_000

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {
            "arrival": np.zeros(0, np.float64),
            "inputs": np.zeros(0, np.int32),
            "outputs": np.zeros(0, np.int32),
            "codes": np.zeros(0, np.int8),
        }
        self._blocks: list[NDArray[np.int64]] = []
        self._has_blocks = False
        self._size = 0
        self._sort_at_end = False

    def append(self, chunk: Chunk) -> None:
        start, self._size = self._size, self._size + chunk.arrival.size
        if chunk.codes.max() > np.iinfo(self._arrays["codes"].dtype).max:
            self._arrays["codes"] = self._arrays["codes"].astype(np.int32)
        for name, array in self._arrays.items():
            if self._size > array.size:
                self._resize(name, max(self._size, array.size + array.size // 32))
            self._arrays[name][start : self._size] = getattr(chunk, name)
        if chunk.blocks is not None:
            self._has_blocks = True
            self._blocks.extend(chunk.blocks)
        if not self._sort_at_end and not np.isnan(chunk.arrival[0]):
            self._put_in_order(start, chunk.arrival)

    def _resize(self, name: str, size: int) -> None:
        # In place: realloc moves pages instead of copying them. Nothing else refers to these arrays.
        self._arrays[name].resize(size, refcheck=False)

    def _put_in_order(self, start: int, arrival: NDArray[np.float64]) -> None:
        known = self._arrays["arrival"][:start]
        begin = int(np.searchsorted(known, arrival.min(), side="right"))
        if begin == start and (np.diff(arrival) >= 0).all():
            return
        if start - begin > arrival.size + self._LITTLE:
            self._sort_at_end = True
        else:
            self._sort(begin)

    def _sort(self, begin: int) -> None:
        order = np.argsort(self._arrays["arrival"][begin : self._size], kind="stable")
        for array in self._arrays.values():
            array[begin : self._size] = array[begin : self._size][order]
        if self._has_blocks:
            tail = self._blocks[begin:]
            self._blocks[begin:] = [tail[i] for i in order]

    def frame(self, classes: tuple[str, ...]) -> pd.DataFrame:
        if self._sort_at_end:
            self._sort(0)
        for name in self._arrays:
            self._resize(name, self._size)
        arrival = self._arrays["arrival"]
        arrival -= arrival[:1].sum()
        columns = {
            "arrival_s": arrival,
            "input_tokens": self._arrays["inputs"],
            "output_tokens": self._arrays["outputs"],
            "class": pd.Categorical.from_codes(self._arrays["codes"], list(classes)),
        }
        if self._has_blocks:
            columns["prefix_blocks"] = np.empty(self._size, object)
            columns["prefix_blocks"][:] = self._blocks
        return pd.DataFrame(columns, copy=False)
