"""Joint digests: how many requests of a trace have each pair of prompt and output length.

The memory of an engine depends on both together. ``data/digests/joint/NAME.parquet`` holds ``(half, input,
output, requests)``, sorted, for traces whose requests are at hand one by one and not by the million. Half 0
has the 1st, 3rd, 5th ... request in order of arrival and half 1 the others: what is chosen on one is judged
on the other.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from kvcache.engine import JointLengths
from kvcache.files import atomic_path
from kvcache.paper.digests import digest_path, digests_dir, read_facts
from kvcache.paper.digests.build import find_input
from kvcache.paper.digests.sources import DigestSource, Sources
from kvcache.traces import read_trace

__all__ = ["JOINT", "build_joint", "load_joint"]

#: The traces that have a joint digest.
JOINT = ("burstgpt-week1", "azure-2023-code", "azure-2023-conv", "mooncake-conversation", "sharegpt")


def load_joint(name: str, half: int | None = None) -> JointLengths:
    """Prompt and output lengths of a trace together, of all requests or of one half.

    Parameters
    ----------
    name : one of `JOINT`. The bound of the outputs is that of the trace's digest.
    half : 0 or 1, see the module.

    Raises
    ------
    ValueError
        For a name without joint digest, or another half.
    """
    path = _joint_path(digest_path(name).stem)
    if not path.is_file():
        raise ValueError(f"digest {name!r}: no joint digest; there are {', '.join(JOINT)}")
    if half not in (None, 0, 1):
        raise ValueError(f"half: {half}; expected 0, 1 or None")
    table = pq.read_table(path)
    columns = [table.column(c).to_numpy() for c in ("input", "output", "requests")]
    if half is not None:
        columns = [c[table.column("half").to_numpy() == half] for c in columns]
    label = path.stem if half is None else f"{path.stem}, half {half}"
    return JointLengths.from_counts(*columns, read_facts(digest_path(name))["upper"]["output"], name=label)


def build_joint(source: DigestSource, raw: Path, sources: Sources) -> Path | None:
    """Build the joint digest from the first of the trace's inputs that ``raw`` holds.

    Returns the file, or None for a trace that is not in `JOINT` or without input. The bytes depend on the
    input only.
    """
    path = next(filter(None, (find_input(raw, name, sources) for name in source.inputs)), None)
    if source.name not in JOINT or path is None:
        return None
    requests = _requests(source, path)
    counts = requests.assign(half=np.arange(len(requests), dtype=np.int8) % 2).value_counts(sort=False)
    table = pa.Table.from_pandas(
        counts.rename("requests").astype(np.int32).reset_index().sort_values(["half", "input", "output"]),
        schema=pa.schema(
            {"half": pa.int8(), "input": pa.int32(), "output": pa.int32(), "requests": pa.int32()}
        ),
        preserve_index=False,
    ).replace_schema_metadata(None)
    target = _joint_path(source.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as partial:
        pq.write_table(
            table,
            partial,
            compression="zstd",
            compression_level=19,
            use_dictionary=["half", "requests"],
            column_encoding={"input": "DELTA_BINARY_PACKED", "output": "DELTA_BINARY_PACKED"},
            write_statistics=False,
        )
    return target


def _requests(source: DigestSource, path: Path) -> pd.DataFrame:
    """(input, output) per request with output, in order."""
    if path.name.startswith("sharegpt_lengths"):
        table = pq.read_table(path, columns=["context_tokens", "response_tokens"]).to_pandas()
        table.columns = ["input", "output"]
        return table[table["output"] > 0]
    requests = read_trace(path).requests
    if source.until_s is not None:
        requests = requests[requests["arrival_s"] < source.until_s]
    return pd.DataFrame({"input": requests["input_tokens"], "output": requests["output_tokens"]})


def _joint_path(name: str) -> Path:
    return digests_dir() / "joint" / f"{name}.parquet"
