"""What drift costs each reservation policy: lengths that are made to shift, and lengths that did.

Everything here returns tidy tables; nothing draws. Costs are E Q per request in units of c_w.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from kvcache.ambiguity import CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.lengths import LengthDistribution
from kvcache.paper.builders import APPLICATIONS, RADIUS
from kvcache.paper.digests import load_digest, load_digests
from kvcache.paper.experiments.fractile import reservations
from kvcache.paper.experiments.runner import build
from kvcache.paper.methods.baselines import optimise
from kvcache.paper.methods.forecasts import (
    RATIOS,
    Conformal,
    Exponential,
    First,
    Fractile,
    Latest,
    OnlineGradient,
    best_between,
    compare,
    cost_over_hindsight,
    interpolated,
    mixture_grid,
)
from kvcache.replay import REQUESTS, Workload, replay
from kvcache.rolling import Aggregate, Rule, adaptive

__all__ = [
    "DEFAULT",
    "ELSEWHERE",
    "GRID",
    "PATHS",
    "PERIODS",
    "SHIFTS",
    "TRACES",
    "Drift",
    "advantage",
    "by_day",
    "choice",
    "default_beside_best",
    "elsewhere",
    "joint_path",
    "left_out",
    "limits",
    "margins",
    "memory_point",
    "path",
    "point",
    "policies",
    "ratios_to_hindsight",
    "sensitivity",
    "shrinking",
    "split_point",
    "splits",
    "wide",
]

#: Names of the policy recommended here and of the yardstick that is chosen in hindsight.
DEFAULT, GRID = "adaptive", "best of grid, in hindsight"


# ---- traces -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drift:
    """A trace in consecutive windows of time.

    Parameters
    ----------
    name : label in tables.
    digest : as `kvcache.list_digests` lists it.
    by : ``"window"`` or ``"day"``.
    season : windows per day, None where there are too few days for it to matter.
    warm_up : windows that every policy has seen before it is judged.
    later : first window of the second period; the first period chooses, the second judges.
    model : of the digest's classes, or None.
    field : ``"output"`` or ``"input"`` lengths.
    block : tokens per unit of length; lengths are rounded to whole units.
    pool : windows that make one.
    backwards : the last window first.
    """

    name: str
    digest: str
    by: str = "window"
    season: int | None = None
    warm_up: int = 1
    later: int | None = None
    model: str | None = None
    field: str = "output"
    block: int = 1
    pool: int = 1
    backwards: bool = False

    def windows(self) -> list[LengthDistribution]:
        """The windows, oldest first (or last)."""
        found = load_digests(self.digest, self.by, model=self.model, field=self.field).values()
        windows = [w if self.block == 1 else w.scale(1 / self.block) for w in found]
        if self.pool > 1:
            starts = range(0, len(windows), self.pool)
            windows = [LengthDistribution.mix(windows[at : at + self.pool]) for at in starts]
        return windows[::-1] if self.backwards else windows

    @property
    def day(self) -> int:
        """Windows that a policy of one day pools."""
        return self.season or 1


_SERVEGEN = {"season": 4, "warm_up": 4, "later": 20}

#: The real drift that policies are judged on: 14 days, a week, and splits of an hour or a day.
TRACES: Mapping[str, Drift] = {
    drift.name: drift
    for drift in (
        Drift("m-large", "servegen-m-large", **_SERVEGEN),
        Drift("m-mid", "servegen-m-mid", **_SERVEGEN),
        Drift("m-small", "servegen-m-small", **_SERVEGEN),
        Drift("deepseek-r1, 6 h", "servegen-deepseek-r1"),
        Drift("BurstGPT ChatGPT, daily", "burstgpt-week1", "day", model="ChatGPT"),
        Drift("BurstGPT GPT-4, daily", "burstgpt-week1", "day", model="GPT-4"),
        Drift("Azure conversation, 10 min", "azure-2023-conv"),
        Drift("Azure code, 10 min", "azure-2023-code"),
    )
}

_MODELS = ("m-large", "m-mid", "m-small")
_INPUT: Mapping[str, Any] = {"season": 4, "warm_up": 4, "field": "input", "block": 16}

#: Other series than the default was designed for, by kind. Results on the first three kinds were seen during
#: its development, those on the last two only once it was finished.
ELSEWHERE: Mapping[str, tuple[Drift, ...]] = {
    "backwards": tuple(
        Drift(f"{m}, backwards", f"servegen-{m}", season=4, warm_up=4, backwards=True) for m in _MODELS
    ),
    "input lengths": tuple(Drift(f"{m}, input", f"servegen-{m}", **_INPUT) for m in _MODELS),
    "small windows": tuple(
        Drift(f"BurstGPT {model}, 6 h", "burstgpt-week1", season=4, warm_up=4, model=model)
        for model in ("ChatGPT", "GPT-4")
    ),
    "input lengths, backwards": tuple(
        Drift(f"{m}, input, backwards", f"servegen-{m}", backwards=True, **_INPUT) for m in _MODELS
    ),
    "12-hour windows": tuple(
        Drift(f"{m}, 12 h", f"servegen-{m}", season=2, warm_up=2, pool=2) for m in _MODELS
    ),
}
_ALL = {**TRACES, **{drift.name: drift for kind in ELSEWHERE.values() for drift in kind}}

#: Traces long enough to have an earlier and a later period.
LONG = tuple(name for name, drift in TRACES.items() if drift.later is not None)
PERIODS = ("days 2-5", "days 6-14", "days 2-14")

#: Factors on the lengths: window by window for the joint Fig. 5(a), and the shifts of Fig. 5(b).
PATHS = {
    "quick": (1.0, 1.0, 0.8, 0.6, 0.4, 0.4),
    "full": (1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4, 0.4),
}
SHIFTS = {
    "quick": (0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5),
    "full": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0),
}


# ---- policies ---------------------------------------------------------------------------------------


def policies(drift: Drift) -> dict[str, dict[str, Rule]]:
    """Policies by group and name: the paper's, other ambiguity sets, trackers, the grid, and the default."""
    day = Latest(drift.day)
    latest = {"rolling SAA, last window": Fractile(Latest(1))}
    if drift.season:
        latest["rolling SAA, last day"] = Fractile(day)
        latest["rolling SAA, half-life 1 day"] = Fractile(Exponential(float(drift.season)))
    conformal = tuple(Conformal(day, step) for step in (0.005, 0.02, 0.08, 0.32))
    grid = mixture_grid(drift.season or 1)
    return {
        "paper": {
            "static": Fractile(First(drift.day)),
            **latest,
            "rolling DRO, W1 0.15 mean": Fractile(day, Wasserstein1(RADIUS, relative=True)),
            "rolling DRO, W1 0.5 mean": Fractile(day, Wasserstein1(0.5, relative=True)),
        },
        "sets": {
            "rolling W-infinity 0.05 mean": Fractile(day, WassersteinInf(0.05, relative=True)),
            "rolling W-infinity 0.15 mean": Fractile(day, WassersteinInf(RADIUS, relative=True)),
            "rolling scale shift 15 %": Fractile(day, ScaleShift(0.85, 1.15)),
            "rolling CVaR 5 %": Fractile(day, CVaR(0.05)),
        },
        "trackers": {
            "online gradient": OnlineGradient(),
            "adaptive conformal, steps aggregated": Aggregate(conformal),
            "grid, aggregated": Aggregate(tuple(grid.values())),
        },
        "grid": {f"grid: {name}": rule for name, rule in grid.items()},
        "default": {DEFAULT: adaptive(drift.season)},
    }


def point(*, trace: str, group: str, ratios: Sequence[float] = RATIOS) -> list[dict[str, Any]]:
    """All policies of a group over a trace, as rows of `forecasts.compare`. For `sweep`.

    ``trace`` is the name of one in `TRACES` or in `ELSEWHERE`.
    """
    return _judged(trace, policies(_ALL[trace])[group], ratios)


def _judged(trace: str, rules: Mapping[str, Rule], ratios: Sequence[float] = RATIOS) -> list[dict[str, Any]]:
    runs = compare(rules, _ALL[trace].windows(), ratios)
    runs.insert(0, "trace", trace)
    return runs[runs["window"] >= _ALL[trace].warm_up].to_dict("records")


def limits(runs: pd.DataFrame, ratios: Sequence[float] = RATIOS) -> pd.DataFrame:
    """Two oracles over the traces of ``runs``, as rows like those of `point`.

    ``oracle: best within the forecasts`` picks, knowing the window, the best reservation within the range of
    all members of the grid and of the default; no weighted mean of them can cost less.
    ``oracle: window before and after`` interpolates where forecasts extrapolate.
    """
    forecasts = runs[runs["policy"].str.startswith("grid: ") | (runs["policy"] == DEFAULT)]
    frames = []
    for trace, own in forecasts.groupby("trace", sort=False):
        drift = TRACES[trace]
        windows = drift.windows()
        around = interpolated(windows, ratios)
        found = {
            "oracle: best within the forecasts": best_between(own, windows),
            "oracle: window before and after": around[around["window"] >= drift.warm_up],
        }
        frames += [frame.assign(trace=trace, policy=name) for name, frame in found.items()]
    return pd.concat(frames, ignore_index=True)[runs.columns]


def _period(runs: pd.DataFrame, period: str) -> pd.DataFrame:
    first, last = (int(day) for day in period.removeprefix("days ").split("-"))
    return runs[_day(runs).between(first, last)]


def _day(runs: pd.DataFrame) -> pd.Series:
    return runs["window"] // runs["trace"].map(lambda name: TRACES[name].day) + 1


def ratios_to_hindsight(runs: pd.DataFrame) -> pd.DataFrame:
    """Cost over the hindsight optimum by trace, period, policy and rho (``drift.csv``).

    The grid's members are replaced by the best of them for that trace, period and rho, picked in
    hindsight, with its name in ``chosen``.
    """
    frames = []
    for period in PERIODS:
        part = _period(runs[runs["trace"].isin(LONG)], period)
        frames.append(
            cost_over_hindsight(part, ["trace", "policy", "rho"]).reset_index().assign(period=period)
        )
    rest = runs[~runs["trace"].isin(LONG)]
    if len(rest):
        whole = cost_over_hindsight(rest, ["trace", "policy", "rho"]).reset_index()
        frames.append(whole.assign(period="all windows"))
    table = pd.concat(frames, ignore_index=True)

    member = table["policy"].str.startswith("grid: ")
    best = table.loc[table[member].groupby(["trace", "period", "rho"], sort=False)["ratio"].idxmin()]
    best = best.assign(chosen=best["policy"].str.removeprefix("grid: "), policy=GRID)
    table = pd.concat([table[~member], best], ignore_index=True)
    return table[["trace", "period", "policy", "rho", "ratio", "chosen"]]


def choice(runs: pd.DataFrame) -> pd.DataFrame:
    """Every policy's mean excess over hindsight in the earlier and the later days, best earlier first.

    The mean is over the long traces and the cost ratios, in percent. Members of the grid take part one by
    one, and ``worst_later`` is the largest excess of a trace and ratio in the later days.
    """
    part = runs[runs["trace"].isin(LONG) & ~runs["policy"].str.startswith("oracle")]
    excess = {
        period: 100 * (cost_over_hindsight(_period(part, period), ["policy", "trace", "rho"]) - 1)
        for period in PERIODS
    }
    table = pd.DataFrame({period: values.groupby("policy").mean() for period, values in excess.items()})
    table["worst_later"] = excess[PERIODS[1]].groupby("policy").max()
    return table.sort_values(PERIODS[0]).reset_index()


def default_beside_best(runs: pd.DataFrame) -> pd.DataFrame:
    """How the default policy stands, per period, in percent of mean excess over traces and ratios.

    Columns: ``default``; ``best_member`` of the grid, one for all traces and ratios, and ``grid``, the
    best member for each of them, both chosen in hindsight on that very period; ``oracle``, the bound of
    `best_between`; ``wins``, the share of (trace, rho) where the default is not dearer than ``grid``;
    ``reached``, the share where it is within 5 % of the optimum, and ``reachable``, where the oracle is;
    ``worst_window``, the share of the default's excess that its single worst window brings, averaged over
    traces and ratios.
    """
    rows = []
    for period in PERIODS:
        part = _period(runs[runs["trace"].isin(LONG)], period)
        ratio = cost_over_hindsight(part, ["policy", "trace", "rho"]).unstack("policy")
        grid = ratio[[name for name in ratio if name.startswith("grid: ")]]
        oracle = ratio["oracle: best within the forecasts"]
        own = part[part["policy"] == DEFAULT]
        excess = ((own["cost"] - own["hindsight"]) * own["requests"]).groupby([own["trace"], own["rho"]])
        rows.append(
            {
                "period": period,
                "default": 100 * (ratio[DEFAULT].mean() - 1),
                "best_member": 100 * (grid.mean().min() - 1),
                "grid": 100 * (grid.min(axis=1).mean() - 1),
                "oracle": 100 * (oracle.mean() - 1),
                "wins": (ratio[DEFAULT] <= grid.min(axis=1)).mean(),
                "reached": (ratio[DEFAULT] <= 1.05).mean(),
                "reachable": (oracle <= 1.05).mean(),
                "worst_window": (excess.max() / excess.sum()).mean(),
            }
        )
    return pd.DataFrame(rows)


def wide(table: pd.DataFrame, period: str, policies: Sequence[str] | None = None) -> pd.DataFrame:
    """Those ratios for reading: one row per trace and policy, one column per rho, three decimals."""
    part = table[table["period"] == period]
    if policies is not None:
        part = part[part["policy"].isin(policies)]
    return part.pivot_table(index=["trace", "policy"], columns="rho", values="ratio", sort=False).round(3)


def by_day(runs: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """What each day adds to the excess over hindsight of all days, in percent: trace, policy, rho, day."""
    part = runs[runs["trace"].isin(LONG) & runs["policy"].isin(names)].copy()
    part["day"] = _day(part)
    part["excess"] = (part["cost"] - part["hindsight"]) * part["requests"]
    part["least"] = part["hindsight"] * part["requests"]
    keys = ["trace", "policy", "rho"]
    daily = part.groupby([*keys, "day"], sort=False)["excess"].sum()
    return (100 * daily / part.groupby(keys, sort=False)["least"].sum()).rename("excess").reset_index()


def sensitivity(*, trace: str) -> list[dict[str, Any]]:
    """The default with one constant of all its regressions changed, and each regression alone.

    Rows like those of `point`; the default itself is called ``as it is``.
    """
    default = adaptive(TRACES[trace].season)
    changes: dict[str, Mapping[str, Any]] = {
        "as it is": {},
        "half-life 4": {"half_life": 4.0},
        "half-life 16": {"half_life": 16.0},
        "doubt 2": {"doubt": 2.0},
        "doubt 8": {"doubt": 8.0},
        "no season": {"season": None},
        "forgetting 0.9": {"forgetting": 0.9},
        "no forgetting": {"forgetting": 1.0},
        "reach 0.5": {"reach": 0.5},
        "reach 2": {"reach": 2.0},
        "calm 4": {"calm": 4.0},
        "calm 16": {"calm": 16.0},
        "no recalibration": {"calm": np.inf},
    }
    rules: dict[str, Rule] = {
        name: Aggregate(tuple(replace(rule, **change) for rule in default.rules))
        for name, change in changes.items()
    }
    rules |= {f"alone: pull {r.prior[0]:g}, ridge {r.ridge:g}": r for r in default.rules}
    return _judged(trace, rules)


def left_out(changed: pd.DataFrame) -> pd.DataFrame:
    """Constants chosen on all traces but one, judged on that one.

    Parameters
    ----------
    changed : rows of `sensitivity` for all long traces.

    Returns
    -------
    DataFrame with one row per trace that was left out: ``trace``, the variant that is ``chosen`` by its mean
    excess on days 2-5 of the other traces, its ``excess`` on days 6-14 of the trace (percent, mean over the
    cost ratios), and that of the default ``as it is``.
    """
    cells = [
        cost_over_hindsight(_period(changed, period), ["policy", "trace", "rho"]) for period in PERIODS[:2]
    ]
    earlier, later = (100 * (c.groupby(["policy", "trace"]).mean().unstack("trace") - 1) for c in cells)
    rows = []
    for trace in later:
        chosen = earlier.drop(columns=trace).mean(axis=1).idxmin()
        rows.append((trace, chosen, later.loc[chosen, trace], later.loc["as it is", trace]))
    return pd.DataFrame(rows, columns=["trace", "chosen", "excess", "as it is"])


def elsewhere(runs: pd.DataFrame) -> pd.DataFrame:
    """How the default stands on other series than it was designed for: one row per kind in `ELSEWHERE`.

    ``runs`` are rows of `point` for the groups ``default``, ``grid`` and ``paper``. Excess over hindsight
    in percent, mean over series and ratios, all windows after the warm-up: of the ``default``, of rolling
    SAA on the ``last_window`` and the ``last_day``, of the ``best_member`` of the grid (one for all series of
    the kind) and of the ``grid`` (one per series and ratio), both picked in hindsight. ``wins`` is the share
    of (series, rho) where the default is not dearer than ``grid``, ``over_grid`` the geometric mean of its
    excess over that of ``grid``.
    """
    rows = []
    for kind, drifts in ELSEWHERE.items():
        part = runs[runs["trace"].isin([drift.name for drift in drifts])]
        excess = 100 * (cost_over_hindsight(part, ["policy", "trace", "rho"]).unstack("policy") - 1)
        members = excess[[name for name in excess if name.startswith("grid: ")]]
        grid = members.min(axis=1)
        rows.append(
            {
                "series": kind,
                "default": excess[DEFAULT].mean(),
                "last_window": excess["rolling SAA, last window"].mean(),
                "last_day": excess["rolling SAA, last day"].mean(),
                "best_member": members.mean().min(),
                "grid": grid.mean(),
                "wins": (excess[DEFAULT] <= grid).mean(),
                "over_grid": np.exp(np.log(excess[DEFAULT] / grid).mean()),
            }
        )
    return pd.DataFrame(rows)


def margins(runs: pd.DataFrame, period: str, rng: np.random.Generator, resamples: int = 2000) -> pd.DataFrame:
    """Whether the default's lead could be the luck of a few days: its days drawn again with replacement.

    All traces and ratios keep the same days in a resample. In each one the mean excess of the default is
    compared with that of every rival; the grid's best member, for all traces and ratios (``best member``) or
    for each of them (`GRID`), is picked again in every resample, in hindsight.

    Returns
    -------
    DataFrame: ``rival``; ``lead``, its mean excess minus the default's over the period (percent points);
    ``low`` and ``high``, the 5 % and 95 % quantiles of that over the resamples; and ``ahead``, the share of
    resamples in which the default is cheaper.
    """
    part = _period(runs[runs["trace"].isin(LONG)], period)
    kept = part["policy"].str.startswith("grid: ") | part["policy"].isin((DEFAULT, "rolling SAA, last day"))
    part = part[kept].assign(day=_day(part), spent=part["cost"] * part["requests"])
    part = part.assign(least=part["hindsight"] * part["requests"])
    daily = part.groupby(["policy", "trace", "rho", "day"])[["spent", "least"]].sum()
    names = daily.index.unique("policy")
    shape = (len(names), -1, daily.index.unique("day").size)
    spent, least = (daily[column].to_numpy().reshape(shape) for column in ("spent", "least"))
    days = rng.integers(shape[2], size=(resamples, shape[2]))
    counts = np.stack([np.ones(shape[2]), *(np.bincount(row, minlength=shape[2]) for row in days)])
    excess = 100 * (spent @ counts.T / (least @ counts.T) - 1)
    members = excess[names.str.startswith("grid: ")]
    rivals = {
        "rolling SAA, last window": excess[names.get_loc("grid: last")].mean(axis=0),
        "rolling SAA, last day": excess[names.get_loc("rolling SAA, last day")].mean(axis=0),
        "best member of the grid": members.mean(axis=1).min(axis=0),
        GRID: members.min(axis=0).mean(axis=0),
    }
    rows = []
    for name, rival in rivals.items():
        lead = rival - excess[names.get_loc(DEFAULT)].mean(axis=0)
        low, high = np.quantile(lead[1:], [0.05, 0.95])
        rows.append((name, lead[0], low, high, (lead[1:] > 0).mean()))
    return pd.DataFrame(rows, columns=["rival", "lead", "low", "high", "ahead"])


def path(runs: pd.DataFrame, trace: str, rho: float, names: Sequence[str]) -> pd.DataFrame:
    """Reservations of some policies window by window; the hindsight optimum is a policy of its own."""
    part = runs[(runs["trace"] == trace) & (runs["rho"] == rho) & runs["policy"].isin(names)]
    first = part[part["policy"] == names[0]]
    optimum = first.assign(
        policy="hindsight optimum", reservation=first["hindsight_reservation"], cost=first["hindsight"]
    )
    keep = ["trace", "rho", "policy", "window", "requests", "reservation", "cost", "hindsight"]
    return pd.concat([part, optimum], ignore_index=True)[keep]


# ---- lengths that are made to shift -------------------------------------------------------------------


def _scales(steps: int, to: float) -> np.ndarray:
    """A quarter of the windows at 1, a geometric way to ``to`` over half of them, a quarter there."""
    return np.exp(np.log(to) * np.clip((np.arange(steps) - steps / 4) / (steps / 2), 0.0, 1.0))


def shrinking(digest: str, to: float = 0.4, rho: float = 10.0, steps: int = 24) -> pd.DataFrame:
    """Single-class Fig. 5(a): a trace whose lengths are multiplied by a factor that moves from 1 to ``to``.

    Returns
    -------
    DataFrame: ``digest``, ``rho``, ``window``, ``scale``, ``policy``, ``reservation``, ``cost``,
    ``hindsight`` and ``used``, the share of the reserved output tokens that requests fill,
    E min(xi, eta) / eta.
    """
    base = load_digest(digest)
    scales = _scales(steps, to)
    windows = [base.scale(s, upper=base.upper) for s in scales]
    rules = {
        "static": Fractile(First(1)),
        "rolling SAA": Fractile(Latest(1)),
        "rolling DRO": Fractile(Latest(1), Wasserstein1(RADIUS, relative=True)),
        DEFAULT: adaptive(),
    }
    runs = compare(rules, windows, (rho,))
    eta = runs["reservation"].to_numpy()
    filled = [w - windows[t].shortfall(w) for t, w in zip(runs["window"], eta, strict=True)]
    runs = runs.assign(
        digest=digest, scale=scales[runs["window"]], used=np.array(filled) / np.maximum(eta, 1e-9)
    )
    keep = ["digest", "rho", "window", "scale", "policy", "reservation", "cost", "hindsight", "used"]
    return runs[keep]


def _replayed(
    method: str, trained: Sequence[LengthDistribution], lengths: Sequence[LengthDistribution], seed: int
) -> dict[str, Any]:
    """The paper's problem, optimised for one set of lengths, replayed on another; the replay's row."""
    problem = build()
    classes = tuple(replace(c, output=d) for c, d in zip(problem.classes, trained, strict=True))
    solution = optimise(method, problem.replace(classes=classes), gap=1e-4, time_limit=60.0)
    workload = Workload.draw(list(lengths), np.random.default_rng(seed), REQUESTS)
    measured = replay(problem, solution.policy, workload)
    return {
        "used": float(measured.used.sum() / measured.reserved.sum()),
        "groups": "+".join(map(str, solution.policy.groups)),
        **measured.row(),
    }


def memory_point(*, method: str, trained: float, shift: float, seed: int = 0) -> dict[str, Any]:
    """The joint optimum for lengths scaled by ``trained``, replayed on lengths scaled by ``shift``.

    The row is the replay's, with ``used``: output tokens generated within their reservations, over the
    output tokens reserved. For `kvcache.paper.experiments.sweep`.
    """
    own = [c.output for c in build().classes]
    rows = _replayed(
        method,
        [d.scale(trained, upper=d.upper) for d in own],
        [d.scale(shift, upper=d.upper) for d in own],
        seed,
    )
    return {"method": method, "trained": trained, "shift": shift, **rows}


def split_point(*, method: str, seed: int = 0) -> dict[str, Any]:
    """The joint optimum for the first half of each class's trace, replayed on the second half."""
    halves = [_halves(a.digest, "day" if a.digest.startswith("burstgpt") else "window") for a in APPLICATIONS]
    train, test = zip(*halves, strict=True)
    return {"method": method, **_replayed(method, train, test, seed)}


def joint_path(scales: Sequence[float]) -> pd.DataFrame:
    """Tasks of `memory_point` for Fig. 5(a): each window under a static and a rolling optimisation.

    Columns ``window``, ``policy``, and the keyword arguments ``method``, ``trained``, ``shift``. The static
    policy is optimised for the first scale, the rolling ones for the window before.
    """
    rows = []
    for window, (before, now) in enumerate(pairwise(scales), start=1):
        rows.append((window, "static DRO", "DRO", scales[0], now))
        rows.append((window, "rolling SAA", "SAA", before, now))
        rows.append((window, "rolling DRO", "DRO", before, now))
    return pd.DataFrame(rows, columns=["window", "policy", "method", "trained", "shift"])


def advantage(
    digests: Sequence[str],
    shifts: Sequence[float],
    radii: Sequence[float] = (RADIUS,),
    ratios: Sequence[float] = RATIOS,
) -> pd.DataFrame:
    """What robustness saves when lengths shift by a factor after everything was set on the old lengths.

    Returns
    -------
    DataFrame: ``digest``, ``set``, ``radius`` (multiples of the mean; for other sets their own size),
    ``rho``, ``shift``, ``baseline``, ``cost``, ``baseline_cost`` and
    ``advantage`` = 1 - cost / baseline_cost. Shifted lengths are cut at the trace's bound.
    """
    rows = []
    for name in digests:
        dist = load_digest(name)
        shifted = {s: dist.scale(s, upper=dist.upper) for s in shifts}
        sets: list[tuple[str, float, Any]] = [
            ("W1", radius, Wasserstein1(radius, relative=True)) for radius in radii
        ]
        sets.append(("W-infinity", RADIUS, WassersteinInf(RADIUS, relative=True)))
        sets.append(("scale shift", 2.5, ScaleShift(1.0, 2.5)))
        for rho in ratios:
            rules = reservations(dist, rho)
            for label, radius, ambiguity in sets:
                eta = ambiguity.reservation(dist, rho, 1.0)
                for s, now in shifted.items():
                    cost = now.cost(eta, rho, 1.0)
                    for baseline in ("SAA", "P90", "P95"):
                        other = now.cost(rules[baseline], rho, 1.0)
                        rows.append((name, label, radius, rho, s, baseline, cost, other, 1 - cost / other))
    columns = ["digest", "set", "radius", "rho", "shift", "baseline", "cost", "baseline_cost", "advantage"]
    return pd.DataFrame(rows, columns=columns)


_SPLITS: tuple[tuple[str, str, str, str | None], ...] = (
    ("BurstGPT ChatGPT", "burstgpt-week1", "day", "ChatGPT"),
    ("BurstGPT GPT-4", "burstgpt-week1", "day", "GPT-4"),
    ("Azure conversation", "azure-2023-conv", "window", None),
    ("Azure code", "azure-2023-code", "window", None),
)


def _halves(digest: str, by: str, model: str | None = None) -> tuple[LengthDistribution, LengthDistribution]:
    """The first half of a trace's windows or days (rounded up), pooled, and the second half."""
    parts = list(load_digests(digest, by, model=model).values())
    half = (len(parts) + 1) // 2
    return LengthDistribution.mix(parts[:half]), LengthDistribution.mix(parts[half:])


def splits(ratios: Sequence[float] = RATIOS) -> pd.DataFrame:
    """Temporal splits: set on the first half of the windows (rounded up), judged on the second.

    Returns
    -------
    DataFrame: ``trace``, ``rho``, ``method`` (DRO, SAA, P90, P95), ``reservation``, ``cost``, and
    ``over_dro``, its cost over that of DRO.
    """
    rows = []
    for label, digest, by, model in _SPLITS:
        train, test = _halves(digest, by, model)
        for rho in ratios:
            rules = reservations(train, rho)
            base = test.cost(rules["DRO"], rho, 1.0)
            for method in ("DRO", "SAA", "P90", "P95"):
                cost = test.cost(rules[method], rho, 1.0)
                rows.append((label, rho, method, rules[method], cost, cost / base))
    return pd.DataFrame(rows, columns=["trace", "rho", "method", "reservation", "cost", "over_dro"])
