"""Local search for a policy at given groups and prefix decisions: successive linear programs.

With z and delta fixed, the products left are pi eta, pi WC(eta) and pi W(v). Each step replaces them by
their first-order expansion at the current policy, keeps the convex WC and W as tangents, and solves for
(pi, eta) within a trust region on eta and v. The result is scaled back into (6e) where the products that
were left out break it, and is accepted when :func:`kvcache.policy.evaluate` says that the cost fell.
"""

from __future__ import annotations

import highspy
import numpy as np
from numpy.typing import NDArray

from kvcache.policy import Policy, evaluate
from kvcache.solvers.highs import new_highs
from kvcache.solvers.relaxation import Data, wait

__all__ = ["fit", "polish", "prefixes_for"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
INF = highspy.kHighsInf

# Shares below this are noise of the linear programs.
NEGLIGIBLE = 1e-9
# Highest utilisation that a policy is given: v = 1 is an unstable queue.
FULLEST = 1 - 1e-7


def prefixes_for(data: Data, z: Floats, pi: Floats, memory_binds: Bools) -> Bools:
    """delta that suits a routing: 1 where a group holds more than one request of the class.

    Where only the headroom lifts the count above one, caching saves memory but adds to the load; it is
    then used on the configurations (K,) whose memory binds.
    """
    problem = data.problem
    per_group = np.where(z > 0, problem.offered_loads * pi / np.maximum(z, 1), 0.0)
    useful = data.prefix_useful & (z > 0)
    cached = per_group > 1
    cached |= memory_binds & ((1 + problem.headroom) * per_group > 1)
    return cached & useful


def fit(data: Data, z: Floats, eta: Floats, pi: Floats, delta: Bools) -> Policy:
    """The policy nearest to a solution of a linear program that meets every constraint."""
    problem = data.problem
    pi = np.where((z > 0) & (pi > NEGLIGIBLE), pi, 0.0)
    pi = pi / np.maximum(pi.sum(axis=1, keepdims=True), 1.0)
    pi = np.minimum(pi, z)
    eta = np.clip(eta, data.low, data.high)
    delta = delta & (z > 0)
    kv = problem.kv_tokens
    # Prefixes that leave no room for requests are dropped.
    delta = delta & ((problem.prefix_tokens @ delta) < kv)
    held = problem.input_tokens[:, None] + eta[:, None] - delta * problem.prefix_tokens[:, None]
    requests = (problem.offered_loads * pi * held).sum(axis=0) / np.maximum(z, 1) / kv
    prefixes = (problem.prefix_tokens @ delta) / kv
    room = np.minimum((1 - prefixes) / (1 + problem.headroom), FULLEST - prefixes)
    factor = np.where(requests > room, np.maximum(room, 0.0) / np.maximum(requests, 1e-300), 1.0)
    return Policy.of(problem, z, eta, pi * factor, delta)


def _step(
    data: Data, z: Floats, eta0: Floats, pi0: Floats, delta: Bools, pairs: Bools, reach: float
) -> tuple[Floats, Floats] | None:
    """The linear program around (pi0, eta0): (eta, pi), or None when it has no solution."""
    problem, costs = data.problem, data.problem.costs
    i, k = np.nonzero(pairs)
    used = np.unique(k)
    classes, pair_count = eta0.size, i.size
    a = data.per_token / np.maximum(z, 1)
    held = problem.input_tokens[:, None] + eta0[:, None] - delta * problem.prefix_tokens[:, None]
    prefixes = (problem.prefix_tokens @ delta) / problem.kv_tokens
    v0 = np.minimum((a * pi0 * held).sum(axis=0) + prefixes, FULLEST)
    w0 = wait(v0)
    phi, deadline = problem.queueing_factors, problem.latency_slos
    rates, admitted = problem.arrival_rates, pi0.sum(axis=1)

    unit = np.maximum(data.high, 1.0)
    # Tangents of WC at eta0, on both sides of it, and around it.
    around = reach * unit * np.array([-1, -0.3, -0.03, 0, 0.03, 0.3, 1])[:, None]
    points = np.vstack([eta0 - 0.5, eta0 + 0.5, eta0 + around])
    points, values, slopes = data.tangents(np.arange(classes), np.clip(points, data.low, data.high))
    here = data.worst_cases(np.arange(classes), np.clip(eta0, data.low, data.high))

    # Columns: pi, eta / unit, cost of eta above `here`, tardiness / D, v, W.
    at_eta = pair_count + np.arange(classes)
    at_cost, at_late = at_eta + classes, at_eta + 2 * classes
    at_v = np.full(z.size, -1)
    at_v[used] = pair_count + 3 * classes + np.arange(used.size)
    at_w = np.where(at_v >= 0, at_v + used.size, -1)
    columns = pair_count + 3 * classes + 2 * used.size
    cost = np.zeros(columns)
    cost[:pair_count] = rates[i] * (here[i] - data.rejection)
    cost[at_cost] = rates * admitted
    cost[at_late] = costs.slo * rates * deadline
    lower, upper = np.zeros(columns), np.full(columns, INF)
    upper[:pair_count] = 1.0
    lower[at_eta] = np.maximum(data.low, eta0 - reach * unit) / unit
    upper[at_eta] = np.minimum(data.high, eta0 + reach * unit) / unit
    lower[at_cost] = -INF
    lower[at_cost[admitted == 0]] = 0.0
    top = np.minimum(1.0, FULLEST)
    lower[at_v[used]] = np.maximum(v0 - reach, 0.0)[used]
    upper[at_v[used]] = np.minimum(v0 + reach, top)[used]

    row, column, value, low, high = [], [], [], [], []

    def add(columns_, values, l=-INF, h=INF):  # noqa: E741
        row.append(np.full(len(columns_), len(low)))
        column.append(np.asarray(columns_))
        value.append(np.asarray(values, dtype=float))
        low.append(l)
        high.append(h)

    for c in range(classes):
        mine = np.flatnonzero(i == c)
        if mine.size == 0:
            continue
        add(mine, np.ones(mine.size), h=1.0)
        if costs.slo > 0:
            kk = k[mine]
            add(
                np.r_[at_late[c], mine, at_w[kk]],
                np.r_[
                    1.0,
                    1 - (problem.service_times[c, kk] + phi[kk] * w0[kk]) / deadline[c],
                    -phi[kk] * pi0[c, kk] / deadline[c],
                ],
                l=-float((phi[kk] * pi0[c, kk] * w0[kk]).sum() / deadline[c]),
            )
    for c in np.flatnonzero(data.high > data.low).tolist():
        lines = zip(slopes[:, c].tolist(), (values - slopes * points)[:, c].tolist(), strict=True)
        for steep, at_zero in sorted(set(lines)):
            add([at_cost[c], at_eta[c]], [1.0, -steep * unit[c]], l=at_zero - here[c])
    headroom = 1 + problem.headroom
    for kk in used:
        mine = np.flatnonzero(k == kk)
        c = i[mine]
        weights, shifts = a[c, kk] * held[c, kk], a[c, kk] * pi0[c, kk] * unit[c]
        constant = float((a[c, kk] * pi0[c, kk] * eta0[c]).sum())
        columns_ = np.r_[mine, at_eta[c]]
        values = np.r_[weights, shifts]
        add(columns_, headroom * values, h=1 - prefixes[kk] + headroom * constant)
        add(np.r_[columns_, at_v[kk]], np.r_[values, -1.0], h=constant - prefixes[kk])
        for v in {float(v0[kk]), 0.0, 0.3, 0.5, 0.65, 0.8, 0.9, 0.97}:
            slope = 1 / (1 - v) ** 2
            add([at_w[kk], at_v[kk]], [1.0, -slope], l=v / (1 - v) - slope * v)

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(low)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost / data.scale, lower, upper
    lp.row_lower_, lp.row_upper_ = np.array(low), np.array(high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = columns, len(low)
    lp.a_matrix_.start_ = np.cumsum([0] + [len(r) for r in row]).astype(np.int32)
    lp.a_matrix_.index_ = np.concatenate(column).astype(np.int32)
    lp.a_matrix_.value_ = np.concatenate(value)
    highs = new_highs(parallel="off", presolve="off")
    highs.passModel(lp)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    x = np.array(highs.getSolution().col_value)
    pi = np.zeros_like(pi0)
    pi[i, k] = x[:pair_count]
    return x[at_eta] * unit, pi


def polish(data: Data, policy: Policy, *, steps: int = 12, precision: float = 1e-6) -> Policy:
    """A local optimum near ``policy``; never worse than ``policy``.

    Ends after ``steps`` linear programs or when a step gains less than ``precision`` of the cost in a
    small trust region.
    """
    problem = data.problem
    best, value = policy, evaluate(problem, policy).objective
    z = policy.groups.astype(float)
    pairs = np.broadcast_to(z > 0, policy.routing.shape)
    if not pairs.any():
        return best
    reach = 0.3
    for _ in range(steps):
        eta0 = best.reservations - problem.input_tokens
        delta = best.prefix_cache
        found = _step(data, z, eta0, best.routing, delta, pairs, reach)
        if found is None:
            reach /= 4
            continue
        eta, pi = found
        gain = 0.0
        for choice in _prefix_choices(data, z, pi, delta):
            candidate = fit(data, z, eta, pi, choice)
            cost = evaluate(problem, candidate).objective
            if cost < value:
                gain += value - cost
                best, value = candidate, cost
        if gain <= precision * abs(value):
            if reach < 0.05:
                break
            reach /= 4
    return best


def _prefix_choices(data: Data, z: Floats, pi: Floats, delta: Bools) -> list[Bools]:
    choices = [delta]
    if data.prefix_useful.any():
        for binds in (np.zeros(z.size, dtype=bool), np.ones(z.size, dtype=bool)):
            choice = prefixes_for(data, z, pi, binds)
            if not any(np.array_equal(choice, other) for other in choices):
                choices.append(choice)
    return choices
