"""Step costs: linear and measured, against sums by hand and SciPy's interpolator."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import RegularGridInterpolator

from kvcache.engine import StepCost, StepTable

LINEAR = StepCost(0.0310602, 9.11623e-5, 5.31738e-8, 2.2082e-4)
B, K, P = np.array([1.0, 8, 32, 256]), np.array([0.0, 1e4, 1e5, 4e5]), np.array([0.0, 128, 2048])
GRID = np.meshgrid(B, K, P, indexing="ij")


def bent(decoding, cached, prefill):
    """A step that is concave in the batch and cheaper where prompts share the reading of weights."""
    return LINEAR.seconds(decoding, cached, 0.9 * prefill) + 1e-3 * np.sqrt(decoding)


TABLE = StepTable(B, K, P, bent(*GRID))


def test_step_cost_by_hand():
    cost = StepCost(1.0, 0.1, 0.01, 0.001)
    assert cost.seconds(2, 50, 300) == pytest.approx(1 + 0.2 + 0.5 + 0.3)
    assert cost.seconds([0, 2], 0).tolist() == pytest.approx([1.0, 1.2])
    assert cost.span(2, 50, 3) == pytest.approx(3 * 1.2 + 0.5 + 0.52 + 0.54)
    with pytest.raises(ValueError, match="per_sequence is -1"):
        StepCost(1.0, -1, 0, 0)
    with pytest.raises(ValueError, match="t0 is 0"):
        StepCost(0, 0, 0, 0)


@given(st.floats(1, 256), st.floats(0, 4e5), st.floats(0, 2048))
def test_table_is_multilinear_as_scipys(b, k, p):
    expected = RegularGridInterpolator((B, K, P), TABLE.measured)([b, k, p])[0]
    assert TABLE.seconds(b, k, p) == pytest.approx(expected, rel=1e-12)


def test_table_of_a_linear_cost_is_that_cost_everywhere_above_its_shortest_step():
    table = StepTable(B, K, P, LINEAR.seconds(*GRID))
    points = np.array([[300, 5e5, 4096], [1, 0, 0], [17, 333, 5]]).T
    np.testing.assert_allclose(table.seconds(*points), LINEAR.seconds(*points), rtol=1e-12)
    assert table.seconds(0, 0) == LINEAR.seconds(1, 0), "the shortest measured step is the floor"
    assert table.span(40, 3e4, 100) == pytest.approx(LINEAR.span(40, 3e4, 100), rel=1e-12)
    cost, errors = table.linear(context=(0, 1e5))
    assert [*vars(cost).values()] == pytest.approx([*vars(LINEAR).values()], rel=1e-9)
    assert errors.largest < 1e-12


def test_span_is_the_sum_of_its_steps():
    steps = [TABLE.seconds(9, 9_990 + 9 * i) for i in range(300)]
    assert TABLE.span(9, 9_990, 300) == pytest.approx(sum(steps), rel=1e-12)
    assert TABLE.span(9, 9_990, 0) == 0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(0, 200_000),
    st.integers(0, 400),
    st.lists(st.floats(0.01, 0.1), min_size=9, max_size=9),
    st.booleans(),
)
def test_span_sums_over_kinks_and_along_the_floor(decoding, cached, steps, measured, flat):
    tokens = [5_000.0] if flat else [500.0, 20_000.0, 60_000.0]
    times = np.reshape(measured, (3, 3))[:, : len(tokens)]
    table = StepTable([4, 16, 64], tokens, [0], times)
    each = table.seconds(decoding, cached + decoding * np.arange(steps))
    assert table.span(decoding, cached, steps) == pytest.approx(each.sum(), rel=1e-9)


def test_linear_is_the_least_relative_squares_fit_of_the_region():
    cost, errors = TABLE.linear(decoding=(8, 256), cached_tokens=(0, 1e5), context=(0, 1e4))
    inside = (GRID[0] >= 8) & (GRID[1] <= 1e5) & (GRID[1] <= 1e4 * GRID[0])
    columns, times = [axis[inside] for axis in GRID], TABLE.measured[inside]
    assert errors.points == inside.sum()

    def loss(constants):
        return np.sum((StepCost(*constants).seconds(*columns) / times - 1) ** 2)

    best = np.array([*vars(cost).values()])
    for i in range(4):
        for factor in (0.999, 1.001):
            assert loss(np.where(np.arange(4) == i, factor * best, best)) > loss(best)
    off = np.abs(cost.seconds(*columns) / times - 1)
    assert (errors.median, errors.largest) == pytest.approx((np.median(off), off.max()))


def test_axes_of_one_point_and_regions_without_points():
    table = StepTable(B, K, [0], TABLE.measured[:, :, 0])
    assert table.seconds(8, 1e4, 500) == table.seconds(8, 1e4)
    assert table.linear()[0].per_prefill_token == 0
    with pytest.raises(ValueError, match=r"1 grid points in decoding \(1, 8\).*expected >= 2"):
        table.linear(decoding=(1, 8), cached_tokens=(1e4, 1e4), context=(0, 2e3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoding": [1, 1, 2, 3]}, r"decoding\[1\] is 1.0, not above 1.0"),
        ({"cached_tokens": []}, "cached_tokens is"),
        ({"measured": np.ones((4, 4))}, r"shape \(4, 4\); expected \(4, 4, 3\)"),
        ({"measured": np.where(GRID[0] == 8, 0, 1.0)}, r"measured\[1, 0, 0\] is 0.0"),
    ],
)
def test_tables_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        StepTable(
            **{"decoding": B, "cached_tokens": K, "prefill_tokens": P, "measured": TABLE.measured, **change}
        )


def test_tables_never_change():
    with pytest.raises(ValueError, match="read-only"):
        TABLE.measured[0, 0, 0] = 1
