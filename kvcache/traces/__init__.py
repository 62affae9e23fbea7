"""Request traces: any supported file becomes the same tidy table and a report of what became of its rows.

What is recognised, by its columns and in any container that can hold them:

- containers: CSV (commas, semicolons, tabs or bars; a ``sep=`` line, comments before the header, spaces
  around names, decimal commas between semicolons), JSON lines, a JSON array, a JSON object over several
  lines, Parquet with structs and lists; text also in gzip or zstd;
- traces: BurstGPT 1-3, Azure 2023 and 2024, Mooncake (with or without hash ids, 64-bit ones too; sessions
  with delays), Bailian, Vidur, AIBrix workloads, Weka sessions;
- results: AIPerf's records, vLLM's and SGLang's serving benchmarks with details, logs with OpenAI's usage;
- texts: ShareGPT and other conversations of ``from``/``value`` or ``role``/``content``, tokenised;
- a CSV without header of arrival, prompt and output tokens, and the tidy table itself, without times too;
- any other table, array or nested record with its columns named (``input_tokens="usage.prompt_tokens"``);
- arrivals: numbers in s, ms, us or ns from a start or from 1970; dates with the year first, the day first or
  the month first, with offsets, UTC or one abbreviated zone, 12 or 24 hours; times of one day.

What can be read in two ways, a unit above all, is refused with the call that settles it.

Rows are read in chunks, checked, and either kept, dropped for a counted reason, or refused with the
row that is wrong. Row numbers count records from 1: a CSV's header is not counted, nor are blank
lines; a record of several requests keeps its one number. In a ShareGPT file, conversations are counted.
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
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from kvcache.traces.formats import FORMATS, Head, TraceError, plain_reason
from kvcache.traces.rows import Chunk, Cleaner, raw_rows
from kvcache.traces.times import UNITS, Clock, Doubt

__all__ = [
    "FORMATS",
    "ReadReport",
    "Trace",
    "TraceError",
    "mistral_token_counter",
    "read_trace",
    "reduce_trace",
]

AFTER_PERIOD = "after the period"

_ROWS_AT_ONCE = 4_000_000
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
    `read_trace` is sorted all the same); ``classes`` are in order of appearance. ``unit`` is what arrivals
    are in ("s", "ms", "us", "ns", "date"; None without times), ``unit_reason`` how that is known,
    ``block_tokens`` the size of a prefix block where ids and prompt lengths tell it, ``notes`` what else
    was taken for granted.
    """

    path: str
    format: str
    rows_read: int
    rows_kept: int
    dropped: Mapping[str, int]
    out_of_order: int
    classes: tuple[str, ...]
    unit: str | None = None
    unit_reason: str = ""
    block_tokens: int | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        dropped = ", ".join(f"{rows:,} dropped ({reason})" for reason, rows in self.dropped.items())
        order = f", {self.out_of_order:,} out of order" if self.out_of_order else ""
        return (
            f"{Path(self.path).name} [{self.format}]: {self.rows_read:,} rows read, {self.rows_kept:,} kept, "
            f"{dropped or 'none dropped'}{order}" + "".join(f"; {note}" for note in self._remarks())
        )

    def _remarks(self) -> list[str]:
        """What was decided about the file, in words."""
        known = self.unit_reason or "no times"
        if self.unit:
            known = f"arrivals {'as dates' if self.unit == 'date' else f'in {self.unit}'} ({known})"
        blocks = [f"blocks of {self.block_tokens} tokens"] if self.block_tokens else []
        return [known, *blocks, *self.notes]

    def _repr_html_(self) -> str:
        rows = {
            "format": self.format,
            "rows read": f"{self.rows_read:,}",
            "rows kept": f"{self.rows_kept:,}",
            **{f"dropped: {reason}": f"{rows:,}" for reason, rows in self.dropped.items()},
            "out of order": f"{self.out_of_order:,}",
            "classes": ", ".join(self.classes[:8]) + (", ..." if len(self.classes) > 8 else ""),
            "decided": "; ".join(self._remarks()),
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
    day_first: bool | None = None,
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
    unit : of arrivals that are numbers, ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``; by default it is decided
        from the column's name, the size of epochs, the rate that it means and the size of prefix blocks.
    day_first : whether 05/06/2023 is in June; by default as a day above 12 tells.
    invalid : ``"raise"`` refuses a file with a bad value and names its row; ``"drop"`` drops such
        rows and counts them. Requests with 0 output tokens are failures: dropped and counted in both.
    token_counter : text -> tokens, for ShareGPT; by default `mistral_token_counter()`.
    progress : show the rows read so far on stderr.
    **columns : the file's columns for ``arrival_s``, ``input_tokens``, ``output_tokens``, ``class_``
        (one or several) and ``prefix_blocks``; paths with dots for nested members. For a known format they
        replace single columns of its mapping. ``arrival_s=None`` reads a file without times.

    Returns
    -------
    Trace. It holds 17 bytes a request, so that 44 million requests fit in 1 GB; a file far from
    sorted by time needs twice that while it is sorted. Where counts are enough, `reduce_trace` needs
    constant memory.

    Raises
    ------
    TraceError
        For a wrong, empty, damaged or truncated file, a missing column, a count that is negative,
        fractional or no number, dates with and without a zone in one file, times whose unit or order of
        day and month stays in doubt, and a file of which no request is left.

    Examples
    --------
    >>> read_trace("log.csv", arrival_s="ts", input_tokens="prompt", output_tokens="gen")  # doctest: +SKIP
    """
    scan = _Scan(
        path,
        format,
        unit=unit,
        day_first=day_first,
        invalid=invalid,
        token_counter=token_counter,
        progress=progress,
        **columns,
    )
    table = _Table()
    for chunk in scan.chunks():
        table.append(chunk)
    if not scan.report.rows_kept:
        raise TraceError(f"{scan.path.name}: no requests are left; {scan.report!r}")
    return Trace(table.frame(scan.report.classes), scan.report)


def reduce_trace(
    path: str | Path,
    format: str = "auto",
    *,
    window_s: float | None = None,
    align_s: float | None = None,
    until_s: float | None = None,
    joint: bool = False,
    bucket: float = 0.0,
    **options: Any,
) -> tuple[pd.DataFrame, ReadReport]:
    """Reduce a trace of any size to counts of requests per length, in one pass.

    Memory depends on the different lengths (or pairs) per class and window, not on the requests.

    Parameters
    ----------
    path, format, **options : as in `read_trace`.
    window_s : width of a time window, seconds; without it all requests are in window 0.
    align_s : the first window starts at the last multiple of ``align_s`` seconds on the file's clock
        before its first row (86,400 aligns dates to midnight); without it at the first row.
    until_s : length of the period from the start of the first window, seconds; later rows are
        dropped and counted.
    joint : count pairs of prompt and output length instead of each length by itself.
    bucket : above 0, lengths whose logarithms lie in one bucket of that width count as one (with 0.05,
        lengths that are within 5 %): 44 million requests then have thousands of pairs a window.

    Returns
    -------
    counts : DataFrame sorted by its columns ``class``, ``window``, ``field`` (``"input"``, ``"output"``)
        and ``tokens``, or, if joint, ``class``, ``window``, ``input`` and ``output``, with the number of
        ``requests``. The earliest window is 0; a bucket stands at its mean lengths, rounded.
    report : ReadReport
    """
    if not 0 <= bucket < 1:
        raise ValueError(f"bucket: {bucket}; expected a width from 0 to below 1, such as 0.05")
    key = ["class", "window", *(("input", "output") if joint else ("field", "tokens"))]
    scan = _Scan(path, format, **options)
    late = 0
    counts: list[pa.Table] = []
    waiting: list[pa.Table] = []
    for chunk in scan.chunks():
        arrival = chunk.arrival + (scan.origin_s % align_s if align_s else 0.0)
        if window_s is not None and np.isnan(arrival[0]):
            raise TraceError(f"{scan.path.name}: no arrival times; expected them for windows")
        window = np.floor(arrival / (window_s or np.inf))
        cells = {"class": chunk.codes, "window": np.nan_to_num(window).astype(np.int32)}
        within = np.ones(arrival.size, bool) if until_s is None else ~(arrival >= until_s)
        late += int((~within).sum())
        parts = [{"input": chunk.inputs, "output": chunk.outputs}]
        if not joint:
            fields = enumerate((chunk.inputs, chunk.outputs))
            parts = [{"field": np.full(arrival.size, f, np.int8), "tokens": tokens} for f, tokens in fields]
        for part in parts:
            sums = {f"sum {k}": v.astype(np.int64) for k, v in part.items() if k != "field"} if bucket else {}
            part = {k: v if k == "field" or not bucket else _bucket(v, bucket) for k, v in part.items()}
            waiting.append(pa.table({**cells, **part, "requests": np.ones(arrival.size, np.int64), **sums}))
            if not within.all():
                waiting[-1] = waiting[-1].filter(pa.array(within))
        if sum(map(len, waiting)) > _ROWS_AT_ONCE:
            counts, waiting = [_summed([*counts, *waiting], key)], []
    report = scan.report
    if late:
        dropped = {**report.dropped, AFTER_PERIOD: late}
        report = replace(report, rows_kept=report.rows_kept - late, dropped=dropped)
    if not report.rows_kept:
        raise TraceError(f"{scan.path.name}: no requests are left; {report!r}")
    cells = _summed([*counts, *waiting], key)
    counts, waiting = [], []
    for name in key if bucket else ():
        if f"sum {name}" in cells.column_names:
            mean = pc.cast(
                pc.round(pc.divide(pc.cast(cells[f"sum {name}"], pa.float64()), cells["requests"])),
                pa.int32(),
            )
            cells = cells.drop_columns(f"sum {name}").set_column(cells.column_names.index(name), name, mean)
    # Two buckets may have one rounded mean.
    table = (_summed([cells], key) if bucket else cells).to_pandas()
    table["class"] = np.array(report.classes, object)[table["class"]]
    if not joint:
        table["field"] = np.array(["input", "output"], object)[table["field"]]
    table["window"] = (table["window"] - table["window"].min()).astype(np.int32)
    return table.sort_values(key, ignore_index=True)[[*key, "requests"]], report


def _summed(parts: list[pa.Table], key: list[str]) -> pa.Table:
    table = pa.concat_tables(parts)
    values = [name for name in table.column_names if name not in key]
    table = table.group_by(key).aggregate([(name, "sum") for name in values])
    return table.rename_columns({f"{name}_sum": name for name in values})


def _bucket(tokens: NDArray[np.int32], width: float) -> NDArray[np.int32]:
    """Which logarithmic bucket each length lies in; 0 has one of its own."""
    return np.where(tokens > 0, 1 + np.log(np.maximum(tokens, 1)) // np.log1p(width), 0).astype(np.int32)


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


class _Scan:
    """One pass over a trace; parameters and errors as in `read_trace`.

    ``origin_s`` is the arrival of the first kept row on the file's own clock, seconds (for dates,
    since 1970), known from the first chunk on; ``report`` is there once the scan has come to its end.
    """

    def __init__(
        self,
        path: str | Path,
        format: str = "auto",
        *,
        unit: str | None = None,
        day_first: bool | None = None,
        invalid: str = "raise",
        token_counter: Callable[[str], int] | None = None,
        progress: bool = False,
        **columns: str | tuple[str, ...] | None,
    ) -> None:
        for name, value, choices in (
            ("unit", unit, (None, *UNITS)),
            ("invalid", invalid, ("raise", "drop")),
            ("format", format, ("auto", *FORMATS)),
        ):
            if value not in choices:
                raise ValueError(f"{name}: {value!r}; expected one of {', '.join(map(repr, choices))}")
        for keyword in columns:
            if keyword not in _COLUMN_KEYWORDS:
                raise TypeError(
                    f"unknown keyword {keyword!r}; columns are named by {', '.join(_COLUMN_KEYWORDS)}"
                )
        mapping = {_COLUMN_KEYWORDS[keyword]: source for keyword, source in columns.items()}
        for tidy in ("input_tokens", "output_tokens"):
            if mapping.get(tidy, tidy) is None:
                raise TypeError(
                    f"{tidy}: None; expected a column (only arrival_s, class_, prefix_blocks can be left out)"
                )
        self.path = Path(path)
        self.origin_s = 0.0
        self._head = Head.of(self.path)
        layout = (
            self._head.recognise(mapping)
            if format == "auto"
            else FORMATS[format].fitted(self._head.columns(), mapping) or FORMATS[format].first()
        )
        if layout.name == "sharegpt" and mapping:
            raise TypeError(f"{next(iter(columns))}: a ShareGPT file has no columns")
        self.layout = layout.mapped(mapping)
        self._head.check(self.layout)
        self._unit, self._day_first = unit, day_first
        self._drop_bad = invalid == "drop"
        self._token_counter = token_counter
        self._progress = progress
        self._named = columns
        self._notes: dict[str, None] = {}
        if layout.name == "headerless":
            self._note("no header: the columns are taken as arrival, input and output tokens")

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def chunks(self) -> Iterator[Chunk]:
        """The checked rows as NumPy arrays; codes are positions in the report's classes."""
        name = self.path.name
        authority = "" if self.layout.zone is None else f"files of format {self.layout.name!r}"
        comma = self._head.container == "csv" and self._head.dialect.separator == ";"
        clock = Clock(self.layout.zone, self._day_first, comma, authority)
        cleaner = Cleaner(name, self.layout, self._drop_bad, clock, self._unit)
        rows = raw_rows(
            self._head,
            self.layout,
            self._drop_bad,
            lambda: self._token_counter or mistral_token_counter(),
            self._note,
        )
        bar = tqdm(desc=name, unit=" rows", unit_scale=True, disable=not self._progress)
        try:
            for raw in rows:
                chunk = cleaner.clean(raw)
                bar.update(raw.rows)
                self.origin_s = cleaner.origin_s
                if chunk.arrival.size:
                    yield chunk
        except Doubt as doubt:
            settled = {"unit": "s", "day_first": True, "arrival_s": None}[doubt.option]
            call = self._head.call(**{**self._named, doubt.option: settled})
            choices = {"unit": "; say which (s, ms, us or ns)", "day_first": "; say which"}
            raise TraceError(
                f"{name}: {doubt}{choices.get(doubt.option, '; without times')}: {call}"
            ) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(f"{name} after row {cleaner.rows_read}: {plain_reason(error)}") from error
        finally:
            bar.close()
        if cleaner.rows_read == 0:
            raise TraceError(f"{name}: no rows; expected at least one request")
        self.report = ReadReport(
            str(self.path),
            self.layout.name,
            cleaner.rows_read,
            cleaner.rows_kept,
            dict(sorted(cleaner.dropped.items())),
            cleaner.out_of_order,
            tuple(cleaner.classes),
            cleaner.unit,
            cleaner.reason,
            cleaner.block_tokens,
            tuple(self._notes),
        )


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
