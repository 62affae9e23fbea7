"""The experiments of the sensitivity, cost-latency and ablation notebooks, as tables.

Each function takes the profile (``quick`` is what is committed, ``full`` has finer grids) and returns one
tidy table. The work is done by `kvcache.paper.experiments.sweep`, so it runs in parallel and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvcache.ambiguity import Regime, Wasserstein1
from kvcache.engine import Reserve, StepCost, simulate
from kvcache.paper.digests import load_digest
from kvcache.paper.experiments import runner, sweep
from kvcache.paper.methods.baselines import ENGINE_RULES, PAPER_METHODS, SETS, reservations
from kvcache.paper.methods.rivals import PastFuture, SGLang
from kvcache.paper.methods.systems import Predicted
from kvcache.paper.published import published
from kvcache.replay import PREEMPTION_FACTOR, Workload

__all__ = [
    "TRACES",
    "ablation",
    "ablation_partitions",
    "ablation_regimes",
    "admission_threshold",
    "bounded_map",
    "cost_over_rho",
    "decoded_table4",
    "engines",
    "late_at_paper",
    "late_requests",
    "latency_map",
    "load_scaling",
    "prefix_load",
    "premium",
    "premium_limits",
    "shifts",
    "support_bound",
    "table4",
    "table5",
    "weights",
]

#: Output lengths of the three classes: those of the problem, and the traces the paper names.
TRACES: Mapping[str, list[str] | None] = {
    "instance": None,
    "BurstGPT": ["burstgpt"] * 3,
    "Azure 2024": ["azure-2024-conv", "azure-2024-code", "azure-2024-conv"],
    "ShareGPT": ["sharegpt"] * 3,
}
#: rho of Table IV, and a grid that contains it.
TABLE4_RHO = (2, 10, 100)
RHO_GRID = (1, 2, 5, 10, 20, 50, 100, 200)
#: c_rej at which nothing that fits is ever rejected.
NEVER_REJECT = 2e5
#: Length scales of Fig. 6, and that of Table V.
SHIFTS, TABLE5_SHIFT = (1.0, 1.5, 2.0, 2.5, 3.0), 2.5
SEEDS = 5
#: Loads of the ablation: nothing saturates under the 2.5x shift at either, memory is half full at the second.
CALM_LOAD, BUSY_LOAD = 0.02, 0.06


def _grid(profile: str, quick: Sequence, full: Sequence) -> Sequence:
    return full if profile == "full" else quick


def _points(tasks: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    return sweep.table(runner.point, list(tasks))


# ---- sensitivity --------------------------------------------------------------------------------


def load_scaling(profile: str) -> pd.DataFrame:
    """Fig. 3(a): the optimal policy as arrival rates grow, to saturation and past it."""
    loads = _grid(profile, np.arange(1, 21) / 8, np.arange(1, 61) / 20)
    return _points(
        {"problem": {"arguments": {"load": float(load)}}, "labels": {"load": float(load)}} for load in loads
    )


#: Problems of the premium: the joint problem's, and the single class of Table II.
PREMIUM_RHO = (2, 5, 10, 20, 50, 100)
_TOKENS = (0.1, 0.2, 0.5, 1.0, 5.0, 20.0, 50.0, 100.0, 200.0)
_MEANS = (0.001, 0.004, 0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)


def premium_point(
    *, trace: str, rho: float, radius: float, relative: bool, load: float, gap: float = 3e-5
) -> dict[str, Any]:
    """The cost of robustness at one radius: joint optimum, closed form, and what it rests on.

    Returns
    -------
    dict
        ``premium`` and ``predicted``: relative increase of the joint objective, solved, and from the
        three-regime closed form with the nominal policy's admissions; ``per_arrival_premium``: that of
        the reservation cost alone, as in Table II; the largest critical radius over the classes; how many
        classes have jumped.
    """
    spec = {"arguments": {"load": load}, "outputs": TRACES[trace], "costs": {"preemption": rho}}
    nominal = runner.build(**spec, ambiguity_set=("Wasserstein1", {"radius": 0.0}))
    robust = runner.build(**spec, ambiguity_set=("Wasserstein1", {"radius": radius, "relative": relative}))
    base = runner.choose(nominal, "DRO", "full", None, {"gap": gap, "node_limit": 2 * runner.NODE_LIMIT})
    hedged = runner.choose(robust, "DRO", "full", None, {"gap": gap, "node_limit": 2 * runner.NODE_LIMIT})
    added, saa, jumped, critical = [], [], 0, []
    ball = robust.ambiguity
    for c in robust.classes:
        best = ball.solve(c.output, robust.costs.preemption, robust.costs.waste)
        plain = Wasserstein1(0.0).solve(c.output, robust.costs.preemption, robust.costs.waste)
        added.append(best.value - plain.value)
        saa.append(plain.value)
        jumped += best.regime is not Regime.FRACTILE
        critical.append(best.S / c.output.mean if relative else best.S)
    weight = robust.arrival_rates * base.policy.admission
    return {
        "trace": trace,
        "rho": rho,
        "unit": "mean output" if relative else "tokens",
        "radius": radius,
        "premium": hedged.objective / base.objective - 1,
        "predicted": float(weight @ added) / base.objective,
        "per_arrival_premium": float(weight @ added / (weight @ saa)) if weight.any() else None,
        "smallest_critical_radius": min(critical),
        "classes_jumped": int(jumped),
        "objective": hedged.objective,
        "nominal_objective": base.objective,
    }


def premium(profile: str, trace: str = "instance", load: float = 0.6) -> pd.DataFrame:
    """Fig. 3(b): the premium of robustness over the radius, in both readings of its unit (A1)."""
    rhos = _grid(profile, (2, 10, 50), PREMIUM_RHO)
    tasks = [
        {"trace": trace, "rho": rho, "radius": radius, "relative": relative, "load": load}
        for relative, radii in ((False, _TOKENS), (True, _MEANS))
        for rho in rhos
        for radius in radii
    ]
    return sweep.table(premium_point, tasks)


def premium_limits(targets: Sequence[tuple[float, float]] = ((0.5, 0.013), (0.2, 0.005))) -> pd.DataFrame:
    """Where the paper's two statements about the premium hold, by trace, rho and unit of the radius.

    A target is a radius and the premium that it must stay below. The premium is that of the reservation
    cost per arrival (closed form, A6), classes weighted equally. ``largest_radius`` is the radius at
    which the premium reaches the target, from ``rho radius / SAA`` and so valid below the critical radius.
    """
    rows = []
    for trace in TRACES:
        for rho in RHO_GRID:
            problem = runner.build(outputs=TRACES[trace], costs={"preemption": float(rho)})
            for relative in (False, True):
                plain = [Wasserstein1(0.0).solve(c.output, rho, 1.0).value for c in problem.classes]
                for radius, target in targets:
                    ball = Wasserstein1(radius, relative=relative)
                    robust = [ball.solve(c.output, rho, 1.0).value for c in problem.classes]
                    scale = [c.output.mean if relative else 1.0 for c in problem.classes]
                    rows.append(
                        {
                            "trace": trace,
                            "rho": rho,
                            "unit": "mean output" if relative else "tokens",
                            "radius": radius,
                            "target": target,
                            "premium": sum(robust) / sum(plain) - 1,
                            "holds": sum(robust) / sum(plain) - 1 < target,
                            "largest_radius": target * sum(plain) / (max(rho, 1.0) * sum(scale)),
                        }
                    )
    return pd.DataFrame(rows)


#: Weights of Fig. 4 and the factors on their defaults; the paper's go up to 5x either way.
WEIGHTS = ("c_slo", "c_rej", "kappa")
_FACTORS = (0.2, 0.5, 1.0, 2.0, 5.0)


def weights(profile: str, load: float = 0.6) -> pd.DataFrame:
    """Fig. 4: c_slo, c_rej and kappa around their defaults (one at a time), and c_rej further down."""
    more = _grid(profile, (0.02, 0.05, 0.1, 0.13, 0.16), (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.3))
    field = {"c_slo": "slo", "c_rej": "rejection"}
    defaults = runner.build().costs
    tasks = []
    for weight in WEIGHTS:
        for factor in sorted((*_FACTORS, *(more if weight == "c_rej" else ()))):
            spec: dict[str, Any] = {"arguments": {"load": load}}
            if weight == "kappa":
                spec["headroom"] = value = 0.2 * factor
            else:
                value = getattr(defaults, field[weight]) * factor
                spec["costs"] = {field[weight]: value}
            labels = {"weight": weight, "multiple": factor, "value": value}
            tasks.append({"problem": spec, "labels": labels})
    return _points(tasks)


def admission_threshold() -> pd.DataFrame:
    """c_rej below which rejecting a request is cheaper than its worst-case reservation cost, per class."""
    problem = runner.build()
    eta = problem.unconstrained_reservations()
    return pd.DataFrame(
        [
            {
                "class": c.name,
                "worst_case_cost": problem.worst_case(i, float(eta[i])),
                "share_of_default": problem.worst_case(i, float(eta[i])) / problem.costs.rejection,
            }
            for i, c in enumerate(problem.classes)
        ]
    )


def support_bound(profile: str) -> pd.DataFrame:
    """What L_max decides: critical radius, reservation and premium of each class, by rho.

    The radius is the paper's 0.15 x mean; L_max is a multiple of the longest output in the trace.
    """
    multiples = _grid(profile, np.geomspace(1, 8, 31), np.geomspace(1, 16, 81))
    rows = []
    for rho in (2, 10, 100):
        for multiple in multiples:
            problem = runner.build(upper=float(multiple), costs={"preemption": rho})
            for c in problem.classes:
                best = problem.ambiguity.solve(c.output, rho, 1.0)
                fractile = c.output.quantile(rho / (1 + rho))
                rows.append(
                    {
                        "rho": rho,
                        "class": c.name,
                        "upper_multiple": float(multiple),
                        "l_max": c.output.upper,
                        "radius": problem.ambiguity.radius_tokens(c.output),
                        "critical_radius": best.S,
                        "regime": str(best.regime),
                        "fractile": fractile,
                        "eta": best.eta,
                        "nominal_cost": c.output.cost(best.eta, rho, 1.0),
                        "fractile_cost": c.output.cost(fractile, rho, 1.0),
                    }
                )
    return pd.DataFrame(rows)


# ---- cost and latency ---------------------------------------------------------------------------


def decoded_table4() -> pd.DataFrame:
    """What the published Table IV implies about each fixed policy, if its cost is c_w waste + c_p overflow.

    With c_w = 1 a fixed reservation costs ``waste + rho overflow``. The costs at rho 2 and 100 give
    both; the cost at rho 10 is then a prediction. ``waste - overflow`` is eta - E[xi], in the table's
    unit of tokens. DRO re-optimises for each rho, so it need not lie on a line.
    """
    rows = []
    for entry in published("table_4")["rows"]:
        low, middle, high = entry["cost"]
        overflow = (high - low) / (TABLE4_RHO[2] - TABLE4_RHO[0])
        waste = low - TABLE4_RHO[0] * overflow
        predicted = waste + TABLE4_RHO[1] * overflow
        rows.append(
            {
                "method": entry["method"],
                "overflow": overflow,
                "waste": waste,
                "above_mean": waste - overflow,
                "cost_rho10": middle,
                "predicted_rho10": predicted,
                "error": predicted / middle - 1,
            }
        )
    return pd.DataFrame(rows)


def cost_over_rho(profile: str, load: float = 0.6) -> pd.DataFrame:
    """Every method at every rho, replayed: with the paper's c_rej and with rejection out of the question.

    Arrival rates are those of rho = 10 throughout.
    """
    rhos = _grid(profile, (2, 5, 10, 20, 50, 100), RHO_GRID)
    tasks = [
        {
            "problem": {
                "arguments": {"load": load},
                "costs": {"preemption": rho, **({"rejection": NEVER_REJECT} if forced else {})},
            },
            "method": method,
            "labels": {"rho": rho, "admission": "forced" if forced else "optimised"},
        }
        for forced in (False, True)
        for rho in rhos
        for method in (*PAPER_METHODS, *SETS, *ENGINE_RULES)
        if not (forced and method == "TensorRT-LLM")
    ]
    return _points(tasks)


def table4(costs: pd.DataFrame) -> pd.DataFrame:
    """Table IV from `cost_over_rho`, beside the published one, both also relative to DRO.

    The replayed cost is the reservation cost per arrival with nothing rejected by choice: the published
    costs are linear in rho, so they contain neither rejections nor GPUs nor tardiness.
    """
    paper = {row["method"]: row for row in published("table_4")["rows"]}
    chosen = costs[costs["admission"] == "forced"].set_index(["method", "rho"])
    rows = []
    for method in PAPER_METHODS:
        row: dict[str, Any] = {"method": method}
        for rho in TABLE4_RHO:
            ours = chosen.loc[(method, rho), "reservation_cost"]
            row[f"cost_rho{rho}"] = ours
            row[f"over_dro_rho{rho}"] = ours / chosen.loc[("DRO", rho), "reservation_cost"]
        at10 = chosen.loc[(method, 10)]
        row |= {"p99_s": at10["p99_s"], "slo_violation_pct": 100 * at10["slo_violation"]}
        row |= {"rejection_pct": 100 * at10["rejection"], "preemption_pct": 100 * at10["preemption_rate"]}
        if method in paper:
            for rho, cost, base in zip(TABLE4_RHO, paper[method]["cost"], paper["DRO"]["cost"], strict=True):
                row[f"paper_cost_rho{rho}"] = cost
                row[f"paper_over_dro_rho{rho}"] = cost / base
            row["paper_p99_s"] = paper[method]["p99_s"]
            row["paper_slo_violation_pct"] = paper[method]["slo_viol_pct"]
        rows.append(row)
    return pd.DataFrame(rows)


#: Digests on which `bounded_map` compares the methods, one class each.
BOUNDED_TRACES = (
    "burstgpt",
    "burstgpt-week1",
    "azure-2023-code",
    "azure-2023-conv",
    "azure-2024-code",
    "azure-2024-conv",
    "sharegpt",
    "servegen-m-large",
)


def bounded_map() -> pd.DataFrame:
    """Which methods stay near the fractile's cost at every rho of Table IV, trace by trace (exact)."""
    problem = runner.build()
    rows = []
    for name in BOUNDED_TRACES:
        one = replace(problem.classes[0], output=load_digest(name))
        for method in (*PAPER_METHODS, *SETS):
            over = []
            for rho in TABLE4_RHO:
                costs = replace(problem.costs, preemption=float(rho))
                single = problem.replace(classes=(one,), costs=costs)
                best, own = (
                    one.output.cost(reservations(which, single)[0], rho, 1.0) for which in ("SAA", method)
                )
                over.append(own / best)
            at = int(np.argmax(over))
            rows.append({"trace": name, "method": method, "largest": over[at], "at_rho": TABLE4_RHO[at]})
    return pd.DataFrame(rows)


def latency_map(profile: str) -> pd.DataFrame:
    """P99 latency of P90, LP+1sigma, P99 and Max over DRO's at rho 10, by load, trace and preemption factor.

    Nothing is rejected by choice, so that all methods serve the same requests.
    """
    loads = _grid(profile, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8), np.arange(1, 20) / 20)
    factors = _grid(profile, (1.0, 1.25, 1.5, 2.0, PREEMPTION_FACTOR), (1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5))
    methods = ("DRO", "P90", "LP+1sigma", "P99", "Max")
    traces = _grid(profile, ("instance", "BurstGPT"), tuple(TRACES))
    frame = _points(
        {
            "problem": {
                "arguments": {"load": float(load)},
                "outputs": TRACES[trace],
                "costs": {"rejection": NEVER_REJECT},
            },
            "method": method,
            "factors": [float(factor) for factor in factors],
            "labels": {"trace": trace, "load": float(load)},
        }
        for trace in traces
        for load in loads
        for method in methods
    )
    keys = ["trace", "load", "factor"]
    dro = frame[frame["method"] == "DRO"].set_index(keys)["p99_s"]
    frame["p99_over_dro"] = frame["p99_s"] / dro.reindex(pd.MultiIndex.from_frame(frame[keys])).to_numpy()
    columns = [*keys, "method", "p99_s", "p99_over_dro", "mean_wait_s", "rejection", "max_utilisation"]
    return frame[columns]


#: Multiples of the deadlines at which late requests are counted.
DEADLINES = tuple(np.round(np.geomspace(1, 16, 41), 4))


def late_requests(profile: str, table: str) -> pd.DataFrame:
    """Late requests over the deadline, for the rows of Table ``"IV"`` or ``"V"``.

    Table IV is taken at rho = 10 and load 0.6, Table V under its shift at `CALM_LOAD`.
    """
    if table == "IV":
        tasks = [
            {
                "problem": {"arguments": {"load": 0.6}, "costs": {"rejection": NEVER_REJECT}},
                "method": method,
                "labels": {"table": table, "row": method, "seed": 0},
            }
            for method in PAPER_METHODS
        ]
    else:
        tasks = [
            {
                "problem": {"builder": "ablation", "arguments": {"seed": seed, "load": CALM_LOAD}},
                "variant": variant,
                "shift": TABLE5_SHIFT,
                "seed": seed,
                "labels": {"table": table, "row": variant, "seed": seed},
            }
            for seed in range(_grid(profile, (SEEDS,), (20,))[0])
            for variant in runner.VARIANTS
        ]
    deadlines = [float(multiple) for multiple in DEADLINES]
    return sweep.table(runner.lateness, [{**task, "deadlines": deadlines} for task in tasks])


def late_at_paper(late: pd.DataFrame) -> pd.DataFrame:
    """Late requests at the deadlines that make the paper's own method late as often as the paper says.

    One number, the common multiple of all deadlines, is taken from the published share of the first row
    (DRO, the full model); all other rows are predictions.

    Returns
    -------
    DataFrame: ``row``, ``deadline`` (the multiple, interpolated), ``late_pct`` and ``paper_late_pct``.
    """
    part, key = ("table_4", "method") if late["table"].iloc[0] == "IV" else ("table_5", "variant")
    paper = {
        row[key].replace("BCD-DRO", "full"): float(np.atleast_1d(row["slo_viol_pct"])[0])
        for row in published(part)["rows"]
    }
    curves = 100 * late.pivot_table(index="deadline", columns="row", values="slo_violation", sort=False)
    at, first = np.log(curves.index.to_numpy(float)), curves.columns[0]
    matched = float(np.interp(-paper[first], -curves[first].to_numpy(), at))
    return pd.DataFrame(
        {
            "row": curves.columns,
            "deadline": np.exp(matched),
            "late_pct": [np.interp(matched, at, curves[name]) for name in curves],
            "paper_late_pct": [paper.get(name, np.nan) for name in curves],
        }
    )


#: The engines' admission rules by what a request may generate.
ENGINE_ADMISSION: Mapping[str, Callable[[Mapping[str, float]], Any]] = {
    "vLLM": lambda limits: None,
    "TensorRT-LLM": Reserve,
    "SGLang": SGLang,
    "LightLLM": PastFuture,
}


def engine_point(*, engine: str, load: float, requests: int, seed: int, config: int = 3) -> dict[str, Any]:
    """One engine on one TP4xPP2 group that takes the whole load, beside what equation 7 predicts.

    Time is that of equation 1: an iteration takes the decode time of a token, however many requests share it,
    and each request computes its own prompt beside the others. Nothing but memory limits the batch, and who
    is evicted computes everything again.
    """
    problem = runner.build(arguments={"load": load})
    rng, arrivals = np.random.default_rng(seed), np.random.default_rng(seed).spawn(1)[0]
    lengths = Workload.draw([c.output for c in problem.classes], rng, requests).lengths
    times = np.stack([np.cumsum(arrivals.exponential(1 / r, requests)) for r in problem.arrival_rates])
    names = [c.name for c in problem.classes]
    table = pd.DataFrame(
        {
            "arrival_s": times.ravel(),
            "input_tokens": np.repeat(np.ceil(problem.input_tokens).astype(int), requests),
            "output_tokens": np.maximum(lengths.ravel(), 1).astype(int),
            "class": np.repeat(names, requests),
        }
    )
    # All classes stop when the first runs out of requests.
    table = table[table["arrival_s"] <= times[:, -1].min()].sort_values("arrival_s", ignore_index=True)
    limits = dict(zip(names, problem.max_output_tokens, strict=True))
    served_by = problem.configs[config]
    if engine in ENGINE_ADMISSION:
        rule = ENGINE_ADMISSION[engine](limits)
    else:
        rule = Predicted(dict(zip(names, reservations(engine, problem), strict=True)), limit=limits)
    run = simulate(
        table,
        pool=int(served_by.kv_tokens),
        step_cost=StepCost(served_by.decode_s_per_token, 0.0, 0.0, 0.0),
        admission=rule,
        max_running=len(table),
        max_batched_tokens=10**9,
        prefix_cache=False,
    )
    rows = run.requests[run.requests["status"] == "finished"]
    computed = rows["input_tokens"] + rows["recomputed_tokens"]
    prompts = served_by.prefill_s_per_token * computed + served_by.overhead_s * (1 + rows["preemptions"])
    latency = rows["finish_s"] - rows["arrival_s"] + prompts
    predicted = None
    if engine not in ENGINE_ADMISSION or engine == "TensorRT-LLM":
        held = problem.input_tokens + reservations(engine, problem)
        v = float(problem.offered_loads[:, config] @ held / problem.kv_tokens[config])
        predicted = problem.queueing_factors[config] * v / (1 - v) if v < 1 else float("inf")
    deadline = rows["class"].map(dict(zip(names, problem.latency_slos, strict=True)))
    p50, p99 = np.quantile(latency, [0.5, 0.99])
    return {
        "load": load,
        "engine": engine,
        "served": len(rows),
        "refused": len(table) - len(rows),
        "evicted_share": float((rows["preemptions"] > 0).mean()),
        "recomputed_per_request": float(rows["recomputed_tokens"].mean()),
        "p50_s": float(p50),
        "p99_s": float(p99),
        "mean_queued_s": float((rows["admitted_s"] - rows["arrival_s"]).mean()),
        "throughput": run.throughput,
        "slo_violation": float((latency > deadline).mean()),
        "equation7_wait_s": predicted,
    }


def engines(profile: str) -> pd.DataFrame:
    """The engines' own rules, request by request, from half to one and a half times the capacity."""
    loads = _grid(profile, (0.3, 0.6, 0.9, 1.2, 1.5), np.arange(1, 16) / 10)
    requests = _grid(profile, (1_000,), (10_000,))[0]
    tasks = [
        {"engine": engine, "load": float(load), "requests": requests, "seed": 0}
        for load in loads
        for engine in (*ENGINE_ADMISSION, "DRO", "P99")
    ]
    return sweep.table(engine_point, tasks)


# ---- ablation -----------------------------------------------------------------------------------


def ablation(profile: str) -> pd.DataFrame:
    """Table V: each component left out, evaluated on lengths scaled by 2.5, over five seeds and two loads.

    A seed draws the training samples and the replayed requests; shifted lengths are cut at L_max.
    """
    return _points(
        {
            "problem": {"builder": "ablation", "arguments": {"seed": seed, "load": load}},
            "variant": variant,
            "shifts": [TABLE5_SHIFT],
            "seed": seed,
            "labels": {"load": load, "seed": seed},
        }
        for load in (CALM_LOAD, BUSY_LOAD)
        for seed in range(_grid(profile, (SEEDS,), (20,))[0])
        for variant in runner.VARIANTS
    )


def shifts(profile: str, load: float = CALM_LOAD) -> pd.DataFrame:
    """Fig. 6: DRO, SAA and two other sets as lengths grow, over the seeds of Table V."""
    sets = {
        "DRO": ("DRO", None),
        "SAA": ("SAA", None),
        "Scale shift to 2.5x": ("DRO", ("ScaleShift", {"low": 1.0, "high": 2.5})),
        "DRO, jumped": ("DRO", ("Wasserstein1", {"radius": 0.5, "relative": True})),
    }
    return _points(
        {
            "problem": {
                "builder": "ablation",
                "arguments": {"seed": seed, "load": load},
                "ambiguity_set": chosen,
            },
            "method": method,
            "shifts": _grid(profile, SHIFTS, tuple(np.arange(10, 31) / 10)),
            "seed": seed,
            "labels": {"policy": policy, "seed": seed},
        }
        for policy, (method, chosen) in sets.items()
        for seed in range(_grid(profile, (SEEDS,), (20,))[0])
    )


def table5(table: pd.DataFrame) -> pd.DataFrame:
    """Table V: mean and standard deviation over the seeds by load and variant, beside the published one."""
    columns = {
        "reservation_cost": ("cost", 1.0),
        "total_cost": (None, 1.0),
        "p99_s": ("p99_s", 1.0),
        "goodput": ("goodput", 1.0),
        "slo_violation": ("slo_viol_pct", 100.0),
        "max_utilisation": (None, 1.0),
    }
    paper = {row["variant"].replace("BCD-DRO", "full"): row for row in published("table_5")["rows"]}
    rows = []
    for (load, variant), own in table.groupby(["load", "variant"], sort=False):
        row: dict[str, Any] = {"load": load, "variant": variant, "seeds": len(own)}
        for column, (theirs, factor) in columns.items():
            name = "slo_violation_pct" if factor != 1 else column
            row[f"{name}_mean"] = factor * own[column].mean()
            row[f"{name}_std"] = factor * own[column].std()
            if theirs:
                row[f"paper_{name}_mean"], row[f"paper_{name}_std"] = paper[variant][theirs]
        rows.append(row)
    return pd.DataFrame(rows)


def ablation_regimes(profile: str) -> pd.DataFrame:
    """Where dropping robustness can cost 85 %: SAA over DRO under the shift, by radius and L_max.

    Exact expectations of the reservation cost, no replay: reservations are the closed form's, lengths the
    whole traces', scaled by 2.5 and cut at L_max.
    """
    radii = _grid(profile, np.round(np.arange(0, 13) * 0.05, 2), np.round(np.arange(0, 61) * 0.01, 2))
    multiples = _grid(profile, (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0), np.geomspace(1, 8, 31))
    rows = []
    for multiple in multiples:
        base = runner.build(upper=float(multiple), costs={"preemption": 20.0})
        shifted = runner.replayed_lengths(base, shift=TABLE5_SHIFT)
        weight = base.arrival_rates / base.arrival_rates.sum()
        c_p, c_w = base.costs.preemption, base.costs.waste
        plain = weight @ [
            d.cost(c.output.quantile(base.costs.fractile), c_p, c_w)
            for c, d in zip(base.classes, shifted, strict=True)
        ]
        for radius in radii:
            ball = Wasserstein1(float(radius), relative=True)
            solved = [ball.solve(c.output, c_p, c_w) for c in base.classes]
            robust = weight @ [d.cost(s.eta, c_p, c_w) for s, d in zip(solved, shifted, strict=True)]
            rows.append(
                {
                    "upper_multiple": float(multiple),
                    "radius": float(radius),
                    "saa_over_dro": plain / robust,
                    "classes_jumped": sum(s.regime is not Regime.FRACTILE for s in solved),
                    "dro_cost": robust,
                    "saa_cost": plain,
                }
            )
    return pd.DataFrame(rows)


def ablation_partitions(profile: str) -> pd.DataFrame:
    """Uniform against optimal routing on every partition that uses more than one configuration.

    ``proven_gap`` is that of the optimiser's objective, of which the replayed ``cost`` is the evaluation.
    """
    loads = _grid(
        profile, (0.02, 0.05, 0.1, 0.2, 0.4), (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
    )
    base = runner.build(builder="ablation")
    mixed = [z for z in runner.partitions(base) if (z > 0).sum() > 1]
    frame = _points(
        {
            "problem": {"builder": "ablation", "arguments": {"seed": 0, "load": load}},
            "variant": variant,
            "groups": z.tolist(),
            "node_limit": 2_000,
            "shifts": [1.0, TABLE5_SHIFT],
            "labels": {"load": load},
        }
        for load in loads
        for z in mixed
        for variant in ("full", "-Routing")
    )
    keys = ["load", "shift", "groups"]
    full = frame[frame["variant"] == "full"].set_index(keys)
    uniform = frame[frame["variant"] == "-Routing"].set_index(keys).reindex(full.index)
    return pd.DataFrame(
        {
            "cost": full["total_cost"],
            "proven_gap": full["optimality_gap"],
            "uniform_cost": uniform["total_cost"],
            "ratio": uniform["total_cost"] / full["total_cost"],
            "reservation_ratio": uniform["reservation_cost"] / full["reservation_cost"],
            "p99_s": full["p99_s"],
            "uniform_p99_s": uniform["p99_s"],
            "uniform_rejection": uniform["rejection"],
            "uniform_unstable": uniform["unstable"],
        }
    ).reset_index()


def prefix_load(profile: str) -> pd.DataFrame:
    """Prefix caching on and off as load grows, under the shift and without it."""
    loads = _grid(profile, (0.02, 0.04, 0.05, 0.06, 0.07, 0.08), np.arange(1, 13) / 100)
    calm = _grid(profile, (0.1, 0.3, 0.5, 0.6, 0.7, 0.8), np.arange(1, 19) / 20)
    return _points(
        {
            "problem": {"builder": "ablation", "arguments": {"seed": 0, "load": float(load)}},
            "variant": variant,
            "shifts": [shift],
            "labels": {"load": float(load)},
        }
        for shift, grid in ((TABLE5_SHIFT, loads), (1.0, calm))
        for load in grid
        for variant in ("full", "-Prefix caching")
    )
