"""One door to the three solvers of the joint problem."""

from __future__ import annotations

from numpy.typing import ArrayLike

from kvcache.instance import Instance
from kvcache.policy import Policy, Solution
from kvcache.solvers import bcd, certify

__all__ = ["METHODS", "solve"]

#: ``certified`` proves a gap, ``bcd`` is Algorithm 1, ``miblp`` is equation 8 in a general solver.
METHODS = ("certified", "bcd", "miblp")


def solve(
    instance: Instance,
    method: str = "certified",
    *,
    time_limit: float | None = None,
    gap: float = 1e-4,
    start: Policy | Solution | None = None,
    reservations: ArrayLike | None = None,
    **options: object,
) -> Solution:
    """Solve the joint problem (6).

    Parameters
    ----------
    method : one of `METHODS`.
    time_limit : seconds; the best policy found by then is returned.
    gap : relative gap at which ``certified`` and ``miblp`` stop; ``bcd`` proves none and ignores it.
    start : a policy or solution to start from (``certified`` and ``bcd``).
    reservations : (I,) prescribed r_i in tokens, such as a fixed quantile; they then stay as they are.
    options : of the method, see `kvcache.solvers.certify.certify`, `kvcache.solvers.bcd.solve` and
        `kvcache.solvers.miblp.solve`.

    Returns
    -------
    Solution
        Its objective is that of `kvcache.policy.evaluate`. Where nothing can be served at a profit, or no
        group can be deployed, the policy rejects every request.

    Raises
    ------
    ValueError
        For an unknown method, and for ``start`` with ``miblp``, which takes none.

    Examples
    --------
    >>> from kvcache import instances, solve
    >>> solution = solve(instances.scalability(2, 2, 20, gpus=8, seed=0))
    >>> solution.status, solution.gap <= 1e-4
    ('optimal', True)
    """
    if method == "certified":
        return certify.certify(
            instance, time_limit=time_limit, gap=gap, start=start, reservations=reservations, **options
        )
    if method == "bcd":
        return bcd.solve(instance, time_limit=time_limit, start=start, reservations=reservations, **options)
    if method == "miblp":
        if start is not None:
            raise ValueError(
                "start: method 'miblp' takes none; use 'certified' or 'bcd' to start from a policy"
            )
        from kvcache.solvers import miblp  # here, because Pyomo takes seconds to import

        return miblp.solve(instance, time_limit=time_limit, gap=gap, reservations=reservations, **options)
    raise ValueError(f"method is {method!r}; expected one of {METHODS}")
