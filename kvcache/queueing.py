"""Mean waits in an M/G/1 queue (Pollaczek-Khinchin), equation 7.

With Poisson arrivals of rate ``a`` and a service time ``T``, the mean wait before service is

    W = a E[T^2] / (2 (1 - v)) = phi v / (1 - v),   v = a E[T],   phi = E[T^2] / (2 E[T]),

where ``phi``, the mean residual service time, equals (1 + C2) E[T] / 2 with C2 the squared coefficient
of variation (Kleinrock, Queueing Systems, Volume 1, 1975, section 5.7). The paper puts the memory
utilisation of a serving group in the place of ``v`` (choice A3). A queue with v >= 1 has no mean wait:
its wait is infinite here, never negative.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["mean_residual", "mean_wait", "wait_at"]

Floats = NDArray[np.float64]


def _non_negative(value: ArrayLike, what: str) -> Floats:
    array = np.asarray(value, dtype=float)
    # A NaN fails the comparison too; an infinite utilisation is an unstable queue and passes.
    bad = ~(array >= 0)
    if np.any(bad):
        raise ValueError(f"{what}: {array[bad].flat[0]}; expected >= 0")
    return array


def _plain(value: Floats) -> float | Floats:
    return float(value) if value.ndim == 0 else value


def mean_residual(mean: ArrayLike, second_moment: ArrayLike) -> float | Floats:
    """phi = E[T^2] / (2 E[T]), seconds; 0 where nothing is served (mean 0).

    Parameters
    ----------
    mean, second_moment : numbers or arrays, seconds and seconds squared.

    Raises
    ------
    ValueError
        For a negative moment, or a second moment below the square of the mean (no such distribution).
    """
    mean, second_moment = np.broadcast_arrays(
        _non_negative(mean, "mean service time"), _non_negative(second_moment, "second moment of service")
    )
    # The slack covers the rounding of sums over many requests.
    bad = second_moment < mean**2 * (1 - 1e-9)
    if np.any(bad):
        raise ValueError(
            f"second moment of service: {second_moment[bad].flat[0]}; expected >= the squared mean "
            f"{mean[bad].flat[0] ** 2}"
        )
    busy = mean > 0
    return _plain(np.where(busy, second_moment / np.where(busy, 2 * mean, 1.0), 0.0))


def wait_at(utilisation: ArrayLike, residual: ArrayLike) -> float | Floats:
    """W = phi v / (1 - v), seconds, from the utilisation v and the mean residual service time phi.

    Infinite where v >= 1: the queue is unstable.
    """
    utilisation, residual = np.broadcast_arrays(
        _non_negative(utilisation, "utilisation"), _non_negative(residual, "mean residual service time")
    )
    stable = utilisation < 1
    v = np.where(stable, utilisation, 0.0)
    return _plain(np.where(stable, residual * v / (1 - v), np.inf))


def mean_wait(arrival_rate: ArrayLike, mean: ArrayLike, second_moment: ArrayLike) -> float | Floats:
    """Mean wait before service in M/G/1, seconds, from the rate (1/s) and the first two moments of service.

    Infinite where arrival_rate * mean >= 1.
    """
    rate = _non_negative(arrival_rate, "arrival rate")
    return wait_at(rate * np.asarray(mean, dtype=float), mean_residual(mean, second_moment))
