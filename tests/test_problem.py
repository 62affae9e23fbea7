import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import (
    Contamination,
    Costs,
    CVaR,
    LengthDistribution,
    Problem,
    RequestClass,
    ScaleShift,
    ServingConfig,
    Wasserstein1,
    WassersteinInf,
)

positive = st.floats(1e-3, 1e6)


@st.composite
def distributions(draw):
    tokens = sorted(draw(st.sets(st.integers(0, 500), min_size=1, max_size=8)))
    weights = draw(st.lists(st.floats(1e-3, 1e9), min_size=len(tokens), max_size=len(tokens)))
    return LengthDistribution(
        np.array(tokens), np.array(weights), tokens[-1] + draw(st.integers(0, 9)), draw(st.text(max_size=5))
    )


@st.composite
def classes(draw, name):
    prompt = draw(positive)
    return RequestClass(
        name,
        draw(positive),
        prompt,
        prompt * draw(st.floats(0, 1)),
        draw(positive),
        draw(distributions()),
    )


@st.composite
def problems(draw):
    sets = st.one_of(
        st.builds(Wasserstein1, st.floats(0, 100), st.booleans()),
        st.builds(WassersteinInf, st.floats(0, 100), st.booleans()),
        st.builds(CVaR, st.floats(0, 0.99)),
        st.builds(Contamination, st.floats(0, 0.99), st.booleans()),
        st.builds(ScaleShift, st.floats(0.1, 1), st.floats(1, 3)),
    )
    return Problem(
        tuple(draw(classes(f"class {i}")) for i in range(draw(st.integers(1, 3)))),
        tuple(
            ServingConfig(
                f"k{k}",
                draw(st.integers(1, 8)),
                draw(positive),
                draw(st.floats(0, 1)),
                draw(positive),
                draw(st.floats(0, 1)),
            )
            for k in range(draw(st.integers(1, 3)))
        ),
        draw(st.integers(0, 64)),
        costs=Costs(*(draw(positive) for _ in range(5))),
        headroom=draw(st.floats(0, 1)),
        ambiguity=draw(sets),
        name=draw(st.text(max_size=8)),
    )


@given(problems())
def test_json_round_trip(problem):
    again = Problem.from_json(problem.to_json())
    assert again == problem
    assert again.to_json() == problem.to_json()


def toy(**changes):
    output = LengthDistribution.from_counts([1, 3], [1, 1], 10)
    values = {
        "classes": (
            RequestClass("a", 2.0, 10.0, 4.0, 5.0, output),
            RequestClass("b", 6.0, 20.0, 0.0, 5.0, output),
        ),
        "configs": (ServingConfig("k", 2, 100.0, 0.1, 0.5, 0.25), ServingConfig("l", 3, 100.0, 0.2, 1.0)),
        "gpus": 7,
    }
    return Problem(**(values | changes))


def test_arrays_by_hand():
    x = toy()
    # 0.1 x 10 + 0.5 x 2 + 0.25, ...
    np.testing.assert_allclose(x.service_times, [[2.25, 4.0], [3.25, 6.0]])
    np.testing.assert_allclose(x.offered_loads, [[4.5, 8.0], [19.5, 36.0]])
    np.testing.assert_array_equal(x.max_groups, [3, 2])
    # Var xi = 1, so E T^2 = T^2 + 0.25 on k; a quarter of the requests are of class a
    second = 0.25 * (2.25**2 + 0.25) + 0.75 * (3.25**2 + 0.25)
    assert x.queueing_factors[0] == pytest.approx(second / (2 * (0.25 * 2.25 + 0.75 * 3.25)))
    np.testing.assert_array_equal(x.max_output_tokens, [10, 10])


def test_queueing_factor_has_the_form_of_equation_7():
    x = toy()
    rng = np.random.default_rng(0)
    i = rng.choice(2, size=400_000, p=[0.25, 0.75])
    served = x.configs[1].service_time(x.input_tokens[i], rng.choice([1, 3], size=i.size))
    c2 = served.var() / served.mean() ** 2
    assert x.queueing_factors[1] == pytest.approx((1 + c2) * served.mean() / 2, rel=5e-3)


def test_worst_case_of_a_number_and_of_an_array_agree():
    x = toy(ambiguity=Wasserstein1(0.4))
    grid = np.linspace(0, 10, 21)
    np.testing.assert_allclose(x.worst_case(1, grid), [x.worst_case(1, e) for e in grid], rtol=1e-14)
    best = x.unconstrained_reservations()[1]
    assert x.worst_case(1, best) == pytest.approx(x.worst_case(1, grid).min(), rel=1e-9)


def test_costs():
    costs = Costs(preemption=6, waste=2)
    assert costs.ratio == 3
    assert costs.fractile == 0.75


def test_file_round_trip(tmp_path):
    path = tmp_path / "problem.json"
    toy().to_json(path)
    assert Problem.from_json(path) == toy()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("gpus"), "field 'gpus' is missing"),
        (lambda d: d["classes"][0].pop("output"), "field 'output' is missing"),
        (lambda d: d["configs"][0].update(colour=1), "colour"),
        (lambda d: d["ambiguity"].update(set="Regime"), "ambiguity set 'Regime'"),
        (lambda d: d["ambiguity"].update(radius=-1), "radius"),
        (lambda d: d["classes"][0].update(prefix_tokens=11), "prefix_tokens: 11"),
        (lambda d: d["classes"][0]["output"].update(tokens=[3, 1]), "position 1 is 1"),
    ],
)
def test_malformed_json_is_named(edit, message):
    document = json.loads(toy().to_json())
    edit(document)
    with pytest.raises(ValueError, match=message):
        Problem.from_json(json.dumps(document))


def test_json_syntax_errors_name_the_line():
    with pytest.raises(ValueError, match="line 2: not JSON"):
        Problem.from_json('{"gpus": 1,\n oops}')


def request_class(**changes):
    values = {
        "name": "a",
        "arrival_rate": 1.0,
        "input_tokens": 10.0,
        "prefix_tokens": 0.0,
        "latency_slo": 1.0,
        "output": LengthDistribution.from_samples([1, 2]),
    }
    return RequestClass(**(values | changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: request_class(arrival_rate=float("nan")), "class 'a': arrival_rate: nan"),
        (lambda: request_class(arrival_rate=float("inf")), "class 'a': arrival_rate: inf"),
        (lambda: request_class(arrival_rate=0), "class 'a': arrival_rate: 0"),
        (
            lambda: request_class(prefix_tokens=11),
            r"prefix_tokens: 11; expected within \[0, input_tokens = 10",
        ),
        (lambda: request_class(input_tokens=0), "input_tokens: 0"),
        (lambda: request_class(latency_slo=-1), "latency_slo: -1"),
        (lambda: Costs(preemption=0), "costs: preemption: 0"),
        (lambda: Costs(rejection=float("inf")), "costs: rejection: inf"),
        (lambda: toy(classes=()), "at least one request class"),
        (lambda: toy(configs=()), "at least one configuration"),
        (lambda: toy(gpus=-1), "gpus: -1"),
        (lambda: toy(headroom=float("nan")), "headroom: nan"),
        (lambda: toy(classes=(request_class(), request_class())), "repeated names"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: request_class(arrival_rate="3"), "class 'a': arrival_rate: '3', a str; expected a number"),
        (lambda: request_class(prefix_tokens=None), "class 'a': prefix_tokens: None, a NoneType"),
        (lambda: request_class(output=[1, 2]), r"output: \[1, 2\], a list; expected a LengthDistribution"),
        (lambda: Costs(gpu="1"), "costs: gpu: '1', a str; expected a number"),
        (lambda: toy(ambiguity=None), "ambiguity: None, a NoneType; expected a AmbiguitySet"),
        (lambda: toy(costs=5.0), "costs: 5.0, a float; expected a Costs"),
        (lambda: toy(classes=("chat",)), "classes: 'chat', a str; expected a RequestClass"),
        (lambda: toy(gpus="8"), "gpus: '8', a str; expected a number"),
        (lambda: toy(headroom=None), "headroom: None, a NoneType; expected a number"),
    ],
)
def test_wrong_types_are_named(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_numbers_of_numpy_are_numbers():
    made = request_class(arrival_rate=np.float32(2), input_tokens=np.int64(10))
    assert toy(classes=(made,), gpus=np.int64(4)).arrival_rates.tolist() == [2.0]
