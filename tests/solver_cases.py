"""Small problems on which all solvers must agree, each of a kind that some part of the problem decides."""

from __future__ import annotations

import numpy as np

from kvcache import (
    Costs,
    LengthDistribution,
    Policy,
    Problem,
    RequestClass,
    ServingConfig,
    Wasserstein1,
    evaluate,
)

#: What makes a problem of each kind: costs, and factors on memory, deadlines, rates and prefixes.
KINDS = {
    "memory": {"memory": 0.45, "deadline": 50.0, "prefix": 0.0, "rate": 6.0, "slo": 0.1, "rejection": 5e3},
    "slo": {"memory": 40.0, "deadline": 0.9, "prefix": 0.0, "rate": 2.0, "slo": 80.0, "rejection": 5e3},
    "rejection": {
        "memory": 1.0,
        "deadline": 2.0,
        "prefix": 0.0,
        "rate": 16.0,
        "slo": 5.0,
        "rejection": 150.0,
    },
    "prefix": {"memory": 1.5, "deadline": 3.0, "prefix": 0.7, "rate": 8.0, "slo": 20.0, "rejection": 5e3},
    "split": {"memory": 0.6, "deadline": 2.0, "prefix": 0.0, "rate": 4.0, "slo": 5.0, "rejection": 5e3},
    "queue": {"memory": 1.2, "deadline": 1.3, "prefix": 0.3, "rate": 5.0, "slo": 60.0, "rejection": 5e3},
}


def case(kind: str, seed: int, *, classes: int = 2, samples: int = 8, gpus: int = 3) -> Problem:
    """A random problem of a kind: configurations of one and two GPUs, output lengths up to 80 tokens."""
    how = KINDS[kind]
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    configs = (
        ServingConfig("small", 1, 700 * how["memory"] * rng.uniform(0.8, 1.2), 0.002, 0.05, 0.01),
        ServingConfig("large", 2, 1700 * how["memory"] * rng.uniform(0.8, 1.2), 0.001, 0.028, 0.02),
    )
    made = []
    for i in range(classes):
        lengths = LengthDistribution.from_samples(rng.integers(5, 70, samples), 80)
        prompt = float(rng.integers(30, 120))
        service = float(configs[1].service_time(prompt, lengths.mean))
        made.append(
            RequestClass(
                f"class-{i}",
                how["rate"] * rng.uniform(0.7, 1.3) / classes,
                prompt,
                float(np.floor(how["prefix"] * prompt)),
                how["deadline"] * service * rng.uniform(0.9, 1.2),
                lengths,
            )
        )
    costs = Costs(preemption=float(rng.uniform(2, 12)), slo=how["slo"], rejection=how["rejection"])
    return Problem(
        tuple(made), configs, gpus, costs=costs, ambiguity=Wasserstein1(rng.uniform(0, 3)), name=kind
    )


def shows(kind: str, problem: Problem, policy: Policy) -> bool:
    """Whether what the kind stands for decides this policy."""
    result = evaluate(problem, policy)
    used = policy.routing.sum(axis=0) > 1e-6
    eta = policy.reservations - problem.input_tokens
    return {
        "memory": bool(np.any(result.slacks["memory"][used] < 1e-5))
        and bool(np.any(eta < problem.unconstrained_reservations() - 1e-3)),
        "slo": bool(np.any(result.tardiness > 1e-6)),
        "rejection": bool(np.any(policy.admission < 1 - 1e-6)),
        "prefix": bool(policy.prefix_cache.any()),
        "split": bool(np.any((policy.routing > 1e-6).sum(axis=1) > 1)),
        "queue": bool(np.max(result.waits[used], initial=0.0) > 0.3 * problem.service_times.mean())
        and bool(np.any(result.tardiness > 1e-6)),
    }[kind]
