"""Below saturation: how many requests an engine holds, how often one waits for memory, and what users see.

The operating point is a mean. Around it the number n of requests in the system moves up by arrivals and down
by finishes, at a rate that depends on n alone: with N of them running an iteration takes t0 + gamma N
seconds, where gamma = g / E[xi] is what each adds to it, so they finish at rate N / (E[xi] (t0 + gamma N)).
While all run, N = n and this is the processor-sharing queue of `operating_point`; what does not fit in memory
waits.
Two things make n move more or less than such a birth-and-death chain, and are put in by hand:

- Memory holds a random number of requests. What n of them hold is taken as normal with mean n c and the
  variance of n independent requests seen at random iterations, so N is the mean of min(n, what fits).
- An arrival also stops the finishes while its prompt of L tokens is computed, a L seconds. With
  p = lambda a E[L] and D = lambda / (1 - p) finishes per second of decoding it counts as 1 + D a L arrivals,
  while the pull back to the mean is stronger by 1 / (1 - p): the variance is multiplied by

      F = (1 - p) (1 + E[(1 + D a L)^2]) / 2,

  and the chain's probabilities are raised to the power 1 / F (a diffusion of F times the variance).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from kvcache.engine.joint import JointLengths
from kvcache.engine.operating import Demand, saturation
from kvcache.engine.steps import StepCost

__all__ = ["Occupancy", "occupancy", "sample_latencies", "waiting_share"]

Floats = NDArray[np.float64]

MOST_STATES = 200_000


class Occupancy(NamedTuple):
    """How many requests are in the system."""

    probability: Floats  # (n + 1,) of 0, 1, ..., n requests, running or waiting
    running: Floats  # (n + 1,) how many of them run, on average
    short: Floats  # (n + 1,) probability that an arrival then finds too little memory for its prompt
    throughput: float  # requests/s that leave while some wait


def occupancy(
    lengths: JointLengths,
    rate: float,
    cost: StepCost,
    pool: float,
    max_running: float = np.inf,
    block: int = 16,
    throughput: float | None = None,
) -> Occupancy:
    """The stationary number of requests of a group with Poisson arrivals; see the module.

    Parameters
    ----------
    rate : requests/s.
    pool : M less the headroom, tokens.
    throughput : requests/s at saturation where it is known better than `saturation` tells, by a simulation
        with a queue that is never empty, say: rates then count in proportion to it.

    Raises
    ------
    ValueError
        If the rate is not positive or not below the throughput.
    """
    demand = Demand.of(lengths, block)
    formula = saturation(demand, cost, pool, max_running)
    most = formula.throughput if throughput is None else throughput
    if not 0 < rate < most:
        raise ValueError(f"rate: {rate} requests/s; expected within (0, {most}), the saturated throughput")
    load = rate / most
    context, variance = (
        demand.context,
        max(demand.held_squares / demand.output - (demand.context - block / 2) ** 2, 0.0),
    )
    fit = pool / context
    spread = np.sqrt(pool * variance / context**3)

    L = lengths.inputs.astype(float)
    prefill = cost.per_prefill_token * L
    share = min(rate * lengths.mean(prefill), 0.99)
    batch = 1 + rate / (1 - share) * prefill
    factor = (1 - share) * (1 + lengths.mean(batch**2)) / 2

    states = int(min(MOST_STATES, 4 * min(fit, max_running) + 50 + 40 * max(factor, 1) / (1 - load)))
    n = np.arange(states + 1)
    fits = 1 - ndtr((n + 0.5 - fit) / spread) if spread > 0 else (n < fit).astype(float)
    running = np.minimum(np.concatenate([[0.0], np.cumsum(fits[:-1] / fits[0])]), max_running)
    gamma = demand.seconds(cost) / demand.output
    busy = np.maximum(running[1:], 1e-9)
    log_p = np.cumsum(np.log(load * formula.throughput * demand.output * (cost.t0 + gamma * busy) / busy))
    log_p = np.concatenate([[0.0], log_p]) / factor
    probability = np.exp(log_p - log_p.max())
    inside = np.minimum(n, max_running)
    mean, var = lengths.mean_input, lengths.mean(L**2) - lengths.mean_input**2
    short = ndtr((inside * context + mean - pool) / np.sqrt(inside * variance + max(var, 0.0) + 1.0))
    return Occupancy(probability / probability.sum(), running, short, most)


def waiting_share(
    lengths: JointLengths,
    rate: float,
    cost: StepCost,
    pool: float,
    max_running: float = np.inf,
    block: int = 16,
    throughput: float | None = None,
) -> float:
    """The share of arrivals that find too little memory for their prompt; 1 from saturation on.

    While a queue waits for memory the pool is as full as at saturation, so preemptions per request below
    saturation are this share of those at saturation (`preemptions_per_request`). Parameters: `occupancy`.
    """
    most = throughput or saturation(Demand.of(lengths, block), cost, pool, max_running).throughput
    if rate >= most:
        return 1.0
    found = occupancy(lengths, rate, cost, pool, max_running, block, throughput)
    return float(found.probability @ found.short)


def sample_latencies(
    lengths: JointLengths,
    rate: float,
    cost: StepCost,
    pool: float,
    rng: np.random.Generator,
    n: int = 40_000,
    *,
    max_running: float = np.inf,
    max_batched_tokens: float = 2048,
    block: int = 16,
    throughput: float | None = None,
) -> tuple[Floats, Floats]:
    """Times to first token and times per output token of n requests, drawn around the operating point.

    A request that finds m in the system waits for those ahead of it that do not fit, (m + 1 - N) / X seconds;
    then for prompts ahead of it (M/G/1 with work a L: a geometric number of residual prompts), its own prompt
    and the iterations that they share with the running requests. While it decodes, iterations also carry the
    prompts that have arrived since it came, at most max_batched_tokens of them each.

    Returns
    -------
    ttft : (n,) seconds.
    tpot : seconds per token, of those of the n requests that have more than one token.
    """
    demand = Demand.of(lengths, block)
    state = occupancy(lengths, rate, cost, pool, max_running, block, throughput)
    a, context = cost.per_prefill_token, demand.context
    found = rng.choice(state.probability.size, size=n, p=state.probability)
    inputs, outputs = lengths.sample(rng, n)
    variance = max(demand.held_squares / demand.output - (context - block / 2) ** 2, 0.0)
    fit = rng.normal(pool / context, np.sqrt(pool * variance / context**3), n)
    running = np.minimum(np.minimum(found + 1.0, np.maximum(fit, 1.0)), max_running)
    decode = cost.seconds(running, running * context)
    queued = np.maximum(found + 1 - np.minimum(fit - inputs / context + 0.5, max_running), 0.0)

    # Prompts ahead: Pollaczek-Khinchin as a geometric sum of residual prompts.
    mean, squares = lengths.mean_input, lengths.mean(lengths.inputs.astype(float) ** 2)
    busy = min(rate * a * mean, 0.99)
    count = rng.geometric(1 - busy, n) - 1
    biased = rng.choice(
        lengths.inputs.size, size=count.sum(), p=lengths.probabilities * lengths.inputs / mean
    )
    residual = a * lengths.inputs[biased] * rng.random(biased.size)
    prompts = a * inputs + np.bincount(np.repeat(np.arange(n), count), weights=residual, minlength=n)
    chunk = a * max_batched_tokens
    chunks = np.ceil(prompts / chunk) if chunk > 0 else np.ones(n)
    ttft = queued / state.throughput + prompts + decode * (0.5 + chunks)

    steps = np.maximum(outputs - 1, 1)
    arrived = rng.poisson(rate * (steps * decode / (1 - busy) + prompts))
    work = np.where(
        arrived > 0, rng.gamma(np.maximum(arrived, 1) * mean**2 / squares, a * squares / mean), 0.0
    )
    tpot = decode + np.minimum(work, steps * chunk) / steps
    return ttft, tpot[outputs > 1]
