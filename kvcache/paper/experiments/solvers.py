"""The solvers side by side: Table III, growth of time, readings of Block 3, and the optimum's structure.

Objectives and bounds do not depend on the clock in the quick profile: every run there ends by itself.
Seconds, and whatever a licence or a time limit decides, are tables of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvcache.paper import builders
from kvcache.paper.methods import solve
from kvcache.paper.published import published
from kvcache.policy import Policy, Solution, Status, evaluate
from kvcache.problem import Problem

__all__ = [
    "METHODS",
    "Study",
    "descent",
    "factors",
    "growth",
    "online",
    "readings",
    "structure",
    "table3",
    "table3_seconds",
]

#: Name in the tables, method, its options.
METHODS = {
    "certified": ("certified", {}),
    "BCD, fast": ("bcd", {}),
    "BCD, N thetas": ("bcd", {"per_sample": True}),
    "compact MIBLP, Gurobi": ("miblp", {"solver": "gurobi", "compact": True}),
    "compact MIBLP, SCIP": ("miblp", {"solver": "scip", "compact": True}),
    "literal MIBLP, Gurobi": ("miblp", {"solver": "gurobi"}),
    "literal MIBLP, SCIP": ("miblp", {"solver": "scip"}),
}
#: What a licence decides never enters a table that is compared.
LICENSED = ("compact MIBLP, Gurobi", "literal MIBLP, Gurobi")
SEED = 0
#: Decimals of gaps and shares: beyond lies what floating point makes of equal numbers.
DIGITS = 6
#: Classes, configurations, samples and GPUs of the problem whose descent and optimum are drawn: 28 GPUs
#: are no multiple of the best group, so the optimum mixes configurations.
SHOWN = (6, 8, 300, 28)


@dataclass(frozen=True)
class Study:
    """What a profile runs.

    ``sizes`` names for each method how many of Table III's sizes it runs, the smallest first; ``limit``
    is the solvers' time limit in seconds, or None where all of them end by themselves.
    """

    sizes: dict[str, int]
    limit: float | None
    gaps: dict[str, float]

    @classmethod
    def of(cls, profile: str) -> Study:
        """``quick``: small sizes for the slow methods; ``full``: all, with the paper's limit of 300 s."""
        everything = len(builders.TABLE3_SIZES)
        if profile == "full":
            return cls(dict.fromkeys(METHODS, everything), 300.0, {})
        return cls(
            {
                "certified": everything,
                "BCD, fast": everything,
                "BCD, N thetas": 4,
                "compact MIBLP, Gurobi": 4,
                "compact MIBLP, SCIP": 1,
                "literal MIBLP, Gurobi": 4,
                "literal MIBLP, SCIP": 1,
            },
            None,
            {"15x12x2000": 1e-3},
        )


def _run(problem: Problem, name: str, study: Study) -> Solution:
    method, options = METHODS[name]
    gap = study.gaps.get(problem.name, 1e-4)
    return solve(problem, method, time_limit=study.limit, gap=gap, **options)


def _row(name: str, size: str, solution: Solution) -> dict[str, object]:
    has = solution.policy is not None
    return {
        "size": size,
        "method": name,
        "objective": solution.objective if has else np.nan,
        "lower_bound": solution.lower_bound if np.isfinite(solution.lower_bound) else np.nan,
        "status": str(solution.status),
        "seconds": solution.seconds,
    }


def table3(profile: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Table III: all methods on the paper's sizes.

    Returns
    -------
    values : size, method, objective, lower_bound, status and proven_gap, for the runs that neither the
        clock nor a licence decides. ``proven_gap`` is the relative distance of the objective to the best
        bound that any of these methods proved for the size: a policy without an own bound has one here.
    timings : all runs, with seconds and the paper's seconds for the same kind of method.
    """
    study = Study.of(profile)
    rows = []
    for at, size in enumerate(builders.TABLE3_SIZES):
        problem = builders.scalability(*size, seed=SEED)
        for name in METHODS:
            if at < study.sizes[name]:
                rows.append(_row(name, problem.name, _run(problem, name, study)))
    table = pd.DataFrame(rows)
    clock = table["method"].isin(LICENSED)
    if study.limit is not None:
        clock |= table["method"].str.contains("MIBLP|certified") & (table["status"] != "optimal")
    bounds = table["size"].map(table[~clock].groupby("size")["lower_bound"].max())
    table["proven_gap"] = (1 - bounds / table["objective"]).clip(lower=0.0).round(DIGITS)
    rows_of_paper = {row["size"]: row for row in published("table_3")["rows"]}
    kind = np.where(table["method"].str.contains("BCD"), "bcd_s", "miblp_s")
    table["paper_s"] = [rows_of_paper[s][k] for s, k in zip(table["size"], kind, strict=True)]
    values = table[~clock].drop(columns=["seconds", "paper_s"]).reset_index(drop=True)
    return values, table


def table3_seconds(timings: pd.DataFrame) -> pd.DataFrame:
    """Seconds, one row per size and one column per method, the paper's two first; empty where not run."""
    paper = pd.DataFrame(published("table_3")["rows"]).set_index("size")[["miblp_s", "bcd_s"]]
    paper.columns = ["paper: MIBLP", "paper: BCD"]
    seconds = timings.pivot(index="size", columns="method", values="seconds")
    fits = timings.pivot(index="size", columns="method", values="status") != Status.TOO_LARGE
    order = [name for name in METHODS if name in seconds.columns]
    table = paper.join(seconds.where(fits)[order])
    return table.loc[[f"{i}x{k}x{n}" for i, k, n, _ in builders.TABLE3_SIZES]].reset_index()


def factors(timings: pd.DataFrame) -> pd.DataFrame:
    """What part of the distance to the paper's seconds is machine and program, and what part the method.

    Columns: size, paper_s, n_thetas_s, fast_s, machine (paper over our Algorithm 1 with one theta per
    sample: the same algorithm on another machine and solver) and method (that over the closed form, on
    one machine).
    """
    bcd = timings[timings["method"].str.startswith("BCD")]
    wide = bcd.pivot(index="size", columns="method", values="seconds").dropna()
    paper = bcd.groupby("size")["paper_s"].first()
    slow, fast = wide["BCD, N thetas"], wide["BCD, fast"]
    table = pd.DataFrame({"paper_s": paper, "n_thetas_s": slow, "fast_s": fast}).dropna()
    table["machine"], table["method"] = (
        table["paper_s"] / table["n_thetas_s"],
        table["n_thetas_s"] / table["fast_s"],
    )
    order = [f"{i}x{k}x{n}" for i, k, n, _ in builders.TABLE3_SIZES]
    return table.loc[[size for size in order if size in table.index]].reset_index(names="size")


def growth(profile: str) -> pd.DataFrame:
    """Seconds against classes, configurations and samples, one at a time from 4 x 4 x 200 on 16 GPUs.

    Columns: axis, value, method, seconds, objective. The literal reading of Block 3 keeps the number of
    programs small, so that what grows is the program and not the search.
    """
    full = profile == "full"
    axes = {
        "classes": (2, 4, 8, 16, 32) if full else (2, 4, 8, 16),
        "configurations": (4, 8, 12, 24) if full else (4, 8, 12),
        "samples": (100, 1_000, 10_000, 1_000_000, 44_000_000) if full else (100, 1_000, 44_000_000),
    }
    most_thetas = 40_000 if full else 4_000
    rows = []
    for axis, values in axes.items():
        for value in values:
            size = {"classes": 4, "configurations": 4, "samples": 200} | {axis: value}
            x = builders.scalability(*size.values(), gpus=16, seed=SEED)
            runs = {
                "BCD, fast": ("bcd", {"block3": "literal"}),
                "BCD, N thetas": ("bcd", {"block3": "literal", "per_sample": True}),
                "certified": ("certified", {"gap": 1e-3, "node_limit": 100}),
            }
            for name, (method, options) in runs.items():
                if name == "BCD, N thetas" and size["classes"] * size["samples"] > most_thetas:
                    continue
                solution = solve(x, method, **options)
                rows.append(
                    {
                        "axis": axis,
                        "value": value,
                        "method": name,
                        "seconds": solution.seconds,
                        "objective": solution.objective,
                    }
                )
    return pd.DataFrame(rows)


def _spread(problem: Problem) -> np.ndarray:
    """A naive z^(0): one more group of each configuration in turn, while GPUs last."""
    z = np.zeros(len(problem.configs), dtype=int)
    added = True
    while added:
        added = False
        for k, n in enumerate(problem.group_gpus):
            if problem.group_gpus @ z + n <= problem.gpus:
                z[k] += 1
                added = True
    return z


def readings(profile: str) -> pd.DataFrame:
    """How far each reading of Block 3 ends above the best known policy.

    Columns: load, seed, start, block3, objective, best, above, falls (whether the history only falls),
    iterations, lower_bound. Random problems of 3 x 4 x 60 on 12 GPUs.
    """
    seeds = range(20 if profile == "full" else 3)
    rows = []
    for load in (0.6, 1.0, 1.5):
        for seed in seeds:
            x = builders.scalability(3, 4, 60, 12, seed, load=load)
            certified = solve(x, gap=1e-3, node_limit=60)
            own = []
            for start, z in (("fewest GPUs", None), ("spread", _spread(x))):
                for block3 in ("resolve", "literal"):
                    found = solve(x, "bcd", block3=block3, start=z)
                    again = solve(x, "bcd", block3=block3, start=found)
                    own.append(
                        {
                            "load": load,
                            "seed": seed,
                            "start": start,
                            "block3": block3,
                            "objective": found.objective,
                            "falls": bool(np.all(np.diff(found.history) < 0)),
                            "blockwise": bool(again.objective >= found.objective * (1 - 1e-6)),
                            "iterations": found.iterations,
                        }
                    )
            best = min([certified.objective, *(row["objective"] for row in own)])
            known = {"best": best, "lower_bound": certified.lower_bound}
            rows += [row | known | {"above": round(row["objective"] / best - 1, DIGITS)} for row in own]
    return pd.DataFrame(rows)


def descent() -> pd.DataFrame:
    """The objective after each accepted block, for both readings and two starts, and the certified bound.

    Columns: block3, start, step, objective, lower_bound.
    """
    x = builders.scalability(*SHOWN, seed=SEED)
    bound = solve(x, gap=1e-3, node_limit=200).lower_bound
    rows = []
    for start, z in (("fewest GPUs", None), ("spread", _spread(x))):
        for block3 in ("resolve", "literal"):
            found = solve(x, "bcd", block3=block3, start=z)
            # The first entry rejects everything: a start, not a step.
            rows += [
                {"block3": block3, "start": start, "step": step, "objective": value, "lower_bound": bound}
                for step, value in enumerate(found.history)
                if step > 0
            ]
    return pd.DataFrame(rows)


def structure() -> dict[str, pd.DataFrame]:
    """What the best policy of the shown problem looks like.

    Returns
    -------
    ``groups`` per configuration, ``routing`` per class and deployed configuration, ``reservations`` per
    class beside quantiles of its lengths; one table each.
    """
    x = builders.scalability(*SHOWN, seed=SEED)
    policy = solve(x, gap=1e-3, node_limit=200).policy
    names = [k.name for k in x.configs]
    groups = pd.DataFrame(
        {
            "config": names,
            "groups": policy.groups,
            "gpus": policy.groups * x.group_gpus,
            "kv_tokens": x.kv_tokens,
            "utilisation": evaluate(x, policy).utilisation,
        }
    )
    routing = pd.DataFrame(
        [
            {
                "class": c.name,
                "config": names[k],
                "share": round(policy.routing[i, k], DIGITS),
                "cached": policy.prefix_cache[i, k],
            }
            for i, c in enumerate(x.classes)
            for k in np.flatnonzero(policy.groups)
        ]
    )
    best = x.unconstrained_reservations()
    quantiles = (0.1, 0.5, 0.9, 0.99)
    reservations = pd.DataFrame(
        [
            {
                "class": c.name,
                "prompt": c.input_tokens,
                "eta": round(policy.reservations[i] - c.input_tokens, DIGITS),
                "fractile": c.output.quantile(x.costs.fractile),
                "robust": best[i],
                "admitted": policy.admission[i],
                **{f"p{100 * q:g}": c.output.quantile(q) for q in quantiles},
                "l_max": c.output.upper,
            }
            for i, c in enumerate(x.classes)
        ]
    )
    return {"groups": groups, "routing": routing, "reservations": reservations}


def online(requests: int = 200_000) -> pd.DataFrame:
    """Nanoseconds per request to route and to look a reservation up, one at a time and many at once.

    Columns: classes, configurations, one_by_one_ns, vectorised_ns, million_per_s. The policy is
    a table: its size does not depend on the samples behind it.
    """
    rng = np.random.default_rng(0)
    rows = []
    for classes, configs in ((3, 4), (15, 12), (50, 24)):
        policy = Policy(
            np.ones(configs, dtype=int),
            rng.uniform(100, 1000, classes),
            rng.dirichlet(np.ones(configs), classes) * 0.95,
            np.zeros((classes, configs)),
        )
        drawn = rng.integers(0, classes, requests)
        began = time.perf_counter()
        policy.route(drawn, rng)
        policy.reservation(drawn)
        many = (time.perf_counter() - began) / requests
        one_by_one = drawn[: requests // 20].tolist()
        began = time.perf_counter()
        for i in one_by_one:
            policy.route(i, rng)
            policy.reservation(i)
        single = (time.perf_counter() - began) / len(one_by_one)
        rows.append(
            {
                "classes": classes,
                "configurations": configs,
                "one_by_one_ns": single * 1e9,
                "vectorised_ns": many * 1e9,
                "million_per_s": 1e-6 / many,
            }
        )
    return pd.DataFrame(rows)
