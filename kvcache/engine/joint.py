"""Prompt and output lengths together: what an engine's memory depends on.

A request of L prompt and xi output tokens holds L + t tokens after t iterations, so the memory of a pool
depends on the joint law of (L, xi): long prompts with short answers fill it otherwise than the reverse.
Like a `LengthDistribution`, the joint law is kept as counts of the distinct pairs and never as requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.lengths import LengthDistribution

__all__ = ["BlockLengths", "JointLengths"]

Floats = NDArray[np.float64]

MOST_PAIRS = 20_000_000  # an independent law of more pairs is refused: 0.5 GB


class BlockLengths(NamedTuple):
    """What requests hold in whole blocks, in tokens."""

    peak: Floats  # (n,) distinct values of J, the blocks of prompt and output
    peak_probability: Floats  # (n,)
    prompt: Floats  # (m,) distinct values of the blocks of the prompt
    prompt_probability: Floats  # (m,)
    growth: float  # E[J - blocks of the prompt], what a request grows by from admission to finish


@dataclass(frozen=True, eq=False, repr=False)
class JointLengths:
    """Weighted distinct pairs of prompt and output length (tokens), sorted by prompt, then output.

    Parameters
    ----------
    inputs, outputs : (m,) int arrays, >= 0: the distinct pairs; use a constructor below to sort and count.
    weights : (m,) positive weights; counts of requests are kept as they come.
    upper : L_max, the bound of the output length; no output exceeds it.
    name : a label for tables and figures.

    Raises
    ------
    ValueError
        If the arrays are empty or differ in shape, pairs repeat or are not sorted, a length is negative or
        not whole, an output is above ``upper``, or a weight is not positive.
    """

    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    weights: Floats
    upper: int
    name: str = ""

    def __post_init__(self) -> None:
        inputs, outputs = _whole(self.inputs, "inputs"), _whole(self.outputs, "outputs")
        weights = np.array(self.weights, dtype=float)
        if inputs.size == 0 or outputs.shape != inputs.shape or weights.shape != inputs.shape:
            raise ValueError(
                f"joint lengths: {inputs.size} inputs, {outputs.size} outputs, {weights.size} weights; "
                "expected the same number, at least one"
            )
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights > 0)))
        if bad.size:
            raise ValueError(
                f"joint lengths: weights[{bad[0]}] is {weights[bad[0]]}; expected > 0 and finite"
            )
        step = np.diff(inputs)
        bad = np.flatnonzero((step < 0) | ((step == 0) & (np.diff(outputs) <= 0)))
        if bad.size:
            at = bad[0] + 1
            raise ValueError(
                f"joint lengths: pair {at} is {inputs[at], outputs[at]}, not after the one before it; "
                "from_counts sorts and counts"
            )
        if self.upper != int(self.upper) or self.upper < outputs.max():
            raise ValueError(
                f"joint lengths: upper is {self.upper}; expected a whole number >= {outputs.max()}"
            )
        for name, array in (("inputs", inputs), ("outputs", outputs), ("weights", weights)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "upper", int(self.upper))

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def from_samples(
        cls, inputs: ArrayLike, outputs: ArrayLike, upper: int | None = None, *, name: str = ""
    ) -> JointLengths:
        """The empirical law of observed requests, (n,) prompt and (n,) output tokens.

        ``upper`` defaults to the longest output.
        """
        return cls.from_counts(inputs, outputs, np.ones(np.shape(inputs)), upper, name=name)

    @classmethod
    def from_counts(
        cls,
        inputs: ArrayLike,
        outputs: ArrayLike,
        counts: ArrayLike,
        upper: int | None = None,
        *,
        name: str = "",
    ) -> JointLengths:
        """From how often each pair occurs: repeated pairs add up, zero counts are left out."""
        inputs, outputs = _whole(inputs, "inputs"), _whole(outputs, "outputs")
        counts = np.asarray(counts, dtype=float)
        if inputs.shape != outputs.shape or counts.shape != inputs.shape:
            raise ValueError(
                f"joint lengths: {inputs.size} inputs, {outputs.size} outputs, {counts.size} counts; "
                "expected the same number"
            )
        bad = np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))
        if bad.size:
            raise ValueError(f"joint lengths: counts[{bad[0]}] is {counts[bad[0]]}; expected >= 0 and finite")
        keep = counts > 0
        if not keep.any():
            raise ValueError("joint lengths: no request; expected at least one")
        inputs, outputs = inputs[keep], outputs[keep]
        span = int(outputs.max()) + 1
        pairs, at = np.unique(inputs * span + outputs, return_inverse=True)
        weights = np.bincount(at, weights=counts[keep])
        return cls(pairs // span, pairs % span, weights, span - 1 if upper is None else upper, name)

    @classmethod
    def independent(
        cls, inputs: LengthDistribution | int, outputs: LengthDistribution, *, bucket: float = 0.0
    ) -> JointLengths:
        """Prompts and outputs drawn independently; a whole number for ``inputs`` is every prompt's length.

        ``bucket`` > 0 coarsens both marginals first, as `bucketed` does, where the product is too large.

        Raises
        ------
        ValueError
            If there would be more than 20 million pairs.
        """
        if not isinstance(inputs, LengthDistribution):
            inputs = LengthDistribution.from_samples([inputs])
        if bucket > 0:
            inputs, outputs = _coarse(inputs, bucket), _coarse(outputs, bucket)
        pairs = inputs.tokens.size * outputs.tokens.size
        if pairs > MOST_PAIRS:
            raise ValueError(
                f"joint lengths: {pairs:,} pairs; expected at most {MOST_PAIRS:,}: give bucket=0.01, say"
            )
        return cls(
            np.repeat(inputs.tokens, outputs.tokens.size),
            np.tile(outputs.tokens, inputs.tokens.size),
            np.outer(inputs.probabilities, outputs.weights).ravel(),
            outputs.upper,
            outputs.name,
        )

    # ---- moments and marginals ----------------------------------------------------------------

    @cached_property
    def total(self) -> float:
        """Sum of the weights: the number of requests, where the weights are counts."""
        return float(self.weights.sum())

    @cached_property
    def probabilities(self) -> Floats:
        """(m,) probabilities of the pairs; they sum to one."""
        return self.weights / self.total

    def mean(self, values: ArrayLike) -> float:
        """E[values], with one value per pair: ``mean(lengths.inputs * lengths.outputs)`` is E[L xi]."""
        return float(self.probabilities @ np.asarray(values, dtype=float))

    @cached_property
    def mean_input(self) -> float:
        """E[L], tokens."""
        return self.mean(self.inputs)

    @cached_property
    def mean_output(self) -> float:
        """E[xi], tokens."""
        return self.mean(self.outputs)

    @cached_property
    def longest(self) -> int:
        """The most tokens that a request holds, prompt and output."""
        return int((self.inputs + self.outputs).max())

    @cached_property
    def input_lengths(self) -> LengthDistribution:
        """The marginal law of the prompts."""
        return LengthDistribution.from_counts(self.inputs, self.weights, name=self.name)

    @cached_property
    def output_lengths(self) -> LengthDistribution:
        """The marginal law of the outputs."""
        return LengthDistribution.from_counts(self.outputs, self.weights, self.upper, name=self.name)

    def in_blocks(self, block: int) -> BlockLengths:
        """What requests hold in whole blocks of that many tokens; computed once for each block size."""
        if block != int(block) or block < 1:
            raise ValueError(f"block: {block}; expected a whole number of tokens >= 1")
        return self.remember(("blocks", block), lambda: self._in_blocks(int(block)))

    def _in_blocks(self, block: int) -> BlockLengths:
        peak, prompt = -(-(self.inputs + self.outputs) // block), -(-self.inputs // block)
        growth = block * self.mean(peak - prompt)
        laws = []
        for counts in (peak, prompt):
            share = np.bincount(counts, weights=self.probabilities)
            present = np.flatnonzero(share)
            laws += [block * present.astype(float), share[present]]
        return BlockLengths(*laws, growth)

    @cached_property
    def _memory(self) -> dict[Hashable, Any]:
        return {}

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What ``compute`` returns, computed at the first call with that key: the law never changes."""
        if key not in self._memory:
            self._memory[key] = compute()
        return self._memory[key]

    # ---- transformations ----------------------------------------------------------------------

    def scale(self, s: float, upper: int | None = None) -> JointLengths:
        """Every output times s, rounded half up; prompts stay. Bounds as in `LengthDistribution.scale`."""
        if not (np.isfinite(s) and s > 0):
            raise ValueError(f"s: {s}; expected a positive number")
        bound = int(np.ceil(s * self.upper)) if upper is None else int(upper)
        outputs = np.minimum(np.floor(self.outputs * s + 0.5).astype(np.int64), bound)
        return self._with(self.inputs, outputs, bound)

    def clip(self, upper: int) -> JointLengths:
        """Longer outputs are cut to ``upper`` (a limit of max_tokens), which becomes the bound."""
        return self._with(self.inputs, np.minimum(self.outputs, int(upper)), int(upper))

    def within(self, context: int) -> JointLengths:
        """What an engine of that context length serves: prompts that leave no token are refused, and
        outputs end where prompt and output reach it (ValueError where no prompt fits)."""
        fits = self.inputs < context
        if not fits.any():
            raise ValueError(f"context: {context}; every prompt is as long, the shortest {self.inputs[0]}")
        inputs = self.inputs[fits]
        outputs = np.minimum(self.outputs[fits], context - inputs)
        upper = max(int(outputs.max()), min(self.upper, int(context)))
        return JointLengths.from_counts(inputs, outputs, self.weights[fits], upper, name=self.name)

    def bucketed(self, width: float) -> JointLengths:
        """Fewer pairs: lengths whose logarithms lie in the same bucket of that width become one.

        A bucket stands at its mean prompt and mean output, rounded to tokens, so means move by less than a
        token, and second moments by less than a share width^2 / 4 (a law on an interval that spans a factor
        1 + width has no more variance).
        """
        if not (np.isfinite(width) and width > 0):
            raise ValueError(f"width: {width}; expected a positive number, such as 0.01")
        across, down = _bucket(self.inputs, width), _bucket(self.outputs, width)
        _, at = np.unique(across * (int(down.max()) + 1) + down, return_inverse=True)
        weights = np.bincount(at, weights=self.weights)
        inputs, outputs = (
            np.rint(np.bincount(at, weights=self.weights * x) / weights).astype(np.int64)
            for x in (self.inputs, self.outputs)
        )
        return JointLengths.from_counts(inputs, outputs, weights, self.upper, name=self.name)

    def renamed(self, name: str) -> JointLengths:
        """The same law under another name."""
        return replace(self, name=name)

    def _with(self, inputs: NDArray[np.int64], outputs: NDArray[np.int64], upper: int) -> JointLengths:
        return JointLengths.from_counts(inputs, outputs, self.weights, upper, name=self.name)

    @staticmethod
    def mix(
        laws: Sequence[JointLengths], weights: ArrayLike | None = None, *, name: str = ""
    ) -> JointLengths:
        """A mixture, with one share per law; without them the laws are pooled by their own totals."""
        if not laws:
            raise ValueError("laws: empty; expected at least one")
        factors = np.ones(len(laws))
        if weights is not None:
            shares = np.asarray(weights, dtype=float)
            if shares.shape != factors.shape or not np.all(shares >= 0) or not 0 < shares.sum() < np.inf:
                raise ValueError(
                    f"weights: {shares.tolist()}; expected {len(laws)} shares >= 0, one of them > 0"
                )
            factors = shares / np.array([law.total for law in laws])
        return JointLengths.from_counts(
            np.concatenate([law.inputs for law in laws]),
            np.concatenate([law.outputs for law in laws]),
            np.concatenate([law.weights * f for law, f in zip(laws, factors, strict=True)]),
            max(law.upper for law in laws),
            name=name,
        )

    def sample(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """n independent requests: (n,) prompt and (n,) output tokens, one uniform number each."""
        sums = np.cumsum(self.weights)
        at = np.searchsorted(sums / sums[-1], rng.random(n), side="right")
        return self.inputs[at], self.outputs[at]

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        return (
            f"JointLengths({label}{self.total:,.6g} requests, {self.weights.size:,} pairs, mean prompt "
            f"{self.mean_input:.1f}, mean output {self.mean_output:.1f}, longest {self.longest} tokens)"
        )


def _whole(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """A copy as int64, or a ValueError that names the first value that is not a whole number >= 0."""
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype == bool or not np.issubdtype(array.dtype, np.number):
        raise ValueError(
            f"{what}: {array.dtype} of shape {array.shape}; expected whole numbers in one dimension"
        )
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0) & (array == np.floor(array))))
    if bad.size:
        raise ValueError(f"{what}: position {bad[0]} is {array[bad[0]]}; expected a whole number >= 0")
    return array.astype(np.int64)


def _bucket(tokens: NDArray[np.int64], width: float) -> NDArray[np.int64]:
    """Which logarithmic bucket each length lies in; 0 has one of its own."""
    return np.where(tokens > 0, 1 + np.log(np.maximum(tokens, 1)) // np.log1p(width), 0).astype(np.int64)


def _coarse(law: LengthDistribution, width: float) -> LengthDistribution:
    at = np.unique(_bucket(law.tokens, width), return_inverse=True)[1]
    weights = np.bincount(at, weights=law.weights)
    tokens = np.rint(np.bincount(at, weights=law.weights * law.tokens) / weights).astype(np.int64)
    return LengthDistribution.from_counts(tokens, weights, law.upper, name=law.name)
