"""The headroom u* in SGLang's terms: ``--schedule-conservativeness``.

SGLang admits a request iff prompt and page fit what is free less two sums: its own allowance
A = min(max_new_tokens - generated, 4096), and ratio x the allowances of those that run. The ratio starts
at min(0.7 x, 1) for a conservativeness x and falls to 0.14 of that in 600 iterations. There, with B running,
an admission leaves free

    0.14 min(0.7 x, 1) B E[A of a running request] + A of a fresh one,

which this module sets to u*. It depends on ``max_new_tokens`` and not on what requests use of it; u* does
not. Where a fresh allowance is u* or more, x = 0 is the nearest. (Source: ``NewTokenRatioTracker``
and ``PrefillAdder`` of SGLang 0.5; https://github.com/sgl-project/sglang.)
"""

from __future__ import annotations

import numpy as np

from kvcache.engine.headroom import headroom
from kvcache.engine.joint import JointLengths
from kvcache.engine.operating import Demand
from kvcache.engine.steps import StepCost

__all__ = ["reserved_tokens", "schedule_conservativeness"]

START, FLOOR, CLIP = 0.7, 0.14, 4096


def _allowances(lengths: JointLengths, max_new_tokens: int, pool: float, page: int) -> tuple[float, float]:
    """B E[A] of the running requests at saturation, and A of a fresh one, tokens."""
    xi = np.minimum(lengths.outputs, max_new_tokens).astype(float)
    flat = max(max_new_tokens - CLIP, 0)  # up to that age the clip binds
    early, late = np.minimum(xi, flat), np.maximum(xi - flat, 0)
    # Of a running request every age below xi is as likely: sum_a min(m - a, clip) over a < xi.
    total = CLIP * early + late * (max_new_tokens - flat) - late * (late - 1) / 2
    mean = lengths.mean(total) / lengths.mean(xi)
    running = pool / Demand.of(lengths, page).context
    return running * mean, float(min(max_new_tokens, CLIP))


def reserved_tokens(
    lengths: JointLengths, pool: float, max_new_tokens: int, conservativeness: float = 1.0, page: int = 1
) -> float:
    """Tokens that SGLang leaves free at an admission, on average, in a pool that is kept full.

    Raises
    ------
    ValueError
        For a conservativeness below 0.
    """
    if not 0 <= conservativeness < np.inf:
        raise ValueError(f"conservativeness: {conservativeness}; expected >= 0 and finite")
    ahead, own = _allowances(lengths, max_new_tokens, pool, page)
    return FLOOR * min(START * conservativeness, 1.0) * ahead + own


def schedule_conservativeness(
    lengths: JointLengths,
    pool: float,
    step_cost: StepCost,
    max_new_tokens: int,
    page: int = 1,
    prefix_cache: bool = True,
) -> float:
    """The conservativeness with which SGLang keeps u* tokens free, within [0, 1 / 0.7].

    Parameters
    ----------
    max_new_tokens : what requests ask for at most. page : tokens per page (``--page-size``).
    """
    ahead, own = _allowances(lengths, max_new_tokens, pool, page)
    wanted = headroom(lengths, pool, step_cost, page, prefix_cache) - own
    return float(np.clip(wanted / (FLOOR * START * ahead), 0.0, 1 / START))
