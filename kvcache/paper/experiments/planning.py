"""The tables of notebook 10: a plan, what it does in repeated replays, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from kvcache.groups import second_opinion
from kvcache.paper.digests.joint import load_joint
from kvcache.planner import Plan, PlanError

__all__ = ["bundled_requests", "growth", "limits", "opinions", "origins", "outcomes", "what_ifs"]

#: The bundled trace: a third code completion, two thirds conversation, about as the traces are sized.
BUNDLED = {"azure-2023-code": 1 / 3, "azure-2023-conv": 2 / 3}


def bundled_requests(rate: float, count: int = 12_000, seed: int = 0) -> pd.DataFrame:
    """Requests with lengths drawn from committed pairs of prompt and output, and Poisson arrivals.

    ``rate`` in requests/s; classes are named after the traces.
    """
    rng = np.random.default_rng(seed)
    parts = []
    for name, share in BUNDLED.items():
        law = load_joint(name)
        drawn = rng.choice(law.inputs.size, round(count * share), p=law.weights / law.weights.sum())
        columns = {"input_tokens": law.inputs[drawn], "output_tokens": law.outputs[drawn]}
        parts.append(pd.DataFrame(columns).assign(**{"class": name.removeprefix("azure-2023-")}))
    table = pd.concat(parts, ignore_index=True)
    table = table.iloc[rng.permutation(len(table))].reset_index(drop=True)
    return table.assign(arrival_s=np.cumsum(rng.exponential(1 / rate, len(table))))


def outcomes(made: Plan, seeds: Iterable[int]) -> pd.DataFrame:
    """What was predicted beside the least, the mean and the most of several replays, per figure."""
    runs = made.replays(list(seeds))
    predicted = {
        "throughput": made.predicted["requests_per_s"],
        "tpot_mean": made.predicted["tpot"],
    }
    table = pd.DataFrame(
        {"predicted": predicted, "least": runs.min(), "mean": runs.mean(), "most": runs.max()}
    )
    return table.reindex(runs.columns).rename_axis("figure").reset_index()


def limits(made: Plan) -> pd.DataFrame:
    """How much of each limit the groups use: columns ``label``, ``limit``, ``use``, ``filled``.

    ``filled`` is the share of every limit that the plan may use, so that percentiles keep the deadlines too.
    """
    rows = []
    for k in made.draft.used:
        _, use = made.planner.point(made.draft, k)
        for name, value in zip(("TPOT", "memory", "running requests", "prompt tokens"), use, strict=True):
            rows.append({"label": made.draft.kinds[k].label, "limit": name, "use": float(value)})
    return pd.DataFrame(rows).assign(filled=made.draft.fill)


def growth(made: Plan, gpus: Iterable[int], tpots: Iterable[float]) -> pd.DataFrame:
    """Requests/s that are served within the deadlines by other numbers of GPUs and other TPOT deadlines."""
    rows = []
    for n in gpus:
        for tpot in tpots:
            rows.append({"gpus": n, "tpot": tpot, **_figures(made, gpus=n, tpot=tpot)})
    return pd.DataFrame(rows)


def what_ifs(made: Plan, loads: Iterable[float], drifts: Iterable[float]) -> pd.DataFrame:
    """The plan made again for other loads and for outputs that are longer or shorter."""
    rows = [{"change": "load", "factor": x, **_figures(made, load=x)} for x in loads]
    rows += [{"change": "output lengths", "factor": x, **_figures(made, drift=x)} for x in drifts]
    return pd.DataFrame(rows)


def _figures(made: Plan, **changes: float) -> dict[str, object]:
    try:
        other = made.what_if(**changes)
    except PlanError:
        return {"served_per_s": 0.0, "rejected": 1.0, "tpot_s": np.nan, "groups": "none"}
    return {
        "served_per_s": other.predicted["requests_per_s"],
        "rejected": other.predicted["rejected"],
        "tpot_s": other.predicted["tpot"],
        "groups": ", ".join(f"{r.groups} x {r.label}" for r in other.groups.itertuples()),
    }


def origins(made: Plan) -> pd.DataFrame:
    """Where pools and step times come from: measured, calibrated or modelled, and by what."""
    rows = []
    for k in made.draft.used:
        serving = made.draft.kinds[k].serving
        rows += [
            {"label": made.draft.kinds[k].label, "figure": name, "kind": p.label, "source": p.source}
            for name, p in serving.provenance.items()
        ]
    return pd.DataFrame(rows)


def opinions(made: Plan, running: Iterable[int] = (1, 32, 128), context: int = 1024) -> pd.DataFrame:
    """Decode steps in ms: the table that the plan uses beside constants fitted to other measurements."""
    rows = []
    for k in made.draft.used:
        serving = made.draft.kinds[k].serving
        other = second_opinion(serving)
        for batch in running:
            held = batch * context
            rows.append(
                {
                    "label": made.draft.kinds[k].label,
                    "running": batch,
                    "table_ms": 1e3 * float(serving.table.seconds(batch, held)),
                    "linear_ms": 1e3 * float(serving.cost.seconds(batch, held)),
                    "second_opinion_ms": np.nan if other is None else 1e3 * float(other.seconds(batch, held)),
                }
            )
    return pd.DataFrame(rows)
