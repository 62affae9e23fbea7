"""Several groups behind a router: who goes where is decided at the door, then each group runs on its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kvcache.engine.simulation import Simulation, simulate

__all__ = ["Fleet", "by_shares", "round_robin", "simulate_groups"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Fleet:
    """What simulated groups did together.

    requests : as of a `Simulation`, in the order given, with ``group`` (-1 where rejected at the door, whose
    status is "rejected"). groups : the `Simulation` of each group. seconds : from the first arrival to the
    last finish.
    """

    requests: pd.DataFrame
    groups: tuple[Simulation, ...]
    seconds: float

    @property
    def preemptions(self) -> int:
        """Evictions of running requests, all together."""
        return sum(group.preemptions for group in self.groups)

    @property
    def throughput(self) -> float:
        """Requests finished per second, from the first arrival to the last finish."""
        return float((self.requests["status"] == "finished").sum() / self.seconds) if self.seconds else 0.0

    def __repr__(self) -> str:
        counts = self.requests["status"].value_counts()
        told = ", ".join(f"{count:,} {status}" for status, count in counts.items())
        return f"{len(self.groups)} groups: {told}; {self.preemptions:,} preemptions, {self.seconds:,.1f} s"


def simulate_groups(requests: pd.DataFrame, groups: Sequence[Mapping[str, Any]], to: ArrayLike) -> Fleet:
    """Serve ``requests`` by several groups.

    Parameters
    ----------
    requests : as of `simulate`.
    groups : for each group, the arguments of its `simulate` (``pool``, ``step_cost``, ``admission``, ...).
    to : (n,) the group of each request, from 0; -1 rejects it.

    Raises
    ------
    ValueError
        If ``to`` does not name a group for each request.
    """
    to = np.asarray(to, dtype=np.int64)
    if to.shape != (len(requests),) or not ((to >= -1) & (to < len(groups))).all():
        raise ValueError(
            f"to has shape {to.shape}; expected a group from -1 to {len(groups) - 1} per request"
        )
    runs = tuple(simulate(requests[to == k], **group) for k, group in enumerate(groups))
    rejected = requests[to == -1].assign(status="rejected", reason="")
    places = np.concatenate([np.flatnonzero(to == k) for k in (*range(len(groups)), -1)])
    rows = pd.concat([*(run.requests for run in runs), rejected]).iloc[np.argsort(places, kind="stable")]
    rows["preemptions"] = rows["preemptions"].fillna(0).astype(int)
    rows["recomputed_tokens"] = rows["recomputed_tokens"].fillna(0).astype(int)
    end = rows["finish_s"].max()
    seconds = float(end - rows["arrival_s"].min()) if np.isfinite(end) else 0.0
    return Fleet(rows.assign(group=to), runs, seconds)


def round_robin(requests: pd.DataFrame, groups: int) -> Ints:
    """(n,) one group after the other, in the order of arrival."""
    turn = np.empty(len(requests), dtype=np.int64)
    turn[np.argsort(requests["arrival_s"].to_numpy(), kind="stable")] = np.arange(len(requests)) % groups
    return turn


def by_shares(
    requests: pd.DataFrame, shares: Mapping[str, ArrayLike] | ArrayLike, rng: np.random.Generator
) -> Ints:
    """(n,) a group for each request, drawn with the given shares; what is left to 1 is rejected.

    Parameters
    ----------
    shares : (groups,) for all requests, or that for each ``class``.

    Raises
    ------
    ValueError
        If shares are negative or above 1 in all, or a class has none.
    """
    if not isinstance(shares, Mapping):
        shares = {"": shares}
        classes = np.full(len(requests), "")
    else:
        classes = requests["class"].astype(str).to_numpy()
    draw, to = rng.random(len(requests)), np.full(len(requests), -1, dtype=np.int64)
    for name in dict.fromkeys(classes):
        if name not in shares:
            raise ValueError(f"no shares for class {name!r}; expected one of {', '.join(shares)}")
        share = np.asarray(shares[name], dtype=float)
        if not (share >= 0).all() or share.sum() > 1 + 1e-9:
            raise ValueError(f"class {name!r}: shares are {share.tolist()}; expected >= 0, at most 1 in all")
        place = np.searchsorted(np.cumsum(share), draw[classes == name], side="right")
        to[classes == name] = np.where(place < share.size, place, -1)
    return to
