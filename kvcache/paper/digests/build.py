"""Building digests from raw traces, reduced files or published quantiles."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvcache.files import atomic_path
from kvcache.lengths import LengthDistribution
from kvcache.paper.digests import DAY_S, METADATA, digests_dir, read_facts
from kvcache.paper.digests.sources import QUANTILES, DigestSource, PublishedQuantiles, Sources, load_sources
from kvcache.traces import TraceError, read_trace, reduce_trace
from kvcache.traces.prefixes import PrefixStats, prefix_stats
from kvcache.traces.rows import ZERO_OUTPUT

__all__ = ["build_digest", "find_input"]

_FIELDS = ("output", "input", "prefix")
_KEYS = ["field", "class", "window", "tokens"]


@dataclass(frozen=True)
class _Reduced:
    """Counts of one trace, (field, class, window, tokens, requests), and what is known of them."""

    counts: pd.DataFrame
    rows_read: int
    rows_kept: int
    dropped: Mapping[str, int]
    made_from: str
    windowed: bool = True
    reconstructed: bool = False
    prefix: PrefixStats | None = None


def build_digest(source: DigestSource, raw: str | Path, sources: Sources | None = None) -> Path | None:
    """Build ``data/digests/NAME.parquet`` from the first of the digest's inputs that ``raw`` holds.

    Returns the file, or None where ``raw`` has none of the inputs; an exact digest is not replaced
    by one from published quantiles. The bytes depend on the input only.

    Raises
    ------
    TraceError
        If an input cannot be read.
    """
    reduced = _reduce(source, Path(raw), load_sources() if sources is None else sources)
    return None if reduced is None else _write(source, reduced)


def find_input(raw: Path, name: str, sources: Sources) -> Path | None:
    """The file of ``raw`` that an input's name stands for, also packed or under another name."""
    for candidate in (name, *sources.files[name].also):
        for suffix in ("", ".gz", ".zst"):
            if (raw / (candidate + suffix)).is_file():
                return raw / (candidate + suffix)
    return None


def _reduce(source: DigestSource, raw: Path, sources: Sources) -> _Reduced | None:
    for name in source.inputs:
        if name == QUANTILES:
            built = digests_dir() / f"{source.name}.parquet"
            exact = built.is_file() and not read_facts(built)["reconstructed"]
            return None if exact else _from_quantiles(source)
        path = find_input(raw, name, sources)
        if path is None:
            continue
        if name == "servegen_windows.parquet":
            return _from_servegen(source, path)
        if name == "sharegpt_lengths.parquet":
            return _from_lengths(path)
        return _from_trace(source, path)
    return None


def _from_trace(source: DigestSource, path: Path) -> _Reduced:
    counts, report = reduce_trace(
        path,
        window_s=source.window_s,
        align_s=source.align_s,
        until_s=source.until_s,
        progress=sys.stderr.isatty(),
    )
    reduced = _Reduced(counts, report.rows_read, report.rows_kept, report.dropped, path.name)
    if source.prefix_block_tokens is None:
        return reduced
    requests = read_trace(path).requests
    windows = (requests["arrival_s"] // (source.window_s or np.inf)).astype(np.int32)
    stats, leading = prefix_stats(
        requests["prefix_blocks"],
        requests["input_tokens"],
        block_tokens=source.prefix_block_tokens,
        windows=windows,
    )
    found = pd.DataFrame({"window": windows, "tokens": leading}).value_counts(sort=False)
    prefix = found.rename("requests").reset_index().assign(field="prefix", **{"class": report.classes[0]})
    return replace(reduced, counts=pd.concat([counts, prefix[counts.columns]]), prefix=stats)


def _from_servegen(source: DigestSource, path: Path) -> _Reduced:
    """The windows of one model.

    Requests are fractional there (a share of each client's rate), so their running sums over tokens
    are rounded: the number of requests up to any length is off by at most a half.
    """
    table = pq.read_table(path, filters=[("model", "==", source.model)]).to_pandas()
    if table.empty:
        raise TraceError(f"{path.name}: no rows of model {source.model!r}")
    if source.window_s is None or (table["window_start_s"] % source.window_s).any():
        raise TraceError(f"{path.name}: window_start_s is no multiple of window_s = {source.window_s}")
    table["field"] = table["field"].astype(str).str.removesuffix("_tokens")
    table["window"] = (table["window_start_s"] // source.window_s).astype(np.int32)
    table["class"] = source.model
    requests = table["requests"].astype(np.float64)
    zero = (table["field"] == "output") & (table["tokens"] == 0)
    read = float(requests[table["field"] == "output"].sum())
    dropped = float(requests[zero].sum())
    table = table.assign(requests=requests)[~zero].sort_values([*_KEYS[:3], "tokens"], ignore_index=True)
    table["requests"] = (
        table.groupby(["field", "window"])["requests"]
        .transform(lambda weights: _whole_counts(weights.to_numpy()))
        .astype(np.int64)
    )
    counts = table[table["requests"] > 0]
    return _Reduced(
        counts, round(read), round(read) - round(dropped), {ZERO_OUTPUT: round(dropped)}, path.name
    )


def _from_lengths(path: Path) -> _Reduced:
    """Response and context tokens per assistant turn, without texts, times or speakers."""
    table = pq.read_table(path, columns=["context_tokens", "response_tokens"]).to_pandas()
    kept = table[table["response_tokens"] > 0]
    parts = [
        kept[column].value_counts().rename_axis("tokens").rename("requests").reset_index().assign(field=name)
        for name, column in (("output", "response_tokens"), ("input", "context_tokens"))
    ]
    counts = pd.concat(parts).assign(window=0, **{"class": "all"})
    dropped = len(table) - len(kept)
    return _Reduced(
        counts, len(table), len(kept), {ZERO_OUTPUT: dropped} if dropped else {}, path.name, windowed=False
    )


def _from_quantiles(source: DigestSource) -> _Reduced:
    parts = []
    for name, published in source.quantiles.items():
        distribution = LengthDistribution.from_quantiles(
            published.points,
            published.mean,
            minimum=published.minimum,
            maximum=published.maximum,
            total=published.requests,
        )
        requests = _quantile_counts(distribution, published)
        parts.append(pd.DataFrame({"field": name, "tokens": distribution.tokens, "requests": requests}))
    counts = pd.concat(parts).assign(window=0, **{"class": "all"})
    requests = next(iter(source.quantiles.values())).requests
    return _Reduced(
        counts[counts["requests"] > 0],
        requests,
        requests,
        {},
        "published quantiles",
        windowed=False,
        reconstructed=True,
    )


def _whole_counts(weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole counts whose running sums are those of the weights, rounded."""
    return np.diff(np.rint(np.cumsum(weights)).astype(np.int64), prepend=0)


def _quantile_counts(distribution: LengthDistribution, published: PublishedQuantiles) -> NDArray[np.int64]:
    """Whole counts, rounded as above but never across a published quantile, which so stays exact."""
    sums = np.cumsum(distribution.weights)
    whole = np.rint(sums).astype(np.int64)
    for p, x in sorted(published.points.items()):
        least = int(np.ceil(p * published.requests - 1e-6))
        whole = np.where(distribution.tokens < x, np.minimum(whole, least - 1), np.maximum(whole, least))
    whole[-1] = published.requests
    # The ends of the support are published too: each keeps at least one request.
    whole = np.minimum(
        np.maximum(whole, 1), np.where(np.arange(whole.size) < whole.size - 1, whole[-1] - 1, whole[-1])
    )
    return np.diff(whole, prepend=0)


def _write(source: DigestSource, reduced: _Reduced) -> Path:
    counts = reduced.counts
    fields = [name for name in _FIELDS if (counts["field"] == name).any()]
    frame = counts.assign(
        field=pd.Categorical(counts["field"], fields),
        **{"class": pd.Categorical(counts["class"], sorted(set(counts["class"])))},
    ).sort_values(_KEYS, ignore_index=True)
    output = frame[frame["field"] == "output"]
    windows = int(output["window"].max()) + 1
    width = source.window_s if reduced.windowed else None
    longest = frame.groupby("field", observed=True)["tokens"].max()
    facts = {
        "name": source.name,
        "made_from": reduced.made_from,
        "rows_read": reduced.rows_read,
        "rows_kept": reduced.rows_kept,
        "dropped": dict(reduced.dropped),
        "requests": int(output["requests"].sum()),
        "classes": list(frame["class"].cat.categories),
        "window_s": width,
        "windows": int(output["window"].nunique()),
        "days": (windows * width - 1) // DAY_S + 1 if width else 1,
        "upper": {
            name: max(int(longest[name]), source.upper_output if name == "output" else source.upper_input)
            for name in fields
        },
        "reconstructed": reduced.reconstructed,
        **({"prefix_stats": asdict(reduced.prefix)} if reduced.prefix else {}),
    }
    integers = {"window": np.int32, "tokens": np.int32, "requests": np.int64}
    columns = {name: frame[name].to_numpy(kind) for name, kind in integers.items()}
    table = pa.table({"field": frame["field"], "class": frame["class"], **columns}).replace_schema_metadata(
        {METADATA: json.dumps(facts, separators=(",", ":"))}
    )
    sizes = [int((frame["field"] == name).sum()) for name in fields]
    content = _parquet_bytes(table, sizes)
    path = digests_dir() / f"{source.name}.parquet"
    # An equal file keeps its time, so that nothing made from it is out of date.
    if not path.is_file() or path.read_bytes() != content:
        with atomic_path(path) as partial:
            partial.write_bytes(content)
    return path


def _parquet_bytes(table: pa.Table, row_groups: Sequence[int]) -> bytes:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=19,
        use_dictionary=["field", "class", "window"],
        column_encoding={"tokens": "DELTA_BINARY_PACKED", "requests": "DELTA_BINARY_PACKED"},
        write_statistics=False,
        store_schema=True,
    ) as writer:
        begin = 0
        for rows in row_groups:
            writer.write_table(table.slice(begin, rows), row_group_size=rows)
            begin += rows
    return sink.getvalue().to_pybytes()
