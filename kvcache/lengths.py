"""Length distributions: the currency of the package.

Output lengths are integers, so a trace of any number of requests is a weighted distribution on at
most ``upper + 1`` atoms. Everything downstream works on those atoms and never on requests.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["LengthDistribution"]

# A probability is compared with a cumulative sum up to this relative slack, so that
# quantile(0.9) of ten equal atoms is the ninth whatever the rounding of the sum.
PROBABILITY_SLACK = 1e-12


def _whole_numbers(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Values as int64, or a ValueError that names the first offending position."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what}: expected one dimension, found shape {array.shape}")
    if array.dtype == bool or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{what}: expected whole numbers, found {array.dtype}")
    if np.issubdtype(array.dtype, np.floating):
        bad = np.flatnonzero(~np.isfinite(array) | (array != np.floor(array)))
        if bad.size:
            raise ValueError(f"{what}: position {bad[0]} is {array[bad[0]]}; expected a whole number")
    bad = np.flatnonzero(array < 0)
    if bad.size:
        raise ValueError(f"{what}: position {bad[0]} is {array[bad[0]]}; expected >= 0")
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class LengthDistribution:
    """A weighted distribution on the integers ``0..upper`` (tokens).

    Parameters
    ----------
    tokens : (m,) int array
        The support: strictly increasing, within ``0..upper``.
    weights : (m,) float array
        Positive weights, in proportion to the probabilities. Counts of requests are kept as they
        come, so that ``total`` still tells how many requests stand behind the distribution.
    upper : int
        The support bound ``L_max``: no length can exceed it.
    name : str
        A label for tables and figures.
    reconstructed : bool
        True when made from published quantiles and not from requests.

    Raises
    ------
    ValueError
        If the support is empty, unsorted, negative or above ``upper``, or a weight is not positive.
    """

    tokens: NDArray[np.int64]
    weights: NDArray[np.float64]
    upper: int
    name: str = ""
    reconstructed: bool = False

    def __post_init__(self) -> None:
        tokens = _whole_numbers(self.tokens, "tokens")
        weights = np.asarray(self.weights, dtype=np.float64)
        if tokens.size == 0:
            raise ValueError("tokens: empty; a distribution needs at least one atom")
        if weights.shape != tokens.shape:
            raise ValueError(f"weights: shape {weights.shape}; expected {tokens.shape} as tokens")
        bad = np.flatnonzero(~np.isfinite(weights) | (weights <= 0))
        if bad.size:
            raise ValueError(f"weights: position {bad[0]} is {weights[bad[0]]}; expected > 0 and finite")
        if np.any(np.diff(tokens) <= 0):
            at = int(np.flatnonzero(np.diff(tokens) <= 0)[0]) + 1
            raise ValueError(f"tokens: position {at} is {tokens[at]}, not above the one before it")
        whole = np.isfinite(self.upper) and self.upper == int(self.upper)
        if not whole or self.upper < tokens[-1]:
            raise ValueError(
                f"upper: {self.upper}; expected a whole number >= the longest length {tokens[-1]}"
            )
        tokens.flags.writeable = False
        weights = weights.copy()
        weights.flags.writeable = False
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "upper", int(self.upper))

    # ---- construction -------------------------------------------------------------------------

    @classmethod
    def from_samples(
        cls, values: ArrayLike, upper: int | None = None, *, name: str = ""
    ) -> LengthDistribution:
        """The empirical distribution of observed lengths (tokens); ``upper`` defaults to their maximum."""
        values = _whole_numbers(values, "values")
        if values.size == 0:
            raise ValueError("values: empty; a distribution needs at least one length")
        tokens, counts = np.unique(values, return_counts=True)
        return cls.from_counts(tokens, counts, upper, name=name)

    @classmethod
    def from_counts(
        cls,
        tokens: ArrayLike,
        counts: ArrayLike,
        upper: int | None = None,
        *,
        name: str = "",
        reconstructed: bool = False,
    ) -> LengthDistribution:
        """From how often each length occurs. Repeated lengths add up, zero counts are left out.

        ``tokens`` (n,) whole numbers in any order, ``counts`` (n,) non-negative, ``upper`` defaults
        to the longest length with a positive count.
        """
        tokens = _whole_numbers(tokens, "tokens")
        counts = np.asarray(counts, dtype=np.float64)
        if counts.shape != tokens.shape:
            raise ValueError(f"counts: shape {counts.shape}; expected {tokens.shape} as tokens")
        bad = np.flatnonzero(~np.isfinite(counts) | (counts < 0))
        if bad.size:
            raise ValueError(f"counts: position {bad[0]} is {counts[bad[0]]}; expected >= 0 and finite")
        support, inverse = np.unique(tokens, return_inverse=True)
        weights = np.bincount(inverse, weights=counts, minlength=support.size)
        keep = weights > 0
        if not keep.any():
            raise ValueError("counts: all zero; a distribution needs at least one request")
        support, weights = support[keep], weights[keep]
        return cls(support, weights, int(support[-1]) if upper is None else upper, name, reconstructed)

    @classmethod
    def from_quantiles(
        cls,
        quantiles: Mapping[float, int],
        mean: float,
        *,
        minimum: int,
        maximum: int,
        total: float = 1.0,
        name: str = "",
    ) -> LengthDistribution:
        """A reconstruction that has the given quantiles exactly and the given mean.

        Between two neighbouring published quantiles (p_a, x_a), (p_b, x_b) the quantile function is
        x_a + (x_b - x_a) t^k with t the share of the way from p_a to p_b. The one shape k > 0 is
        common to all intervals and is found by bisection so that the mean of the distribution on
        the integers equals ``mean``. The result is marked ``reconstructed``.

        Parameters
        ----------
        quantiles : mapping of probability in (0, 1) to tokens, both increasing.
        mean : tokens.
        minimum, maximum : tokens, the ends of the support.
        total : how many requests the distribution stands for.

        Raises
        ------
        ValueError
            If the quantiles are not monotone or no distribution with them has that mean.
        """
        points = sorted((float(p), int(x)) for p, x in quantiles.items())
        p = np.array([0.0, *(q for q, _ in points), 1.0])
        # The knot before the minimum gives the minimum itself a positive probability.
        x = np.array([minimum - 1, *(v for _, v in points), maximum], dtype=np.float64)
        if p[1] <= 0 or p[-2] >= 1 or np.any(np.diff(p) <= 0):
            raise ValueError(f"quantiles: probabilities {p[1:-1].tolist()}; expected distinct, within (0, 1)")
        if np.any(np.diff(x) < 0):
            raise ValueError(f"quantiles: lengths {x[1:].tolist()} from minimum to maximum decrease")

        grid = np.arange(int(minimum), int(maximum) + 1)
        # Flat stretches (equal neighbouring quantiles) carry their mass as an atom: at each length
        # the highest knot that lies there decides. Segment j holds lengths in (x_j, x_{j+1}].
        segment = np.searchsorted(x, grid, side="left") - 1
        exact = np.searchsorted(x, grid, side="right") - 1

        def probabilities(k: float) -> NDArray[np.float64]:
            width = np.maximum(x[segment + 1] - x[segment], 1.0)
            share = ((grid - x[segment]) / width) ** (1.0 / k)
            cumulative = p[segment] + (p[segment + 1] - p[segment]) * share
            on_knot = x[exact] == grid
            cumulative[on_knot] = p[exact[on_knot]]
            return np.diff(cumulative, prepend=0.0)

        low, high = 1e-3, 1e3
        means = [float(grid @ probabilities(k)) for k in (low, high)]
        if not means[1] <= mean <= means[0]:
            raise ValueError(
                f"mean: {mean}; with these quantiles it lies in [{means[1]:.6g}, {means[0]:.6g}]"
            )
        for _ in range(200):
            middle = np.sqrt(low * high)
            low, high = (middle, high) if grid @ probabilities(middle) > mean else (low, middle)
        return cls.from_counts(
            grid, probabilities(np.sqrt(low * high)) * total, int(maximum), name=name, reconstructed=True
        )

    # ---- moments and quantiles ----------------------------------------------------------------

    @cached_property
    def total(self) -> float:
        """Sum of the weights: the number of requests, where the weights are counts."""
        return float(self.weights.sum())

    @cached_property
    def probabilities(self) -> NDArray[np.float64]:
        """(m,) probabilities of the atoms; they sum to one."""
        return self.weights / self.total

    @cached_property
    def cumulative(self) -> NDArray[np.float64]:
        """(m,) P(xi <= tokens); the last entry is exactly one."""
        sums = np.cumsum(self.weights)
        return sums / sums[-1]

    @cached_property
    def _partial_means(self) -> NDArray[np.float64]:
        """(m + 1,) E[xi; xi among the first j atoms]."""
        return np.concatenate([[0.0], np.cumsum(self.tokens * self.weights)]) / self.total

    @property
    def mean(self) -> float:
        """E[xi], tokens."""
        return float(self._partial_means[-1])

    @cached_property
    def variance(self) -> float:
        """Var[xi], tokens squared."""
        return float(self.probabilities @ (self.tokens - self.mean) ** 2)

    @property
    def std(self) -> float:
        """Standard deviation, tokens."""
        return float(np.sqrt(self.variance))

    def _below(self, x: ArrayLike) -> NDArray[np.intp]:
        """How many atoms are not longer than x."""
        return np.searchsorted(self.tokens, np.asarray(x, dtype=np.float64), side="right")

    def cdf(self, x: ArrayLike) -> NDArray[np.float64] | float:
        """P(xi <= x), for a number or an array."""
        value = np.concatenate([[0.0], self.cumulative])[self._below(x)]
        return float(value) if np.ndim(x) == 0 else value

    def quantile(self, p: ArrayLike) -> NDArray[np.int64] | int:
        """The inverse CDF: the smallest length x with P(xi <= x) >= p, for 0 <= p <= 1.

        It is always an atom: there is no interpolation between lengths. quantile(0) is the
        shortest length. P(xi <= x) counts as >= p up to a relative 1e-12.
        """
        p = np.asarray(p, dtype=np.float64)
        if np.any(~(p >= 0)) or np.any(p > 1):
            raise ValueError(f"p: {p}; expected probabilities within [0, 1]")
        at = np.searchsorted(self.cumulative, p * (1 - PROBABILITY_SLACK), side="left")
        value = self.tokens[at]
        return int(value) if p.ndim == 0 else value

    def excess(self, eta: ArrayLike) -> NDArray[np.float64] | float:
        """E (xi - eta)^+: expected tokens beyond a reservation of eta, for a number or an array."""
        grid = np.asarray(eta, dtype=np.float64)
        at = self._below(grid)
        above = 1.0 - np.concatenate([[0.0], self.cumulative])[at]
        value = np.maximum(self._partial_means[-1] - self._partial_means[at] - grid * above, 0.0)
        return float(value) if np.ndim(eta) == 0 else value

    def shortfall(self, eta: ArrayLike) -> NDArray[np.float64] | float:
        """E (eta - xi)^+: expected reserved tokens that stay unused, for a number or an array."""
        grid = np.asarray(eta, dtype=np.float64)
        at = self._below(grid)
        below = np.concatenate([[0.0], self.cumulative])[at]
        value = np.maximum(grid * below - self._partial_means[at], 0.0)
        return float(value) if np.ndim(eta) == 0 else value

    def cost(self, eta: ArrayLike, c_p: float, c_w: float) -> NDArray[np.float64] | float:
        """E Q(eta, xi) = c_p E (xi - eta)^+ + c_w E (eta - xi)^+ (equations 2 and 3)."""
        return c_p * self.excess(eta) + c_w * self.shortfall(eta)

    # ---- transformations ----------------------------------------------------------------------

    def renamed(self, name: str) -> LengthDistribution:
        """The same distribution under another name."""
        return replace(self, name=name)

    def scale(self, s: float, upper: int | None = None) -> LengthDistribution:
        """Every length times s, rounded half up to whole tokens.

        The bound becomes ceil(s upper), or ``upper``; lengths above an explicit ``upper`` are cut to it.
        """
        if not (np.isfinite(s) and s > 0):
            raise ValueError(f"s: {s}; expected a positive number")
        bound = int(np.ceil(s * self.upper)) if upper is None else int(upper)
        tokens = np.minimum(np.floor(self.tokens * s + 0.5).astype(np.int64), bound)
        return self._with_tokens(tokens, bound)

    def _with_tokens(self, tokens: NDArray[np.int64], upper: int) -> LengthDistribution:
        return LengthDistribution.from_counts(
            tokens, self.weights, upper, name=self.name, reconstructed=self.reconstructed
        )

    def clip(self, upper: int) -> LengthDistribution:
        """Longer lengths are cut to ``upper`` (a generation limit of max_tokens), which becomes the bound."""
        return self._with_tokens(np.minimum(self.tokens, int(upper)), int(upper))

    def with_upper(self, upper: int) -> LengthDistribution:
        """The same lengths under another support bound, which must not be below the longest of them."""
        return replace(self, upper=upper)

    @staticmethod
    def mix(
        distributions: Sequence[LengthDistribution], weights: ArrayLike | None = None, *, name: str = ""
    ) -> LengthDistribution:
        """A mixture. ``weights`` (one per distribution, non-negative) are shares of the mixture;
        without them the distributions are pooled by their own totals. The bound is the largest."""
        if not distributions:
            raise ValueError("distributions: empty; expected at least one")
        if weights is None:
            factors = np.ones(len(distributions))
        else:
            weights = np.asarray(weights, dtype=np.float64)
            if weights.shape != (len(distributions),):
                raise ValueError(f"weights: shape {weights.shape}; expected ({len(distributions)},)")
            if np.any(~np.isfinite(weights)) or np.any(weights < 0) or weights.sum() <= 0:
                raise ValueError(f"weights: {weights.tolist()}; expected >= 0 with a positive sum")
            factors = weights / np.array([d.total for d in distributions])
        return LengthDistribution.from_counts(
            np.concatenate([d.tokens for d in distributions]),
            np.concatenate([d.weights * f for d, f in zip(distributions, factors, strict=True)]),
            max(d.upper for d in distributions),
            name=name,
            reconstructed=any(d.reconstructed for d in distributions),
        )

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """n independent lengths (tokens) by inversion of the CDF, one uniform number each."""
        return self.tokens[np.searchsorted(self.cumulative, rng.random(n), side="right")]

    def samples(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """One length and one probability per sample: (N,) tokens and (N,) shares.

        Weights that are whole numbers are counts of samples; others stand for one sample per atom.
        """
        if np.any(self.weights != np.round(self.weights)):
            return self.tokens.astype(float), self.probabilities
        lengths = np.repeat(self.tokens, self.weights.astype(np.int64)).astype(float)
        return lengths, np.full(lengths.size, 1.0 / lengths.size)

    # ---- distances ----------------------------------------------------------------------------

    def total_variation(self, other: LengthDistribution) -> float:
        """Total variation distance, half the L1 distance of the probabilities, within [0, 1]."""
        _, p, q = _aligned(self, other)
        return float(np.abs(p - q).sum() / 2)

    def wasserstein(self, other: LengthDistribution) -> float:
        """W1 distance, tokens: the area between the two CDFs."""
        support, p, q = _aligned(self, other)
        gap = np.abs(np.cumsum(p - q))[:-1]
        return float(gap @ np.diff(support))

    # ---- looks --------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LengthDistribution):
            return NotImplemented
        return (
            self.upper == other.upper
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.probabilities, other.probabilities)
        )

    def __hash__(self) -> int:
        return hash((self.upper, self.tokens.tobytes(), self.probabilities.tobytes()))

    def summary(self) -> dict[str, float]:
        """Requests, mean, standard deviation, P50, P90, P95, P99, maximum and bound (tokens)."""
        p50, p90, p95, p99 = self.quantile([0.5, 0.9, 0.95, 0.99]).tolist()
        quantiles = {"p50": p50, "p90": p90, "p95": p95, "p99": p99}
        moments = {"requests": self.total, "mean": self.mean, "std": self.std}
        return {**moments, **quantiles, "max": int(self.tokens[-1]), "upper": self.upper}

    def __repr__(self) -> str:
        s = self.summary()
        label = f"{self.name!r}, " if self.name else ""
        mark = ", reconstructed" if self.reconstructed else ""
        return (
            f"LengthDistribution({label}{s['requests']:,.6g} requests, mean {s['mean']:.1f}, P50 {s['p50']}, "
            f"P90 {s['p90']}, P99 {s['p99']}, max {s['max']}, upper {s['upper']} tokens{mark})"
        )

    def _repr_html_(self) -> str:
        s = self.summary()
        cells = {
            "requests": f"{s['requests']:,.6g}",
            "mean": f"{s['mean']:.1f}",
            "std": f"{s['std']:.1f}",
            **{key: f"{s[key]:,}" for key in ("p50", "p90", "p95", "p99", "max", "upper")},
        }
        title = html.escape(self.name or "length distribution") + (
            " (reconstructed)" if self.reconstructed else ""
        )
        head = "".join(f"<th>{key}</th>" for key in cells)
        body = "".join(f"<td>{value}</td>" for value in cells.values())
        return f"<table><caption>{title}, tokens</caption><tr>{head}</tr><tr>{body}</tr></table>"


def _aligned(
    a: LengthDistribution, b: LengthDistribution
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The joint support and both probability vectors on it."""
    support = np.union1d(a.tokens, b.tokens)
    p, q = np.zeros(support.size), np.zeros(support.size)
    p[np.searchsorted(support, a.tokens)] = a.probabilities
    q[np.searchsorted(support, b.tokens)] = b.probabilities
    return support, p, q
