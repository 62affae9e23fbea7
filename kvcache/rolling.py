"""Reservations that are made again for every window of time, from the windows before it.

A `Rule` says how to reserve for the next window given the past ones; `Rolling` runs it on windows that
are fed one by one. A rule is handed a `Past`, which holds the windows before the one it decides for
and nothing else, so no policy can see the lengths it is judged on.

All work is on counts of requests per length: it grows with the number of windows and with the support
bound, never with the number of requests. What happened in a window tells what *every* reservation
would have cost there, so the learning rules below learn from full information.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.ambiguity import critical_fractile
from kvcache.lengths import PROBABILITY_SLACK, LengthDistribution

__all__ = [
    "PULLS",
    "RIDGES",
    "AdaHedge",
    "Aggregate",
    "LogOdds",
    "Past",
    "Rolling",
    "Rule",
    "adaptive",
    "calibrating_shift",
    "log_odds",
]

Floats = NDArray[np.float64]
T = TypeVar("T")

#: Windows before which `LogOdds` does not count its errors: its regressors are hardly more than the last one.
SETTLED = 4


# ---- the past ---------------------------------------------------------------------------------------


class Past:
    """The windows seen so far, dense on the lengths 0..``upper`` (tokens) so that they can be averaged."""

    def __init__(self, upper: int) -> None:
        self.upper = int(upper)
        self._size = 0
        self._requests = np.zeros(8)
        self._probabilities = np.zeros((8, self.upper + 1))
        self._log_odds = np.zeros((8, self.upper + 1))
        self._memo: dict[Hashable, object] = {}

    def __len__(self) -> int:
        return self._size

    @property
    def requests(self) -> Floats:
        """(t,) requests per window."""
        return self._requests[: self._size]

    @property
    def probabilities(self) -> Floats:
        """(t, upper + 1) shares of the requests of each window by length."""
        return self._probabilities[: self._size]

    @property
    def log_odds(self) -> Floats:
        """(t, upper + 1) log odds of the windows' CDFs, as `log_odds` makes them."""
        return self._log_odds[: self._size]

    def append(self, window: LengthDistribution) -> None:
        """Add the window that has just ended; its weights are counts of requests."""
        if window.upper != self.upper:
            raise ValueError(
                f"window {window.name!r} after {self._size}: upper is {window.upper}; expected {self.upper}, "
                "the bound of the windows before it"
            )
        if self._size == self._requests.size:
            for name in ("_requests", "_probabilities", "_log_odds"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._requests[self._size] = window.total
        self._probabilities[self._size, window.tokens] = window.probabilities
        self._log_odds[self._size] = log_odds(window)
        self._size += 1
        self._memo.clear()

    def before(self, windows: int) -> Past:
        """The past as it was after so many windows (a view, which must not be appended to)."""
        earlier = Past.__new__(Past)
        earlier.upper, earlier._size, earlier._memo = self.upper, windows, {}
        for name in ("_requests", "_probabilities", "_log_odds"):
            view = getattr(self, name)[:windows]
            view.flags.writeable = False
            setattr(earlier, name, view)
        return earlier

    def remembered(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The value of ``compute()``, kept until the next window: rules and cost ratios share it."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]  # type: ignore[return-value]


def log_odds(window: LengthDistribution) -> Floats:
    """(upper + 1,) log F(x) / (1 - F(x)) of a window's CDF at x = 0..upper.

    Half a request is added to both sides, so that it is finite where nothing was seen.
    """
    below = window.cdf(np.arange(window.upper + 1))
    half = 0.5 / window.total
    return np.log((below + half) / (1.0 - below + half))


def halving(windows: int, half_life: float) -> Floats:
    """(windows,) shares, oldest first, each half of that ``half_life`` windows later; they sum to one."""
    kept = 0.5 ** (np.arange(windows)[::-1] / half_life)
    return kept / kept.sum()


def at_least(name: str, value: float, bound: float) -> None:
    """Raise ValueError unless the value is a whole number that reaches the bound."""
    if value != int(value) or value < bound:
        raise ValueError(f"{name}: {value}; expected a whole number >= {bound}")


def positive(name: str, value: float, what: str) -> None:
    """Raise ValueError unless the value is positive."""
    if not value > 0:
        raise ValueError(f"{name}: {value}; expected a positive {what}")


# ---- rules --------------------------------------------------------------------------------------------


class Learner(ABC):
    """What a rule knows for one pair of costs. It is asked, then told, window after window."""

    @abstractmethod
    def reservation(self, past: Past) -> float:
        """Output tokens to reserve in the window after ``past``."""

    def learn(self, past: Past, window: LengthDistribution) -> None:
        """``window`` came after ``past``."""
        return None


class Rule(ABC):
    """How to reserve for the next window. Subclasses are frozen dataclasses without state."""

    @abstractmethod
    def start(self, c_p: float, c_w: float) -> Learner:
        """A learner that has seen nothing yet."""


@dataclass(frozen=True)
class LogOdds(Rule):
    """A regression of the next CDF's log odds on recent ones, learned as the windows go by.

    With z_t(x) = log F_t(x) / (1 - F_t(x)) the forecast of window t is

        z(x) = z_{t-1}(x) + b_1 (m(x) - z_{t-1}(x)) + b_2 (z_{t-1}(x) - z_{t-2}(x)) + b_3 d(x),

    where m is the exponentially weighted mean of the past z and d is how z moves at this time of the
    season: the sum of the past moves z_{t-ks} - z_{t-ks-1}, k = 1, 2, ..., over their number plus ``doubt``.
    Every length x whose forecast log odds lie within ``reach`` of the target's gives one equation after the
    window, weighted by the stretch of log odds that it stands for; b is their ridge estimate around
    ``prior``, older windows being forgotten by the factor ``forgetting`` per window.

    Averages of log odds are geometric: one odd window does not drag a tail quantile to itself
    as it drags a mixture of distributions.

    The forecast is then recalibrated. Let e_u be the past errors in z at the fractile. The level a is
    taken so that the expected share of requests that fit is q*: the mean of expit(a + e_u) over the
    past windows by requests (the first `SETTLED` left out), and over ``calm`` further windows with e = 0,
    equals q*.

    Parameters
    ----------
    prior : (b_1, b_2, b_3) before anything is learned.
    ridge : strength of the prior, in windows' worth of equations.
    season : windows per season; None where there is none, which leaves out d.
    half_life : of m, in windows.
    doubt : seasons without a move that the mean move of a season starts from.
    forgetting : factor per window, within (0, 1].
    reach : in log odds.
    calm : windows without error that the recalibration starts from; ``inf`` turns it off.
    """

    prior: tuple[float, float, float] = (0.5, 0.0, 1.0)
    ridge: float = 10.0
    season: int | None = None
    half_life: float = 8.0
    doubt: float = 4.0
    forgetting: float = 0.95
    reach: float = 1.0
    calm: float = 8.0

    def __post_init__(self) -> None:
        if self.season is not None:
            at_least("season", self.season, 1)
        if not 0 < self.forgetting <= 1:
            raise ValueError(f"forgetting: {self.forgetting}; expected within (0, 1]")
        if not self.doubt >= 0:
            raise ValueError(f"doubt: {self.doubt}; expected >= 0")
        for name in ("ridge", "reach", "calm"):
            positive(name, getattr(self, name), "number")
        positive("half_life", self.half_life, "number of windows")

    def start(self, c_p: float, c_w: float) -> Learner:
        """See `Rule.start`."""
        return _LogOddsLearner(self, c_p, c_w)

    def regressors(self, past: Past) -> tuple[Floats, Floats]:
        """(upper + 1,) the last log odds, and (2 or 3, upper + 1) what they are corrected by."""

        def build() -> tuple[Floats, Floats]:
            z = past.log_odds
            rows = [
                halving(len(past), self.half_life) @ z - z[-1],
                z[-1] - z[-2] if len(past) > 1 else np.zeros_like(z[-1]),
            ]
            if self.season is not None:
                times = np.arange(len(past) - self.season, 0, -self.season)
                moves = z[times] - z[times - 1]
                rows.append(moves.sum(axis=0) / max(times.size + self.doubt, 1.0))
            return z[-1], np.stack(rows)

        return past.remembered(("log odds", self.season, self.half_life, self.doubt), build)


class _LogOddsLearner(Learner):
    def __init__(self, rule: LogOdds, c_p: float, c_w: float) -> None:
        level = critical_fractile(c_p, c_w)
        self.rule, self.target = rule, float(np.log(level / (1 - level)))
        self.prior = np.array(rule.prior[: 2 if rule.season is None else 3])
        self.normal = rule.ridge * np.eye(self.prior.size)
        self.moment = rule.ridge * self.prior
        self.errors: list[float] = []
        self.weights: list[float] = []
        self._shift: float | None = 0.0
        self._forecast: tuple[int, Floats] | None = None

    def coefficients(self) -> Floats:
        """(2 or 3,) b as learned so far."""
        return np.linalg.solve(self.normal, self.moment)

    def forecast(self, past: Past) -> Floats:
        """(upper + 1,) forecast log odds, made to increase along the lengths."""
        if self._forecast is None or self._forecast[0] != len(past):
            last, rows = self.rule.regressors(past)
            z = np.maximum.accumulate(last + self.coefficients() @ rows)
            self._forecast = (len(past), z)
        return self._forecast[1]

    def shift(self) -> float:
        """Log odds that the recalibration adds to the target."""
        if self._shift is None:
            self._shift = calibrating_shift(self.target, self.errors, self.weights, self.rule.calm)
        return self._shift

    def reservation(self, past: Past) -> float:
        at = np.searchsorted(self.forecast(past), self.target + self.shift() - PROBABILITY_SLACK)
        return float(min(at, past.upper))

    def learn(self, past: Past, window: LengthDistribution) -> None:
        if not len(past):
            return
        last, rows = self.rule.regressors(past)
        forecast, seen = self.forecast(past), past.remembered(("seen", id(window)), lambda: log_odds(window))
        if np.isfinite(self.rule.calm) and len(past) >= SETTLED:
            at = min(np.searchsorted(forecast, self.target - PROBABILITY_SLACK), past.upper)
            self.errors.append(float(seen[at] - forecast[at]))
            self.weights.append(window.total)
            self._shift = None

        low, high = np.searchsorted(forecast, [self.target - self.rule.reach, self.target + self.rule.reach])
        low = min(low, past.upper)
        high = min(max(high, low + 1), past.upper + 1)
        stretch = np.diff(forecast[low : high + 1], append=forecast[-1] if high > past.upper else [])
        total = stretch.sum()
        stretch = stretch / total if total > 0 else np.full(stretch.size, 1.0 / stretch.size)
        x, y = rows[:, low:high], (seen - last)[low:high]
        keep, ridge = self.rule.forgetting, self.rule.ridge
        self.normal = keep * self.normal + (1 - keep) * ridge * np.eye(self.prior.size) + (x * stretch) @ x.T
        self.moment = keep * self.moment + (1 - keep) * ridge * self.prior + (x * stretch) @ y


def calibrating_shift(
    target: float, errors: Sequence[float], weights: Sequence[float], calm: float, tolerance: float = 1e-10
) -> float:
    """The a at which calm expit(target + a) + sum_u w_u expit(target + a + e_u), the ``weights`` w_u scaled
    to a mean of one, is expit(target) (calm + sum_u w_u).

    The sum increases in a, and the root lies within the range of the -e_u and 0: Newton's steps, or half of
    the range that is left where they lead out of it. (Importing SciPy for one root would cost every user of
    the package half a second.)
    """
    error = np.array([0.0, *errors])
    share = np.array([calm, *(np.array(weights) / np.mean(weights))])
    share /= share.sum()
    low, high, a, goal = -error.max(), -error.min(), 0.0, _expit(target)
    while high - low > tolerance:
        fits = _expit(target + a + error)
        surplus = share @ fits - goal
        low, high = (low, a) if surplus > 0 else (a, high)
        newton = a - surplus / (share @ (fits * (1 - fits)))
        step = newton if low < newton < high else (low + high) / 2
        if abs(step - a) <= tolerance:
            break
        a = step
    return float(a)


def _expit(z: ArrayLike) -> Floats:
    return 1.0 / (1.0 + np.exp(-np.asarray(z)))


@dataclass(frozen=True)
class Aggregate(Rule):
    """A weighted mean of other rules' reservations, the weights learned by AdaHedge.

    The cost is convex in the reservation, so what a mean eta_t of the reservations eta_{t,k} costs beyond
    any other mean of them is at most g_t times the difference of the two, with g_t = n_t (c_p + c_w)
    (F_t(eta_t) - q*) the slope of the cost of all requests. The loss of rule k in a window is therefore
    g_t eta_{t,k}, and AdaHedge (de Rooij, van Erven, Grunwald and Koolen 2014) bounds the regret to the best
    *fixed mean* of K rules, not only to the best rule, without any rate to tune:

        sum_t C_t(eta_t) <= min_w sum_t C_t(w . eta_t) + sqrt(ln K sum_t s_t^2) + (4/3 ln K + 2) max_t s_t,

    with C_t the cost of all requests of window t, w any K shares, and s_t = |g_t| (max_k eta_{t,k} - min_k
    eta_{t,k}).
    """

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules: empty; expected at least one")

    def start(self, c_p: float, c_w: float) -> Learner:
        """See `Rule.start`."""
        return _AggregateLearner(self, c_p, c_w)


class _AggregateLearner(Learner):
    def __init__(self, rule: Aggregate, c_p: float, c_w: float) -> None:
        self.experts = [expert.start(c_p, c_w) for expert in rule.rules]
        self.c_p, self.c_w = c_p, c_w
        self.hedge = AdaHedge(len(self.experts))

    def advice(self, past: Past) -> Floats:
        """(K,) the rules' reservations for the window after ``past``."""
        return np.array([expert.reservation(past) for expert in self.experts])

    def reservation(self, past: Past) -> float:
        return self._mean(self.advice(past))

    def _mean(self, advice: Floats) -> float:
        # Rounding must not carry the mean out of the range of what it averages.
        return float(np.clip(self.hedge.weights() @ advice, advice.min(), advice.max()))

    def learn(self, past: Past, window: LengthDistribution) -> None:
        if len(past):
            advice = self.advice(past)
            fits = window.cdf(self._mean(advice)) - critical_fractile(self.c_p, self.c_w)
            self.hedge.learn(window.total * (self.c_p + self.c_w) * fits * advice)
        for expert in self.experts:
            expert.learn(past, window)


class AdaHedge:
    """Exponential weights over K choices whose rate follows the mixability gap seen so far."""

    def __init__(self, choices: int) -> None:
        self.losses = np.zeros(choices)
        self.gap = 0.0

    @property
    def rate(self) -> float:
        """ln K over the cumulative mixability gap; infinite until there is one."""
        return np.log(self.losses.size) / self.gap if self.gap > np.finfo(float).tiny else np.inf

    def weights(self) -> Floats:
        """(K,) weights for the next round; all on the leaders while the rate is infinite."""
        behind = self.losses - self.losses.min()
        weights = (behind == 0).astype(float) if np.isinf(self.rate) else np.exp(-self.rate * behind)
        return weights / weights.sum()

    def learn(self, losses: ArrayLike) -> None:
        """(K,) the losses of a round, on any scale."""
        losses = np.asarray(losses, dtype=float)
        weights = self.weights()
        # A choice without weight may have lost so much less that its exponential overflows.
        weights, felt = weights[weights > 0], losses[weights > 0]
        least = felt.min()
        if np.isinf(self.rate):
            mix = least
        else:
            mix = least - np.log(weights @ np.exp(-self.rate * (felt - least))) / self.rate
        self.gap += max(float(weights @ felt - mix), 0.0)
        self.losses += losses


# ---- the policy at work -----------------------------------------------------------------------------------


class Rolling:
    """A rule at work: fed the windows one by one, asked for reservations in between.

    >>> policy = Rolling(adaptive(season=4))
    >>> for window in load_digests("servegen-m-small", "window").values():
    ...     policy.update(window)
    >>> tokens = policy.reservation(c_p=20.0, c_w=1.0)

    Parameters
    ----------
    rule : how to reserve; one learner per pair of costs is kept.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._past: Past | None = None
        self._windows: list[LengthDistribution] = []
        self._learners: dict[tuple[float, float], Learner] = {}

    @property
    def windows(self) -> int:
        """How many windows it has been fed."""
        return len(self._windows)

    def __repr__(self) -> str:
        return f"Rolling({type(self.rule).__name__}, {self.windows} windows seen)"

    def update(self, window: LengthDistribution) -> None:
        """A window has ended; its weights are counts of requests. All windows share one ``upper``."""
        if self._past is None:
            self._past = Past(window.upper)
        if window.upper == self._past.upper:
            for learner in self._learners.values():
                learner.learn(self._past, window)
        self._past.append(window)
        self._windows.append(window)

    def reservation(self, c_p: float, c_w: float) -> float:
        """Output tokens to reserve per request in the window that comes next.

        Raises
        ------
        ValueError
            Before the first window.
        """
        if self._past is None:
            raise ValueError("no window seen yet; feed at least one to update()")
        key = (float(c_p), float(c_w))
        if key not in self._learners:
            learner = self.rule.start(*key)
            for t, window in enumerate(self._windows):
                learner.learn(self._past.before(t), window)
            self._learners[key] = learner
        return self._learners[key].reservation(self._past)


#: The experts of `adaptive`: shares of the way back to the mean, and strengths of the prior that says so.
PULLS, RIDGES = (0.2, 0.8), (1.0, 100.0)


def adaptive(season: int | None = None) -> Aggregate:
    """The default policy: four `LogOdds` regressions combined by AdaHedge.

    They start from a slow and a fast return to the mean, with a prior that gives way and one that hardly
    does, so that neither has to be chosen.

    ``season`` is the number of windows in a day, None where days do not show.
    """
    return Aggregate(tuple(LogOdds((pull, 0.0, 1.0), ridge, season) for pull in PULLS for ridge in RIDGES))
