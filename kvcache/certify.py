"""The joint problem solved to a proven gap: branch and bound over the boxes of `kvcache.relaxation`.

Every node is a box, its bound the optimum of the linear relaxation there, so the least bound among the
boxes that are still open is a lower bound on the cost of every policy, at any moment. Best first; ties in
the order of creation. Nothing but the time limit reads the clock: without one, two runs do the same.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.instance import Instance
from kvcache.polish import fit, polish, prefixes_for
from kvcache.policy import Policy, Solution, evaluate
from kvcache.relaxation import Box, Data, Point, Relaxation, wait

__all__ = ["certify"]

Floats = NDArray[np.float64]

INTEGRAL = 1e-6
RELIABLE = 2


@dataclass(frozen=True)
class Branch:
    """A way to split a box in two: its kind and place, the two boxes, and the cost the LP misses there."""

    key: tuple
    children: tuple[Box, Box]
    worth: float


@dataclass
class _Search:
    data: Data
    gap: float
    deadline: float
    node_limit: float
    progress: Callable[[float, float, int], None] | None
    best: Policy | None = None
    value: float = np.inf
    history: list[float] = field(default_factory=list)
    nodes: int = 0
    tried: set[tuple] = field(default_factory=set)
    pruned: float = np.inf
    open: list[tuple] = field(default_factory=list)
    created: int = 0
    pool: dict = field(default_factory=dict)
    models: dict[tuple[int, ...], Relaxation] = field(default_factory=dict)
    records: dict[tuple, list[list[float]]] = field(default_factory=dict)

    # ---- incumbent ----------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """A box whose bound reaches this cannot hold a policy that is better by more than the gap."""
        return self.value - 0.98 * self.gap * abs(self.value)

    def offer(self, policy: Policy) -> None:
        result = evaluate(self.data.instance, policy)
        if result.feasible and result.objective < self.value:
            self.best, self.value = policy, result.objective
            self.history.append(self.value)

    def from_point(self, point: Point, z: Floats, *, steps: int) -> None:
        """A policy at z near a solution of the relaxation, polished."""
        data = self.data
        admitted = point.pi.sum(axis=1)
        eta = np.where(admitted > 1e-9, point.h.sum(axis=1) / np.maximum(admitted, 1e-9), data.high)
        binds = (point.memory_price > 0) | (z > 0)
        policy = fit(data, z, eta, point.pi, prefixes_for(data, z, point.pi, binds))
        value = evaluate(data.instance, policy).objective
        if steps < 10 and value > self.value * (1 + 10 * self.gap):
            return
        polished, _ = polish(data, policy, steps=steps, precision=0.05 * self.gap)
        self.offer(polished)

    def try_groups(self, box: Box, z: Floats, *, steps: int = 10) -> None:
        """Search at fixed groups, unless their own relaxation says that nothing better is there."""
        key = tuple(z.astype(int).tolist())
        if key in self.tried:
            return
        self.tried.add(key)
        fixed = Box(**{**vars(box), "zl": z, "zu": z}).tightened(self.data)
        if fixed is None:
            return
        relaxation = self.model(fixed)
        relaxation.load_box(fixed)
        point = relaxation.solve(self.cutoff, rounds=3, precision=self.gap / 10)
        if point is not None:
            self.from_point(point, z, steps=steps)

    def roundings(self, point: Point) -> list[Floats]:
        """Whole groups near the relaxed ones, within the budget."""
        n, budget = self.data.instance.group_gpus, self.data.instance.gpus
        found = []
        for start in (np.floor(point.z + INTEGRAL), np.round(point.z), np.ceil(point.z - INTEGRAL)):
            z = start.copy()
            # Take away what is least wanted, then give what is most wanted.
            while n @ z > budget:
                over = np.where(z > 0, z - point.z, -np.inf)
                z[int(np.argmax(over))] -= 1
            wish = point.z - z
            for k in np.argsort(-wish, kind="stable"):
                if wish[k] > INTEGRAL and n @ z + n[k] <= budget:
                    z[k] += 1
            if not any(np.array_equal(z, other) for other in found):
                found.append(z)
        return found

    # ---- branching ----------------------------------------------------------------------------

    def branches(self, box: Box, point: Point) -> list[Branch]:
        """Every split that removes something the relaxation gets wrong, with the cost it hides."""
        data, instance = self.data, self.data.instance
        out = []

        def split(key: tuple, worth: float, low: Box, high: Box) -> None:
            out.append(Branch(key, (low, high), worth))

        for k in np.flatnonzero(np.abs(point.z - np.round(point.z)) > INTEGRAL).tolist():
            down = float(np.floor(point.z[k]))
            part = point.z[k] - down
            price = point.memory_price[k] + instance.costs.gpu * instance.group_gpus[k]
            split(
                ("z", k),
                min(part, 1 - part) * price,
                box.with_("zu", k, down),
                box.with_("zl", k, down + 1),
            )

        # GPUs in use come in multiples of what the group sizes share.
        unit = float(np.gcd.reduce(instance.group_gpus))
        gpus = float(instance.group_gpus @ point.z)
        down = np.floor(gpus / unit + INTEGRAL) * unit
        if gpus - down > INTEGRAL * unit:
            worth = min(gpus - down, down + unit - gpus) * instance.costs.gpu
            split(("g",), worth, replace(box, gu=down), replace(box, gl=down + unit))

        true_v = np.where(point.z > 1e-9, point.load / np.maximum(point.z, 1e-9), 0.0)
        true_v = np.clip(true_v, box.vl, np.minimum(box.vu, 1 - 1e-6))
        # Tardiness that the relaxation does not see, shared out by where it hides.
        factor = instance.queueing_factors
        waits = wait(true_v)
        response = instance.service_times + factor * waits - instance.latency_slos[:, None]
        true_late = np.maximum((point.pi * response).sum(axis=1), 0.0)
        unseen = instance.costs.slo * instance.arrival_rates * np.maximum(true_late - point.late, 0.0)
        missed = np.maximum(point.pi * waits - point.q, 0.0) * factor
        missed *= (unseen / np.maximum(missed.sum(axis=1), 1e-300))[:, None]
        for k in np.flatnonzero(missed.sum(axis=0) > 0).tolist():
            low, high = box.vl[k], box.vu[k]
            at = float(np.clip(true_v[k], low + 0.1 * (high - low), high - 0.1 * (high - low)))
            if high - low > 1e-6:
                split(("v", k), float(missed[:, k].sum()), box.with_("vu", k, at), box.with_("vl", k, at))

        headroom = 1 + instance.headroom
        u = instance.offered_loads
        saved = headroom * u * point.y - point.t
        real = np.where(
            box.dl, headroom * u * point.pi - point.z, np.where(box.du, np.maximum(headroom * u * point.pi - point.z, 0), 0)
        )
        share = instance.prefix_tokens[:, None] / instance.kv_tokens
        # A price of zero can mean that the hidden memory made room.
        floor = 1e-6 * abs(point.bound)
        hidden = (saved - real) * share * np.maximum(point.memory_price + point.load_price, floor)
        undecided = box.du & ~box.dl
        for i, k in zip(*np.nonzero(undecided & (hidden > 0)), strict=True):
            at = (int(i), int(k))
            split(("d", *at), float(hidden[at]), box.with_("du", at, False), box.with_("dl", at, True))

        admitted = point.pi.sum(axis=1)
        for i in np.flatnonzero((data.high > data.low) & (admitted > 1e-6)).tolist():
            used = np.flatnonzero(point.pi[i] > 1e-6)
            etas = point.h[i, used] / point.pi[i, used]
            if used.size < 2 or etas.max() - etas.min() < 1e-3:
                continue
            mean = float(point.h[i].sum() / admitted[i])
            values = [data.cut(i, float(np.clip(e, data.low[i], data.high[i])))[0] for e in (*etas, mean)]
            price = instance.offered_loads[i, used] / instance.kv_tokens[used] * (
                headroom * point.memory_price + point.load_price
            )[used]
            # Against the Lagrangian: cost and memory of the mean less those of each.
            worth = instance.arrival_rates[i] * (point.pi[i, used] @ (values[-1] - np.array(values[:-1])))
            worth += float((point.pi[i, used] * price) @ (mean - etas))
            if worth > 0:
                split(("e", i), float(worth), box.with_("eu", i, mean), box.with_("el", i, mean))
        return out

    def model(self, box: Box) -> Relaxation:
        """The smallest relaxation at hand for a box; a new one where that is much too large.

        Configurations that a box leaves no groups do not burden its linear programs.
        """
        needed = set(np.flatnonzero(box.zu > 0).tolist())
        names = [name for name in self.models if needed <= set(name)]
        name = min(names, key=len, default=None)
        if name is None or 3 * len(needed) <= 2 * len(name):
            name = tuple(sorted(needed))
            only = np.isin(np.arange(box.zu.size), name)
            whole = Box.root(self.data)
            self.models[name] = Relaxation(self.data, replace(whole, pu=whole.pu * only), self.pool)
        return self.models[name]

    def around(self, box: Box, z: Floats) -> list[Box]:
        """The box cut into one with these groups and, configuration by configuration, what lies below and above."""
        out = []
        for k in np.flatnonzero(box.zl < box.zu).tolist():
            if z[k] > box.zl[k]:
                out.append(box.with_("zu", k, z[k] - 1))
            if z[k] < box.zu[k]:
                out.append(box.with_("zl", k, z[k] + 1))
            box = box.with_("zl", k, z[k]).with_("zu", k, z[k])
        return [box, *out]

    # ---- search -------------------------------------------------------------------------------

    @property
    def lower_bound(self) -> float:
        least = min((node[0] for node in self.open), default=np.inf)
        return min(least, self.pruned, self.value)

    def push(self, bound: float, box: Box, basis: object) -> None:
        self.created += 1
        heapq.heappush(self.open, (bound, self.created, box, basis))

    def run(self, root: Box) -> None:
        data = self.data
        self.push(0.0, root, None)
        while self.open:
            bound = self.open[0][0]
            if bound >= self.cutoff:
                break
            if self.nodes >= self.node_limit or time.perf_counter() > self.deadline:
                break
            bound, _, box, basis = self.open[0]
            relaxation = self.model(box)
            relaxation.load_box(box)
            if basis is not None and basis[0] is relaxation:
                relaxation.set_basis(basis[1])
            point = relaxation.solve(self.cutoff, precision=self.gap / 20)
            self.nodes += 1
            heapq.heappop(self.open)
            if self.progress is not None:
                self.progress(min(bound, self.lower_bound), self.value, self.nodes)
            if point is None:
                self.pruned = min(self.pruned, max(bound, self.cutoff))
                continue
            bound = max(bound, point.bound)
            basis = (relaxation, relaxation.basis())
            if np.all(np.abs(point.z - np.round(point.z)) < INTEGRAL):
                self.from_point(point, np.round(point.z), steps=6)
            if self.nodes == 1 or self.nodes % 10 == 0 or np.all(np.abs(point.z - np.round(point.z)) < INTEGRAL):
                for z in self.roundings(point):
                    self.try_groups(root, z)
            whole = np.abs(point.z - np.round(point.z)) < INTEGRAL
            if whole.all() and np.any(box.zl < box.zu):
                for child in self.around(box, np.round(point.z)):
                    child = child.tightened(data)
                    if child is not None:
                        self.push(bound, child, basis)
                continue
            candidates = [c for c in self.branches(box, point) if c.key[0] in ("z", "g") or whole.all()]
            if not candidates:
                self.pruned = min(self.pruned, bound)
                continue
            for child, child_bound in self.choose(box, point, bound, basis, candidates):
                self.push(child_bound, child, basis)

    def choose(
        self, box: Box, point: Point, bound: float, basis: object, branches: list[Branch]
    ) -> list[tuple[Box, float]]:
        """The two boxes of the most promising split, each with the bound known for it.

        A split is judged by what its children gain, (gain of one) x (gain of the other). The gains are
        tried on the relaxation until a split at that place has been seen often enough; from then on they
        are predicted from the mean of gain per worth.
        """
        room = max(self.cutoff - bound, 1e-9 * abs(self.value))
        if np.all(box.zl == box.zu):
            widest = max(branches, key=lambda b: b.worth)
            found = [child.tightened(self.data) for child in widest.children]
            return [(child, bound) for child in found if child is not None]
        short = []
        for kind, most in (("g", 1), ("z", 3), ("v", 2), ("d", 1), ("e", 1)):
            same = sorted((b for b in branches if b.key[0] == kind), key=lambda b: -b.worth)
            short += same[:most]
        best, best_score, best_children = None, -1.0, []
        for branch in short:
            record = self.records.setdefault(branch.key, [])
            children = [child.tightened(self.data) for child in branch.children]
            if len(record) >= RELIABLE:
                ratio = np.mean(record, axis=0)
                gains = [np.inf if c is None else r * branch.worth for c, r in zip(children, ratio, strict=True)]
                bounds = [bound, bound]
            else:
                bounds = []
                for child in children:
                    if child is None:
                        bounds.append(np.inf)
                        continue
                    relaxation, start = basis
                    relaxation.load_box(child)
                    relaxation.set_basis(start)
                    tried = relaxation.solve(self.cutoff, rounds=1)
                    bounds.append(np.inf if tried is None else max(tried.bound, bound))
                gains = [b - bound for b in bounds]
                record.append([min(g, room) / max(branch.worth, 1e-12) for g in gains])
            low, high = (max(min(g, room) / room, 1e-6) for g in gains)
            score = low * high
            if score > best_score:
                best, best_score = branch, score
                best_children = list(zip(children, bounds, strict=True))
            if low >= 1 and high >= 1:
                break
        out = []
        for child, child_bound in best_children:
            if child is None:
                continue
            if child_bound >= self.cutoff:
                self.pruned = min(self.pruned, self.cutoff)
                continue
            out.append((child, child_bound))
        return out


def certify(
    instance: Instance,
    *,
    time_limit: float | None = None,
    gap: float = 1e-4,
    start: Policy | Solution | None = None,
    reservations: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    node_limit: int | None = None,
    progress: Callable[[float, float, int], None] | None = None,
) -> Solution:
    """Certified."""
    began = time.perf_counter()
    data = Data.of(instance, None if reservations is None else np.asarray(reservations, dtype=float))
    search = _Search(
        data,
        gap,
        np.inf if time_limit is None else began + time_limit,
        np.inf if node_limit is None else node_limit,
        progress,
    )
    classes, configs = instance.offered_loads.shape
    nothing = np.zeros((classes, configs))
    root, deployed = Box.root(data), np.zeros(configs)
    if groups is not None:
        deployed = np.asarray(groups, dtype=float)
        root = replace(root, zl=deployed, zu=deployed)
    search.offer(Policy.of(instance, deployed, data.high, nothing, nothing.astype(bool)))
    search.run(root.tightened(data))
    bound = search.lower_bound
    return Solution.of(
        instance,
        search.best,
        seconds=time.perf_counter() - began,
        status="optimal" if search.value - bound <= gap * abs(search.value) else "feasible",
        method="certified",
        lower_bound=bound,
        iterations=search.nodes,
        history=search.history,
    )
