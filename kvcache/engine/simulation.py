"""A paged serving group, request by request: vLLM's scheduler from event to event.

Each iteration, every running request computes one token; a block more is taken when a request has filled its
last one; when none is free, the request admitted last is evicted, goes to the head of the queue and computes
its tokens again, but for the blocks that survive among the free ones. Then the head of the queue enters while
its tokens fit and leave the admission rule's share free; prompts are computed in chunks beside the running
requests, within a budget of tokens per iteration. An iteration that evicts admits nobody.

Between two events (arrival, admission, end of a chunk, finish, overflow) nothing is random: all running
requests hold one token more each iteration, the blocks they need follow from how many of them have the same
remainder modulo the block, and the step cost sums up to a `span`. So the simulation jumps from event to
event, and its time and memory grow with requests and not with tokens.

Modelled after the scheduler and the KV manager of vLLM 0.32 (https://github.com/vllm-project/vllm), run
synchronously.
Left out: prefixes shared between requests, speculative decoding, swapping, the CPU's own time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import pandas as pd

from kvcache.engine.admission import Candidate, FreeBlocksRule, Gate, GateRule, Running
from kvcache.engine.blocks import FreeBlocks
from kvcache.engine.steps import StepCost

__all__ = ["Simulation", "simulate"]

#: Rows of a time line, at most.
TIMELINE = 4096
#: Iterations that the record of longest gaps holds before it forgets what nobody running has seen.
PEAKS = 4096
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulated group did.

    Attributes
    ----------
    requests : one row per request, in the order given, with what was given and

        - ``status``: "finished" or "refused", and ``reason`` (why it was refused, else empty);
        - ``admitted_s, first_token_s, finish_s``: on the clock of ``arrival_s``; NaN if refused;
        - ``preemptions``: how often it was evicted;
        - ``worst_gap_s``: the longest time between two of its tokens; NaN with less than two;
        - ``recomputed_tokens``: tokens that were computed once more after an eviction.
    seconds : from the first arrival to the last finish.
    steps : iterations.
    timeline : ``time_s, used_blocks, running, waiting`` at events, at most `TIMELINE` rows.
    """

    requests: pd.DataFrame
    seconds: float
    steps: int
    timeline: pd.DataFrame

    @property
    def preemptions(self) -> int:
        """Evictions of running requests, all together."""
        return int(self.requests["preemptions"].sum())

    @property
    def throughput(self) -> float:
        """Requests finished per second, from the first arrival to the last finish."""
        return float((self.requests["status"] == "finished").sum() / self.seconds) if self.seconds else 0.0

    def __repr__(self) -> str:
        refused = int((self.requests["status"] == "refused").sum())
        return (
            f"{len(self.requests):,} requests ({refused:,} refused): {self.steps:,} steps, "
            f"{self.preemptions:,} preemptions, {self.seconds:,.1f} s"
        )


def simulate(
    requests: pd.DataFrame,
    *,
    pool: int,
    step_cost: StepCost,
    admission: FreeBlocksRule | GateRule | None = None,
    block: int = 16,
    max_running: int = 256,
    max_batched_tokens: int = 2048,
    prefix_cache: bool = True,
    jump: bool = True,
) -> Simulation:
    """Serve ``requests`` by one group until each has ended.

    Parameters
    ----------
    requests : ``arrival_s, input_tokens, output_tokens``; more columns (``class``) are handed through. Served
        first come first served, those of the same second in the order given.
    pool : tokens of KV cache, rounded down to blocks of ``block`` tokens.
    step_cost : a `StepCost` or `StepTable`, or whatever has their ``seconds`` and ``span``.
    admission : None admits what fits (vLLM's default); or a rule of `kvcache.engine.admission`.
    max_running, max_batched_tokens : vLLM's ``--max-num-seqs`` and ``--max-num-batched-tokens``.
    prefix_cache : whether an evicted request finds those of its blocks that nobody has taken.
    jump : False takes every iteration on its own: the same decisions, much slower.

    Returns
    -------
    The `Simulation`. A request that no empty pool could hold is refused, at once; the others go on.

    Raises
    ------
    ValueError
        If a column is missing or has a value that cannot be, or a limit makes no sense.
    """
    arrival, inputs, outputs = _columns(requests)
    blocks = int(pool) // block
    if block < 1 or blocks < 1:
        raise ValueError(f"pool is {pool} tokens in blocks of {block}; expected at least one block")
    if not 1 <= max_running <= max_batched_tokens:
        raise ValueError(
            f"max_running is {max_running}; expected from 1 to max_batched_tokens = {max_batched_tokens}"
        )
    served = inputs + outputs <= blocks * block
    order = np.flatnonzero(served)
    order = order[np.argsort(arrival[order], kind="stable")]
    gate = admission.gate(requests, blocks, block) if hasattr(admission, "gate") else None
    group = _Group(
        order,
        arrival[order].tolist(),
        inputs[order].tolist(),
        outputs[order].tolist(),
        blocks=blocks,
        block=block,
        step_cost=step_cost,
        spare=admission.free_blocks(blocks, block) if hasattr(admission, "free_blocks") else 0,
        gate=gate,
        max_running=max_running,
        budget=max_batched_tokens,
        prefix_cache=prefix_cache,
        jump=jump,
    )
    group.run()

    def column(values: list[float] | list[int], missing: float) -> np.ndarray:
        whole = np.full(len(requests), missing)
        whole[order] = values
        return whole

    reason = np.full(len(requests), "", dtype=object)
    for row in np.flatnonzero(~served):
        reason[row] = f"{inputs[row]:,} + {outputs[row]:,} tokens; the pool holds {blocks * block:,}"
    table = requests.assign(
        status=np.where(served, "finished", "refused"),
        reason=reason,
        admitted_s=column(group.admitted, np.nan),
        first_token_s=column(group.first, np.nan),
        finish_s=column(group.finish, np.nan),
        preemptions=column(group.preemptions, 0),
        worst_gap_s=column(group.worst, np.nan),
        recomputed_tokens=column(group.recomputed, 0),
    )
    start = float(arrival[order[0]]) if order.size else 0.0
    return Simulation(table, group.clock - start, group.step, group.line.table())


def _columns(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrivals, prompts and outputs, checked row by row."""
    for name in ("arrival_s", "input_tokens", "output_tokens"):
        if name not in requests:
            raise ValueError(
                f"requests have columns {', '.join(map(str, requests))}; expected {name} among them"
            )
    arrival = requests["arrival_s"].to_numpy(float)
    inputs = requests["input_tokens"].to_numpy()
    outputs = requests["output_tokens"].to_numpy()
    bad = ~np.isfinite(arrival)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise ValueError(f"requests row {row}: arrival_s is {arrival[row]}; expected a finite time")
    for name, values in (("input_tokens", inputs), ("output_tokens", outputs)):
        bad = ~((values >= 1) & (values == np.floor(values)))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ValueError(f"requests row {row}: {name} is {values[row]}; expected a whole number >= 1")
    return arrival, inputs.astype(np.int64), outputs.astype(np.int64)


class _Timeline:
    """Samples at events; when full, every second one is dropped and they are taken half as often."""

    __slots__ = ("due", "every", "rows")

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, int]] = []
        self.every, self.due = 0.0, -np.inf

    def add(self, time: float, used: int, running: int, waiting: int) -> None:
        rows = self.rows
        rows.append((time, used, running, waiting))
        if len(rows) == TIMELINE:
            self.every = max(2 * self.every, 2 * (time - rows[0][0]) / TIMELINE)
            del rows[1:-1:2]
        self.due = time + self.every

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows, columns=["time_s", "used_blocks", "running", "waiting"])


class _Ranked:
    """A queue in the order of given ranks, lowest first, with the methods of a deque that a group uses."""

    def __init__(self, ranks: Sequence[float], rows: np.ndarray) -> None:
        self.ranks, self.rows, self.heap = ranks, rows, []

    def append(self, request: int) -> None:
        heappush(self.heap, (self.ranks[self.rows[request]], request))

    appendleft = append

    def popleft(self) -> int:
        return heappop(self.heap)[1]

    def __getitem__(self, place: int) -> int:
        return self.heap[place][1]

    def __len__(self) -> int:
        return len(self.heap)


class _Group:
    """The state of a group. Lists are indexed by request, in order of arrival.

    A decoding request holds ``offset + step`` tokens when iteration number ``step`` begins, so nothing needs
    to be touched while it grows; it needs a block when that is a multiple of ``block``, which is when
    ``step % block`` is its key. ``needs`` counts the decoding requests by key (twice in a row, so that a
    window of it is a slice).
    """

    def __init__(
        self,
        rows: np.ndarray,
        arrival: list[float],
        inputs: list[int],
        outputs: list[int],
        *,
        blocks: int,
        block: int,
        step_cost: StepCost,
        spare: int,
        gate: Gate | None,
        max_running: int,
        budget: int,
        prefix_cache: bool,
        jump: bool,
    ) -> None:
        count = len(arrival)
        self.rows, self.arrival, self.inputs, self.outputs = rows, arrival, inputs, outputs
        self.blocks, self.block, self.cost, self.spare = blocks, block, step_cost, spare
        self.gate, self.max_running, self.budget = gate, max_running, budget
        self.prefix_cache, self.jump = prefix_cache, jump
        # What is reported.
        self.admitted, self.first, self.finish = [NAN] * count, [NAN] * count, [NAN] * count
        self.worst = [NAN] * count
        self.preemptions, self.recomputed = [0] * count, [0] * count
        # Where each request stands: tokens computed (while not decoding), tokens generated (as of the last
        # eviction), tokens once computed, offset, last iteration, iteration and time of a last token.
        self.computed, self.generated, self.known = [0] * count, [0] * count, [0] * count
        self.offset, self.ends = [0] * count, [-1] * count
        self.since, self.last = [-1] * count, [NAN] * count
        self.grants: dict[int, int] = {}  # generated tokens at which a request must leave
        self.leaves: dict[int, int] = {}  # the iteration in which it does
        # The group.
        self.clock, self.step, self.coming = 0.0, 0, 0
        ranked = gate is not None and gate.ranks is not None
        self.waiting: deque[int] | _Ranked = _Ranked(gate.ranks, rows) if ranked else deque()
        self.running: dict[int, None] = {}  # in order of admission
        self.partial: int | None = None  # the one whose prompt is computed in part; always the last admitted
        self.blocked = False  # the head of the queue was refused, and nothing has left since
        self.again: int | None = None  # iteration in which the rule is asked about it once more
        self.leaving: list[tuple[int, int]] = []  # heap of (iteration, request) that its rule ends
        self.lengths: list[int] = []  # of what has finished
        self.free = FreeBlocks(blocks)
        self.decoding = self.offsets = 0
        self.needs = [0] * (2 * block)
        self.finishing: list[tuple[int, int]] = []  # heap of (last iteration, request), some of them stale
        self.peak_steps: list[int] = []  # longest iterations since ...: seconds fall from left to right
        self.peak_seconds: list[float] = []
        self.line = _Timeline()

    def run(self) -> None:
        """Until every request has ended."""
        arrival, count = self.arrival, len(self.arrival)
        while True:
            while self.coming < count and arrival[self.coming] <= self.clock:
                self.waiting.append(self.coming)
                self.coming += 1
            if self.clock >= self.line.due:
                self._record()
            if not (self.running or self.waiting):
                if self.coming == count:
                    break
                self.clock = arrival[self.coming]
                continue
            if self.blocked and self.again is not None and self.step >= self.again:
                self.blocked = False
            plain = self.partial is None and (
                not self.waiting or self.blocked or len(self.running) >= self.max_running
            )
            steps = self._plain_steps() if plain else 0
            if steps:
                self._decode(steps)
            else:
                self._iterate()
        self._record()

    def _record(self) -> None:
        self.line.add(self.clock, self.blocks - self.free.count, len(self.running), len(self.waiting))

    def _plain_steps(self) -> int:
        """Iterations until something else happens than growth; 0 if blocks run out in the next one."""
        heap, ends, block = self.finishing, self.ends, self.block
        while ends[heap[0][1]] != heap[0][0]:
            heappop(heap)
        steps = heap[0][0] - self.step if self.jump else 1
        if steps // block * self.decoding + self.decoding > self.free.count:
            steps = min(steps, self._steps_in_memory())
        if self.gate is not None:
            steps = self._steps_in_rule(steps)
        if not steps or self.waiting or self.coming == len(self.arrival):
            return steps
        # The first iteration that ends when the next request is there.
        due, low, high = self.arrival[self.coming], 0, steps
        before, after = self.clock, self.clock + self._span(steps)
        if after < due:
            return steps
        while high - low > 1:
            guess = low + int((due - before) / (after - before) * (high - low)) + 1
            guess = min(max(guess, low + 1), high - 1)
            at = self.clock + self._span(guess)
            if at < due:
                low, before = guess, at
            else:
                high, after = guess, at
        return high

    def _steps_in_rule(self, steps: int) -> int:
        """Iterations until the rule has something to say."""
        if self.blocked and self.again is not None:
            steps = min(steps, self.again - self.step)
        while self.leaving and self.leaves[self.leaving[0][1]] != self.leaving[0][0]:
            heappop(self.leaving)
        return min(steps, self.leaving[0][0] - self.step) if self.leaving else steps

    def _span(self, steps: int) -> float:
        return self.cost.span(self.decoding, self.offsets + self.decoding * self.step, steps)

    def _steps_in_memory(self) -> int:
        """Iterations for whose new blocks there is room."""
        cycles, free = divmod(self.free.count, self.decoding)
        steps, at = cycles * self.block, self.step % self.block
        for need in self.needs[at : at + self.block]:
            free -= need
            if free < 0:
                break
            steps += 1
        return steps

    def _decode(self, steps: int) -> None:
        """That many iterations of which nothing but growth comes, except finishes after the last."""
        at, block = self.step % self.block, self.block
        need = steps // block * self.decoding + sum(self.needs[at : at + steps % block])
        if need:
            self.free.take(need)
        seconds = self._span(steps)
        longest = seconds if steps == 1 else seconds - self._span(steps - 1)
        self._pass(steps, seconds, longest)
        self._finish()

    def _iterate(self) -> None:
        """One iteration: running requests first, then the prompt in part, then the queue."""
        evicted = self._outgrown()
        evicted = self._grow() or evicted
        decoding, cached = self.decoding, self.offsets + self.decoding * self.step
        budget, prefilled = self.budget - decoding, 0
        prompts: list[tuple[int, int]] = []  # requests that compute a chunk, and its tokens
        if self.partial is not None:
            request = self.partial
            tokens = min(self.inputs[request] + self.generated[request] - self.computed[request], budget)
            need = self._blocks(self.computed[request] + tokens) - self._blocks(self.computed[request])
            if tokens and need > self.free.count:
                evicted = True
                self._evict(request)
            elif tokens:
                self.free.take(need)
                prompts.append((request, tokens))
                budget -= tokens
        if not evicted:
            self._admit(budget, prompts)
        for request, tokens in prompts:
            held = self.computed[request]
            if tokens == 1 and held >= self.inputs[request]:  # to vLLM a decoding request like others
                decoding, cached = decoding + 1, cached + held
            else:
                prefilled += tokens
            again = min(self.known[request] - held, tokens)
            if again > 0:
                self.recomputed[request] += again
            self.computed[request] = held + tokens
        if prefilled:
            seconds = self.cost.seconds(decoding, cached, prefilled)
        else:
            seconds = self.cost.span(decoding, cached, 1)
        self._pass(1, seconds, seconds)
        self.partial = None
        for request, _ in prompts:
            if self.computed[request] < self.inputs[request] + self.generated[request]:
                self.partial = request
            else:
                self._token(request)
        self._finish()

    def _pass(self, steps: int, seconds: float, longest: float) -> None:
        """Advance the clock, and remember the longest of the iterations."""
        self.step += steps
        self.clock += seconds
        numbers, values = self.peak_steps, self.peak_seconds
        while values and values[-1] <= longest:
            values.pop()
            numbers.pop()
        numbers.append(self.step)
        values.append(longest)
        if len(values) > PEAKS:
            oldest = min((self.since[r] for r in self.running if self.since[r] >= 0), default=self.step)
            keep = min(bisect_right(numbers, oldest), len(numbers) - PEAKS // 2)
            del numbers[:keep], values[:keep]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _grow(self) -> bool:
        """A block for each decoding request that needs one, evicting while there is none; whether any was."""
        key, evicted = self.step % self.block, False
        if self.gate is not None and self.gate.victim is not None:
            # The rule may choose anybody, so it does before anybody is served.
            while self.needs[key] > self.free.count:
                self._evict(list(self.running)[self.gate.victim(self._view())])
                evicted = True
        served = 0
        while True:
            taken = min(self.free.count, self.needs[key] - served)
            self.free.take(taken)
            served += taken
            if served == self.needs[key]:
                break
            self._evict(next(reversed(self.running)))  # not served: those before it come first
            evicted = True
        if evicted and self.gate is not None:
            self.gate.evicted(self._view(), self.step)
        return evicted

    def _outgrown(self) -> bool:
        """Evict whoever has made all the tokens that its rule grants; whether there was any."""
        evicted = False
        while self.leaving and self.leaving[0][0] <= self.step:
            end, request = heappop(self.leaving)
            if self.leaves.get(request) == end:
                self._evict(request)
                evicted = True
        return evicted

    def _evict(self, request: int) -> None:
        """Take the memory of a request, and put it at the head of the queue."""
        del self.running[request]
        self.leaves.pop(request, None)
        if request == self.partial:
            self.partial = None
        else:
            self._leave(request)
            self.generated[request] = self.outputs[request] - (self.ends[request] - self.step)
            self.ends[request] = -1
            self.last[request] = self.clock
        tokens = self.computed[request]
        self._give(tokens, request)
        self.known[request] = max(self.known[request], tokens)
        self.computed[request] = 0
        self.preemptions[request] += 1
        if self.gate is not None and self.gate.to_back:
            self.waiting.append(request)
        else:
            self.waiting.appendleft(request)
        self.blocked = False

    def _give(self, tokens: int, owner: int | None = None) -> None:
        """Free the blocks of so many tokens."""
        full, rest = divmod(tokens, self.block)
        if self.prefix_cache:
            self.free.give(full, rest > 0, owner)
        else:
            self.free.give(0, full + (rest > 0))

    def _leave(self, request: int) -> None:
        """A request stops decoding."""
        offset = self.offset[request]
        self.computed[request] = offset + self.step
        self.decoding -= 1
        self.offsets -= offset
        key = -offset % self.block
        self.needs[key] -= 1
        self.needs[key + self.block] -= 1
        at = bisect_right(self.peak_steps, self.since[request])
        if at < len(self.peak_steps) and not self.worst[request] >= self.peak_seconds[at]:
            self.worst[request] = self.peak_seconds[at]
        self.since[request] = -1

    def _admit(self, budget: int, prompts: list[tuple[int, int]]) -> None:
        """Requests from the head of the queue, while they fit."""
        waiting, running, before = self.waiting, self.running, len(self.running)
        while waiting and budget > 0 and len(running) < self.max_running:
            request = waiting[0]
            tokens = self.inputs[request] + self.generated[request]
            # Blocks of its own that it finds are free ones too: it takes all that its tokens need.
            if self._blocks(tokens) + (self.spare if running else 0) > self.free.count:
                self._refuse()
                return
            if self.gate is not None and not self._passes(request, len(running) - before):
                self._refuse()
                return
            waiting.popleft()
            running[request] = None
            found = self.free.revive(request)
            self.computed[request] = found * self.block
            chunk = min(tokens - self.computed[request], budget)
            self.free.take(self._blocks(self.computed[request] + chunk) - found)
            budget -= chunk
            prompts.append((request, chunk))
            if self.admitted[request] != self.admitted[request]:
                self.admitted[request] = self.clock

    def _refuse(self) -> None:
        """The head of the queue waits until somebody leaves, or the rule may have changed its mind."""
        patience = self.gate.patience if self.gate is not None else None
        self.blocked, self.again = True, None if patience is None else self.step + patience

    def _passes(self, request: int, fresh: int) -> bool:
        """Ask the rule."""
        candidate = Candidate(
            int(self.rows[request]), self.inputs[request], self.generated[request], self.step
        )
        if self.running and not self.gate.admits(self._view(fresh), candidate):
            return False
        grant = self.gate.enters(candidate, len(self.running))
        if grant is not None:
            self.grants[request] = max(grant, self.generated[request] + 1)
        return True

    def _view(self, fresh: int = 0) -> Running:
        """What a rule sees."""
        ids, step = list(self.running), self.step
        outputs, ends, generated, inputs = self.outputs, self.ends, self.generated, self.inputs
        made = [outputs[r] - ends[r] + step if ends[r] >= 0 else generated[r] for r in ids]
        return Running(
            self.rows[ids],
            np.array([inputs[r] for r in ids], dtype=np.int64),
            np.array(made, dtype=np.int64),
            fresh,
            self.free.count,
            self.lengths,
        )

    def _token(self, request: int) -> None:
        """The end of a prompt: a token, and decoding from the next iteration on."""
        made = self.generated[request] = self.generated[request] + 1
        if made == 1:
            self.first[request] = self.clock
        elif not self.worst[request] >= self.clock - self.last[request]:
            self.worst[request] = self.clock - self.last[request]
        offset = self.offset[request] = self.computed[request] - self.step
        end = self.ends[request] = self.step + self.outputs[request] - made
        heappush(self.finishing, (end, request))
        grant = self.grants.pop(request, None)
        if grant is not None and grant < self.outputs[request]:
            self.leaves[request] = self.step + grant - made
            heappush(self.leaving, (self.leaves[request], request))
        self.since[request] = self.step
        self.decoding += 1
        self.offsets += offset
        key = -offset % self.block
        self.needs[key] += 1
        self.needs[key + self.block] += 1

    def _finish(self) -> None:
        """Requests that have made their last token leave."""
        heap = self.finishing
        while heap and heap[0][0] <= self.step:
            end, request = heappop(heap)
            if self.ends[request] != end:
                continue
            self.ends[request] = -1
            self._leave(request)
            del self.running[request]
            self._give(self.computed[request])
            self.finish[request] = self.clock
            self.blocked = False
            if self.gate is not None:
                self.lengths.append(self.outputs[request])
