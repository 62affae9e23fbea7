"""LengthDistribution against the requests themselves, numpy and scipy."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from kvcache import LengthDistribution

settings.register_profile("kvcache", deadline=None, max_examples=150)
settings.load_profile("kvcache")

BURSTGPT = {0.1: 3, 0.25: 7, 0.5: 36, 0.75: 136, 0.9: 276, 0.95: 466, 0.99: 1505}

samples = st.lists(st.integers(0, 60), min_size=1, max_size=40)
weighted = st.dictionaries(st.integers(0, 60), st.floats(0.01, 1e6), min_size=1, max_size=20)


def of(counts, upper=None):
    return LengthDistribution.from_counts(list(counts), list(counts.values()), upper)


# ---- construction -------------------------------------------------------------------------------


@given(samples, st.integers(0, 10))
def test_samples_and_counts_agree(values, slack):
    upper = max(values) + slack
    dist = LengthDistribution.from_samples(values, upper)
    tokens, counts = np.unique(values, return_counts=True)
    assert dist == LengthDistribution.from_counts(tokens[::-1], counts[::-1], upper)
    assert dist.tokens.tolist() == tokens.tolist()
    assert dist.weights.tolist() == counts.tolist()
    assert (dist.total, dist.upper) == (len(values), upper)


def test_counts_add_up_and_zeros_leave():
    dist = LengthDistribution.from_counts([5, 2, 5, 9], [1, 3, 2, 0])
    assert (dist.tokens.tolist(), dist.weights.tolist(), dist.upper) == ([2, 5], [3, 3], 5)
    assert LengthDistribution.from_counts([5.0, 2.0], [1, 3]).tokens.dtype == np.int64


def test_the_input_and_the_distribution_do_not_share_memory():
    tokens, weights = np.array([1, 2]), np.array([1.0, 1.0])
    dist = LengthDistribution(tokens, weights, 3)
    tokens[0], weights[0] = 0, 9
    assert (dist.tokens.tolist(), dist.weights.tolist()) == ([1, 2], [1, 1])
    with pytest.raises(ValueError, match="read-only"):
        dist.tokens[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        dist.weights[0] = 2.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LengthDistribution.from_samples([]), "values: empty"),
        (lambda: LengthDistribution.from_samples([3, -1]), "values: position 1 is -1; expected >= 0"),
        (
            lambda: LengthDistribution.from_samples([3, 1.5]),
            "values: position 1 is 1.5; expected a whole number",
        ),
        (lambda: LengthDistribution.from_samples([3, np.nan]), "values: position 1 is nan"),
        (lambda: LengthDistribution.from_samples([np.inf]), "values: position 0 is inf"),
        (
            lambda: LengthDistribution.from_samples([[3]]),
            r"values: expected one dimension, found shape \(1, 1\)",
        ),
        (lambda: LengthDistribution.from_samples(["3"]), "values: expected whole numbers, found <U1"),
        (lambda: LengthDistribution.from_samples([True]), "found bool"),
        (lambda: LengthDistribution.from_samples([3, 9], 8), "upper: 8; expected .* longest length 9"),
        (lambda: LengthDistribution.from_counts([1, 2], [1]), r"counts: shape \(1,\); expected \(2,\)"),
        (lambda: LengthDistribution.from_counts([1, 2], [1, -1]), "counts: position 1 is -1.0"),
        (lambda: LengthDistribution.from_counts([1], [np.inf]), "counts: position 0 is inf"),
        (lambda: LengthDistribution.from_counts([1, 2], [0, 0]), "counts: all zero"),
        (lambda: LengthDistribution([], [], 3), "tokens: empty"),
        (lambda: LengthDistribution([2, 2], [1, 1], 3), "tokens: position 1 is 2, not above"),
        (lambda: LengthDistribution([1, 2], [1, 0], 3), "weights: position 1 is 0.0; expected > 0"),
        (lambda: LengthDistribution([1, 2], [1], 3), r"weights: shape \(1,\)"),
        (lambda: LengthDistribution([1, 2], [1, 1], 2.5), "upper: 2.5; expected a whole number"),
        (lambda: LengthDistribution([1, 2], [1, 1], float("nan")), "upper: nan; expected a whole number"),
    ],
)
def test_what_cannot_be_a_distribution_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ---- reconstruction from quantiles --------------------------------------------------------------


def test_reconstruction_has_the_published_quantiles_and_mean():
    dist = LengthDistribution.from_quantiles(
        BURSTGPT, 125.52842424734422, minimum=1, maximum=7315, total=1404294, name="BurstGPT"
    )
    assert dist.quantile(list(BURSTGPT)).tolist() == list(BURSTGPT.values())
    assert dist.mean == pytest.approx(125.52842424734422, rel=1e-9)
    assert (dist.tokens[0], dist.tokens[-1], dist.upper) == (1, 7315, 7315)
    assert dist.total == pytest.approx(1404294)
    assert dist.reconstructed
    assert "reconstructed" in repr(dist)
    for changed in (dist.scale(2), dist.clip(1000), dist.renamed("x"), dist.with_upper(8000)):
        assert changed.reconstructed
    assert LengthDistribution.mix([dist, LengthDistribution.from_samples([1])]).reconstructed


@given(
    st.lists(st.integers(0, 200), min_size=3, max_size=7),
    st.lists(st.integers(1, 20), min_size=8, max_size=8),
    st.floats(0.02, 0.98),
)
def test_reconstruction_holds_for_any_monotone_quantiles(lengths, steps, place):
    lengths = sorted(lengths)
    minimum, maximum, middle = lengths[0], lengths[-1], lengths[1:-1]
    probabilities = np.cumsum(steps[: len(middle) + 1]) / sum(steps[: len(middle) + 1])
    quantiles = dict(zip(probabilities[:-1].tolist(), middle, strict=True))
    # The means that can be reached lie between all mass at the left and at the right of each interval.
    p = np.diff([0.0, *probabilities])
    least = minimum * p[0] + p[1:] @ np.minimum(np.array(middle) + 1, lengths[2:])
    most = p @ lengths[1:]
    mean = least + place * (most - least)
    assume(most - least > 1e-6)
    dist = LengthDistribution.from_quantiles(quantiles, mean, minimum=minimum, maximum=maximum)
    assert dist.quantile(list(quantiles)).tolist() == middle
    assert dist.mean == pytest.approx(mean, rel=1e-6, abs=1e-6)
    assert minimum <= dist.tokens[0] <= dist.tokens[-1] <= maximum


@pytest.mark.parametrize(
    ("quantiles", "mean", "words"),
    [
        ({0.5: 10, 0.9: 5}, 8, "decrease"),
        ({0.5: 300}, 8, "decrease"),
        ({0.0: 5, 0.5: 10}, 8, r"expected distinct, within \(0, 1\)"),
        ({0.5: 10, 1.0: 90}, 8, r"within \(0, 1\)"),
        ({0.5: 10}, 99, r"mean: 99; with these quantiles it lies in \["),
        ({0.5: 10}, 0.1, "mean: 0.1"),
    ],
)
def test_quantiles_that_no_distribution_has_are_refused(quantiles, mean, words):
    with pytest.raises(ValueError, match=words):
        LengthDistribution.from_quantiles(quantiles, mean, minimum=1, maximum=100)


# ---- moments, quantiles, tails ------------------------------------------------------------------


@given(samples)
def test_moments_equal_those_of_the_requests(values):
    dist = LengthDistribution.from_samples(values)
    assert dist.mean == pytest.approx(np.mean(values))
    assert dist.variance == pytest.approx(np.var(values), abs=1e-9)
    assert dist.std == pytest.approx(np.std(values), abs=1e-6)
    assert dist.probabilities.sum() == pytest.approx(1)
    assert dist.cumulative[-1] == 1


@given(samples, st.floats(0, 1))
def test_quantile_is_numpys_inverted_cdf(values, p):
    dist = LengthDistribution.from_samples(values)
    # A p within rounding of a step of the CDF counts as the step; numpy sees it on either side.
    if abs(p * len(values) - round(p * len(values))) < 1e-6:
        p = round(p * len(values)) / len(values)
        expected = sorted(values)[max(round(p * len(values)) - 1, 0)]
    else:
        expected = np.quantile(values, p, method="inverted_cdf")
    assert dist.quantile(p) == expected
    assert dist.cdf(dist.quantile(p)) >= p * (1 - 1e-12)


def test_quantile_at_every_step_of_the_cdf():
    dist = LengthDistribution.from_samples(range(1, 11))
    p = np.arange(1, 11) / 10
    assert dist.quantile(p).tolist() == list(range(1, 11))
    assert dist.quantile([0, 0.05, 0.100001, 1]).tolist() == [1, 1, 2, 10]
    assert isinstance(dist.quantile(0.5), int)


@pytest.mark.parametrize("p", [-0.1, 1.1, np.nan, [0.5, 2]])
def test_a_quantile_outside_zero_and_one_is_refused(p):
    with pytest.raises(ValueError, match=r"expected probabilities within \[0, 1\]"):
        LengthDistribution.from_samples([1]).quantile(p)


@given(weighted, st.lists(st.floats(-10, 100), min_size=1, max_size=8))
def test_tail_expectations_equal_sums_over_atoms(counts, where):
    dist = of(counts)
    p, x = dist.probabilities, dist.tokens
    eta = np.array(where)
    np.testing.assert_allclose(dist.cdf(eta), [p[x <= e].sum() for e in eta], atol=1e-12)
    np.testing.assert_allclose(dist.excess(eta), [p @ np.maximum(x - e, 0) for e in eta], atol=1e-9)
    np.testing.assert_allclose(dist.shortfall(eta), [p @ np.maximum(e - x, 0) for e in eta], atol=1e-9)
    both = [p @ (3 * np.maximum(x - e, 0) + 2 * np.maximum(e - x, 0)) for e in eta]
    np.testing.assert_allclose(dist.cost(eta, 3, 2), both, atol=1e-9)
    for function in (dist.cdf, dist.excess, dist.shortfall):
        assert isinstance(function(where[0]), float)
        assert function(where[0]) == function(eta)[0]


@given(samples, st.floats(0.05, 20))
def test_the_fractile_minimises_the_cost(values, rho):
    dist = LengthDistribution.from_samples(values)
    best = dist.cost(dist.quantile(rho / (1 + rho)), rho, 1)
    assert best <= dist.cost(np.arange(61), rho, 1).min() + 1e-9


# ---- transformations ----------------------------------------------------------------------------


@given(samples, st.floats(0.1, 4))
def test_scale_is_that_of_the_requests(values, s):
    dist = LengthDistribution.from_samples(values, 60)
    assert dist.scale(s) == LengthDistribution.from_samples(
        [int(np.floor(v * s + 0.5)) for v in values], int(np.ceil(60 * s))
    )
    assert dist.scale(s, upper=30).upper == 30
    assert dist.scale(s, upper=30).tokens[-1] <= 30


def test_scale_rounds_half_up():
    assert LengthDistribution.from_samples([1, 3, 5]).scale(0.5).tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="s: 0; expected a positive number"):
        LengthDistribution.from_samples([1]).scale(0)


@given(samples, st.integers(0, 70))
def test_clip_is_that_of_the_requests(values, upper):
    clipped = LengthDistribution.from_samples(values).clip(upper)
    assert clipped == LengthDistribution.from_samples(np.minimum(values, upper), upper)
    assert clipped.total == len(values)


def test_with_upper_keeps_the_lengths():
    dist = LengthDistribution.from_samples([1, 5])
    assert dist.with_upper(9).upper == 9
    assert dist.with_upper(9).tokens.tolist() == [1, 5]
    with pytest.raises(ValueError, match="longest length 5"):
        dist.with_upper(4)


@given(samples, samples)
def test_pooling_is_that_of_the_requests(one, other):
    a, b = LengthDistribution.from_samples(one, 60), LengthDistribution.from_samples(other, 60)
    assert LengthDistribution.mix([a, b]) == LengthDistribution.from_samples(one + other, 60)


@given(samples, samples, st.floats(0, 1))
def test_mixing_by_shares_mixes_the_cdfs(one, other, share):
    a, b = LengthDistribution.from_samples(one, 60), LengthDistribution.from_samples(other, 70)
    mixed = LengthDistribution.mix([a, b], [share, 1 - share])
    grid = np.arange(71)
    np.testing.assert_allclose(mixed.cdf(grid), share * a.cdf(grid) + (1 - share) * b.cdf(grid), atol=1e-12)
    assert mixed.upper == 70


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1], r"weights: shape \(1,\)"),
        ([0, 0], "positive sum"),
        ([1, -1], "expected >= 0"),
        ([1, np.nan], "nan"),
    ],
)
def test_wrong_mixture_weights_are_refused(weights, words):
    a = LengthDistribution.from_samples([1])
    with pytest.raises(ValueError, match=words):
        LengthDistribution.mix([a, a], weights)


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="distributions: empty"):
        LengthDistribution.mix([])


def test_samples_follow_the_distribution():
    dist = LengthDistribution.from_counts([0, 3, 50, 51], [1, 5, 3, 1], 100)
    drawn = dist.sample(np.random.default_rng(5), 40_000)
    counts = [(drawn == x).sum() for x in dist.tokens]
    assert sum(counts) == 40_000
    assert stats.chisquare(counts, dist.probabilities * 40_000).pvalue > 1e-3
    np.testing.assert_array_equal(drawn, dist.sample(np.random.default_rng(5), 40_000))


# ---- distances ----------------------------------------------------------------------------------


@given(weighted, weighted)
def test_wasserstein_is_scipys(one, other):
    a, b = of(one), of(other)
    expected = stats.wasserstein_distance(a.tokens, b.tokens, a.weights, b.weights)
    assert a.wasserstein(b) == pytest.approx(expected, abs=1e-9)
    assert a.wasserstein(b) == pytest.approx(b.wasserstein(a), abs=1e-12)
    assert a.wasserstein(a) == 0


@given(weighted, weighted)
def test_total_variation_is_the_largest_difference_over_events(one, other):
    a, b = of(one), of(other)
    p = dict(zip(a.tokens.tolist(), a.probabilities, strict=True))
    q = dict(zip(b.tokens.tolist(), b.probabilities, strict=True))
    event = sum(max(p.get(x, 0) - q.get(x, 0), 0) for x in range(61))
    assert a.total_variation(b) == pytest.approx(event, abs=1e-12)
    assert 0 <= a.total_variation(b) <= 1 + 1e-12


# ---- identity and looks -------------------------------------------------------------------------


def test_equality_is_of_law_and_bound():
    a = LengthDistribution.from_samples([1, 2, 2], 5)
    assert a == LengthDistribution.from_counts([1, 2], [10, 20], 5, name="ten times as many")
    assert hash(a) == hash(LengthDistribution.from_counts([1, 2], [10, 20], 5))
    assert a != a.with_upper(6)
    assert a != LengthDistribution.from_samples([1, 2], 5)
    assert a != "a"


def test_looks():
    dist = LengthDistribution.from_samples([10, 20, 30], 100, name="<qa>")
    assert repr(dist) == (
        "LengthDistribution('<qa>', 3 requests, mean 20.0, P50 20, P90 30, P99 30, max 30, upper 100 tokens)"
    )
    shown = dist._repr_html_()
    assert "<caption>&lt;qa&gt;, tokens</caption>" in shown
    assert "<th>p90</th>" in shown
    assert shown.count("<td>") == 9


def test_requests_cost_nothing():
    tokens = np.arange(4096)
    dist = LengthDistribution.from_counts(tokens, np.full(4096, 44e6))
    assert dist.total == 4096 * 44e6
    assert dist.tokens.size == 4096
    assert dist.mean == pytest.approx(2047.5)


def test_one_sample_per_request_of_a_trace():
    lengths, shares = LengthDistribution.from_counts([3, 7], [1, 3]).samples()
    np.testing.assert_array_equal(lengths, [3, 7, 7, 7])
    np.testing.assert_array_equal(shares, [0.25] * 4)
    lengths, shares = LengthDistribution.from_counts([3, 7], [0.5, 1.5]).samples()
    np.testing.assert_array_equal(lengths, [3, 7])
    np.testing.assert_array_equal(shares, [0.25, 0.75])
