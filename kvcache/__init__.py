"""Robust KV-cache reservation for LLM serving under output-length uncertainty."""

from kvcache import instances
from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.cluster import GPU, Model, ParallelConfig, ServingConfig
from kvcache.instance import Costs, Instance, RequestClass
from kvcache.lengths import LengthDistribution
from kvcache.policy import Policy, Solution, evaluate

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
    "ScaleShift",
    "ServingConfig",
    "Solution",
    "Wasserstein1",
    "WassersteinInf",
    "evaluate",
    "instances",
]
