"""Robust KV-cache reservation for LLM serving under output-length uncertainty.

In reading order:

- `lengths`: the currency, a distribution of output lengths; `traces`: from raw files to lengths;
- `ambiguity`: how much to reserve for one class, in closed form;
- `hardware`, `models`, `kernels`, `groups`: what one serving group holds and how long its steps take;
- `queueing`, `problem`, `policy`: waits, the joint problem and what a policy costs;
- `solvers`: the best policy, with a proof;
- `replay`: what a policy is worth by the paper's model, `engine`: by how a paged engine decides;
- `rolling`: reservations that follow a drift;
- `requests`, `planner`: request classes and what to start for them, `vllm`: a scheduler for that engine;
- `files`: written whole or not at all.

The reproduction, `paper`, stands on these; none of them imports it.
"""

from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.hardware import GPU, Model, ParallelConfig, ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.planner import Plan, PlanError, plan
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
    "Plan",
    "PlanError",
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
    "plan",
    "read_trace",
    "reduce_trace",
    "solve",
]
