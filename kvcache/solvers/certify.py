"""The joint problem solved to a proven gap: branch and bound over the boxes of `kvcache.solvers.relaxation`.

Every node is a box, its bound the optimum of the linear relaxation there, so the least bound among the
boxes that are still open is a lower bound on the cost of every policy, at any moment. Best first; ties in
the order of creation. Nothing but the time limit reads the clock: without one, two runs do the same.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.policy import Policy, Solution, Status, evaluate
from kvcache.problem import Problem
from kvcache.solvers.levels import Grid, Levels, grid
from kvcache.solvers.polish import fit, polish, prefixes_for
from kvcache.solvers.relaxation import (
    Box,
    Cut,
    Data,
    Point,
    Program,
    Relaxation,
    Tangents,
    packed,
    unpacked,
    wait,
)

__all__ = ["Certificate", "solve"]

Floats = NDArray[np.float64]
#: Called after every box with the lower bound, the best cost and the number of boxes done.
Progress = Callable[[float, float, int], None]

# A number of groups within this of a whole one is whole.
INTEGRAL = 1e-6
# Splits tried on the relaxation per box, and trials of one split after which its record is trusted.
TRIED = 4
# Splits that a first look at some groups goes down.
DEPTH = 6
# Boxes of a search at the best groups alone, which happens every so many boxes of the whole search.
WIDTH = 60
EVERY = 20
RELIABLE = 2
# Levels of each configuration at first, and how often those that matter are divided.
LEVELS = 3
DIVISIONS = 4
# Programs get a unit of their own where the best cost is below this share of theirs.
FAR = 1e-2
# Parts of a proof beyond which it is not worth keeping.
MOST_PARTS = 4000


@dataclass(frozen=True)
class Branch:
    """A way to split a box in two: its kind and place, the two boxes, and the cost the LP misses there."""

    key: tuple
    children: tuple[Box, Box]
    worth: float


@dataclass(order=True)
class _Node:
    """A box whose policies cost ``bound`` at least; ``basis`` is where the relaxation starts from.

    ``part`` is the box before anything was concluded from the problem: bounds that splits set, alone.
    """

    bound: float
    number: int
    box: Box = field(compare=False)
    part: Box = field(compare=False)
    basis: tuple[Program, object] | None = field(compare=False, default=None)


@dataclass(frozen=True)
class Certificate:
    """How a proof went, to be repeated on another problem; see `certify`.

    Parameters
    ----------
    group_gpus : (K,) of the problem. Splits on the GPUs in use rest on their common divisor.
    parts : boxes that together hold every policy there is.
    bases : per part, the program that bounded it last, by its place in ``programs``, and its basis.
    programs : of each, the configurations it has, its cuts, and its grid if it is one of `Levels`.
    """

    group_gpus: tuple[int, ...]
    parts: tuple[Box, ...]
    bases: tuple[tuple[int, bytes, bytes] | None, ...]
    programs: tuple[tuple[tuple[int, ...], tuple[Cut, ...], Grid | None], ...]

    def fits(self, data: Data) -> bool:
        """Whether the parts hold every policy of this problem too."""
        return (
            self.group_gpus == tuple(data.problem.group_gpus.tolist())
            and self.parts[0].pu.shape == data.problem.offered_loads.shape
        )


@dataclass
class _Search:
    """The state of one branch and bound: incumbent, open boxes, relaxations, experience with splits."""

    data: Data
    gap: float
    deadline: float = np.inf
    node_limit: float = np.inf
    progress: Progress | None = None
    best: Policy | None = None
    value: float = np.inf
    history: list[float] = field(default_factory=list)
    nodes: int = 0
    created: int = 0
    warm: bool = False
    pause: int = 1
    rest: int = 0
    open: list[_Node] = field(default_factory=list)
    current: _Node | None = None
    pruned: float = np.inf
    tried: set[tuple[int, ...]] = field(default_factory=set)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    deep: set[tuple[int, ...]] = field(default_factory=set)
    pool: Tangents = field(default_factory=dict)
    models: dict[tuple[int, ...], Relaxation] = field(default_factory=dict)
    whole: Levels | None = None
    stopped: str = ""
    leaves: list[tuple[Box, tuple[Program, object] | None]] = field(default_factory=list)
    records: dict[tuple, list[Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root = Box.root(self.data)

    # ---- incumbent ----------------------------------------------------------------------------

    @property
    def cutoff(self) -> float:
        """A box whose bound reaches this cannot hold a policy that is better by more than the gap.

        Or by more than floating point can tell.
        """
        return self.value - max(0.98 * self.gap * abs(self.value), 2 * self.data.margin)

    def offer(self, policy: Policy) -> None:
        if self.data.groups is not None and not np.array_equal(policy.groups, self.data.groups):
            return
        result = evaluate(self.data.problem, policy)
        if result.feasible and result.objective < self.value:
            self.best, self.value = policy, result.objective
            self.history.append(self.value)

    def from_point(self, point: Point, z: Floats, *, quick: bool = False) -> None:
        """A policy at z near a solution of the relaxation, improved by local search.

        ``quick``: only where the policy is near the best already.
        """
        data = self.data
        admitted = point.pi.sum(axis=1)
        eta = np.where(admitted > 1e-9, point.h.sum(axis=1) / np.maximum(admitted, 1e-9), data.high)
        fitted = [
            fit(data, z, eta, point.pi, delta)
            for delta in (
                prefixes_for(data, z, point.pi, z < 0),
                prefixes_for(data, z, point.pi, z > 0),
                data.prefix_useful & (point.y > 0.5 * point.pi),
            )
        ]
        costs = [evaluate(data.problem, policy).objective for policy in fitted]
        # Local searches that fail become rarer.
        near = min(costs) <= self.value * (1 + max(10 * self.gap, 5e-3))
        if quick and min(costs) > self.value and (self.nodes < self.rest or not near):
            return
        policy = fitted[int(np.argmin(costs))]
        before = self.value
        self.offer(polish(data, policy, steps=6 if quick else 10, precision=0.05 * self.gap))
        if quick:
            self.pause = 1 if self.value < before else min(2 * self.pause, 64)
            self.rest = self.nodes + self.pause

    def try_groups(self, z: Floats) -> None:
        """Search at fixed groups, once: down the better children, while they may hold something better."""
        key = tuple(z.astype(int).tolist())
        if key in self.tried:
            return
        self.tried.add(key)
        box = replace(self.root, zl=z, zu=z).tightened(self.data)
        if box is None:
            return
        relaxation = self.model(box)
        boxes, last = [box], None
        for _ in range(DEPTH):
            found = []
            for box in boxes:
                self.load(relaxation, box)
                point = relaxation.solve(self.cutoff, rounds=3, precision=self.gap / 10)
                if point is not None:
                    found.append((point.bound, len(found), point, box))
            if not found:
                break
            _, _, point, box = min(found)
            if last is None:
                self.from_point(point, z)
            last = point
            branches = self.branches(box, point)
            if not branches:
                break
            split = max(branches, key=lambda b: b.worth)
            boxes = [t for child in split.children if (t := child.tightened(self.data)) is not None]
        if last is not None:
            self.from_point(last, z)

    def roundings(self, relaxed: Floats) -> list[Floats]:
        """Whole groups near the relaxed ones, within the budget; also near multiples that use more of it.

        The relaxation sees little of the waiting, so it deploys less than pays.
        """
        n, budget = self.data.problem.group_gpus, self.data.problem.gpus
        # All GPUs to one of the configurations in use.
        found = [unit * (budget // size) for unit, size in zip(np.eye(n.size), n, strict=True)]
        found = [z for z in found if z @ relaxed > INTEGRAL]
        most = max(budget / max(float(n @ relaxed), 1e-9), 1.0)
        for factor in (1.0, min(1.3, most), np.sqrt(most), most):
            wanted = np.minimum(relaxed * factor, self.root.zu)
            for start in (np.floor(wanted + INTEGRAL), np.round(wanted), np.ceil(wanted - INTEGRAL)):
                z = start.copy()
                # Take away what is least wanted, then give what is most wanted.
                while n @ z > budget:
                    z[int(np.argmax(np.where(z > 0, z - wanted, -np.inf)))] -= 1
                for k in np.argsort(z - wanted, kind="stable"):
                    if wanted[k] - z[k] > 0.1 and n @ z + n[k] <= budget:
                        z[k] += 1
                # What another configuration does as well is left to that one.
                for k, j in np.argwhere(self.data.better):
                    if z[k] == 0:
                        z[k], z[j] = z[j], 0
                if not any(np.array_equal(z, other) for other in found):
                    found.append(z)
        return found

    def adjacent_partitions(self, z: Floats) -> list[Floats]:
        """Groups near z: more where the budget allows, one exchanged for others or the reverse, one less."""
        problem = self.data.problem
        n, spare = problem.group_gpus, problem.gpus - problem.group_gpus @ z
        useful = np.flatnonzero((z > 0) | ~self.data.better.any(axis=0))
        unit = np.eye(z.size)
        used = np.flatnonzero(z > 0)
        more = [
            z + count * unit[k]
            for k in useful
            for count in sorted({spare // n[k], (spare // n[k] + 1) // 2, 1}, reverse=True)
            if 0 < count <= spare // n[k]
        ]
        exchanged = []
        for k in used:
            for j in useful[useful != k]:
                one = (spare + n[k]) // n[j]
                exchanged += [z - unit[k] + count * unit[j] for count in sorted({1, one}) if 0 < count <= one]
                several = -((spare - n[j]) // n[k])
                if 1 < several <= z[k]:
                    exchanged.append(z - several * unit[k] + unit[j])
        return more + exchanged + [z - unit[k] for k in used]

    def explore(self) -> None:
        """Descend from the best policy over neighbouring groups, each seen once, until none is better."""
        data = self.data
        improved = data.groups is None
        while improved:
            improved = False
            best = self.best
            eta = best.reservations - data.problem.input_tokens
            for z in self.adjacent_partitions(best.groups.astype(float)):
                key = tuple(z.astype(int).tolist())
                if key in self.seen or time.perf_counter() > self.deadline:
                    continue
                self.seen.add(key)
                policy = polish(
                    data, fit(data, z, eta, best.routing, best.prefix_cache), steps=3, precision=self.gap
                )
                before = self.value
                self.offer(policy)
                if self.value < before:
                    self.offer(polish(data, policy, precision=0.05 * self.gap))
                    improved = True
                    break

    def intensify(self) -> None:
        """Look for a better policy at the best groups: a small search of their own, once."""
        z = self.best.groups.astype(float)
        key = tuple(z.astype(int).tolist())
        box = replace(self.root, zl=z, zu=z).tightened(self.data)
        if key in self.deep or box is None:
            return
        self.deep.add(key)
        waiting = [self.node(0.0, box, box, None)]
        leaves, self.leaves = self.leaves, []
        try:
            for _ in range(WIDTH):
                if not waiting or waiting[0].bound >= self.cutoff or time.perf_counter() > self.deadline:
                    return
                self.rest = 0
                for child in self.expand(heapq.heappop(waiting)):
                    heapq.heappush(waiting, child)
        finally:
            # The whole search covers these boxes by its own.
            self.leaves = leaves

    def rescale(self) -> bool:
        """Where the best policy costs far less than their unit, go on with programs in units of its cost.

        Their margin is a share of the unit: a gap below it would never close. Whether that was so.
        """
        far = self.value < FAR * 1e4 * self.data.scale
        if far:
            self.data = replace(self.data, unit=self.value)
            self.models, self.whole = {}, None
        return far

    # ---- branching ----------------------------------------------------------------------------

    def branches(self, box: Box, point: Point) -> list[Branch]:
        """Every split that removes something the relaxation gets wrong, with the cost it hides."""
        data, problem = self.data, self.data.problem
        out = []

        def split(key: tuple, worth: float, low: Box, high: Box) -> None:
            out.append(Branch(key, (low, high), worth))

        for k in np.flatnonzero(np.abs(point.z - np.round(point.z)) > INTEGRAL).tolist():
            down = float(np.floor(point.z[k]))
            part = point.z[k] - down
            price = point.memory_price[k] + problem.costs.gpu * problem.group_gpus[k]
            split(
                ("z", k),
                min(part, 1 - part) * price,
                box.with_("zu", k, down),
                box.with_("zl", k, down + 1),
            )

        # GPUs in use come in multiples of what the group sizes share.
        unit = float(np.gcd.reduce(problem.group_gpus))
        gpus = float(problem.group_gpus @ point.z)
        down = np.floor(gpus / unit + INTEGRAL) * unit
        if gpus - down > INTEGRAL * unit:
            worth = min(gpus - down, down + unit - gpus) * problem.costs.gpu
            split(("g",), worth, replace(box, gu=down), replace(box, gl=down + unit))

        true_v = np.where(point.z > 1e-9, point.load / np.maximum(point.z, 1e-9), 0.0)
        true_v = np.clip(true_v, box.vl, np.minimum(box.vu, 1 - 1e-6))
        # Tardiness that the relaxation does not see, shared out by where it hides.
        factor = problem.queueing_factors
        waits = wait(true_v)
        response = problem.service_times + factor * waits - problem.latency_slos[:, None]
        true_late = np.maximum((point.pi * response).sum(axis=1), 0.0)
        unseen = problem.costs.slo * problem.arrival_rates * np.maximum(true_late - point.late, 0.0)
        missed = np.maximum(point.pi * waits - point.q, 0.0) * factor
        missed *= (unseen / np.maximum(missed.sum(axis=1), 1e-300))[:, None]
        # The error of q = pi W is at most the product of both ranges: split the relatively wider one.
        top = wait(np.minimum(box.vu, true_v + 0.5 * (1 - true_v)))
        spread = (top - wait(box.vl)) / np.maximum(waits, 1e-9)
        for k in np.flatnonzero(missed.sum(axis=0) > 0).tolist():
            ranges = box.pu[:, k] - box.pl[:, k]
            i = int(np.argmax(missed[:, k] * ranges))
            share = spread[k] / (spread[k] + ranges[i])
            if box.vu[k] - box.vl[k] > 1e-7:
                at = _inside(true_v[k], box.vl[k], box.vu[k])
                worth = float(missed[:, k].sum() * share)
                split(("v", k), worth, box.with_("vu", k, at), box.with_("vl", k, at))
            if ranges[i] > 1e-7:
                at = _inside(point.pi[i, k], box.pl[i, k], box.pu[i, k])
                worth = float(missed[i, k] * (1 - share))
                split(("p", i, k), worth, box.with_("pu", (i, k), at), box.with_("pl", (i, k), at))

        headroom = 1 + problem.headroom
        u = problem.offered_loads
        saved = headroom * u * point.y - point.t
        real = np.where(
            box.dl,
            headroom * u * point.pi - point.z,
            np.where(box.du, np.maximum(headroom * u * point.pi - point.z, 0), 0),
        )
        share = problem.prefix_tokens[:, None] / problem.kv_tokens
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
            values = data.worst_cases(np.array(i), np.clip([*etas, mean], data.low[i], data.high[i]))
            price = (
                problem.offered_loads[i, used]
                / problem.kv_tokens[used]
                * (headroom * point.memory_price + point.load_price)[used]
            )
            # Against the Lagrangian: cost and memory of the mean less those of each.
            worth = problem.arrival_rates[i] * (point.pi[i, used] @ (values[-1] - values[:-1]))
            worth += float((point.pi[i, used] * price) @ (mean - etas))
            # Prices of zero do not mean that the mean fits where a group is full.
            more = data.per_token[i, used] * point.pi[i, used] * np.maximum(mean - etas, 0.0)
            full = point.load[used] + more > 0.98 * (point.z * box.vu)[used]
            worth = max(float(worth), (1e-9 + 0.1 * float(more[full].sum())) * abs(point.bound))
            split(("e", i), worth, box.with_("eu", i, mean), box.with_("el", i, mean))
        return out

    def model(self, box: Box) -> Program:
        """The relaxation for a box: in levels while numbers of groups are open, else the smallest at hand.

        Configurations that a box leaves no groups do not burden its linear programs.
        """
        if not box.fixed and self.whole is not None:
            return self.whole
        needed = set(np.flatnonzero(box.zu > 0).tolist())
        names = [name for name in self.models if needed <= set(name)]
        name = min(names, key=len, default=None)
        if name is None or 3 * len(needed) <= 2 * len(name):
            name = tuple(sorted(needed))
            self.models[name] = self.program(name)
        return self.models[name]

    def program(self, name: tuple[int, ...], cuts: Sequence[Cut] | None = None) -> Relaxation:
        """A new relaxation of these configurations."""
        only = np.isin(np.arange(self.root.zu.size), name)
        return Relaxation(self.data, replace(self.root, pu=self.root.pu * only), self.pool, cuts)

    def divide(self, box: Box) -> None:
        """Set up the relaxation in levels, dividing those that matter while its bound leaves a gap."""
        edges = grid(self.data, self.root, LEVELS)
        for division in range(DIVISIONS + 1):
            self.whole = Levels(self.data, self.root, edges)
            self.load(self.whole, box)
            point = self.whole.solve(self.cutoff, precision=self.gap / 20)
            if point is not None:
                self.open[0].bound = max(self.open[0].bound, point.bound)
            if point is None or time.perf_counter() > self.deadline:
                return
            if division == 0:
                for z in self.roundings(point.z):
                    self.try_groups(z)
                if self.value > point.bound + self.gap * abs(self.value):
                    self.explore()
            edges = self.whole.refined()
            self.rescale()

    def load(self, relaxation: Program, box: Box) -> None:
        """Load a box: sharp where its groups are fixed, quick to re-optimise where they are not."""
        relaxation.load_box(box, None if box.fixed else self.root)

    def around(self, box: Box, z: Floats) -> list[Box]:
        """The box cut up: these groups, and by configuration what lies below and above them."""
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
        """What no policy costs less than, at any moment."""
        waiting = [node.bound for node in self.open[:1]]
        current = [] if self.current is None else [self.current.bound]
        return min(*waiting, *current, self.pruned, self.value)

    def begin(self, certificate: Certificate | None) -> None:
        """Open the root; or bound the parts of an earlier proof and open those that prove nothing now."""
        everything = Box.everything(*self.root.pu.shape)
        self.open = [_Node(0.0, 0, self.root.tightened(self.data), everything)]
        self.rescale()
        if certificate is None or not certificate.fits(self.data):
            if self.node_limit > 0 and not self.open[0].box.fixed:
                self.divide(self.open[0].box)
            return
        waiting = []
        for number, part in enumerate(certificate.parts):
            box = part.meet(self.root).tightened(self.data)
            if box is None:
                # Empty here, but perhaps not for the problem after this one.
                self.close(part, None, np.inf)
            else:
                waiting.append(_Node(0.0, number, box, part))
        # Until all parts are bounded the root stands for those that are not.
        self.current, self.open = self.open[0], []
        programs: dict[int, Program] = {}
        started = False
        for node in sorted(waiting, key=lambda n: (certificate.bases[n.number] or (-1,))[0]):
            if time.perf_counter() > self.deadline:
                self.open, self.leaves, self.current = [self.current], [], None
                return
            kept = certificate.bases[node.number]
            # A program of fewer configurations than the box has would bound something else.
            used = set(np.flatnonzero(node.box.zu > 0).tolist())
            if kept is None or not used <= set(certificate.programs[kept[0]][0]):
                relaxation, basis = self.model(node.box), None
            else:
                at, *status = kept
                if at not in programs:
                    name, cuts, edges = certificate.programs[at]
                    if edges is None:
                        programs[at] = self.program(name, cuts)
                        self.models.setdefault(name, programs[at])
                    else:
                        programs[at] = self.whole = Levels(self.data, self.root, edges, cuts)
                relaxation = programs[at]
                basis = tuple(status) if relaxation.takes(*map(len, status)) else None
            self.load(relaxation, node.box)
            # Boxes of a program in levels differ by bounds alone: the last basis is as good as their own.
            if basis is not None and (relaxation is not self.whole or not started):
                relaxation.set_basis(unpacked(*basis))
            started |= relaxation is self.whole
            point = relaxation.solve(self.cutoff, rounds=1)
            if point is None and relaxation.trusted:
                # Where the proof goes as before, so may the next one.
                self.close(node.part, (relaxation, basis or relaxation.basis()), self.cutoff)
                continue
            node.bound = 0.0 if point is None else point.bound
            node.basis = relaxation, relaxation.basis()
            node.number = self.created = self.created + 1
            heapq.heappush(self.open, node)
        self.current = None

    def run(self) -> None:
        """Expand boxes until the gap is closed or a limit strikes."""
        while self.open and self.value - self.lower_bound > self.gap * abs(self.value):
            self.current = heapq.heappop(self.open)
            while self.current is not None:
                if self.nodes >= self.node_limit:
                    self.stopped = f"limit of {self.node_limit} boxes"
                    return
                if time.perf_counter() > self.deadline:
                    self.stopped = "time limit"
                    return
                children = self.expand(self.current)
                self.nodes += 1
                if self.nodes % EVERY == 0 and not self.warm:
                    self.intensify()
                # Where the groups are fixed, go down at once: that is where policies are found.
                dive = bool(children) and self.current.box.fixed
                for child in children[1:] if dive else children:
                    heapq.heappush(self.open, child)
                self.current = children[0] if dive else None
                if self.progress is not None:
                    self.progress(self.lower_bound, self.value, self.nodes)
        told = 2 * self.data.margin
        self.stopped = f"no box is left: the linear programs tell costs apart by {told:.1e} at best"

    def node(self, bound: float, box: Box, part: Box, basis: tuple | None) -> _Node:
        self.created += 1
        return _Node(bound, self.created, box, part, basis)

    def certificate(self) -> Certificate | None:
        """The search so far, for a later one."""
        nodes = self.open + ([] if self.current is None else [self.current])
        leaves = self.leaves + [(node.part, node.basis) for node in nodes]
        if len(leaves) > MOST_PARTS:
            return None
        programs: dict[int, tuple[int, Program]] = {}
        bases = []
        for _, basis in leaves:
            if basis is None:
                bases.append(None)
                continue
            relaxation, status = basis
            at, _ = programs.setdefault(id(relaxation), (len(programs), relaxation))
            bases.append((at, *(status if isinstance(status, tuple) else packed(status))))
        recipes = []
        for at, relaxation in programs.values():
            mine = [n for n, basis in enumerate(bases) if basis is not None and basis[0] == at]
            cuts, rows = relaxation.binding([bases[n][2] for n in mine])
            recipes.append((relaxation.configs, cuts, getattr(relaxation, "edges", None)))
            for n, status in zip(mine, rows, strict=True):
                bases[n] = at, bases[n][1], status
        return Certificate(
            tuple(self.data.problem.group_gpus.tolist()),
            tuple(part for part, _ in leaves),
            tuple(bases),
            tuple(recipes),
        )

    def expand(self, node: _Node) -> list[_Node]:
        """Bound a box, look for policies near its relaxation, and split it."""
        data, box = self.data, node.box
        relaxation = self.model(box)
        self.load(relaxation, box)
        if node.basis is not None and node.basis[0] is relaxation:
            relaxation.set_basis(node.basis[1])
        point = relaxation.solve(self.cutoff, precision=self.gap / 20)
        if point is None:
            proven = max(node.bound, self.cutoff) if relaxation.trusted else node.bound
            self.close(node.part, (relaxation, relaxation.basis()), proven)
            return []
        bound = max(node.bound, point.bound)
        basis = (relaxation, relaxation.basis())
        whole = bool(np.all(np.abs(point.z - np.round(point.z)) <= INTEGRAL))
        if whole:
            self.from_point(point, np.round(point.z), quick=True)
        before = self.value
        if self.nodes % 10 == 0 and not self.warm:
            for z in self.roundings(point.z):
                self.try_groups(z)
        elif whole and not box.fixed and not self.warm:
            self.try_groups(np.round(point.z))
        if self.value < before and not box.fixed and self.value > bound + self.gap * abs(self.value):
            self.explore()
        if self.rescale():
            return [replace(node, bound=bound, basis=None)]
        if whole and not box.fixed:
            boxes = [(child, bound) for child in self.around(box, np.round(point.z))]
        else:
            kinds = ("v", "p", "d", "e") if whole else ("g", "z")
            branches = [b for b in self.branches(box, point) if b.key[0] in kinds]
            if not branches:
                # Nothing is left that a split could improve, unless cuts that were not worth it yet show it.
                self.load(relaxation, box)
                final = relaxation.solve(rounds=30, precision=self.gap / 100)
                if final is not None:
                    bound, basis = max(bound, final.bound), (relaxation, relaxation.basis())
                    self.from_point(final, np.round(final.z))
                    branches = [b for b in self.branches(box, final) if b.key[0] in kinds]
                if final is None or not branches or bound >= self.cutoff:
                    self.close(node.part, basis, bound)
                    return []
            boxes = self.choose(box, bound, basis, branches)
        children = []
        for child, child_bound in boxes:
            part, tight = node.part.narrowed(box, child), child.tightened(data)
            if tight is None or child_bound >= self.cutoff:
                self.close(part, basis, np.inf if tight is None else self.cutoff)
            else:
                children.append(self.node(child_bound, tight, part, basis))
        return children

    def close(self, part: Box, basis: tuple | None, bound: float) -> None:
        """Be done with a box whose policies cost ``bound`` at least."""
        self.pruned = min(self.pruned, bound)
        self.leaves.append((part, basis))

    def choose(self, box: Box, bound: float, basis: tuple, branches: list[Branch]) -> list[tuple[Box, float]]:
        """The two boxes of the most promising split, each with the bound known for it.

        Where the groups are fixed, that is the split that hides most cost. Before, a split is judged by
        what its children gain, (gain of one) x (gain of the other). The gains are tried on the relaxation
        until a split at that place has been seen often enough; from then on they are predicted from the
        mean of gain per worth.
        """
        if box.fixed:
            return [(child, bound) for child in max(branches, key=lambda b: b.worth).children]
        room = max(self.cutoff - bound, 1e-9 * abs(self.value))
        relaxation, start = basis
        best_score, best = -1.0, []
        for branch in sorted(branches, key=lambda b: -b.worth)[:TRIED]:
            record = self.records.setdefault(branch.key, [])
            bounds = [bound, bound]
            if len(record) >= RELIABLE:
                gains = np.mean(record, axis=0) * branch.worth
            else:
                for at, child in enumerate(branch.children):
                    tight = child.tightened(self.data)
                    tried = None
                    if tight is not None:
                        self.load(relaxation, tight)
                        relaxation.set_basis(start)
                        tried = relaxation.solve(self.cutoff, rounds=1)
                    if tried is not None:
                        bounds[at] = max(tried.bound, bound)
                    elif tight is None or relaxation.trusted:
                        bounds[at] = self.cutoff
                gains = np.array(bounds) - bound
                record.append(np.minimum(gains, room) / max(branch.worth, 1e-12))
            low, high = np.maximum(np.minimum(gains, room) / room, 1e-6)
            if low * high > best_score:
                best_score, best = low * high, list(zip(branch.children, bounds, strict=True))
            if low >= 1 and high >= 1:
                break
        return best


def _inside(x: float, low: float, high: float) -> float:
    """x, but at least a tenth of the range away from its ends."""
    return float(np.clip(x, low + 0.1 * (high - low), high - 0.1 * (high - low)))


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    gap: float = 1e-4,
    start: Policy | Solution | None = None,
    reservations: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    node_limit: int | None = None,
    progress: Progress | None = None,
) -> Solution:
    """The policy of least cost, with a proof: its cost is within ``gap`` of the returned lower bound.

    Parameters
    ----------
    problem : Problem
    time_limit : seconds, or None. When it strikes, and on Ctrl-C, the best policy so far is returned
        with the bound proven so far, and status ``feasible``.
    gap : relative distance between cost and lower bound at which to stop. One that floating point cannot
        tell, below some 1e-6, may stay open; ``message`` says so.
    start : a policy (or a solution) to start from, for instance the one in force before a drift. It is
        brought into the constraints of this problem first, and ignored where its groups do not fit. A
        solution of `solve` also carries its proof (``certificate``), which is then repeated: see below.
        One for other classes or configurations is left aside.
    reservations : (I,) prescribed r_i = L_in + eta_i in tokens. The rest is then optimal for them.
    groups : (K,) prescribed z, within the budget. The rest is then optimal for them.
    node_limit : boxes to expand at most, a deterministic limit.
    progress : called after every box with (lower bound, best cost, boxes done).

    Returns
    -------
    Solution
        Its policy always exists: at worst it rejects everything.

    Raises
    ------
    TypeError
        If ``start`` is neither a policy nor a solution.
    ValueError
        If ``gap`` is not positive, or ``reservations``, ``groups`` or a policy as ``start`` do not fit the
        problem.

    Notes
    -----
    A proof is a set of boxes that hold every policy, each with a linear program whose optimum bounds it.
    The boxes are bounds that splits set, and a split leaves no policy out whatever the lengths, rates,
    deadlines, costs or budget are (only that on the GPUs in use rests on the sizes of the groups, which
    must be the same). So they serve another problem: each is narrowed by what that problem implies, and
    bounded by a program with its data, whose cuts touch its functions where those of the earlier program
    touched theirs and which starts from the earlier basis. Nothing of the earlier costs or duals is
    believed. Boxes that do not reach the cutoff any more are split further, as in any search.
    """
    began = time.perf_counter()
    if not gap > 0:
        raise ValueError(f"gap: {gap}; expected > 0")
    data = Data.of(problem, reservations, groups)
    if not (start is None or isinstance(start, Policy | Solution)):
        raise TypeError(f"start: {type(start).__name__}; expected a Policy or a Solution")
    search = _Search(data, gap, progress=progress)
    if time_limit is not None:
        search.deadline = began + time_limit
    if node_limit is not None:
        search.node_limit = node_limit
    shape = problem.offered_loads.shape
    nothing = np.zeros(shape)
    idle = np.zeros(shape[1]) if data.groups is None else data.groups
    search.offer(Policy.of(problem, idle, data.high, nothing, nothing))
    try:
        if isinstance(start, Solution) and (
            start.policy is None or start.policy.routing.shape != problem.offered_loads.shape
        ):
            start = None
        if start is not None:
            before = search.value
            search.offer(_adapted(data, start, gap))
            search.warm = search.value < before
        certificate = start.certificate if isinstance(start, Solution) else None
        search.begin(certificate if isinstance(certificate, Certificate) else None)
        search.run()
    except KeyboardInterrupt:
        # The box in work and all open ones still count in the lower bound.
        search.stopped = "interrupted"
    bound = search.lower_bound
    closed = search.value - bound <= gap * abs(search.value)
    return Solution.of(
        problem,
        search.best,
        seconds=time.perf_counter() - began,
        status=Status.OPTIMAL if closed else Status.FEASIBLE,
        method="certified",
        lower_bound=bound,
        iterations=search.nodes,
        history=search.history,
        certificate=search.certificate(),
        message="" if closed else search.stopped,
    )


def _adapted(data: Data, start: Policy | Solution, gap: float) -> Policy:
    """A policy of another time, brought into the constraints of this problem and improved."""
    policy = start.policy if isinstance(start, Solution) else start
    problem = data.problem
    if policy.routing.shape != problem.offered_loads.shape:
        raise ValueError(
            f"start: routing of shape {policy.routing.shape}; expected {problem.offered_loads.shape}"
        )
    z = policy.groups.astype(float)
    eta = policy.reservations - problem.input_tokens
    fitted = fit(data, z, eta, policy.routing, policy.prefix_cache)
    return polish(data, fitted, precision=0.05 * gap)
