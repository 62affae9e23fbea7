"""Request classes from tables: bands against brute force, rates by hand, and what is refused."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.requests import prompt_bands, workload


def table(n=1000, rate=2.0, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "arrival_s": np.cumsum(rng.exponential(1 / rate, n)),
            "input_tokens": 1 + rng.integers(0, 1000, n),
            "output_tokens": 1 + rng.integers(0, 300, n),
        }
    )


def scatter(inputs, outputs, edges):
    points = np.stack([np.log1p(inputs), np.log(outputs)])
    band = np.searchsorted(edges, inputs, side="left")
    return sum(
        np.sum((points[:, band == b] - points[:, band == b].mean(axis=1, keepdims=True)) ** 2)
        for b in np.unique(band)
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), bands=st.integers(2, 3))
def test_bands_are_the_best_of_all(seed, bands):
    rng = np.random.default_rng(seed)
    inputs, outputs = rng.integers(1, 12, 60) ** 2, rng.integers(1, 500, 60)
    outputs = np.where(inputs > 50, 1 + outputs // 20, outputs)
    found = prompt_bands(inputs, outputs, bands, bins=1000, gain=0.0)
    cuts = np.unique(inputs)[:-1]
    least = min(scatter(inputs, outputs, np.array(c)) for c in combinations(cuts, bands - 1))
    assert scatter(inputs, outputs, found) == pytest.approx(least)


def test_two_kinds_of_work_become_two_bands():
    rng = np.random.default_rng(0)
    data = table(2000)
    long = rng.random(2000) < 0.3
    data["input_tokens"] = np.where(long, rng.integers(5000, 6000, 2000), rng.integers(100, 200, 2000))
    data["output_tokens"] = np.where(long, rng.integers(5, 10, 2000), rng.integers(400, 600, 2000))
    found = workload(data, rate=1.0)
    assert len(found.names) == 2
    assert 199 <= int(found.names[0].removeprefix("prompt<=")) < 5000
    assert found.rates == pytest.approx([np.mean(~long), np.mean(long)])
    assert found.lengths[1].mean_output < 10 < found.lengths[0].mean_output
    assert "bands of the prompt" in found.found


def test_a_class_column_and_rules():
    data = table().assign(**{"class": np.where(np.arange(1000) % 4 == 0, "b", "a")})
    found = workload(data, rate=4.0)
    assert found.names == ("a", "b")
    assert found.rates.tolist() == [3.0, 1.0]
    ruled = workload(data, rate=4.0, rules={"long": "input_tokens > 500", "talk": "output_tokens > 150"})
    assert ruled.names == ("long", "talk", "other")
    codes = ruled.requests["class"].to_numpy()
    assert np.array_equal(codes == 0, data["input_tokens"] > 500)
    assert np.array_equal(codes == 2, (data["input_tokens"] <= 500) & (data["output_tokens"] <= 150))
    with pytest.raises(ValueError, match=r"'never' .* matches no request"):
        workload(data, rate=1.0, rules={"never": "input_tokens < 0"})


def test_halves_are_disjoint_and_whole():
    found = workload(table(), rate=1.0)
    assert len(found.training) + len(found.held_out) == 1000
    assert not set(found.training.index) & set(found.held_out.index)
    assert sum(law.total for law in found.lengths) == len(found.training)


def test_the_rate_of_a_percentile_of_windows():
    """One request/s for nine windows of 100 s, five in the tenth."""
    arrival = np.concatenate([np.arange(0, 900, 1.0), np.arange(900, 1000, 0.2), [1000.0]])
    data = table(arrival.size).assign(arrival_s=arrival)
    at = {p: workload(data, classes=1, window_s=100, percentile=p).rate for p in (50, 100)}
    assert at == {50: pytest.approx(1.0), 100: pytest.approx(5.0)}
    assert workload(data, classes=1, window_s=100).rate_table().to_numpy()[9, 0] == pytest.approx(5.0)


def test_drift_is_what_chance_does_not_explain():
    still = workload(table(20_000), classes=1)
    assert still.drift == (pytest.approx(1, abs=0.03), pytest.approx(1, abs=0.03))
    data = table(20_000)
    data["output_tokens"] = np.where(
        np.arange(20_000) < 10_000, data["output_tokens"], 300 + data["output_tokens"]
    )
    low, high = workload(data, classes=1).drift
    assert low == pytest.approx(0.5, abs=0.05)
    assert high == pytest.approx(1.5, abs=0.05)


def test_prefixes_are_taken_off_the_prompts():
    blocks = [np.array([1, 2, 3]), np.array([1, 2, 9]), np.array([1, 2, 3])]
    data = pd.DataFrame(
        {"arrival_s": [0.0, 1, 2], "input_tokens": 48, "output_tokens": 5, "prefix_blocks": blocks}
    )
    found = workload(data, rate=1.0, prefix_block=16, prefix_pool=1000)
    assert found.requests["cached_tokens"].tolist() == [0, 32, 32]
    assert found.requests["input_tokens"].tolist() == [48, 16, 16]
    assert found.longest.tolist() == [53]
    assert workload(data, rate=1.0).requests["cached_tokens"].tolist() == [0, 0, 0]


def test_another_window_keeps_the_classes():
    found = workload(table().assign(**{"class": np.where(np.arange(1000) % 4 == 0, "b", "a")}))
    later = table(500, rate=5.0, seed=1).assign(**{"class": "b"})
    window = found.like(later)
    assert window.names == ("a", "b")
    assert window.rates[1] == pytest.approx(5.0, rel=0.1)
    with pytest.raises(ValueError, match="class 'c'; known are"):
        found.like(later.assign(**{"class": "c"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": 3.0}, "all 1,000 arrive at one instant"),
        ({"arrival_s": np.nan}, "all 1,000 arrive at one instant or have no times"),
        ({"output_tokens": 0}, "row 0: output_tokens is 0; expected >= 1"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        workload(table().assign(**change))


def test_refused_tables():
    with pytest.raises(ValueError, match=r"no column \['output_tokens'\]"):
        workload(table().drop(columns="output_tokens"))
    with pytest.raises(ValueError, match="no rows"):
        workload(table().iloc[:0])
    with pytest.raises(ValueError, match="rate is -1"):
        workload(table(), rate=-1)
