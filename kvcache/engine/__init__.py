"""A paged serving engine: what an iteration costs, how much memory to keep free, and a simulation of it."""

from kvcache.engine.admission import Bursts, Headroom, MaxRunning, Reserve, Watermark
from kvcache.engine.bursts import BurstRule
from kvcache.engine.fleet import simulate_groups
from kvcache.engine.headroom import headroom, lundberg_exponent, preemptions_per_request, watermark
from kvcache.engine.joint import JointLengths
from kvcache.engine.operating import Demand, capacity_rows, operating_point, saturation
from kvcache.engine.pool import PoolPolicy
from kvcache.engine.simulation import Simulation, simulate
from kvcache.engine.steps import StepCost, StepTable
from kvcache.engine.waiting import sample_latencies, waiting_share

__all__ = [
    "BurstRule",
    "Bursts",
    "Demand",
    "Headroom",
    "JointLengths",
    "MaxRunning",
    "PoolPolicy",
    "Reserve",
    "Simulation",
    "StepCost",
    "StepTable",
    "Watermark",
    "capacity_rows",
    "headroom",
    "lundberg_exponent",
    "operating_point",
    "preemptions_per_request",
    "sample_latencies",
    "saturation",
    "simulate",
    "simulate_groups",
    "waiting_share",
    "watermark",
]
