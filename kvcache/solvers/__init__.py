"""The certified solver of the joint problem. One door; nobody needs to read the rooms behind it to use it.

`certify` searches by branch and bound, `relaxation` bounds a box, `levels` tightens the bounds where waits
are convex, `polish` improves policies, `highs` runs the linear programs.

>>> solution = solve(problem)
>>> print(solution.status, solution.gap <= 1e-4)
optimal True
"""

from kvcache.solvers.certify import solve

__all__ = ["solve"]
