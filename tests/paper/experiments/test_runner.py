"""Experiments: what is changed, what is left out, and that a row says what was solved and replayed."""

import dataclasses

import numpy as np
import pytest

from kvcache.paper import builders
from kvcache.paper.experiments import runner
from kvcache.paper.methods.baselines import optimise, reservations
from kvcache.policy import evaluate
from kvcache.replay import Workload, replay


def test_build_changes_what_it_is_told_and_nothing_else():
    base = builders.paper(load=0.3)
    same = runner.build(arguments={"load": 0.3})
    assert same.to_json() == base.to_json()
    changed = runner.build(
        arguments={"load": 0.3},
        outputs=["sharegpt", "azure-2024-code", "burstgpt"],
        upper=2.0,
        costs={"preemption": 50.0},
        headroom=0.4,
        ambiguity_set=("CVaR", {"level": 0.1}),
        rate=2.0,
    )
    np.testing.assert_allclose(changed.arrival_rates, 2 * base.arrival_rates)
    np.testing.assert_allclose(changed.latency_slos, base.latency_slos)
    np.testing.assert_allclose(changed.input_tokens, base.input_tokens)
    assert [c.output.upper for c in changed.classes] == [
        2 * int(c.output.tokens[-1]) for c in changed.classes
    ]
    assert changed.costs.preemption == 50
    assert changed.costs.rejection == base.costs.rejection
    assert changed.headroom == 0.4
    assert changed.ambiguity.level == 0.1


def test_evaluation_scales_and_cuts_where_asked():
    problem = runner.build()
    capped = runner.replayed_lengths(problem, shift=2.5)
    free = runner.replayed_lengths(problem, shift=2.5, capped=False)
    for c, cut, long in zip(problem.classes, capped, free, strict=True):
        assert cut.upper == c.output.upper
        assert long.tokens[-1] == round(2.5 * int(c.output.tokens[-1]) + 1e-9)
        assert long.mean == pytest.approx(2.5 * c.output.mean, rel=0.02)
    own = runner.replayed_lengths(problem)
    assert own == [c.output for c in problem.classes]


def test_partitions_are_all_that_fit():
    problem = runner.build()
    found = {tuple(z) for z in runner.partitions(problem)}
    expected = {
        (a, b, c, d)
        for a in range(5)
        for b in range(3)
        for c in range(3)
        for d in range(2)
        if 0 < 2 * a + 4 * b + 4 * c + 8 * d <= 8
    }
    assert found == expected


def test_uniform_routing_is_even_and_the_cheapest_such():
    problem = runner.build(builder="ablation", arguments={"load": 0.05})
    eta = reservations("DRO", problem)
    policy = runner.uniform_routing(problem, eta)
    used = policy.groups > 0
    np.testing.assert_allclose(policy.routing[:, used], 1 / used.sum())
    np.testing.assert_allclose(policy.admission, 1)
    others = [evaluate(problem, runner.uniform_routing(problem, eta, z)) for z in runner.partitions(problem)]
    assert evaluate(problem, policy).objective <= min(r.objective for r in others if r.feasible) + 1e-9


def test_a_row_is_the_solution_and_its_replay():
    spec = {"arguments": {"load": 0.2}}
    rows = runner.point(
        problem=spec, shifts=[1.0, 1.5], factors=[1.0, 2.5], requests=500, seed=3, labels={"who": "me"}
    )
    assert [(r["shift"], r["factor"]) for r in rows] == [(1.0, 1.0), (1.0, 2.5), (1.5, 1.0), (1.5, 2.5)]
    problem = runner.build(**spec)
    solution = optimise("DRO", problem, gap=2e-4, node_limit=runner.NODE_LIMIT)
    row = rows[2]
    assert row["who"] == "me"
    assert row["objective"] == solution.objective
    assert row["groups"] == "+".join(map(str, solution.policy.groups))
    lengths = runner.replayed_lengths(problem, shift=1.5)
    measured = replay(
        problem,
        runner.caching(problem, solution.policy),
        Workload.draw(lengths, np.random.default_rng(3), 500),
        preemption_factor=1.0,
    )
    assert {k: row[k] for k in measured.row()} == measured.row()
    chat = problem.classes[0]
    assert row["quantile_chat"] == pytest.approx(chat.output.cdf(row["eta_chat"] + 1e-6))


def test_what_is_left_out_is_left_out():
    def row(variant, **more):
        spec = {"builder": "ablation", "arguments": {"load": 0.05}}
        return runner.point(problem=spec, variant=variant, requests=500, **more)[0]

    full, saa, bare = row("full"), row("-DRO (SAA)"), row("-Prefix caching")
    assert saa["eta_conversation"] < full["eta_conversation"]
    assert bare["max_utilisation"] >= full["max_utilisation"]
    assert bare["reservation_cost"] == pytest.approx(full["reservation_cost"])
    mixed = row("full", groups=[2, 1, 0, 0])
    even = row("-Routing", groups=[2, 1, 0, 0])
    assert mixed["groups"] == even["groups"] == "2+1+0+0"
    # Code prompts do not fit a TP2 group: an even split sends half of them there.
    assert even["rejection"] > 0.1 > mixed["rejection"]
    assert even["total_cost"] > 2 * mixed["total_cost"]


def test_the_optimum_on_the_best_partition_is_the_optimum():
    problem = runner.build(arguments={"load": 0.3})
    options = {"gap": 1e-4}
    solution = runner.choose(problem, "DRO", "full", None, options)
    same = runner.choose(problem, "DRO", "full", solution.policy.groups, options)
    assert same.objective == pytest.approx(solution.objective, rel=2e-4)
    fixed = runner.choose(problem, "P95", "full", solution.policy.groups, options)
    np.testing.assert_allclose(fixed.policy.reservations - problem.input_tokens, reservations("P95", problem))


def test_ties_in_prefix_caching_are_broken_for_less_memory():
    problem = runner.build(builder="ablation", arguments={"load": 0.05})
    solution = optimise("DRO", problem)
    none = dataclasses.replace(solution.policy, prefix_cache=np.zeros_like(solution.policy.prefix_cache))
    cached = runner.caching(problem, none)
    before, after = evaluate(problem, none), evaluate(problem, cached)
    assert cached.prefix_cache.any()
    assert after.objective <= before.objective * (1 + 1e-9)
    assert after.utilisation.max() < before.utilisation.max() * 1.05
    # One request per group and less: keeping its prefix would hold more than it saves.
    idle = runner.build(builder="ablation", arguments={"load": 0.001})
    policy = optimise("DRO", idle).policy
    assert not runner.caching(idle, policy).prefix_cache.any()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="builder 'toy'; expected one of"):
        runner.build(builder="toy")
    with pytest.raises(ValueError, match="variant '-Everything'; expected one of"):
        runner.point(variant="-Everything")


def test_longer_deadlines_make_fewer_requests_late_and_leave_the_policy_alone():
    spec = {"arguments": {"load": 0.3}}
    rows = runner.lateness(deadlines=(1.0, 2.0, 1e6), problem=spec, requests=400, node_limit=5)
    (one,) = runner.point(problem=spec, requests=400, node_limit=5)
    assert rows[0]["slo_violation"] == one["slo_violation"]
    assert rows[0]["slo_violation"] >= rows[1]["slo_violation"] >= rows[2]["slo_violation"] == 0
    assert {row["rejection"] for row in rows} == {one["rejection"]}
