"""The plan as a program: which groups to start and what to send where, solved to a proven optimum.

Every limit of a serving group is linear in what is sent to it, once the time of an iteration is: with a
flow of lambda_i requests/s, g_i seconds of server time a request and the iteration tau = t0 / (1 - rho),
rho = sum lambda_i g_i, a quantity of which tau sum lambda_i q_i is held in z groups stays below its limit Q

    t0 sum lambda_i q_i / (z - sum lambda_i g_i) <= Q   if and only if   sum lambda_i (g_i + t0 q_i / Q) <= z.

So a row is a number of groups that one request/s takes, and all rows have the same right-hand side. With
whole numbers of groups and a budget of GPUs that is a small mixed-integer program, which HiGHS proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import highspy
import numpy as np
from numpy.typing import NDArray

from kvcache.engine import Demand, StepCost, capacity_rows
from kvcache.solvers.highs import new_highs

__all__ = [
    "OBJECTIVES",
    "PHASES",
    "ROWS",
    "Allocation",
    "Column",
    "Program",
    "Traffic",
    "first_token",
    "formulate",
    "may_serve",
    "solve",
]

Floats = NDArray[np.float64]
INF = highspy.kHighsInf

#: ``goodput``: the most requests on the given GPUs. ``cost``: the cheapest groups that serve all of them.
#: ``growth``: the largest factor by which the whole mix could grow.
OBJECTIVES = ("goodput", "cost", "growth")

#: A group serves a request from start to end, or only its prompt, or only its output.
PHASES = ("both", "prefill", "decode")

#: The limits of a group: time per output token, tokens in the pool, running requests, prompt tokens.
ROWS = ("tpot", "pool", "running", "batched")


@dataclass(frozen=True, eq=False)
class Traffic:
    """What arrives, over I request classes.

    Parameters
    ----------
    names : labels.
    rates : (I,) lambda_i > 0, requests/s.
    demands : I `kvcache.engine.Demand`: what a request asks of a group.
    prompts : (I,) tokens of the prompt whose first token must be in time.
    tpot, ttft : (I,) deadlines, s per output token and s to the first token.
    values : (I,) what serving one request is worth, > 0.
    """

    names: tuple[str, ...]
    rates: Floats
    demands: tuple[Demand, ...]
    prompts: Floats
    tpot: Floats
    ttft: Floats
    values: Floats

    def __post_init__(self) -> None:
        if len(self.demands) != len(self.names):
            raise ValueError(f"traffic: {len(self.demands)} demands; expected {len(self.names)} as names")
        for name in ("rates", "prompts", "tpot", "ttft", "values"):
            value = np.asarray(getattr(self, name), dtype=float)
            if value.shape != (len(self.names),):
                raise ValueError(f"traffic: {name} has shape {value.shape}; expected ({len(self.names)},)")
            bad = np.flatnonzero(~(np.isfinite(value) & (value > 0)))
            if bad.size:
                raise ValueError(
                    f"class {self.names[bad[0]]!r}: {name} is {value[bad[0]]}; expected > 0 and finite"
                )
            object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Column:
    """A kind of group that the plan may start: a configuration at one TPOT deadline, in one phase.

    Parameters
    ----------
    name, gpus, price : label; GPUs of one group; its price (money per hour, or its GPUs).
    step : time of an iteration; a ``decode`` group prefills nothing.
    pool : M, tokens of KV cache, without what is to stay free.
    max_running, max_batched : limits of the engine on requests and on prompt tokens in an iteration.
    tpot : the time per output token that this group keeps, s; classes with a shorter deadline stay away.
    phase : one of `PHASES`.
    transfer : s per prompt token to move the cache from a ``prefill`` group to a ``decode`` group.
    """

    name: str
    gpus: int
    price: float
    step: StepCost
    pool: float
    max_running: int
    max_batched: int
    tpot: float
    phase: str = "both"
    transfer: float = 0.0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ValueError(f"column {self.name!r}: phase is {self.phase!r}; expected one of {PHASES}")
        for name in ("gpus", "price", "pool", "max_running", "max_batched", "tpot"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"column {self.name!r}: {name} is {value}; expected > 0 and finite")


@dataclass(frozen=True, eq=False)
class Program:
    """The data of the mixed-integer program.

    Parameters
    ----------
    rates, values : (I,) requests/s and what one is worth.
    loads : (R, I, K) groups of kind k that one request/s of class i takes in row r; inf where class i
        may not be sent to k.
    gpus, prices : (K,) of one group.
    phases : K of `PHASES`.
    """

    rates: Floats
    values: Floats
    loads: Floats
    gpus: NDArray[np.int64]
    prices: Floats
    phases: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Allocation:
    """An optimal solution and its proof.

    Attributes
    ----------
    objective : ``goodput``: worth of the requests served per s. ``cost``: prices. ``growth``: the factor.
        None of them can be better than ``bound``, of the same unit.
    groups : (K,) whole numbers.
    flows : (I, K) requests/s. A class whose prompts go to ``prefill`` groups has its outputs in ``decode``.
    admitted : (I,) requests/s; never more than the rates, except for ``growth``.
    row_prices : (R, K) gain in the objective (for ``cost``: 0) per group's worth of more room in a row.
    gpu_price : gain in the objective per added GPU, from the linear relaxation (for ``cost``: its price).
    seconds : spent in the solver.
    """

    objective: float
    bound: float
    groups: NDArray[np.int64]
    flows: Floats
    admitted: Floats
    row_prices: Floats
    gpu_price: float
    seconds: float

    @property
    def gap(self) -> float:
        """Relative distance of the objective from what is proven."""
        return abs(self.objective - self.bound) / max(abs(self.objective), 1e-12)


def formulate(traffic: Traffic, columns: Sequence[Column], free: Floats | None = None) -> Program:
    """The program of these classes on these kinds of groups.

    ``free`` (K,) are tokens of each pool that are not planned for: headroom, cached prefixes and the room
    for fluctuations. A class stays away from a group that cannot keep its TPOT, whose pool is too small
    for its longest request, or that cannot prefill its prompt in time even alone.
    """
    room = np.array([c.pool for c in columns]) - (np.zeros(len(columns)) if free is None else free)
    loads = np.full((len(ROWS), len(traffic.names), len(columns)), np.inf)
    for k, column in enumerate(columns):
        allowed = may_serve(traffic, column) & (room[k] > 0)
        if allowed.any():
            loads[:, allowed, k] = _loads(traffic, column, room[k])[:, allowed]
    return Program(
        traffic.rates,
        traffic.values,
        loads,
        np.array([c.gpus for c in columns], dtype=np.int64),
        np.array([c.price for c in columns], dtype=float),
        tuple(c.phase for c in columns),
    )


def may_serve(traffic: Traffic, column: Column) -> NDArray[np.bool_]:
    """(I,) classes whose deadlines and longest request this kind of group can keep, were it alone there."""
    longest = np.array([d.longest for d in traffic.demands])
    fits = (longest if column.phase != "prefill" else traffic.prompts) <= column.pool
    if column.phase != "prefill":
        fits &= (column.tpot <= traffic.tpot * (1 + 1e-9)) & (column.step.t0 < column.tpot)
    if column.phase != "decode":
        fits &= first_token(column, traffic.prompts) <= traffic.ttft
    return fits


def first_token(column: Column, prompt: Floats) -> Floats:
    """(I,) s to the first token of a prompt in a group that does nothing else."""
    iterations = np.maximum(np.ceil(prompt / column.max_batched), 1)
    return iterations * column.step.t0 + prompt * (column.step.per_prefill_token + column.transfer)


def _loads(traffic: Traffic, column: Column, room: float) -> Floats:
    """(R, I) groups that one request/s takes, by row."""
    if column.phase == "prefill":
        # Its iterations hold prompts alone, full ones: each token has its share of t0. Waits stay within
        # what the deadline leaves after the prompt itself (M/D/1: rho S / (2 (1 - rho)) <= D - S).
        alone = first_token(column, traffic.prompts)
        left = np.maximum(traffic.ttft - alone, 0.0)
        token = column.step.per_prefill_token + column.step.t0 / column.max_batched
        busy = token * np.array([d.prompt for d in traffic.demands])
        with np.errstate(divide="ignore"):
            return np.tile(busy * (1 + alone / (2 * left)), (len(ROWS), 1))
    demands = traffic.demands
    if column.phase == "decode":
        demands = tuple(replace(d, prompt=0.0) for d in demands)
    rows = capacity_rows(demands, column.step, room, column.tpot, column.max_running, column.max_batched)
    return rows.flows / rows.groups[:, None]


def solve(
    program: Program,
    gpus: int,
    objective: str = "goodput",
    *,
    gap: float = 1e-6,
    time_limit: float = 60.0,
) -> Allocation | None:
    """The optimal groups and flows on at most so many GPUs, or None where ``cost`` cannot serve all.

    Among the flows that are optimal with the groups found, those are taken that leave the fullest group
    as much room as can be.

    Raises
    ------
    ValueError
        For an unknown objective.
    RuntimeError
        When the solver stops without a proof within ``time_limit`` s.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; expected one of {OBJECTIVES}")
    started = perf_counter()
    model = _Model(program, gpus, objective)
    found = model.run(mip_rel_gap=gap, mip_abs_gap=0.0, time_limit=time_limit)
    if found is None:
        return None
    groups, bound = np.round(found.z).astype(np.int64), found.bound
    fixed = model.run(groups=groups)
    value = fixed.value
    flows = model.run(groups=groups, keep=value).flows
    relaxed = model.run(relaxed=True)
    admitted = flows[:, [p != "decode" for p in program.phases]].sum(axis=1)
    return Allocation(
        objective=value,
        bound=bound,
        groups=groups,
        flows=flows,
        admitted=admitted,
        row_prices=fixed.row_prices,
        gpu_price=relaxed.gpu_price,
        seconds=perf_counter() - started,
    )


@dataclass(frozen=True, eq=False)
class _Found:
    value: float
    bound: float
    z: Floats
    flows: Floats
    row_prices: Floats
    gpu_price: float


class _Model:
    """The program as HiGHS wants it. Columns: a share of each class per allowed kind, z, growth, slack.

    Shares are of the class's rate, so that all numbers are near one. ``slack`` is the part of every
    group that stays free; it is 0 but where flows are chosen among equals.
    """

    def __init__(self, program: Program, gpus: int, objective: str) -> None:
        self.program, self.objective = program, objective
        self.i, self.k = np.nonzero(np.isfinite(program.loads).all(axis=0))
        flows, kinds = self.i.size, program.gpus.size
        classes, self.rows = program.rates.size, program.loads.shape[0]
        self.z, self.growth, self.slack = slice(flows, flows + kinds), flows + kinds, flows + kinds + 1
        starts, phases = np.array([p != "decode" for p in program.phases]), np.array(program.phases)
        gains = np.where(starts[self.k], (program.values * program.rates)[self.i], 0.0)

        columns = flows + kinds + 2
        lower, upper, cost = np.zeros(columns), np.ones(columns), np.zeros(columns)
        upper[self.z] = np.floor(gpus / program.gpus)
        upper[self.slack] = 0.0
        self.gains = np.concatenate([gains, np.zeros(kinds + 2)])
        if objective == "growth":
            upper[:flows], upper[self.growth], cost[self.growth] = INF, INF, -1.0
        elif objective == "goodput":
            upper[self.growth], cost = 0.0, -self.gains
        else:
            lower[self.growth] = 1.0
            cost[self.z] = program.prices
        self.cost = cost

        index: list[NDArray] = []
        value: list[NDArray] = []
        low: list[float] = []
        high: list[float] = []

        def row(at: NDArray, numbers: NDArray, least: float, most: float) -> None:
            index.append(at)
            value.append(numbers)
            low.append(least)
            high.append(most)

        # what is sent to the groups of kind k takes at most z_k of them, in every row
        for k in range(kinds):
            mine = np.flatnonzero(self.k == k)
            for r in range(self.rows):
                load = program.loads[r, self.i[mine], k] * program.rates[self.i[mine]]
                row(np.append(mine, flows + k), np.append(load, -1.0), -INF, 0.0)
        # no more than what arrives is admitted; for `cost` and `growth` the same share of every class
        for i in range(classes):
            mine = np.flatnonzero((self.i == i) & starts[self.k])
            if objective == "goodput":
                row(mine, np.ones(mine.size), -INF, 1.0)
            else:
                row(np.append(mine, self.growth), np.append(np.ones(mine.size), -1.0), 0.0, 0.0)
        # the outputs of the prompts that prefill groups take go to decode groups
        for i in range(classes):
            apart = np.flatnonzero((self.i == i) & (phases[self.k] != "both"))
            if apart.size:
                row(apart, np.where(phases[self.k[apart]] == "prefill", 1.0, -1.0), 0.0, 0.0)
        # the budget of GPUs
        self.budget = len(low)
        row(np.arange(flows, flows + kinds), program.gpus.astype(float), -INF, float(gpus))

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = columns, len(low)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
        lp.row_lower_, lp.row_upper_ = np.array(low), np.array(high)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum([at.size for at in index])])
        lp.a_matrix_.index_ = np.concatenate(index)
        lp.a_matrix_.value_ = np.concatenate(value)
        self.lp = lp

    def run(
        self,
        *,
        groups: NDArray[np.int64] | None = None,
        keep: float | None = None,
        relaxed: bool = False,
        **options: float,
    ) -> _Found | None:
        """Solve with whole groups, with given ones, or relaxed; ``keep`` an objective, balance flows."""
        highs = new_highs(**options)
        highs.passModel(self.lp)
        kinds = self.program.gpus.size
        at = np.arange(self.z.start, self.z.stop, dtype=np.int32)
        if groups is not None:
            highs.changeColsBounds(kinds, at, groups.astype(float), groups.astype(float))
        elif relaxed:  # the budget alone bounds them, so that its price is the whole price
            highs.changeColsBounds(kinds, at, np.zeros(kinds), np.full(kinds, INF))
        else:
            highs.changeColsIntegrality(kinds, at, np.full(kinds, highspy.HighsVarType.kInteger))
        if keep is not None:
            self._balance(highs, groups, keep)
        highs.run()
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(
                f"the plan's program: HiGHS stopped with {highs.modelStatusToString(status)!r}"
            )
        info, solution = highs.getInfo(), highs.getSolution()
        x = np.array(solution.col_value)
        flows = np.zeros((self.program.rates.size, kinds))
        flows[self.i, self.k] = np.maximum(x[: self.z.start], 0.0) * self.program.rates[self.i]
        sign = 1.0 if self.objective == "cost" else -1.0
        dual = np.array(solution.row_dual) if solution.dual_valid else np.full(self.lp.num_row_, np.nan)
        whole = groups is None and not relaxed
        return _Found(
            value=sign * info.objective_function_value,
            bound=sign * (info.mip_dual_bound if whole else info.objective_function_value),
            z=x[self.z],
            flows=flows,
            row_prices=-dual[: kinds * self.rows].reshape(kinds, self.rows).T,
            gpu_price=float(-dual[self.budget]),
        )

    def _balance(self, highs: highspy.Highs, groups: NDArray[np.int64], keep: float) -> None:
        """Instead of the objective, which must stay, maximise the share that every group keeps free."""
        kept = np.flatnonzero(self.cost)
        if self.objective != "cost" and kept.size:
            least = keep - 1e-9 * max(abs(keep), 1.0)
            highs.addRow(least, INF, kept.size, kept.astype(np.int32), -self.cost[kept])
        columns = np.arange(self.lp.num_col_, dtype=np.int32)
        highs.changeColsCost(columns.size, columns, np.where(columns == self.slack, -1.0, 0.0))
        highs.changeColBounds(self.slack, 0.0, 1.0)
        for k, z in enumerate(groups):
            for r in range(self.rows):
                highs.changeCoeff(k * self.rows + r, self.slack, float(z))
