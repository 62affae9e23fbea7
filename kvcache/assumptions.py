"""What the paper leaves open, what is chosen here, and where in the code the choice can be changed."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

__all__ = ["ASSUMPTIONS", "Assumption", "assumption_table"]


@dataclass(frozen=True)
class Assumption:
    """One open question of the paper and the answer taken here; ``where`` names the default that holds it."""

    id: str
    question: str
    choice: str
    where: str


ASSUMPTIONS = (
    Assumption(
        "A1",
        "Unit of the Wasserstein radius",
        "Tokens; 0.15 relative=True stands for the paper's 0.15 x mean output",
        "instances.paper(radius=, relative=)",
    ),
    Assumption(
        "A2",
        "Support bound L_max",
        "Per class, the cap seen in its own trace",
        "instances.APPLICATIONS, LengthDistribution.upper",
    ),
    Assumption(
        "A3",
        "Utilisation in the waiting time W_k",
        "Memory utilisation v_k; phi_k over the whole arrival mix, so it is a constant of the instance",
        "Instance.queueing_factors, policy.evaluate",
    ),
    Assumption("A4", "Cost of a GPU", "1 per GPU and second", "Costs.gpu"),
    Assumption(
        "A5",
        "Arrival rates, prompts, prefixes, deadlines",
        "Equal requests per class, scaled so that the mix needs a stated load (0.6) of the memory that the "
        "GPUs can offer it; prompts are the traces' means; the prefix is a stated share of the prompt (the "
        "share of repeated prompt tokens in the Mooncake trace); the deadline is twice the mean service time "
        "on the fastest configuration",
        "instances.with_load, instances.SLO_FACTOR, instances.prefix_share",
    ),
    Assumption("A6", "What Table II counts", "Cost per arrival at c_w = 1, without the premium", "ambiguity"),
    Assumption(
        "A7",
        "Block 3 of Algorithm 1",
        "The routing and reservation problems are solved again for each z",
        "bcd.solve(block3='resolve')",
    ),
    Assumption(
        "A8",
        "Requests larger than a group",
        "The optimiser's memory constraint is on means and admits them; the replay rejects them",
        "replay",
    ),
    Assumption(
        "A9",
        "KV bytes per token",
        "2.6 MB (all 64 heads) in the paper's instance; grouped queries (0.33 MB) as the realistic preset",
        "cluster.Model.preset",
    ),
    Assumption(
        "A10",
        "P99 of BurstGPT",
        "1,505 from the published quantiles of the whole file; the paper prints 1,586",
        "digests",
    ),
    Assumption(
        "A11",
        "Constants of equation 1",
        "C_k = tau p c (a prompt uses all GPUs of its group), B_k = tau b (a token passes the stages in "
        "turn); c, b and t_ar are fitted to measured A100 and H100 kernels",
        "cluster.serving_config, data/calibration.json",
    ),
    Assumption(
        "A12",
        "Memory left for the KV cache",
        "90 % of 80e9 bytes per GPU less the weights (140 GB for 70B), no further overhead",
        "cluster.MEMORY_UTILISATION, cluster.kv_capacity(overhead_bytes=)",
    ),
    Assumption(
        "A13",
        "GPUs and draws behind Table III",
        "8 GPUs where the paper names none and all configurations have at most 8, 24 for the size with eight "
        "configurations, 48 where it says so; classes are drawn from the traces' lengths, scaled by 0.5 to 2",
        "instances.TABLE3_SIZES, instances.scalability",
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
