"""Algorithm 1 of the paper: block coordinate descent over routing and reservations, caching, and groups.

Block 1
    alternates LP1 (routing pi, reservations fixed) and LP2 (reservations r with gamma and theta,
    routing fixed) for given (z, delta).
Block 2
    delta_ik = 1 where u_ik pi_ik / z_k > 1, column by column where (6e) still holds.
Block 3
    chooses z, in one of two readings: ``resolve`` runs Block 1 again for each z (the default, A7),
    ``literal`` keeps r, pi and delta, so a configuration without groups never gets one. Neither lists
    the z of a large cluster; see :func:`solve` for what ``resolve`` guarantees there.

The waiting time W_k (7) is a convex function of the utilisation v_k and enters both programs by
tangents. With routing fixed, LP2 is therefore exact. In LP1 the product pi_ik W_k is taken to first
order around the current point, and the step towards its solution is halved until the objective of
:func:`evaluate` falls; the very first LP1 sees W_k at the largest value at which it admits anything,
so it promises nothing it cannot keep. Every accepted step lowers :func:`evaluate`, and there are finitely
many (z, delta), so the algorithm ends. It ends at a point that no block improves, which need not be the
optimum.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice

import highspy
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from kvcache.ambiguity import Wasserstein1
from kvcache.policy import Evaluation, Policy, Solution, Status, evaluate, repaired
from kvcache.problem import Problem
from kvcache.queueing import wait_at
from kvcache.solvers.highs import new_highs
from kvcache.solvers.relaxation import Box, Data, Point, Relaxation

__all__ = ["BLOCK3", "first_groups", "solve"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

#: The readings of Block 3.
BLOCK3 = ("resolve", "literal")

# A step counts when it lowers the objective by more than this share.
_PROGRESS = 1e-9
_ALTERNATION_PROGRESS = 1e-7
_HALVINGS = 8
# HiGHS's options for a program that it gave up on, tried in turn from no basis.
_RESCUES = (
    {"user_objective_scale": -10},
    {"solver": "ipm", "dual_feasibility_tolerance": 1e-7, "primal_feasibility_tolerance": 1e-7},
)
# An admitted share below this is none.
_NOTHING = 1e-9
# Relative error of the tangents at which an LP counts as solved.
_TANGENT_ERROR = 1e-8
# Cost per reserved token that only decides between equally good reservations, in units of c_w.
_TIE_BREAK = 1e-8
# First tangents of each WC_i, in multiples of its unconstrained reservation; memory asks for less than that.
_FIRST_CUTS = np.array([0.0, 0.4, 0.6, 0.75, 0.85, 0.9, 0.94, 0.97, 0.99, 1.0])
# Share of the objective within which the choice of groups at given utilisations is exact.
_BLOCK3_GAP = 1e-4
# Adjacent partitions x classes x configurations up to which those are tried one by one.
_NEIGHBOURHOOD = 10_000
# Utilisations of the median configuration at which groups are priced.
_LEVELS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Times that groups are priced from each of them, the later ones at what Block 1 has made of the first.
_PRICINGS = 2
# Utilisations of the first tangents of v / (1 - v).
_POINTS = 1 - np.geomspace(1.0, 0.1, 10)


class _Program:
    """A linear program over non-negative columns, to which rows can be added while its basis is kept."""

    def __init__(self, cost: Floats, upper: Floats) -> None:
        self.cost = cost
        self.highs = new_highs(primal_feasibility_tolerance=1e-9, dual_feasibility_tolerance=1e-9)
        n, nothing = cost.size, np.zeros(0, dtype=np.int32)
        self.highs.addCols(n, cost, np.zeros(n), upper, 0, np.zeros(n, dtype=np.int32), nothing, np.zeros(0))

    def add_rows(self, rows: Floats | sparse.csr_matrix, upper: Floats) -> None:
        """``rows @ x <= upper``; the rows may end before the last column."""
        if isinstance(rows, np.ndarray):
            at, columns = np.nonzero(rows)
            starts, values = np.searchsorted(at, np.arange(len(rows))), rows[at, columns]
        else:
            starts, columns, values = rows.indptr[:-1], rows.indices, rows.data
        self.highs.addRows(
            rows.shape[0],
            np.full(rows.shape[0], -highspy.kHighsInf),
            np.asarray(upper, dtype=float),
            values.size,
            starts.astype(np.int32),
            columns.astype(np.int32),
            values,
        )

    def solve(self) -> Floats:
        """(n,) an optimal vertex. Every program here is feasible and bounded."""
        self.highs.run()
        status = self.highs.getModelStatus()
        for options in _RESCUES:
            if status == highspy.HighsModelStatus.kOptimal:
                break
            self.highs.clearSolver()
            for option, value in options.items():
                self.highs.setOptionValue(option, value)
            self.highs.run()
            status = self.highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise RuntimeError(f"linear program: HiGHS ends with {self.highs.modelStatusToString(status)}")
        return np.array(self.highs.getSolution().col_value)


def _tangents(columns: int, wait: int, load: int, points: Floats) -> tuple[Floats, Floats]:
    """Rows w >= tangents of v / (1 - v) at the given points, for columns w and v."""
    slope = 1 / (1 - points) ** 2
    rows = np.zeros((len(points), columns))
    rows[:, wait], rows[:, load] = -1.0, slope
    return rows, points**2 * slope


@dataclass(frozen=True)
class _Groups:
    """The deployed configurations of a policy, with what a request holds there."""

    index: NDArray[np.intp]
    per_token: Floats  # (I, k) utilisation of a group per token held, if all of class i came
    held: Floats  # (I, k) tokens that a request reserves, its cached prefix left out
    cached: Floats  # (k,) share of a group that cached prefixes take

    @classmethod
    def of(cls, problem: Problem, policy: Policy) -> _Groups:
        index = np.flatnonzero(policy.groups > 0)
        delta, capacity = policy.prefix_cache[:, index], problem.kv_tokens[index]
        return cls(
            index,
            problem.offered_loads[:, index] / (capacity * policy.groups[index]),
            policy.reservations[:, None] - delta * problem.prefix_tokens[:, None],
            problem.prefix_tokens @ delta / capacity,
        )


class _Block1:
    """LP1 and LP2 of one problem; tangents of WC_i found once serve all later programs."""

    def __init__(
        self, problem: Problem, *, per_sample: bool, fixed: Floats | None, deadline: float | None
    ) -> None:
        self.problem, self.per_sample, self.fixed, self.deadline = problem, per_sample, fixed, deadline
        self.programs = 0
        self.data = Data.of(problem, None if fixed is None else problem.input_tokens + fixed)
        self.root = Box.root(self.data)
        self.best_eta = problem.unconstrained_reservations()
        if per_sample:
            self._make_dual()
        else:
            self.cuts = []
            for i, best in enumerate(self.best_eta):
                values, slopes = self.data.cut(i, best * _FIRST_CUTS)
                self.cuts.append(list(zip(values - slopes * best * _FIRST_CUTS, slopes, strict=True)))

    @cached_property
    def _cut(self) -> Callable[[int, float], tuple[float, float]]:
        """Intercept and slope of the tangent of WC_i at eta; solutions return to the same lengths."""

        @lru_cache(maxsize=65536)
        def cut(i: int, eta: float) -> tuple[float, float]:
            value, slope = self.data.cut(i, eta)
            return value - slope * eta, slope

        return cut

    def _make_dual(self) -> None:
        """(8c)-(8g): columns eta (I), then gamma_i and theta_{i,n} class by class, as rows @ x <= upper."""
        x, c_p, c_w = self.problem, self.problem.costs.preemption, self.problem.costs.waste
        drawn = [c.output.samples() for c in x.classes]
        classes = len(drawn)
        rows, columns, values, upper = [], [], [], []
        cost, owner = [], []
        at, row = classes, 0
        for i, (lengths, shares) in enumerate(drawn):
            n, top = lengths.size, x.max_output_tokens[i]
            gamma, theta = at, at + 1 + np.arange(n)
            at += n + 1
            cost += [np.array([x.ambiguity.radius_tokens(x.classes[i].output)]), shares]
            owner.append(np.full(n + 1, i))
            for eta_slope, gamma_slope, right in (
                (-c_p, np.zeros(n), -c_p * lengths),
                (c_w, np.zeros(n), c_w * lengths),
                (-c_p, lengths - top, np.full(n, -c_p * top)),
                (c_w, -lengths, np.zeros(n)),
            ):
                r = row + np.arange(n)
                row += n
                rows += [r, r, r]
                columns += [np.full(n, i), np.full(n, gamma), theta]
                values += [np.full(n, eta_slope), gamma_slope, -np.ones(n)]
                upper.append(right)
        self.dual_rows = sparse.csr_matrix(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(row, at)
        )
        self.dual_upper = np.concatenate(upper)
        self.dual_cost, self.dual_class = np.concatenate(cost), np.concatenate(owner)

    @cached_property
    def relaxation(self) -> Relaxation:
        """The bound that discards partitions in Block 3."""
        return Relaxation(self.data, self.root, {})

    def relaxed(self, low: ArrayLike, high: ArrayLike, objective: float) -> Point | None:
        """The relaxation over low <= z <= high; None where it proves that no policy costs less than given."""
        box = replace(self.root, zl=np.asarray(low, float), zu=np.asarray(high, float)).tightened(self.data)
        if box is None:
            return None
        self.relaxation.load_box(box)
        return self.relaxation.solve(objective, precision=1e-5)

    def remaining(self) -> float:
        """Seconds left of the time limit."""
        return np.inf if self.deadline is None else max(self.deadline - time.perf_counter(), 0.0)

    def expired(self) -> bool:
        """Whether the time limit has passed."""
        return self.remaining() <= 0

    # ---- LP1 ----------------------------------------------------------------------------------

    def route(self, now: Policy, result: Evaluation, level: float = 1.0) -> Floats:
        """(I, K) LP1: the routing that minimises the objective, taken to first order where pi meets W.

        ``level`` bounds the utilisation, and with it the wait that a first routing is promised.
        """
        x, costs = self.problem, self.problem.costs
        group = _Groups.of(x, now)
        classes, configs = group.per_token.shape
        pi, phi = now.routing[:, group.index], x.queueing_factors[group.index]
        # Before anything is routed waits are taken at their largest: LP1 promises nothing it cannot keep.
        waits = wait_at(np.minimum(x.utilisation_bounds, level), x.queueing_factors)
        waits = (np.minimum(result.waits, waits) if pi.any() else waits)[group.index]

        # columns: pi (I x K), s (I), w (K) in units of phi, v (K)
        P = classes * configs
        s, w, v = np.split(P + np.arange(classes + 2 * configs), [classes, classes + configs])
        cost = np.zeros(P + classes + 2 * configs)
        cost[:P] = np.repeat(x.arrival_rates * (result.worst_case - costs.rejection), configs)
        cost[s] = costs.slo * x.arrival_rates
        i, k = np.divmod(np.arange(P), configs)
        shares = (group.per_token * group.held).ravel()
        late = x.service_times[:, group.index] - x.latency_slos[:, None] + waits
        rows = np.zeros((2 * (classes + configs), cost.size))
        admission, memory, load, tardy = np.split(rows, [classes, classes + configs, classes + 2 * configs])
        admission[i, np.arange(P)] = 1.0  # (6d)
        memory[k, np.arange(P)] = (1 + x.headroom) * shares  # (6e), over M_k
        load[k, np.arange(P)] = shares
        load[np.arange(configs), v] = -1.0
        tardy[i, np.arange(P)] = late.ravel()  # (6f)
        tardy[np.arange(classes), s] = -1.0
        tardy[:, w] = pi * phi
        program = _Program(
            cost, np.concatenate([np.ones(P), np.full(classes + configs, np.inf), np.full(configs, level)])
        )
        program.add_rows(
            rows, np.concatenate([np.ones(classes), 1 - group.cached, -group.cached, pi @ waits])
        )
        used = np.flatnonzero(pi.any(axis=0))
        self._add_waits(program, w[used], v[used], result.utilisation[group.index[used]])
        routing = np.zeros_like(now.routing)
        solution = self._solve_with_waits(program, w[used], v[used])
        routing[:, group.index] = solution[:P].reshape(classes, configs)
        return routing

    # ---- LP2 ----------------------------------------------------------------------------------

    def reserve(self, now: Policy, result: Evaluation) -> Floats:
        """(I,) LP2: the output reservations that minimise the objective for the current routing."""
        x, costs = self.problem, self.problem.costs
        group = _Groups.of(x, now)
        classes, configs = group.per_token.shape
        admitted, pi = now.admission, now.routing[:, group.index]
        weights = admitted * x.arrival_rates

        # columns: eta (I), s (I), w (K) in units of phi, v (K), and the worst case: one column per class
        # above tangents, or gamma_i and theta_{i,n}
        s, w, v = np.split(classes + np.arange(classes + 2 * configs), [classes, classes + configs])
        first = 2 * (classes + configs)
        worst = weights[self.dual_class] * self.dual_cost if self.per_sample else weights
        cost = np.zeros(first + worst.size)
        cost[:classes] = _TIE_BREAK * costs.waste * x.arrival_rates
        cost[s] = costs.slo * x.arrival_rates
        cost[first:] = worst
        upper = np.full(cost.size, np.inf)
        upper[:classes], upper[v] = x.max_output_tokens, 1.0
        load = (group.per_token * pi).T
        prompts = x.input_tokens[:, None] - now.prefix_cache[:, group.index] * x.prefix_tokens[:, None]
        at_zero = (load.T * prompts).sum(axis=0)
        rows = np.zeros((2 * configs + classes, first))
        memory, loads, tardy = np.split(rows, [configs, 2 * configs])
        memory[:, :classes] = (1 + x.headroom) * load  # (6e), over M_k
        loads[:, :classes] = load
        loads[np.arange(configs), v] = -1.0
        tardy[np.arange(classes), s] = -1.0  # (6f)
        tardy[:, w] = pi * x.queueing_factors[group.index]
        service = (pi * x.service_times[:, group.index]).sum(axis=1) - admitted * x.latency_slos
        program = _Program(cost, upper)
        program.add_rows(
            rows,
            np.concatenate(
                [1 - group.cached - (1 + x.headroom) * at_zero, -group.cached - at_zero, -service]
            ),
        )
        used = np.flatnonzero(pi.any(axis=0))
        self._add_waits(program, w[used], v[used], result.utilisation[group.index[used]])
        if self.per_sample:
            program.add_rows(*self._dual(first))
            eta = self._solve_with_waits(program, w[used], v[used])[:classes]
        else:
            eta = self._solve_with_cuts(program, first, w[used], v[used])
        return np.where(admitted > _NOTHING, eta, self.best_eta)

    def _dual(self, first: int) -> tuple[sparse.csr_matrix, Floats]:
        """(8c)-(8g) with eta in the first columns and gamma, theta from column ``first`` on."""
        rows, classes = self.dual_rows, len(self.problem.classes)
        columns = np.where(rows.indices < classes, rows.indices, rows.indices + first - classes)
        return sparse.csr_matrix((rows.data, columns, rows.indptr)), self.dual_upper

    def _solve_with_cuts(self, program: _Program, first: int, w: NDArray, v: NDArray) -> Floats:
        """LP2 with the worst case of a class above tangents, added where the solution lies."""
        classes = len(self.problem.classes)

        def rows(cuts: list[tuple[int, float, float]]) -> tuple[Floats, Floats]:
            i, intercept, slope = (np.array(c) for c in zip(*cuts, strict=True))
            found = np.zeros((i.size, program.cost.size))
            found[np.arange(i.size), i], found[np.arange(i.size), first + i] = slope, -1.0
            return found, -intercept

        program.add_rows(*rows([(i, a, b) for i, cuts in enumerate(self.cuts) for a, b in cuts]))
        while True:
            solution = self._solve_with_waits(program, w, v)
            new = []
            for i, eta in enumerate(np.clip(solution[:classes], 0.0, self.problem.max_output_tokens)):
                if program.cost[first + i] <= 0:
                    continue
                intercept, slope = self._cut(i, float(eta))
                value = intercept + slope * eta
                if value - solution[first + i] > _TANGENT_ERROR * (1 + value):
                    new.append((i, intercept, slope))
                    self.cuts[i].append((intercept, slope))
            if not new:
                return solution[:classes]
            program.add_rows(*rows(new))

    def _add_waits(self, program: _Program, wait: NDArray, load: NDArray, now: Floats) -> None:
        """First tangents of v / (1 - v) for pairs of columns: a few everywhere, and where v is now."""
        for w, v, at in zip(wait, load, now, strict=True):
            near = np.clip(at * np.array([0.98, 1.0, 1.02]), 0.0, 0.99)
            program.add_rows(*_tangents(program.cost.size, w, v, np.concatenate([_POINTS, near])))

    def _solve_with_waits(self, program: _Program, wait: NDArray, load: NDArray) -> Floats:
        """Solve with tangents of v / (1 - v) for pairs of columns, added until they are exact enough."""
        n = program.cost.size
        while True:
            x = program.solve()
            self.programs += 1
            utilisation = np.minimum(x[load], 0.9999)
            exact = utilisation / (1 - utilisation)
            missing = np.flatnonzero(exact - x[wait] > _TANGENT_ERROR * (1 + exact))
            if not missing.size:
                return x
            for j in missing:
                program.add_rows(*_tangents(n, wait[j], load[j], utilisation[j : j + 1]))

    # ---- the alternation ----------------------------------------------------------------------

    def run(self, policy: Policy) -> tuple[Policy, Evaluation]:
        """Alternate LP1 and LP2 from a feasible policy until neither lowers the objective."""
        result = evaluate(self.problem, policy)
        while policy.groups.any() and not self.expired():
            before = result.objective
            policy, result = self._step(policy, result)
            if self.fixed is None:
                candidate = repaired(
                    self.problem,
                    policy.groups,
                    self.reserve(policy, result),
                    policy.routing,
                    policy.prefix_cache,
                )
                policy, result = self.better(candidate, policy, result)
            if before - result.objective <= _ALTERNATION_PROGRESS * abs(before):
                break
        return policy, result

    def _step(self, policy: Policy, result: Evaluation) -> tuple[Policy, Evaluation]:
        """From the current routing towards LP1's, as far as the objective falls."""
        target = self.route(policy, result)
        if not policy.routing.any():
            # At the longest wait nobody may be worth serving: then at shorter ones, of emptier groups.
            for level in reversed(_LEVELS):
                if target.any():
                    break
                target = self.route(policy, result, level)
        eta = policy.reservations - self.problem.input_tokens
        best = policy, result
        length = 1.0
        for _ in range(_HALVINGS):
            routing = policy.routing + length * (target - policy.routing)
            candidate = self.better(
                repaired(self.problem, policy.groups, eta, routing, policy.prefix_cache), *best
            )
            if best[0] is not policy and candidate[0] is best[0]:
                break
            best = candidate
            length /= 2
        return best

    def better(self, candidate: Policy, policy: Policy, result: Evaluation) -> tuple[Policy, Evaluation]:
        found = evaluate(self.problem, candidate)
        return (candidate, found) if self.improves(found, result) else (policy, result)

    @staticmethod
    def improves(found: Evaluation, result: Evaluation) -> bool:
        """Whether a policy is feasible and cheaper by more than rounding."""
        return found.feasible and found.objective < result.objective - _PROGRESS * abs(result.objective)


# ---- Block 2 ----------------------------------------------------------------------------------------


def _cache_prefixes(problem: Problem, policy: Policy, result: Evaluation) -> tuple[Policy, Evaluation]:
    """Block 2: cache where more than one request per group shares the prefix, where (6e) allows it."""
    z = policy.groups
    shared = problem.offered_loads * policy.routing / np.maximum(z, 1)
    wanted = (shared > 1) & (z > 0) & (problem.prefix_tokens > 0)[:, None]
    held = policy.reservations[:, None] - wanted * problem.prefix_tokens[:, None]
    memory = (1 + problem.headroom) * (shared * held).sum(axis=0) + problem.prefix_tokens @ wanted
    fits = memory <= problem.kv_tokens
    candidate = Policy.of(
        problem,
        z,
        policy.reservations - problem.input_tokens,
        policy.routing,
        np.where(fits, wanted, policy.prefix_cache),
    )
    found = evaluate(problem, candidate)
    # Less is held on every configuration, so no wait and no cost rises.
    better = found.feasible and found.objective <= result.objective
    return (candidate, found) if better else (policy, result)


# ---- Block 3 ----------------------------------------------------------------------------------------


def _integer_program(
    cost: Floats,
    rows: sparse.csr_matrix,
    right: Floats,
    whole: Floats,
    lower: Floats,
    upper: Floats,
    **options: float,
) -> Floats | None:
    """(n,) x of least cost with ``rows @ x <= right`` within its bounds, whole where ``whole`` is 1."""
    from scipy.optimize import LinearConstraint, milp  # here, to keep half a second out of the start

    return milp(
        cost,
        constraints=LinearConstraint(rows, -np.inf, right),
        integrality=whole,
        bounds=(lower, upper),
        options=options,
    ).x


def _literal_groups(problem: Problem, policy: Policy) -> NDArray[np.int64]:
    """Block 3 with r, pi and delta kept: the best numbers of groups for the configurations in use.

    W_k is a convex function of z_k on the whole numbers, so its chords make the choice a small MILP.
    """
    used = np.flatnonzero(policy.routing.sum(axis=0) > 0)
    z = np.zeros(len(problem.configs), dtype=np.int64)
    if not used.size:
        return z
    x, n = problem, problem.group_gpus[used]
    held = policy.reservations[:, None] - policy.prefix_cache[:, used] * x.prefix_tokens[:, None]
    load = (x.offered_loads[:, used] * policy.routing[:, used] * held).sum(axis=0) / x.kv_tokens[used]
    cached = x.prefix_tokens @ policy.prefix_cache[:, used] / x.kv_tokens[used]
    low = np.maximum(np.ceil((1 + x.headroom) * load / (1 - cached) * (1 - 1e-9)), 1.0)
    high = np.maximum((x.gpus - n @ low + n * low) // n, low)
    pi, phi = policy.routing[:, used], x.queueing_factors[used]
    service = (pi * x.service_times[:, used]).sum(axis=1) - policy.admission * x.latency_slos
    classes, configs = pi.shape

    # columns: z (k), W (k), s (I)
    columns = 2 * configs + classes
    rows, uppers = [], []
    for k in range(configs):
        grid = np.arange(low[k], high[k] + 1)
        v = load[k] / grid + cached[k]
        wait = phi[k] * v / (1 - v)
        slope = np.diff(wait) if grid.size > 1 else np.zeros(1)
        chord = np.zeros((slope.size, columns))
        chord[:, k], chord[:, configs + k] = slope, -1.0
        rows.append(chord)
        uppers.append(slope * grid[: slope.size] - wait[: slope.size])
    tardy = np.hstack([np.zeros((classes, configs)), pi, -np.eye(classes)])
    budget = np.concatenate([n, np.zeros(configs + classes)])[None, :]
    matrix = np.vstack([*rows, tardy, budget])
    answer = _integer_program(
        np.concatenate([x.costs.gpu * n, np.zeros(configs), x.costs.slo * x.arrival_rates]),
        sparse.csr_matrix(matrix),
        np.concatenate([*uppers, -service, [x.gpus]]),
        np.concatenate([np.ones(configs), np.zeros(configs + classes)]),
        np.concatenate([low, np.zeros(configs + classes)]),
        np.concatenate([high, np.full(configs + classes, np.inf)]),
        mip_rel_gap=1e-9,
    )
    if answer is None:
        return policy.groups
    z[used] = np.round(answer[:configs]).astype(np.int64)
    return z


def _caps(problem: Problem, policy: Policy, result: Evaluation) -> Iterator[Floats]:
    """Utilisations (K,) at which Block 3 prices the groups: the present ones, then a range of others.

    A token held on k takes n_k / (M_k v_k) GPUs and waits in proportion to phi_k v_k / (1 - v_k). At one
    price for both everywhere the sum is least where v_k / (1 - v_k) is in proportion to
    (n_k / (phi_k M_k))^1/2: one number, the utilisation of the median configuration, gives all v_k.
    """
    possible = problem.max_groups > 0
    if not possible.any():
        return
    shape = np.sqrt(problem.group_gpus / (problem.queueing_factors * problem.kv_tokens))
    shape = shape / np.median(shape[possible])
    top = problem.utilisation_bounds

    def at(ratio: float) -> Floats:
        return np.minimum(ratio * shape / (1 + ratio * shape), top)

    used = policy.routing.any(axis=0)
    if used.any():
        v = np.minimum(result.utilisation, top)
        load = (policy.groups * problem.kv_tokens * v)[used]
        ratio = np.average((v / (1 - v) / shape)[used], weights=load)
        yield np.where(used, v, at(ratio))
    for level in _LEVELS:
        yield at(level / (1 - level))


def _priced_groups(
    inner: _Block1, policy: Policy, result: Evaluation, caps: Floats
) -> tuple[NDArray[np.int64], Floats, Bools] | None:
    """(K,) z, (I, K) pi and delta of least cost for given reservations, prefixes and utilisation caps.

    With v_k <= cap_k and the wait that belongs to cap_k the problem is linear in (z, pi), and whatever
    it promises holds: (6e) bounds the load by z_k M_k, a lower utilisation only waits less. A program with
    K whole numbers, whatever J is; it ends within `_BLOCK3_GAP` of the objective. A configuration without
    groups has no prefixes of its own: there those count that the class has on most of its routing.
    """
    x, costs, rates = inner.problem, inner.problem.costs, inner.problem.arrival_rates
    mostly = (policy.routing * policy.prefix_cache).sum(axis=1) > 0.5 * policy.admission
    delta = np.where(policy.groups > 0, policy.prefix_cache, mostly[:, None])
    prefixes = x.prefix_tokens @ delta / x.kv_tokens
    room = np.minimum((1 - prefixes) / (1 + x.headroom), caps - prefixes)
    index = np.flatnonzero((x.max_groups > 0) & (room > 0))
    if not index.size:
        return None
    held = policy.reservations[:, None] - delta[:, index] * x.prefix_tokens[:, None]
    share = x.offered_loads[:, index] * held / x.kv_tokens[index]
    waits = x.queueing_factors[index] * caps[index] / (1 - caps[index])
    late = x.service_times[:, index] + waits - x.latency_slos[:, None]
    classes, configs = share.shape
    pairs = classes * configs

    # columns: z (k), pi (I x k), s (I); rows: memory (k), admission (I), tardiness (I), GPUs
    i, k = np.divmod(np.arange(pairs), configs)
    z, pi = np.arange(configs), configs + np.arange(pairs)
    s = configs + pairs + np.arange(classes)
    entries = (
        (k, pi, share.ravel()),
        (z, z, -room[index]),
        (configs + i, pi, np.ones(pairs)),
        (configs + classes + i, pi, late.ravel()),
        (configs + classes + np.arange(classes), s, -np.ones(classes)),
        (np.full(configs, configs + 2 * classes), z, x.group_gpus[index].astype(float)),
    )
    row, column, value = (np.concatenate(part) for part in zip(*entries, strict=True))
    right = np.concatenate([np.zeros(configs), np.ones(classes), np.zeros(classes), [x.gpus]])
    whole = np.concatenate([np.ones(configs), np.zeros(pairs + classes)])
    upper = np.concatenate([x.max_groups[index], np.ones(pairs), np.full(classes, np.inf)])
    worth = np.repeat(rates * (result.worst_case - costs.rejection), configs)
    # The program leaves out what rejecting all costs, and its gap is relative to what is left.
    rejecting_all = costs.rejection * rates.sum()
    gap = _BLOCK3_GAP * result.objective / max(rejecting_all, result.objective, 1e-9)
    scale = max(rejecting_all, 1e-9) / 1e4
    answer = _integer_program(
        np.concatenate([costs.gpu * x.group_gpus[index], worth, costs.slo * rates]) / scale,
        sparse.csr_matrix((value, (row, column)), shape=(right.size, upper.size)),
        right,
        whole,
        np.zeros(upper.size),
        upper,
        mip_rel_gap=gap,
        time_limit=inner.remaining(),
    )
    if answer is None:
        return None
    groups, routing = np.zeros(len(x.configs), dtype=np.int64), np.zeros_like(policy.routing)
    groups[index] = np.round(answer[z]).astype(np.int64)
    routing[:, index] = answer[pi].reshape(classes, configs)
    return groups, routing, delta


def _partitions(problem: Problem, limit: int) -> NDArray[np.int64] | None:
    """(|Z|, K) all z with sum_k n_k z_k <= J, or None when there are more than ``limit``."""
    rows = np.zeros((1, 0), dtype=np.int64)
    left = np.array([problem.gpus])
    for n in problem.group_gpus:
        counts = left // n + 1
        if counts.sum() > limit:
            return None
        parent = np.repeat(np.arange(rows.shape[0]), counts)
        z = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.column_stack([rows[parent], z])
        left = left[parent] - n * z
    return rows


def _adjacent_partitions(problem: Problem, z: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Partitions that differ from z by more groups of one configuration, fewer, or an exchange.

    Numbers change by 1, 2, 4, ...; an exchange removes groups of one configuration and adds as many of
    another as their GPUs, and those still free, allow. Exchanges come first.
    """
    n = problem.group_gpus
    free = problem.gpus - n @ z
    steps = [2**b for b in range(int(z.max(initial=1)).bit_length())]
    for out in np.flatnonzero(z):
        for step in steps:
            if step > z[out]:
                break
            for into in np.flatnonzero(np.arange(z.size) != out):
                fits = step * n[out] // n[into]
                for more in {fits, min((free + step * n[out]) // n[into], fits + 1)}:
                    if more > 0:
                        change = z.copy()
                        change[out] -= step
                        change[into] += more
                        yield change
    for k in range(z.size):
        for step in steps:
            if step * n[k] <= free:
                change = z.copy()
                change[k] += step
                yield change
            if step <= z[k]:
                change = z.copy()
                change[k] -= step
                yield change


def first_groups(problem: Problem) -> NDArray[np.int64]:
    """z^(0): each class where it needs the fewest GPUs, rounded up, while GPUs last."""
    eta = problem.unconstrained_reservations()
    held = problem.input_tokens + eta
    groups = (1 + problem.headroom) * problem.offered_loads * held[:, None] / problem.kv_tokens
    z = np.zeros(len(problem.configs), dtype=np.int64)
    possible = problem.max_groups > 0
    if not possible.any():
        return z
    cheapest = np.argmin(np.where(possible, groups * problem.group_gpus, np.inf), axis=1)
    wanted = np.bincount(cheapest, weights=groups[np.arange(len(held)), cheapest], minlength=z.size)
    left = problem.gpus
    for k in np.argsort(-wanted * problem.group_gpus, kind="stable"):
        z[k] = min(int(np.ceil(wanted[k])), left // problem.group_gpus[k])
        left -= z[k] * problem.group_gpus[k]
    return z


# ---- Algorithm 1 --------------------------------------------------------------------------------------


def solve(
    problem: Problem,
    *,
    block3: str = "resolve",
    per_sample: bool = False,
    time_limit: float | None = None,
    start: Policy | Solution | ArrayLike | None = None,
    reservations: ArrayLike | None = None,
    max_iterations: int = 1000,
    enumerate_up_to: int = 500,
) -> Solution:
    """Algorithm 1 (BCD-DRO).

    Parameters
    ----------
    block3 : ``resolve`` or ``literal``; see the module.
    per_sample : solve LP2 with one theta per sample, as printed, instead of tangents of the closed form.
        Both take the same path.
    time_limit : seconds; the best policy so far is returned.
    start : a policy or solution, or z^(0) as (K,) whole numbers; `first_groups` unless given.
    reservations : (I,) prescribed r_i in tokens, which then stay as they are.
    max_iterations : T_max.
    enumerate_up_to : where there are at most so many z, ``resolve`` branches on z and bounds by the
        relaxation: no z is better for Block 1, which goes on from the present reservations and routing
        and may end elsewhere from others. Beyond, it ends at a z that
        withstands two searches. One tries adjacent partitions (a group more or less, an exchange, in
        steps 1, 2, 4, ...); it is left out where there are too many for the size of the programs
        (``_NEIGHBOURHOOD``). The other takes the z of least cost, pi re-optimised, for the present
        reservations and prefixes at each of a few choices of utilisations to stay below (``_caps``), and
        from what Block 1 makes of it once more. Each is a branch and bound over z and pi together, exact
        to 1e-4 of the objective (``_BLOCK3_GAP``) whatever J is. No z that either search finds is better
        for Block 1. That is no bound on what other z could bring.

    Returns
    -------
    Solution
        ``history`` holds the objective after each accepted block and falls; ``iterations`` counts
        rounds of the three blocks. ``status`` is ``feasible``: a heuristic proves nothing.
    """
    if block3 not in BLOCK3:
        raise ValueError(f"block3 is {block3!r}; expected one of {BLOCK3}")
    if per_sample and not isinstance(problem.ambiguity, Wasserstein1):
        raise ValueError(
            "per_sample=True solves the dual of a Wasserstein-1 ball, not of "
            f"{type(problem.ambiguity).__name__}; use per_sample=False"
        )
    started = time.perf_counter()
    fixed = None if reservations is None else Data.of(problem, reservations).low
    inner = _Block1(
        problem,
        per_sample=per_sample,
        fixed=fixed,
        deadline=None if time_limit is None else started + time_limit,
    )
    policy = _start(problem, start.policy if isinstance(start, Solution) else start, fixed)
    result = evaluate(problem, policy)
    history = [result.objective]

    def accept(found: tuple[Policy, Evaluation]) -> None:
        nonlocal policy, result
        policy, result = found
        if result.objective < history[-1]:
            history.append(result.objective)

    iterations = 0
    while iterations < max_iterations and not inner.expired():
        iterations += 1
        before = policy.groups, policy.prefix_cache
        accept(inner.run(policy))
        accept(_cache_prefixes(problem, policy, result))
        if block3 == "literal":
            z = _literal_groups(problem, policy)
            eta = policy.reservations - problem.input_tokens
            moved = Policy.of(problem, z, eta, policy.routing, policy.prefix_cache)
            accept(inner.better(moved, policy, result))
        else:
            settled = np.array_equal(before[1], policy.prefix_cache)
            accept(_resolve(inner, policy, result, enumerate_up_to, settled))
        if np.array_equal(before[0], policy.groups) and np.array_equal(before[1], policy.prefix_cache):
            break
    return Solution.of(
        problem,
        policy,
        seconds=time.perf_counter() - started,
        status=Status.FEASIBLE,
        method=f"bcd-{block3}{'-per-sample' if per_sample else ''}",
        iterations=iterations,
        history=history,
    )


def _start(problem: Problem, start: Policy | ArrayLike | None, fixed: Floats | None) -> Policy:
    """The initial policy: nothing routed, mean reservations, no prefix cached (line 1 of Algorithm 1).

    A class that costs more at its mean than to be rejected would never be routed: it has the reservation of
    least worst-case cost.
    """
    shape = len(problem.classes), len(problem.configs)
    if isinstance(start, Policy):
        if start.routing.shape != shape:
            raise ValueError(
                f"start: a policy for {start.routing.shape} classes x configurations; expected {shape}"
            )
        eta = start.reservations - problem.input_tokens if fixed is None else fixed
        return repaired(problem, start.groups, eta, start.routing, start.prefix_cache)
    z = first_groups(problem) if start is None else np.asarray(start)
    if z.shape != shape[1:] or problem.group_gpus @ z > problem.gpus:
        raise ValueError(f"start: z = {z.tolist()}; expected {shape[1]} numbers within {problem.gpus} GPUs")
    if fixed is None:
        means = np.array([c.output.mean for c in problem.classes])
        worst = np.array([problem.worst_case(i, float(e)) for i, e in enumerate(means)])
        fixed = np.where(worst < problem.costs.rejection, means, problem.unconstrained_reservations())
    return Policy.of(problem, z, fixed, np.zeros(shape), np.zeros(shape, dtype=bool))


def _resolve(
    inner: _Block1, policy: Policy, result: Evaluation, enumerate_up_to: int, settled: bool
) -> tuple[Policy, Evaluation]:
    """Block 3 with Block 1 solved again for each z that no bound excludes; see :func:`solve`.

    ``settled``: Block 2 changed nothing in this round. The search by prices waits for that.
    """
    problem = inner.problem

    def tried(z: NDArray[np.int64], incumbent: tuple[Policy, Evaluation]) -> tuple[Policy, Evaluation]:
        now = incumbent[0]
        eta = now.reservations - problem.input_tokens
        found = inner.run(repaired(problem, z, eta, now.routing, now.prefix_cache))
        return found if inner.improves(found[1], incumbent[1]) else incumbent

    best = policy, result
    if _partitions(problem, enumerate_up_to) is not None:
        boxes = [(-np.inf, 0, np.zeros(len(problem.configs)), problem.max_groups.astype(float))]
        order = 1
        while boxes and not inner.expired():
            bound, _, low, high = heapq.heappop(boxes)
            if bound >= best[1].objective:
                break
            point = inner.relaxed(low, high, best[1].objective)
            if point is None:
                continue
            if np.array_equal(low, high):
                best = tried(low.astype(np.int64), best)
                continue
            k = int(
                np.argmax(np.where(high > low, np.abs(point.z - np.round(point.z)) + 1e-3 * (high - low), -1))
            )
            at = np.clip(np.floor(point.z[k]), low[k], high[k] - 1)
            for child_low, child_high in ((low[k], at), (at + 1, high[k])):
                lower, upper = low.copy(), high.copy()
                lower[k], upper[k] = child_low, child_high
                heapq.heappush(boxes, (point.bound, order, lower, upper))
                order += 1
        return best
    most = _NEIGHBOURHOOD // problem.offered_loads.size
    near = list(islice(_adjacent_partitions(problem, policy.groups), most + 1))
    for z in near if len(near) <= most else ():
        if inner.expired():
            return best
        if inner.relaxed(z, z, result.objective) is None:
            continue
        found = tried(z, best)
        if found is not best:
            # Prefixes and reservations follow a move before the next one is sought.
            return found
    for caps in _caps(problem, policy, result) if settled else ():
        now = policy, result
        for _ in range(_PRICINGS):
            priced = None if inner.expired() else _priced_groups(inner, *now, caps)
            if priced is None or not priced[0].any():
                break
            z, routing, delta = priced
            eta = now[0].reservations - problem.input_tokens
            candidate = repaired(problem, z, eta, routing, delta)
            now = inner.run(_cache_prefixes(problem, candidate, evaluate(problem, candidate))[0])
            if inner.improves(now[1], best[1]):
                best = now
            caps = next(_caps(problem, *now))
    return best
