"""The joint problem as a mixed-integer bilinear program (equation 8), in Pyomo.

Two forms of the same problem, which :func:`kvcache.policy.evaluate` defines:

literal
    (8) as it stands: the dual of the worst case with one theta_{i,n} per sample, (8c)-(8g).
compact
    one epigraph variable per class above tangents of the convex WC_i. Tangents are added where the
    solution needs them until model and :func:`evaluate` agree, so the size depends on the accuracy
    asked for and not on the number of samples.

The terms a_i WC_i, pi_ik r_i, delta_ik pi_ik, z_k delta_ik, v_k z_k, W_k v_k and pi_ik W_k are left
bilinear, for the solver's spatial branch and bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import pyomo.environ as pyo
from numpy.typing import ArrayLike, NDArray
from pyomo.contrib.solver.common.factory import SolverFactory
from pyomo.contrib.solver.common.results import TerminationCondition

from kvcache.ambiguity import Wasserstein1
from kvcache.policy import Policy, Solution, Status, evaluate, repaired
from kvcache.problem import Problem
from kvcache.solvers.relaxation import Data

__all__ = ["SOLVERS", "build", "solve"]

#: Pyomo's interface to each solver.
SOLVERS = {"scip": "scip_direct", "gurobi": "gurobi_direct_minlp"}
#: Two ways in which SCIP 10.0, as Python wheels ship it, takes the process with it. Pyomo reads its log
#: through a pipe in a thread that cannot run while SCIP does, so that a log longer than a pipe's 64 kB waits
#: for ever; and on the literal 6 x 6 x 300 program it aborts within Ipopt, which only heuristics call.
SCIP_OPTIONS = {
    "display/verblevel": 0,
    **{f"heuristics/{name}/freq": -1 for name in ("subnlp", "nlpdiving", "multistart", "mpec")},
}

# First tangents of each WC_i in the compact form.
_FIRST_CUTS = 12
_MAX_ROUNDS = 30


def build(problem: Problem, *, compact: bool = False, cuts: int = _FIRST_CUTS) -> pyo.ConcreteModel:
    """The Pyomo model of a problem; ``cuts`` tangents of each WC_i in the compact form.

    Memory rows are divided by M_k and reservations are in tokens.

    Raises
    ------
    ValueError
        When the literal form is asked for another set than a Wasserstein-1 ball.
    """
    if not compact and not isinstance(problem.ambiguity, Wasserstein1):
        raise ValueError(
            "the literal form is the dual of a Wasserstein-1 ball, not of "
            f"{type(problem.ambiguity).__name__}; use compact=True"
        )
    costs, kappa = problem.costs, problem.headroom
    capacity, prefixes = problem.kv_tokens, problem.prefix_tokens
    loads, service = problem.offered_loads, problem.service_times
    rates, inputs, longest = problem.arrival_rates, problem.input_tokens, problem.max_output_tokens
    phi = problem.queueing_factors
    top = problem.utilisation_bounds

    m = pyo.ConcreteModel(problem.name or "joint")
    m.I = pyo.RangeSet(0, len(problem.classes) - 1)
    m.K = pyo.RangeSet(0, len(problem.configs) - 1)
    m.z = pyo.Var(m.K, domain=pyo.NonNegativeIntegers, bounds=lambda _, k: (0, int(problem.max_groups[k])))
    m.pi = pyo.Var(m.I, m.K, bounds=(0, 1))
    m.delta = pyo.Var(m.I, m.K, domain=pyo.Binary)
    m.r = pyo.Var(m.I, bounds=lambda _, i: (inputs[i], inputs[i] + longest[i]))
    m.s = pyo.Var(m.I, domain=pyo.NonNegativeReals)
    m.a = pyo.Var(m.I, bounds=(0, 1))
    m.wc = pyo.Var(m.I, domain=pyo.NonNegativeReals)
    m.v = pyo.Var(m.K, bounds=lambda _, k: (0, top[k]))
    m.W = pyo.Var(m.K, bounds=lambda _, k: (0, phi[k] * top[k] / (1 - top[k])))
    for i in m.I:
        if prefixes[i] == 0:
            for k in m.K:
                m.delta[i, k].fix(0)

    # (6a), with the worst case of a class bounded from below by the blocks at the end
    m.objective = pyo.Objective(
        expr=costs.gpu * sum(int(problem.group_gpus[k]) * m.z[k] for k in m.K)
        + sum(
            rates[i] * (m.a[i] * m.wc[i] + costs.slo * m.s[i] + costs.rejection * (1 - m.a[i])) for i in m.I
        )
    )
    # (6b) GPUs
    m.budget = pyo.Constraint(expr=sum(int(problem.group_gpus[k]) * m.z[k] for k in m.K) <= problem.gpus)
    # (6c) only to what is deployed
    m.deployed = pyo.Constraint(m.I, m.K, rule=lambda m, i, k: m.pi[i, k] <= m.z[k])
    # (6d) admission
    m.admission = pyo.Constraint(m.I, rule=lambda m, i: m.a[i] == sum(m.pi[i, k] for k in m.K))

    def requests(m: pyo.ConcreteModel, k: int) -> pyo.Expression:
        return sum(
            loads[i, k] / capacity[k] * m.pi[i, k] * (m.r[i] - prefixes[i] * m.delta[i, k]) for i in m.I
        )

    def cached(m: pyo.ConcreteModel, k: int) -> pyo.Expression:
        return sum(prefixes[i] / capacity[k] * m.delta[i, k] * m.z[k] for i in m.I)

    # (6e) memory, times z_k / M_k
    m.memory = pyo.Constraint(
        m.K, rule=lambda m, k: (1 + kappa) * requests(m, k) + cached(m, k) <= 1.0 * m.z[k]
    )
    # (6f) tardiness, (7) waiting at the utilisation of a group
    m.tardiness = pyo.Constraint(
        m.I,
        rule=lambda m, i: (
            m.s[i]
            >= sum(m.pi[i, k] * (m.W[k] + service[i, k]) for k in m.K) - m.a[i] * problem.latency_slos[i]
        ),
    )
    m.utilisation = pyo.Constraint(m.K, rule=lambda m, k: m.v[k] * m.z[k] >= requests(m, k) + cached(m, k))
    m.waiting = pyo.Constraint(m.K, rule=lambda m, k: m.W[k] - m.W[k] * m.v[k] >= phi[k] * m.v[k])

    if compact:
        m.cut = pyo.ConstraintList()
        for i in m.I:
            best = float(problem.unconstrained_reservations()[i])
            # Below the unconstrained reservation lies what a scarce memory asks for.
            grid = np.concatenate([np.linspace(0, best, cuts - 1), [longest[i]]])
            for eta in np.unique(grid):
                add_cut(m, problem, i, float(eta))
    else:
        _add_dual(m, problem)
    return m


def add_cut(m: pyo.ConcreteModel, problem: Problem, i: int, eta: float) -> None:
    """The tangent of WC_i at ``eta`` bounds wc_i from below."""
    value, slope = problem.ambiguity.cut(
        problem.classes[i].output, eta, problem.costs.preemption, problem.costs.waste
    )
    m.cut.add(m.wc[i] >= value + slope * (m.r[i] - problem.input_tokens[i] - eta))


def _add_dual(m: pyo.ConcreteModel, problem: Problem) -> None:
    """(8c)-(8g): gamma_i and one theta per sample."""
    c_p, c_w = problem.costs.preemption, problem.costs.waste
    drawn = [c.output.samples() for c in problem.classes]
    m.N = pyo.Set(initialize=[(i, n) for i in m.I for n in range(drawn[i][0].size)], dimen=2)
    # The slope of Q bounds the price of transport.
    m.gamma = pyo.Var(m.I, bounds=(0, max(c_p, c_w)))
    m.theta = pyo.Var(m.N, domain=pyo.NonNegativeReals)

    def eta(i: int) -> pyo.Expression:
        return m.r[i] - problem.input_tokens[i]

    def rows(m: pyo.ConcreteModel, i: int, n: int) -> list[pyo.Expression]:
        x, top = drawn[i][0][n], problem.max_output_tokens[i]
        return [
            c_p * (x - eta(i)),
            c_w * (eta(i) - x),
            c_p * (top - eta(i)) - m.gamma[i] * (top - x),
            c_w * eta(i) - m.gamma[i] * x,
        ]

    m.dual = pyo.Constraint(m.N, range(4), rule=lambda m, i, n, row: m.theta[i, n] >= rows(m, i, n)[row])
    m.worst = pyo.Constraint(
        m.I,
        rule=lambda m, i: (
            m.wc[i]
            >= m.gamma[i] * problem.ambiguity.radius_tokens(problem.classes[i].output)
            + sum(p * m.theta[i, n] for n, p in enumerate(drawn[i][1]))
        ),
    )


def _policy(m: pyo.ConcreteModel, problem: Problem, trim: bool) -> Policy:
    """The policy at the model's values, made feasible to the last digit."""

    def table(variable: pyo.Var) -> NDArray[np.float64]:
        return np.array([[pyo.value(variable[i, k], exception=False) or 0.0 for k in m.K] for i in m.I])

    groups = np.round([pyo.value(m.z[k]) for k in m.K]).astype(int)
    eta = np.array([pyo.value(m.r[i]) for i in m.I]) - problem.input_tokens
    return repaired(problem, groups, eta, table(m.pi), table(m.delta) > 0.5, trim=trim)


def solve(
    problem: Problem,
    *,
    solver: str = "scip",
    compact: bool = False,
    time_limit: float | None = None,
    gap: float = 1e-4,
    reservations: ArrayLike | None = None,
    solver_options: Mapping[str, object] | None = None,
) -> Solution:
    """Solve (8) by a general solver.

    Parameters
    ----------
    solver : ``scip`` or ``gurobi``.
    compact : the form without samples; see the module.
    time_limit : seconds for all solver calls together.
    gap : relative gap to stop at.
    reservations : (I,) prescribed r_i, tokens.
    solver_options : passed on under the solver's own names, such as {"limits/nodes": 1000} for SCIP.

    Returns
    -------
    Solution
        With the solver's proven bound. Where Gurobi's licence does not admit the model, or the solver gives
        up, ``status`` says so, ``message`` what it told, and ``policy`` is None, or the best one so far.

    Raises
    ------
    ValueError
        For an unknown solver, the literal form of another set, or ``reservations`` that do not fit the
        problem.
    """
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}; expected one of {sorted(SOLVERS)}")
    started = time.perf_counter()
    method = f"miblp-{'compact' if compact else 'literal'}-{solver}"
    model = build(problem, compact=compact)
    if reservations is not None:
        for i, eta in enumerate(Data.of(problem, reservations).low):
            model.r[i].fix(problem.input_tokens[i] + eta)
            if compact:
                add_cut(model, problem, i, eta)
    options = {**(SCIP_OPTIONS if solver == "scip" else {}), **(solver_options or {})}
    program_solver = SolverFactory(SOLVERS[solver])
    if not program_solver.available():
        return _nothing(Status.NOT_INSTALLED, f"{solver} is not installed", method, started)
    best: Solution | None = None
    bound, rounds, finished, failure = -np.inf, 0, True, ""
    while True:
        left = None if time_limit is None else time_limit - (time.perf_counter() - started)
        if left is not None and left <= 0:
            finished = False
            break
        rounds += 1
        try:
            results = program_solver.solve(
                model,
                time_limit=left,
                # In the compact form half the gap is left to the tangents.
                rel_gap=gap / 2 if compact else gap,
                load_solutions=False,
                raise_exception_on_nonoptimal_result=False,
                solver_options=options,
            )
        except Exception as error:  # each interface raises a type of its own, SCIP's a bare exception
            if "license" in str(error).lower():
                return _nothing(
                    Status.TOO_LARGE,
                    f"{error}; use compact=True, whose size does not depend on the number of samples, or "
                    "solver='scip'",
                    method,
                    started,
                )
            if not (str(error).startswith("SCIP: ") or type(error).__name__ == "GurobiError"):
                raise
            finished, failure = False, str(error)
            break
        if results.objective_bound is not None and np.isfinite(results.objective_bound):
            bound = max(bound, float(results.objective_bound))
        if results.incumbent_objective is None or not np.isfinite(results.incumbent_objective):
            finished = False
            break
        results.solution_loader.load_vars()
        policy = _policy(model, problem, trim=reservations is None)
        result = evaluate(problem, policy)
        if best is None or result.objective < best.objective:
            best = Solution.of(
                problem, policy, seconds=0.0, status=Status.FEASIBLE, method=method, iterations=rounds
            )
        if results.termination_condition != TerminationCondition.convergenceCriteriaSatisfied:
            finished = False
            break
        if not compact or best.objective - bound <= gap * abs(best.objective) or rounds == _MAX_ROUNDS:
            break
        eta = policy.reservations - problem.input_tokens
        missing = result.worst_case - np.array([pyo.value(model.wc[i]) for i in model.I])
        if np.all(missing <= 1e-9 * (1 + result.worst_case)):
            break
        for i in model.I:
            if missing[i] > 0:
                add_cut(model, problem, i, float(np.clip(eta[i], 0, problem.max_output_tokens[i])))
    seconds = time.perf_counter() - started
    if best is None:
        status = Status.FAILED if failure else Status.NO_POLICY
        return _nothing(status, failure or f"no policy within {time_limit} s", method, started, bound)
    closed = best.objective - bound <= gap * abs(best.objective) * (1 + 1e-6)
    return Solution.of(
        problem,
        best.policy,
        seconds=seconds,
        status=Status.OPTIMAL if finished and closed else Status.FEASIBLE,
        method=method,
        lower_bound=bound,
        iterations=rounds,
        message=failure,
    )


def _nothing(status: Status, message: str, method: str, started: float, bound: float = -np.inf) -> Solution:
    return Solution(None, np.inf, {}, bound, time.perf_counter() - started, status, method, message=message)
