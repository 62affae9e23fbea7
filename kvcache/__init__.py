"""Robust KV-cache reservation for LLM serving under output-length uncertainty."""

from kvcache.ambiguity import Contamination, CVaR, ScaleShift, Wasserstein1, WassersteinInf
from kvcache.lengths import LengthDistribution

__all__ = [
    "CVaR",
    "Contamination",
    "LengthDistribution",
    "ScaleShift",
    "Wasserstein1",
    "WassersteinInf",
]
