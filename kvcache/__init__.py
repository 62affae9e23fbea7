"""Robust KV-cache reservation for LLM serving under output-length uncertainty."""

from kvcache.lengths import LengthDistribution

__all__ = ["LengthDistribution"]
