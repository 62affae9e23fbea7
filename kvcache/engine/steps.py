"""How long one iteration of an engine takes: the step cost of a serving group.

An engine that batches continuously runs one iteration after another. In each, B requests that hold K
cached tokens decode one token each, and P prompt tokens are prefilled beside them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FitErrors", "StepCost", "StepTable"]

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


@dataclass(frozen=True)
class FitErrors:
    """How far a linear step cost is from the measured steps it was fitted to, relative to each.

    Parameters
    ----------
    median, largest : of |fitted - measured| / measured.
    points : how many measured steps the fit saw.
    """

    median: float
    largest: float
    points: int


@dataclass(frozen=True, eq=False)
class StepTable:
    """Seconds of one iteration, measured on a grid; the methods are those of `StepCost`.

    Parameters
    ----------
    decoding : (n,) decoding requests, increasing, >= 0.
    cached_tokens : (m,) tokens that those requests hold together, increasing, >= 0.
    prefill_tokens : (p,) prompt tokens in the iteration, increasing, >= 0.
    measured : (n, m, p) seconds, > 0; (n, m) where only one number of prompt tokens was measured.

    Raises
    ------
    ValueError
        For an axis that is empty, negative or does not increase, a shape that does not fit or a time that
        is not positive.

    Notes
    -----
    Between grid points the time is multilinear. Outside the grid the outermost cell is continued linearly,
    but never below the shortest measured step; an axis of a single point does not change the time.
    """

    decoding: Floats
    cached_tokens: Floats
    prefill_tokens: Floats
    measured: Floats

    def __post_init__(self) -> None:
        axes = ("decoding", "cached_tokens", "prefill_tokens")
        for name in axes:
            axis = np.array(getattr(self, name), dtype=float)
            if axis.ndim != 1 or axis.size == 0 or not np.all(np.isfinite(axis)) or axis[0] < 0:
                raise ValueError(f"step table: {name} is {axis}; expected numbers >= 0, at least one")
            bad = np.flatnonzero(np.diff(axis) <= 0)
            if bad.size:
                at = bad[0] + 1
                raise ValueError(f"step table: {name}[{at}] is {axis[at]}, not above {axis[at - 1]}")
            _freeze(self, name, axis)
        shape = tuple(getattr(self, name).size for name in axes)
        times = np.array(self.measured, dtype=float)
        if times.shape == shape[:2] and shape[2] == 1:
            times = times[..., None]
        if times.shape != shape:
            raise ValueError(f"step table: measured has shape {times.shape}; expected {shape} as {axes}")
        bad = np.argwhere(~(np.isfinite(times) & (times > 0)))
        if bad.size:
            at = tuple(int(i) for i in bad[0])
            raise ValueError(f"step table: measured{list(at)} is {times[at]}; expected seconds > 0")
        _freeze(self, "measured", times)

    def seconds(
        self, decoding: ArrayLike, cached_tokens: ArrayLike, prefill_tokens: ArrayLike = 0
    ) -> Floats | float:
        """tau of iterations with B ``decoding`` requests, K ``cached_tokens`` and P ``prefill_tokens``."""
        value = np.maximum(self._line(decoding, cached_tokens, prefill_tokens), self._shortest)
        return float(value) if np.ndim(value) == 0 else value

    def _line(self, decoding: ArrayLike, cached_tokens: ArrayLike, prefill_tokens: ArrayLike) -> Floats:
        """Multilinear between grid points and beyond them."""
        i, i_up, s = _cell(self.decoding, decoding)
        j, j_up, t = _cell(self.cached_tokens, cached_tokens)
        k, k_up, u = _cell(self.prefill_tokens, prefill_tokens)
        m = self.measured

        def at_prefill(k: NDArray[np.intp]) -> Floats:
            low = m[i, j, k] + t * (m[i, j_up, k] - m[i, j, k])
            high = m[i_up, j, k] + t * (m[i_up, j_up, k] - m[i_up, j, k])
            return low + s * (high - low)

        value = at_prefill(k)
        if m.shape[2] > 1:
            value = value + u * (at_prefill(k_up) - value)
        return value

    @cached_property
    def _shortest(self) -> float:
        return float(self.measured.min())

    def span(self, decoding: int, cached_tokens: float, steps: int) -> float:
        """Seconds of that many iterations without prompts, in which every request grows by a token each.

        The time is piecewise linear in the cached tokens, and a piece sums up to its number of iterations
        times the mean of its first and last one.
        """
        ends, slopes, heights = self._pieces(decoding)
        at, left, seconds = float(cached_tokens), int(steps), 0.0
        while left > 0:
            piece = bisect_right(ends, at)
            count = left
            if decoding and piece < len(ends):
                count = min(left, ceil((ends[piece] - at) / decoding))
            seconds += count * (heights[piece] + slopes[piece] * (at + decoding * (count - 1) / 2))
            at, left = at + decoding * count, left - count
        return seconds

    @cached_property
    def _known_pieces(self) -> dict[int, tuple[list[float], list[float], list[float]]]:
        return {}

    def _pieces(self, decoding: int) -> tuple[list[float], list[float], list[float]]:
        """The time without prompts by cached tokens: where its pieces end, their slopes and heights."""
        if decoding in self._known_pieces:
            return self._known_pieces[decoding]
        grid, values = self.cached_tokens, np.atleast_1d(self._line(decoding, self.cached_tokens, 0))
        slope = np.diff(values) / np.diff(grid) if grid.size > 1 else np.zeros(1)
        height = values[: slope.size] - slope * grid[: slope.size]
        kinks, floor = grid[1:-1], self._shortest
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (floor - height) / slope
        low, high = np.append(-np.inf, kinks), np.append(kinks, np.inf)
        ends = np.union1d(kinks, crossing[(crossing > low) & (crossing < high)])
        between = np.concatenate([[-np.inf], ends, [np.inf]])
        middle = np.clip(between[:-1], -1e12, 1e12) / 2 + np.clip(between[1:], -1e12, 1e12) / 2
        cell = np.searchsorted(kinks, middle, side="right")
        above = slope[cell] * middle + height[cell] > floor
        pieces = (
            ends.tolist(),
            np.where(above, slope[cell], 0.0).tolist(),
            np.where(above, height[cell], floor).tolist(),
        )
        self._known_pieces[decoding] = pieces
        return pieces

    def linear(
        self,
        decoding: tuple[float, float] = (0, np.inf),
        cached_tokens: tuple[float, float] = (0, np.inf),
        prefill_tokens: tuple[float, float] = (0, np.inf),
        context: tuple[float, float] = (0, np.inf),
    ) -> tuple[StepCost, FitErrors]:
        """The linear step cost nearest to the table over a region, and how far it is.

        Least squares of the relative errors, tau_fit / tau - 1, over the grid points within the region, with
        constants >= 0. A constant whose axis has one point there is 0: its share is in t0.

        Parameters
        ----------
        decoding, cached_tokens, prefill_tokens : (least, most) of each, both included.
        context : (least, most) of the tokens per decoding request, K / B: a table is a rectangle and an
            engine's iterations are not.

        Raises
        ------
        ValueError
            If the region holds fewer grid points than constants to fit, or the fit has t0 = 0.
        """
        from scipy.optimize import nnls  # a core import must not load the optimiser

        grid = np.meshgrid(self.decoding, self.cached_tokens, self.prefill_tokens, indexing="ij")
        b, k, _ = grid
        region = {
            "decoding": (b, decoding),
            "cached_tokens": (k, cached_tokens),
            "prefill_tokens": (grid[2], prefill_tokens),
            "context": (np.divide(k, b, out=np.where(k > 0, np.inf, 0.0), where=b > 0), context),
        }
        inside = np.ones(b.shape, bool)
        for values, (low, high) in region.values():
            inside &= (values >= low) & (values <= high)
        columns = [axis[inside] for axis in grid]
        varies = [c.size > 0 and np.ptp(c) > 0 for c in columns]
        needed = max(2, 1 + sum(varies))
        if inside.sum() < needed:
            bounds = ", ".join(f"{name} {bounds}" for name, (_, bounds) in region.items())
            raise ValueError(f"step table: {inside.sum()} grid points in {bounds}; expected >= {needed}")
        times = self.measured[inside]
        # Columns in units of their largest entry: nnls stops at an absolute tolerance.
        scales = [float(c.max()) if v else 1.0 for c, v in zip(columns, varies, strict=True)]
        design = [np.ones(times.size)]
        design += [c / s if v else 0 * c for c, s, v in zip(columns, scales, varies, strict=True)]
        fitted, _ = nnls(np.stack(design, axis=1) / times[:, None], np.ones(times.size))
        if fitted[0] <= 0:
            raise ValueError("step table: the fit has t0 = 0; expected steps that cost time when empty")
        cost = StepCost(float(fitted[0]), *(float(f / s) for f, s in zip(fitted[1:], scales, strict=True)))
        errors = np.abs(cost.seconds(*columns) / times - 1)
        return cost, FitErrors(float(np.median(errors)), float(errors.max()), times.size)


def _freeze(table: StepTable, name: str, array: Floats) -> None:
    array.flags.writeable = False
    object.__setattr__(table, name, array)


def _cell(axis: Floats, x: ArrayLike) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """The grid cell of each x, its two ends, and the share of the way between them (outside 0..1 beyond)."""
    x = np.asarray(x, dtype=float)
    if axis.size == 1:
        none = np.zeros(x.shape, np.intp)
        return none, none, np.zeros(x.shape)
    low = np.minimum(np.maximum(axis.searchsorted(x, side="right") - 1, 0), axis.size - 2)
    return low, low + 1, (x - axis[low]) / (axis[low + 1] - axis[low])
