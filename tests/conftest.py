"""Settings all tests share."""

from __future__ import annotations

import os

# Before numpy is imported: the sums of several threads would add up in another order.
for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import settings  # noqa: E402

# Fresh examples on a developer's machine, the same ones in CI; a slow machine is no failure.
settings.register_profile("kvcache", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvcache")
