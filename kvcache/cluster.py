"""GPUs, models and parallel configurations: KV capacity and service times of one serving group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["ParallelConfig", "ServingConfig"]


@dataclass(frozen=True)
class ParallelConfig:
    """Tensor parallel degree tau_k and pipeline parallel degree p_k of a serving group."""

    tensor: int
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise ValueError(f"parallel configuration: {name} is {value}; expected a whole number >= 1")

    @property
    def gpus(self) -> int:
        """n_k, GPUs of one group."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        return f"TP{self.tensor}xPP{self.pipeline}"


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
        if self.gpus != int(self.gpus) or self.gpus < 1:
            raise ValueError(
                f"configuration {self.name!r}: gpus is {self.gpus}; expected a whole number >= 1"
            )
        for name, minimum in (
            ("kv_tokens", "> 0"),
            ("prefill_s_per_token", ">= 0"),
            ("decode_s_per_token", "> 0"),
            ("overhead_s", ">= 0"),
        ):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0 or (minimum == "> 0" and value == 0):
                raise ValueError(
                    f"configuration {self.name!r}: {name} is {value}; expected {minimum} and finite"
                )

    def service_time(self, input_tokens: ArrayLike, output_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds to serve a request of that prompt and output length (numbers or arrays)."""
        return (
            self.prefill_s_per_token * np.asarray(input_tokens, dtype=float)
            + self.decode_s_per_token * np.asarray(output_tokens, dtype=float)
            + self.overhead_s
        )
