"""How long one iteration of an engine takes: the step cost of a serving group.

An engine that batches continuously runs one iteration after another. In each, B requests that hold K
cached tokens decode one token each, and P prompt tokens are prefilled beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["StepCost"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """Seconds of one iteration, linear in what it holds: tau = t0 + s_B B + s_K K + a P.

    Parameters
    ----------
    t0 : seconds of an iteration whatever it holds (the weights are read once), > 0.
    per_sequence : s_B, seconds per decoding request, >= 0.
    per_cached_token : s_K, seconds per cached token of the decoding requests, >= 0.
    per_prefill_token : a, seconds per prompt token in the iteration, >= 0.

    Raises
    ------
    ValueError
        For a constant that is negative or not finite, or t0 = 0.
    """

    t0: float
    per_sequence: float
    per_cached_token: float
    per_prefill_token: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = "> 0" if field.name == "t0" else ">= 0"
            if not np.isfinite(value) or value < 0 or (field.name == "t0" and value == 0):
                raise ValueError(f"step cost: {field.name} is {value}; expected {low} seconds and finite")

    def seconds(
        self, decoding: ArrayLike, cached_tokens: ArrayLike, prefill_tokens: ArrayLike = 0
    ) -> Floats | float:
        """tau of iterations with B ``decoding`` requests, K ``cached_tokens`` and P ``prefill_tokens``."""
        value = (
            self.t0
            + self.per_sequence * np.asarray(decoding, dtype=float)
            + self.per_cached_token * np.asarray(cached_tokens, dtype=float)
            + self.per_prefill_token * np.asarray(prefill_tokens, dtype=float)
        )
        return float(value) if np.ndim(value) == 0 else value

    def span(self, decoding: int, cached_tokens: float, steps: int) -> float:
        """Seconds of that many iterations without prompts, in which every request grows by a token each.

        The first has K = ``cached_tokens``, the next K + B, and so on, so the sum is exact:
        n (t0 + s_B B + s_K K) + s_K B n (n - 1) / 2.
        """
        first = self.t0 + self.per_sequence * decoding + self.per_cached_token * cached_tokens
        return steps * first + self.per_cached_token * decoding * steps * (steps - 1) / 2
