"""What the paper leaves open, what is chosen here, where in the code that can be changed, and what it does.

The choices are named defaults of the code; `defaults` reads their values from there. How much each one
matters is measured by :mod:`kvcache.paper.experiments.effects` and kept in ``assumptions.csv``. ``python -m
kvcache.paper.assumptions docs/assumptions.md`` writes both into one page.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from kvcache.files import atomic_path
from kvcache.paper.project import project_root
from kvcache.paper.results import read_table

__all__ = ["ASSUMPTIONS", "Assumption", "assumption_table", "default", "page"]

#: The table of measured effects, written by notebook 08.
EFFECTS = "assumptions.csv"
#: A relative change below this is shown as none; the optima are proven to 2e-5.
NEGLIGIBLE = 2e-4


@dataclass(frozen=True)
class Assumption:
    """One open question of the paper and the answer taken here.

    ``where`` names the defaults that hold the answer, separated by commas: ``module.NAME``,
    ``module.function(parameter=)`` or a file of the project.
    """

    id: str
    question: str
    choice: str
    where: str

    @property
    def references(self) -> list[str]:
        """The entries of ``where``."""
        return [reference.strip() for reference in self.where.split(",")]


ASSUMPTIONS = (
    Assumption(
        "A1",
        "Unit of the Wasserstein radius",
        "Tokens; 0.15 relative=True stands for the paper's 0.15 x mean output",
        "paper.builders.RADIUS, paper.builders.paper(radius=), paper.builders.paper(relative=)",
    ),
    Assumption(
        "A2",
        "Support bound L_max",
        "Per class, the cap seen in its own trace",
        "paper.builders.Application.output, lengths.LengthDistribution.upper, "
        "paper.builders.paper(max_output_tokens=)",
    ),
    Assumption(
        "A3",
        "Utilisation in the waiting time W_k",
        "Memory utilisation v_k; phi_k over the whole arrival mix, so it is a constant of the problem",
        "problem.Problem.queueing_factors, policy.evaluate",
    ),
    Assumption("A4", "Cost of a GPU", "1 per GPU and second", "problem.Costs.gpu"),
    Assumption(
        "A5",
        "Arrival rates, prompts, prefixes, deadlines",
        "Equal requests per class, scaled so that the mix needs a stated load (0.6) of the memory that the "
        "GPUs can offer it; prompts are the traces' means; the prefix is a stated share of the prompt (the "
        "share of repeated prompt tokens in the Mooncake trace); the deadline is twice the mean service time "
        "on the fastest configuration",
        "paper.builders.LOAD, paper.builders.with_load, paper.builders.SLO_FACTOR, "
        "paper.builders.PREFIX_DIGEST",
    ),
    Assumption(
        "A6",
        "What Table II counts",
        "Cost per arrival at c_w = 1, without the premium",
        "paper.experiments.fractile.table2",
    ),
    Assumption(
        "A7",
        "Block 3 of Algorithm 1",
        "The routing and reservation problems are solved again for each z",
        "paper.methods.bcd.solve(block3=)",
    ),
    Assumption(
        "A8",
        "Requests larger than a group",
        "The optimiser's memory constraint is on means and admits them; the replay rejects them",
        "replay.replay",
    ),
    Assumption(
        "A9",
        "KV bytes per token",
        "2.6 MB (all 64 heads) in the paper's problem; grouped queries (0.33 MB) as the realistic preset",
        "paper.builders.paper(model=), hardware.Model.preset",
    ),
    Assumption(
        "A10",
        "P99 of BurstGPT",
        "1,505 from the published quantiles of the whole file; the paper prints 1,586",
        "data/sources.toml",
    ),
    Assumption(
        "A11",
        "Constants of equation 1",
        "C_k = tau p c (a prompt uses all GPUs of its group), B_k = tau b (a token passes the stages in "
        "turn); c, b and t_ar are fitted to measured A100 and H100 kernels",
        "hardware.serving_config(service=), kvcache/data/calibration.json",
    ),
    Assumption(
        "A12",
        "Memory left for the KV cache",
        "90 % of 80e9 bytes per GPU less the weights (140 GB for 70B), no further overhead",
        "hardware.MEMORY_UTILISATION, hardware.kv_capacity(overhead_bytes=)",
    ),
    Assumption(
        "A13",
        "GPUs and draws behind Table III",
        "8 GPUs where the paper names none and all configurations have at most 8, 24 for the size with eight "
        "configurations, 48 where it says so; classes are drawn from the traces' lengths, scaled by 0.5 to 2",
        "paper.builders.TABLE3_SIZES, paper.builders.scalability",
    ),
    Assumption(
        "A14",
        "Waiting in a queue that has no steady state",
        "A group at v_k >= 1 is reported as unstable, and waits as if it were full to the stated cap",
        "replay.UTILISATION_CAP",
    ),
    Assumption(
        "A15",
        "Lengths scaled beyond L_max",
        "Cut at L_max, as a generation limit would",
        "paper.experiments.runner.replayed_lengths(capped=)",
    ),
    Assumption(
        "A16",
        "Load of the ablation under its 2.5x shift",
        "Two loads far below the stated 0.6, at which memory would overflow with such lengths",
        "paper.experiments.comparison.CALM_LOAD, paper.experiments.comparison.BUSY_LOAD",
    ),
    Assumption(
        "A17",
        "Cost in Table IV",
        "Preemption and waste per arrival while nothing is rejected by choice: the published costs are "
        "linear in rho, so they hold neither rejections nor GPUs nor tardiness",
        "paper.experiments.comparison.NEVER_REJECT",
    ),
    Assumption(
        "A18",
        "Time lost to preemption",
        "The replay serves a preempted request 2.5 times as long; the optimiser's service times know "
        "nothing of it, as in equation 1",
        "replay.PREEMPTION_FACTOR",
    ),
)


def assumption_table(*ids: str) -> pd.DataFrame:
    """The assumptions (all, or those with the given ids) as a table for a notebook.

    Raises KeyError for an unknown id.
    """
    known = {a.id: a for a in ASSUMPTIONS}
    unknown = [i for i in ids if i not in known]
    if unknown:
        raise KeyError(f"assumption {unknown[0]!r}; known are {list(known)}")
    return pd.DataFrame([vars(known[i]) for i in (ids or known)])


def _attribute(owner: Any, name: str) -> Any:
    if hasattr(owner, "__path__") and importlib.util.find_spec(f"{owner.__name__}.{name}") is not None:
        return importlib.import_module(f"{owner.__name__}.{name}")
    if is_dataclass(owner) and name in {field.name for field in fields(owner)} and not hasattr(owner, name):
        return inspect.Parameter.empty
    return getattr(owner, name)


def default(reference: str) -> Any:
    """What a reference of `Assumption.where` holds now.

    Returns
    -------
    The value of a module's name, the default of a parameter or a field (``inspect.Parameter.empty``
    where it has none), or the `Path` of a file.

    Raises
    ------
    LookupError
        When the code or the project has no such thing.
    """
    if "/" in reference:
        path = project_root() / reference
        if not path.is_file():
            raise LookupError(f"{reference}: the project has no such file")
        return path
    match = re.fullmatch(r"(\w+\.[\w.]+?)(?:\((\w+)=\))?", reference)
    if match is None:
        raise LookupError(f"{reference!r}; expected module.NAME, module.function(parameter=) or a file")
    names, parameter = match.groups()
    try:
        found = reduce(_attribute, names.split("."), importlib.import_module("kvcache"))
        return found if parameter is None else inspect.signature(found).parameters[parameter].default
    except (ImportError, AttributeError, KeyError) as error:
        raise LookupError(f"{reference}: the code has no such default") from error


def _shown(reference: str) -> str:
    value = default(reference)
    if not isinstance(value, (bool, int, float, str)):
        return f"`{reference.replace('=)', ')')}`"
    if reference.endswith("=)"):
        return f"`{reference[:-1]}{value!r})`"
    return f"`{reference} = {value!r}`"


def _number(value: float) -> str:
    if pd.isna(value):
        return "without bound"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(relative: float) -> str:
    return f"{100 * relative:+.{0 if abs(relative) >= 0.1 else 2 if abs(relative) < 0.01 else 1}f} %"


def _change(relative: float) -> str:
    if pd.isna(relative):
        return ""
    if abs(relative) < NEGLIGIBLE:
        return ", no change"
    return f", {_percent(relative)}" if relative < 9 else f", x {1 + relative:.3g}"


def _sensitive(effects: pd.DataFrame) -> str:
    """The choices by what they do to the cost of the joint problem, most first."""
    costs = effects[effects["metric"].str.startswith(("cost per second", "cost per request"))]
    largest = costs.assign(size=costs["relative"].abs()).sort_values("size", ascending=False)
    first = largest.drop_duplicates("id")
    return ", ".join(f"{row['id']} {_percent(row['relative'])}" for _, row in first.iterrows())


def page(effects: pd.DataFrame, claims: pd.DataFrame) -> str:
    """The page on the assumptions, Markdown.

    Parameters
    ----------
    effects : rows of ``assumptions.csv``, see `kvcache.paper.experiments.effects.effects`.
    claims : rows of ``claims.csv``; its column ``assumptions`` tells which verdicts rest on which choice.

    Raises
    ------
    ValueError
        When an assumption has no measured effect, or an effect no assumption.
    """
    ids = [a.id for a in ASSUMPTIONS]
    unmeasured = [i for i in ids if i not in set(effects["id"])]
    unknown = sorted(set(effects["id"]) - set(ids))
    if unmeasured or unknown:
        raise ValueError(
            f"assumptions without a measured effect: {', '.join(unmeasured) or 'none'}; "
            f"effects of no assumption: {', '.join(unknown) or 'none'}"
        )
    own = claims["assumptions"].fillna("").str.split()
    parts = [_HEAD.format(sensitive=_sensitive(effects))]
    for assumption in ASSUMPTIONS:
        rests = claims.loc[[assumption.id in listed for listed in own], "id"]
        parts.append(
            f"\n**{assumption.id} {assumption.question}.** {assumption.choice}.\n"
            f"In the code: {', '.join(_shown(r) for r in assumption.references)}."
            + (f" Verdicts that rest on it: {', '.join(rests)}." if len(rests) else "")
            + "\n\n"
        )
        for _, row in effects[effects["id"] == assumption.id].iterrows():
            parts.append(
                f"- {row['metric']}: {_number(row['baseline'])} with {row['default']}; "
                f"{_number(row['changed'])} with {row['alternative']}{_change(row['relative'])}\n"
            )
    return "".join(parts)


_HEAD = """# Choices where the paper is silent or unclear

Each is a named default of the code and can be changed there. What it does is measured by
`kvcache/paper/experiments/effects.py`, one choice at a time; all else is the paper's problem (8 A100-80GB,
chat, code and conversation from real traces, rho = 10, radius 0.15 x mean, load 0.6) unless the line says
so. Each line gives the number with the choice made here, then with another. Costs are in units of one
wasted token; *cost per second* is the optimum of the joint problem. `make readme` writes this page from the
code and from `data/results/assumptions.csv`.

Largest change of a cost in the lists below: {sensitive}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: write the page; with ``--check`` 1 when it is not what code and tables say."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.assumptions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("target", type=Path, nargs="?", default=project_root() / "docs" / "assumptions.md")
    parser.add_argument("--check", action="store_true", help="write nothing, tell whether it differs")
    options = parser.parse_args(arguments)
    text = page(read_table(EFFECTS, "quick"), read_table("claims.csv", "quick"))
    if options.target.is_file() and options.target.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        print(f"{options.target}: differs from the code or data/results; run `make readme`")
        return 1
    with atomic_path(options.target) as partial:
        partial.write_text(text, encoding="utf-8")
    print(f"{options.target}: rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
