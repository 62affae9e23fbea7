"""Where an engine settles: time per token, running requests and memory from the arrival rates.

All running requests of a group advance one token per iteration, so an iteration's length depends on how many
run, and how many run on its length. The fixed point is in closed form, and every requirement on it is
linear in the flows of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.engine.joint import JointLengths
from kvcache.engine.steps import StepCost

__all__ = [
    "CapacityRows",
    "Demand",
    "OperatingPoint",
    "Saturation",
    "capacity_rows",
    "operating_point",
    "saturation",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Demand:
    """What one request of a class asks of an engine, on average. Five numbers are all that plans need.

    Parameters
    ----------
    prompt : E[L] - h, prompt tokens to compute (h of them are found in the prefix cache).
    output : E[xi], iterations, > 0.
    held : E[xi (L + xi / 2)] + E[xi] b / 2, tokens held, summed over its iterations. The last block of b
        tokens is half empty on average.
    held_squares : E[L^2 xi + L xi^2 + xi^3 / 3], squares of tokens held, summed over its iterations.
    longest : the most tokens that a request of the class holds.
    """

    prompt: float
    output: float
    held: float
    held_squares: float
    longest: float

    @classmethod
    def of(cls, lengths: JointLengths, block: int = 16, cached: float = 0.0) -> Demand:
        """The demand of a class of requests, of whose prompts ``cached`` tokens are found in the cache.

        Raises
        ------
        ValueError
            If more tokens are cached than the mean prompt has, or no request has output.
        """
        if not 0 <= cached <= lengths.mean_input * (1 + 1e-9):  # a mean may be rounded
            raise ValueError(f"cached: {cached}; expected within [0, {lengths.mean_input}], the mean prompt")
        if lengths.mean_output == 0:
            raise ValueError(f"{lengths!r}: no request has output; expected E[xi] > 0")
        L, xi = lengths.inputs.astype(float), lengths.outputs.astype(float)
        held, squares = lengths.remember(
            "held", lambda: (lengths.mean(xi * (L + xi / 2)), lengths.mean(xi * (L**2 + L * xi + xi**2 / 3)))
        )
        return cls(
            max(lengths.mean_input - cached, 0.0),
            lengths.mean_output,
            held + lengths.mean_output * block / 2,
            squares,
            lengths.longest,
        )

    @property
    def context(self) -> float:
        """c = E[xi (L + xi / 2)] / E[xi] + b / 2, tokens held by a running request at a random iteration."""
        return self.held / self.output

    def seconds(self, cost: StepCost) -> float:
        """g = a (E[L] - h) + E[xi] (s_B + s_K c), seconds of server time that one request adds."""
        return (
            cost.per_prefill_token * self.prompt
            + cost.per_sequence * self.output
            + cost.per_cached_token * self.held
        )


class OperatingPoint(NamedTuple):
    """Where one group settles below saturation; arrays of the shape of the loads."""

    load: Floats | float  # rho_c, the share of time that is not t0: below 1, or nothing settles
    tpot: Floats | float  # tau, seconds per iteration and per output token
    running: Floats | float  # B, decoding requests
    cached: Floats | float  # K, tokens they hold
    deviation: Floats | float  # standard deviation of K, tokens
    prefill: Floats | float  # prompt tokens per iteration


def operating_point(demands: Sequence[Demand], rates: ArrayLike, cost: StepCost) -> OperatingPoint:
    """The operating point of one group that gets ``rates`` requests/s of each class.

    In tau seconds tau lambda_i requests arrive, and in a steady state each iteration does what one request of
    each of them needs in all: tau = t0 + tau sum_i lambda_i g_i. So with rho_c = sum_i lambda_i g_i < 1

        tau = t0 / (1 - rho_c),   B = tau sum_i lambda_i E[xi_i],   K = tau sum_i lambda_i E[xi_i] c_i,

    the last two by Little's law: a request stays xi iterations.

    Fluctuation, with Poisson arrivals. Were tau fixed, the running requests would be a Poisson process over
    ages and Var K = tau sum_i lambda_i E[L^2 xi + L xi^2 + xi^3 / 3]. But iterations are longer while more
    run, so that still more arrive. Take gamma = sum lambda_i g_i / sum lambda_i E[xi_i], seconds that each
    running request adds to an iteration: n of them finish at rate n / (E[xi] (t0 + gamma n)), as in processor
    sharing, whose stationary n does not depend on the law of xi (Kelly, Reversibility and Stochastic
    Networks, 1979, section 3.3). It is negative binomial, P(n) ~ rho_c^n (t0 / gamma + 1)_n / n!, with
    Var n = E n / (1 - rho_c). Given n, what the requests hold is independent, so

        Var K = tau sum_i lambda_i E[L^2 xi + L xi^2 + xi^3 / 3] + K^2 gamma / t0.

    Classes of unequal gamma, and prompts computed all at once, make the true one larger still.

    Parameters
    ----------
    rates : (..., n) requests/s of the n classes; leading axes are loads.

    Returns
    -------
    OperatingPoint, with infinite tau, B, K where rho_c >= 1.
    """
    rates = np.asarray(rates, dtype=float)
    if rates.shape[-1:] != (len(demands),) or not np.all(rates >= 0):
        raise ValueError(f"rates: {rates!r}; expected requests/s >= 0 of {len(demands)} classes")
    load = rates @ np.array([d.seconds(cost) for d in demands])
    stable = load < 1
    tau = np.where(stable, cost.t0 / np.where(stable, 1 - load, 1.0), np.inf)

    def per_iteration(what: str) -> Floats:
        flow = rates @ np.array([getattr(d, what) for d in demands])
        return np.where(stable, np.where(stable, tau, 0.0) * flow, np.inf)

    running, cached = per_iteration("output"), per_iteration("held")
    outputs = rates @ np.array([d.output for d in demands])
    gamma = np.divide(load, outputs, out=np.zeros(np.shape(load)), where=outputs > 0)
    variance = per_iteration("held_squares") + cached**2 * gamma / cost.t0
    values = (load, tau, running, cached, np.sqrt(variance), per_iteration("prompt"))
    return OperatingPoint(*(float(v) if np.ndim(v) == 0 else v for v in values))


class Saturation(NamedTuple):
    """A group whose queue is never empty; arrays of the shape of the pools."""

    throughput: Floats | float  # X, requests/s
    tpot: Floats | float  # tau, seconds per iteration
    running: Floats | float  # B, decoding requests


def saturation(
    demand: Demand,
    cost: StepCost,
    pool: ArrayLike,
    max_running: ArrayLike = np.inf,
    max_batched_tokens: ArrayLike = np.inf,
) -> Saturation:
    """Throughput of one group that always has a request waiting.

    Memory, the limit on running requests and the token budget of an iteration each bound how many decode:
    B = min(M / c, B_max, P_max / (1 + (E[L] - h) / E[xi])), as each decoding request brings 1 / E[xi] prompts
    an iteration. Then X = B / (E[xi] tau) with tau the step cost of B requests that hold B c tokens and of
    B (E[L] - h) / E[xi] prompt tokens.

    Parameters
    ----------
    pool : M less the headroom, tokens, or an array.
    max_running, max_batched_tokens : the engine's limits; they broadcast with the pool.
    """
    pool, max_running, max_batched_tokens = np.broadcast_arrays(pool, max_running, max_batched_tokens)
    prompts = demand.prompt / demand.output
    running = np.minimum(np.minimum(pool / demand.context, max_running), max_batched_tokens / (1 + prompts))
    tau = cost.seconds(running, running * demand.context, running * prompts)
    values = (running / (demand.output * tau), tau, running)
    return Saturation(*(float(v) if np.ndim(v) == 0 else v for v in values))


class CapacityRows(NamedTuple):
    """Linear requirements on z groups of one configuration: ``flows @ rates <= groups * z``, row by row.

    ``rates`` are the requests/s of the n classes that all z groups get together.
    """

    names: tuple[str, ...]
    flows: Floats  # (rows, n)
    groups: Floats  # (rows,)

    def most(self, rates: ArrayLike) -> tuple[float, str]:
        """How many times these rates one group carries, and the name of the row that binds."""
        use = self.flows @ np.asarray(rates, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(use > 0, self.groups / use, np.inf)
        at = int(np.argmin(times))
        return float(times[at]), self.names[at]


def capacity_rows(
    demands: Sequence[Demand],
    cost: StepCost,
    pool: float,
    tpot: float = np.inf,
    max_running: float = np.inf,
    max_batched_tokens: float = np.inf,
) -> CapacityRows:
    """The requirements on z groups of one configuration and on what they get, all linear.

    Each group gets rates / z. With tau = t0 / (1 - rho_c) and rho_c = sum_i rates_i g_i / z:

    ========================  =====================================================================
    tpot: tau <= d            sum_i rates_i g_i <= z (1 - t0 / d)
    memory: K <= M'           t0 sum_i rates_i E[xi_i] c_i + M' sum_i rates_i g_i <= z M'
    running: B <= B_max       t0 sum_i rates_i E[xi_i] + B_max sum_i rates_i g_i <= z B_max
    batch: P <= P_max         t0 sum_i rates_i (E[L_i] - h_i) + P_max sum_i rates_i g_i <= z P_max
    ========================  =====================================================================

    The last three are tau x flow <= bound, multiplied by 1 - rho_c. Rows of infinite bounds are left out,
    except that rho_c <= 1 (row tpot at d = infinity) always stays.

    Parameters
    ----------
    demands : of the n classes.
    pool : M' tokens of one group: its memory less headroom, cached prefixes and what is kept for fluctuation
        (beta standard deviations of K, from `operating_point` at the last solution).
    tpot : the deadline d per output token, seconds.
    max_running, max_batched_tokens : B_max and P_max of one group.

    Raises
    ------
    ValueError
        For a bound that is not positive, or a class whose longest request does not fit the pool.
    """
    bounds = {
        "pool": pool,
        "tpot": tpot,
        "max_running": max_running,
        "max_batched_tokens": max_batched_tokens,
    }
    for name, bound in bounds.items():
        if not bound > 0:
            raise ValueError(f"{name}: {bound}; expected > 0")
    g = np.array([d.seconds(cost) for d in demands])
    names, flows, groups = ["tpot"], [g], [1 - cost.t0 / tpot]
    rows = (
        ("memory", "held", pool),
        ("running", "output", max_running),
        ("batch", "prompt", max_batched_tokens),
    )
    for name, what, bound in rows:
        if np.isfinite(bound):
            names.append(name)
            # Divided by the bound: all rows in units of groups.
            flows.append(cost.t0 / bound * np.array([getattr(d, what) for d in demands]) + g)
            groups.append(1.0)
    return CapacityRows(tuple(names), np.array(flows), np.array(groups))
