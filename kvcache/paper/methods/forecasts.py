"""Forecasts that compete with `kvcache.rolling.adaptive`, and what each would have cost.

A *memory* mixes past windows into a forecast of the next one; a rule reserves its fractile, or learns the
reservation or its level directly. `follow` and `compare` run rules over windows and account for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvcache.ambiguity import AmbiguitySet, critical_fractile
from kvcache.lengths import PROBABILITY_SLACK, LengthDistribution
from kvcache.rolling import Floats, Learner, Past, Rolling, Rule, at_least, halving, positive

__all__ = [
    "RATIOS",
    "Blend",
    "Conformal",
    "Exponential",
    "First",
    "Fractile",
    "Latest",
    "Memory",
    "OnlineGradient",
    "SameTime",
    "best_between",
    "compare",
    "cost_over_hindsight",
    "follow",
    "interpolated",
    "mixture_grid",
]

#: The paper's cost ratios rho = c_p / c_w.
RATIOS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


# ---- memories: how much each past window counts --------------------------------------------------------


class Memory(ABC):
    """A forecast of the next window's lengths as a mixture of past windows. Subclasses are frozen."""

    @abstractmethod
    def shares(self, requests: Floats) -> Floats:
        """(t,) shares of the past windows in the mixture, oldest first; they sum to one.

        ``requests`` (t,) are the windows' requests, t >= 1.
        """

    def forecast(self, past: Past) -> Floats:
        """(upper + 1,) forecast probabilities of the lengths."""

        def mixture() -> Floats:
            shares = self.shares(past.requests)
            used = np.flatnonzero(shares)
            return shares[used] @ past.probabilities[used]

        return past.remembered(self, mixture)


@dataclass(frozen=True)
class Latest(Memory):
    """The last ``windows`` windows, pooled request by request."""

    windows: int = 1

    def __post_init__(self) -> None:
        at_least("windows", self.windows, 1)

    def shares(self, requests: Floats) -> Floats:
        """See `Memory.shares`."""
        kept = requests.copy()
        kept[: -self.windows] = 0.0
        return kept / kept.sum()


@dataclass(frozen=True)
class First(Memory):
    """The first ``windows`` windows, pooled: what a policy that is set once knows."""

    windows: int

    def __post_init__(self) -> None:
        at_least("windows", self.windows, 1)

    def shares(self, requests: Floats) -> Floats:
        """See `Memory.shares`."""
        kept = requests.copy()
        kept[self.windows :] = 0.0
        return kept / kept.sum()


@dataclass(frozen=True)
class Exponential(Memory):
    """Each window counts half as much as the one ``half_life`` windows later."""

    half_life: float

    def __post_init__(self) -> None:
        positive("half_life", self.half_life, "number of windows")

    def shares(self, requests: Floats) -> Floats:
        """See `Memory.shares`."""
        return halving(requests.size, self.half_life)


@dataclass(frozen=True)
class SameTime(Memory):
    """The window one season (a day, say) before the one decided for; the last window until there is one."""

    season: int

    def __post_init__(self) -> None:
        at_least("season", self.season, 1)

    def shares(self, requests: Floats) -> Floats:
        """See `Memory.shares`."""
        kept = np.zeros(requests.size)
        kept[-self.season if requests.size >= self.season else -1] = 1.0
        return kept


@dataclass(frozen=True)
class Blend(Memory):
    """A mixture of two memories, the first with share ``share``."""

    one: Memory
    other: Memory
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share: {self.share}; expected within [0, 1]")

    def shares(self, requests: Floats) -> Floats:
        """See `Memory.shares`."""
        return self.share * self.one.shares(requests) + (1 - self.share) * self.other.shares(requests)


# ---- rules ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fractile(Rule):
    """The critical fractile of a memory's forecast, or what an ambiguity set makes of that forecast.

    ``Fractile(First(k))`` is the static policy, ``Fractile(Latest(k))`` rolling SAA, and
    ``Fractile(Latest(k), Wasserstein1(0.15, relative=True))`` rolling DRO.
    """

    memory: Memory
    ambiguity: AmbiguitySet | None = None

    def start(self, c_p: float, c_w: float) -> Learner:
        """See `Rule.start`."""
        return _FractileLearner(self, c_p, c_w)


class _FractileLearner(Learner):
    def __init__(self, rule: Fractile, c_p: float, c_w: float) -> None:
        self.rule, self.c_p, self.c_w = rule, c_p, c_w
        self.level = critical_fractile(c_p, c_w)

    def reservation(self, past: Past) -> float:
        if self.rule.ambiguity is None:
            return _quantile(self.rule.memory, past, self.level)
        return self.rule.ambiguity.reservation(_distribution(self.rule.memory, past), self.c_p, self.c_w)


def _quantile(memory: Memory, past: Past, level: float) -> float:
    """The smallest length whose forecast CDF reaches ``level``."""
    cumulative = past.remembered(("cumulative", memory), lambda: np.cumsum(memory.forecast(past)))
    at = np.searchsorted(cumulative, level * cumulative[-1] * (1 - PROBABILITY_SLACK))
    return float(min(at, past.upper))


def _distribution(memory: Memory, past: Past) -> LengthDistribution:
    def build() -> LengthDistribution:
        forecast = memory.forecast(past)
        tokens = np.flatnonzero(forecast)
        return LengthDistribution(tokens, forecast[tokens], past.upper)

    return past.remembered(("distribution", memory), build)


@dataclass(frozen=True)
class OnlineGradient(Rule):
    """Projected gradient steps on the reservation itself (AdaGrad, Duchi et al. 2011).

    The gradient of a window's cost at eta is (c_p + c_w) (F_t(eta) - q*): only the share of requests
    that fitted is needed. It starts at the first window's fractile, which also sets the step's scale.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        positive("scale", self.scale, "number")

    def start(self, c_p: float, c_w: float) -> Learner:
        """See `Rule.start`."""
        return _GradientLearner(self, c_p, c_w)


class _GradientLearner(Learner):
    def __init__(self, rule: OnlineGradient, c_p: float, c_w: float) -> None:
        self.scale, self.level, self.squares = rule.scale, critical_fractile(c_p, c_w), 0.0
        self.eta: float | None = None

    def reservation(self, past: Past) -> float:
        if self.eta is None:
            self.eta = _quantile(Latest(1), past, self.level)
            self.scale *= max(self.eta, 1.0)
        return self.eta

    def learn(self, past: Past, window: LengthDistribution) -> None:
        if not len(past):
            return
        gradient = window.cdf(self.reservation(past)) - self.level
        self.squares += gradient**2
        if self.squares > 0:
            step = self.scale * gradient / np.sqrt(self.squares)
            self.eta = float(np.clip(self.eta - step, 0.0, past.upper))


@dataclass(frozen=True)
class Conformal(Rule):
    """Adaptive conformal inference (Gibbs and Candes 2021) on the level of the quantile.

    It reserves the quantile of a memory's forecast at a level a, which starts at q* and moves by
    ``step`` times the miss: a += step (q* - F_t(eta)).
    """

    memory: Memory
    step: float

    def __post_init__(self) -> None:
        positive("step", self.step, "number")

    def start(self, c_p: float, c_w: float) -> Learner:
        """See `Rule.start`."""
        return _ConformalLearner(self, c_p, c_w)


class _ConformalLearner(Learner):
    def __init__(self, rule: Conformal, c_p: float, c_w: float) -> None:
        self.rule, self.target = rule, critical_fractile(c_p, c_w)
        self.level = self.target

    def reservation(self, past: Past) -> float:
        return _quantile(self.rule.memory, past, float(np.clip(self.level, 0.0, 1.0)))

    def learn(self, past: Past, window: LengthDistribution) -> None:
        if len(past):
            self.level += self.rule.step * (self.target - window.cdf(self.reservation(past)))


def mixture_grid(season: int) -> dict[str, Rule]:
    """Fractiles of exponentially weighted windows mixed with the same time of the last season.

    The yardstick that is chosen in hindsight: the last window or half-lives of 1 to 8 windows, with a
    share of 0 to 3/4 for the same time a season ago.
    """
    bases: dict[str, Memory] = {"last": Latest(1)}
    bases |= {f"half-life {h}": Exponential(h) for h in (1, 2, 4, 8)}
    return {
        name if share == 1 else f"{name}, {1 - share:.0%} same time": Fractile(
            memory if share == 1 else Blend(memory, SameTime(season), share)
        )
        for name, memory in bases.items()
        for share in (1, 0.75, 0.5, 0.25)
    }


# ---- running a rule ------------------------------------------------------------------------------------


def follow(
    rule: Rule, windows: Iterable[LengthDistribution], ratios: Sequence[float] = RATIOS, c_w: float = 1.0
) -> pd.DataFrame:
    """Run a rule over consecutive windows and account for it.

    A window is drawn from ``windows`` only after every reservation for it has been made.

    Returns
    -------
    DataFrame with one row per window (from the second on) and ratio: ``window``, ``requests``, ``rho``,
    ``reservation`` (tokens), ``cost`` (E Q per request, in c_w), ``hindsight_reservation`` and
    ``hindsight`` (the least E Q that any reservation had in that window).
    """
    policy, stream, rows = Rolling(rule), iter(windows), []
    first = next(stream, None)
    if first is None:
        raise ValueError("windows: empty; expected at least two")
    policy.update(first)
    for t in range(1, 1 << 62):
        reservations = [policy.reservation(rho * c_w, c_w) for rho in ratios]
        window = next(stream, None)
        if window is None:
            break
        rows += [_account(t, window, rho, eta, c_w) for rho, eta in zip(ratios, reservations, strict=True)]
        policy.update(window)
    return pd.DataFrame(rows, columns=_ACCOUNT)


_ACCOUNT = ["window", "requests", "rho", "reservation", "cost", "hindsight_reservation", "hindsight"]


def _account(t: int, window: LengthDistribution, rho: float, eta: float, c_w: float) -> tuple[float, ...]:
    best = float(window.quantile(critical_fractile(rho * c_w, c_w)))
    cost, least = window.cost(np.array([eta, best]), rho * c_w, c_w)
    return t, window.total, rho, eta, cost, best, least


def compare(
    rules: Mapping[str, Rule],
    windows: Sequence[LengthDistribution],
    ratios: Sequence[float] = RATIOS,
    c_w: float = 1.0,
) -> pd.DataFrame:
    """`follow` for several rules over the same windows, with a column ``policy`` in front."""
    frames = [follow(rule, windows, ratios, c_w).assign(policy=name) for name, rule in rules.items()]
    frame = pd.concat(frames, ignore_index=True)
    return frame[["policy", *frame.columns.drop("policy")]]


def cost_over_hindsight(runs: pd.DataFrame, by: Sequence[str] = ("policy", "rho")) -> pd.Series:
    """Cost over the hindsight optimum, both summed over windows and requests, per group of ``by``."""
    spent = runs["cost"] * runs["requests"]
    least = runs["hindsight"] * runs["requests"]
    keys = [runs[key] for key in by]
    return (spent.groupby(keys, sort=False).sum() / least.groupby(keys, sort=False).sum()).rename("ratio")


# ---- what cannot be had --------------------------------------------------------------------------------


def best_between(runs: pd.DataFrame, windows: Sequence[LengthDistribution], c_w: float = 1.0) -> pd.DataFrame:
    """The best reservation between the lowest and the highest of the policies in ``runs``, window by window.

    An oracle: it knows the window. No weighted mean of these policies, however its weights are
    learned, can cost less. Returns a frame like that of `follow`.
    """
    rows = []
    for (t, rho), group in runs.groupby(["window", "rho"], sort=True):
        best = group["hindsight_reservation"].iloc[0]
        eta = float(np.clip(best, group["reservation"].min(), group["reservation"].max()))
        rows.append(_account(t, windows[t], rho, eta, c_w))
    return pd.DataFrame(rows, columns=_ACCOUNT)


def interpolated(
    windows: Sequence[LengthDistribution], ratios: Sequence[float] = RATIOS, c_w: float = 1.0
) -> pd.DataFrame:
    """The fractile of the window before and the window *after*, in equal shares: not causal.

    What interpolation in time could do where forecasting has to extrapolate. Returns a frame like that
    of `follow`, without the last window.
    """
    rows = []
    for t in range(1, len(windows) - 1):
        around = LengthDistribution.mix([windows[t - 1], windows[t + 1]], [0.5, 0.5])
        for rho in ratios:
            eta = float(around.quantile(critical_fractile(rho * c_w, c_w)))
            rows.append(_account(t, windows[t], rho, eta, c_w))
    return pd.DataFrame(rows, columns=_ACCOUNT)
