import numpy as np
import pytest
from scipy.optimize import linprog

from kvcache import LengthDistribution, ParallelConfig, Problem, RequestClass, ServingConfig, evaluate
from kvcache.paper import builders
from kvcache.paper.assumptions import ASSUMPTIONS, assumption_table
from kvcache.paper.methods.bcd import first_groups
from kvcache.policy import repaired


def test_paper_instance_is_the_papers():
    x = builders.paper()
    assert x.gpus == 8
    assert [k.name for k in x.configs] == ["TP2xPP1", "TP4xPP1", "TP2xPP2", "TP4xPP2"]
    assert [int(k) for k in x.kv_tokens] == [1525, 56_457, 56_457, 166_320]
    assert [c.name for c in x.classes] == ["chat", "code", "conversation"]
    assert (x.costs.preemption, x.costs.waste, x.costs.slo, x.costs.rejection) == (10, 1, 5, 5000)
    assert x.headroom == 0.2
    for c in x.classes:
        assert x.ambiguity.radius_tokens(c.output) == pytest.approx(0.15 * c.output.mean)
        assert c.latency_slo == pytest.approx(2 * x.service_times[x.classes.index(c)].min())


def test_options_of_the_paper_instance():
    x = builders.paper(rho=50, radius=3, relative=False, max_output_tokens=400, gpus=4, service="measured")
    assert x.costs.ratio == 50
    assert x.ambiguity.radius_tokens(x.classes[0].output) == 3
    assert set(x.max_output_tokens) == {400}
    with pytest.warns(UserWarning, match="dropped TP1xPP1"):
        x = builders.paper(parallels=[ParallelConfig(1), ParallelConfig(8)], model="Llama-3-70B")
    assert len(x.configs) == 1


@pytest.mark.parametrize("seed", range(4))
def test_capacity_is_the_linear_program_over_divisible_groups(seed):
    x = builders.scalability(5, 6, 50, 16, seed, load=0.3)
    classes, configs = len(x.classes), len(x.configs)
    held = x.input_tokens + [c.output.quantile(x.costs.fractile) for c in x.classes]
    # columns: the multiple, x_ik = multiple x pi_ik, and groups z_k
    n = 1 + classes * configs + configs
    serve = np.zeros((classes, n))
    serve[:, 0] = -1
    memory, budget = np.zeros((configs, n)), np.zeros((1, n))
    for i in range(classes):
        serve[i, 1 + i * configs : 1 + (i + 1) * configs] = 1
    for k in range(configs):
        memory[k, 1 + k : 1 + classes * configs : configs] = 1.2 * x.offered_loads[:, k] * held
        memory[k, 1 + classes * configs + k] = -x.kv_tokens[k]
    budget[0, 1 + classes * configs :] = x.group_gpus
    answer = linprog(
        -np.eye(n)[0],
        A_ub=np.vstack([memory, budget]),
        b_ub=np.append(np.zeros(configs), x.gpus),
        A_eq=serve,
        b_eq=np.zeros(classes),
    )
    assert builders.capacity(x) == pytest.approx(-answer.fun, rel=1e-7)
    assert builders.capacity(x) == pytest.approx(1 / 0.3)


def test_load_scales_all_rates_alike():
    x = builders.paper(load=0.5)
    y = builders.with_load(x, 1.5)
    np.testing.assert_allclose(y.arrival_rates, 3 * x.arrival_rates)
    with pytest.raises(ValueError, match="load: 0"):
        builders.with_load(x, 0)


@pytest.mark.parametrize("size", builders.TABLE3_SIZES)
def test_scalability_has_the_asked_size_and_repeats(size):
    x, y, other = (builders.scalability(*size, seed=s) for s in (1, 1, 2))
    assert x == y
    assert x != other
    assert (len(x.classes), len(x.configs), x.gpus) == (size[0], size[1], size[3])
    assert {c.output.total for c in x.classes} == {size[2]}
    assert np.all(x.max_groups > 0)


def test_millions_of_requests_cost_their_lengths_only():
    x = builders.scalability(50, 24, 44_000_000, 512, seed=0)
    assert {c.output.total for c in x.classes} == {44_000_000}
    assert max(c.output.tokens.size for c in x.classes) < 10_000
    assert len({k.name for k in x.configs}) == 24


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="configs: 25"):
        builders.scalability(1, 25, 1, 8, 0)
    with pytest.raises(ValueError, match="samples: 0"):
        builders.scalability(1, 1, 0, 8, 0)


def test_code_exceeds_the_small_group_of_the_ablation():
    x, again, other = (builders.ablation(seed=s) for s in (3, 3, 4))
    assert x == again
    assert x != other
    assert x.costs.ratio == 20
    code = [c.name for c in x.classes].index("code")
    assert x.configs[0].name == "TP2xPP1"
    assert x.input_tokens[code] > x.kv_tokens[0]
    assert all(x.input_tokens[i] < x.kv_tokens[0] for i in range(3) if i != code)


def test_a_class_that_no_configuration_serves_in_time_is_late_or_rejected_but_never_infeasible():
    output = LengthDistribution.from_samples([50, 60], 100)
    x = Problem(
        (RequestClass("hopeless", 1.0, 10.0, 0.0, 1e-3, output),),
        (ServingConfig("k", 1, 1e4, 0.0, 1.0),),
        2,
    )
    served = repaired(x, first_groups(x), [60], [[1.0]], [[False]])
    result = evaluate(x, served)
    assert result.feasible
    assert result.tardiness[0] > 50


def test_assumptions_are_told_apart_and_found():
    table = assumption_table()
    assert table["id"].is_unique
    assert list(assumption_table("A4", "A1")["id"]) == ["A4", "A1"]
    assert {f"A{i}" for i in range(1, 11)} <= {a.id for a in ASSUMPTIONS}
    with pytest.raises(KeyError, match="A99"):
        assumption_table("A99")
