"""From requests, a model and GPUs to a plan that an operator can start, judged before it is shown.

The program of `kvcache.planner.program` knows means; deadlines are kept by percentiles. So a plan is made,
its groups are simulated on the training half of the requests, and the ``fill`` of the groups, the part of
every linear limit that may be used, is moved until the asked share of requests is within both deadlines.
The other half of the requests then says what the plan is worth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from statistics import NormalDist
from time import perf_counter

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvcache.engine import (
    Demand,
    JointLengths,
    PoolPolicy,
    StepCost,
    capacity_rows,
    headroom,
    operating_point,
)
from kvcache.engine.operating import OperatingPoint
from kvcache.files import atomic_path
from kvcache.groups import ServingGroup, group, parallel_choices
from kvcache.hardware import GPU, Model, ParallelConfig
from kvcache.kernels import carried_gpu
from kvcache.models import read_model
from kvcache.planner import launch
from kvcache.planner.judge import Station, arrivals, replay
from kvcache.planner.program import (
    Allocation,
    Column,
    Traffic,
    first_token,
    formulate,
    may_serve,
    solve,
)
from kvcache.requests import Workload, workload
from kvcache.traces import Trace, read_trace

__all__ = ["Plan", "PlanError", "plan"]

Floats = NDArray[np.float64]

#: Width of the buckets, in logarithms, in which lengths are kept while planning.
BUCKET = 0.02
#: Share of a pool left to prefixes that requests share, where the trace says that they do.
PREFIX_SHARE = 0.3
#: Bytes/s at which a cache moves from a prefill to a decode group: one 400 Gb/s port a GPU.
TRANSFER_BYTES = 50e9
#: Simulated requests per group, least and most: near saturation a steady state takes thousands.
REPLAYED = (1500, 8000)
#: The most requests that are drawn for a replay, of which some groups are simulated.
MOST_DRAWN = 2_000_000
#: Bounds of the fill, and how finely it is searched.
FILLS, FILL_STEP = (0.2, 1.6), 0.01
#: How often, and by which factor, a plan that misses its deadlines on the held-out half is tightened.
TIGHTENED, TIGHTER = 3, 1.03
#: How much more a split of prefill and decode must promise to be simulated.
SPLIT_GAIN = 1.03
#: Iterations drawn to fit a linear step cost.
ITERATIONS = 800
SCHEMA = 1


class PlanError(ValueError):
    """No plan is possible; the message says for which class, by which number, and what would help."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of group that may be started: how it is planned and how it runs."""

    column: Column
    serving: ServingGroup
    free: float = 0.0
    headroom: float = 0.0

    @property
    def label(self) -> str:
        """Configuration, with what tells it from another kind of the same."""
        return self.column.name


@dataclass(frozen=True, eq=False)
class Draft:
    """A solution of the program, with the kinds as they were settled around it."""

    kinds: tuple[Kind, ...]
    allocation: Allocation
    fill: float
    figures: pd.Series | None = None

    @property
    def used(self) -> NDArray[np.intp]:
        """Positions of the kinds that are started."""
        return np.flatnonzero(self.allocation.groups)


@dataclass(frozen=True, eq=False)
class Plan:
    """What to start, where requests go, and what it will do.

    Attributes
    ----------
    groups : DataFrame, one row per kind: ``config``, ``phase``, ``groups``, ``gpus`` (of all of them),
        ``kv_tokens`` (of one), ``headroom`` (tokens), ``watermark``, ``max_num_seqs``,
        ``max_num_batched_tokens``, ``load`` (rho), ``tpot`` (s), ``running``, ``cached`` (tokens), ``limit``
        (the row that binds) and ``use`` (how much of it is used).
    routing : DataFrame, one row per class: ``class``, ``rule`` (what a router checks), ``rate`` (requests/s),
        ``rejected`` (share), and the share that each kind gets, by label.
    predicted : ``requests_per_s`` (admitted), ``offered_per_s``, ``output_tokens_per_s``, ``tpot``, ``ttft``
        (s, means), ``rejected``, ``gpus``, ``capacity_per_s`` (of this mix on these GPUs), ``gpu_worth`` and
        ``tpot_worth`` (requests/s of capacity for one more GPU; for 1 % more time per token), ``gap``.
    replayed : DataFrame, figures of `kvcache.planner.judge.FIGURES` for ``plan`` (on the held-out half),
        ``without headroom``, the trace's own ``busiest stretch`` (where no rate was given), and
        ``engine defaults`` on the same GPUs.
    meets : whether the asked share of the admitted requests was within both deadlines in the replay.
    warnings : what a reader must know.
    candidates : DataFrame of the configurations looked at, with the reason where one was not used.
    seconds : ``groups`` (step times), ``program``, ``replay``, ``total``.
    """

    workload: Workload
    options: Options
    draft: Draft
    groups: pd.DataFrame
    routing: pd.DataFrame
    predicted: Mapping[str, float]
    replayed: pd.DataFrame
    meets: bool
    warnings: tuple[str, ...]
    candidates: pd.DataFrame
    seconds: Mapping[str, float]
    changes: tuple[str, ...] = ()
    planner: Planner = field(repr=False, default=None)

    def launch(self, port: int = 8000) -> list[str]:
        """Command lines, one per group, on ports that count up from ``port``."""
        lines: list[str] = []
        for k in self.draft.used:
            kind = self.draft.kinds[k]
            for _ in range(int(self.draft.allocation.groups[k])):
                lines.append(
                    launch.command(
                        kind.serving,
                        watermark=kind.headroom / kind.serving.kv_tokens,
                        prefix_caching=True,
                        phase=kind.column.phase,
                        port=port + len(lines),
                    )
                )
        return lines

    def policies(self) -> dict[str, PoolPolicy]:
        """Admission by label of a kind of group, as the scheduler plug-in `kvcache.vllm` reads it.

        Prefill groups hold nothing for long and have none.
        """
        lengths = self.planner.lengths
        made = {}
        for k in self.draft.used:
            kind, flows = self.draft.kinds[k], self.draft.allocation.flows[:, k]
            if kind.column.phase == "prefill":
                continue
            sent = {
                name: float(flow) for name, flow in zip(self.workload.names, flows, strict=True) if flow > 0
            }
            classes = {name: lengths[self.workload.names.index(name)] for name in sent}
            made[kind.label] = PoolPolicy.of(classes, kind.serving.kv_tokens, kind.column.step, rates=sent)
        return made

    def update(self, window: str | PathLike[str] | Trace | pd.DataFrame | Workload) -> Plan:
        """The plan for the requests of another window, made from this one without a new replay.

        Classes, groups' step times and the fill stay; rates and lengths are the window's. ``changes`` says
        what became of groups, admission and routing.
        """
        return self.planner.update(self, window)

    def what_if(
        self,
        *,
        gpus: int | None = None,
        tpot: float | None = None,
        ttft: float | None = None,
        load: float = 1.0,
        drift: float | None = None,
    ) -> Plan:
        """The plan for other GPUs or deadlines, for ``load`` times the requests, for outputs ``drift`` times.

        Step times and the fill are as here, so it takes a fraction of a second; it is not replayed.
        """
        changes = {"gpus": gpus, "tpot": tpot, "ttft": ttft, "drift": drift}
        return self.planner.what_if(self, load, {k: v for k, v in changes.items() if v is not None})

    def replays(self, seeds: Sequence[int]) -> pd.DataFrame:
        """Figures of the plan on the held-out half, one row per seed of the arrivals."""
        return self.planner.replays(self.draft, seeds)

    def to_dict(self) -> dict:
        """Everything as plain JSON: what a router, a scheduler and a launcher need, with where it is from."""
        return _as_dict(self)

    def to_json(self, path: str | PathLike[str]) -> None:
        """Write `to_dict` to a file."""
        with atomic_path(path) as partial:
            Path(partial).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        started = ", ".join(f"{r.groups} x {r.label}" for r in self.groups.itertuples())
        figures = self.replayed.loc["plan"] if "plan" in self.replayed.index else None
        said = (
            f"; replayed {figures.goodput:.4g}/s in time, {figures.within_deadlines:.1%} of those admitted"
            if figures is not None
            else "; not replayed"
        )
        return (
            f"Plan({started}: {self.predicted['requests_per_s']:.4g} of "
            f"{self.predicted['offered_per_s']:.4g} requests/s, "
            f"TPOT {1e3 * self.predicted['tpot']:.0f} ms{said}"
            f"{'' if self.meets else '; MISSES ITS DEADLINES'})"
        )


@dataclass(frozen=True)
class Options:
    """What `plan` was asked; see there."""

    model: str | Path | Model
    gpu: str | GPU
    gpus: int
    engine: str
    tpot: float
    ttft: float
    objective: str
    share: float
    deadlines: Mapping[str, tuple[float, float]]
    values: Mapping[str, float]
    split: bool | None
    parallel: tuple[ParallelConfig, ...] | None
    drift: float | None
    gpu_price: float
    memory_utilisation: float
    cache_dtype: str
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int | None
    kv_tokens: Mapping[str, int]
    steps: Mapping[str, object]
    seed: int

    def __post_init__(self) -> None:
        for name in ("tpot", "ttft", "gpu_price"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; expected > 0 and finite")
        if isinstance(self.gpus, bool) or self.gpus != int(self.gpus) or self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; expected a whole number >= 1")
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}; expected within (0, 1), such as 0.95")
        if self.objective not in ("goodput", "cost"):
            raise ValueError(f"objective is {self.objective!r}; expected 'goodput' or 'cost'")
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs is {self.max_num_seqs}; expected at most max_num_batched_tokens = "
                f"{self.max_num_batched_tokens}: engines refuse to start otherwise"
            )


def plan(
    requests: str | PathLike[str] | Trace | pd.DataFrame | Workload,
    model: str | Path | Model = "Qwen/Qwen3-32B",
    gpu: str | GPU = "h200_sxm",
    gpus: int = 8,
    engine: str = "vllm",
    tpot: float = 0.1,
    ttft: float = 5.0,
    *,
    objective: str = "goodput",
    share: float = 0.95,
    rate: float | None = None,
    percentile: float = 95.0,
    window_s: float | None = None,
    rules: Mapping[str, str] | None = None,
    classes: int = 4,
    deadlines: Mapping[str, tuple[float, float]] | None = None,
    values: Mapping[str, float] | None = None,
    split: bool | None = None,
    parallel: Sequence[ParallelConfig] | None = None,
    drift: float | None = None,
    gpu_price: float = 1.0,
    memory_utilisation: float = 0.9,
    cache_dtype: str = "auto",
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
    max_model_len: int | None = None,
    kv_tokens: Mapping[str, int] | None = None,
    steps: Mapping[str, object] | None = None,
    prefix_block: int | None = None,
    judge: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan the groups that serve these requests, and judge the plan by replay.

    Parameters
    ----------
    requests : a path, a `Trace`, a table of requests, or a `Workload`; see `kvcache.requests.workload`,
        which also takes ``rate``, ``percentile``, ``window_s``, ``rules`` and ``classes``.
    model, gpu, engine : names or descriptions, as in `kvcache.groups.group`; ``gpus`` of that kind.
    tpot, ttft : deadlines: mean s per output token of a request, s to its first token.
    objective : ``goodput``: the most requests in time on these GPUs; what cannot be served in time is
        rejected, and where all can, the groups that leave most room. ``cost``: the fewest GPUs for all.
    share : of the admitted requests that must be within both deadlines.
    deadlines, values : class -> (tpot, ttft), and class -> what serving one request is worth (1).
    split : prefill and decode groups apart; None: where that promises 3 % more, and the replay agrees.
    parallel : configurations to choose from; by default all that the model and the engine allow.
    drift : factor on the output lengths that is planned for; by default the top of the band of the trace's
        windows for ``cost``, and none for ``goodput``, whose admission follows the lengths.
    gpu_price : money per GPU and hour.
    memory_utilisation, cache_dtype, max_num_batched_tokens, max_num_seqs, max_model_len : how engines are
        started; by default a vLLM server's batched tokens, 1,024 running requests (memory and deadlines
        then say how many run) and the model length of the longest request.
    kv_tokens, steps : configuration (``TP2xPP1``) -> the engine's own pool and a benchmark's step times.
    prefix_block : tokens of a block in ``prefix_blocks``, where the trace's report does not say.
    judge : False leaves out the replay (and with it all that rests on it).
    seed : of the replayed arrivals.
    progress : is told what is being done.

    Raises
    ------
    PlanError
        Where nothing can be served: a class that fits no pool or deadline, too few GPUs.
    ValueError
        For options that make no sense, and requests that `workload` refuses.
    """
    started = perf_counter()
    batched = max_num_batched_tokens or launch.server_limits(_sheet(gpu))[0]
    options = Options(
        model, gpu, gpus, engine, tpot, ttft, objective, share, dict(deadlines or {}), dict(values or {}),
        split, tuple(parallel) if parallel else None, drift, gpu_price, memory_utilisation, cache_dtype,
        batched, max_num_seqs or min(1024, batched), max_model_len, dict(kv_tokens or {}),
        dict(steps or {}), seed,
    )  # fmt: skip
    say = progress or (lambda _: None)
    say("reading requests")
    asked = {
        "rules": rules,
        "classes": classes,
        "rate": rate,
        "percentile": percentile,
        "window_s": window_s,
        "prefix_block": prefix_block,
    }
    if isinstance(requests, (str, PathLike)):
        requests = read_trace(requests)
    load = requests if isinstance(requests, Workload) else workload(requests, **asked)
    say("step times of the configurations")
    planner = Planner(options, load)
    table = requests.requests if isinstance(requests, Trace) else requests
    if not isinstance(requests, Workload) and "prefix_blocks" in table:
        least = min(serving.kv_tokens for serving in planner.servings)
        planner = Planner(options, workload(requests, prefix_pool=PREFIX_SHARE * least, **asked))
        found = planner.workload.cached @ planner.workload.rates / planner.workload.rate
        planner.notes.append(
            f"{found:,.0f} prompt tokens a request are found in the prefix cache ({PREFIX_SHARE:.0%} "
            "of a pool): the router must send requests with the same beginning to the same group"
        )
    planner.refuse()
    say("the program")
    return planner.plan(say, judge, started)


def _sheet(gpu: str | GPU) -> GPU:
    return gpu if isinstance(gpu, GPU) else carried_gpu(gpu)


class Planner:
    """The kinds of groups and the classes of one planning run; what `plan` and `Plan.update` share."""

    def __init__(self, options: Options, requests: Workload) -> None:
        self.options, self.workload = options, requests
        unknown = sorted((set(options.deadlines) | set(options.values)) - set(requests.names))
        if unknown:
            raise ValueError(f"deadlines, values: no class {unknown}; the classes are {list(requests.names)}")
        self.notes: list[str] = list(requests.warnings)
        self.rejected: list[dict[str, object]] = []
        started = perf_counter()
        self.traffic, self.lengths = self._traffic(requests)
        self.servings = self._servings()
        self.seconds = {"groups": perf_counter() - started}
        self.kinds = self._kinds(split=False)

    # ---- classes ------------------------------------------------------------------------------

    def _traffic(self, requests: Workload) -> tuple[Traffic, tuple[JointLengths, ...]]:
        o = self.options
        drift = o.drift
        if drift is None:
            drift = requests.drift[1] if o.objective == "cost" else 1.0
        self.drift = drift
        lengths = tuple(law.bucketed(BUCKET) for law in requests.lengths)
        demands = []
        for code, law in enumerate(lengths):
            law = law.scale(drift) if drift != 1 else law
            demands.append(replace(Demand.of(law), longest=float(requests.longest[code])))
        prompts = [law.input_lengths.quantile(o.share) for law in lengths]
        pairs = [o.deadlines.get(name, (o.tpot, o.ttft)) for name in requests.names]
        traffic = Traffic(
            requests.names,
            requests.rates,
            tuple(demands),
            np.maximum(np.array(prompts, dtype=float), 1.0),
            np.array([p[0] for p in pairs], dtype=float),
            np.array([p[1] for p in pairs], dtype=float),
            np.array([o.values.get(name, 1.0) for name in requests.names], dtype=float),
        )
        return traffic, lengths

    # ---- kinds of groups ----------------------------------------------------------------------

    def _servings(self) -> tuple[ServingGroup, ...]:
        o = self.options
        model = o.model if isinstance(o.model, Model) else read_model(o.model)
        self.model = model
        try:
            choices = o.parallel or parallel_choices(
                model, o.gpu, o.engine, min(o.gpus, 64), memory_utilisation=o.memory_utilisation
            )
        except ValueError as error:
            raise PlanError(f"{o.gpus} GPUs: {error}") from error
        longest = int(self.workload.longest.max())
        most = model.max_position or longest
        if longest > most:
            name = self.workload.names[int(self.workload.longest.argmax())]
            raise PlanError(
                f"class {name!r}: its longest request has "
                f"{longest:,} tokens; {model.name} takes {most:,}. Leave such requests out, or choose a "
                "model with a longer context"
            )
        length = o.max_model_len or min(most, -(-longest // 256) * 256)
        if length < longest:
            raise PlanError(f"max_model_len is {length:,}; the longest request has {longest:,} tokens")
        weights = self.traffic.rates / self.traffic.rates.sum()
        prompt = weights @ [law.mean_input for law in self.lengths]
        square = weights @ [law.mean(law.inputs.astype(float) ** 2) for law in self.lengths]
        context = (
            weights
            @ [d.held for d in self.traffic.demands]
            / (weights @ [d.output for d in self.traffic.demands])
        )
        kept = []
        for choice in choices:
            if o.parallel is None and choice.pipeline > 1 and any(s.gpus == choice.gpus for s in kept):
                self._drop(choice.name, choice.gpus, "a split without pipeline has as many GPUs")
                continue
            try:
                made = group(
                    model if not isinstance(o.model, str) else o.model,
                    o.gpu,
                    o.engine,
                    choice,
                    memory_utilisation=o.memory_utilisation,
                    cache_dtype=o.cache_dtype,
                    max_num_batched_tokens=o.max_num_batched_tokens,
                    max_num_seqs=o.max_num_seqs,
                    max_model_len=length,
                    prompt_tokens=max(1, round(square / prompt)),
                    context=max(1, round(context)),
                    kv_tokens=o.kv_tokens.get(choice.name),
                    steps=o.steps.get(choice.name),
                )
            except ValueError as error:
                self._drop(choice.name, choice.gpus, str(error))
                continue
            kept.append(made)
        if not kept:
            reasons = "; ".join(str(r["reason"]) for r in self.rejected)
            raise PlanError(f"no configuration of {model.name} on {o.gpus} GPUs: {reasons}")
        if all(made.gpus > o.gpus for made in kept):
            least = min(made.gpus for made in kept)
            raise PlanError(f"gpus is {o.gpus}; one group of {model.name} needs {least}")
        return tuple(kept)

    def _drop(self, name: str, gpus: int, reason: str) -> None:
        self.rejected.append({"config": name, "gpus": gpus, "reason": reason})

    @property
    def reserved(self) -> float:
        """Share of a pool that holds shared prefixes."""
        return PREFIX_SHARE if self.workload.cached.any() else 0.0

    def _kinds(self, split: bool) -> tuple[Kind, ...]:
        """Every configuration at every TPOT deadline, settled where the whole mix would fill it."""
        kinds = []
        deadlines = np.unique(self.traffic.tpot)
        for serving in self.servings:
            phases = ("both", "prefill", "decode") if split else ("both",)
            for phase in phases:
                for d in deadlines if phase != "prefill" else deadlines[:1]:
                    label = serving.name
                    if deadlines.size > 1 and phase != "prefill":
                        label += f" {1e3 * d:g} ms"
                    if phase != "both":
                        label += f" {phase}"
                    transfer = 0.0
                    if phase == "prefill":
                        per_token = self.model.request_bytes(1024, 1) / 1024
                        transfer = per_token / (TRANSFER_BYTES * serving.gpus)
                    column = Column(
                        label,
                        serving.gpus,
                        serving.gpus * self.options.gpu_price,
                        serving.cost,
                        serving.kv_tokens * (1 - self.reserved),
                        serving.max_num_seqs,
                        serving.max_num_batched_tokens,
                        float(d),
                        phase,
                        transfer,
                    )
                    kinds.append(self._settled(Kind(column, serving), self.traffic.rates))
        return tuple(kinds)

    def _settled(self, kind: Kind, flows: Floats, groups: float | None = None) -> Kind:
        """The kind with step cost, headroom and room for fluctuations as they are where these flows fill it.

        Without ``groups`` as many as these flows can fill.
        """
        column, allowed = kind.column, may_serve(self.traffic, kind.column) & (flows > 0)
        if not allowed.any() or column.phase == "prefill":
            return kind
        demands = [d for d, yes in zip(self.traffic.demands, allowed, strict=True) if yes]
        if column.phase == "decode":
            demands = [replace(d, prompt=0.0) for d in demands]
        rates = flows[allowed]
        for _ in range(2):
            room = max(column.pool - kind.free, 1.0)
            rows = capacity_rows(
                demands, column.step, room, column.tpot, column.max_running, column.max_batched
            )
            most = rates * (rows.most(rates)[0] * (1 - 1e-9))
            fewer = groups is not None and rates.sum() < groups * most.sum()
            point = operating_point(demands, rates / groups if fewer else most, column.step)
            law = JointLengths.mix([m for m, yes in zip(self.lengths, allowed, strict=True) if yes], rates)
            column = replace(column, step=self._step_at(kind, point, law))
            if column.step.t0 >= column.tpot:
                return kind
            spare = headroom(law, column.pool, column.step)
            fluctuation = NormalDist().inv_cdf(self.options.share) * point.deviation
            free = min(spare + fluctuation, 0.9 * column.pool)
            kind = replace(kind, column=column, headroom=float(spare), free=float(free))
        return kind

    def _step_at(self, kind: Kind, point: OperatingPoint, law: JointLengths) -> StepCost:
        """The linear cost nearest to the measured steps in the iterations that a group will make.

        Drawn are Poisson numbers of running requests and of prompts as whole chunks: most iterations have
        none.
        """
        table = kind.serving.table
        from scipy.optimize import nnls  # here, because a plan alone needs it

        draws = self._iterations(kind, point, law)
        design = np.stack([np.ones(ITERATIONS), *draws], axis=1)
        units = np.maximum(design.max(axis=0), 1e-9)
        fitted = nnls(design / units, table.seconds(*draws))[0] / units
        return StepCost(max(float(fitted[0]), 1e-6), *(float(f) for f in fitted[1:]))

    def _iterations(
        self, kind: Kind, point: OperatingPoint, law: JointLengths
    ) -> tuple[Floats, Floats, Floats]:
        """Running requests, tokens held and prompt tokens of iterations around an operating point.

        At 0.6 to 1.15 of its load, and contexts of 0.8 to 1.2 of its own, so that slopes can be told apart.
        """
        rng = np.random.default_rng(self.options.seed)
        scale = rng.uniform(0.6, 1.15, ITERATIONS)
        running = rng.poisson(max(point.running, 0.5) * scale)
        held = running * (point.cached / max(point.running, 1e-9)) * rng.uniform(0.8, 1.2, ITERATIONS)
        if point.prefill == 0:
            return running, held, np.zeros(ITERATIONS)
        prompts = law.input_lengths.sample(rng, 8 * ITERATIONS).reshape(ITERATIONS, 8)
        arrived = np.minimum(rng.poisson(point.prefill / law.mean_input * scale), 8)
        chunks = np.where(np.arange(8) < arrived[:, None], prompts, 0).sum(axis=1)
        return running, held, np.minimum(chunks, kind.column.max_batched)

    @cached_property
    def _mix(self) -> JointLengths:
        return JointLengths.mix(self.lengths, self.traffic.rates)

    # ---- refusals -----------------------------------------------------------------------------

    def refuse(self) -> None:
        """Raise where a class can be served by no kind of group, however few requests it sends."""
        columns = [kind.column for kind in self.kinds]
        allowed = np.array([may_serve(self.traffic, column) for column in columns])
        for i in np.flatnonzero(~allowed.any(axis=0)):
            name, t = self.traffic.names[i], self.traffic
            longest, pool = t.demands[i].longest, max(c.pool for c in columns)
            quickest = min(columns, key=lambda c: c.step.t0)
            first = min(float(first_token(c, t.prompts[[i]])[0]) for c in columns)
            if longest > pool:
                raise PlanError(
                    f"class {name!r}: its longest request has {longest:,.0f} tokens, the largest pool "
                    f"({max(columns, key=lambda c: c.pool).name}) {pool:,.0f}. Larger groups, an 8-bit "
                    "cache (cache_dtype='fp8') or a shorter limit would help"
                )
            if quickest.step.t0 >= t.tpot[i]:
                raise PlanError(
                    f"class {name!r}: tpot is {1e3 * t.tpot[i]:g} ms, but an empty iteration of the quickest "
                    f"group ({quickest.name}) takes {1e3 * quickest.step.t0:.1f} ms. A longer deadline, "
                    "larger groups or fewer bytes a weight would help"
                )
            if first > t.ttft[i]:
                raise PlanError(
                    f"class {name!r}: ttft is {t.ttft[i]:g} s, but a prompt of {t.prompts[i]:,.0f} tokens "
                    f"alone takes {first:.2f} s at best. A longer deadline or larger groups would help"
                )
            raise PlanError(
                f"class {name!r}: no one configuration holds its longest request of {longest:,.0f} tokens, "
                f"keeps {1e3 * t.tpot[i]:g} ms a token and prefills {t.prompts[i]:,.0f} tokens within "
                f"{t.ttft[i]:g} s; each is kept by another. Relax one of the three"
            )

    # ---- drafts -------------------------------------------------------------------------------

    def draft(
        self,
        fill: float,
        objective: str,
        kinds: tuple[Kind, ...] | None = None,
        *,
        rounds: int = 3,
        gpus: int | None = None,
    ) -> Draft | None:
        """Solve the program and settle the kinds in use around the solution, until they stay."""
        kinds = kinds or self.kinds
        seen: list[tuple[int, ...]] = []
        best: Draft | None = None
        for _ in range(rounds):
            program = formulate(self.traffic, [k.column for k in kinds], np.array([k.free for k in kinds]))
            program = replace(program, loads=program.loads / fill)
            allocation = solve(program, gpus or self.options.gpus, objective)
            if allocation is None:
                return best
            best = Draft(kinds, allocation, fill)
            groups = tuple(allocation.groups.tolist())
            if groups in seen:
                break
            seen.append(groups)
            kinds = tuple(
                self._settled(kind, allocation.flows[:, k], float(z)) if z else kind
                for k, (kind, z) in enumerate(zip(kinds, groups, strict=True))
            )
        return best

    def choose(self, fill: float, kinds: tuple[Kind, ...] | None = None, rounds: int = 3) -> Draft | None:
        """The draft for the objective asked: where all can be served the one with the most room."""
        if self.options.objective == "cost":
            return self.draft(fill, "cost", kinds, rounds=rounds)
        grown = self.draft(fill, "growth", kinds, rounds=rounds)
        if grown is not None and grown.allocation.objective >= 1:
            flows = grown.allocation.flows / grown.allocation.objective
            served = replace(grown.allocation, flows=flows, admitted=self.traffic.rates)
            settled = list(grown.kinds)
            for k in grown.used:
                settled[k] = self._settled(settled[k], flows[:, k], float(served.groups[k]))
            return replace(grown, kinds=tuple(settled), allocation=served)
        return self.draft(fill, "goodput", kinds, rounds=rounds)

    # ---- replay -------------------------------------------------------------------------------

    def stations(self, draft: Draft, headroom_on: bool = True) -> list[Station]:
        """The groups in use, as they run."""
        return [
            Station(
                kind.label,
                int(draft.allocation.groups[k]),
                kind.serving.table,
                int(kind.column.pool),
                kind.headroom if headroom_on else 0.0,
                kind.serving.max_num_seqs,
                kind.serving.max_num_batched_tokens,
                kind.column.phase,
                kind.column.transfer,
            )
            for k, kind in ((k, draft.kinds[k]) for k in draft.used)
        ]

    def replayed(self, draft: Draft, half: pd.DataFrame, *, headroom_on: bool = True) -> pd.Series:
        """Figures of a draft on one half of the requests; the same arrivals for every draft."""
        stations = self.stations(draft, headroom_on)
        shares = draft.allocation.flows[:, draft.used] / self.traffic.rates[:, None]
        return self._run(stations, shares, half, self._count(draft))

    def rehearsed(self, draft: Draft) -> pd.Series:
        """Figures on the training half with a load that is higher by what its means may be off."""
        stations = self.stations(draft)
        shares = draft.allocation.flows[:, draft.used] / self.traffic.rates[:, None]
        figures = self._run(
            stations, shares, self.workload.training, self._count(draft), 1 + self.uncertainty(draft)
        )
        return figures

    def uncertainty(self, draft: Draft) -> float:
        """Relative error of the mean work of a request that the training half leaves, at 95 %, one-sided."""
        step = draft.kinds[draft.used[0]].column.step
        law = self._mix
        inputs, outputs = law.inputs.astype(float), law.outputs.astype(float)
        work = (
            step.per_prefill_token * inputs
            + step.per_sequence * outputs
            + step.per_cached_token * outputs * (inputs + outputs / 2)
        )
        mean = law.mean(work)
        spread = np.sqrt(max(law.mean(work**2) - mean**2, 0.0))
        return float(NormalDist().inv_cdf(0.95) * spread / mean / np.sqrt(len(self.workload.training)))

    def _count(self, draft: Draft) -> int:
        """Requests to draw: a group forgets how it started in a time that grows as 1 / (1 - load)."""
        load = max(self.point(draft, k)[0].load for k in draft.used)
        per_group = np.clip(REPLAYED[0] / max(1 - load, 1e-3), *REPLAYED)
        admitted = draft.allocation.admitted.sum() / self.traffic.rates.sum()
        return int(min(per_group * draft.allocation.groups.sum() / max(admitted, 1e-3), MOST_DRAWN))

    def _run(
        self,
        stations: list[Station],
        shares: Floats,
        half: pd.DataFrame,
        count: int,
        more: float = 1.0,
        recorded: bool = False,
    ) -> pd.Series:
        rng = np.random.default_rng(self.options.seed)
        table = arrivals(half, self.traffic.rates * more, count, rng, recorded)
        figures, _ = replay(table, stations, shares, self.traffic.tpot, self.traffic.ttft, rng)
        return figures

    def defaults(self) -> tuple[list[Station], Floats] | None:
        """The engine's defaults on the same GPUs: everything admitted, requests in turn.

        The smallest split whose pool holds the model's longest context, without which an engine that is told
        nothing refuses to start, as often as it fits.
        """
        by_size = sorted(self.servings, key=lambda s: (s.gpus, s.parallel.pipeline))
        whole = [s for s in by_size if s.kv_tokens >= (self.model.max_position or 0)] or by_size[-1:]
        groups = self.options.gpus // whole[0].gpus
        if not groups:
            return None
        batched, running = launch.server_limits(whole[0].gpu)
        pool = int(whole[0].kv_tokens * (1 - self.reserved))
        station = Station(whole[0].name, groups, whole[0].table, pool, 0.0, running, batched)
        return [station], np.ones((len(self.traffic.names), 1))

    # ---- the plan -----------------------------------------------------------------------------

    def plan(self, say: Callable[[str], None], judge: bool, started: float) -> Plan:
        """Choose, tighten or fill up by replay of the training half, then judge on the other half."""
        clock = perf_counter()
        draft = self.choose(1.0)
        if draft is None:
            raise PlanError(self._too_few())
        spent = perf_counter() - clock
        clock = perf_counter()
        if judge:
            draft = self._searched(draft, self.kinds, say)
            served = np.allclose(draft.allocation.admitted, self.traffic.rates)
            wanted = self.options.split or (self.options.split is None and not served)
            if self.options.objective == "cost":
                wanted = self.options.split is not False
            if wanted and self.options.engine == "vllm":
                draft = self._split(draft, say)
        self.seconds |= {"program": spent, "replay": perf_counter() - clock}
        say("judging on the held-out half")
        clock = perf_counter()
        draft, table, meets = self._judged(draft) if judge else (draft, pd.DataFrame(), False)
        self.seconds["replay"] += perf_counter() - clock
        self.seconds["total"] = perf_counter() - started
        return self._finished(draft, table, meets)

    def _too_few(self) -> str:
        needed = self.draft(1.0, "cost", gpus=self.options.gpus * 64)
        rate = f"{self.traffic.rates.sum():.4g} requests/s"
        if needed is None:
            return f"{rate} cannot be served even by {64 * self.options.gpus} GPUs within the deadlines"
        least = int(needed.allocation.groups @ [k.column.gpus for k in needed.kinds])
        return (
            f"{rate} within the deadlines need {least} GPUs; {self.options.gpus} are given. More GPUs, "
            "longer deadlines, or objective='goodput', which rejects what cannot be served, would help"
        )

    def _searched(self, draft: Draft, kinds: tuple[Kind, ...], say: Callable[[str], None]) -> Draft:
        """The draft of the largest fill whose replay of the training half keeps the deadlines.

        Where everything is served with room left, more fill changes nothing. A replay has noise, so half a
        per cent more than the asked share is wanted.
        """
        wanted = self.options.share + 0.005
        full = (
            self.options.objective == "goodput"
            and draft.allocation.objective >= 1
            and np.allclose(draft.allocation.admitted, self.traffic.rates)
        )
        known: dict[float, Draft] = {}

        def tried(fill: float) -> bool:
            made = draft if fill == 1.0 else self.choose(fill, kinds)
            if made is None:
                return False
            say(f"replay at {fill:.0%} of the limits")
            known[fill] = replace(made, figures=self.rehearsed(made))
            return bool(known[fill].figures["within_deadlines"] >= wanted)

        low, high = FILLS
        if tried(1.0):
            if full:
                return known[1.0]
            low = 1.0
        else:
            high = 1.0
        step = 1.15 if low == 1.0 else 1 / 1.15
        while high / low > 1.15 and FILLS[0] < (at := (low if step > 1 else high) * step) < FILLS[1]:
            if tried(at):
                low = at
                if step < 1:
                    break
            else:
                high = at
                if step > 1:
                    break
        while high / low > 1 + FILL_STEP and (low in known or high in known):
            middle = float(np.sqrt(low * high))
            low, high = (middle, high) if tried(middle) else (low, middle)
        good = [d for d in known.values() if d.figures["within_deadlines"] >= wanted]
        if good:
            if self.options.objective == "cost":
                return min(good, key=lambda d: (d.allocation.objective, d.fill))
            return max(good, key=lambda d: d.figures["goodput"])
        return max(known.values(), key=lambda d: d.figures["within_deadlines"])

    def _split(self, draft: Draft, say: Callable[[str], None]) -> Draft:
        """Prefill and decode groups apart, where the program promises more and the replay agrees."""
        kinds = self._kinds(split=True)
        apart = self.choose(1.0, kinds)
        whole = self.choose(1.0)
        if apart is None or not any(kinds[k].column.phase != "both" for k in apart.used):
            return draft
        if self.options.objective == "cost":
            gains = whole.allocation.objective >= SPLIT_GAIN * apart.allocation.objective
        else:
            gains = apart.allocation.objective >= SPLIT_GAIN * whole.allocation.objective
        if not (gains or self.options.split):
            return draft
        say("prefill apart from decode")
        found = self._searched(apart, kinds, say)
        wanted = self.options.share
        better = found.figures["goodput"] > draft.figures["goodput"]
        if self.options.objective == "cost":
            better = found.allocation.objective < draft.allocation.objective
        ok = found.figures["within_deadlines"] >= wanted or self.options.split
        return found if (better or self.options.split) and ok else draft

    def _judged(self, draft: Draft) -> tuple[Draft, pd.DataFrame, bool]:
        """Figures on the held-out half, of a draft that is tightened where it misses its deadlines there."""
        half = self.workload.judging
        rows = {"plan": self.replayed(draft, half)}
        kinds = self._unsettled(draft)
        for _ in range(TIGHTENED):
            if rows["plan"]["within_deadlines"] >= self.options.share:
                break
            tighter = self.choose(draft.fill / TIGHTER, kinds)
            if tighter is None:
                break
            draft, rows["plan"] = tighter, self.replayed(tighter, half)
            self.notes.append(
                f"the held-out half missed the deadlines: the limits were used to {draft.fill:.0%} instead"
            )
        if any(draft.kinds[k].headroom > 0 for k in draft.used):
            rows["without headroom"] = self.replayed(draft, half, headroom_on=False)
        if self.workload.arrivals == "recorded":
            # the trace's own bursts: half of the requests, so twice as fast
            busy = half.assign(arrival_s=half["arrival_s"] / 2)
            shares = draft.allocation.flows[:, draft.used] / self.traffic.rates[:, None]
            rows["busiest stretch"] = self._run(
                self.stations(draft), shares, busy, self._count(draft), recorded=True
            )
        default = self.defaults()
        if default is not None:
            rows["engine defaults"] = self._run(*default, half, self._count(draft))
        table = pd.DataFrame(rows).T
        return draft, table, bool(table.loc["plan", "within_deadlines"] >= self.options.share)

    # ---- results ------------------------------------------------------------------------------

    def _finished(
        self, draft: Draft, table: pd.DataFrame, meets: bool, changes: tuple[str, ...] = ()
    ) -> Plan:
        groups, points = self._group_table(draft)
        return Plan(
            workload=self.workload,
            options=self.options,
            draft=draft,
            groups=groups,
            routing=self._routing(draft),
            predicted=self._predicted(draft, points),
            replayed=table,
            meets=meets,
            warnings=tuple(self.notes + self._doubts(draft, table, meets)),
            candidates=self._candidates(draft),
            seconds=dict(self.seconds),
            changes=changes,
            planner=self,
        )

    def point(self, draft: Draft, k: int):
        """Where one group of kind k settles, and how much of which limit it uses there."""
        column, z = draft.kinds[k].column, float(draft.allocation.groups[k])
        demands = self.traffic.demands
        if column.phase == "decode":
            demands = tuple(replace(d, prompt=0.0) for d in demands)
        point = operating_point(demands, draft.allocation.flows[:, k] / z, column.step)
        program = formulate(self.traffic, [column], np.array([draft.kinds[k].free]))
        loads = np.where(np.isfinite(program.loads[:, :, 0]), program.loads[:, :, 0], 0.0)
        use = loads @ draft.allocation.flows[:, k] / z
        return point, use

    def _group_table(self, draft: Draft) -> tuple[pd.DataFrame, list]:
        rows, points = [], []
        for k in draft.used:
            kind, column, z = draft.kinds[k], draft.kinds[k].column, int(draft.allocation.groups[k])
            point, use = self.point(draft, k)
            points.append(point)
            row = int(np.argmax(use))
            rows.append(
                {
                    "config": kind.serving.name,
                    "label": kind.label,
                    "phase": column.phase,
                    "groups": z,
                    "gpus": z * column.gpus,
                    "kv_tokens": kind.serving.kv_tokens,
                    "headroom": kind.headroom,
                    "watermark": kind.headroom / kind.serving.kv_tokens,
                    "max_num_seqs": kind.serving.max_num_seqs,
                    "max_num_batched_tokens": kind.serving.max_num_batched_tokens,
                    "requests_per_s": float(draft.allocation.flows[:, k].sum()),
                    "load": point.load,
                    "tpot": point.tpot if column.phase != "prefill" else np.nan,
                    "running": point.running,
                    "cached": point.cached,
                    "limit": ("tpot", "memory", "running", "batch")[row]
                    if column.phase != "prefill"
                    else "ttft",
                    "use": float(use[row]),
                    "step_error": kind.serving.cost_error.median,
                }
            )
        return pd.DataFrame(rows), points

    def _routing(self, draft: Draft) -> pd.DataFrame:
        shares = draft.allocation.flows / self.traffic.rates[:, None]
        start = np.array([kind.column.phase != "decode" for kind in draft.kinds])
        table = pd.DataFrame(
            {
                "class": self.traffic.names,
                "rule": self.workload.rules,
                "rate": self.traffic.rates,
                "rejected": np.round(np.clip(1 - shares[:, start].sum(axis=1), 0.0, 1.0), 6),
            }
        )
        return table.assign(**{draft.kinds[k].label: shares[:, k] for k in draft.used})

    def _predicted(self, draft: Draft, points: list) -> dict[str, float]:
        allocation, traffic = draft.allocation, self.traffic
        outputs = np.array([d.output for d in traffic.demands])
        several = np.array([law.mean(law.outputs > 1) for law in self.lengths])
        weight, tpot, first = 0.0, 0.0, 0.0
        for point, k in zip(points, draft.used, strict=True):
            column, flow = draft.kinds[k].column, allocation.flows[:, k]
            if column.phase != "prefill":
                tpot += float(flow @ several) * point.tpot
                weight += float(flow @ several)
            if column.phase != "decode":
                prompt = np.array([d.prompt for d in traffic.demands])
                busy = 1 - min(point.load, 0.999)
                alone = (
                    column.step.t0 / busy + prompt * column.step.per_prefill_token + prompt * column.transfer
                )
                first += float(flow @ alone)
        admitted = float(allocation.admitted.sum())
        growth = self.draft(draft.fill, "growth", self._unsettled(draft), rounds=2)
        rate = float(traffic.rates.sum())
        return {
            "requests_per_s": admitted,
            "offered_per_s": rate,
            "output_tokens_per_s": float(allocation.admitted @ outputs),
            "tpot": tpot / weight if weight else 0.0,
            "ttft": first / admitted if admitted else 0.0,
            "rejected": max(0.0, 1 - admitted / rate),
            "gpus": float(allocation.groups @ [k.column.gpus for k in draft.kinds]),
            "price_per_h": float(allocation.groups @ [k.column.price for k in draft.kinds]),
            "capacity_per_s": growth.allocation.objective * rate,
            "gpu_worth": growth.allocation.gpu_price * rate,
            "tpot_worth": self._deadline_worth(growth) * rate,
            "fill": draft.fill,
            "gap": allocation.gap,
        }

    def _unsettled(self, draft: Draft) -> tuple[Kind, ...]:
        """The kinds of a draft as they are where the whole mix fills them."""
        split = any(kind.column.phase != "both" for kind in draft.kinds)
        return self._kinds(split=True) if split else self.kinds

    def _deadline_worth(self, draft: Draft) -> float:
        """Growth of the load that 1 % more time per token buys: row price x flow x d load / d deadline."""
        worth = 0.0
        for k in draft.used:
            column = draft.kinds[k].column
            if column.phase == "prefill":
                continue
            loads = np.array([d.seconds(column.step) for d in self.traffic.demands])
            share = column.step.t0 / column.tpot
            used = loads @ draft.allocation.flows[:, k] / (1 - share) / draft.fill
            worth += draft.allocation.row_prices[0, k] * used * share / (1 - share) * 0.01
        return float(worth)

    def _candidates(self, draft: Draft) -> pd.DataFrame:
        rows = []
        for k, kind in enumerate(draft.kinds):
            alone = float("nan")
            if kind.column.phase == "both" and kind.column.gpus <= self.options.gpus:
                program = formulate(self.traffic, [kind.column], np.array([kind.free]))
                if np.all(np.isfinite(program.loads)):
                    use = (program.loads[:, :, 0] / draft.fill) @ self.traffic.rates
                    alone = float(self.traffic.rates.sum() / use.max()) * (
                        self.options.gpus // kind.column.gpus
                    )
            used = draft.allocation.groups[k] > 0
            reason = (
                "chosen" if used else "serves less of this mix" if np.isfinite(alone) else "keeps no class"
            )
            rows.append(
                {
                    "config": kind.label,
                    "gpus": kind.column.gpus,
                    "alone_per_s": alone,
                    "kv_tokens": kind.serving.kv_tokens,
                    "reason": reason,
                }
            )
        return pd.DataFrame([*rows, *self.rejected])

    def _doubts(self, draft: Draft, table: pd.DataFrame, meets: bool) -> list[str]:
        notes = []
        for k in draft.used:
            kind = draft.kinds[k]
            point, _ = self.point(draft, k)
            held = kind.serving.table
            if point.cached > held.cached_tokens[-1]:
                notes.append(
                    f"{kind.label}: {point.cached:,.0f} tokens in use, measured up to "
                    f"{held.cached_tokens[-1]:,.0f}: step times are extrapolated"
                )
            if kind.serving.provenance["steps"].label == "modelled":
                notes.append(f"{kind.label}: step times are a roofline, off by 21 % in the median")
        if not meets and len(table):
            figures = table.loc["plan"]
            notes.append(
                f"the replay keeps the deadlines for {figures['within_deadlines']:.1%} of the admitted "
                f"requests; {self.options.share:.0%} were asked: this plan does not meet them"
            )
        return notes

    # ---- rolling ------------------------------------------------------------------------------

    def update(self, last: Plan, window: object) -> Plan:
        """See `Plan.update`."""
        started = perf_counter()
        if not isinstance(window, Workload):
            window = self.workload.like(window)
        fresh = copy(self)
        fresh.__dict__.pop("_mix", None)
        fresh.workload, fresh.notes = window, list(window.warnings)
        fresh.traffic, fresh.lengths = fresh._traffic(window)
        draft = fresh.choose(last.draft.fill, last.draft.kinds, rounds=1)
        return fresh._remade(last, draft, started)

    def what_if(self, last: Plan, load: float, changes: Mapping[str, object]) -> Plan:
        """See `Plan.what_if`."""
        started = perf_counter()
        if not (np.isfinite(load) and load > 0):
            raise ValueError(f"load is {load}; expected > 0 and finite")
        fresh = copy(self)
        fresh.__dict__.pop("_mix", None)
        fresh.options = replace(self.options, **changes)
        fresh.workload = replace(self.workload, rates=self.workload.rates * load)
        fresh.notes = list(self.workload.warnings)
        fresh.traffic, fresh.lengths = fresh._traffic(fresh.workload)
        fresh.kinds = fresh._kinds(split=any(kind.column.phase != "both" for kind in last.draft.kinds))
        draft = fresh.choose(last.draft.fill)
        return fresh._remade(last, draft, started)

    def _remade(self, last: Plan, draft: Draft | None, started: float) -> Plan:
        """A plan that follows another, not replayed."""
        if draft is None:
            raise PlanError(self._too_few())
        spent = perf_counter() - started
        self.seconds = {"program": spent, "total": spent}
        return self._finished(draft, pd.DataFrame(), last.meets, _changes(last, draft, self.traffic))

    def replays(self, draft: Draft, seeds: Sequence[int]) -> pd.DataFrame:
        """See `Plan.replays`."""
        half = self.workload.judging
        rows = {}
        for seed in seeds:
            fresh = copy(self)
            fresh.options = replace(self.options, seed=seed)
            rows[seed] = fresh.replayed(draft, half)
        return pd.DataFrame(rows).T.rename_axis("seed")


def _changes(last: Plan, draft: Draft, traffic: Traffic) -> tuple[str, ...]:
    """In words, what an operator has to do or will see after an update."""
    said = []
    labels = [kind.label for kind in draft.kinds]
    before = dict(zip(last.groups["label"], last.groups["groups"], strict=True))
    for k, label in enumerate(labels):
        was, now = int(before.get(label, 0)), int(draft.allocation.groups[k])
        if was != now:
            said.append(f"{label}: {was} -> {now} groups")
    old = last.routing.set_index("class")
    for i, name in enumerate(traffic.names):
        rate, was = traffic.rates[i], float(old.loc[name, "rate"])
        if abs(rate - was) > 0.05 * was:
            said.append(f"class {name}: {was:.3g} -> {rate:.3g} requests/s")
        rejected = max(0.0, 1 - draft.allocation.admitted[i] / rate)
        if abs(rejected - old.loc[name, "rejected"]) > 0.005:
            said.append(f"class {name}: rejected {old.loc[name, 'rejected']:.1%} -> {rejected:.1%}")
        for k in np.flatnonzero(draft.allocation.groups):
            share = draft.allocation.flows[i, k] / rate
            earlier = float(old.loc[name, labels[k]]) if labels[k] in old else 0.0
            if abs(share - earlier) > 0.02:
                said.append(f"class {name}: to {labels[k]} {earlier:.0%} -> {share:.0%}")
    return tuple(said)


def _as_dict(made: Plan) -> dict:
    """See `Plan.to_dict`."""
    o, w, draft = made.options, made.workload, made.draft
    groups = []
    lines, policies = made.launch(), made.policies()
    for row, k in zip(made.groups.to_dict("records"), draft.used, strict=True):
        kind = draft.kinds[k]
        n = int(draft.allocation.groups[k])
        groups.append(
            {
                **row,
                "provenance": {
                    name: {"label": p.label, "source": p.source}
                    for name, p in kind.serving.provenance.items()
                },
                "step_cost": {
                    name: getattr(kind.column.step, name)
                    for name in ("t0", "per_sequence", "per_cached_token", "per_prefill_token")
                },
                "launch": lines[:n],
                "policy": policies[kind.label].to_dict() if kind.label in policies else None,
            }
        )
        lines = lines[n:]
    return _plain(
        {
            "schema": SCHEMA,
            "model": made.planner.model.name,
            "gpu": o.gpu if isinstance(o.gpu, str) else o.gpu.name,
            "gpus": o.gpus,
            "engine": o.engine,
            "objective": o.objective,
            "deadlines": {
                name: {"tpot": t, "ttft": f}
                for name, t, f in zip(
                    w.names, made.planner.traffic.tpot, made.planner.traffic.ttft, strict=True
                )
            },
            "share_within_deadlines": o.share,
            "classes": {"found": w.found, "routing": made.routing.to_dict("records")},
            "groups": groups,
            "predicted": {"label": "modelled", **made.predicted},
            "replayed": {"label": "modelled", "cases": made.replayed.to_dict("index")},
            "meets_deadlines": made.meets,
            "warnings": list(made.warnings),
        }
    )


def _plain(value: object) -> object:
    """Python's own numbers; NaN and infinity, which JSON lacks, are null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
