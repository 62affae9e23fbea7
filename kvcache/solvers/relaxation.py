"""The convex relaxation of the joint problem on a box: one linear program, kept warm, with shared cuts.

A *box* restricts the groups z_k, the utilisations v_k, the output reservations eta_i, the routing
shares pi_ik and the prefix decisions delta_ik. On it the products of the joint problem are replaced by
new columns and by inequalities that every policy in the box satisfies, so the optimum of the linear
program is a lower bound on the cost of every such policy:

======================  ==========================================================================
column                  stands for, and what holds it
======================  ==========================================================================
``h = pi eta``          el pi <= h <= eu pi. The cost pi WC(eta) is the perspective of a convex
                        function, jointly convex in (pi, h): every tangent WC(e) >= a + b e of WC gives
                        the cut pi WC(h / pi) >= a pi + b h. Exact once enough tangents are known.
``V = z v``             the load of a configuration in group capacities, linear in pi, h, y and t;
                        McCormick's four inequalities tie V, z and v. Exact once z is fixed.
``W``                   v / (1 - v), convex: tangents below, the chord of the box above.
``q = pi W``            McCormick. Exact where pi is at a bound or W is fixed.
``y = delta pi``,       y <= pi, y <= pu delta, t >= zl delta, t >= z - zu (1 - delta). Only small t
``t = delta z``         and large y help, so delta = y / pu is optimal and is eliminated.
======================  ==========================================================================

Multiplying the definition of the load by W ties the products together without any branching. Its right
side is z v W(v), the perspective of the convex v^2 / (1 - v), with tangents in (V, z). On its left are
pi W = q and products with one factor to bound from above: h W <= eu q or <= Wu h; -y W <= -q + Wu (pi - y)
and t W <= Wu t; or, for both at once, t W <= (1 + kappa) u y W and y <= pi, which leaves kappa L q. Each
choice is a family of cuts (``_families``), the better one depending on where the optimum lies.

Two restrictions lose no optimum. Reserving more than the smallest minimiser of WC_i costs more and holds
more. A prefix cached where (1 + kappa) u pi < z (fewer than one request per group, headroom
included) holds more memory than it saves, and leaving it out where u pi > z does too; so delta = 1 is only
considered with pi >= z / ((1 + kappa) u), and delta = 0 only with pi <= z / u.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.problem import Problem
from kvcache.solvers.highs import new_highs

__all__ = ["Box", "Cut", "Data", "Point", "Program", "Relaxation", "Tangents", "packed", "unpacked", "wait"]

Floats = NDArray[np.float64]
#: (class, configuration) -> tangents of WC found there, as (eta, value, slope).
Tangents = dict[tuple[int, int], list[tuple[float, float, float]]]
#: Cuts added together: their kind, where (pairs, configurations, or families and configurations), and at
#: which share of the range of eta, or at which v.
Cut = tuple[str, NDArray[np.int64], Floats]
INF = highspy.kHighsInf

# Utilisation beyond which the tangents of the wait become too steep for floating point: the bound stays
# valid there, only weaker.
STEEPEST = 0.995
# Least number of points at which the worst case of the longest reservation is tabulated.
SHORTEST = 2000
_STATUS = [highspy.HighsBasisStatus(b) for b in range(5)]
# Reduced costs and dual values are trusted up to this share of the scaled objective (about 1e4).
MARGIN = 1e-7
# Costs of rejecting everything, in `Data.unit`, beyond which they drown that unit in floating point.
LARGEST = 1e4


def packed(basis: highspy.HighsBasis) -> tuple[bytes, bytes]:
    """A basis as one byte per column and per row."""
    return bytes(map(int, basis.col_status)), bytes(map(int, basis.row_status))


def unpacked(columns: bytes, rows: bytes) -> highspy.HighsBasis:
    """The basis that `packed` made bytes of."""
    basis = highspy.HighsBasis()
    basis.col_status = [_STATUS[b] for b in columns]
    basis.row_status = [_STATUS[b] for b in rows]
    basis.valid = True
    return basis


def _numbers(what: str, values: ArrayLike) -> Floats:
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: {values!r}; expected an array of numbers") from error


def wait(v: Floats) -> Floats:
    """v / (1 - v): the wait in units of phi_k, infinite from v = 1 on."""
    v = np.asarray(v, dtype=float)
    return np.where(v < 1, v / np.where(v < 1, 1 - v, 1.0), np.inf)


@dataclass(frozen=True)
class Data:
    """A problem as the arrays that the relaxation and the local search use.

    ``low`` and ``high`` (I,) bound eta. They are equal where the reservations are prescribed. ``groups`` (K,)
    is z where that is. ``unit`` is the cost that programs have to resolve, that of rejecting everything
    unless given.
    """

    problem: Problem
    low: Floats
    high: Floats
    groups: Floats | None = None
    unit: float | None = None

    @classmethod
    def of(
        cls, problem: Problem, reservations: ArrayLike | None = None, groups: ArrayLike | None = None
    ) -> Data:
        """``reservations`` (I,): r_i = L_in + eta_i in tokens, ``groups`` (K,): z; None to optimise them."""
        if groups is not None:
            groups = _numbers("groups", groups)
            if groups.shape != problem.group_gpus.shape or not np.all((groups >= 0) & (groups % 1 == 0)):
                raise ValueError(f"groups: {groups.tolist()}; expected a whole number per configuration")
            if groups @ problem.group_gpus > problem.gpus:
                raise ValueError(
                    f"groups: {groups.tolist()} use {groups @ problem.group_gpus:g} GPUs; expected at most "
                    f"{problem.gpus}"
                )
        if reservations is None:
            none = np.zeros(len(problem.classes))
            return cls(problem, none, problem.unconstrained_reservations(), groups)
        reserved = _numbers("reservations", reservations)
        fits = reserved.shape == problem.input_tokens.shape
        eta = reserved - problem.input_tokens if fits else np.nan
        slack = 1e-9 * problem.max_output_tokens
        if not np.all((eta >= -slack) & (eta <= problem.max_output_tokens + slack)):
            raise ValueError(
                f"reservations: {reservations}; expected one per class within [L_in, L_in + L_max] tokens"
            )
        eta = np.clip(eta, 0.0, problem.max_output_tokens)
        return cls(problem, eta, eta, groups)

    @cached_property
    def per_token(self) -> Floats:
        """(I, K) u_ik / M_k: share of a group held per token of class i reserved, if all of i went to k."""
        return self.problem.offered_loads / self.problem.kv_tokens

    @cached_property
    def cheapest(self) -> Floats:
        """(I,) the least worst-case cost of a request within the bounds on eta."""
        return np.array([self.cut(i, e)[0] for i, e in enumerate(self.high)])

    @cached_property
    def scale(self) -> float:
        """Cost of one in the objective of a linear program, which makes it about 1e4 at most."""
        rates, costs = self.problem.arrival_rates, self.problem.costs
        whole = float(rates @ (self.cheapest + costs.rejection))
        return max(whole if self.unit is None else self.unit, 1e-9) / 1e4

    @cached_property
    def margin(self) -> float:
        """What the optimum of a linear program may be off by in floating point, in cost units."""
        return self.scale * MARGIN * 1e4

    @cached_property
    def rejection(self) -> float:
        """c_rej, or as much of it as a linear program has room for: a bound with less is a bound."""
        largest = LARGEST * 1e4 * self.scale / self.problem.arrival_rates.sum()
        return min(self.problem.costs.rejection, float(largest))

    def cut(self, i: int, eta: float | Floats) -> tuple[float, float] | tuple[Floats, Floats]:
        """Value and slope of WC_i at eta, a number or an array."""
        costs = self.problem.costs
        return self.problem.ambiguity.cut(self.problem.classes[i].output, eta, costs.preemption, costs.waste)

    @cached_property
    def _per_token(self) -> int:
        """Points of `_table` per token: one, more where reservations are short."""
        return max(1, int(SHORTEST // max(self.high.max(), 1.0)))

    @cached_property
    def _table(self) -> tuple[Floats, Floats, Floats]:
        """(I, n) each: points from 0 in equal steps, the last the bound on eta; value and slope of WC_i."""
        length = int(np.ceil(self.high.max() * self._per_token)) + 2
        etas = np.minimum(np.arange(length) / self._per_token, self.high[:, None])
        rows = [self.cut(i, np.unique(row)) for i, row in enumerate(etas)]
        values, slopes = (
            np.array([np.pad(row[n], (0, length - row[n].size), mode="edge") for row in rows]) for n in (0, 1)
        )
        return etas, values, slopes

    def tangents(self, i: NDArray[np.int64], eta: Floats) -> tuple[Floats, Floats, Floats]:
        """Tangents of WC_i next to eta: where they touch (a point of the table), their value and slope."""
        last = np.ceil(self.high[i] * self._per_token)
        at = np.where(eta >= self.high[i], last, np.rint(eta * self._per_token)).astype(np.int64)
        return tuple(part[i, at] for part in self._table)

    def worst_cases(self, i: NDArray[np.int64], eta: Floats) -> Floats:
        """WC_i(eta), interpolated in the table: never too low, exact but for kinks between its points."""
        etas, values, _ = self._table
        below = np.minimum((eta * self._per_token).astype(np.int64), values.shape[1] - 2)
        step = etas[i, below + 1] - etas[i, below]
        part = np.where(step > 0, (eta - etas[i, below]) / np.where(step > 0, step, 1.0), 0.0)
        return (1 - part) * values[i, below] + part * values[i, below + 1]

    @cached_property
    def prefix_useful(self) -> NDArray[np.bool_]:
        """(I, K) whether caching the prefix of i on some group of k can pay at all."""
        u, L = self.problem.offered_loads, self.problem.prefix_tokens
        headroom = 1 + self.problem.headroom
        return (L > 0)[:, None] & (headroom * u > 1) & (L[:, None] < self.problem.kv_tokens)

    @cached_property
    def better(self) -> NDArray[np.bool_]:
        """(K, K) entry [k, j]: a group of k does all that a group of j does, no worse and on no more GPUs.

        Groups of j without any of k can then be exchanged one for one, so j needs k beside it. Of two
        equal configurations only the later needs the earlier. Nothing can be exchanged where z is given.
        """
        problem = self.problem
        if self.groups is not None:
            return np.zeros(2 * self.groups.shape, dtype=bool)
        T, M = problem.service_times, problem.kv_tokens
        phi, n = problem.queueing_factors, problem.group_gpus
        count = n.size
        as_good = np.array(
            [
                [
                    np.all(T[:, k] <= T[:, j]) and M[k] >= M[j] and phi[k] <= phi[j] and n[k] <= n[j]
                    for j in range(count)
                ]
                for k in range(count)
            ]
        )
        later = np.triu(np.ones((count, count), dtype=bool), 1)
        return as_good & (later | ~as_good.T)

    @cached_property
    def servable(self) -> NDArray[np.bool_]:
        """(I, K) False where no group of k can hold what its smallest share of class i needs."""
        most = self.problem.max_groups if self.groups is None else self.groups
        return np.broadcast_to(most > 0, self.problem.offered_loads.shape)


def fullest(data: Data) -> Floats:
    """(K,) the highest v_k that some optimum needs.

    Memory: let R be the requests' share of a group and P the prefixes'. (1 + kappa) R + P <= 1, so
    v = R + P <= (1 + kappa P) / (1 + kappa), and P is at most what all prefixes take. A prefix is cached
    for at least 1 / (1 + kappa) requests, so also P <= (1 + kappa) R max_i L / (L_in + eta - L).

    Waiting: rejecting all that k serves costs c_rej sum_i lambda_i pi_ik more at most, and saves tardiness
    of at least c_slo sum_i lambda_i (pi_ik W_k - D_i). An optimum therefore has
    W_k <= c_rej / c_slo + sum_i lambda_i D_i / sum_i lambda_i pi_ik, where the last sum is at least
    v_k / max_i T_ik (L_in + eta + kappa L) / M_k, since that is what loads a group to v_k.
    """
    problem, headroom = data.problem, 1 + data.problem.headroom
    prefix = problem.prefix_tokens
    own = problem.input_tokens + data.low - prefix
    with np.errstate(divide="ignore"):
        ratio = np.where(prefix > 0, prefix / own, 0.0)
    most = headroom * np.where(data.prefix_useful, ratio[:, None], 0.0).max(axis=0)
    finite = np.isfinite(most)
    by_memory = np.where(finite, (1 + most) / (headroom + np.where(finite, most, 0.0)), 1.0)
    together = np.minimum((prefix[:, None] * data.prefix_useful).sum(axis=0) / problem.kv_tokens, 1.0)
    by_memory = np.minimum(by_memory, (1 + problem.headroom * together) / headroom)
    costs = problem.costs
    if costs.slo == 0:
        return by_memory
    held = problem.input_tokens + data.high + problem.headroom * prefix
    heaviest = (problem.service_times * held[:, None]).max(axis=0) / problem.kv_tokens
    # Where v >= 1/2; below, the claim v <= max(1/2, ...) needs no proof.
    longest = costs.rejection / costs.slo + 2 * heaviest * (problem.arrival_rates @ problem.latency_slos)
    return np.minimum(by_memory, np.maximum(0.5, longest / (problem.queueing_factors + longest)))


@dataclass(frozen=True)
class Box:
    """Bounds on z (K,), v (K,), eta (I,), pi (I, K), delta (I, K) and on the GPUs in use; see the module."""

    zl: Floats
    zu: Floats
    vl: Floats
    vu: Floats
    el: Floats
    eu: Floats
    pl: Floats
    pu: Floats
    dl: NDArray[np.bool_]
    du: NDArray[np.bool_]
    gl: float
    gu: float

    @classmethod
    def root(cls, data: Data) -> Box:
        """The whole feasible region, but for policies that another one dominates."""
        problem = data.problem
        classes, configs = problem.offered_loads.shape
        useful, z = data.prefix_useful, data.groups
        return cls(
            zl=np.zeros(configs) if z is None else z,
            zu=problem.max_groups.astype(float) if z is None else z,
            vl=np.zeros(configs),
            vu=fullest(data),
            el=data.low,
            eu=data.high,
            pl=np.zeros((classes, configs)),
            pu=data.servable.astype(float),
            dl=np.zeros((classes, configs), dtype=bool),
            du=useful & data.servable,
            gl=0.0,
            gu=float(problem.gpus),
        )

    @classmethod
    def everything(cls, classes: int, configs: int) -> Box:
        """All policies, of whatever problem of this shape."""
        k, i, ik = np.ones(configs), np.ones(classes), np.ones((classes, configs))
        yes = ik.astype(bool)
        return cls(0 * k, INF * k, 0 * k, k, 0 * i, INF * i, 0 * ik, ik, ~yes, yes, 0.0, INF)

    def meet(self, other: Box) -> Box:
        """What lies in both boxes."""
        ends = {
            name: (np.maximum if name[1] == "l" else np.minimum)(getattr(self, name), getattr(other, name))
            for name in ("zl", "zu", "vl", "vu", "el", "eu", "pl", "pu", "gl", "gu")
        }
        return Box(**ends, dl=self.dl | other.dl, du=self.du & other.du)

    def narrowed(self, before: Box, after: Box) -> Box:
        """This box with every bound replaced that ``after`` has other than ``before``."""
        changes = {}
        for name in self.__dataclass_fields__:
            old, new, own = (getattr(box, name) for box in (before, after, self))
            if old is not new:
                changes[name] = np.where(new != old, new, own)[()]
        return replace(self, **changes)

    @cached_property
    def fixed(self) -> bool:
        """Whether all numbers of groups are decided."""
        return bool(np.all(self.zl == self.zu))

    def with_(self, name: str, at: int | tuple[int, int], value: float) -> Box:
        """The box with one entry of one bound replaced."""
        array = getattr(self, name).copy()
        array[at] = value
        return replace(self, **{name: array})

    def tightened(self, data: Data) -> Box | None:
        """The box after propagation of the budget and of the prefix rules; None when nothing is left."""
        problem = data.problem
        n, u, headroom = problem.group_gpus, problem.offered_loads, 1 + problem.headroom
        spare = self.gu - n @ self.zl
        if spare < 0:
            return None
        zu = np.minimum(self.zu, self.zl + np.floor(spare / n))
        zl = np.maximum(self.zl, np.ceil(zu - (n @ zu - self.gl) / n - 1e-9))
        pu = np.minimum(self.pu, zu)
        du = self.du & (headroom * u * pu >= np.maximum(self.zl, 1) * (1 - 1e-9))
        dl = self.dl | (data.prefix_useful & (self.pl * u > zu * (1 + 1e-9)))
        pl = np.maximum(self.pl, np.where(dl, np.maximum(self.zl, 1) / (headroom * u), 0.0))
        pu = np.where(du | ~data.prefix_useful, pu, np.minimum(pu, zu / u))
        zl = np.maximum(zl, dl.any(axis=0))
        # j needs every k that does as well.
        zu = np.where((data.better & (zu == 0)[:, None]).any(axis=0), 0.0, zu)
        zl = np.maximum(zl, (data.better & (zl > 0)[None, :]).any(axis=1))
        # A class whose share on one configuration is large leaves little for the others.
        pu = np.minimum(pu, 1 - (pl.sum(axis=1, keepdims=True) - pl))
        if (
            np.any(zl > zu)
            or np.any(self.vl > self.vu)
            or np.any(self.el > self.eu)
            or np.any(pl > pu + 1e-12)
            or np.any(dl & ~du)
        ):
            return None
        return replace(self, zl=zl, zu=zu, pl=np.minimum(pl, pu), pu=pu, dl=dl, du=du)


@dataclass(frozen=True)
class Point:
    """An optimum of the relaxation: its bound, its columns by name, and the duals that branching uses.

    ``bound`` is the cost below which no policy of the box lies (inf when the box is empty or beyond the
    cutoff). ``memory``, ``load`` (K,) and ``tardy`` (I,) are prices >= 0 of the rows of that name,
    ``reduced_pi`` (I, K) and ``reduced_z`` (K,) reduced costs, all in cost units.
    """

    bound: float
    z: Floats
    v: Floats
    load: Floats
    wait: Floats
    late: Floats
    pi: Floats
    h: Floats
    q: Floats
    y: Floats
    t: Floats
    memory_price: Floats
    load_price: Floats
    tardy_price: Floats
    reduced_pi: Floats
    reduced_z: Floats


class Program:
    """What the relaxations share: a linear program in the solver, its rounds of cuts, and its basis."""

    data: Data
    highs: highspy.Highs
    scale: float
    offset: float
    cuts: list[Cut]
    _rows: int
    _columns: int

    def _pass(
        self, cost: Floats, low: Floats, high: Floats, row: NDArray, column: NDArray, value: Floats, **options
    ) -> None:
        """Give the solver the program with these entries; rows after those given now are cuts."""
        order = np.lexsort((column, row))
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self._columns, self._rows
        lp.col_cost_ = cost
        lp.col_lower_, lp.col_upper_ = np.zeros(self._columns), np.full(self._columns, INF)
        lp.row_lower_, lp.row_upper_ = low, high
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = self._columns, self._rows
        lp.a_matrix_.start_ = np.searchsorted(row[order], np.arange(self._rows + 1)).astype(np.int32)
        lp.a_matrix_.index_ = column[order].astype(np.int32)
        lp.a_matrix_.value_ = value[order]
        settings = {
            "parallel": "off",
            "presolve": "off",
            "solver": "simplex",
            "random_seed": 0,
            # The programs are scaled by construction; these settings halve the time of a warm solve.
            "simplex_scale_strategy": 0,
            "simplex_dual_edge_weight_strategy": 1,
            "simplex_iteration_limit": 100_000,
        }
        self.highs = new_highs(**(settings | options))
        self.highs.passModel(lp)
        self._fixed_rows = self._rows

    def _point(self) -> Point:
        raise NotImplementedError

    def _separate(self, point: Point, tolerance: float) -> bool:
        raise NotImplementedError

    def _bound(self) -> float:
        """What the last optimum proves, in cost units."""
        objective = self.highs.getInfo().objective_function_value
        return max(self.offset + self.scale * (objective - MARGIN * 1e4), 0.0)

    def solve(self, cutoff: float = np.inf, *, rounds: int = 20, precision: float = 1e-6) -> Point | None:
        """The bound on the loaded box, after rounds of cuts; None when it is empty or above ``cutoff``.

        ``trusted`` is False afterwards where None means that the solver gave up, which proves nothing.

        Cuts are added while what they cut off exceeds ``precision`` of the cost, and while a round brings
        the bound nearer to the cutoff by a twentieth of what is left.
        """
        limit = INF if not np.isfinite(cutoff) else (cutoff - self.offset) / self.scale + MARGIN * 1e4
        self.highs.setOptionValue("objective_bound", limit)
        point, self.trusted = None, True
        before = -np.inf
        for last in range(rounds - 1, -1, -1):
            self.highs.run()
            status = self.highs.getModelStatus()
            if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kObjectiveBound):
                return None
            if status != highspy.HighsModelStatus.kOptimal:
                # Numerical trouble: start over without the basis.
                self.highs.clearSolver()
                self.highs.run()
                status = self.highs.getModelStatus()
                if status == highspy.HighsModelStatus.kInfeasible:
                    return None
                if status != highspy.HighsModelStatus.kOptimal:
                    self.trusted = point is not None
                    return point
            point = self._point()
            if point.bound >= cutoff:
                return None
            if np.isfinite(cutoff) and point.bound - before < 0.05 * (cutoff - point.bound):
                break
            before = point.bound
            if last == 0 or not self._separate(point, precision * max(abs(point.bound), self.scale)):
                break
        return point

    def basis(self) -> highspy.HighsBasis:
        """The basis of the last solve, to return to the same region later."""
        return self.highs.getBasis()

    def takes(self, columns: int, rows: int) -> bool:
        """Whether a basis of so many columns and rows can be one of this program."""
        return columns == self._columns and rows <= self._rows

    def set_basis(self, basis: highspy.HighsBasis) -> None:
        """Start the next solve from ``basis``; cuts added since then enter as basic."""
        missing = self._rows - len(basis.row_status)
        if missing:
            basis.row_status = [*basis.row_status, *[highspy.HighsBasisStatus.kBasic] * missing]
        self.highs.setBasis(basis)

    def binding(self, rows: list[bytes]) -> tuple[tuple[Cut, ...], list[bytes]]:
        """The cuts that are not basic in some of these bases, and the bases (of rows) without the others."""
        basic, fixed = int(highspy.HighsBasisStatus.kBasic), self._fixed_rows
        status = np.full((len(rows), self._rows), basic, dtype=np.uint8)
        for own, row in zip(status, rows, strict=True):
            own[: len(row)] = np.frombuffer(row, dtype=np.uint8)
        keep = (status != basic).any(axis=0)
        keep[:fixed] = True
        cuts, at = [], fixed
        for kind, where, points in self.cuts:
            mine = keep[at : at + points.size]
            at += points.size
            if mine.any():
                cuts.append((kind, where[..., mine], points[mine]))
        return tuple(cuts), [own[keep].tobytes() for own in status]


class Relaxation(Program):
    """The linear program over one set of (class, configuration) pairs; boxes are loaded into it in turn.

    Parameters
    ----------
    data : Data
    box : Box
        Pairs whose ``pu`` is 0 here are left out for good.
    pool : Tangents
        Tangents of WC known so far. Those found here are added to it.
    cuts : what `cuts` was of a relaxation of the same pairs, perhaps of another problem. The same
        inequalities are then added, at the same places and in the same order, from this problem's data;
        the pool is left aside.
    """

    def __init__(self, data: Data, box: Box, pool: Tangents, cuts: Sequence[Cut] | None = None) -> None:
        self.data = data
        problem, costs = data.problem, data.problem.costs
        self.shape = classes, configs = box.pu.shape
        self.configs = tuple(np.flatnonzero((box.pu > 0).any(axis=0)).tolist())
        self.pair_class, self.pair_config = i, k = np.nonzero(box.pu > 0)
        pairs = i.size
        free = data.high > data.low
        queues = self.queueing(data, box)
        prefix = box.du[i, k]

        # Columns, scaled so that all but a few lie within [0, 1] and the objective is about 1e4.
        rates = problem.arrival_rates
        self.scale = data.scale
        self.offset = data.rejection * float(rates.sum())
        self.eta_unit = np.maximum(data.high, 1.0)
        self._columns = 0

        def block(count: int) -> NDArray[np.int64]:
            self._columns += count
            return np.arange(self._columns - count, self._columns)

        def some(where: NDArray[np.bool_]) -> NDArray[np.int64]:
            index = np.full(where.size, -1)
            index[where] = block(int(where.sum()))
            return index

        self.z, self.v, self.load, self.wait = (block(configs) for _ in range(4))
        self.late = block(classes)
        self.pi = block(pairs)
        self.h, self.w = some(free[i]), some(free[i])
        self.q = some(queues[k])
        self.y, self.t = some(prefix), some(prefix)
        has_h, has_q, has_y = self.h >= 0, self.q >= 0, self.y >= 0
        self.has_h, self.has_q, self.has_y = has_h, has_q, has_y
        self._blocks = (self.q, self.pi, self.h, self.y, self.t)

        cost = np.zeros(self._columns)
        cost[self.z] = costs.gpu * problem.group_gpus
        cost[self.late] = costs.slo * rates * problem.latency_slos
        cost[self.pi] = rates[i] * (data.cheapest[i] - data.rejection)
        cost[self.w[has_h]] = self.scale

        # Rows: lists of (row, column, value); the entries that depend on the box come with a function.
        self._entries: list[tuple[NDArray, NDArray, NDArray]] = []
        self._boxed: list[tuple[NDArray, NDArray, str]] = []
        self._row_lower: list[Floats] = []
        self._row_upper: list[Floats] = []
        self._rows = 0

        def rows(count: int, low: float | Floats = -INF, high: float | Floats = INF) -> NDArray[np.int64]:
            self._row_lower.append(np.broadcast_to(np.asarray(low, float), (count,)))
            self._row_upper.append(np.broadcast_to(np.asarray(high, float), (count,)))
            self._rows += count
            return np.arange(self._rows - count, self._rows)

        def put(row: NDArray, column: NDArray, value: float | Floats) -> None:
            row, column = np.broadcast_arrays(row, column)
            self._entries.append((row, column, np.broadcast_to(np.asarray(value, float), row.shape)))

        def boxed(row: NDArray, column: NDArray, name: str) -> None:
            self._boxed.append((row, column, name))

        a = data.per_token[i, k]
        headroom = 1 + problem.headroom
        prompt, prefixes = problem.input_tokens[i], problem.prefix_tokens[i]
        fixed_eta = np.where(free, 0.0, data.high)[i]
        share = prefixes / problem.kv_tokens[k]

        self._budget = rows(1)
        put(np.repeat(self._budget, configs), self.z, problem.group_gpus)
        self.row_memory = rows(configs, -INF, 0.0)
        self.row_load = rows(configs, 0.0, 0.0)
        for row, factor, own in ((self.row_memory, headroom, self.z), (self.row_load, 1.0, self.load)):
            put(row[k], self.pi, factor * a * (prompt + fixed_eta))
            put(row[k[has_h]], self.h[has_h], (factor * a * self.eta_unit[i])[has_h])
            put(row[k[has_y]], self.y[has_y], (-factor * a * prefixes)[has_y])
            put(row[k[has_y]], self.t[has_y], share[has_y])
            put(row, own, -1.0)
        admission = rows(classes, -INF, 1.0)
        put(admission[i], self.pi, 1.0)
        self.row_tardy = rows(classes, 0.0, INF)
        put(self.row_tardy, self.late, 1.0)
        put(self.row_tardy[i], self.pi, 1 - problem.service_times[i, k] / problem.latency_slos[i])
        put(
            self.row_tardy[i[has_q]],
            self.q[has_q],
            -(problem.queueing_factors[k] / problem.latency_slos[i])[has_q],
        )
        deployed = rows(pairs, -INF, 0.0)
        put(deployed, self.pi, 1.0)
        put(deployed, self.z[k], -1.0)

        # McCormick for load = z v, and the chord of the wait.
        self._wait_rows = {}
        for name, v_name, z_name in (
            ("low_low", "zl", "vl"),
            ("up_up", "zu", "vu"),
            ("up_low", "zu", "vl"),
            ("low_up", "zl", "vu"),
        ):
            row = self._wait_rows[name] = rows(configs)
            put(row, self.load, 1.0)
            boxed(row, self.v, "-" + v_name)
            boxed(row, self.z, "-" + z_name)
        self._wait_rows["chord"] = row = rows(configs)
        put(row, self.wait, 1.0)
        boxed(row, self.v, "-chord")

        # h between el pi and eu pi.
        hi = np.flatnonzero(has_h)
        for name in ("el", "eu"):
            row = rows(hi.size, *((0.0, INF) if name == "el" else (-INF, 0.0)))
            put(row, self.h[hi], 1.0)
            boxed(row, self.pi[hi], f"-{name}[i]")
        # McCormick for q = pi W.
        qi = np.flatnonzero(has_q)
        self._q_rows = {}
        for name, pi_name, w_name in (
            ("q_low", "wl", "pl"),
            ("q_up", "wu", "pu"),
            ("q_cap", "wu", "pl"),
            ("q_lid", "wl", "pu"),
        ):
            row = self._q_rows[name] = rows(qi.size)
            put(row, self.q[qi], 1.0)
            boxed(row, self.pi[qi], f"-{pi_name}[k]")
            boxed(row, self.wait[k[qi]], f"-{w_name}[q]")
        # Prefix caching.
        yi = np.flatnonzero(has_y)
        below = rows(yi.size, -INF, 0.0)
        put(below, self.y[yi], 1.0)
        put(below, self.pi[yi], -1.0)
        row = rows(yi.size, 0.0, INF)
        put(row, self.t[yi], 1.0)
        boxed(row, self.y[yi], "-t_low")
        self._t_rows = row = rows(yi.size)
        put(row, self.t[yi], 1.0)
        put(row, self.z[k[yi]], -1.0)
        boxed(row, self.y[yi], "-t_up")
        self._hi, self._qi, self._yi = hi, qi, yi

        # The load times the wait (module): per family, coefficients of q, pi, h, y and t by pair.
        zero = np.zeros(pairs)
        whole = prompt + data.high[i]
        rest = np.where(prefix, prefixes, 0.0)
        highest = wait(box.vu)[k]
        per_h = np.where(has_h, self.eta_unit[i], 0.0)
        cached = (a * rest * highest, -a * rest * highest, np.where(prefix, share * highest, 0.0))
        self._families = [(a * (whole + problem.headroom * rest), zero, zero, zero, zero)]
        if np.isfinite(highest).all():
            self._families += [
                (a * (whole - rest), cached[0], zero, cached[1], cached[2]),
                (a * (prompt + fixed_eta - rest), cached[0], a * per_h * highest, cached[1], cached[2]),
            ]

        self._build(cost / self.scale)
        self._known: set[tuple] = set()
        self._sides: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        self._waiting: list[tuple[Floats, list[tuple[list[int], list[float]]]]] = []
        self.cuts: list[Cut] = []
        self.pool = pool
        if cuts is not None:
            self._repeat(cuts)
        else:
            some = np.flatnonzero(queues).tolist() if qi.size else []
            self._wait_cuts([(k_, v) for k_ in some for v in (0.0, 0.3, 0.5, 0.7, 0.85)])
            self._product_cuts([(0, k_, v) for k_ in some for v in (0.3, 0.5, 0.7, 0.85)])
            known = [
                (p, *tangent)
                for p in np.flatnonzero(has_h).tolist()
                for tangent in pool.get((int(i[p]), int(k[p])), ())
            ]
            if known:
                pairs, *tangents = (np.array(part) for part in zip(*known, strict=True))
                self._add_cost_cuts(pairs, *tangents)
        self._send()
        self.load_box(box)

    @staticmethod
    def queueing(data: Data, box: Box) -> NDArray[np.bool_]:
        """(K,) whether waiting on k can make some class tardy, at a price."""
        problem = data.problem
        if problem.costs.slo == 0:
            return np.zeros(box.zu.size, dtype=bool)
        with np.errstate(invalid="ignore"):
            longest = problem.queueing_factors * wait(box.vu)
        served = box.pu > 0
        response = np.where(served, problem.service_times + longest, -np.inf)
        # One slow configuration makes the mean of a class late on all of them.
        late = response.max(axis=1) > problem.latency_slos
        return (served & late[:, None]).any(axis=0)

    # ---- the program --------------------------------------------------------------------------

    def _build(self, cost: Floats) -> None:
        row = np.concatenate([e[0] for e in self._entries] + [b[0] for b in self._boxed])
        column = np.concatenate([e[1] for e in self._entries] + [b[1] for b in self._boxed])
        plain = np.concatenate([e[2] for e in self._entries])
        # Box entries start at a value that cannot be dropped as zero.
        self._boxed_row = row[plain.size :].astype(np.int32)
        self._boxed_col = column[plain.size :].astype(np.int32)
        self._boxed_value = np.full(self._boxed_row.size, -0.5)
        value = np.concatenate([plain, self._boxed_value])
        self._low, self._high = np.concatenate(self._row_lower), np.concatenate(self._row_upper)
        self._pass(
            cost, self._low, self._high, row, column, value, dual_simplex_cost_perturbation_multiplier=0.0
        )

    def load_box(self, box: Box, frame: Box | None = None) -> None:
        """Make the program the relaxation on ``box``: only entries that differ are sent to the solver.

        ``frame`` is a larger box to take the coefficients from, so that only bounds of columns change: a
        weaker relaxation, but a basis of it stays dual feasible and is re-optimised in few steps.
        """
        self.box, box = box, frame or box
        data, i, k = self.data, self.pair_class, self.pair_config
        wl, wu = wait(box.vl), wait(box.vu)
        finite = np.isfinite(wu)
        wu_or_0 = np.where(finite, wu, 0.0)
        chord = np.where(box.vu > box.vl, (wu_or_0 - wl) / np.maximum(box.vu - box.vl, 1e-12), 0.0)
        hi, qi, yi = self._hi, self._qi, self._yi
        pl, pu = box.pl[i, k], box.pu[i, k]
        unit = self.eta_unit[i[hi]]
        one_group = np.maximum(box.zl, 1.0)[k[yi]]
        headroom = 1 + data.problem.headroom
        # With delta = 1 the class and its prefix alone must fit: t (M - L) >= (1 + kappa) u (r - L) y.
        prefix = data.problem.prefix_tokens[i[yi]]
        room = data.problem.kv_tokens[k[yi]] - prefix
        alone = (
            headroom
            * data.problem.offered_loads[i[yi], k[yi]]
            * (data.problem.input_tokens[i[yi]] - prefix + box.el[i[yi]])
            / room
        )
        cached = box.dl[i[yi], k[yi]]
        caching = box.du[i[yi], k[yi]] & (pu[yi] > 0)
        pu_y = np.where(caching, pu[yi], 1.0)
        values = {
            "-zl": -box.zl,
            "-zu": -box.zu,
            "-vl": -box.vl,
            "-vu": -box.vu,
            "-chord": -chord,
            "-el[i]": -box.el[i[hi]] / unit,
            "-eu[i]": -box.eu[i[hi]] / unit,
            "-wl[k]": -wl[k[qi]],
            "-wu[k]": -wu_or_0[k[qi]],
            "-pl[q]": -pl[qi],
            "-pu[q]": -pu[qi],
            "-t_low": -np.where(caching, np.maximum(one_group / pu_y, alone), 1.0),
            "-t_up": -np.where(cached | ~caching, 0.0, box.zu[k[yi]] / pu_y),
        }
        new = np.concatenate([values[name] for _, _, name in self._boxed])
        for at in np.flatnonzero(new != self._boxed_value):
            self.highs.changeCoeff(int(self._boxed_row[at]), int(self._boxed_col[at]), float(new[at]))
        self._boxed_value = new

        low, high = self._low.copy(), self._high.copy()
        rows = self._wait_rows
        low[rows["low_low"]] = -box.zl * box.vl
        low[rows["up_up"]] = -box.zu * box.vu
        high[rows["up_low"]] = -box.zu * box.vl
        high[rows["low_up"]] = -box.zl * box.vu
        high[rows["chord"]] = np.where(finite, wl - chord * box.vl, INF)
        rows, kq = self._q_rows, k[qi]
        low[rows["q_low"]] = -(pl[qi] * wl[kq])
        low[rows["q_up"]] = np.where(finite[kq], -(pu[qi] * wu_or_0[kq]), -INF)
        high[rows["q_cap"]] = np.where(finite[kq], -(pl[qi] * wu_or_0[kq]), INF)
        high[rows["q_lid"]] = -(pu[qi] * wl[kq])
        low[self._t_rows] = np.where(cached, 0.0, np.where(caching, -box.zu[k[yi]], -INF))
        n = self._fixed_rows

        box = self.box
        low[self._budget], high[self._budget] = box.gl, box.gu
        self.highs.changeRowsBounds(n, np.arange(n, dtype=np.int32), low, high)
        wl, wu = wait(box.vl), wait(box.vu)
        pl, pu = box.pl[i, k], box.pu[i, k]
        caching = box.du[i[yi], k[yi]] & (pu[yi] > 0)
        cached = box.dl[i[yi], k[yi]]
        lower, upper = np.zeros(self._columns), np.full(self._columns, INF)
        lower[self.z], upper[self.z] = box.zl, box.zu
        lower[self.v], upper[self.v] = box.vl, box.vu
        upper[self.load] = box.zu * box.vu
        lower[self.wait], upper[self.wait] = wl, np.where(np.isfinite(wu), wu, INF)
        lower[self.pi], upper[self.pi] = pl, pu
        upper[self.y[yi]] = np.where(caching, pu[yi], 0.0)
        lower[self.t[yi]] = np.where(cached, box.zl[k[yi]], 0.0)
        upper[self.t[yi]] = np.where(caching, box.zu[k[yi]], 0.0)
        self.highs.changeColsBounds(self._columns, np.arange(self._columns, dtype=np.int32), lower, upper)

    # ---- cuts ---------------------------------------------------------------------------------

    def _add_rows(self, lower: Floats, entries: list[tuple[list[int], list[float]]]) -> None:
        self._waiting.append((lower, entries))
        self._rows += len(entries)

    def _send(self) -> None:
        """Give the solver the cuts that were found since the last time."""
        entries = [entry for _, part in self._waiting for entry in part]
        if entries:
            starts = np.cumsum([0] + [len(columns) for columns, _ in entries[:-1]]).astype(np.int32)
            index = np.array([c for columns, _ in entries for c in columns], dtype=np.int32)
            value = np.array([x for _, values in entries for x in values])
            lower = np.concatenate([part for part, _ in self._waiting])
            count = len(entries)
            self.highs.addRows(count, lower, np.full(count, INF), index.size, starts, index, value)
        self._waiting = []

    def _repeat(self, cuts: Sequence[Cut]) -> None:
        """Add the tangents that another relaxation had, where they touch this problem's functions.

        Those without a counterpart are left out, such as of a wait that makes nobody late here.
        """
        data = self.data
        waits = np.zeros(self.shape[1], dtype=bool)
        waits[self.pair_config[self.has_q]] = True
        for kind, where, at in cuts:
            if kind == "cost":
                here = where < self.pair_class.size
                here[here] = self.has_h[where[here]]
                where, at = where[here], at[here]
                i = self.pair_class[where]
                etas = data.low[i] + at * (data.high[i] - data.low[i])
                self._add_cost_cuts(where, *data.tangents(i, etas))
            elif kind == "wait":
                here = waits[where]
                self._wait_cuts(list(zip(where[here].tolist(), at[here].tolist(), strict=True)))
            else:
                here = (where[0] < len(self._families)) & waits[where[1]]
                family, k = where[:, here]
                self._product_cuts(list(zip(family.tolist(), k.tolist(), at[here].tolist(), strict=True)))

    def _add_cost_cuts(self, pairs: NDArray[np.int64], etas: Floats, values: Floats, slopes: Floats) -> None:
        """Tangents of WC at ``etas`` with these values and slopes, one per pair."""
        if pairs.size == 0:
            return
        data, i = self.data, self.pair_class[pairs]
        self.cuts.append(("cost", pairs, (etas - data.low[i]) / (data.high[i] - data.low[i])))
        rates = data.problem.arrival_rates[i] / self.scale
        on_pi = -rates * (values - slopes * etas - data.cheapest[i])
        on_h = -rates * slopes * self.eta_unit[i]
        columns = np.column_stack([self.w[pairs], self.pi[pairs], self.h[pairs]]).tolist()
        entries = np.column_stack([np.ones(pairs.size), on_pi, on_h]).tolist()
        self._add_rows(np.zeros(pairs.size), list(zip(columns, entries, strict=True)))

    def _wait_cuts(self, at: list[tuple[int, float]]) -> None:
        """Tangents of v / (1 - v)."""
        at = [(k, v) for k, v in at if ("w", k, v) not in self._known]
        if not at:
            return
        self._known.update(("w", k, v) for k, v in at)
        k, v = (np.array(part) for part in zip(*at, strict=True))
        self.cuts.append(("wait", k, v))
        slope = 1 / (1 - v) ** 2
        columns = np.column_stack([self.wait[k], self.v[k]]).tolist()
        entries = np.column_stack([np.ones(v.size), -slope]).tolist()
        self._add_rows(v / (1 - v) - slope * v, list(zip(columns, entries, strict=True)))

    def _product_cuts(self, at: list[tuple[int, int, float]]) -> None:
        """Tangents of z g(V / z), g(v) = v^2 / (1 - v), under the load times the wait: (family, k, v)."""
        at = [(f, k, v) for f, k, v in at if ("g", f, k, v) not in self._known]
        if not at:
            return
        self._known.update(("g", *which) for which in at)
        families, configs, places = (np.array(part) for part in zip(*at, strict=True))
        self.cuts.append(("product", np.array([families, configs]), places))
        entries = []
        for family, k, v in at:
            slope = v * (2 - v) / (1 - v) ** 2
            mine, weights = self._left_side(family, k)
            columns = [int(self.load[k]), int(self.z[k]), *mine]
            entries.append((columns, [-slope, slope * v - v * v / (1 - v), *weights]))
        self._add_rows(np.zeros(len(entries)), entries)

    def _left_side(self, family: int, k: int) -> tuple[list[int], list[float]]:
        """Columns and coefficients of a family's bound on the load of k times its wait."""
        if (family, k) not in self._sides:
            pairs = np.flatnonzero((self.pair_config == k) & self.has_q)
            columns, values = [], []
            for block, weights in zip(self._blocks, self._families[family], strict=True):
                mine = pairs[(weights[pairs] != 0) & (block[pairs] >= 0)]
                columns += block[mine].tolist()
                values += weights[mine].tolist()
            self._sides[family, k] = columns, values
        return self._sides[family, k]

    # ---- solving ------------------------------------------------------------------------------

    def _point(self) -> Point:
        solution = self.highs.getSolution()
        x = np.array(solution.col_value)
        dual_columns, dual_rows = np.array(solution.col_dual), np.array(solution.row_dual)
        i, k = self.pair_class, self.pair_config

        def matrix(columns: NDArray[np.int64], unit: float | Floats = 1.0) -> Floats:
            out = np.zeros(self.shape)
            have = columns >= 0
            out[i[have], k[have]] = (x[columns] * unit)[have]
            return out

        pi = matrix(self.pi)
        h = matrix(self.h, self.eta_unit[i])
        fixed = self.data.high == self.data.low
        h[fixed] = pi[fixed] * self.data.high[fixed, None]
        reduced = np.zeros(self.shape)
        reduced[i, k] = dual_columns[self.pi] * self.scale
        return Point(
            bound=self._bound(),
            z=x[self.z],
            v=x[self.v],
            load=x[self.load],
            wait=x[self.wait],
            late=x[self.late] * self.data.problem.latency_slos,
            pi=pi,
            h=h,
            q=matrix(self.q),
            y=matrix(self.y),
            t=matrix(self.t),
            memory_price=-dual_rows[self.row_memory] * self.scale,
            load_price=-dual_rows[self.row_load] * self.scale,
            tardy_price=np.abs(dual_rows[self.row_tardy]) * self.scale,
            reduced_pi=reduced,
            reduced_z=dual_columns[self.z] * self.scale,
        )

    def _separate(self, point: Point, tolerance: float) -> bool:
        """Add the tangents that ``point`` violates; whether any was worth it."""
        x = np.array(self.highs.getSolution().col_value)
        worth = 0.0
        rates = self.data.problem.arrival_rates
        found: list[tuple[NDArray, Floats, Floats, Floats]] = []
        shares = x[self.pi]
        active = np.flatnonzero(self.has_h & (shares > 1e-7))
        i = self.pair_class[active]
        etas = np.clip(
            x[self.h[active]] * self.eta_unit[i] / shares[active], self.data.low[i], self.data.high[i]
        )
        excess = self.data.worst_cases(i, etas) - self.data.cheapest[i]
        missing = rates[i] * shares[active] * excess - x[self.w[active]] * self.scale
        take = missing > 0.02 * tolerance
        worth += float(missing[take].sum())
        for c in np.unique(i[take]).tolist():
            mine = take & (i == c)
            found.append((active[mine], etas[mine], *self.data.cut(c, etas[mine])))
        steep, products = [], []
        problem = self.data.problem
        prices = problem.costs.slo * problem.queueing_factors * (rates @ point.pi)
        for k in np.unique(self.pair_config[self.has_q]).tolist():
            v = min(float(point.v[k]), STEEPEST)
            low = prices[k] * (v / (1 - v) - point.wait[k])
            if low > 0.02 * tolerance and ("w", k, v) not in self._known:
                steep.append((k, v))
                worth += low
            if point.z[k] <= 1e-7:
                continue
            v = min(float(point.load[k] / point.z[k]), STEEPEST)
            for family in range(len(self._families)):
                columns, weights = self._left_side(family, k)
                left = float(x[columns] @ weights)
                missing = point.z[k] * v * v / (1 - v) - left
                if missing > 1e-4 * (1e-3 + left) and ("g", family, k, v) not in self._known:
                    products.append((family, k, v))
                    worth += tolerance
        if worth < tolerance:
            return False
        if found:
            pairs, etas, values, slopes = (np.concatenate(parts) for parts in zip(*found, strict=True))
            self._add_cost_cuts(pairs, etas, values, slopes)
            for p, tangent in zip(pairs, zip(etas, values, slopes, strict=True), strict=True):
                at = (int(self.pair_class[p]), int(self.pair_config[p]))
                self.pool.setdefault(at, []).append(tuple(map(float, tangent)))
        self._wait_cuts(steep)
        self._product_cuts(products)
        self._send()
        return True
