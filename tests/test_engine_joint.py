"""Joint lengths against plain sums over requests."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import LengthDistribution
from kvcache.engine import JointLengths

pairs = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=60)


@settings(max_examples=50)
@given(pairs, st.integers(1, 40))
def test_counts_say_what_the_requests_say(requests, block):
    L, xi = np.array(requests).T
    lengths = JointLengths.from_samples(L, xi)
    assert lengths.total == len(requests)
    assert lengths.weights.size == len(set(requests))
    assert lengths.mean(lengths.inputs * lengths.outputs) == pytest.approx(np.mean(L * xi))
    assert lengths.longest == (L + xi).max()
    assert lengths.output_lengths == LengthDistribution.from_samples(xi)
    assert lengths.input_lengths == LengthDistribution.from_samples(L)
    law = lengths.in_blocks(block)
    peak, prompt = block * np.ceil((L + xi) / block), block * np.ceil(L / block)
    assert law.growth == pytest.approx(np.mean(peak - prompt))
    assert law.peak_probability @ np.exp(-law.peak / 50) == pytest.approx(np.mean(np.exp(-peak / 50)))
    assert law.prompt_probability @ law.prompt == pytest.approx(prompt.mean())


@settings(max_examples=50)
@given(pairs, st.integers(1, 150), st.floats(0.3, 3))
def test_changed_requests_and_changed_counts_agree(requests, upper, s):
    L, xi = np.array(requests).T
    lengths = JointLengths.from_samples(L, xi)

    def same(changed, inputs, outputs):
        expected = JointLengths.from_samples(inputs, outputs)
        for what in ("inputs", "outputs", "weights"):
            np.testing.assert_array_equal(getattr(changed, what), getattr(expected, what))

    same(lengths.clip(upper), L, np.minimum(xi, upper))
    same(lengths.scale(s), L, np.floor(xi * s + 0.5))
    context = int(L.min()) + upper
    fits = context > L
    same(lengths.within(context), L[fits], np.minimum(xi, context - L)[fits])
    same(JointLengths.mix([lengths, lengths]), np.tile(L, 2), np.tile(xi, 2))


def test_mixture_has_the_given_shares():
    a, b = JointLengths.from_samples([1] * 9, [5] * 9), JointLengths.from_samples([2], [7], upper=99)
    mixed = JointLengths.mix([a, b], [1, 3])
    assert mixed.probabilities.tolist() == pytest.approx([0.25, 0.75])
    assert mixed.upper == 99


def test_independent_lengths_have_both_marginals_and_no_covariance():
    rng = np.random.default_rng(3)
    inputs = LengthDistribution.from_samples(rng.integers(10, 5_000, 800))
    outputs = LengthDistribution.from_samples(rng.geometric(0.01, 900), upper=5_000)
    lengths = JointLengths.independent(inputs, outputs)
    product = lengths.mean(lengths.inputs * lengths.outputs)
    assert product == pytest.approx(inputs.mean * outputs.mean)
    assert lengths.output_lengths.wasserstein(outputs) < 1e-9
    assert lengths.upper == 5_000
    assert JointLengths.independent(700, outputs).mean_input == pytest.approx(700)
    coarse = JointLengths.independent(inputs, outputs, bucket=0.02)
    assert coarse.weights.size < lengths.weights.size / 5
    assert coarse.mean(coarse.inputs * coarse.outputs) == pytest.approx(product, rel=1e-3)
    wide = LengthDistribution.from_counts(np.arange(6_000), np.ones(6_000))
    with pytest.raises(ValueError, match="36,000,000 pairs; expected at most 20,000,000: give bucket"):
        JointLengths.independent(wide, wide)


def test_buckets_keep_moments():
    rng = np.random.default_rng(4)
    lengths = JointLengths.from_samples(rng.lognormal(6, 1, 40_000) // 1, rng.lognormal(5, 1, 40_000) // 1)
    coarse = lengths.bucketed(0.1)
    assert coarse.weights.size < lengths.weights.size / 5
    assert coarse.total == lengths.total
    assert coarse.mean_input == pytest.approx(lengths.mean_input, abs=1)
    assert coarse.mean_output == pytest.approx(lengths.mean_output, abs=1)
    squares = [law.mean(law.outputs.astype(float) ** 2) for law in (lengths, coarse)]
    assert squares[1] == pytest.approx(squares[0], rel=0.1**2 / 4 + 1 / lengths.mean_output)
    with pytest.raises(ValueError, match="width: 0"):
        lengths.bucketed(0)


def test_samples_come_from_the_law():
    lengths = JointLengths.from_counts([1, 1, 2], [3, 4, 3], [1, 2, 7])
    drawn = JointLengths.from_samples(*lengths.sample(np.random.default_rng(1), 100_000))
    np.testing.assert_allclose(drawn.probabilities, lengths.probabilities, atol=0.005)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: JointLengths.from_samples([1, 2], [3]), "2 inputs, 1 outputs"),
        (lambda: JointLengths.from_samples([1, -2], [3, 4]), r"inputs: position 1 is -2"),
        (lambda: JointLengths.from_samples([1.0, 2.0], [3.0, 4.5]), r"outputs: position 1 is 4.5"),
        (lambda: JointLengths.from_counts([1], [2], [-1]), r"counts\[0\] is -1"),
        (lambda: JointLengths.from_counts([1], [2], [0]), "no request"),
        (lambda: JointLengths.from_samples([1], [9], upper=8), "upper is 8; expected a whole number >= 9"),
        (lambda: JointLengths([2, 1], [1, 1], [1, 1], 1), "pair 1 is"),
        (lambda: JointLengths.from_samples([5], [9]).within(5), "context: 5"),
        (lambda: JointLengths.from_samples([5], [9]).in_blocks(0), "block: 0"),
    ],
)
def test_what_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
