"""Robust KV-cache reservation for LLM serving under output-length uncertainty.

In reading order:

- `lengths`: the currency, a distribution of output lengths; `traces`: from raw files to lengths;
- `ambiguity`: how much to reserve for one class, in closed form;
- `hardware`, `queueing`, `problem`, `policy`: groups of GPUs, waits, the joint problem and
  what a policy costs;
- `solvers`: the best policy, with a proof;
- `replay`: what a policy is worth on drawn requests; `rolling`: reservations that follow a drift;
- `models`, `kernels`, `groups`: any model, measured step times, and the pool of a serving group;
- `deployment`: what to start.

`files` writes files whole or not at all. `kvcache.paper` is the reproduction, which none of these imports.
"""

from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.hardware import GPU, Model, ParallelConfig, ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy, Solution, evaluate
from kvcache.problem import Costs, Problem, RequestClass
from kvcache.rolling import Rolling, adaptive
from kvcache.solvers import solve
from kvcache.traces import Trace, TraceError, read_trace, reduce_trace

__all__ = [
    "GPU",
    "CVaR",
    "Contamination",
    "Costs",
    "LengthDistribution",
    "Model",
    "ParallelConfig",
    "Policy",
    "Problem",
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
    "evaluate",
    "read_trace",
    "reduce_trace",
    "solve",
]
