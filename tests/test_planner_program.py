"""The plan's program against enumeration with another solver, and its rows against the operating point."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from kvcache.engine import Demand, StepCost, operating_point
from kvcache.planner.program import Column, Program, Traffic, first_token, formulate, may_serve, solve


def traffic(seed, classes=3, tpot=None):
    rng = np.random.default_rng(seed)
    prompt, output = rng.lognormal(6.5, 1, classes), rng.lognormal(5, 0.8, classes)
    demands = tuple(
        Demand(p, x, x * (p + 0.6 * x), x * (p + x) ** 2, p + 3 * x)
        for p, x in zip(prompt, output, strict=True)
    )
    deadlines = np.full(classes, 0.1) if tpot is None else np.asarray(tpot, dtype=float)
    names = tuple("abcdefgh"[:classes])
    return Traffic(
        names,
        rng.uniform(0.5, 4, classes),
        demands,
        prompt,
        deadlines,
        np.full(classes, 5.0),
        np.ones(classes),
    )


def columns(seed, kinds=3, phases=("both",), tpot=(0.1,)):
    rng = np.random.default_rng(seed)
    made = []
    for k in range(kinds):
        n, shrink = 2**k, (2**k) ** rng.uniform(0.6, 1)
        step = StepCost(rng.uniform(0.01, 0.02) / n**0.5, 5e-5 / shrink, 6e-8 / shrink, 1e-4 / shrink)
        for phase, d in product(phases, tpot):
            pool = n * rng.uniform(3e4, 2e5)
            made.append(Column(f"{n} {phase} {d}", n, float(n), step, pool, 64, 2048, d, phase))
    return made


def enumerated(program, gpus, objective):
    """The best of all numbers of groups, each with its flows by SciPy."""
    rows, classes, kinds = program.loads.shape
    allowed = np.isfinite(program.loads).all(axis=0)
    start = np.array([p != "decode" for p in program.phases])
    flows = classes * kinds
    best = None
    for z in product(*(range(gpus // n + 1) for n in program.gpus)):
        if np.dot(z, program.gpus) > gpus:
            continue
        a_ub, b_ub, a_eq, b_eq = [], [], [], []
        for r, k in product(range(rows), range(kinds)):
            row = np.zeros((classes, kinds))
            row[:, k] = np.where(allowed[:, k], program.loads[r, :, k], 0)
            a_ub.append([*row.ravel(), 0])
            b_ub.append(z[k])
        for i in range(classes):
            row = np.zeros((classes, kinds))
            row[i] = start
            if objective == "growth":
                a_eq.append([*row.ravel(), -program.rates[i]])
                b_eq.append(0)
            else:
                (a_ub if objective == "goodput" else a_eq).append([*row.ravel(), 0])
                (b_ub if objective == "goodput" else b_eq).append(program.rates[i])
            row = np.zeros((classes, kinds))
            row[i] = [{"both": 0, "prefill": 1, "decode": -1}[p] for p in program.phases]
            a_eq.append([*row.ravel(), 0])
            b_eq.append(0)
        cost = np.zeros(flows + 1)
        if objective == "growth":
            cost[-1] = -1
        elif objective == "goodput":
            cost[:-1] = -(program.values[:, None] * start[None, :]).ravel()
        bounds = [(0, None if yes else 0) for yes in allowed.ravel()] + [(0, None)]
        found = linprog(cost, a_ub, b_ub, a_eq, b_eq, bounds)
        if found.status != 0:
            continue
        value = np.dot(z, program.prices) if objective == "cost" else -found.fun
        if best is None or (value < best if objective == "cost" else value > best):
            best = value
    return best


@pytest.mark.parametrize("objective", ["goodput", "cost", "growth"])
@pytest.mark.parametrize("phases", [("both",), ("both", "prefill", "decode")])
@pytest.mark.parametrize("seed", range(4))
def test_as_good_as_all_numbers_of_groups(objective, phases, seed):
    gpus, kinds = (6, 3) if phases == ("both",) else (4, 2)
    data = traffic(seed)
    program = formulate(data, columns(seed, kinds, phases))
    scale = enumerated(program, gpus, "growth") * (0.7 if objective == "cost" else 1.3)
    program = replace(program, rates=program.rates * scale)
    found = solve(program, gpus, objective)
    best = enumerated(program, gpus, objective)
    assert found.objective == pytest.approx(best, rel=1e-6)
    assert found.gap <= 1e-6
    assert found.groups @ program.gpus <= gpus
    used = np.where(np.isfinite(program.loads), program.loads, 0)
    assert np.all(np.einsum("rik,ik->rk", used, found.flows) <= found.groups + 1e-6)
    assert np.all(found.flows[~np.isfinite(program.loads).all(axis=0)] == 0)


def test_cost_of_too_much_is_none():
    program = formulate(traffic(0), columns(0))
    grown = solve(program, 6, "growth").objective
    assert solve(replace(program, rates=program.rates * grown * 1.01), 6, "cost") is None
    assert solve(replace(program, rates=program.rates * grown * 0.99), 6, "cost") is not None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), overload=st.floats(0.3, 3))
def test_rows_are_the_limits_of_the_operating_point(seed, overload):
    """Every group of an optimal plan settles within its limits, and a plan beyond capacity touches one."""
    data, kinds = traffic(seed, tpot=[0.05, 0.05, 0.1]), columns(seed, 2, tpot=(0.05, 0.1))
    data = replace(data, rates=data.rates * overload)
    found = solve(formulate(data, kinds), 8, "goodput")
    touched = []
    for k in np.flatnonzero(found.groups):
        column, z = kinds[k], found.groups[k]
        point = operating_point(data.demands, found.flows[:, k] / z, column.step)
        use = max(
            point.tpot / column.tpot,
            point.cached / column.pool,
            point.running / column.max_running,
            point.prefill / column.max_batched,
        )
        assert use <= 1 + 1e-6
        touched.append(use)
        assert not np.any(found.flows[:, k][data.tpot < column.tpot])
    if found.admitted.sum() < data.rates.sum() * (1 - 1e-6):
        assert max(touched) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_flows_leave_the_fullest_group_most_room(seed):
    """With the groups found, no flows that serve all use less of the fullest one."""
    program = formulate(traffic(seed, tpot=[0.05, 0.05, 0.1]), columns(seed, 2, tpot=(0.05, 0.1)))
    program = replace(program, rates=program.rates * 0.83 * solve(program, 6, "growth").objective)
    found = solve(program, 6, "cost")
    rows, classes, kinds = program.loads.shape
    allowed = np.isfinite(program.loads).all(axis=0)
    used = np.where(allowed, program.loads, 0)
    use = np.einsum("rik,ik->rk", used, found.flows)
    fullest = (use[:, found.groups > 0] / found.groups[found.groups > 0]).max()
    a_ub = [
        [*np.outer(used[r, :, k], np.arange(kinds) == k).ravel(), -found.groups[k]]
        for r, k in product(range(rows), range(kinds))
    ]
    a_eq = [[*np.repeat(np.arange(classes) == i, kinds).astype(float), 0] for i in range(classes)]
    bounds = [(0, None if yes else 0) for yes in allowed.ravel()] + [(0, None)]
    least = linprog([0] * (classes * kinds) + [1], a_ub, np.zeros(len(a_ub)), a_eq, program.rates, bounds).fun
    assert fullest == pytest.approx(least, rel=1e-6)


def test_prices_are_differences():
    """The price of a GPU and of a row, against solving again with a little more of each."""
    data, kinds = traffic(2), columns(2, 1)
    program = formulate(data, kinds)
    program = replace(program, rates=program.rates * 5 * solve(program, 4, "growth").objective)
    found, more = (solve(program, gpus, "goodput") for gpus in (4, 5))
    assert found.gpu_price == pytest.approx(more.objective - found.objective, rel=1e-6)
    k = 0
    r = int(np.argmax(found.row_prices[:, k]))
    roomier = program.loads.copy()
    roomier[r, :, k] *= found.groups[k] / (found.groups[k] + 1e-4)  # as if the row had 1e-4 groups more
    gain = solve(replace(program, loads=roomier), 4, "goodput").objective - found.objective
    assert found.row_prices[r, k] == pytest.approx(gain / 1e-4, rel=1e-3)


def test_who_may_go_where():
    data = traffic(0)
    column = columns(0, 1)[0]
    assert may_serve(data, column).all()
    assert not may_serve(data, replace(column, tpot=0.11)).any()
    assert not may_serve(data, replace(column, tpot=column.step.t0)).any()
    longest = np.array([d.longest for d in data.demands])
    order = np.argsort(longest)
    between = float(longest[order[1]])
    assert may_serve(data, replace(column, pool=between)).tolist() == (longest <= between).tolist()
    slow = replace(column, step=replace(column.step, per_prefill_token=0.01))
    assert first_token(slow, np.array([3000.0]))[0] == pytest.approx(2 * slow.step.t0 + 30)
    assert may_serve(data, slow).tolist() == (first_token(slow, data.prompts) <= 5).tolist()
    assert np.all(np.isinf(formulate(data, [replace(column, tpot=0.2)]).loads))


def test_refusals():
    data = traffic(0)
    with pytest.raises(ValueError, match=r"class 'b': rates is -1.0; expected > 0"):
        replace(data, rates=np.array([1.0, -1.0, 1.0]))
    with pytest.raises(ValueError, match="phase is 'mixed'"):
        replace(columns(0, 1)[0], phase="mixed")
    with pytest.raises(ValueError, match="objective is 'best'"):
        solve(formulate(data, columns(0)), 4, "best")
    assert isinstance(formulate(data, columns(0)), Program)
