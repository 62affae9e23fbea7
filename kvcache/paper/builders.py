"""Builders of problems: the paper's cluster, growing random ones, and the ablation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvcache.ambiguity import AmbiguitySet, Wasserstein1, critical_fractile
from kvcache.hardware import GPU, Model, ParallelConfig, ServingConfig, serving_configs
from kvcache.lengths import LengthDistribution
from kvcache.paper.digests import load_digest
from kvcache.problem import Costs, Problem, RequestClass

__all__ = [
    "APPLICATIONS",
    "PAPER_CONFIGS",
    "TABLE3_SIZES",
    "ablation",
    "capacity",
    "paper",
    "prefix_share",
    "scalability",
    "with_load",
]

#: The paper's default load, as a fraction of `capacity`.
LOAD = 0.6
#: Deadline of a class, in mean service times on its fastest configuration.
SLO_FACTOR = 2.0
#: Digest whose share of prompt tokens that an earlier request has brought stands for L_pre / L_in.
PREFIX_DIGEST = "mooncake-conversation"
#: The paper's radius, in multiples of the mean output length.
RADIUS = 0.15

#: k_1 to k_4 of the paper.
PAPER_CONFIGS = (ParallelConfig(2, 1), ParallelConfig(4, 1), ParallelConfig(2, 2), ParallelConfig(4, 2))

#: What `scalability` adds to them, in this order.
MORE_CONFIGS = tuple(
    ParallelConfig(*degrees)
    for degrees in (
        (8, 1), (2, 4), (4, 3), (8, 2), (2, 3), (4, 4), (8, 3), (2, 6),
        (1, 3), (1, 4), (4, 6), (8, 4), (2, 8), (1, 6), (1, 8), (4, 5), (2, 5), (8, 5), (4, 8), (8, 6),
    )
)  # fmt: skip

#: Sizes of Table III: classes, configurations, samples per class, GPUs (A13).
TABLE3_SIZES = (
    (3, 4, 100, 8),
    (4, 4, 150, 8),
    (5, 5, 200, 8),
    (6, 6, 300, 8),
    (8, 6, 500, 8),
    (10, 8, 1000, 24),
    (15, 12, 2000, 48),
)


@dataclass(frozen=True)
class Application:
    """A kind of request whose lengths come from a digest."""

    name: str
    digest: str

    @property
    def output(self) -> LengthDistribution:
        """Output lengths, tokens; its bound is the trace's own cap (A2)."""
        return load_digest(self.digest).renamed(self.name)

    @property
    def input_tokens(self) -> float:
        """Mean prompt length, tokens."""
        return load_digest(self.digest, field="input").mean


#: Chat, code and conversation, as in the three production traces.
APPLICATIONS = (
    Application("chat", "burstgpt-week1"),
    Application("code", "azure-2023-code"),
    Application("conversation", "azure-2023-conv"),
)


def prefix_share() -> float:
    """L_pre / L_in where a trace tells: prompt tokens that repeat an earlier prompt's beginning."""
    return load_digest(PREFIX_DIGEST, field="prefix").mean / load_digest(PREFIX_DIGEST, field="input").mean


def capacity(problem: Problem) -> float:
    """The largest multiple of the arrival rates whose memory the GPUs can hold.

    Every request is admitted and reserves its input and the fractile F^{-1}(q*) of its output, prefixes
    are not shared, each class goes where it needs the fewest GPUs, and groups are divisible: by (6e)
    class i needs (1 + kappa) lambda_i T_ik (L_in + F^{-1}(q*)) n_k / M_k GPUs on configuration k, so
    capacity = J / sum_i min_k of that. Whole groups and waiting times can only lower it.
    """
    q = critical_fractile(problem.costs.preemption, problem.costs.waste)
    held = problem.input_tokens + np.array([c.output.quantile(q) for c in problem.classes])
    gpus = (
        (1 + problem.headroom)
        * problem.offered_loads
        * held[:, None]
        * (problem.group_gpus / problem.kv_tokens)
    )
    return float(problem.gpus / gpus.min(axis=1).sum())


def with_load(problem: Problem, load: float) -> Problem:
    """The same problem with all arrival rates scaled to ``load`` times its `capacity`."""
    if not (np.isfinite(load) and load > 0):
        raise ValueError(f"load: {load}; expected > 0 and finite, as a fraction of capacity")
    factor = load * capacity(problem)
    return problem.replace(
        classes=tuple(replace(c, arrival_rate=c.arrival_rate * factor) for c in problem.classes)
    )


def _request_class(
    name: str,
    configs: Sequence[ServingConfig],
    *,
    input_tokens: float,
    output: LengthDistribution,
    shared_prefix: float,
    slo_factor: float,
    arrival_rate: float = 1.0,
) -> RequestClass:
    fastest = min(float(k.service_time(input_tokens, output.mean)) for k in configs)
    return RequestClass(
        name=name,
        arrival_rate=arrival_rate,
        input_tokens=input_tokens,
        prefix_tokens=shared_prefix * input_tokens,
        latency_slo=slo_factor * fastest,
        output=output,
    )


def paper(
    *,
    load: float = LOAD,
    rho: float = 10.0,
    radius: float = RADIUS,
    relative: bool = True,
    ambiguity: AmbiguitySet | None = None,
    gpus: int = 8,
    gpu: str = "A100-80GB",
    model: str = "70B-MHA",
    parallels: Sequence[ParallelConfig] = PAPER_CONFIGS,
    service: str = "formula",
    slo_factor: float = SLO_FACTOR,
    shared_prefix: float | None = None,
    max_output_tokens: int | None = None,
    costs: Costs | None = None,
    headroom: float = 0.2,
) -> Problem:
    """The paper's problem: 8 A100-80GB, four configurations, three classes from real traces.

    Parameters
    ----------
    load : arrival rates as a fraction of `capacity`; the classes arrive equally often.
    rho : c_p / c_w; the other weights are the paper's. ``costs`` replaces them all.
    radius, relative : of the Wasserstein-1 ball, tokens or multiples of the mean; ``ambiguity`` replaces it.
    gpus, gpu, model, parallels, service : the cluster; see `kvcache.hardware`.
    slo_factor : deadline in mean service times on the fastest configuration.
    shared_prefix : L_pre / L_in; `prefix_share` unless given.
    max_output_tokens : one L_max for all classes instead of each trace's own cap; longer outputs are cut.
    """
    configs = serving_configs(GPU.preset(gpu), Model.preset(model), parallels, service=service)
    classes = tuple(
        _request_class(
            a.name,
            configs,
            input_tokens=a.input_tokens,
            output=a.output if max_output_tokens is None else a.output.clip(max_output_tokens),
            shared_prefix=prefix_share() if shared_prefix is None else shared_prefix,
            slo_factor=slo_factor,
        )
        for a in APPLICATIONS
    )
    problem = Problem(
        classes,
        configs,
        gpus,
        costs=costs or Costs(preemption=rho),
        headroom=headroom,
        ambiguity=ambiguity or Wasserstein1(radius, relative=relative),
        name="paper",
    )
    return with_load(problem, load)


def _sampled(output: LengthDistribution, samples: int, rng: np.random.Generator) -> LengthDistribution:
    """The empirical distribution of that many draws, at the cost of the atoms and not of the draws."""
    counts = rng.multinomial(samples, output.probabilities)
    return LengthDistribution.from_counts(output.tokens, counts, output.upper, name=output.name)


def scalability(
    classes: int,
    configs: int,
    samples: int,
    gpus: int,
    seed: int,
    *,
    load: float = LOAD,
    rho: float = 10.0,
    radius: float = RADIUS,
    gpu: str = "A100-80GB",
    model: str = "70B-MHA",
    headroom: float = 0.2,
) -> Problem:
    """A random problem of a given size, as in Table III; the same arguments give the same problem.

    Each class takes the lengths of one application, scaled by a factor within [0.5, 2] (log-uniform),
    of which ``samples`` are drawn; its prompt is scaled within [0.25, 1], its rate is log-normal, its
    prefix up to half of the prompt, its deadline 1.5 to 4 service times. ``configs`` of at most 24
    parallel configurations are taken in a fixed order, the paper's four first.
    """
    known = PAPER_CONFIGS + MORE_CONFIGS
    if not 1 <= configs <= len(known):
        raise ValueError(f"configs: {configs}; expected 1 to {len(known)}")
    for name, value in (("classes", classes), ("samples", samples)):
        if value < 1:
            raise ValueError(f"{name}: {value}; expected >= 1")
    rng = np.random.default_rng(seed)
    groups = serving_configs(GPU.preset(gpu), Model.preset(model), known[:configs])
    drawn = []
    for i in range(classes):
        application = APPLICATIONS[i % len(APPLICATIONS)]
        output = application.output.scale(float(np.exp(rng.uniform(np.log(0.5), np.log(2)))))
        drawn.append(
            _request_class(
                f"{application.name}-{i + 1}",
                groups,
                input_tokens=float(np.ceil(application.input_tokens * rng.uniform(0.25, 1.0))),
                output=_sampled(output, samples, rng),
                shared_prefix=float(rng.uniform(0.0, 0.5)),
                slo_factor=float(rng.uniform(1.5, 4.0)),
                arrival_rate=float(rng.lognormal(0.0, 0.5)),
            )
        )
    problem = Problem(
        tuple(drawn),
        groups,
        gpus,
        costs=Costs(preemption=rho),
        headroom=headroom,
        ambiguity=Wasserstein1(radius, relative=True),
        name=f"{classes}x{configs}x{samples}",
    )
    return with_load(problem, load)


def ablation(
    *,
    seed: int = 0,
    samples: int = 500,
    load: float = LOAD,
    rho: float = 20.0,
    radius: float = RADIUS,
    gpus: int = 8,
) -> Problem:
    """The ablation's heterogeneous problem (Table V): a code class too large for the small TP2 group.

    The paper's cluster and classes with rho 20; each class sees ``samples`` draws of its trace, which
    differ by ``seed``. A TP2 group holds about 1,500 tokens, less than a mean code prompt.
    """
    rng = np.random.default_rng(seed)
    whole = paper(load=load, rho=rho, radius=radius, gpus=gpus)
    classes = tuple(replace(c, output=_sampled(c.output, samples, rng)) for c in whole.classes)
    return whole.replace(classes=classes, name=f"ablation-{seed}")
