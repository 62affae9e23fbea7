"""The serving engines' own memory rules, request by request on one serving group.

The joint problem and its replay know a request's reservation as one number and preempt whatever
outgrows it. Engines decide while they run: who may enter now, and who must leave when memory is full.
This module simulates such a group in time steps of one KV page (16 decoding steps):

* requests arrive (Poisson), queue first come first served, and enter when the engine's rule admits them
  and their prompt fits; an empty group always takes the next one;
* a running request is prefilled, then generates one token per ``decode_s_per_token``, whatever else runs,
  as in equation 1; there is no limit on the batch but memory;
* when the pages of the running requests exceed M_k, requests leave until the others fit, return to the head
  of the queue, and later rebuild their KV by prefilling prompt and tokens generated so far (recomputation).

Rules see a :class:`View` of what runs, which has no realised length, and the lengths of what has finished.
Simplified against the engines: no prefix sharing, no chunked prefill, no swap to host memory, no
interference between requests. Sources of the rules: PagedAttention (SOSP 2023) and vLLM's scheduler
(https://github.com/vllm-project/vllm); TensorRT-LLM's ``GUARANTEED_NO_EVICT`` capacity scheduler
(https://nvidia.github.io/TensorRT-LLM); SGLang's ``PrefillAdder`` and ``new_token_ratio``
(https://github.com/sgl-project/sglang); LightLLM's ``PastFutureQueue``
(https://github.com/ModelTC/lightllm).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kvcache.paper.methods.baselines import (
    BLOCK,
    PAST_FUTURE_WINDOW,
    SGLANG_CLIP,
    SGLANG_DECAY_STEPS,
    SGLANG_FLOOR,
    SGLANG_RATIO,
    reservations,
)
from kvcache.problem import Problem
from kvcache.replay import Workload

__all__ = [
    "RULES",
    "Engine",
    "EngineRun",
    "FixedReservation",
    "OnDemand",
    "PastFutureEngine",
    "RemainingShare",
    "View",
    "simulate",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Pages that vLLM keeps free when it admits, as a share of all.
VLLM_WATERMARK = 0.01
#: Decoding steps that SGLang adds per request to its estimate after it has run out of memory.
SGLANG_RETRACT_STEPS = 20
#: Share of the memory that LightLLM's past-future scheduler leaves alone.
PAST_FUTURE_HEADROOM = 0.05
#: Futures that it draws at most, and draws per decision that it aims at.
PAST_FUTURE_LISTS, PAST_FUTURE_SAMPLES = 5, 200


@dataclass(frozen=True)
class View:
    """What an engine knows of its requests: arrays over them, oldest admission first.

    classes; inputs (prompt tokens); generated (tokens so far); limits (most tokens they may generate);
    fresh (admitted in this step); evicted (how often memory has been taken from them).
    """

    classes: Ints
    inputs: Floats
    generated: Ints
    limits: Ints
    fresh: NDArray[np.bool_]
    evicted: Ints

    def __len__(self) -> int:
        return self.classes.size

    @property
    def pages(self) -> Floats:
        """Tokens of the pages that hold what exists by now."""
        return np.ceil((self.inputs + self.generated) / BLOCK) * BLOCK


class Engine:
    """An engine's rule. The base class holds pages on demand, admits all, evicts the latest admitted."""

    name = "engine"

    def __init__(self, problem: Problem, capacity: float) -> None:
        self.problem, self.capacity = problem, capacity

    def holds(self, view: View) -> Floats:
        """Tokens of memory set aside for each request."""
        return view.pages

    def outgrown(self, view: View) -> NDArray[np.bool_]:
        """Requests that must leave whatever memory is left."""
        return np.zeros(len(view), dtype=bool)

    def admits(self, running: View, candidate: View, rng: np.random.Generator) -> bool:
        """Whether the request at the head of the queue may enter."""
        return True

    def victim(self, view: View) -> int:
        """The position of the request that leaves when memory is full."""
        return len(view) - 1

    def stepped(self, view: View, evicted: bool) -> None:
        """One time step is over; ``view`` is what still runs."""

    def finished(self, classes: Ints, lengths: Ints) -> None:
        """Requests that ended in this step."""


class FixedReservation(Engine):
    """A reservation eta per class, held from admission to the end; beyond it the request is evicted.

    It then comes back with its limit reserved, as the paper's recomputed requests do. With eta = L_max
    this is TensorRT-LLM's guarantee that nothing is evicted.
    """

    def __init__(self, problem: Problem, capacity: float, method: str = "DRO") -> None:
        super().__init__(problem, capacity)
        self.name = method
        self.eta = reservations(method, problem)

    def holds(self, view: View) -> Floats:
        """Prompt and reservation; the limit after an eviction."""
        return view.inputs + np.where(view.evicted > 0, view.limits, self.eta[view.classes])

    def outgrown(self, view: View) -> NDArray[np.bool_]:
        """Requests beyond their first reservation."""
        return (view.evicted == 0) & (view.generated > self.eta[view.classes] + 1e-6)

    def admits(self, running: View, candidate: View, rng: np.random.Generator) -> bool:
        """Enters if the reservations still fit."""
        return bool(self.holds(running).sum() + self.holds(candidate).sum() <= self.capacity)


class OnDemand(Engine):
    """vLLM: pages as tokens come; a prompt enters if it leaves 1 % of the pages free."""

    name = "vLLM"

    def admits(self, running: View, candidate: View, rng: np.random.Generator) -> bool:
        """Enters if the pages of its prompt leave the watermark free."""
        free = self.capacity - running.pages.sum() - candidate.pages.sum()
        return bool(free >= VLLM_WATERMARK * self.capacity)


class RemainingShare(Engine):
    """SGLang: a share of what running requests may still generate is kept free; newcomers count in full.

    The share falls linearly from 0.7 to 0.098 over 600 decoding steps. When memory runs out, the request
    with the fewest generated tokens leaves and the share becomes the generated part of the remaining
    requests' limits, plus 20 tokens each.
    """

    name = "SGLang"

    def __init__(self, problem: Problem, capacity: float) -> None:
        super().__init__(problem, capacity)
        self.share = SGLANG_RATIO

    def admits(self, running: View, candidate: View, rng: np.random.Generator) -> bool:
        """Enters if all pages, the share ahead and its own limit fit."""
        left = np.minimum(running.limits - running.generated, SGLANG_CLIP)
        ahead = (left * np.where(running.fresh, 1.0, self.share)).sum()
        own = candidate.pages + np.minimum(candidate.limits - candidate.generated, SGLANG_CLIP)
        return bool(running.pages.sum() + ahead + own.sum() < self.capacity)

    def victim(self, view: View) -> int:
        """The fewest generated tokens, then the longest prompt."""
        return int(np.lexsort((-view.inputs, view.generated))[0])

    def stepped(self, view: View, evicted: bool) -> None:
        """The share falls, or is estimated anew after an eviction, or starts over when idle."""
        if evicted and len(view):
            seen = view.generated.sum() + SGLANG_RETRACT_STEPS * len(view)
            self.share = float(min(1.0, seen / max(view.limits.sum(), 1)))
        elif len(view) == 0:
            self.share = SGLANG_RATIO
        else:
            fall = SGLANG_RATIO * (1 - SGLANG_FLOOR) / SGLANG_DECAY_STEPS
            self.share = max(self.share - BLOCK * fall, SGLANG_RATIO * SGLANG_FLOOR)


class PastFutureEngine(Engine):
    """LightLLM: admit if the peak of memory over the drawn futures of all requests fits.

    A running request's final length is drawn from the finished ones that are longer than what it has
    generated, a newcomer's from all of the last 200; the peak is at the end of one of them, when the
    shorter ones have left. The largest peak over up to five draws must leave 5 % free.
    """

    name = "LightLLM"

    def __init__(self, problem: Problem, capacity: float) -> None:
        super().__init__(problem, capacity)
        longest = int(problem.max_output_tokens.max())
        self.past: deque[int] = deque([longest] * (PAST_FUTURE_WINDOW // 2), maxlen=PAST_FUTURE_WINDOW)

    def admits(self, running: View, candidate: View, rng: np.random.Generator) -> bool:
        """Enters if the highest drawn peak fits."""
        past = np.sort(np.array(self.past))
        draws = min(PAST_FUTURE_LISTS, PAST_FUTURE_SAMPLES // max(len(running), 1) + 1)
        now = np.concatenate([running.inputs + running.generated, candidate.inputs + candidate.generated])
        generated = np.concatenate([running.generated, candidate.generated])
        limits = np.concatenate([running.limits, candidate.limits])
        low = np.searchsorted(past, generated, side="right")
        peak = 0.0
        for _ in range(draws):
            at = low + np.floor(rng.random(now.size) * (past.size - low + 1)).astype(int)
            final = np.where(at < past.size, past[np.minimum(at, past.size - 1)], limits)
            left = np.maximum(np.minimum(final, limits) - generated, 0)
            order = np.argsort(-left, kind="stable")
            # When the j-th longest ends, the j longest are there and each has grown by its remainder.
            peak = max(peak, float((np.cumsum(now[order]) + left[order] * np.arange(1, now.size + 1)).max()))
        return peak < (1 - PAST_FUTURE_HEADROOM) * self.capacity

    def finished(self, classes: Ints, lengths: Ints) -> None:
        """The lengths that later draws come from."""
        self.past.extend(lengths.tolist())


#: What `simulate` can run, by name; any fixed rule of `kvcache.paper.methods.baselines` works as well.
RULES: Mapping[str, Callable[[Problem, float], Engine]] = MappingProxyType(
    {
        "vLLM": OnDemand,
        "TensorRT-LLM": lambda problem, capacity: FixedReservation(problem, capacity, "TensorRT-LLM"),
        "SGLang": RemainingShare,
        "LightLLM": PastFutureEngine,
    }
)


@dataclass(frozen=True, eq=False)
class EngineRun:
    """What a simulated group did.

    Attributes
    ----------
    engine : name.
    served, oversized : requests that finished, and that no empty group could have held.
    evictions : (n,) how often each served request lost its memory.
    recomputed : (n,) KV tokens thrown away and built again, per served request.
    unused : (n,) reserved output tokens that it never filled, at its end.
    latency, queued : (n,) seconds from arrival to the end, and to the first admission.
    throughput : requests/s from the first arrival to the last end.
    occupancy, holding : time averages of filled and of set-aside memory, shares of M_k.
    late : share of the served requests beyond their class's deadline.
    """

    engine: str
    served: int
    oversized: int
    evictions: Ints
    recomputed: Floats
    unused: Floats
    latency: Floats
    queued: Floats
    throughput: float
    occupancy: float
    holding: float
    late: float

    def row(self) -> dict[str, float | int | str]:
        """One row of a table."""
        p50, p99 = np.quantile(self.latency, [0.5, 0.99])
        return {
            "engine": self.engine,
            "served": self.served,
            "oversized": self.oversized,
            "evicted_share": float((self.evictions > 0).mean()),
            "recomputed_per_request": float(self.recomputed.mean()),
            "unused_per_request": float(self.unused.mean()),
            "p50_s": float(p50),
            "p99_s": float(p99),
            "mean_queued_s": float(self.queued.mean()),
            "throughput": self.throughput,
            "occupancy": self.occupancy,
            "holding": self.holding,
            "slo_violation": self.late,
        }


def _requests(
    problem: Problem, workload: Workload, rates: Floats, rng: np.random.Generator
) -> tuple[Ints, Ints, Floats]:
    """Classes, lengths and arrival times of all requests, in order of arrival.

    Each class arrives as a Poisson process; all stop when the first runs out of requests.
    """
    times = [np.cumsum(rng.exponential(1 / r, workload.lengths.shape[1])) for r in rates]
    end = min(t[-1] for t in times)
    kept = [t[t <= end] for t in times]
    arrival = np.concatenate(kept)
    cls = np.repeat(np.arange(len(times)), [t.size for t in kept])
    lengths = np.concatenate([row[: t.size] for row, t in zip(workload.lengths, kept, strict=True)])
    order = np.argsort(arrival, kind="stable")
    return cls[order], lengths[order], arrival[order]


def simulate(
    problem: Problem,
    workload: Workload,
    make: Callable[[Problem, float], Engine],
    *,
    config: int = 0,
    rates: Sequence[float] | None = None,
    seed: int = 0,
) -> EngineRun:
    """Run one serving group under an engine's rule until every request has ended.

    Parameters
    ----------
    problem : classes, and configurations of which ``config`` is simulated.
    workload : lengths; arrival times are drawn from ``seed``, the same for every engine.
    make : a value of `RULES`, or any function of the problem and the capacity that gives an `Engine`.
    config : position of the configuration.
    rates : requests/s of each class at this one group; the problem's without it.

    Raises
    ------
    ValueError
        If the workload has another number of classes, or no request fits the group.
    """
    if workload.lengths.shape[0] != len(problem.classes):
        raise ValueError(f"workload has {workload.lengths.shape[0]} classes; expected {len(problem.classes)}")
    arrivals_rng, rng = np.random.default_rng(seed).spawn(2)
    served_by = problem.configs[config]
    capacity = served_by.kv_tokens
    per_token, step = served_by.decode_s_per_token, BLOCK * served_by.decode_s_per_token
    rate = np.asarray(problem.arrival_rates if rates is None else rates, dtype=float)
    cls, lengths, arrival = _requests(problem, workload, rate, arrivals_rng)
    limits = np.maximum(problem.max_output_tokens.astype(np.int64)[cls], lengths)
    inputs = problem.input_tokens[cls]
    fits = np.ceil((inputs + lengths) / BLOCK) * BLOCK <= capacity
    if not fits.any():
        raise ValueError(f"configuration {served_by.name!r}: no request fits its {capacity:.0f} tokens")
    count = cls.size
    generated = np.zeros(count, dtype=np.int64)
    evictions = np.zeros(count, dtype=np.int64)
    recomputed, unused = np.zeros(count), np.zeros(count)
    ready, base = np.zeros(count), np.zeros(count, dtype=np.int64)
    first, end = np.full(count, np.nan), np.full(count, np.nan)
    engine = make(problem, capacity)

    def view(ids: Sequence[int], fresh: int = 0) -> View:
        at = np.array(ids, dtype=np.int64)
        newest = np.arange(at.size) >= at.size - fresh
        return View(cls[at], inputs[at], generated[at], limits[at], newest, evictions[at])

    waiting: deque[int] = deque()
    running: list[int] = []
    coming = deque(np.flatnonzero(fits).tolist())
    now, busy, filled_time, held_time = float(arrival[coming[0]]), 0.0, 0.0, 0.0
    while coming or waiting or running:
        if not (waiting or running):
            now = max(now, float(arrival[coming[0]]))
        while coming and arrival[coming[0]] <= now:
            waiting.append(coming.popleft())
        fresh = 0
        while waiting:
            candidate, current = view([waiting[0]]), view(running, fresh)
            if running and not (
                current.pages.sum() + candidate.pages.sum() <= capacity
                and engine.admits(current, candidate, rng)
            ):
                break
            j = waiting.popleft()
            running.append(j)
            fresh += 1
            first[j] = now if np.isnan(first[j]) else first[j]
            base[j] = generated[j]
            ready[j] = now + served_by.prefill_s_per_token * (inputs[j] + base[j]) + served_by.overhead_s
        now += step
        ids = np.array(running, dtype=np.int64)
        before = generated[ids]
        grown = base[ids] + np.floor(np.maximum(now - ready[ids], 0.0) / per_token + 1e-9).astype(np.int64)
        generated[ids] = np.clip(grown, before, lengths[ids])
        leaving = [running[p] for p in np.flatnonzero(engine.outgrown(view(running)))]
        stay = [j for j in running if j not in set(leaving)]
        # A lone request stays whatever its rule would hold for it: it fits, or it would not be here.
        while len(stay) > 1 and view(stay).pages.sum() > capacity:
            leaving.append(stay.pop(engine.victim(view(stay))))
        for j in sorted(leaving, reverse=True):
            generated[j] = before[running.index(j)]
            recomputed[j] += inputs[j] + generated[j]
            evictions[j] += 1
            waiting.appendleft(j)
        snapshot = view(stay)
        busy += step
        filled_time += step * float((snapshot.inputs + snapshot.generated).sum())
        held_time += step * float(engine.holds(snapshot).sum())
        over = (snapshot.generated >= lengths[stay]) & (ready[stay] <= now) if stay else np.zeros(0, bool)
        done = np.array(stay, dtype=np.int64)[over]
        unused[done] = (engine.holds(snapshot) - snapshot.inputs - snapshot.generated)[over]
        end[done] = ready[done] + (lengths[done] - base[done]) * per_token
        engine.finished(cls[done], lengths[done])
        running = [j for j, ended in zip(stay, over, strict=True) if not ended]
        engine.stepped(view(running), evicted=bool(leaving))
    latency = (end - arrival)[fits]
    deadline = problem.latency_slos[cls][fits]
    return EngineRun(
        engine=engine.name,
        served=int(fits.sum()),
        oversized=int((~fits).sum()),
        evictions=evictions[fits],
        recomputed=recomputed[fits],
        unused=unused[fits],
        latency=latency,
        queued=(first - arrival)[fits],
        throughput=float(fits.sum() / (end[fits].max() - arrival[0])),
        occupancy=filled_time / busy / capacity,
        holding=held_time / busy / capacity,
        late=float((latency > deadline).mean()),
    )
