"""Pollaczek-Khinchin against textbook answers and a discrete-event simulation of the same queues."""

import ciw
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.queueing import mean_residual, mean_wait, wait_at

# Lognormal with mean 1 and squared coefficient of variation 5: heavier than any exponential tail.
SIGMA = np.sqrt(np.log(6.0))
QUEUES = {
    "M/M/1": (ciw.dists.Exponential(1.0), 2.0),
    "M/D/1": (ciw.dists.Deterministic(1.0), 1.0),
    "M/G/1 lognormal": (ciw.dists.Lognormal(-(SIGMA**2) / 2, SIGMA), 6.0),
}


def simulated_wait(service, rate: float, customers: int, seed: int) -> tuple[float, float]:
    """Mean wait of a single-server FIFO queue and its standard error (batch means), by Ciw."""
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate)],
        service_distributions=[service],
        number_of_servers=[1],
    )
    ciw.seed(seed)
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_customers(customers, method="Finish")
    records = sorted(simulation.get_all_records(), key=lambda r: r.arrival_date)
    waits = np.array([r.waiting_time for r in records])[customers // 10 :]
    batches = np.array([b.mean() for b in np.array_split(waits, 20)])
    return batches.mean(), batches.std(ddof=1) / np.sqrt(batches.size)


@pytest.mark.parametrize("name", QUEUES)
def test_agrees_with_a_discrete_event_simulation(name):
    service, second_moment = QUEUES[name]
    rate = 0.5
    simulated, error = simulated_wait(service, rate, customers=30_000, seed=7)
    expected = mean_wait(rate, 1.0, second_moment)
    assert error < 0.15 * expected, "the simulation is too noisy to test anything"
    assert abs(simulated - expected) < 4 * error
    # A formula without the second moment (M/M/1's or M/D/1's for all) would be caught:
    others = [m for _, m in QUEUES.values() if m != second_moment]
    assert all(abs(simulated - mean_wait(rate, 1.0, m)) > 4 * error for m in others)


def test_textbook_values():
    assert mean_wait(0.8, 1.0, 2.0) == pytest.approx(4.0)  # M/M/1: v / (mu (1 - v))
    assert mean_wait(0.8, 1.0, 1.0) == pytest.approx(2.0)  # M/D/1: half of it
    assert wait_at(0.8, 1.0) == pytest.approx(4.0)
    assert mean_residual(2.0, 8.0) == pytest.approx(2.0)


def test_arrays_broadcast_and_numbers_stay_numbers():
    waits = wait_at(np.array([0.0, 0.5, 1.0, 7.0, np.inf]), 3.0)
    assert waits.tolist() == [0.0, 3.0, np.inf, np.inf, np.inf]
    assert isinstance(wait_at(0.5, 3.0), float)
    assert isinstance(mean_wait(0.5, 1.0, 2.0), float)
    assert mean_residual(np.array([0.0, 1.0]), np.array([0.0, 1.0])).tolist() == [0.0, 0.5]


@given(st.floats(0, 5), st.floats(0, 100))
def test_never_negative_and_infinite_exactly_when_unstable(utilisation, residual):
    wait = wait_at(utilisation, residual)
    assert wait >= 0
    assert np.isinf(wait) == (utilisation >= 1)


@given(st.floats(0.01, 10), st.floats(0, 20), st.floats(0.001, 0.999))
def test_moments_and_utilisation_give_the_same_wait(mean, cv2, utilisation):
    second = mean**2 * (1 + cv2)
    assert mean_wait(utilisation / mean, mean, second) == pytest.approx(
        (1 + cv2) * mean / 2 * utilisation / (1 - utilisation), rel=1e-9
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: wait_at(-0.1, 1.0), "utilisation: -0.1"),
        (lambda: wait_at(np.array([0.2, np.nan]), 1.0), "utilisation: nan"),
        (lambda: mean_residual(2.0, 3.9), "second moment of service: 3.9"),
        (lambda: mean_wait(-1.0, 1.0, 2.0), "arrival rate: -1"),
    ],
)
def test_errors_say_what_was_found(call, message):
    with pytest.raises(ValueError, match=message):
        call()
