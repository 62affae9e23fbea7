"""Admission when requests are not memoryless: a Chernoff bound on the memory at every horizon.

The headroom u* counts on finishes to offset growth. Where many alike requests start together nobody finishes
for a long time, and all grow at once. What each running request will hold t iterations on is known in law:
with a prompt of L and a tokens of output so far it holds L + a + t with probability

    pi(t) = P(xi > a + t | xi > a),

and nothing otherwise. So for every exponent x > 0 the probability that together they hold more than the pool
M is at most the product of E exp(x held) over exp(x M). A candidate is admitted iff at every horizon t there
is an x with

    sum over running and candidate of ln(1 + pi(t) (exp(x (L + a + t)) - 1)) <= x M + ln delta*,

delta* = exp(-theta u*): the overflow that the newsvendor of the pool accepts. In mixed traffic this is about
the same as u*. (Effective bandwidths: Kelly, Notes on effective bandwidths, 1996.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.lengths import LengthDistribution

__all__ = ["BurstRule"]

Floats = NDArray[np.float64]

EXPONENTS = 8  # theta, theta / 2, theta / 4, ...
CHUNK = 16  # requests whose factors are multiplied before a logarithm is taken
SMALLEST = 1e-18  # a factor's floor: CHUNK of them are still a positive number, and the bound only rises


@dataclass(frozen=True)
class BurstRule:
    """Whether a pool that holds some requests should take another one.

    Parameters
    ----------
    outputs : the law of the output lengths, or one per kind of request.
    pool : M, tokens.
    theta : the Lundberg exponent of the traffic, per token, > 0 and finite.
    headroom : u*, tokens.
    block : tokens per block; half a block is added to what a request holds.

    Raises
    ------
    ValueError
        For a constant out of its range.
    """

    outputs: LengthDistribution | tuple[LengthDistribution, ...]
    pool: float
    theta: float
    headroom: float
    block: int = 16
    horizons: int = 64

    def __post_init__(self) -> None:
        for name, low in (("pool", 0.0), ("theta", 0.0), ("headroom", -1e-9)):
            value = getattr(self, name)
            if not low < value < np.inf:
                raise ValueError(f"burst rule: {name} is {value}; expected {'> 0' if low == 0 else '>= 0'}")

    @cached_property
    def _laws(self) -> tuple[LengthDistribution, ...]:
        return (self.outputs,) if isinstance(self.outputs, LengthDistribution) else tuple(self.outputs)

    @cached_property
    def _survival(self) -> Floats:
        """(kinds, L_max + 1) P(xi > t)."""
        grid = np.arange(max(law.upper for law in self._laws) + 1)
        return np.stack([1 - law.cdf(grid) for law in self._laws])

    @cached_property
    def _times(self) -> NDArray[np.intp]:
        """(T,) all horizons, iterations: now (so u* tokens are free), then geometric up to the longest."""
        longest = max(self._survival.shape[1] - 1, self.block)
        return np.unique(np.append(0, np.geomspace(1, longest, self.horizons).astype(np.intp)))

    @cached_property
    def _exponents(self) -> Floats:
        return self.theta * 0.5 ** np.arange(EXPONENTS)

    def log_overflow(
        self, prompt: ArrayLike, age: ArrayLike, kind: ArrayLike = 0, *, times: ArrayLike, x: ArrayLike
    ) -> Floats:
        """The bound on ln P(held > M) after that many iterations, with that exponent.

        Parameters
        ----------
        prompt, age : (n,) prompt tokens and output tokens so far of the requests, the candidate among them.
        kind : (n,) which of ``outputs`` each follows, or one for all. A request that is older than any of its
            kind is taken to go on at every horizon.
        times, x : iterations, and exponents per token; they broadcast to the shape of the answer.
        """
        age, times, x = np.asarray(age, dtype=np.intp), np.asarray(times, dtype=np.intp), np.asarray(x)
        now = np.asarray(prompt, dtype=float) + age + self.block / 2
        last = self._survival.shape[1] - 1
        alive = self._survival[kind, np.minimum(age, last)]
        later = self._survival[kind, np.minimum(age + times[..., None], last)]
        pi = np.where(alive > 0, later / np.where(alive > 0, alive, 1.0), 1.0)
        # ln(1 + pi (e^y - 1)) = y + ln(pi + (1 - pi) e^-y)
        factor = (1 - pi) * np.exp(-x * times)[..., None]
        factor = factor * np.exp(-x[..., None] * now)
        factor += pi
        np.maximum(factor, SMALLEST, out=factor)
        logs = np.log(np.multiply.reduceat(factor, np.arange(0, age.size, CHUNK), axis=-1)).sum(axis=-1)
        return logs + x * (now.sum() + age.size * times - self.pool)

    def admits(self, prompt: ArrayLike, age: ArrayLike, kind: ArrayLike = 0) -> bool:
        """Whether the requests given, the candidate among them, may run together.

        Every fourth horizon is tried with all exponents; those between with the best of the one before.
        """
        accepted = -self.theta * self.headroom
        some, exponents = self._times[::-4][::-1], self._exponents
        bounds = self.log_overflow(prompt, age, kind, times=some, x=exponents[:, None])
        if bounds.min(axis=0).max() > accepted:
            return False
        best = exponents[bounds.argmin(axis=0)]
        at = np.maximum(np.searchsorted(some, self._times, side="right") - 1, 0)
        return bool(np.all(self.log_overflow(prompt, age, kind, times=self._times, x=best[at]) <= accepted))
