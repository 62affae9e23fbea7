"""What the paper compares: its algorithm, its exact program, fixed reservations and other systems.

`baselines` choose reservations; `bcd` (Algorithm 1) and `miblp` (equation 8 in a general
solver) solve the joint problem, beside the certified solver of the core; `forecasts` compete with
`kvcache.rolling`. In the simulated engine, `rivals` are other admission rules, and `systems` the serving
systems of Table I and its neighbours.
"""

from __future__ import annotations

from numpy.typing import ArrayLike

from kvcache import solvers
from kvcache.paper.methods import bcd
from kvcache.policy import Policy, Solution
from kvcache.problem import Problem

__all__ = ["METHODS", "solve"]

#: ``certified`` proves a gap, ``bcd`` is Algorithm 1, ``miblp`` is equation 8 in a general solver.
METHODS = ("certified", "bcd", "miblp")


def solve(
    problem: Problem,
    method: str = "certified",
    *,
    time_limit: float | None = None,
    gap: float = 1e-4,
    start: Policy | Solution | None = None,
    reservations: ArrayLike | None = None,
    **options: object,
) -> Solution:
    """Solve the joint problem (6) by one of three methods.

    Parameters
    ----------
    method : one of `METHODS`.
    time_limit : seconds; the best policy found by then is returned.
    gap : relative gap at which ``certified`` and ``miblp`` stop; ``bcd`` proves none and ignores it.
    start : a policy or solution to start from (``certified`` and ``bcd``).
    reservations : (I,) prescribed r_i in tokens, such as a fixed quantile; they then stay as they are.
    options : of the method, see `kvcache.solvers.solve`, `kvcache.paper.methods.bcd.solve` and
        `kvcache.paper.methods.miblp.solve`.

    Returns
    -------
    Solution
        Its objective is that of `kvcache.policy.evaluate`. Where nothing can be served at a profit, or no
        group can be deployed, the policy rejects every request.

    Raises
    ------
    ValueError
        For an unknown method, and for ``start`` with ``miblp``, which takes none.
    """
    if method == "certified":
        return solvers.solve(
            problem, time_limit=time_limit, gap=gap, start=start, reservations=reservations, **options
        )
    if method == "bcd":
        return bcd.solve(problem, time_limit=time_limit, start=start, reservations=reservations, **options)
    if method == "miblp":
        if start is not None:
            raise ValueError(
                "start: method 'miblp' takes none; use 'certified' or 'bcd' to start from a policy"
            )
        from kvcache.paper.methods import miblp  # here, because Pyomo takes seconds to import

        return miblp.solve(problem, time_limit=time_limit, gap=gap, reservations=reservations, **options)
    raise ValueError(f"method is {method!r}; expected one of {METHODS}")
