"""How much to reserve when the length distribution itself is uncertain.

Every set here is a neighbourhood of a length distribution. It answers two questions: what a
reservation of ``eta`` output tokens costs under the worst member of the set, and which reservation
makes that cost least. The cost of one request is the newsvendor's,
``Q(eta, xi) = c_p (xi - eta)^+ + c_w (eta - xi)^+`` (equations 2 and 3), with critical fractile
``q* = c_p / (c_p + c_w)``. All answers are closed forms on the atoms of the distribution: sums over
sorted lengths and one binary search per reservation, never a solver and never a loop over requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple
from weakref import ReferenceType

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.lengths import LengthDistribution

__all__ = [
    "AmbiguitySet",
    "CVaR",
    "Contamination",
    "Regime",
    "ScaleShift",
    "Wasserstein1",
    "Wasserstein1Solution",
    "WassersteinInf",
    "critical_fractile",
]

Floats = NDArray[np.float64]


def critical_fractile(c_p: float, c_w: float) -> float:
    """q* = c_p / (c_p + c_w) = rho / (1 + rho), the quantile a known distribution asks for (equation 9)."""
    for name, cost in (("c_p", c_p), ("c_w", c_w)):
        if not (np.isfinite(cost) and cost > 0):
            raise ValueError(f"{name}: {cost}; expected a positive number (cost per token)")
    return c_p / (c_p + c_w)


def _reservations(eta: ArrayLike, upper: int) -> Floats:
    """Reservations as floats within [0, upper]; rounding of a solver (1e-9 of upper) is cut off."""
    eta = np.asarray(eta, dtype=np.float64)
    slack = 1e-9 * max(upper, 1)
    if not np.all((eta >= -slack) & (eta <= upper + slack)):
        bad = eta[~((eta >= -slack) & (eta <= upper + slack))]
        raise ValueError(f"eta: {bad.flat[0]}; expected a reservation within [0, {upper}] tokens")
    return np.clip(eta, 0.0, upper)


class AmbiguitySet(ABC):
    """A set of length distributions around a given one. Subclasses are frozen dataclasses."""

    @abstractmethod
    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The reservation (output tokens, within [0, upper]) whose worst-case expected cost is least."""

    @abstractmethod
    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        """Worst-case value and a subgradient in eta, both of the shape of ``eta``."""

    def cut(
        self, dist: LengthDistribution, eta: ArrayLike, c_p: float, c_w: float
    ) -> tuple[Floats, Floats] | tuple[float, float]:
        """The tangent of the worst case at ``eta``: (value, slope), for cutting planes.

        The worst case is convex in eta, so ``value + slope * (x - eta)`` is a lower bound at every x.

        Parameters
        ----------
        eta : number or array, reserved output tokens within [0, upper].
        c_p, c_w : cost per preempted and per wasted token, both positive.

        Returns
        -------
        value, slope : floats, or arrays of the shape of ``eta``.

        Raises
        ------
        ValueError
            If a cost is not positive or a reservation lies outside [0, upper].
        """
        critical_fractile(c_p, c_w)
        value, slope = self._cut(dist, np.atleast_1d(_reservations(eta, dist.upper)).ravel(), c_p, c_w)
        shape = np.shape(eta)
        if shape == ():
            return float(value[0]), float(slope[0])
        return value.reshape(shape), slope.reshape(shape)

    def worst_case(self, dist: LengthDistribution, eta: ArrayLike, c_p: float, c_w: float) -> Floats | float:
        """sup over the set of E Q(eta, xi), for a reservation or an array of them; see `cut`."""
        return self.cut(dist, eta, c_p, c_w)[0]

    def subgradient(self, dist: LengthDistribution, eta: ArrayLike, c_p: float, c_w: float) -> Floats | float:
        """A subgradient of the worst case with respect to eta; see `cut`."""
        return self.cut(dist, eta, c_p, c_w)[1]


@dataclass(frozen=True)
class _Ball(AmbiguitySet):
    """The radius that both Wasserstein sets have: ``radius`` tokens, or means where ``relative``."""

    radius: float
    relative: bool = False

    def __post_init__(self) -> None:
        if not (np.isfinite(self.radius) and self.radius >= 0):
            unit = "multiples of the mean" if self.relative else "tokens"
            raise ValueError(f"radius: {self.radius}; expected a finite number of {unit} >= 0")

    def radius_tokens(self, dist: LengthDistribution) -> float:
        """The radius in tokens around ``dist``."""
        return self.radius * dist.mean if self.relative else self.radius


@dataclass(frozen=True, eq=False)
class _Atoms:
    """Lengths, probabilities and their partial sums; index j splits atoms n < j from atoms n >= j."""

    x: Floats
    p: Floats
    upper: float
    mass_below: Floats  # (m + 1,) sum_{n < j} p_n
    mass_above: Floats  # (m + 1,) sum_{n >= j} p_n
    to_zero: Floats  # (m + 1,) sum_{n < j} p_n x_n, the transport that takes them to 0
    to_upper: Floats  # (m + 1,) sum_{n >= j} p_n (upper - x_n), the transport that takes them to the bound
    mean_above: Floats  # (m + 1,) sum_{n >= j} p_n x_n

    @classmethod
    def of(cls, x: Floats, p: Floats, upper: float) -> _Atoms:
        def before(values: Floats) -> Floats:
            return np.concatenate([[0.0], np.cumsum(values)])

        def after(values: Floats) -> Floats:
            return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])

        # Copies: what is kept must not change with an array that someone else holds.
        sums = (before(p), after(p), before(p * x), after(p * (upper - x)), after(p * x))
        x, p = x.copy(), p.copy()
        for array in (x, p, *sums):
            array.flags.writeable = False
        return cls(x, p, upper, *sums)

    @cached_property
    def reflected(self) -> _Atoms:
        """The distribution of upper - xi."""
        return _Atoms.of(self.upper - self.x[::-1], self.p[::-1], self.upper)


# The partial sums of each distribution that is alive, by its id: to hash or compare distributions costs as
# much as to sum them. Kept here and not on the distribution, whose copies and pickles stay what they are.
_KNOWN: dict[int, tuple[ReferenceType[LengthDistribution], _Atoms]] = {}


def _atoms(dist: LengthDistribution) -> _Atoms:
    """The partial sums of a distribution, which never changes, computed once and dropped with it."""
    key = id(dist)
    known = _KNOWN.get(key)
    if known is not None and known[0]() is dist:
        return known[1]
    atoms = _Atoms.of(dist.tokens.astype(np.float64), dist.probabilities, float(dist.upper))
    _KNOWN[key] = ReferenceType(dist, lambda _, forget=_KNOWN.pop: forget(key, None)), atoms
    return atoms


class Regime(StrEnum):
    """Which of the three closed forms of the Wasserstein-1 reservation holds."""

    FRACTILE = "fractile"  # the empirical fractile, whatever the radius
    JUMP = "jump"  # between the fractile and the far end of the support, whatever the radius
    SUPPORT = "support"  # a point of the support that no longer depends on the data


class Wasserstein1Solution(NamedTuple):
    """The Wasserstein-1 robust reservation."""

    eta: float  # tokens
    value: float  # the worst-case expected cost of a request at eta
    gamma: float  # the dual price of the radius, cost per token
    regime: Regime
    S: float  # tokens: the radius up to which the reservation is the empirical fractile
    S2: float  # tokens: the radius beyond which it does not depend on the data


@dataclass(frozen=True)
class Wasserstein1(_Ball):
    """All distributions on [0, upper] within Wasserstein-1 distance ``radius`` (equation 5).

    Parameters
    ----------
    radius : tokens, or multiples of the mean length where ``relative`` is true.
    relative : whether the radius is in multiples of the mean.

    Notes
    -----
    By duality (equations 8c-8g and 16) the worst case of eta is the minimum over gamma >= 0 of
    ``gamma radius + E max{Q(eta, xi), Q(eta, 0) - gamma xi, Q(eta, L) - gamma (L - xi)}``.
    Take c_p >= c_w and let A be the upper tail of mass exactly 1 - q* (its lowest atom, the fractile
    F, is split). The best eta for a given gamma is where the argument of the maximum changes over
    at the fractile, and the value left is linear in gamma on [c_w, c_p] with slope radius - S and
    on [0, c_w] with slope radius - S2, where

        S = E[(L - xi) 1_A],   S2 = S + E[xi 1_{not A}].

    So gamma* is c_p, c_w or 0, and the reservation takes only three values:

        radius <= S         eta* = F
        S < radius <= S2    eta* = ((c_p - c_w) L + 2 c_w F) / (c_p + c_w)
        radius > S2         eta* = c_p L / (c_p + c_w)

    c_p < c_w is the mirror image, xi -> L - xi.
    """

    @staticmethod
    def thresholds(dist: LengthDistribution, c_p: float, c_w: float) -> tuple[float, float]:
        """(S, S2) in tokens: the radii at which the reservation changes its regime."""
        q = critical_fractile(c_p, c_w)
        atoms = _atoms(dist)
        i = int(np.searchsorted(dist.tokens, dist.quantile(q)))
        # The atom at the fractile belongs to both tails; rounding must not give it a negative share.
        below = min(max(q - atoms.mass_below[i], 0.0), atoms.p[i])
        down = atoms.to_zero[i] + below * atoms.x[i]
        up = atoms.to_upper[i + 1] + (atoms.p[i] - below) * (atoms.upper - atoms.x[i])
        return float(up if c_p >= c_w else down), float(up + down)

    def critical_radius(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """S in tokens: up to this radius the robust reservation is the empirical fractile."""
        return self.thresholds(dist, c_p, c_w)[0]

    def solve(self, dist: LengthDistribution, c_p: float, c_w: float) -> Wasserstein1Solution:
        """The robust reservation with its value, dual price, regime and both thresholds."""
        q, radius, upper = critical_fractile(c_p, c_w), self.radius_tokens(dist), float(dist.upper)
        S, S2 = self.thresholds(dist, c_p, c_w)
        fractile = float(dist.quantile(q))
        if radius <= S:
            gamma, regime, eta = max(c_p, c_w), Regime.FRACTILE, fractile
            value = dist.cost(fractile, c_p, c_w) + gamma * radius
        else:
            gamma, regime = (min(c_p, c_w), Regime.JUMP) if radius <= S2 else (0.0, Regime.SUPPORT)
            eta = q * upper
            if regime is Regime.JUMP:
                # Both cases of the closed form: from the fractile a share of the way to an end.
                eta = fractile + (2 * q - 1) * (upper - fractile if c_p >= c_w else fractile)
            value = q * c_w * upper + gamma * (radius - S2)
        return Wasserstein1Solution(eta, float(value), float(gamma), regime, S, S2)

    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The robust reservation in output tokens; see `solve`."""
        return self.solve(dist, c_p, c_w).eta

    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        atoms = _atoms(dist)
        radius = self.radius_tokens(dist)
        value, slope = np.empty_like(eta), np.empty_like(eta)
        long_worse = c_p * (atoms.upper - eta) >= c_w * eta
        if long_worse.any():
            value[long_worse], slope[long_worse] = _transport(atoms, eta[long_worse], radius, c_p, c_w)
        if not long_worse.all():
            there = ~long_worse
            value[there], mirrored = _transport(atoms.reflected, atoms.upper - eta[there], radius, c_w, c_p)
            slope[there] = -mirrored
        return value, slope


def _transport(atoms: _Atoms, eta: Floats, radius: float, c_p: float, c_w: float) -> tuple[Floats, Floats]:
    """Worst case over a Wasserstein-1 ball where Q(eta, L) >= Q(eta, 0), and its subgradient.

    The adversary spends a transport budget ``radius``. Q is convex in xi, so mass goes to 0 or to L.
    Its gain per token of transport, in the order in which a fractional knapsack takes it, is

    c_p >= c_w: c_p for atoms above eta to L; then (c_p + c_w)(L - eta)/(L - x) - c_w for atoms below
    eta to L, from the top, as long as that beats c_w, the gain of going to 0, which takes the others.
    c_p < c_w: the mirror image, to 0 from the bottom, and then c_p for going to L.
    Last, atoms at 0 go over to L, from the top: (Q(eta, L) - Q(eta, 0)) / (L - 2x).

    In each step the transport used up to an atom is a partial sum that does not depend on eta, so the
    atom within which the budget ends is found once for all reservations. The worst distribution has
    atoms n < a at 0, n >= b at L, the others where they were, and a bonus for the mass moved last. It
    stays feasible at every other eta, so the slope of its expected cost is a subgradient.
    """
    x, upper, m = atoms.x, atoms.upper, atoms.x.size
    at_zero, at_upper = c_w * eta, c_p * (upper - eta)
    k = np.searchsorted(x, eta)

    if c_p >= c_w:
        turn = np.minimum(np.searchsorted(x, upper - (c_p + c_w) * (upper - eta) / (2 * c_w)), k)
        last = m - int(np.searchsorted(atoms.to_upper[::-1], radius))
        spent, whole = atoms.to_upper, min(last + 1, m)
        target, target_slope = at_upper, -c_p
    else:
        turn = np.maximum(np.searchsorted(x, eta * ((c_p + c_w) / (2 * c_p))), k)
        last = int(np.searchsorted(atoms.to_zero, radius)) - 1
        spent, whole = atoms.to_zero, max(last, 0)
        target, target_slope = at_zero, c_w
    steps = [
        radius <= spent[turn],
        radius <= atoms.to_zero[turn] + atoms.to_upper[turn],
        radius < atoms.to_upper[0],
    ]

    def step(*choices: Floats | float) -> Floats:
        # np.select takes several times as long for few reservations.
        return np.where(
            steps[0], choices[0], np.where(steps[1], choices[1], np.where(steps[2], choices[2], 0))
        )

    # First step: from the atom `last` only what the budget leaves moves to the target.
    moved, own, own_slope = 0.0, at_zero, c_w
    if 0 <= last < m:
        distance = upper - x[last] if c_p >= c_w else x[last]
        moved = min(max((radius - spent[whole]) / distance, 0.0), atoms.p[last]) if distance > 0 else 0.0
        own = np.where(x[last] < eta, c_w * (eta - x[last]), c_p * (x[last] - eta))
        own_slope = np.where(x[last] < eta, c_w, -c_p)
    # Third step: the ends hold all mass; from atom `half - 1` downwards it crosses over.
    half = int(np.searchsorted(x, upper / 2))
    ends = (atoms.to_zero + atoms.to_upper)[: half + 1]
    edge = half + 1 - int(np.searchsorted(ends[::-1], radius))
    crossed = 0.0
    if 0 < edge <= half:
        crossed = min(max((radius - ends[edge]) / (upper - 2 * x[edge - 1]), 0.0), atoms.p[edge - 1])

    if c_p >= c_w:
        a, b = step(0, 0, edge), step(whole, turn, edge)
    else:
        a, b = step(whole, turn, edge), step(m, m, edge)
    # In the second step every token of the budget is worth the same, wherever it is spent.
    bonus = [moved * (target - own), min(c_p, c_w) * (radius - spent[turn]), crossed * (at_upper - at_zero)]
    bonus_slope = [moved * (target_slope - own_slope), 0.0, -crossed * (c_p + c_w)]

    middle = np.clip(k, a, b)
    wasted = atoms.mass_below[middle] - atoms.mass_below[a]
    preempted = atoms.mass_above[middle] - atoms.mass_above[b]
    value = at_zero * atoms.mass_below[a] + at_upper * atoms.mass_above[b] + step(*bonus)
    value += c_w * (eta * wasted - (atoms.to_zero[middle] - atoms.to_zero[a]))
    value += c_p * (atoms.mean_above[middle] - atoms.mean_above[b] - eta * preempted)
    slope = c_w * (atoms.mass_below[a] + wasted) - c_p * (atoms.mass_above[b] + preempted)
    return value, slope + step(*bonus_slope)


@dataclass(frozen=True)
class WassersteinInf(_Ball):
    """All distributions that move each length by at most ``radius``, within [0, upper].

    Parameters
    ----------
    radius : tokens, or multiples of the mean length where ``relative`` is true.
    relative : whether the radius is in multiples of the mean.

    Notes
    -----
    A length x may be anywhere in [lo(x), hi(x)] = [max(x - radius, 0), min(x + radius, L)] and Q is
    convex in it, so its worst cost is max{c_p (hi - eta), c_w (eta - lo)}, which changes over at
    g(x) = (c_p hi(x) + c_w lo(x)) / (c_p + c_w). g never falls, so atoms below the reservation are
    wasted and those above are preempted just as without ambiguity, and the minimum is at g of the
    fractile: eta* = g(F^{-1}(q*)), which moves up with the radius one token for each
    (c_p + c_w) / (c_p - c_w) until an end of the support stops it.
    """

    def _ends(self, dist: LengthDistribution, x: ArrayLike) -> tuple[Floats, Floats]:
        radius = self.radius_tokens(dist)
        x = np.asarray(x, dtype=np.float64)
        return np.maximum(x - radius, 0.0), np.minimum(x + radius, dist.upper)

    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The robust reservation in output tokens."""
        q = critical_fractile(c_p, c_w)
        low, high = self._ends(dist, dist.quantile(q))
        return float(low + q * (high - low))

    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        low, high = self._ends(dist, dist.tokens)
        # Two neighbouring atoms may change over at the same point up to rounding; keep the order.
        change = np.maximum.accumulate((c_p * high + c_w * low) / (c_p + c_w))
        k = np.searchsorted(change, eta, side="right")
        wasted = np.concatenate([[0.0], np.cumsum(dist.probabilities)])[k]
        low_sum = np.concatenate([[0.0], np.cumsum(dist.probabilities * low)])[k]
        above = np.cumsum((dist.probabilities * high)[::-1])[::-1]
        high_sum = np.concatenate([above, [0.0]])[k]
        value = c_w * (eta * wasted - low_sum) + c_p * (high_sum - eta * (1 - wasted))
        return value, c_w * wasted - c_p * (1 - wasted)


@dataclass(frozen=True)
class CVaR(AmbiguitySet):
    """All distributions whose density against the given one is at most 1 / (1 - level).

    The worst case is the conditional value at risk of the cost: the mean of its worst 1 - level share.

    Parameters
    ----------
    level : within [0, 1); 0 is the mean.

    Notes
    -----
    The worst share is a lower tail of mass u and an upper tail of mass 1 - level - u. With the
    quantile function F^{-1} the worst case is therefore the largest over u of

        [c_w int_0^u (eta - F^{-1}) + c_p int_{u + level}^1 (F^{-1} - eta)] / (1 - level),

    concave in u and stationary where eta = g(u) = (c_w F^{-1}(u) + c_p F^{-1}(u + level)) / (c_p + c_w).
    g never falls, so one binary search among its steps finds u for each eta. The slope in eta,
    (c_w u - c_p (1 - level - u)) / (1 - level), vanishes at u* = c_p (1 - level) / (c_p + c_w):
    eta* = g(u*), the formula of Gotoh and Takano (European Journal of Operational Research, 2007).
    """

    level: float

    def __post_init__(self) -> None:
        if not 0 <= self.level < 1:
            raise ValueError(f"level: {self.level}; expected within [0, 1)")

    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The robust reservation in output tokens."""
        q = critical_fractile(c_p, c_w)
        u = q * (1 - self.level)
        low, high = dist.quantile(u), dist.quantile(min(u + self.level, 1.0))
        return float(low + q * (high - low))

    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        x, sums = dist.tokens.astype(np.float64), dist.cumulative
        share = 1 - self.level
        knots = np.unique(np.concatenate([[0.0], sums, sums - self.level, [share]]))
        knots = knots[(knots >= 0) & (knots <= share)]
        middle = (knots[1:] + knots[:-1]) / 2
        low = x[np.minimum(np.searchsorted(sums, middle), x.size - 1)]
        high = x[np.minimum(np.searchsorted(sums, middle + self.level), x.size - 1)]
        width = np.diff(knots)
        change = (c_w * low + c_p * high) / (c_p + c_w)
        k = np.searchsorted(change, eta, side="right")
        u = knots[k]
        low_sum = np.concatenate([[0.0], np.cumsum(width * low)])[k]
        high_sum = np.concatenate([np.cumsum((width * high)[::-1])[::-1], [0.0]])[k]
        value = c_w * (eta * u - low_sum) + c_p * (high_sum - eta * (share - u))
        return value / share, (c_w * u - c_p * (share - u)) / share


@dataclass(frozen=True)
class Contamination(AmbiguitySet):
    """A share of requests no longer follows the distribution (Huber's gross errors).

    Parameters
    ----------
    share : within [0, 1).
    two_sided : False, the default: those requests run away to the bound L. True: they may take any
        length in [0, L], Huber's full set.

    Notes
    -----
    The worst case is ``(1 - share) E Q(eta, xi) + share Q(eta, L)``: a mixture with the bound, so
    eta* = F^{-1}(q* / (1 - share)), or L where that quantile does not exist. The full set replaces
    Q(eta, L) by max{Q(eta, 0), Q(eta, L)}. The two agree up to eta = q* L; above it the full set asks
    for the smaller quantile F^{-1}((q* - share) / (1 - share)), and for q* L where the two quantiles
    lie on either side of it.
    """

    share: float
    two_sided: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"share: {self.share}; expected within [0, 1)")

    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The robust reservation in output tokens."""
        q = critical_fractile(c_p, c_w)

        def fractile(p: float) -> float:
            # A quantile of one up to rounding is the longest length, not the bound.
            return float(dist.upper if p > 1 + 1e-12 else dist.quantile(min(max(p, 0.0), 1.0)))

        long = fractile(q / (1 - self.share))
        if not self.two_sided or long <= q * dist.upper:
            return long
        if q < self.share:
            return q * dist.upper
        return max(fractile((q - self.share) / (1 - self.share)), q * dist.upper)

    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        below = dist.cdf(eta)
        at_upper, far, far_slope = (
            c_p * (dist.upper - eta),
            c_p * (dist.upper - eta),
            np.full(eta.shape, -c_p),
        )
        if self.two_sided:
            far = np.maximum(at_upper, c_w * eta)
            far_slope = np.where(at_upper >= c_w * eta, -c_p, c_w)
        value = (1 - self.share) * dist.cost(eta, c_p, c_w) + self.share * far
        slope = (1 - self.share) * (c_w * below - c_p * (1 - below)) + self.share * far_slope
        return value, slope


@dataclass(frozen=True)
class ScaleShift(AmbiguitySet):
    """Every length is multiplied by one unknown factor in [low, high]: the drift of LLM outputs.

    Parameters
    ----------
    low, high : 0 < low <= high. Scaled lengths are not rounded and not cut at the bound L, which
        can only raise the worst case; the reservation stays within [0, L].

    Notes
    -----
    E Q(eta, s xi) is convex in s, so the worst factor is an end. The difference of the two costs,
    high minus low, never rises in eta: its slope is (c_p + c_w)(F(eta/high) - F(eta/low)) <= 0. It
    changes sign at one point e, before which the high factor is worse. The larger of the two is then
    least at the median of low F^{-1}(q*), e and high F^{-1}(q*).
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.high) and 0 < self.low <= self.high):
            raise ValueError(f"low, high: {self.low}, {self.high}; expected 0 < low <= high, finite")

    def _costs(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        return tuple(s * dist.cost(eta / s, c_p, c_w) for s in (self.low, self.high))

    def reservation(self, dist: LengthDistribution, c_p: float, c_w: float) -> float:
        """The robust reservation in output tokens."""
        fractile = dist.quantile(critical_fractile(c_p, c_w))
        knots = np.unique(np.concatenate([[0.0], self.low * dist.tokens, self.high * dist.tokens]))
        low, high = self._costs(dist, knots, c_p, c_w)
        gap = high - low
        after = int(np.argmax(gap <= 0)) if np.any(gap <= 0) else gap.size - 1
        crossing = knots[after]
        if after > 0 and gap[after] < 0 < gap[after - 1]:
            step = knots[after] - knots[after - 1]
            crossing = knots[after - 1] + step * gap[after - 1] / (gap[after - 1] - gap[after])
        return float(min(np.median([self.low * fractile, crossing, self.high * fractile]), dist.upper))

    def _cut(self, dist: LengthDistribution, eta: Floats, c_p: float, c_w: float) -> tuple[Floats, Floats]:
        low, high = self._costs(dist, eta, c_p, c_w)
        below = np.where(high >= low, dist.cdf(eta / self.high), dist.cdf(eta / self.low))
        return np.maximum(low, high), c_w * below - c_p * (1 - below)
