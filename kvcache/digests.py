"""Digests: whole traces as counts of requests per length, small enough to be committed.

One Parquet file per trace under ``data/digests`` holds ``(field, class, window, tokens, requests)``,
sorted, one row group per field. ``python -m kvcache.digests build --raw DIR`` makes them from the
originals or the reduced files that DIR holds, as ``data/sources.toml`` says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from kvcache.files import atomic_path, project_root
from kvcache.lengths import LengthDistribution
from kvcache.sources import QUANTILES, DigestSource, PublishedQuantiles, Sources, load_sources
from kvcache.traces import ZERO_OUTPUT, TraceError, reduce_trace, scan_trace

__all__ = [
    "PrefixStats",
    "build_digest",
    "build_digests",
    "digest_counts",
    "digest_windows",
    "list_digests",
    "load_digest",
    "load_digests",
    "load_prefix_stats",
    "prefix_stats",
]

DAY_S = 86_400
FIELDS = ("output", "input", "prefix")
_KEYS = ["field", "class", "window", "tokens"]
_METADATA = b"kvcache"
_CACHE_BLOCKS = tuple(2**k for k in range(8, 19))


# ---- reading --------------------------------------------------------------------------------------


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
    ``data/sources.toml``) whatever the filters; ``reconstructed`` is True where it comes from published quantiles.

    Raises
    ------
    ValueError
        For a name or a filter value that does not exist, with the choices, and for filters that
        leave no request.
    """
    digest = _load(name, field)
    chosen = _select(digest, class_, model, log, window, day)
    label = digest.name + "".join(
        f", {key} {_shown(value)}"
        for key, value in (
            ("class", class_),
            ("model", model),
            ("log", log),
            ("window", window),
            ("day", day),
        )
        if value is not None
    )
    return _distribution(digest, chosen, label if field == "output" else f"{label}, {field}")


def load_digests(name: str, by: str, **filters: Any) -> dict[Any, LengthDistribution]:
    """Distributions of a trace by ``"window"``, ``"day"``, ``"class"``, ``"model"`` or ``"log"``.

    ``filters`` are those of `load_digest`. Keys come in order of time, or of the classes; parts
    without a request are left out.
    """
    options = {"field": "output", "class_": None, "model": None, "log": None, "window": None, "day": None}
    unknown = sorted(set(filters) - set(options))
    if unknown:
        raise TypeError(f"unknown filter {unknown[0]!r}; expected one of {', '.join(options)}")
    options.update(filters)
    digest = _load(name, options.pop("field"))
    chosen = _select(digest, **options)
    if by in ("window", "day"):
        keys = digest.windows if by == "window" else digest.days
        values = np.unique(keys[chosen]).tolist()
        masks = {value: chosen & (keys == value) for value in values}
    elif by in ("class", "model", "log"):
        parts = [_part(label, by) for label in digest.labels]
        masks = {
            value: chosen & np.isin(digest.codes, [i for i, p in enumerate(parts) if p == value])
            for value in dict.fromkeys(parts)
        }
    else:
        raise ValueError(f"by: {by!r}; expected 'window', 'day', 'class', 'model' or 'log'")
    return {
        value: _distribution(digest, mask, f"{digest.name}, {by} {value}")
        for value, mask in masks.items()
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
    """The time windows of a digest: window, start_s, end_s (seconds from the start of the first), day, requests."""
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
        facts = _facts(_path(name))
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


def _folder() -> Path:
    return project_root() / "data" / "digests"


def _names() -> list[str]:
    found = {path.stem for path in _folder().glob("*.parquet")}
    known = [name for name in load_sources().digests if name in found]
    return known + sorted(found - set(known))


def _path(name: str) -> Path:
    path = _folder() / f"{name.strip().lower().replace('_', '-')}.parquet"
    if not path.is_file():
        names = _names()
        choices = ", ".join(names) if names else f"none in {_folder()}; make digests RAW=folder builds them"
        raise ValueError(f"digest {name!r}: no such digest; there are {choices}")
    return path


def _facts(path: Path) -> dict[str, Any]:
    return json.loads(pq.read_metadata(path).metadata[_METADATA])


def _load(name: str, field: str) -> _Digest:
    path = _path(name)
    return _read(path, path.stat().st_mtime_ns, field)


@lru_cache(maxsize=32)
def _read(path: Path, _modified: int, field: str) -> _Digest:
    with pq.ParquetFile(path) as file:
        facts = json.loads(file.metadata.metadata[_METADATA])
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


def _part(label: str, by: str) -> str:
    if by == "class":
        return label
    model, _, log = label.partition("/")
    return model if by == "model" else log


def _values(given: Any) -> list[Any]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]
    return list(given)


def _shown(given: Any) -> str:
    values = _values(given)
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return "+".join(map(str, values))


def _select(digest: _Digest, class_: Any, model: Any, log: Any, window: Any, day: Any) -> NDArray[np.bool_]:
    chosen = np.ones(digest.tokens.size, bool)
    for key, by, given in (("class_", "class", class_), ("model", "model", model), ("log", "log", log)):
        if given is None:
            continue
        parts = [_part(label, by) for label in digest.labels]
        wanted = _values(given)
        _check(digest, key, wanted, list(dict.fromkeys(parts)))
        chosen &= np.isin(digest.codes, [i for i, part in enumerate(parts) if part in wanted])
    for key, given, values in (("window", window, digest.windows), ("day", day, digest.days)):
        if given is None:
            continue
        wanted = _values(given)
        _check(digest, key, wanted, np.unique(values).tolist())
        chosen &= np.isin(values, wanted)
    return chosen


def _check(digest: _Digest, key: str, wanted: Sequence[Any], choices: Sequence[Any]) -> None:
    if not wanted:
        raise ValueError(f"{key}: empty; digest {digest.name!r} has {_choices(choices)}")
    for value in wanted:
        if value not in choices:
            raise ValueError(f"{key}: {value!r}; digest {digest.name!r} has {_choices(choices)}")


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


# ---- prefix sharing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefixStats:
    """How much of the prompts a prefix cache could serve.

    Attributes
    ----------
    requests, block_tokens : requests of the trace; tokens of a full block.
    input_tokens, shared_tokens : prompt tokens in all, and those in leading blocks that an earlier
        request has brought. The cache is unlimited, and blocks count from the arrival on.
    sharing_requests : requests with at least one shared leading block.
    by_window : per time window of the digest: window, requests, input_tokens, shared_tokens.
    by_cache : per capacity of a least-recently-used cache in blocks: capacity_blocks, shared_tokens.
    """

    requests: int
    block_tokens: int
    input_tokens: int
    shared_tokens: int
    sharing_requests: int
    by_window: tuple[Mapping[str, int], ...]
    by_cache: tuple[Mapping[str, int], ...]

    @property
    def shared_share(self) -> float:
        """Share of all prompt tokens that lie in leading blocks seen before."""
        return self.shared_tokens / self.input_tokens

    @property
    def mean_prefix_tokens(self) -> float:
        """Mean leading shared-prefix tokens of a request, the L_pre of MODEL (1)-(6e)."""
        return self.shared_tokens / self.requests

    @property
    def mean_input_tokens(self) -> float:
        """Mean prompt length, tokens: the L_in beside that L_pre."""
        return self.input_tokens / self.requests

    def window_table(self) -> pd.DataFrame:
        """``by_window`` as a table, with the share of shared prompt tokens."""
        table = pd.DataFrame(list(self.by_window))
        return table.assign(shared_share=table.shared_tokens / table.input_tokens)

    def cache_table(self) -> pd.DataFrame:
        """``by_cache`` as a table, with the capacity in tokens and the share of shared prompt tokens."""
        table = pd.DataFrame(list(self.by_cache))
        return table.assign(
            capacity_tokens=table.capacity_blocks * self.block_tokens,
            shared_share=table.shared_tokens / self.input_tokens,
        )


def load_prefix_stats(name: str) -> PrefixStats:
    """The prefix-sharing statistics of a digest whose trace has block ids (ValueError otherwise)."""
    path = _path(name)
    found = _facts(path).get("prefix_stats")
    if found is None:
        having = [n for n in _names() if "prefix_stats" in _facts(_path(n))]
        raise ValueError(
            f"digest {path.stem!r}: its trace has no prefix blocks; {', '.join(having) or 'none'} has"
        )
    return PrefixStats(**{key: tuple(v) if isinstance(v, list) else v for key, v in found.items()})


def prefix_stats(
    blocks: Sequence[ArrayLike],
    input_tokens: ArrayLike,
    *,
    block_tokens: int = 512,
    windows: ArrayLike | None = None,
    capacities: Sequence[int] = _CACHE_BLOCKS,
) -> tuple[PrefixStats, NDArray[np.int64]]:
    """Prefix sharing of requests in order of arrival.

    Parameters
    ----------
    blocks : per request, the ids of its prompt's blocks in order; an id stands for the block and all before it.
    input_tokens : (n,) prompt lengths; the last block of a prompt may be partly filled.
    windows : (n,) time window of each request, all 0 by default.
    capacities : sizes, in blocks, of the least-recently-used caches to try.

    Returns
    -------
    stats : PrefixStats
    leading : (n,) tokens in leading blocks that an earlier request has brought (unlimited cache).
    """
    lengths = np.asarray(input_tokens, np.int64)
    slots = np.zeros(lengths.size, np.int64) if windows is None else np.asarray(windows, np.int64)
    chains = [np.asarray(ids, np.int64).tolist() for ids in blocks]
    if len(chains) != lengths.size:
        raise ValueError(f"blocks: {len(chains)} requests; expected {lengths.size} as input_tokens")
    leading = _cached_tokens(chains, lengths, block_tokens, None)
    by_window = tuple(
        {
            "window": int(slot),
            "requests": int((slots == slot).sum()),
            "input_tokens": int(lengths[slots == slot].sum()),
            "shared_tokens": int(leading[slots == slot].sum()),
        }
        for slot in np.unique(slots)
    )
    by_cache = tuple(
        {
            "capacity_blocks": int(capacity),
            "shared_tokens": int(_cached_tokens(chains, lengths, block_tokens, capacity).sum()),
        }
        for capacity in capacities
    )
    stats = PrefixStats(
        lengths.size,
        block_tokens,
        int(lengths.sum()),
        int(leading.sum()),
        int((leading > 0).sum()),
        by_window,
        by_cache,
    )
    return stats, leading


def _cached_tokens(
    chains: Sequence[list[int]], lengths: NDArray[np.int64], block_tokens: int, capacity: int | None
) -> NDArray[np.int64]:
    """(n,) prompt tokens found in a cache of ``capacity`` blocks (None: unlimited) on arrival."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = np.zeros(lengths.size, np.int64)
    for i, chain in enumerate(chains):
        hits = 0
        while hits < len(chain) and chain[hits] in cache:
            hits += 1
        found[i] = min(hits * block_tokens, lengths[i])
        # Last to first, so that a block is evicted before the blocks it depends on.
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while capacity is not None and len(cache) > capacity:
            cache.popitem(last=False)
    return found


# ---- building -------------------------------------------------------------------------------------


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

    Returns the file, or None where ``raw`` has none of the inputs. The bytes depend on the input only.

    Raises
    ------
    TraceError
        If an input cannot be read.
    """
    reduced = _reduce(source, Path(raw), load_sources() if sources is None else sources)
    return None if reduced is None else _write(source, reduced)


def build_digests(raw: str | Path, names: Sequence[str] | None = None) -> dict[str, Path | None]:
    """Build all digests, or those named; None marks those whose inputs ``raw`` does not have."""
    raw = Path(raw)
    if not raw.is_dir():
        raise NotADirectoryError(f"{raw}: no such folder; expected the folder of the raw traces")
    sources = load_sources()
    unknown = sorted(set(names or ()) - set(sources.digests))
    if unknown:
        raise ValueError(
            f"digest {unknown[0]!r}: not in data/sources.toml; there are {', '.join(sources.digests)}"
        )
    return {
        name: build_digest(source, raw, sources)
        for name, source in sources.digests.items()
        if not names or name in names
    }


def _find(raw: Path, name: str, sources: Sources) -> Path | None:
    for candidate in (name, *sources.files[name].also):
        for suffix in ("", ".gz", ".zst"):
            if (raw / (candidate + suffix)).is_file():
                return raw / (candidate + suffix)
    return None


def _reduce(source: DigestSource, raw: Path, sources: Sources) -> _Reduced | None:
    for name in source.inputs:
        if name == QUANTILES:
            return _from_quantiles(source)
        path = _find(raw, name, sources)
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
        path, window_s=source.window_s, align_s=source.align_s, until_s=source.until_s
    )
    reduced = _Reduced(counts, report.rows_read, report.rows_kept, report.dropped, path.name)
    if source.prefix_block_tokens is None:
        return reduced
    batches = list(scan_trace(path))
    arrival = np.concatenate([batch["arrival_s"].to_numpy() for batch in batches])
    lengths = np.concatenate([batch["input_tokens"].to_numpy() for batch in batches])
    blocks = [ids for batch in batches for ids in batch["prefix_blocks"].to_pylist()]
    order = np.argsort(arrival, kind="stable")
    stats, leading = prefix_stats(
        [blocks[i] for i in order],
        lengths[order],
        block_tokens=source.prefix_block_tokens,
        windows=(arrival[order] // (source.window_s or np.inf)).astype(np.int64),
    )
    windows = (arrival[order] // (source.window_s or np.inf)).astype(np.int32)
    prefix = (
        pd.DataFrame({"window": windows - windows.min(), "tokens": leading})
        .value_counts(sort=False)
        .rename("requests")
        .reset_index()
        .assign(field="prefix", **{"class": report.classes[0]})
    )
    return replace(reduced, counts=pd.concat([counts, prefix[counts.columns]]), prefix=stats)


def _from_servegen(source: DigestSource, path: Path) -> _Reduced:
    """The windows of one model. Requests are fractional there (a share of each client's rate), so
    their running sums over tokens are rounded: no count of requests up to a length is off by more than a half."""
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
    fields = [name for name in FIELDS if (reduced.counts["field"] == name).any()]
    frame = reduced.counts.assign(
        field=pd.Categorical(reduced.counts["field"], categories=fields),
        **{"class": pd.Categorical(reduced.counts["class"], categories=sorted(set(reduced.counts["class"])))},
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
    table = pa.table(
        {
            "field": frame["field"],
            "class": frame["class"],
            "window": frame["window"].to_numpy(np.int32),
            "tokens": frame["tokens"].to_numpy(np.int32),
            "requests": frame["requests"].to_numpy(np.int64),
        }
    ).replace_schema_metadata({_METADATA: json.dumps(facts, separators=(",", ":"))})
    path = _folder() / f"{source.name}.parquet"
    sizes = output.shape[0], *(int((frame["field"] == name).sum()) for name in fields[1:])
    with (
        atomic_path(path) as partial,
        pq.ParquetWriter(
            partial,
            table.schema,
            compression="zstd",
            compression_level=19,
            use_dictionary=["field", "class", "window"],
            column_encoding={"tokens": "DELTA_BINARY_PACKED", "requests": "DELTA_BINARY_PACKED"},
            write_statistics=False,
            store_schema=True,
        ) as writer,
    ):
        begin = 0
        for size in sizes:
            writer.write_table(table.slice(begin, size), row_group_size=max(size, 1))
            begin += size
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: ``python -m kvcache.digests list`` and ``... build --raw DIR [names]``."""
    parser = argparse.ArgumentParser(prog="python -m kvcache.digests", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the digests at hand")
    build = commands.add_parser("build", help="build digests from raw traces")
    build.add_argument("--raw", required=True, type=Path, help="folder of the original or reduced traces")
    build.add_argument("names", nargs="*", help="digests to build (default: all)")
    options = parser.parse_args(arguments)
    if options.command == "list":
        print(list_digests().to_string(index=False))
        return 0
    try:
        built = build_digests(options.raw, options.names)
    except (TraceError, ValueError, OSError, ImportError) as error:
        print(f"digests: {error}", file=sys.stderr)
        return 1
    total = 0
    for name, path in built.items():
        if path is None:
            print(f"{name:24} left as it is: {options.raw} has none of its inputs")
            continue
        facts = _facts(path)
        total += path.stat().st_size
        print(
            f"{name:24} {path.stat().st_size / 1e3:8.1f} kB  {facts['requests']:>15,} requests from {facts['made_from']}"
        )
    print(f"{'':24} {total / 1e3:8.1f} kB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
