"""The paper against itself: each statement beside what else says something about the same thing.

A *check* puts one statement beside the paper's own tables, its equations, another copy of it, or the traces
it names. All numbers are computed: from the published ones, from result tables, or from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import numpy as np
import pandas as pd

from kvcache.hardware import GPU
from kvcache.paper import builders
from kvcache.paper.experiments.comparison import decoded_table4
from kvcache.paper.experiments.survey import first_hours
from kvcache.paper.methods.baselines import BLOCK
from kvcache.paper.published import CLAIMS, published
from kvcache.queueing import mean_wait

__all__ = ["KINDS", "Check", "checks", "partitions_within"]

#: What a statement is held against.
KINDS = {
    "paper": "another part of the paper",
    "copies": "another copy of the paper",
    "traces": "the traces it names",
    "model": "its own model, computed here",
}


@dataclass(frozen=True)
class Check:
    """One statement beside what contradicts or confirms it.

    Parameters
    ----------
    where, says : the place and what stands there, in short.
    against : what it is held against, with the numbers.
    agrees : whether the two can both be true.
    kind : a key of `KINDS`.
    claims : ids of the claims on which it bears.
    source : result table or published part that the numbers come from.
    """

    where: str
    says: str
    against: str
    agrees: bool
    kind: str
    claims: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r}; expected one of {list(KINDS)}")
        unknown = [claim for claim in self.claims.split() if claim not in CLAIMS]
        if unknown:
            raise ValueError(f"claim {unknown[0]!r}; known are {', '.join(CLAIMS)}")
        object.__setattr__(self, "agrees", bool(self.agrees))


Tables = Mapping[str, pd.DataFrame]
#: What stands there, what it is held against (with the numbers), and whether the two can both be true.
Finding = tuple[str, str, bool]
_CHECKS: list[Callable[[Tables], Check]] = []


def _check(
    where: str, kind: str, claims: str, source: str
) -> Callable[[Callable[[Tables], Finding]], Callable[[Tables], Check]]:
    """Decorator of a function that finds; what it finds and these facts make the check."""

    def register(find: Callable[[Tables], Finding]) -> Callable[[Tables], Check]:
        @wraps(find)
        def check(tables: Tables) -> Check:
            return Check(where, *find(tables), kind, claims, source)

        _CHECKS.append(check)
        return check

    return register


def _rows(part: str, key: str) -> dict[Any, dict[str, Any]]:
    return {row[key]: row for row in published(part)["rows"]}


def _list(values: object, form: str = "g") -> str:
    return ", ".join(format(value, form) for value in values)


@_check("Table II", "paper", "C01", "published table_2")
def gains_in_order(_: Tables) -> Finding:
    table = published("table_2")
    swapped = []
    for row in table["rows"]:
        first, second = (100 * (1 - row["DRO"] / row[name]) for name in ("P90", "P95"))
        low, high = table["gain_pct"][str(row["rho"])]
        if abs(first - low) + abs(second - high) > abs(first - high) + abs(second - low):
            swapped.append(row["rho"])
    return (
        "its gains are stated as [over P90, over P95]",
        f"by its own costs the first number is the gain over P95 at rho {_list(swapped)}: they go from low "
        "to high",
        not swapped,
    )


@_check("Abstract", "paper", "C01 C13", "published table_4")
def largest_gain(_: Tables) -> Finding:
    stated = max(max(pair) for pair in published("table_2")["gain_pct"].values())
    table = _rows("table_4", "method")
    rho = published("table_4")["rho"]
    gains = {
        (method, r): 100 * (1 - table["DRO"]["cost"][k] / table[method]["cost"][k])
        for method in ("P90", "P95", "P99", "Mean", "Max")
        for k, r in enumerate(rho)
    }
    (method, at), gain = max(gains.items(), key=lambda item: item[1])
    return (
        f"up to {stated} % lower cost than fixed reservations",
        f"by Table IV it is {gain:.0f} % lower than {method} at rho {at}, and "
        f"{gains['P90', 100]:.0f} % lower than P90 there; {stated} % is Table II's",
        abs(gain - stated) < 1,
    )


@_check("IV-B", "paper", "C03 C04 C19", "table2: regime")
def above_and_at_the_fractile(tables: Tables) -> Finding:
    cells = tables["table2"][tables["table2"]["trace"] != "published"]
    at = int((cells["regime"] == "fractile").sum())
    return (
        "the robust reservation differs strictly from the empirical fractile",
        "by Fig. 2(b) and the note in V-C it is the empirical fractile, exactly; by the closed form it is "
        f"that in {at} of {len(cells)} cells of trace and rho and near L_max in the other {len(cells) - at}",
        at == 0,
    )


@_check("V-A, Fig. 3(b)", "paper", "C09 C04", "published table_2, figure_3")
def default_radius_against_premium(_: Tables) -> Finding:
    radius = published("setup")["radius_in_means"]
    mean = published("traces")["BurstGPT"]["mean"]
    limit = published("figure_3")["premium_pct_below"]["0.1-0.2"]
    rows = published("table_2")["rows"]
    premium = {row["rho"]: 100 * row["rho"] * radius * mean / row["DRO"] for row in rows}
    return (
        f"the default radius of {radius:g} x mean costs less than {limit:g} %",
        f"up to the critical radius the premium is rho x radius over the cost; with the mean of {mean} and "
        f"the costs of Table II that is {min(premium.values()):.0f} to {max(premium.values()):.0f} %: the "
        "figure's axis is in tokens, the default in means",
        max(premium.values()) < limit,
    )


@_check("V-B, Fig. 3(b)", "paper", "C09", "published table_2, figure_3")
def premium_over_rho(_: Tables) -> Finding:
    limits = published("figure_3")["premium_pct_below"]
    rows = published("table_2")["rows"]
    at_half = {row["rho"]: 100 * row["rho"] * 0.5 / row["DRO"] for row in rows}
    beyond = [rho for rho, premium in at_half.items() if premium >= limits["0.5"]]
    return (
        f"below {limits['0.5']:g} % at radius 0.5, and it scales with rho",
        f"in tokens and with the costs of Table II it is {at_half[10]:.2f} % at rho 10 and "
        f"{max(at_half.values()):.1f} % at rho 100; the bound does not hold at rho {_list(beyond)}",
        not beyond,
    )


@_check("V-D", "paper", "C13 C04", "published table_4")
def dro_is_max(_: Tables) -> Finding:
    table = _rows("table_4", "method")
    rho = published("table_4")["rho"]
    dro, most = table["DRO"]["cost"], table["Max"]["cost"]
    same = [r for r, a, b in zip(rho, dro, most, strict=True) if a == b]
    return (
        "DRO avoids both extremes, that of Max included",
        f"in Table IV DRO and Max cost the same to the last digit at rho {_list(same)} ({dro[-1]:,}), as "
        "they would past the critical radius, where the closed form reserves nearly L_max",
        not same,
    )


@_check("V-A, V-B", "paper", "C04 C08 C10", "fig3a: quantile_*")
def reservation_depends_on_rho_alone(tables: Tables) -> Finding:
    table = tables["fig3a"]
    quantiles = table[[c for c in table if c.startswith("quantile_")]]
    lowest = table.loc[quantiles.min(axis=1).idxmin()]
    return (
        "the reservation depends on rho alone",
        "by IV-B it grows with the radius, and by (6e) it shares the memory: here the optimum falls to the "
        f"{quantiles.min().min():.0%} quantile of a class at {lowest['load']:g} x capacity, rho being 10 "
        "throughout",
        quantiles.min().min() > 0.9,
    )


@_check("V-D", "paper", "C13", "published table_4")
def only_one_is_bounded(_: Tables) -> Finding:
    table = _rows("table_4", "method")
    spread = {name: max(row["cost"]) / min(row["cost"]) for name, row in table.items()}
    flatter = sorted((s, name) for name, s in spread.items() if s < spread["DRO"])
    return (
        "DRO is the only method with a bounded cost over rho",
        f"in Table IV DRO's cost varies by a factor of {spread['DRO']:.1f}, that of "
        + " and ".join(f"{name} by {s:.2f}" for s, name in flatter[:2])
        + "; what sets DRO apart is its distance to the cheapest",
        not flatter,
    )


@_check("Takeaway 4", "paper", "C13 C21", "published table_4")
def several_fold(_: Tables) -> Finding:
    table = _rows("table_4", "method")
    worst = {
        name: max(a / b for a, b in zip(row["cost"], table["DRO"]["cost"], strict=True))
        for name, row in table.items()
        if name != "DRO"
    }
    least = min(worst, key=worst.get)
    return (
        "every other method is several times dearer than DRO at some rho",
        f"in Table IV the worst ratio of {least} is {worst[least]:.2f}; of the others, up to "
        f"{max(worst.values()):.1f}",
        worst[least] >= 3,
    )


@_check("V-A", "paper", "C01 C13 C16", "published table_2, table_4")
def saa_is_left_out(_: Tables) -> Finding:
    shown = {name for row in published("table_2")["rows"] for name in row}
    shown |= set(_rows("table_4", "method"))
    return (
        "six strategies are compared, the sixth is SAA (radius 0)",
        f"SAA is {'in' if 'SAA' in shown else 'neither in'} Table II "
        f"{'and' if 'SAA' in shown else 'nor in'} Table IV; it would have shown where DRO equals it",
        "SAA" in shown,
    )


@_check("Table V", "paper", "C15 C17", "published table_5; table5_seeds: reservation_cost")
def cost_of_the_ablation(tables: Tables) -> Finding:
    table = _rows("table_5", "variant")
    full, routing, prefix = (table[v]["cost"][0] for v in ("BCD-DRO", "-Routing", "-Prefix caching"))
    seeds = tables["table5_seeds"]
    wide = seeds[seeds["variant"].isin(["full", "-Routing"])].pivot_table(
        index=["load", "seed"], columns="variant", values="reservation_cost"
    )
    ours = (wide["-Routing"] / wide["full"]).max()
    return (
        f"prefix caching leaves the cost at {prefix:,} because cost means preemption and waste only",
        f"routing multiplies it by {routing / full:.1f}, yet it enters preemption and waste only through "
        f"admission, which can only lower them (here x {ours:.2f}); a cost that routing raises holds "
        "rejections, and tardiness would show the slower queue without caching",
        prefix != full or routing <= full,
    )


@_check("V-E, Fig. 6", "paper", "C16 C18", "published figure_6, table_5")
def gap_grows_monotonically(_: Tables) -> Finding:
    figure, table = published("figure_6"), _rows("table_5", "variant")
    shift = published("table_5")["length_scale"]
    ratio = {
        1.0: figure["SAA"]["1.0"] / figure["DRO"]["1.0"],
        shift: table["-DRO (SAA)"]["p99_s"][0] / table["BCD-DRO"]["p99_s"][0],
        3.0: figure["SAA"]["3.0"] / figure["DRO"]["3.0"],
    }
    values = [ratio[s] for s in sorted(ratio)]
    return (
        "the gap between SAA and DRO in P99 latency grows monotonically with the shift",
        f"with Table V the ratio is {_list(values, '.2f')} at shifts of {_list(sorted(ratio))}; with the "
        f"other copy's 3.0 s for SAA unshifted it would be {_list([1.0, *values[1:]], '.2f')}",
        bool(np.all(np.diff(values) >= 0)),
    )


@_check("Fig. 6", "copies", "C18", "published figure_6")
def saa_without_a_shift(_: Tables) -> Finding:
    figure = published("figure_6")
    return (
        f"SAA's P99 is {figure['SAA']['1.0']} s without a shift",
        f"another copy says it starts where DRO does, at {figure['DRO']['1.0']} s; that copy fits V-E, by "
        "which SAA is slightly better where nothing shifts",
        figure["SAA"]["1.0"] == figure["DRO"]["1.0"],
    )


@_check("Table II, V-A", "paper", "C01 C02", "table2_implied_bounds: offset_low, offset_high")
def table2_is_not_the_stated_trace(tables: Tables) -> Finding:
    stated = published("traces")["BurstGPT"]
    bounds = tables["table2_implied_bounds"].set_index("policy").loc["P90"]
    low, high = stated["p90"] - bounds["offset_high"], stated["p90"] - bounds["offset_low"]
    return (
        f"it is computed on BurstGPT with mean {stated['mean']} and P90 {stated['p90']}",
        f"its six costs of P90 put P90 {bounds['offset_low']:.1f} to {bounds['offset_high']:.1f} tokens "
        f"above the mean, so the mean is {low:.0f} to {high:.0f}, not {stated['mean']}",
        low - 0.5 <= stated["mean"] <= high + 0.5,
    )


@_check("Table IV, V-A", "paper", "C13 C14 C21", "published table_4 (table4_decoded: above_mean)")
def table4_is_not_the_stated_trace(_: Tables) -> Finding:
    stated = published("traces")["BurstGPT"]
    above = decoded_table4().set_index("method")["above_mean"]
    ours = above["P99"] / above["P90"]
    theirs = (stated["p99"] - stated["mean"]) / (stated["p90"] - stated["mean"])
    return (
        "it replays BurstGPT; its unit is not named",
        f"its costs put P90 {above['P90']:,.0f} and P99 {above['P99']:,.0f} above the mean, a ratio of "
        f"{ours:.1f}; BurstGPT as stated has {stated['p90'] - stated['mean']} and "
        f"{stated['p99'] - stated['mean']:,}, a ratio of {theirs:.1f}: no unit makes them one trace",
        abs(ours / theirs - 1) < 0.1,
    )


@_check("I", "paper", "C20", "published setup")
def response_and_accelerator(_: Tables) -> Finding:
    setup = published("setup")
    gigabytes, memory = 2000 * setup["kv_mb_per_token"] / 1e3, GPU.preset("A100-80GB").memory_bytes / 1e9
    return (
        "the KV cache of 2,000 tokens may exceed the memory of one accelerator",
        f"{gigabytes:g} GB are {gigabytes / memory:.0%} of the {memory:.0f} GB of the accelerators in V-A",
        gigabytes > memory,
    )


@_check("I", "paper", "", "published traces")
def lengths_by_application(_: Tables) -> Finding:
    traces = published("traces")
    code, talk = traces["Azure LLM 2024 code"], traces["Azure LLM 2024 conversation"]
    return (
        "outputs are tens of tokens for chat and thousands for code generation",
        f"by V-A code has a mean of {code['mean']} and a P90 of {code['p90']}, conversation {talk['mean']} "
        f"and {talk['p90']}",
        code["mean"] > talk["mean"],
    )


@_check("(6e), (7)", "model", "C14 C17", "assumptions: A3")
def load_below_one(tables: Tables) -> Finding:
    table = tables["assumptions"]
    row = table[(table["id"] == "A3") & table["metric"].str.startswith("utilisation")].iloc[0]
    return (
        "one symbol u is the offered load in (6e) and in Block 2, and the utilisation in (7)",
        f"(7) needs u < 1; by Little's law a group of the paper's instance holds {row['changed']:.0f} "
        "requests at once, and Block 2 caches a prefix only where u pi / z > 1. V-D uses the memory "
        "utilisation instead",
        row["changed"] < 1,
    )


@_check("Algorithm 1, Prop. IV.3", "model", "C07", "published setup: kappa")
def block2_threshold(_: Tables) -> Finding:
    kappa = published("setup")["kappa"]
    return (
        "Block 2 caches where u pi / z > 1, and no block alone can improve the result",
        f"by (6e) a cached prefix frees (1 + kappa) u pi / z of its tokens and takes one: it pays from "
        f"{1 / (1 + kappa):.3f} on, so between that and 1 another delta uses less memory",
        kappa == 0,
    )


def partitions_within(gpus: int, sizes: list[int]) -> int:
    """How many z >= 0 have sum_k z_k n_k <= gpus, for groups of these sizes n_k."""
    # ways[j]: partitions that use exactly j GPUs, one configuration added after the other
    ways = np.zeros(gpus + 1, dtype=object)
    ways[0] = 1
    for n in sizes:
        for j in range(n, gpus + 1):
            ways[j] += ways[j - n]
    return int(sum(ways))


# `instances` is `kvcache.paper.builders`; the cell of checks.csv keeps the older name.
@_check("V-B", "model", "C06 C07", "instances.TABLE3_SIZES (A13)")
def partitions_are_many(_: Tables) -> Finding:
    _, configs, _, gpus = builders.TABLE3_SIZES[-1]
    known = [k.gpus for k in builders.PAPER_CONFIGS + builders.MORE_CONFIGS][:configs]
    many = partitions_within(gpus, known)
    few = partitions_within(8, [k.gpus for k in builders.PAPER_CONFIGS])
    seconds = _rows("table_3", "size")["15x12x2000"]["bcd_s"]
    return (
        "Block 3 can enumerate, since the budget keeps the set of partitions small",
        f"{few} on 8 GPUs, {many:,} for {configs} configurations of the sizes used here on {gpus}: "
        f"{many / seconds:,.0f} per second within {seconds:g} s, which an evaluation allows and a linear "
        "program with all samples does not",
        many <= 100_000,
    )


@_check("IV-A", "paper", "C05", "published table_3")
def tractable_for_solvers(_: Tables) -> Finding:
    first = next(row for row in published("table_3")["rows"] if row["miblp_s"] is None)
    classes, _, samples = map(int, first["size"].split("x"))
    return (
        "with O(|I| N) more variables the program stays tractable for solvers",
        f"by Table III it runs into {published('table_3')['limit_s']} s from {first['size']} on, with "
        f"{classes * samples:,} such variables",
        False,
    )


@_check("Fig. 4", "paper", "C10", "published table_2, table_4")
def shedding_within_five(_: Tables) -> Finding:
    setup = published("setup")
    small, large = _rows("table_2", "rho")[10]["DRO"], _rows("table_4", "method")["DRO"]["cost"][1]
    return (
        "within a factor of 5 the optimum sheds the dearest class once rejecting is cheaper than serving",
        f"c_rej is {setup['c_rej']:,}; serving costs {small} at rho 10 by Table II, which takes a cut by "
        f"{setup['c_rej'] / small:.1f}, and {large:,} by Table IV, which takes {setup['c_rej'] / large:.1f}",
        setup["c_rej"] / small <= 5,
    )


@_check("Takeaway 5", "paper", "C10", "published setup")
def two_parameters(_: Tables) -> Finding:
    more = [name for name in ("c_slo", "c_rej", "kappa") if name in published("setup")]
    return (
        "radius and rho are the only parameters from outside",
        f"V-A sets {len(more)} more by hand ({', '.join(more)}), and L_max, on which the robust reservation "
        "depends most, is not given",
        not more,
    )


@_check("Table V", "copies", "C15 C16 C17", "published table_5")
def caption_of_table5(_: Tables) -> Finding:
    return (
        "one copy of its caption says 55 seeds",
        "that copy prints each formula of the caption twice (2.5x2.5x, rho=20rho=20), so the 5 of the "
        "others is meant",
        False,
    )


# `instances` is `kvcache.paper.builders`; the cell of checks.csv keeps the older name.
@_check("(6e)", "copies", "", "instances.paper")
def memory_constraint_in_two_copies(_: Tables) -> Finding:
    problem = builders.paper()
    groups = np.array([0, 0, 0, 1])
    routing = np.zeros(problem.offered_loads.shape)
    routing[:, -1] = 1.0
    left = (1 + problem.headroom) * float((problem.offered_loads * routing).sum())
    right = float((groups * (problem.input_tokens + problem.max_output_tokens)[:, None]).sum())
    return (
        "one copy has (1 + kappa) sum u pi <= sum z r",
        f"requests on the left ({left:.0f} on the paper's instance), tokens on the right (up to "
        f"{right:,.0f}), and no capacity M_k. The other copy has reserved tokens on the left and M_k on the "
        "right, as here",
        False,
    )


def second_copy_wait(load: float, mean: float, scv: float) -> float:
    """Equation 7 as the second copy prints it, seconds, with its alpha_lambda and u both the load."""
    return load * mean / (2 * (1 - load)) * ((load**2 + scv) / 2 + 1 + load)


@_check("(7)", "copies", "C14", "queueing.mean_wait")
def waiting_time_in_two_copies(_: Tables) -> Finding:
    load = 0.5
    exact = {name: mean_wait(load, 1.0, 1 + scv) for name, scv in (("M/M/1", 1.0), ("M/D/1", 0.0))}
    printed = {name: second_copy_wait(load, 1.0, scv) for name, scv in (("M/M/1", 1.0), ("M/D/1", 0.0))}
    return (
        "one copy of the waiting time differs from the other",
        "at half load, in mean service times: "
        + ", ".join(f"{name} {printed[name]:.2f} instead of {exact[name]:.2f}" for name in exact)
        + "; Pollaczek and Khinchin's formula is used here",
        all(np.isclose(printed[name], exact[name]) for name in exact),
    )


@_check("Table V", "copies", "C15 C16", "published table_5")
def ratios_in_a_copy(_: Tables) -> Finding:
    table = _rows("table_5", "variant")
    late = table["-DRO (SAA)"]["slo_viol_pct"][0] / table["BCD-DRO"]["slo_viol_pct"][0] - 1
    goodput = table["BCD-DRO"]["goodput"][0] / table["-Routing"]["goodput"][0]
    return (
        "one copy: SAA has 246 % more late requests, uniform routing 42 times less goodput",
        f"the table's own numbers give {late:.0%} and {goodput:.1f} times",
        abs(late - 2.46) < 0.01 and abs(goodput - 42) < 0.5,
    )


@_check("V-A", "traces", "C01", "traces_beside_paper")
def p99_of_burstgpt(tables: Tables) -> Finding:
    row = _trace(tables, "burstgpt", "p99")
    return (
        f"P99 of BurstGPT is {row['paper']:,.0f}",
        f"a count of the whole file gives {row['ours']:,.0f}; {row['paper']:,.0f} is its "
        f"{row['paper_as_quantile']:.2%} quantile. Requests, mean and P90 agree",
        abs(row["difference"]) < 0.01,
    )


def _trace(tables: Tables, trace: str, statistic: str) -> pd.Series:
    table = tables["traces_beside_paper"]
    return table[(table["trace"] == trace) & (table["statistic"] == statistic)].iloc[0]


@_check("V-A", "traces", "", "traces_beside_paper; data/sources.toml")
def azure_code(tables: Tables) -> Finding:
    row = _trace(tables, "azure-2024-code", "p90")
    hours = first_hours("azure-2024-code")["p90"]
    return (
        f"P90 of Azure 2024 code over 7 days is {row['paper']:.0f}",
        f"over the week it is {row['ours']:.0f}; {row['paper']:.0f} is that of the first hour "
        f"({_list(hours.head(3))} in hours 1 to 3, {hours.min()} later that day)",
        row["paper"] == row["ours"],
    )


@_check("V-A", "traces", "", "traces_beside_paper")
def azure_conversation(tables: Tables) -> Finding:
    mean, p90 = (_trace(tables, "azure-2024-conv", statistic) for statistic in ("mean", "p90"))
    return (
        f"Azure 2024 conversation has mean {mean['paper']:.0f} and P90 {p90['paper']:.0f}",
        f"over the week {mean['ours']:.0f} and {p90['ours']:.0f}; where the stated ones come from is not "
        "known",
        abs(mean["difference"]) < 0.01 and abs(p90["difference"]) < 0.01,
    )


@_check("V-A", "traces", "", "traces_beside_paper")
def sharegpt(tables: Tables) -> Finding:
    found = {name: _trace(tables, "sharegpt", name) for name in ("responses", "mean", "p90", "p99")}
    return (
        "ShareGPT: " + ", ".join(f"{name} {row['paper']:,.0f}" for name, row in found.items()),
        ", ".join(f"{name} {row['ours']:,.0f}" for name, row in found.items())
        + " with the Mistral tokenizer on the first part of the file; the paper names no tokenizer",
        all(abs(row["difference"]) < 0.05 for row in found.values()),
    )


# What was checked in the same way and agrees.


@_check("Table IV", "paper", "C13", "published table_4 (table4_decoded)")
def table4_is_linear(_: Tables) -> Finding:
    decoded = decoded_table4().set_index("method")
    error = decoded.drop(index="DRO")["error"].abs().max()
    sigma = decoded.loc[["LP+1sigma", "LP+2sigma"], "above_mean"].to_numpy() / (1, 2)
    return (
        "each fixed reservation costs waste + rho x overflow",
        f"costs at rho 2 and 100 predict those at 10 within {error:.2%}; LP+1sigma and LP+2sigma give one "
        f"sigma ({_list(sigma, ',.0f')}); Mean lies {decoded.loc['Mean', 'above_mean']:.0f} above the mean",
        error < 1e-3 and abs(sigma[0] / sigma[1] - 1) < 0.01,
    )


@_check("Table II, V-A", "paper", "C02", "table2_implied_bounds")
def table2_lines(tables: Tables) -> Finding:
    bounds = tables["table2_implied_bounds"].set_index("policy")
    low = bounds.loc["P95", "offset_low"] - bounds.loc["P90", "offset_high"]
    high = bounds.loc["P95", "offset_high"] - bounds.loc["P90", "offset_low"]
    p90 = published("traces")["BurstGPT"]["p90"]
    blocks = [
        n for n in range(int(p90 + low), int(p90 + high) + 2) if n % BLOCK == 0 and low <= n - p90 <= high
    ]
    return (
        f"P95 is rounded up to blocks of {BLOCK} tokens",
        f"its costs put P95 {low:.1f} to {high:.1f} tokens above P90 = {p90}, which leaves {_list(blocks)}",
        len(blocks) == 1,
    )


@_check("V-D", "paper", "C14", "published table_4")
def latency_percentages(_: Tables) -> Finding:
    table = _rows("table_4", "method")
    lower = {m: 100 * (1 - table[m]["p99_s"] / table["DRO"]["p99_s"]) for m in ("LP+1sigma", "P90")}
    return (
        "LP+1sigma is 1.5 % and P90 0.7 % below DRO in P99 latency",
        f"by Table IV {lower['LP+1sigma']:.1f} % and {lower['P90']:.1f} %",
        abs(lower["LP+1sigma"] - 1.5) < 0.05 and abs(lower["P90"] - 0.7) < 0.05,
    )


@_check("V-E", "paper", "C16 C17", "published table_5")
def table5_percentages(_: Tables) -> Finding:
    table = _rows("table_5", "variant")
    cost = 100 * (table["-DRO (SAA)"]["cost"][0] / table["BCD-DRO"]["cost"][0] - 1)
    tail = 100 * (table["-Prefix caching"]["p99_s"][0] / table["BCD-DRO"]["p99_s"][0] - 1)
    return (
        "SAA costs 85 % more, no caching raises P99 by 22 %",
        f"by Table V {cost:.1f} % and {tail:.1f} %",
        abs(cost - 85) < 1 and abs(tail - 22) < 1,
    )


@_check("V-B", "paper", "C10 C19", "published setup")
def quantile_of_the_default(_: Tables) -> Finding:
    rho = published("setup")["c_p"] / published("setup")["c_w"]
    return (
        "at the default rho the fractile is about 91 %",
        f"rho / (1 + rho) = {rho / (1 + rho):.2%}",
        round(100 * rho / (1 + rho)) == 91,
    )


@_check("V-A", "traces", "", "traces: requests")
def sizes_of_traces(tables: Tables) -> Finding:
    table = tables["traces"].query("field == 'output'").set_index("trace")["requests"]
    azure = table["azure-2024-code"] + table["azure-2024-conv"]
    burst = table["burstgpt"]
    return (
        "BurstGPT has 1.4 million requests, Azure 2024 44 million",
        f"{burst:,} and {azure:,}",
        round(burst / 1e5) == 14 and round(azure / 1e6) == 44,
    )


def checks(tables: Tables) -> pd.DataFrame:
    """All checks, contradictions first, then what agrees.

    Returns
    -------
    DataFrame
        id (``X01`` ... for a contradiction, ``Y01`` ... for what agrees), where, says, against, agrees, kind
        (see `KINDS`), claims (ids on which it bears), source.

    Raises
    ------
    FileNotFoundError
        When a result table that a check reads is not there.
    """
    found = [check(tables) for check in _CHECKS]
    ordered = [c for c in found if not c.agrees], [c for c in found if c.agrees]
    rows = [
        {"id": f"{letter}{n:02d}", **asdict(check)}
        for letter, group in zip("XY", ordered, strict=True)
        for n, check in enumerate(group, start=1)
    ]
    return pd.DataFrame(rows)
