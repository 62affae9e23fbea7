"""Step times of a model on a GPU: from measured kernels, or from the GPU's data sheet.

``aiconfigurator-core`` carries times of every kernel of an iteration, measured on 14 GPUs for vLLM, SGLang
and TensorRT-LLM; their sum is an iteration. Its data are an extra, ``pip install kvcache[hardware]``; where
that has no wheel, the package has coarse tables of a few models and GPUs. A GPU of one's own gets a roofline.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.engine.steps import StepTable
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.models import carried_models

__all__ = [
    "ENGINES",
    "LABELS",
    "ROOFLINE",
    "Provenance",
    "Roofline",
    "bundled",
    "carried_gpu",
    "carried_gpus",
    "kernel_steps",
    "roofline",
]

Floats = NDArray[np.float64]
#: Seconds of iterations on arrays of B, K and P.
Steps = Callable[[Floats, Floats, Floats], Floats]

#: Engines whose kernels were measured.
ENGINES = ("vllm", "sglang", "trtllm")

#: Where a figure is from: an engine or a benchmark said it, measured kernels were added up, or a formula.
LABELS = ("measured", "calibrated", "modelled")


@dataclass(frozen=True)
class Provenance:
    """Where a figure comes from: one of `LABELS`, and the source with its versions."""

    label: str
    source: str

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"provenance: label is {self.label!r}; expected one of {LABELS}")


@dataclass(frozen=True)
class Roofline:
    """What iterations reach of a data sheet.

    Parameters
    ----------
    bandwidth, flops : shares of the sheet's bytes/s and FLOP/s.
    layer_s, all_reduce_s : seconds of a layer whatever it holds, and of one all-reduce.
    """

    bandwidth: float
    flops: float
    layer_s: float
    all_reduce_s: float


#: Fitted to the measured kernels of ten GPUs, six models and splits each (least soft-L1 of the log ratio).
#: Against those kernels its error is 20 % in the median and 54 % at the 90th percentile; on a GPU that was
#: left out of the fit the median is 16 to 32 %, of decoding alone 5 to 23 % (``tests/bench_kernels.py``).
ROOFLINE = Roofline(bandwidth=0.758, flops=0.480, layer_s=9.1e-6, all_reduce_s=2.9e-5)


@cache
def carried_gpus() -> Mapping[str, Mapping]:
    """Data sheets of the GPUs whose kernels were measured, by name; a few without the extra."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        return {name: {"gpu": sheet} for name, sheet in bundled()["gpus"].items()}
    import yaml  # comes with the extra

    sheets = Path(spec.origin).parent / "systems"
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted(sheets.glob("*.yaml"))
        if sheets.joinpath("data", path.stem).is_dir()
    }


def carried_gpu(name: str) -> GPU:
    """The data sheet of a carried GPU, such as ``h200_sxm``: bytes, FLOP/s in 16 bits and bytes/s.

    Raises
    ------
    KeyError
        For a name that is not carried; the message lists those that are.
    """
    sheets = carried_gpus()
    if name not in sheets:
        if find_spec("aiconfigurator_core") is None:
            raise _absent(f"GPU {name!r}")
        raise KeyError(f"GPU {name!r}; measured kernels exist for {', '.join(sheets)}")
    sheet = sheets[name]["gpu"]
    return GPU(
        name,
        memory_bytes=float(sheet["mem_capacity"]),
        flops=float(sheet["bfloat16_tc_flops"]),
        bandwidth=float(sheet["mem_bw"]),
    )


@cache
def bundled() -> dict:
    """Coarse tables for a few models and GPUs, for where the extra has no wheel (`kvcache.groups`)."""
    return json.loads(files("kvcache").joinpath("data/kernels.json").read_text(encoding="utf-8"))


def kernel_steps(
    model: Model, gpu: str, engine: str, parallel: ParallelConfig, prompt_tokens: int = 1024
) -> tuple[Steps, Provenance]:
    """Seconds of iterations on arrays of B, K and P, from measured kernels.

    An iteration without prompts is the kernels of a decoding step. With prompts it is everything but
    attention over B + P tokens, attention of the prompts, and attention of the decoding requests. Stages of
    a pipeline work on as many micro-batches at once: a group's iteration is a micro-batch's way through.

    Parameters
    ----------
    model, gpu, engine, parallel : what runs on which of `carried_gpus`; one of `ENGINES`.
    prompt_tokens : length of a prompt whose attention a prefilled token pays; 1,024 in bundled tables.

    Raises
    ------
    ValueError
        For what was not measured, with the library's reason.
    ModuleNotFoundError
        For what is not bundled, where ``aiconfigurator-core`` is not installed.
    """
    if find_spec("aiconfigurator_core") is None:
        return _bundled(model, gpu, engine, parallel)
    return _measured(model, gpu, engine, parallel, prompt_tokens)


def roofline(
    model: Model,
    gpu: GPU,
    parallel: ParallelConfig,
    prompt_tokens: int = 1024,
    reached: Roofline = ROOFLINE,
) -> Steps:
    """Seconds of iterations on arrays of B, K and P, from the data sheet of a GPU.

    The larger of reading the weights that are met and of multiplying with them, then reading the cache, the
    attention of prompts, and a time per layer and all-reduce. Of experts, those that at least one of n
    tokens meets are read: a share 1 - (1 - k / E)^n.
    """
    bandwidth = reached.bandwidth * gpu.bandwidth * parallel.tensor
    flops = reached.flops * gpu.flops * parallel.tensor
    always = model.weight_bytes - model.expert_parameters * model.bytes_per_weight
    attention = 4 * model.layers * model.heads * model.head_size * prompt_tokens / 2
    fixed = model.layers * reached.layer_s
    if parallel.tensor > 1:
        fixed += 2 * model.layers * (gpu.all_reduce_s or reached.all_reduce_s)

    def seconds(b: Floats, k: Floats, p: Floats) -> Floats:
        b, k, p = (np.asarray(x, dtype=float) / parallel.pipeline for x in (b, k, p))
        n = np.maximum(b + p, 1.0)
        met = 1 - (1 - model.experts_per_token / model.experts) ** n if model.experts else 0.0
        weights = always + met * model.expert_parameters * model.bytes_per_weight
        work = np.maximum(weights / bandwidth, n * model.flops_per_token / flops)
        held = np.divide(k, b, out=np.zeros_like(k), where=b > 0)
        copies = np.vectorize(lambda tokens: model.request_bytes(tokens, parallel.tensor), otypes=[float])
        reading = b * copies(held) / bandwidth
        return work + reading + p * attention / flops + fixed

    return seconds


@lru_cache(maxsize=64)  # the library takes seconds over some GPUs, and a plan asks again
def _measured(
    model: Model, gpu: str, engine: str, parallel: ParallelConfig, prompt_tokens: int
) -> tuple[Steps, Provenance]:
    from aiconfigurator_core import sdk

    experts = {}
    if model.experts:
        experts = {"moe_ep_size": parallel.expert, "moe_tp_size": parallel.tensor // parallel.expert}
    with _quiet(), _known_as(model) as known:
        try:
            handle = sdk.EngineHandle.compile(
                known,
                gpu,
                engine,
                backend_version="current",
                tp_size=parallel.tensor,
                pp_size=parallel.pipeline,
                **({} if model.bytes_per_kv == 1 else {"fmha_quant_mode": "bfloat16"}),
                kvcache_quant_mode="fp8" if model.bytes_per_kv == 1 else "bfloat16",
                **experts,
            )
            from aiconfigurator_core.sdk.perf_database import resolve_query_version

            data = resolve_query_version(gpu, engine, "current", None)
        except Exception as error:
            raise _unmeasured(model, gpu, engine, parallel, error) from error
    longest = min(model.max_position or 131_072, 131_072)
    decode = cache(lambda b, c: handle.decode_step_latency(b, max(1, c - 2), 2) / 1e3)

    @cache
    def attention(b: int, c: int) -> float:
        alone = handle.mixed_step_breakdown(1, b, max(1, c - 2), 2)[3] / 1e3
        return alone or max(0.0, decode(b, c) - decode(b, 3))

    @cache
    def prompts(p: int, b: int) -> float:
        _, rest, prefill, _ = handle.mixed_step_breakdown(p, b, prompt_tokens, 2)
        return (rest + prefill) / 1e3

    def one(b: float, k: float, p: float) -> float:
        requests, chunk = round(b / parallel.pipeline), round(p / parallel.pipeline)
        held = k / b if b else 0.0
        c = int(min(max(held, 3), longest))
        beyond = max(0.0, held / longest - 1)
        if chunk == 0:
            requests = max(requests, 1)
            return decode(requests, c) + (beyond * attention(requests, c) if beyond else 0.0)
        reading = attention(requests, c) * (1 + beyond) if requests and held else 0.0
        return prompts(chunk, requests) + reading

    source = f"aiconfigurator-core {version('aiconfigurator-core')}, {engine} {data} on {gpu}"

    def seconds(b: Floats, k: Floats, p: Floats) -> Floats:
        try:
            with np.errstate(invalid="ignore"):  # the library leaves the flag set; the values are finite
                return np.vectorize(one, otypes=[float])(b, k, p)
        except Exception as error:
            raise _unmeasured(model, gpu, engine, parallel, error) from error

    return seconds, Provenance("calibrated", source)


def _bundled(model: Model, gpu: str, engine: str, parallel: ParallelConfig) -> tuple[Steps, Provenance]:
    """The same from the bundled tables."""
    wanted = [model.name, gpu, engine, parallel.tensor, parallel.expert]
    row = next((row for row in bundled()["tables"] if row["of"] == wanted), None)
    if row is None:
        raise _absent(f"{parallel.name} with {model.name} on {gpu} for {engine}")
    axes = [np.array(axis, dtype=float) for axis in row["axes"]]
    table = StepTable(*axes, np.reshape(row["us"], [axis.size for axis in axes]) / 1e6)
    source = f"{bundled()['versions'][gpu]}, coarse table of the package"

    def seconds(b: Floats, k: Floats, p: Floats) -> Floats:
        return table.seconds(*(x / parallel.pipeline for x in (b, k, p)))

    return seconds, Provenance("calibrated", source)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes on every table that the data carries for other models."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _known_as(model: Model) -> Iterator[str]:
    """What to call the model: a name that is known, or a folder with a config that is.

    Kernel times depend on shapes alone, so a plain model of an architecture that was not measured is looked
    up as a Llama, and a plain mixture of experts as a Qwen3. One without a config is taken to have its
    embedding and its head apart.
    """
    from aiconfigurator_core.sdk.common import ARCHITECTURE_TO_MODEL_FAMILY, DefaultHFModels

    if model.source in DefaultHFModels:
        yield model.source
        return
    plain = not model.cache and not model.state_bytes
    stand_in = "Qwen3MoeForCausalLM" if model.experts else "LlamaForCausalLM"
    with tempfile.TemporaryDirectory() as folder:
        if model.source is not None:
            file = carried_models().get(model.source, Path(model.source) / "config.json")
            config = json.loads(file.read_text(encoding="utf-8"))
            if not set(config["architectures"]) & set(ARCHITECTURE_TO_MODEL_FAMILY):
                config["architectures"] = [stand_in] if plain else config["architectures"]
            quantised = Path(model.source) / "hf_quant_config.json"
            if quantised.is_file():
                shutil.copy(quantised, folder)
        elif plain and model.hidden_size and model.vocabulary:
            config = _config(model, stand_in)
        else:
            raise ValueError(
                f"{model.name}: no measured kernels for its layers, and no config to find them by"
            )
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield folder


def _config(model: Model, architecture: str) -> dict:
    attention = 2 * model.hidden_size * model.head_size * (model.heads + model.kv_heads)
    rest = model.parameters - 2 * model.vocabulary * model.hidden_size - model.layers * attention
    wide = model.expert_parameters / model.experts if model.experts else rest  # norms are less than a column
    inner = int(wide / (3 * model.hidden_size * model.layers))
    config = {
        "architectures": [architecture],
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": inner,
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.max_position or 131_072,
        "torch_dtype": "bfloat16",
    }
    if model.experts:
        config |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": inner,
            "decoder_sparse_step": 1,
        }
    return config


def _absent(what: str) -> ModuleNotFoundError:
    have = bundled()
    return ModuleNotFoundError(
        f"{what} needs aiconfigurator-core: pip install 'kvcache[hardware]' (wheels for Linux on x86-64 and "
        f"arm64 and macOS on arm64; none for macOS on Intel). Without it there are tables of "
        f"{', '.join(have['models'])} on {', '.join(have['gpus'])} for vllm; else give a GPU(name, "
        f"memory_bytes, flops, bandwidth) of your own"
    )


def _unmeasured(
    model: Model, gpu: str, engine: str, parallel: ParallelConfig, error: Exception
) -> ValueError:
    lines = str(error).splitlines() or [type(error).__name__]
    return ValueError(
        f"{parallel.name} with {model.name} on {gpu} for {engine}: no measured kernels, {lines[0][:200]}. "
        f"carried_gpu({gpu!r}) in place of the name gives a roofline"
    )
