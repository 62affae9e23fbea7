"""GPUs, models and parallel configurations: KV capacity and service times of one serving group."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "GPU",
    "SERVICE_MODELS",
    "CacheLayers",
    "Model",
    "OperatingPoint",
    "ParallelConfig",
    "ServingConfig",
    "kv_capacity",
    "serving_config",
    "serving_configs",
]

#: How service times are made: ``formula`` is equation 1 with fitted constants, ``measured`` the fit itself.
SERVICE_MODELS = ("formula", "measured")

#: Share of a GPU's memory that the engine may use (the default of the common engines).
MEMORY_UTILISATION = 0.9


@cache
def calibration() -> dict:
    """The fitted constants with their provenance, as in ``data/calibration.json``."""
    return json.loads(files("kvcache").joinpath("data/calibration.json").read_text(encoding="utf-8"))


@cache
def fitted_rates(gpu: str) -> tuple[float, float]:
    """c (FLOP/s) and b (bytes/s) of one GPU: the least relative squares over TP 1, 2, 4 and 8.

    Equation 1 gives 2 P / (tau c) seconds per prompt token and weight bytes / (tau b) per output token.
    Its own communication term is per request and far too small, so c and b take the all-reduce in.
    """
    fit = calibration()
    parameters = fit["model"]["layer_parameters"]

    def rate(name: str) -> float:
        # relative error of 2 P x / (tau t), in which x = 1 / rate; 16-bit weights are 2 P bytes too
        implied = np.array(
            [2 * parameters / (int(tau) * row[name]) for tau, row in fit["gpus"][gpu]["measured"].items()]
        )
        return float(implied @ implied / implied.sum())

    return rate("prefill_s_per_token"), rate("decode_mean_s")


def _positive(where: str, **values: float) -> None:
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{where}: {name} is {value}; expected > 0 and finite")


@dataclass(frozen=True)
class GPU:
    """One accelerator.

    Parameters
    ----------
    name : label; a name in the calibration also gives the ``measured`` service times.
    memory_bytes : HBM, bytes (80 GB is 80e9 here).
    flops : effective prefill FLOP/s of one GPU, c in C_k = tau_k p_k c.
    bandwidth : effective decode bytes/s of one GPU, b in B_k = tau_k b.
    all_reduce_s : t_ar, seconds of one all-reduce of one token.
    """

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    all_reduce_s: float = 0.0

    def __post_init__(self) -> None:
        _positive(
            f"GPU {self.name!r}", memory_bytes=self.memory_bytes, flops=self.flops, bandwidth=self.bandwidth
        )
        if not (np.isfinite(self.all_reduce_s) and self.all_reduce_s >= 0):
            raise ValueError(
                f"GPU {self.name!r}: all_reduce_s is {self.all_reduce_s}; expected >= 0 and finite"
            )

    @classmethod
    def preset(cls, name: str) -> GPU:
        """``A100-80GB`` or ``H100-80GB``, with the constants fitted to measured kernels."""
        known = calibration()["gpus"]
        if name not in known:
            raise KeyError(f"GPU {name!r}; the presets are {sorted(known)}")
        flops, bandwidth = fitted_rates(name)
        return cls(
            name,
            memory_bytes=80e9,
            flops=flops,
            bandwidth=bandwidth,
            all_reduce_s=float(np.median(list(known[name]["all_reduce_s"].values()))),
        )


def _whole(where: str, name: str, value: float) -> int:
    """The value as an int, so that 4.0 GPUs are 4 in every label and flag."""
    if isinstance(value, bool) or not np.isfinite(value) or value != int(value) or value < 1:
        raise ValueError(f"{where}: {name} is {value}; expected a whole number >= 1")
    return int(value)


@dataclass(frozen=True)
class CacheLayers:
    """Layers that keep the same of a token.

    Parameters
    ----------
    layers : how many.
    heads : key-value heads, which tensor parallelism splits; 1 for a latent vector.
    head_size : numbers in a key and in a value of a head.
    window : tokens that a sliding window keeps; None for all.
    latent : numbers of the latent vector that latent attention keeps instead of keys and values.
    """

    layers: int
    heads: int
    head_size: int
    window: int | None = None
    latent: int = 0

    def __post_init__(self) -> None:
        names = ("layers", "heads", "head_size", *(() if self.window is None else ("window",)))
        for name in names:
            object.__setattr__(self, name, _whole("cache", name, getattr(self, name)))
        if self.latent and self.heads != 1:
            raise ValueError(f"cache: heads is {self.heads}; expected 1 with a latent vector")

    @property
    def numbers(self) -> int:
        """Numbers that one layer keeps of a token."""
        return self.latent or 2 * self.heads * self.head_size


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, as far as its memory and its work matter.

    Parameters
    ----------
    name : label.
    layers, heads, kv_heads, head_size : shape of the attention; ``kv_heads`` divides ``heads``.
    parameters : number of weights.
    bytes_per_weight, bytes_per_kv : bytes of a weight, on average, and of a cached number (2 for 16 bits).
    cache : what the layers keep of a token where they differ or keep something else than keys and values;
        all ``layers`` keep ``kv_heads`` x ``head_size`` keys and values by default.
    state_bytes : bytes that a running request keeps whatever its length (linear attention).
    active_parameters : weights that one token is multiplied with; all by default.
    experts, experts_per_token, expert_parameters : of a mixture of experts: how many a layer has to choose
        from, how many a token uses, and the weights of all of them in all layers.
    hidden_size, vocabulary : width of a layer and number of tokens; 0 where unknown.
    max_position : longest sequence the model takes; None where unknown.
    source : name or folder under which kernel measurements know the model; None where there is none.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    parameters: float
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    cache: tuple[CacheLayers, ...] = ()
    state_bytes: float = 0.0
    active_parameters: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    hidden_size: int = 0
    vocabulary: int = 0
    max_position: int | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        for name in ("layers", "heads", "kv_heads", "head_size"):
            object.__setattr__(self, name, _whole(where, name, getattr(self, name)))
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{where}: kv_heads is {self.kv_heads}; expected a divisor of heads = {self.heads}"
            )
        _positive(
            where,
            parameters=self.parameters,
            bytes_per_weight=self.bytes_per_weight,
            bytes_per_kv=self.bytes_per_kv,
        )
        if self.active_parameters is not None:
            _positive(where, active_parameters=self.active_parameters)
            if self.active_parameters > self.parameters:
                raise ValueError(
                    f"{where}: active_parameters is {self.active_parameters:g}; expected at most "
                    f"parameters = {self.parameters:g}"
                )
        if not 0 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"{where}: experts_per_token is {self.experts_per_token}; expected within [0, experts = "
                f"{self.experts}]"
            )
        for name in ("state_bytes", "expert_parameters"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"{where}: {name} is {getattr(self, name)}; expected >= 0 and finite")

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.parameters * self.bytes_per_weight

    @property
    def cache_layers(self) -> tuple[CacheLayers, ...]:
        """What each layer keeps of a token, in groups of like layers."""
        return self.cache or (CacheLayers(self.layers, self.kv_heads, self.head_size),)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that one more token keeps over all layers while no sliding window is full."""
        return sum(group.layers * group.numbers for group in self.cache_layers) * self.bytes_per_kv

    def request_bytes(self, tokens: float, tensor: int = 1) -> float:
        """Bytes that a running request of that many tokens keeps on all ``tensor`` ranks together.

        A rank keeps whole heads, so with more ranks than heads they are repeated, and a latent vector is
        kept by every rank. A window keeps no more than its length.
        """
        numbers = sum(
            group.layers
            * group.numbers
            * max(1.0, tensor / group.heads)
            * (tokens if group.window is None else min(tokens, group.window))
            for group in self.cache_layers
        )
        return numbers * self.bytes_per_kv + self.state_bytes

    @property
    def flops_per_token(self) -> float:
        """alpha in equation 1: a multiplication and an addition per weight that the token meets."""
        return 2 * (self.parameters if self.active_parameters is None else self.active_parameters)

    @classmethod
    def preset(cls, name: str) -> Model:
        """``70B-MHA`` (the paper's 2.5 MB of KV cache per token), ``Llama-3-70B`` or ``Llama-3-8B``."""
        presets = {
            "70B-MHA": cls("70B-MHA", 80, 64, 64, 128, 70e9),
            "Llama-3-70B": cls("Llama-3-70B", 80, 64, 8, 128, 70_553_706_496),
            "Llama-3-8B": cls("Llama-3-8B", 32, 32, 8, 128, 8_030_261_248),
        }
        if name not in presets:
            raise KeyError(f"model {name!r}; the presets are {sorted(presets)}")
        return presets[name]


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor parallel degree tau_k and pipeline parallel degree p_k of a serving group.

    Of a mixture of experts, ``expert`` of the ``tensor`` ranks hold different experts, and the rest split
    each expert: 1 splits every expert over all ranks.
    """

    tensor: int
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            object.__setattr__(self, name, _whole("parallel configuration", name, getattr(self, name)))
        if self.tensor % self.expert:
            raise ValueError(
                f"parallel configuration: expert is {self.expert}; expected a divisor of tensor = "
                f"{self.tensor}"
            )

    @property
    def gpus(self) -> int:
        """n_k, GPUs of one group."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """Label such as ``TP4xPP1``, with ``xEP4`` where experts are spread."""
        return f"TP{self.tensor}xPP{self.pipeline}" + (f"xEP{self.expert}" if self.expert > 1 else "")

    def check(self, model: Model) -> None:
        """ValueError where an engine would refuse this split of the model, with the numbers."""
        where = f"{self.name} with {model.name}"
        if model.heads % self.tensor:
            raise ValueError(f"{where}: {model.heads} heads; expected a multiple of TP = {self.tensor}")
        for group in model.cache_layers:
            if not group.latent and self.tensor % group.heads and group.heads % self.tensor:
                raise ValueError(
                    f"{where}: {group.heads} key-value heads; expected a divisor or a multiple of TP = "
                    f"{self.tensor}"
                )
        if self.pipeline > model.layers:
            raise ValueError(f"{where}: {model.layers} layers; expected at least PP = {self.pipeline}")
        if self.expert > 1 and (model.experts == 0 or model.experts % self.expert):
            raise ValueError(f"{where}: {model.experts} experts; expected a multiple of EP = {self.expert}")


@dataclass(frozen=True)
class ServingConfig:
    """One serving group as the optimiser sees it.

    Parameters
    ----------
    name : unique label, such as ``TP4xPP1``.
    gpus : n_k, GPUs of one group.
    kv_tokens : M_k, KV capacity of one group, tokens.
    prefill_s_per_token : seconds of service per prompt token.
    decode_s_per_token : seconds of service per output token.
    overhead_s : seconds of service per request that depend on neither.

    With these, T_ik = prefill L_in + decode E[xi] + overhead, which is equation 1 with
    prefill = p alpha / C, decode = beta / B and overhead = N_L tau t_ar.
    """

    name: str
    gpus: int
    kv_tokens: float
    prefill_s_per_token: float
    decode_s_per_token: float
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"configuration {self.name!r}"
        object.__setattr__(self, "gpus", _whole(where, "gpus", self.gpus))
        _positive(where, kv_tokens=self.kv_tokens, decode_s_per_token=self.decode_s_per_token)
        for name in ("prefill_s_per_token", "overhead_s"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{where}: {name} is {value}; expected >= 0 and finite")

    def service_time(self, input_tokens: ArrayLike, output_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds to serve a request of that prompt and output length (numbers or arrays)."""
        return (
            self.prefill_s_per_token * np.asarray(input_tokens, dtype=float)
            + self.decode_s_per_token * np.asarray(output_tokens, dtype=float)
            + self.overhead_s
        )


@dataclass(frozen=True)
class OperatingPoint:
    """Where the ``measured`` service times are taken, since they rise with what else runs in the group.

    batch : requests decoding together; context : resident KV tokens of each; prefill_share : share of
    time that the group spends on prompts, which a decoding request waits out.
    """

    batch: float = 32.0
    context: float = 1024.0
    prefill_share: float = 0.2

    def __post_init__(self) -> None:
        _positive("operating point", batch=self.batch, context=self.context)
        if not 0 <= self.prefill_share < 1:
            raise ValueError(
                f"operating point: prefill_share is {self.prefill_share}; expected within [0, 1)"
            )


def check_utilisation(value: float) -> None:
    """ValueError unless the share of memory is within (0, 1]."""
    if not 0 < value <= 1:
        raise ValueError(f"memory utilisation is {value}; expected a share within (0, 1], such as 0.9")


def kv_capacity(
    gpu: GPU,
    model: Model,
    parallel: ParallelConfig,
    *,
    utilisation: float = MEMORY_UTILISATION,
    overhead_bytes: float = 0.0,
    context: float = 1.0,
) -> float:
    """M_k, tokens: what the weights and a fixed overhead per GPU leave of the usable memory.

    Key-value heads are split over the tensor-parallel ranks; with more ranks than heads they are
    repeated, so a token takes more. Where layers have sliding windows or a state per request, the bytes
    of a token depend on ``context``, the tokens that a running request holds.

    Raises
    ------
    ValueError
        When the weights do not fit, with the arithmetic; when the utilisation is not within (0, 1], the
        overhead is negative, or an engine would refuse the split.
    """
    parallel.check(model)
    check_utilisation(utilisation)
    if not 0 <= overhead_bytes < np.inf:
        raise ValueError(f"overhead_bytes is {overhead_bytes}; expected >= 0 and finite")
    n = parallel.gpus
    usable = utilisation * n * gpu.memory_bytes
    left = usable - model.weight_bytes - n * overhead_bytes
    tokens = left * context / model.request_bytes(context, parallel.tensor)
    if tokens < 1:
        raise ValueError(
            f"{parallel.name} with {model.name} on {gpu.name}: {utilisation:g} x {n} x "
            f"{gpu.memory_bytes / 1e9:g} GB = {usable / 1e9:.1f} GB usable, less "
            f"{model.weight_bytes / 1e9:.1f} GB of weights and {n} x {overhead_bytes / 1e9:g} GB of overhead "
            f"leaves {left / 1e9:.1f} GB; expected room for the KV cache"
        )
    return float(tokens)


def serving_config(
    gpu: GPU,
    model: Model,
    parallel: ParallelConfig,
    *,
    service: str = "formula",
    operating_point: OperatingPoint | None = None,
    utilisation: float = MEMORY_UTILISATION,
    overhead_bytes: float = 0.0,
) -> ServingConfig:
    """One group of this GPU, model and parallel configuration.

    ``formula`` is equation 1 with C_k = tau p c and B_k = tau b: all GPUs of a group share a prompt,
    while a decoded token passes the stages one after another. ``measured`` is the per-degree fit
    T = a L_in + xi (t_0 + s_B B/p + s_K K/p + (p - 1) t_sr) / (1 - prefill share) at an operating
    point; the resident tokens K are at most M_k, and the batch shrinks with them.

    Raises
    ------
    ValueError
        When the weights do not fit, or ``measured`` is asked where nothing was measured.
    """
    if service not in SERVICE_MODELS:
        raise ValueError(f"service is {service!r}; expected one of {SERVICE_MODELS}")
    tokens = kv_capacity(gpu, model, parallel, utilisation=utilisation, overhead_bytes=overhead_bytes)
    if service == "formula":
        return ServingConfig(
            parallel.name,
            parallel.gpus,
            tokens,
            prefill_s_per_token=parallel.pipeline * model.flops_per_token / (parallel.gpus * gpu.flops),
            decode_s_per_token=model.weight_bytes / (parallel.tensor * gpu.bandwidth),
            # A single rank has nobody to reduce with.
            overhead_s=model.layers * parallel.tensor * gpu.all_reduce_s if parallel.tensor > 1 else 0.0,
        )
    fit = calibration()
    measured = fit["gpus"].get(gpu.name, {}).get("measured", {}).get(str(parallel.tensor))
    if measured is None or model.layers != fit["model"]["layers"] or model.heads * model.head_size != 8192:
        raise ValueError(
            f"{parallel.name} with {model.name} on {gpu.name}: measured service times exist for models of "
            f"80 layers and width 8192 on {sorted(fit['gpus'])} at TP 1, 2, 4, 8; use service='formula'"
        )
    point = operating_point or OperatingPoint()
    resident = min(point.batch * point.context, tokens)
    batch = resident / point.context
    # Reading the cache costs time per byte; the fit is for the model's own bytes per token.
    per_token = (
        measured["decode_per_resident_kv_token_s"]
        * model.kv_bytes_per_token
        / fit["model"]["kv_bytes_per_token"]
    )
    iteration = (
        measured["decode_t0_s"]
        + (measured["decode_per_seq_s"] * batch + per_token * resident) / parallel.pipeline
        + (parallel.pipeline - 1) * fit["gpus"][gpu.name]["send_recv_s"]
    )
    return ServingConfig(
        parallel.name,
        parallel.gpus,
        tokens,
        prefill_s_per_token=measured["prefill_s_per_token"],
        decode_s_per_token=iteration / (1 - point.prefill_share),
    )


def serving_configs(
    gpu: GPU, model: Model, parallels: Iterable[ParallelConfig], **options: object
) -> tuple[ServingConfig, ...]:
    """The groups of a list of parallel configurations; one that does not fit is dropped with a warning.

    Options are those of :func:`serving_config`. Raises ValueError when none is left, with each reason.
    """
    kept, reasons = [], []
    for parallel in parallels:
        try:
            kv_capacity(
                gpu,
                model,
                parallel,
                **{k: options[k] for k in ("utilisation", "overhead_bytes") if k in options},
            )
        except ValueError as error:
            reasons.append(str(error))
            continue
        kept.append(serving_config(gpu, model, parallel, **options))
    if not kept:
        raise ValueError("no configuration fits: " + ("; ".join(reasons) or "the list is empty"))
    for reason in reasons:
        warnings.warn(f"dropped {reason}", stacklevel=2)
    return tuple(kept)
