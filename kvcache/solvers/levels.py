"""A second relaxation, for numbers of groups that are not decided: levels of utilisation with own columns.

`kvcache.solvers.relaxation` ties the wait of a configuration to the flow of each class by itself, so its
optimum serves classes with time to spare at a high utilisation and the others at a low one, in the same
groups.
Here a *cell* is a configuration k at a level a <= v_k <= b:

===================  =============================================================================
column               stands for, and what holds it
===================  =============================================================================
``w``                1 where the cell is the one that k is in: their sum over the levels of k is <= 1
``z``                the groups of k if it is in this cell: max(zl, 1) w <= z <= zu w
``pi``               the routing to k if it is in this cell: pi <= w
``d``                pi (high - eta), output tokens that are not reserved: 0 <= d <= (high - el) pi
===================  =============================================================================

The load of a cell is at most b z and its wait at least W(a). A policy sets w = 1 in the one cell of each
configuration in use that its v_k falls into, so the optimum is a lower bound; it rises with the number of
levels, and few of them matter: `Levels.refined` divides those where waiting hides. The cost of a class is
a tangent of WC on its whole flow, since all of it has the same eta_i. A cached prefix takes
t >= max(zl, 1) pi and, as in `kvcache.solvers.relaxation`, t (M - L) >= (1 + kappa) u (L_in + el - L) pi;
what it saves follows from the larger of the two, so it needs no columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.solvers.relaxation import INF, STEEPEST, Box, Cut, Data, Point, Program, wait

__all__ = ["Grid", "Levels", "grid"]

Floats = NDArray[np.float64]
#: (K,) edges of the levels of each configuration, ascending, as shares of the highest v_k of the root.
Grid = tuple[Floats, ...]

# Share of the range of v that the top level takes: where memory decides, the optimum is there.
RIM = 1e-3
# Shares of the range of eta, from the minimiser of WC down, at which it has a tangent from the start.
FIRST = np.array([1.0, 0.99, 0.97, 0.9, 0.7, 0.0])
# A level is divided into so many where it hides more than this share of all waiting that is hidden.
PARTS = 3
HIDDEN = 2e-3


def grid(data: Data, box: Box, count: int) -> Grid:
    """``count`` levels per configuration, thinner where the wait is steeper, and a thin one at the top."""
    out = []
    for top in box.vu:
        inside = top * (1 - RIM)
        edges = 1 - max(1 - inside, 1 - STEEPEST) ** np.linspace(0, 1, count + 1)
        out.append(np.append(edges[:-1], [inside, top]) / top)
    return tuple(out)


class Levels(Program):
    """The linear program over the cells of a grid; boxes are loaded into it in turn.

    Parameters
    ----------
    data : Data
    box : Box
        Pairs whose ``pu`` is 0 are left out for good.
    edges : Grid
    cuts : what ``cuts`` was of another program of the same cells; the same are added, see `Relaxation`.
    """

    def __init__(self, data: Data, box: Box, edges: Grid, cuts: tuple[Cut, ...] | None = None) -> None:
        self.data, self.edges, self._top = data, edges, box.vu
        self.configs = tuple(range(box.zu.size))
        problem, costs = data.problem, data.problem.costs
        self.shape = classes, configs = box.pu.shape
        counts = np.array([e.size - 1 for e in edges])
        self.cell_config = ck = np.repeat(np.arange(configs), counts)
        self.low = np.concatenate([e[:-1] * top for e, top in zip(edges, box.vu, strict=True)])
        self.high = np.concatenate([e[1:] * top for e, top in zip(edges, box.vu, strict=True)])
        self._wait = wait(np.minimum(self.low, STEEPEST))
        cells = ck.size
        # Flows: every class in every cell where it may be served.
        self.flow_class, self.flow_cell = i, c = np.nonzero(box.pu[:, ck] > 0)
        self.flow_config = k = ck[c]
        flows = i.size
        free = (data.high > data.low)[i]
        self.unit = np.maximum(data.high, 1.0)
        rates = problem.arrival_rates
        self.scale = data.scale
        self.offset = data.rejection * float(rates.sum())

        self._columns = self._rows = 0

        def block(count: int) -> NDArray[np.int64]:
            self._columns += count
            return np.arange(self._columns - count, self._columns)

        self.z, self.w = block(cells), block(cells)
        self.late, self.cost, self.admitted, self.saved = (block(classes) for _ in range(4))
        self.pi = block(flows)
        self.d = np.full(flows, -1)
        self.d[free] = block(int(free.sum()))

        cost = np.zeros(self._columns)
        cost[self.z] = costs.gpu * problem.group_gpus[ck]
        cost[self.late] = costs.slo * rates * problem.latency_slos
        cost[self.admitted] = rates * (data.cheapest - data.rejection)
        cost[self.cost] = self.scale
        entries: list[tuple[NDArray, NDArray, NDArray]] = []
        low, high = [], []

        def rows(count: int, least: float, most: float) -> NDArray[np.int64]:
            low.append(np.full(count, least))
            high.append(np.full(count, most))
            self._rows += count
            return np.arange(self._rows - count, self._rows)

        def put(row: NDArray, column: NDArray, value: float | Floats) -> None:
            row, column = np.broadcast_arrays(row, column)
            entries.append((row, column, np.broadcast_to(np.asarray(value, float), row.shape)))

        headroom = 1 + problem.headroom
        a = data.per_token[i, k]
        self._budget = rows(1, 0.0, 0.0)
        put(np.repeat(self._budget, cells), self.z, problem.group_gpus[ck])
        self._groups = rows(configs, 0.0, 0.0)
        put(self._groups[ck], self.z, 1.0)
        self._one = rows(configs, 0.0, 1.0)
        put(self._one[ck], self.w, 1.0)
        self._least, self._most = rows(cells, 0.0, INF), rows(cells, -INF, 0.0)
        put(self._least, self.z, 1.0)
        put(self._most, self.z, 1.0)
        self._load = rows(cells, -INF, 0.0)
        put(self._load, self.z, -self.high)
        put(self._load[c[free]], self.d[free], -(a * self.unit[i])[free])
        # Below 1 / (1 + kappa) memory holds whenever the load does.
        tight = np.flatnonzero(self.high > 1 / headroom * (1 - 1e-9))
        self.row_memory = np.full(cells, -1)
        self.row_memory[tight] = rows(tight.size, -INF, 0.0)
        self._in_memory = np.flatnonzero(self.row_memory[c] >= 0)
        put(self.row_memory[tight], self.z[tight], -1.0)
        m = self._in_memory[free[self._in_memory]]
        put(self.row_memory[c[m]], self.d[m], -headroom * (a * self.unit[i])[m])
        put(rows(flows, -INF, 0.0), self.pi, 1.0)
        put(np.arange(self._rows - flows, self._rows), self.w[c], -1.0)
        self._spare = np.full(flows, -1)
        self._spare[free] = rows(int(free.sum()), -INF, 0.0)
        put(self._spare[free], self.d[free], 1.0)
        total = rows(classes, 0.0, 0.0)
        put(total, self.admitted, 1.0)
        put(total[i], self.pi, -1.0)
        total = rows(classes, 0.0, 0.0)
        put(total, self.saved, 1.0)
        put(total[i[free]], self.d[free], -1.0)
        self._tardy = tardy = rows(classes, 0.0, INF)
        put(tardy, self.late, 1.0)
        response = problem.service_times[i, k] + problem.queueing_factors[k] * self._wait[c]
        put(tardy[i], self.pi, 1 - response / problem.latency_slos[i])

        # Entries that depend on the box: (row, column) here, values from `_boxed`.
        self._at = [
            (self._least, self.w),
            (self._most, self.w),
            (self._load[c], self.pi),
            (self.row_memory[c[self._in_memory]], self.pi[self._in_memory]),
            (self._spare[free], self.pi[free]),
        ]
        self._free = np.flatnonzero(free)
        values = self._boxed(box)
        for (row, column), value in zip(self._at, values, strict=True):
            put(row, column, value)
        self._row = np.concatenate([row for row, _ in self._at])
        self._col = np.concatenate([column for _, column in self._at])
        row, column, value = (np.concatenate([e[n] for e in entries]) for n in range(3))
        self._value = value[-self._row.size :]
        sides = np.concatenate(low), np.concatenate(high)
        self._pass(cost / self.scale, *sides, row, column, value, simplex_dual_edge_weight_strategy=2)
        self.cuts: list[Cut] = []
        if cuts is None:
            some = np.flatnonzero(data.high > data.low)
            cuts = (("cost", np.repeat(some, FIRST.size), np.tile(FIRST, some.size)),)
        for _, where, at in cuts:
            here = (data.high > data.low)[where]
            where, at = where[here], at[here]
            self._tangents(where, *data.tangents(where, data.low[where] + at * (data.high - data.low)[where]))
        self.load_box(box)

    def _boxed(self, box: Box) -> list[Floats]:
        problem, i, k = self.data.problem, self.flow_class, self.flow_config
        least = np.maximum(box.zl, 1.0)
        headroom = 1 + problem.headroom
        a, prefix = self.data.per_token[i, k], problem.prefix_tokens[i]
        prompt = problem.input_tokens[i]
        room = np.maximum(problem.kv_tokens[k] - prefix, 1e-9)
        u = problem.offered_loads[i, k]
        held = np.maximum(least[k], headroom * u * (prompt - prefix + box.el[i]) / room)
        share = prefix / problem.kv_tokens[k]
        loads = []
        for factor in (1.0, headroom):
            saved = share * (factor * u - held)
            if factor == 1.0:
                self._caches, self._held = box.dl[i, k] | (box.du[i, k] & (saved > 0)), held
            saved = np.where(box.dl[i, k], saved, np.where(box.du[i, k], np.maximum(saved, 0.0), 0.0))
            loads.append(factor * a * (prompt + self.data.high[i]) - saved)
        # A zero would be dropped and could not be changed later.
        reach = np.minimum(-(self.data.high - box.el) / self.unit, -1e-8)
        return [
            -least[self.cell_config],
            np.minimum(-box.zu[self.cell_config], -1e-8),
            loads[0],
            loads[1][self._in_memory],
            reach[i[self._free]],
        ]

    def _tangents(self, i: NDArray[np.int64], etas: Floats, values: Floats, slopes: Floats) -> None:
        """Tangents of WC of classes i at ``etas``, on the flow of the class and its output not reserved."""
        data, count = self.data, i.size
        if count == 0:
            return
        self.cuts.append(("cost", i, (etas - data.low[i]) / (data.high[i] - data.low[i])))
        rate = data.problem.arrival_rates[i] / self.scale
        on_pi = -rate * (values - data.cheapest[i] + slopes * (data.high[i] - etas))
        on_d = rate * slopes * self.unit[i]
        index = np.column_stack([self.cost[i], self.admitted[i], self.saved[i]]).ravel().astype(np.int32)
        value = np.column_stack([np.ones(count), on_pi, on_d]).ravel()
        starts = np.arange(0, 3 * count, 3, dtype=np.int32)
        self.highs.addRows(count, np.zeros(count), np.full(count, INF), 3 * count, starts, index, value)
        self._rows += count

    def load_box(self, box: Box, frame: Box | None = None) -> None:
        """Make the program the relaxation on ``box``; with a larger ``frame``, coefficients are its own."""
        new = np.concatenate(self._boxed(frame or box))
        for at in np.flatnonzero(new != self._value):
            self.highs.changeCoeff(int(self._row[at]), int(self._col[at]), float(new[at]))
        self._value = new
        i, k, ck = self.flow_class, self.flow_config, self.cell_config
        inside = (self.low <= box.vu[ck] + 1e-9) & (self.high >= box.vl[ck] - 1e-9) & (box.zu[ck] > 0)
        lower, upper = np.zeros(self._columns), np.full(self._columns, INF)
        upper[self.w] = inside
        upper[self.z] = np.where(inside, box.zu[ck], 0.0)
        upper[self.admitted] = 1.0
        upper[self.pi] = np.where(inside[self.flow_cell], box.pu[i, k], 0.0)
        self.highs.changeColsBounds(self._columns, np.arange(self._columns, dtype=np.int32), lower, upper)
        n = 1 + 2 * self.shape[1]
        low = np.concatenate([[box.gl], box.zl, (box.zl > 0).astype(float)])
        high = np.concatenate([[box.gu], box.zu, np.ones(self.shape[1])])
        self.highs.changeRowsBounds(n, np.arange(n, dtype=np.int32), low, high)

    def refined(self) -> Grid:
        """The grid with the levels divided at which most waiting hides in the last optimum."""
        x, problem = np.array(self.highs.getSolution().col_value), self.data.problem
        flow = np.bincount(self.flow_cell, problem.arrival_rates[self.flow_class] * x[self.pi], self.low.size)
        more = wait(np.minimum(self.high, STEEPEST)) - self._wait
        hidden = flow * problem.queueing_factors[self.cell_config] * more
        edges = [list(e) for e in self.edges]
        for c in np.flatnonzero(hidden > HIDDEN * hidden.sum()).tolist():
            k, low, high = self.cell_config[c], 1 - self.low[c], 1 - min(self.high[c], STEEPEST)
            inside = 1 - low * (high / low) ** (np.arange(1, PARTS) / PARTS)
            edges[k] += (inside / self._top[k]).tolist()
        return tuple(np.unique(e) for e in edges)

    def _point(self) -> Point:
        i, k, c, ck = self.flow_class, self.flow_config, self.flow_cell, self.cell_config
        problem, data, configs = self.data.problem, self.data, self.shape[1]
        solution = self.highs.getSolution()
        x = np.array(solution.col_value)

        def matrix(values: Floats) -> Floats:
            return np.bincount(i * configs + k, values, self.shape[0] * configs).reshape(self.shape)

        flow, free = x[self.pi], self._free
        kept = data.high[i] * flow
        kept[free] -= self.unit[i[free]] * x[self.d[free]]
        cached = np.where(self._caches, flow, 0.0)
        pi, h, y, t = matrix(flow), matrix(kept), matrix(cached), matrix(cached * self._held)
        held = problem.input_tokens[:, None] * pi + h - problem.prefix_tokens[:, None] * y
        load = (data.per_token * held).sum(axis=0) + problem.prefix_tokens @ t / problem.kv_tokens
        prices = np.maximum(-np.array(solution.row_dual), 0.0) * self.scale
        load_price, memory_price = np.zeros(configs), np.zeros(configs)
        np.maximum.at(load_price, ck, prices[self._load])
        tight = self.row_memory >= 0
        np.maximum.at(memory_price, ck[tight], prices[self.row_memory[tight]])
        z = np.bincount(ck, x[self.z], configs)
        v = np.clip(np.where(z > 1e-9, load / np.maximum(z, 1e-9), 0.0), 0.0, 1.0)
        return Point(
            bound=self._bound(),
            z=z,
            v=v,
            load=load,
            wait=wait(np.minimum(v, STEEPEST)),
            late=x[self.late] * problem.latency_slos,
            pi=pi,
            h=h,
            q=matrix(flow * self._wait[c]),
            y=y,
            t=t,
            memory_price=memory_price,
            load_price=load_price,
            tardy_price=prices[self._tardy],
            reduced_pi=np.zeros(self.shape),
            reduced_z=np.zeros(configs),
        )

    def _separate(self, point: Point, tolerance: float) -> bool:
        """Add the tangents of WC that ``point`` violates; whether any was worth it."""
        data, x = self.data, np.array(self.highs.getSolution().col_value)
        admitted, saved = x[self.admitted], x[self.saved] * self.unit
        some = (admitted > 1e-7) & (data.high > data.low)
        etas = data.high - np.where(some, saved / np.where(some, admitted, 1.0), 0.0)
        etas = np.clip(etas, data.low, data.high)
        excess = data.worst_cases(np.arange(etas.size), etas) - data.cheapest
        missing = data.problem.arrival_rates * admitted * excess - x[self.cost] * self.scale
        take = np.flatnonzero(some & (missing > 0.02 * tolerance))
        if missing[take].sum() < tolerance:
            return False
        cuts = [data.cut(int(i), float(etas[i])) for i in take]
        self._tangents(take, etas[take], *(np.array(part) for part in zip(*cuts, strict=True)))
        return True
