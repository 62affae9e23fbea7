"""The end of the reproduction: every claim with its verdict, what is untested, and the headline numbers.

Everything here is read from the result tables of a profile, so it takes no time.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

import pandas as pd
from IPython.display import HTML

from kvcache.paper.claims.checks import checks
from kvcache.paper.claims.verdicts import PARTS, Outcome, judge
from kvcache.paper.published import CLAIMS, published
from kvcache.paper.results import read_table, results_dir

__all__ = ["UNTESTED", "Results", "as_html", "by_verdict", "collected", "headlines", "rejudged", "untested"]


class Results(Mapping[str, pd.DataFrame]):
    """The result tables of a profile by name without ``.csv``, each read when it is asked for."""

    def __init__(self, profile: str) -> None:
        self.profile = profile
        self._read: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._read:
            self._read[name] = read_table(f"{name}.csv", self.profile)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in results_dir(self.profile).glob("*.csv")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


# ---- the claims ---------------------------------------------------------------------------------


def collected(profile: str) -> pd.DataFrame:
    """All claims with their verdicts, put together from what each notebook saved.

    Returns
    -------
    DataFrame
        The columns of ``claims.csv``, and ``notebook``; one row per claim, in their order.

    Raises
    ------
    ValueError
        When a claim has no verdict, or two; names it and the notebooks.
    """
    folder = results_dir(profile) / PARTS
    parts = [read_table(path.resolve()).assign(notebook=path.stem) for path in sorted(folder.glob("*.csv"))]
    judged = pd.concat(parts) if parts else pd.DataFrame({"id": [], "notebook": []})
    missing = [claim for claim in CLAIMS if claim not in set(judged["id"])]
    if missing:
        known = ", ".join(judged["notebook"].unique()) or "no notebook"
        raise ValueError(
            f"no verdict on {', '.join(missing)}: {folder} has those of {known}; run the notebooks that "
            "judge them (`make notebooks`)"
        )
    twice = judged.loc[judged["id"].duplicated(keep=False)]
    if len(twice):
        raise ValueError(f"claim {twice['id'].iloc[0]}: judged in {' and '.join(twice['notebook'])}")
    return judged.sort_values("id", ignore_index=True)


def by_verdict(claims: pd.DataFrame) -> pd.DataFrame:
    """How many claims came to each verdict: verdict, claims (their number), ids."""
    groups = claims.groupby("verdict")["id"]
    return pd.DataFrame(
        [
            {
                "verdict": str(outcome),
                "claims": int((claims["verdict"] == outcome).sum()),
                "ids": " ".join(groups.get_group(outcome)) if outcome in groups.groups else "",
            }
            for outcome in Outcome
        ]
    )


def rejudged(
    claims: pd.DataFrame, tables: Mapping[str, pd.DataFrame], *, engine: bool = False
) -> pd.DataFrame:
    """Every claim judged again from the tables as they lie on disk; ``engine`` for the second verdicts.

    Returns
    -------
    DataFrame
        id, verdict (as saved), again (from the tables), same.
    """
    again = [str(judge(claim, tables, engine=engine).verdict) for claim in claims["id"]]
    frame = claims[["id", "verdict"]].assign(again=again)
    return frame.assign(same=frame["verdict"] == frame["again"])


# ---- what was not tested ------------------------------------------------------------------------

UNTESTED = (
    ("Fig. 1", "A drawing of the system; it states no number", "—"),
    ("Table I", "A summary of related work; its entries are opinions on other papers", "—"),
    (
        "Latency and throughput on real GPUs",
        "The paper simulates too; no GPU is at hand",
        "Service times fitted to measured A100 and H100 kernels (A11), and the engines' own rules request "
        "by request",
    ),
    (
        "The curves of Fig. 2 to 6 point by point",
        "Only the numbers named in the text are published, not the data behind the curves",
        "Each figure is drawn from our own computation and judged by what the text says of it",
    ),
    (
        "The paper's instances",
        "Arrival rates, prompts, prefixes, deadlines, L_max and the draws of Table III are not given",
        "Named defaults, each with its effect measured (docs/assumptions.md)",
    ),
    (
        "Absolute costs and latencies of Tables IV and V",
        "Their unit and their instance are not named",
        "Ratios between methods, which need neither",
    ),
    (
        "The exact solver at the paper's sizes",
        "Gurobi from the package index runs without a licence only up to 200 variables with quadratic terms",
        "SCIP, a compact form that fits, and a solver that proves its gap at every size",
    ),
    (
        "All of ShareGPT, and every request of BurstGPT and Azure 2024",
        "No copy of the whole files is at hand; `make data` fetches them and rebuilds the digests",
        "A part of ShareGPT, a week of BurstGPT, and reconstructions from published quantiles, marked as "
        "such",
    ),
    (
        "Which rho suits which service (Table II's scenarios)",
        "A matter of prices that no trace contains",
        "All results over rho 1 to 200",
    ),
)


def as_html(frame: pd.DataFrame) -> HTML:
    """A table of sentences to read in a notebook: wrapped, left-aligned, without an index."""
    style = "text-align:left;vertical-align:top;white-space:normal"
    head = "".join(f"<th style='{style}'>{html.escape(name)}</th>" for name in frame)
    body = "".join(
        f"<tr>{''.join(f'<td style={style!r}>{html.escape(str(cell))}</td>' for cell in row)}</tr>"
        for row in frame.itertuples(index=False)
    )
    return HTML(f"<table style='font-size:0.9em'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def untested() -> pd.DataFrame:
    """What was not tested: what, why, and what stands in for it."""
    return pd.DataFrame(UNTESTED, columns=["what", "why", "instead"])


# ---- for the README -----------------------------------------------------------------------------


def headlines(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The numbers of the README's findings: name, value; each from one result table.

    Raises
    ------
    FileNotFoundError
        When a result table is not there.
    """
    cells = tables["table2"][tables["table2"]["trace"] != "published"]
    gains = cells[["gain_p90_pct", "gain_p95_pct"]].to_numpy()
    premium = tables["fig3b"].query("unit == 'mean output' and radius == 0.15").set_index("rho")["premium"]
    standing = tables["drift_standing"].set_index("period").loc["days 6-14"]
    drift = tables["drift"].query("period == 'days 6-14'")
    static = drift[drift["policy"] == "static"]["ratio"]
    table4 = tables["table4"].set_index("method")
    wide = tables["kv_cache"].set_index("model")["mb_per_token"]
    found = checks(tables)
    solved = tables["table3"].query("method == 'certified'")
    values = {
        "cells": len(cells),
        "cells_at_fractile": int((cells["regime"] == "fractile").sum()),
        "dearer_cells": int((gains < -1e-9).any(axis=1).sum()),
        "dearer_pct": -gains.min(),
        "premium_default_pct": 100 * premium[10],
        "saa_over_dro_rho100": table4.loc["SAA", "cost_rho100"] / table4.loc["DRO", "cost_rho100"],
        "sizes": solved["size"].nunique(),
        "sizes_proven": int((solved["status"] == "optimal").sum()),
        "paper_seconds": max(row["bcd_s"] for row in published("table_3")["rows"]),
        "drift_adaptive_pct": standing["default"],
        "drift_best_member_pct": standing["best_member"],
        "drift_grid_pct": standing["grid"],
        "drift_static_worst": static.max(),
        "kv_mb_stated": wide["70B-MHA"],
        "kv_mb_grouped": wide["Llama-3-70B"],
        "contradictions": int((~found["agrees"] & found["kind"].isin(["paper", "model"])).sum()),
    }
    return pd.DataFrame({"name": list(values), "value": [float(v) for v in values.values()]})
