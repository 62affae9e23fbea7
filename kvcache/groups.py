"""Serving groups: a model on some GPUs of an engine, with the tokens that fit and the step times.

What an engine or a benchmark reports beats measured kernels, and those beat a data sheet; every figure
carries its label.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvcache.engine.steps import FitErrors, StepCost, StepTable
from kvcache.files import atomic_path
from kvcache.hardware import GPU, CacheLayers, Model, ParallelConfig, calibration, check_utilisation
from kvcache.kernels import (
    ENGINES,
    Floats,
    Provenance,
    bundled,
    carried_gpu,
    carried_gpus,
    kernel_steps,
    roofline,
)
from kvcache.models import read_model

__all__ = ["ServingGroup", "bundle", "group", "parallel_choices", "read_kv_tokens", "second_opinion"]

#: Tokens of a block of the pool.
BLOCK = 16

#: Bytes of a GPU that are neither weights nor cache (context, communication, graphs, activations): the
#: least, the middle and the most, from four public start-up logs. A mixture of experts profiles with more,
#: and SGLang's share does not pay for activations and graphs.
OVERHEAD_BYTES = {
    "dense": (2.5e9, 4.0e9, 5.0e9),
    "experts": (3.0e9, 6.0e9, 10.0e9),
    "sglang": (2.0e9, 3.0e9, 4.0e9),
}


@dataclass(frozen=True, eq=False)
class ServingGroup:
    """One group of GPUs that serves a model: its pool, its step times and what they assume.

    Parameters
    ----------
    model, gpu, engine, parallel : what runs where; ``engine`` is one of `ENGINES`.
    kv_tokens, kv_tokens_low, kv_tokens_high : M, tokens of the pool, and the interval it is known to.
    cost : linear step cost over the group's B, K and P, whatever the pipeline.
    cost_error : how far ``cost`` is from ``table`` where it was fitted.
    table : step times on a grid.
    memory_utilisation : share of a GPU's memory that the engine may use; of what the weights leave where
        the engine is TensorRT-LLM.
    cache_dtype : ``auto``, ``bfloat16`` or ``fp8``.
    max_num_batched_tokens, max_num_seqs, max_model_len : limits the engine is started with.
    provenance : of ``kv_tokens`` and of ``steps``.
    """

    model: Model
    gpu: GPU
    engine: str
    parallel: ParallelConfig
    kv_tokens: int
    kv_tokens_low: int
    kv_tokens_high: int
    cost: StepCost
    cost_error: FitErrors
    table: StepTable
    memory_utilisation: float
    cache_dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    provenance: Mapping[str, Provenance] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Label of the configuration, such as ``TP4xPP1``."""
        return self.parallel.name

    @property
    def gpus(self) -> int:
        """GPUs of one group."""
        return self.parallel.gpus

    def refit(self, decoding: float, context: float) -> ServingGroup:
        """The group with its linear cost fitted where it works: about that many requests of that length.

        The fit takes the table's points within a factor of two of both, wider where there are too few, and
        all numbers of prompt tokens.
        """
        for factor in (2.0, 4.0, 16.0, 256.0):
            try:
                cost, error = self.table.linear(
                    decoding=(decoding / factor, decoding * factor),
                    context=(context / factor, context * factor),
                )
            except ValueError:
                continue
            return replace(self, cost=cost, cost_error=error)
        raise ValueError(
            f"{self.name}: no table points near {decoding:g} requests of {context:g} tokens; expected within "
            f"{self.table.decoding[-1]:g} requests and {self.table.cached_tokens[-1]:g} tokens"
        )


def group(
    model: str | Path | Model,
    gpu: str | GPU,
    engine: str = "vllm",
    parallel: ParallelConfig = ParallelConfig(1),  # noqa: B008 - frozen
    *,
    memory_utilisation: float = 0.9,
    cache_dtype: str = "auto",
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    max_model_len: int | None = None,
    prompt_tokens: int = 1024,
    context: int = 2048,
    kv_tokens: int | str | Path | None = None,
    steps: pd.DataFrame | str | Path | None = None,
) -> ServingGroup:
    """A serving group, from measured kernels where they exist.

    Parameters
    ----------
    model : a name, a folder, a ``config.json`` (see `kvcache.models.read_model`) or a `Model`.
    gpu : a name among `carried_gpus`, or a `GPU` with the numbers of its data sheet.
    engine, parallel : one of `ENGINES`; degrees of parallelism.
    memory_utilisation, cache_dtype, max_num_batched_tokens, max_num_seqs, max_model_len : as the engine is
        started; ``auto`` keeps the cache as the checkpoint says, the longest sequence is the model's.
    prompt_tokens : length of a prompt whose attention a prefilled token pays: E[L^2] / E[L].
    context : tokens that a running request holds; matters with sliding windows or a state per request.
    kv_tokens : the pool as the engine reported it: tokens, its log or a file with it (`read_kv_tokens`).
    steps : step times as a benchmark found them: columns batch, context, seconds and perhaps prefill.

    Raises
    ------
    ValueError
        For a share that is none, a split that the engine would refuse, weights that leave no room, a
        combination that was not measured, each with its numbers.
    ModuleNotFoundError
        For a GPU by name where ``aiconfigurator-core`` is not installed.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; expected one of {ENGINES}")
    check_utilisation(memory_utilisation)
    model = _model(model)
    if cache_dtype not in ("auto", "bfloat16", "fp8"):
        raise ValueError(f"cache_dtype is {cache_dtype!r}; expected auto, bfloat16 or fp8")
    if cache_dtype != "auto":
        model = replace(model, bytes_per_kv=1.0 if cache_dtype == "fp8" else 2.0)
    limits = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len or model.max_position or 131_072,
        "prompt_tokens": prompt_tokens,
        "context": context,
    }
    for name, value in limits.items():
        if isinstance(value, bool) or not np.isfinite(value) or value != int(value) or value < 1:
            raise ValueError(f"{name} is {value}; expected a whole number >= 1")
        limits[name] = int(value)
    if model.max_position and limits["max_model_len"] > model.max_position:
        raise ValueError(
            f"max_model_len is {max_model_len}; expected at most {model.max_position}, the model's longest"
        )
    parallel.check(model)
    sheet = gpu if isinstance(gpu, GPU) else carried_gpu(gpu)
    pool, pool_from = _pool(model, sheet, engine, parallel, memory_utilisation, limits["context"], kv_tokens)
    batches = _grid(limits["max_num_seqs"], parallel.pipeline)
    prompts = _grid(limits["max_num_batched_tokens"] * parallel.pipeline, parallel.pipeline, sparse=True)
    held = np.concatenate([[0.0], np.geomspace(1024, max(pool[2], 2048), 11)])
    if isinstance(gpu, GPU):
        step, steps_from = roofline(model, gpu, parallel, prompt_tokens), Provenance("modelled", "a roofline")
    else:
        step, steps_from = kernel_steps(model, gpu, engine, parallel, prompt_tokens)
    table = StepTable(batches, held, prompts, step(*np.meshgrid(batches, held, prompts, indexing="ij")))
    if steps is not None:
        table, steps_from = _corrected(table, steps)
    cost, error = table.linear(decoding=(1, np.inf), context=(64, 16_384))
    return ServingGroup(
        model,
        sheet,
        engine,
        parallel,
        kv_tokens=pool[1],
        kv_tokens_low=pool[0],
        kv_tokens_high=pool[2],
        cost=cost,
        cost_error=error,
        table=table,
        memory_utilisation=memory_utilisation,
        cache_dtype=cache_dtype,
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        max_num_seqs=limits["max_num_seqs"],
        max_model_len=limits["max_model_len"],
        provenance={"kv_tokens": pool_from, "steps": steps_from},
    )


def second_opinion(group: ServingGroup) -> StepCost | None:
    """The linear step cost fitted to other kernel measurements; None where there are none.

    They are of A100 and H100 at TP 1, 2, 4 and 8 with a 70B model of 80 layers and width 8,192, collected
    for another simulator (``kvcache/data/calibration.json`` has their provenance).
    """
    fit = calibration()
    known = {"a100_sxm": "A100-80GB", "h100_sxm": "H100-80GB"}.get(group.gpu.name, group.gpu.name)
    row = fit["gpus"].get(known, {}).get("measured", {}).get(str(group.parallel.tensor))
    model, stages = group.model, group.parallel.pipeline
    if row is None or model.layers != fit["model"]["layers"] or model.heads * model.head_size != 8192:
        return None
    per_token = row["decode_per_resident_kv_token_s"] * model.kv_bytes_per_token
    return StepCost(
        row["decode_t0_s"] + (stages - 1) * fit["gpus"][known]["send_recv_s"],
        row["decode_per_seq_s"] / stages,
        per_token / fit["model"]["kv_bytes_per_token"] / stages,
        row["prefill_s_per_token"] / stages,
    )


def parallel_choices(
    model: str | Path | Model,
    gpu: str | GPU,
    engine: str = "vllm",
    max_gpus: int = 8,
    *,
    memory_utilisation: float = 0.9,
    max_tensor: int = 8,
) -> tuple[ParallelConfig, ...]:
    """The splits that an engine accepts and whose weights leave room for the cache, smallest first.

    Powers of two: TP up to ``max_tensor`` (the GPUs of a node), PP as far as ``max_gpus`` allow; the experts
    of a mixture each split over all ranks or spread over them.

    Raises
    ------
    ValueError
        When there is none, with the reason of the largest.
    """
    model = _model(model)
    sheet = gpu if isinstance(gpu, GPU) else carried_gpu(gpu)
    kept, reason = [], f"max_gpus is {max_gpus}; expected >= 1"
    for tensor in (1, 2, 4, 8, 16, 32, 64):
        for pipeline in (1, 2, 4, 8):
            if tensor > max_tensor or tensor * pipeline > max_gpus:
                continue
            for expert in {1, tensor if model.experts else 1}:
                parallel = ParallelConfig(tensor, pipeline, expert)
                try:
                    parallel.check(model)
                    _pool(model, sheet, engine, parallel, memory_utilisation, 2048, None)
                except ValueError as error:
                    reason = str(error)
                else:
                    kept.append(parallel)
    if not kept:
        raise ValueError(f"no split of {model.name} over {max_gpus} x {sheet.name} is possible: {reason}")
    return tuple(sorted(kept, key=lambda p: (p.gpus, p.pipeline, p.expert)))


def read_kv_tokens(log: str | Path, block: int = BLOCK) -> int:
    """The pool, tokens, from an engine's start-up log (text, or a file with it); the least of several ranks.

    Known are ``GPU KV cache size: N tokens`` and ``# GPU blocks: N`` of vLLM, ``max_total_num_tokens=N`` and
    ``#tokens: N`` of SGLang, and ``max tokens in paged KV cache (N)`` of TensorRT-LLM.

    Raises
    ------
    ValueError
        When none of these is in it.
    """
    text = str(log)
    if isinstance(log, Path) or ("\n" not in text and len(text) < 4096 and Path(text).is_file()):
        text = Path(log).read_text(encoding="utf-8", errors="replace")
    for pattern, unit in (
        (r"GPU KV cache size:\s*([\d,]+)\s*tokens", 1),
        (r"max_total_num_tokens=([\d,]+)", 1),
        (r"max tokens in paged KV cache \(([\d,]+)\)", 1),
        (r"KV Cache is allocated\.[^\n]*#tokens:\s*([\d,]+)", 1),
        (r"# (?:GPU|CUDA|cuda) blocks:\s*([\d,]+)", block),
    ):
        if found := re.findall(pattern, text):
            return min(int(number.replace(",", "")) for number in found) * unit
    raise ValueError(
        f"{text[:60]!r}: no line of a pool found; expected such as 'GPU KV cache size: 178,880 tokens' "
        "(vLLM) or 'max_total_num_tokens=367404' (SGLang)"
    )


def bundle(path: Path) -> None:
    """Write the coarse tables of `kvcache.kernels.bundled` from the kernels installed: ``make kernels``."""
    models = (
        "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-70B",
        "Qwen/Qwen3-32B",
        "deepseek-ai/DeepSeek-R1",
    )
    gpus = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "l40s")
    tables, versions = [], {}
    for name in models:
        for gpu in gpus:
            try:
                choices = parallel_choices(name, gpu, max_gpus=8)
            except ValueError:
                continue  # no room on eight of them
            for parallel in (choice for choice in choices if choice.pipeline == 1):
                found = group(name, gpu, parallel=parallel, memory_utilisation=0.95, max_num_seqs=512)
                table = found.table
                at = np.ix_(
                    np.isin(table.decoding, (0, 1, 8, 32, 64, 128, 256, 512)),
                    np.arange(table.cached_tokens.size) % 2 == 0,
                    np.isin(table.prefill_tokens, (0, 1, 128, 512, 2048, 8192)),
                )
                axes = (table.decoding, table.cached_tokens, table.prefill_tokens)
                kept = [axis[part.ravel()].round(1).tolist() for axis, part in zip(axes, at, strict=True)]
                tables.append(
                    {
                        "of": [name, gpu, "vllm", parallel.tensor, parallel.expert],
                        "axes": kept,
                        "us": np.rint(1e6 * table.measured[at]).astype(int).ravel().tolist(),
                    }
                )
                versions[gpu] = found.provenance["steps"].source
    keys = ("mem_capacity", "bfloat16_tc_flops", "mem_bw")
    data = {
        "how": "written by kvcache.groups.bundle; us: microseconds of iterations over the axes B, K, P",
        "licence": "Apache-2.0: derived from the data of aiconfigurator-core",
        "versions": versions,
        "models": {name: asdict(read_model(name)) for name in models},
        "gpus": {name: {key: carried_gpus()[name]["gpu"][key] for key in keys} for name in gpus},
    }
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in tables)
    head = json.dumps(data, indent=1)[:-2]
    with atomic_path(path) as partial:
        partial.write_text(f'{head},\n "tables": [\n{rows}\n]\n}}\n', encoding="utf-8")


def _model(source: str | Path | Model) -> Model:
    if isinstance(source, Model):
        return source
    if find_spec("aiconfigurator_core") is None and source in bundled()["models"]:
        shape = dict(bundled()["models"][source])
        shape["cache"] = tuple(CacheLayers(**group) for group in shape["cache"])
        return Model(**shape)
    return read_model(source)


def _pool(
    model: Model,
    gpu: GPU,
    engine: str,
    parallel: ParallelConfig,
    utilisation: float,
    context: int,
    measured: int | str | Path | None,
) -> tuple[tuple[int, int, int], Provenance]:
    """Tokens of the pool (least, middle, most) and where they are from.

    vLLM takes weights and everything else from its share; SGLang takes only the weights and what was
    allocated before the pool from its; TensorRT-LLM shares out what weights and everything else leave.
    """
    if measured is not None:
        if isinstance(measured, str | Path):
            tokens, source = read_kv_tokens(measured), "the engine's start-up log"
        else:
            tokens, source = measured, "given"
        if isinstance(tokens, bool) or tokens != int(tokens) or tokens < 1:
            raise ValueError(f"kv_tokens is {tokens}; expected a whole number of tokens >= 1")
        return (int(tokens),) * 3, Provenance("measured", source)
    weights = model.weight_bytes / parallel.gpus
    overheads = OVERHEAD_BYTES["sglang" if engine == "sglang" else "experts" if model.experts else "dense"]
    per_token = model.request_bytes(context, parallel.tensor) / context / parallel.gpus

    def tokens(overhead: float) -> int:
        if engine == "trtllm":
            left = utilisation * (gpu.memory_bytes - weights - overhead)
        else:
            left = utilisation * gpu.memory_bytes - weights - overhead
        return max(0, int(left / per_token) // BLOCK * BLOCK)

    low, middle, high = (tokens(overhead) for overhead in reversed(overheads))
    if middle == 0:
        raise ValueError(
            f"{parallel.name} with {model.name} on {gpu.name}: {utilisation:g} of "
            f"{gpu.memory_bytes / 1e9:.1f} GB a GPU, less {weights / 1e9:.1f} GB of weights and "
            f"{overheads[1] / 1e9:.1f} GB of context and activations, leaves nothing for the KV "
            f"cache; expected room. More GPUs a group, or fewer "
            f"bytes a weight"
        )
    return (low, middle, high), Provenance("modelled", "memory less weights, context, activations and graphs")


def _grid(most: int, pipeline: int, sparse: bool = False) -> Floats:
    """0, 1, then powers of two and their middles up to ``most``, in multiples of the pipeline."""
    points = {0, pipeline, most}
    x = 16 if sparse else 2
    while x < most:
        points.add(x * pipeline if x * pipeline < most else most)
        if not sparse and x >= 32:
            points.add(min(most, x * pipeline * 3 // 2))
        x *= 2
    return np.array(sorted(points), dtype=float)


def _corrected(table: StepTable, steps: pd.DataFrame | str | Path) -> tuple[StepTable, Provenance]:
    """The table scaled to measured steps, by median ratios at each measured batch and between by line.

    Steps without prompts scale all of an iteration; what prompts add to it then has a ratio of its own, where
    steps with prompts were measured too.
    """
    rows = steps if isinstance(steps, pd.DataFrame) else pd.read_csv(steps)
    source = "given" if isinstance(steps, pd.DataFrame) else str(Path(steps).name)
    missing = [name for name in ("batch", "context", "seconds") if name not in rows]
    if missing or rows.empty:
        raise ValueError(
            f"steps: {len(rows)} rows, columns {', '.join(missing) or 'none'} missing; expected batch, "
            f"context, seconds and perhaps prefill"
        )
    batch, length, seconds = (rows[name].to_numpy(float) for name in ("batch", "context", "seconds"))
    prefill = rows["prefill"].to_numpy(float) if "prefill" in rows else np.zeros(len(rows))
    good = np.isfinite(batch) & np.isfinite(length) & np.isfinite(prefill) & np.isfinite(seconds)
    good &= (batch >= 0) & (length >= 0) & (prefill >= 0) & (seconds > 0)
    if not good.all():
        at = int(np.flatnonzero(~good)[0])
        raise ValueError(f"steps row {at}: {rows.iloc[at].to_dict()}; expected numbers >= 0 and seconds > 0")

    def by_batch(ratios: NDArray[np.float64], of: NDArray[np.bool_]) -> NDArray[np.float64]:
        ratio = pd.Series(ratios[of]).groupby(batch[of]).median()
        return np.interp(table.decoding, ratio.index.to_numpy(float), ratio.to_numpy())[:, None, None]

    plain = (prefill == 0) if (prefill == 0).any() else np.ones(len(rows), dtype=bool)
    ratios = seconds / table.seconds(batch, batch * length, prefill)
    corrected = replace(table, measured=table.measured * by_batch(ratios, plain))
    if not plain.all():
        alone = corrected.seconds(batch, batch * length, 0)
        added = np.maximum(corrected.seconds(batch, batch * length, prefill) - alone, 1e-9)
        share = np.maximum((seconds - alone) / added, 0.0)
        base = corrected.measured[:, :, :1]
        more = (corrected.measured - base) * by_batch(share, ~plain)
        corrected = replace(corrected, measured=base + more)
    return corrected, Provenance("measured", f"{len(rows)} benchmark steps, {source}")
