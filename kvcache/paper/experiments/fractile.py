"""The single-class study: what each reservation rule costs on each trace, and what Table II implies.

Everything here is a table: one row per trace, cost ratio and policy. Costs are per arrival with
c_w = 1 and c_p = rho, without the premium of robustness (A6), on the trace that the rule was fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import linprog

from kvcache.ambiguity import (
    Contamination,
    CVaR,
    ScaleShift,
    Wasserstein1,
    WassersteinInf,
    critical_fractile,
)
from kvcache.hardware import Model
from kvcache.lengths import LengthDistribution
from kvcache.paper.digests import list_digests, load_digest
from kvcache.paper.methods.baselines import BLOCK, FIXED_RULES
from kvcache.paper.published import published
from kvcache.problem import Costs

__all__ = [
    "BURSTGPT",
    "DEFAULT_RADIUS",
    "PUBLISHED",
    "RATIOS",
    "all_traces",
    "costs_by_ratio",
    "critical_radii",
    "excess_curves",
    "growth_hedged",
    "implied_by_baselines",
    "implied_by_dro",
    "implied_trace",
    "kv_cache_sizes",
    "regimes",
    "reservations",
    "table2",
    "with_published_costs",
]

Floats = NDArray[np.float64]
Traces = Mapping[str, LengthDistribution]

#: The digest that stands for the paper's trace, and the name of the published rows in tables.
BURSTGPT, PUBLISHED = "burstgpt", "published"
#: The paper's six cost ratios and its radius, 0.15 x mean.
RATIOS = tuple(row["rho"] for row in published("table_2")["rows"])
DEFAULT_RADIUS = Wasserstein1(published("setup")["radius_in_means"], relative=True)
#: Fixed rules of Table II, then those that it leaves out.
BASELINES = ("P90", "P95", "P99", "Mean", "Max")
#: Published costs are whole numbers.
ROUNDING = 0.5


def all_traces() -> dict[str, LengthDistribution]:
    """Output lengths of every committed trace, by the name of its digest."""
    return {name: load_digest(name) for name in list_digests()["name"]}


def reservations(dist: LengthDistribution, rho: float) -> dict[str, float]:
    """What DRO at the paper's radius, SAA and each fixed rule reserve (tokens), by policy."""
    costs = Costs(preemption=rho, waste=1.0)
    fixed = {name: min(float(FIXED_RULES[name](dist, costs)), float(dist.upper)) for name in BASELINES}
    return {
        "DRO": DEFAULT_RADIUS.reservation(dist, rho, 1.0),
        "SAA": FIXED_RULES["SAA"](dist, costs),
        **fixed,
    }


def table2(traces: Traces) -> pd.DataFrame:
    """Table II on each trace, after the published one.

    Returns
    -------
    DataFrame
        One row per trace and cost ratio: trace, scenario, rho, the cost of each policy, DRO's gain over
        P90 and P95 in percent, its reservation (tokens) and the regime of its closed form.
    """
    rows = []
    for row in published("table_2")["rows"]:
        costs = {name: float(row[name]) for name in ("DRO", "P90", "P95")}
        rows.append({"trace": PUBLISHED, "scenario": row["scenario"], "rho": row["rho"], **costs})
    scenario = {row["rho"]: row["scenario"] for row in rows}
    for trace, dist in traces.items():
        for rho in RATIOS:
            eta = reservations(dist, rho)
            answer = DEFAULT_RADIUS.solve(dist, rho, 1.0)
            rows.append(
                {"trace": trace, "scenario": scenario[rho], "rho": rho}
                | {name: dist.cost(tokens, rho, 1.0) for name, tokens in eta.items()}
                | {"reservation": answer.eta, "regime": str(answer.regime)}
            )
    table = pd.DataFrame(rows)
    for name in ("P90", "P95"):
        table[f"gain_{name}_pct"] = 100 * (1 - table["DRO"] / table[name])
    policies = ["DRO", "SAA", *BASELINES]
    order = ["trace", "scenario", "rho", *policies, "gain_P90_pct", "gain_P95_pct", "reservation", "regime"]
    return table[order].rename(columns={name: name.lower() for name in [*policies, *order]})


def costs_by_ratio(traces: Traces, ratios: Iterable[float] | None = None) -> pd.DataFrame:
    """Cost of every policy on each trace over a range of cost ratios (Fig. 2).

    Returns
    -------
    DataFrame
        trace, rho, policy, reservation (tokens), quantile (the share of requests that fit), cost,
        excess_pct (over the fractile, the least possible), regime (of DRO).
    """
    if ratios is None:
        ratios = np.union1d(np.geomspace(1, 200, 47), RATIOS)
    rows = []
    for trace, dist in traces.items():
        for rho in ratios:
            eta = reservations(dist, rho)
            best = dist.cost(eta["SAA"], rho, 1.0)
            regime = str(DEFAULT_RADIUS.solve(dist, rho, 1.0).regime)
            for policy, tokens in eta.items():
                cost = dist.cost(tokens, rho, 1.0)
                rows.append(
                    (trace, rho, policy, tokens, dist.cdf(tokens), cost, 100 * (cost / best - 1), regime)
                )
    columns = ["trace", "rho", "policy", "reservation", "quantile", "cost", "excess_pct", "regime"]
    return pd.DataFrame(rows, columns=columns)


# ---- the three regimes --------------------------------------------------------------------------


def with_bound(dist: LengthDistribution, upper: int) -> LengthDistribution:
    """The lengths under another L_max: cut where it is below the longest of them."""
    return dist.clip(upper) if upper < dist.tokens[-1] else dist.with_upper(upper)


def regimes(
    dist: LengthDistribution, uppers: Sequence[int], ratios: Sequence[float], radii: Sequence[float]
) -> pd.DataFrame:
    """The robust reservation over radii (in means), for several L_max and cost ratios.

    Returns
    -------
    DataFrame
        upper (tokens), rho, radius (means), reservation (tokens), fractile (tokens), regime.
    """
    rows = []
    for upper in uppers:
        bounded = with_bound(dist, upper)
        for rho in ratios:
            fractile = bounded.quantile(critical_fractile(rho, 1.0))
            for radius in radii:
                answer = Wasserstein1(radius, relative=True).solve(bounded, rho, 1.0)
                rows.append((upper, rho, radius, answer.eta, fractile, str(answer.regime)))
    return pd.DataFrame(rows, columns=["upper", "rho", "radius", "reservation", "fractile", "regime"])


def critical_radii(traces: Traces, ratios: Sequence[float] = RATIOS) -> pd.DataFrame:
    """Where the regimes of each trace begin: S and S2 in means, and the regime of the paper's radius.

    Returns
    -------
    DataFrame
        trace, upper (tokens), mean (tokens), rho, critical (S / mean), support (S2 / mean), regime, and
        least_upper: the smallest L_max (tokens) at which the paper's radius still gives the fractile.
    """
    rows = []
    for trace, dist in traces.items():
        for rho in ratios:
            answer = DEFAULT_RADIUS.solve(dist, rho, 1.0)
            # S grows by 1 - q* = 1 / (1 + rho) per token of L_max, whatever the lengths.
            missing = DEFAULT_RADIUS.radius_tokens(dist) - answer.S
            least = max(int(dist.tokens[-1]), int(np.ceil(dist.upper + missing * (1 + rho))))
            critical, support = answer.S / dist.mean, answer.S2 / dist.mean
            rows.append((trace, dist.upper, dist.mean, rho, critical, support, str(answer.regime), least))
    columns = ["trace", "upper", "mean", "rho", "critical", "support", "regime", "least_upper"]
    return pd.DataFrame(rows, columns=columns)


#: How each set is swept: the name of its parameter, and the set for each value of it.
SWEEPS = {
    "Wasserstein-1": ("radius / mean", np.linspace(0, 1, 101), lambda r: Wasserstein1(r, relative=True)),
    "Wasserstein-inf": ("radius / mean", np.linspace(0, 1, 101), lambda r: WassersteinInf(r, relative=True)),
    "CVaR": ("level", np.linspace(0, 0.95, 96), CVaR),
    "Contamination": ("share", np.linspace(0, 0.25, 101), Contamination),
    "Scale shift": ("largest factor", np.linspace(1, 2.5, 76), lambda s: ScaleShift(1.0, s)),
}


def growth_hedged(dist: LengthDistribution, ratios: Sequence[float]) -> pd.DataFrame:
    """The ambiguity sets side by side: how much growth of all lengths each reservation is made for.

    The fractile of lengths that all become s times as long is s times the fractile, so a reservation
    of eta is the best one for a growth of eta / F^{-1}(q*).

    Returns
    -------
    DataFrame
        set, parameter (its name), value, rho, reservation (tokens), growth, excess_pct: what the
        reservation costs over the fractile while nothing changes.
    """
    rows = []
    for name, (parameter, values, make) in SWEEPS.items():
        for rho in ratios:
            fractile = dist.quantile(critical_fractile(rho, 1.0))
            best = dist.cost(fractile, rho, 1.0)
            for value in values:
                eta = make(float(value)).reservation(dist, rho, 1.0)
                excess = 100 * (dist.cost(eta, rho, 1.0) / best - 1)
                rows.append((name, parameter, value, rho, eta, eta / fractile, excess))
    columns = ["set", "parameter", "value", "rho", "reservation", "growth", "excess_pct"]
    return pd.DataFrame(rows, columns=columns)


# ---- what the published Table II implies --------------------------------------------------------


def _published_costs(policy: str) -> tuple[Floats, Floats]:
    rows = published("table_2")["rows"]
    return np.array(RATIOS, dtype=float), np.array([row[policy] for row in rows], dtype=float)


def implied_by_baselines(policies: Sequence[str] = ("P90", "P95")) -> pd.DataFrame:
    """What a fixed reservation's published costs say about its trace.

    A reservation r costs ``rho E(xi - r)^+ + E(r - xi)^+``, a line in rho, and the difference of its two
    numbers is r less the mean. Six rounded costs leave an interval for each, or show that they do not
    belong together.

    Returns
    -------
    DataFrame
        policy, consistent (whether one line passes all six rounded costs), and the lowest and highest
        ``excess`` = E(xi - r)^+, ``unused`` = E(r - xi)^+ and ``offset`` = r - E xi, in tokens.
    """
    rows = []
    for policy in policies:
        rho, cost = _published_costs(policy)
        line = np.column_stack([rho, np.ones_like(rho)])
        bands = np.concatenate([cost + ROUNDING, ROUNDING - cost])
        row = {"policy": policy, "consistent": True}
        for name, weights in (("excess", (1, 0)), ("unused", (0, 1)), ("offset", (-1, 1))):
            for end, sign in (("low", 1), ("high", -1)):
                answer = linprog(sign * np.array(weights), A_ub=np.vstack([line, -line]), b_ub=bands)
                row["consistent"] &= answer.status == 0
                row[f"{name}_{end}"] = sign * answer.fun if answer.status == 0 else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def implied_trace(whole: LengthDistribution) -> pd.DataFrame:
    """The published costs against the published description of the trace, and against the trace itself.

    Returns
    -------
    DataFrame
        quantity, stated (by the paper), implied_low and implied_high (by Table II), whole_file (the
        trace), agrees (whether the stated value lies within the implied ones and half a token).
    """
    stated = published("traces")["BurstGPT"]
    found = implied_by_baselines().set_index("policy")
    p90, p95 = found.loc["P90"], found.loc["P95"]
    mean = stated["p90"] - np.array([p90["offset_high"], p90["offset_low"]])
    rows = [
        ("mean, if P90 is as stated", stated["mean"], *mean, whole.mean),
        (
            "P90, if the mean is as stated",
            stated["p90"],
            stated["mean"] + p90["offset_low"],
            stated["mean"] + p90["offset_high"],
            whole.quantile(0.9),
        ),
        (
            "P95 in blocks, if P90 is as stated",
            np.nan,
            mean[0] + p95["offset_low"],
            mean[1] + p95["offset_high"],
            BLOCK * np.ceil(whole.quantile(0.95) / BLOCK),
        ),
    ]
    table = pd.DataFrame(rows, columns=["quantity", "stated", "implied_low", "implied_high", "whole_file"])
    inside = table["stated"].between(table["implied_low"] - 0.5, table["implied_high"] + 0.5)
    return table.assign(agrees=inside.where(table["stated"].notna()).astype("boolean"))


def implied_by_dro() -> pd.DataFrame:
    """What the published DRO costs imply if DRO reserves the fractile of one distribution.

    The least cost over all reservations is concave in rho with slope E(xi - F^{-1}(q*))^+, so that the
    chords to the neighbouring cost ratios bound the slope, and with it the reservation.

    Returns
    -------
    DataFrame
        rho, cost, concave (whether its chords turn the right way), and the lowest and highest ``excess``
        = E(xi - r)^+ and ``offset`` = r - E xi of the reservation r, in tokens.
    """
    rho, cost = _published_costs("DRO")
    before = np.diff(cost, prepend=0) / np.diff(rho, prepend=0)
    slack = 2 * ROUNDING / np.diff(rho, prepend=0)
    high = before + slack
    low = np.append((before - slack)[1:], 0.0)
    return pd.DataFrame(
        {
            "rho": rho.astype(int),
            "cost": cost,
            "concave": low <= high,
            "excess_low": low,
            "excess_high": high,
            "offset_low": cost - (rho + 1) * high,
            "offset_high": cost - (rho + 1) * low,
        }
    )


def with_published_costs(near: LengthDistribution) -> LengthDistribution:
    """A distribution on which SAA, P90 and P95 cost what Table II prints for DRO, P90 and P95.

    It has the stated P90 and P99. Of all those on a grid of lengths the one at the least Wasserstein-1
    distance from ``near`` is taken, by a linear program: the probabilities are its variables, each
    published cost a pair of rows, and that no reservation undercuts DRO one row per length and ratio.

    Raises
    ------
    ValueError
        When there is none.
    """
    stated = published("traces")["BurstGPT"]
    found = implied_by_baselines().set_index("policy")
    centre = {name: found.loc[name, ["offset_low", "offset_high"]].mean() for name in ("P90", "P95")}
    mean = stated["p90"] - centre["P90"]
    fixed = {"P90": stated["p90"], "P95": BLOCK * int(np.round((mean + centre["P95"]) / BLOCK))}
    costs = {name: _published_costs(name)[1] for name in ("DRO", "P90", "P95")}
    dro = implied_by_dro()
    robust = []
    for k, middle in enumerate(mean + (dro["offset_low"] + dro["offset_high"]) / 2):
        same = [r for name, r in fixed.items() if abs(costs[name][k] - costs["DRO"][k]) <= 2 * ROUNDING]
        robust.append(same[0] if same else int(np.round(middle)))

    steps = {0.90: (fixed["P90"] - 1, fixed["P90"]), 0.95: (fixed["P95"] - BLOCK, fixed["P95"])}
    steps[0.99] = (stated["p99"] - 1, stated["p99"])
    knots = [x for pair in steps.values() for x in pair] + robust
    grid = np.unique(np.concatenate([np.round(np.geomspace(1, near.upper, 140)), knots]))
    n = grid.size
    zero = np.zeros(n)

    def cost(r: float, rho: float) -> Floats:
        return rho * np.maximum(grid - r, 0) + np.maximum(r - grid, 0)

    rows, bounds = [], []
    for k, rho in enumerate(RATIOS):
        for name, r in fixed.items():
            rows += [cost(r, rho), -cost(r, rho)]
            bounds += [costs[name][k] + ROUNDING, ROUNDING - costs[name][k]]
        rows.append(cost(robust[k], rho))
        bounds.append(costs["DRO"][k] + ROUNDING)
        rows += [-cost(r, rho) for r in grid]
        bounds += [ROUNDING - costs["DRO"][k]] * n
    for p, (below, at) in steps.items():
        rows += [(grid <= below) * 1.0, (grid <= at) * -1.0]
        bounds += [p - 1e-6, -p]
    # The distance is the area between the two CDFs: gap_j >= |F_j - G_j| on [grid_j, grid_j+1).
    cdf = np.tril(np.ones((n, n)))
    rows = np.vstack(
        [np.hstack([np.array(rows), np.zeros((len(rows), n))])]
        + [np.hstack([sign * cdf, -np.eye(n)]) for sign in (1, -1)]
    )
    target = near.cdf(grid)
    answer = linprog(
        np.concatenate([zero, np.diff(grid, append=grid[-1])]),
        A_ub=rows,
        b_ub=np.concatenate([bounds, target, -target]),
        A_eq=[np.concatenate([np.ones(n), zero])],
        b_eq=[1],
        method="highs",
    )
    if answer.status != 0:
        raise ValueError(f"no distribution on the grid has the published costs: {answer.message}")
    p = np.where(answer.x[:n] > 1e-12, answer.x[:n], 0)
    return LengthDistribution.from_counts(
        grid.astype(int), p, near.upper, name="implied by Table II", reconstructed=True
    )


def excess_curves(traces: Traces) -> pd.DataFrame:
    """The function that costs reveal: expected excess over reservations.

    Returns
    -------
    DataFrame
        trace, offset = r - E xi (tokens), excess = E(xi - r)^+ (tokens), at 0 and at some 200 lengths r.
    """
    parts = []
    for trace, dist in traces.items():
        r = np.union1d([0], np.round(np.geomspace(1, dist.tokens[-1], 300)))
        parts.append(pd.DataFrame({"trace": trace, "offset": r - dist.mean, "excess": dist.excess(r)}))
    return pd.concat(parts, ignore_index=True)


# ---- KV bytes -----------------------------------------------------------------------------------


def kv_cache_sizes() -> pd.DataFrame:
    """KV cache per token of the model presets, in decimal and binary megabytes.

    Returns
    -------
    DataFrame
        model, layers, kv_heads, head_size, bytes_per_token, mb_per_token, mib_per_token.
    """
    presets = [Model.preset(name) for name in ("70B-MHA", "Llama-3-70B", "Llama-3-8B")]
    return pd.DataFrame(
        {
            "model": [m.name for m in presets],
            "layers": [m.layers for m in presets],
            "kv_heads": [m.kv_heads for m in presets],
            "head_size": [m.head_size for m in presets],
            "bytes_per_token": [int(m.kv_bytes_per_token) for m in presets],
            "mb_per_token": [m.kv_bytes_per_token / 1e6 for m in presets],
            "mib_per_token": [m.kv_bytes_per_token / 2**20 for m in presets],
        }
    )
