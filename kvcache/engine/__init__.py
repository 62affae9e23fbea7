"""A paged serving engine: what an iteration costs, how much memory to keep free, and a simulation of it."""

from kvcache.engine.admission import Headroom, Watermark
from kvcache.engine.simulation import Simulation, simulate
from kvcache.engine.steps import StepCost

__all__ = ["Headroom", "Simulation", "StepCost", "Watermark", "simulate"]
