"""A paged serving engine: what an iteration costs, how much memory to keep free, and a simulation of it."""

from kvcache.engine.steps import StepCost

__all__ = ["StepCost"]
