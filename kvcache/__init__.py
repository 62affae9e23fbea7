"""Robust KV-cache reservation for LLM serving under output-length uncertainty.

In reading order:

- the model: `lengths`, `ambiguity`, `cluster`, `queueing`, `instance`, `instances`, `policy`;
- `solvers`: `solve` by branch and bound, by Algorithm 1 or by a general MIP solver;
- policies at work: `baselines`, `engines`, `replay`, `rolling`, `deployment`;
- `traces` and `digests`: from raw files to counts per length;
- `paper`, `assumptions`: what the paper says, and what is chosen where it is silent;
- `studies`: the tables of the notebooks; `plots`: their figures; `claims`: the verdicts;
- `artifact`: from notebooks to a reproduction; `files`, `results`: where things are kept.

The first four parts are all that an operator needs; the rest makes the reproduction.
"""

from kvcache import instances
from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.cluster import GPU, Model, ParallelConfig, ServingConfig
from kvcache.digests import digest_windows, list_digests, load_digest, load_digests, load_prefix_stats
from kvcache.instance import Costs, Instance, RequestClass
from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy, Solution, evaluate
from kvcache.rolling import Rolling, adaptive
from kvcache.solvers import solve
from kvcache.traces import Trace, TraceError, read_trace, reduce_trace

__all__ = [
    "GPU",
    "CVaR",
    "Contamination",
    "Costs",
    "Instance",
    "LengthDistribution",
    "Model",
    "ParallelConfig",
    "Policy",
    "RequestClass",
    "Rolling",
    "ScaleShift",
    "ServingConfig",
    "Solution",
    "Trace",
    "TraceError",
    "Wasserstein1",
    "WassersteinInf",
    "adaptive",
    "digest_windows",
    "evaluate",
    "instances",
    "list_digests",
    "load_digest",
    "load_digests",
    "load_prefix_stats",
    "read_trace",
    "reduce_trace",
    "solve",
]
