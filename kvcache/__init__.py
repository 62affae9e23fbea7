"""Robust KV-cache reservation for LLM serving under output-length uncertainty."""

from kvcache import instances
from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.cluster import GPU, Model, ParallelConfig, ServingConfig
from kvcache.digests import digest_windows, list_digests, load_digest, load_digests, load_prefix_stats
from kvcache.instance import Costs, Instance, RequestClass
from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy, Solution, evaluate
from kvcache.rolling import Rolling, adaptive
from kvcache.solver import solve
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
