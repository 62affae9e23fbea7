"""A paged group at work: the state of one simulated engine, and how it goes from event to event.

Each iteration, every running request computes one token; a block more is taken when a request has filled its
last one; when none is free, the request admitted last is evicted, goes to the head of the queue and computes
its tokens again, but for the blocks that survive among the free ones. Then the head of the queue enters while
its tokens fit and leave the admission rule's share free; prompts are computed in chunks beside the running
requests, within a budget of tokens per iteration. An iteration that evicts admits nobody. These are the
decisions of the scheduler and the KV manager of vLLM 0.32 (https://github.com/vllm-project/vllm).

Between two events (arrival, admission, end of a chunk, finish, overflow) all running requests hold one token
more each iteration, the blocks they need follow from how many of them have the same remainder modulo the
block, and the step cost sums up to a `span`: one jump, whatever its length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import floor

import numpy as np

from kvcache.engine.admission import Candidate, Gate, Running
from kvcache.engine.blocks import FreeBlocks
from kvcache.engine.steps import StepCost

__all__ = ["Group", "Kept", "Timeline"]

#: Rows of a time line, at most.
TIMELINE = 4096
#: Iterations that the record of longest ones holds before it forgets what nobody running has seen.
PEAKS = 4096
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Kept:
    """How much of its cache a request keeps, by request, where a system drops tokens; in tokens.

    prompts : of the prompt, once it is computed. most : at any time while decoding; a new token then takes
    the place of another. share, page : at each such limit, the limit moves by a page in that share of the
    cases, and else holds for a page of further tokens. Dropped tokens leave no trace: an evicted request
    computes all of its tokens again, so there is no prefix cache.
    """

    prompts: Sequence[float]
    most: Sequence[float]
    share: float = 0.0
    page: int = 16


class Timeline:
    """Samples at events; when full, every second one is dropped and they are taken half as often."""

    __slots__ = ("due", "every", "rows")

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, int]] = []
        self.every, self.due = 0.0, -np.inf

    def add(self, time: float, used: int, running: int, waiting: int) -> None:
        """A sample."""
        rows = self.rows
        rows.append((time, used, running, waiting))
        if len(rows) == TIMELINE:
            self.every = max(2 * self.every, 2 * (time - rows[0][0]) / TIMELINE)
            del rows[1:-1:2]
        self.due = time + self.every


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


class Group:
    """The state of a group. Lists are indexed by request, in order of arrival.

    A growing request holds ``offset + step`` tokens when the decoding iteration number ``step`` begins, so
    nothing needs to be touched while it grows; it needs a block when that is a multiple of ``block``, which
    is when ``step % block`` is its key. ``needs`` counts the growing requests by key (twice in a row, so that
    a window of it is a slice). All decoding requests grow, but for those that a `Kept` holds at a limit.

    Parameters
    ----------
    rows, arrival, inputs, outputs : per request, in order of arrival; rows are those of the caller's table.
    blocks, block, step_cost, max_running, prefix_cache : as of `kvcache.engine.simulate`.
    spare : blocks that an admission leaves free. gate : an admission rule that is asked.
    budget : tokens per iteration.
    prompts : "chunked"; "whole" (never in part, beside decoding requests) or "alone" (never in part, and
        nobody decodes meanwhile).
    received : prompts come with their cache and their first token, computed elsewhere.
    kept : what a request keeps of its cache, if not all.
    jump : False takes every iteration on its own.
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
        prompts: str,
        received: bool,
        kept: Kept | None,
        jump: bool,
    ) -> None:
        count = len(arrival)
        self.rows, self.arrival, self.inputs, self.outputs = rows, arrival, inputs, outputs
        self.blocks, self.block, self.cost, self.spare = blocks, block, step_cost, spare
        self.gate, self.max_running, self.budget = gate, max_running, budget
        self.prefix_cache, self.received, self.kept, self.jump = prefix_cache, received, kept, jump
        self.whole, self.alone = prompts != "chunked", prompts == "alone"
        # What is reported.
        self.admitted, self.first, self.finish = [NAN] * count, [NAN] * count, [NAN] * count
        self.worst = [NAN] * count
        self.preemptions, self.recomputed = [0] * count, [0] * count
        self.iterations = 0
        self.line = Timeline()
        # Where each request stands: tokens computed (while not decoding), tokens generated (as of the last
        # eviction or prompt), tokens once computed, offset, last iteration, first iteration since its
        # tokens come one by one, and the time of the token before that.
        self.computed, self.known = [0] * count, [0] * count
        self.generated = [int(received)] * count
        self.offset, self.ends = [0] * count, [-1] * count
        self.since, self.last = [-1] * count, [NAN] * count
        # The group.
        self.clock, self.step, self.coming = 0.0, 0, 0
        ranked = gate is not None and gate.ranks is not None
        self.waiting: deque[int] | _Ranked = _Ranked(gate.ranks, rows) if ranked else deque()
        self.running: dict[int, None] = {}  # in order of admission
        self.partial: int | None = None  # whose prompt is computed in part; always the last admitted
        self.free = FreeBlocks(blocks)
        self.growing = self.offsets = 0  # how many grow, and the sum of their offsets
        self.needs = [0] * (2 * block)
        self.finishing: list[tuple[int, int]] = []  # heap of (last iteration, request), some of them stale
        # The admission rule.
        self.blocked = False  # the head of the queue was refused, and nothing has left since
        self.again: int | None = None  # iteration in which the rule is asked about it once more
        self.grants: dict[int, int] = {}  # generated tokens at which a request must leave
        self.leaves: dict[int, int] = {}  # the iteration in which it does
        self.leaving: list[tuple[int, int]] = []  # heap of these, some of them stale
        self.lengths: list[int] = []  # of what has finished
        # Requests at a limit of what is kept.
        self.flat: dict[int, int] = {}  # tokens that each holds
        self.flat_tokens = 0
        self.limits: dict[int, int] = {}  # the iteration in which a request comes to its next limit
        self.limiting: list[tuple[int, int]] = []  # heap of these, some of them stale
        self.crossed: dict[int, int] = {}  # limits that each has come to
        # The longest iterations: seconds fall from left to right.
        self.peak_steps: list[int] = []
        self.peak_seconds: list[float] = []
        self.stall = 0.0  # seconds since the last decoding iteration
        self.joined: list[int] = []  # requests whose prompts were computed in them

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
                self.clock, self.stall = arrival[self.coming], 0.0
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

    # How far to jump.

    def _plain_steps(self) -> int:
        """Iterations until something else happens than growth; 0 if blocks run out in the next one."""
        steps = self._next(self.finishing, self.ends) - self.step
        if not self.jump or self.stall:
            steps = 1
        if self.leaving or self.again is not None or self.limiting:
            steps = self._steps_in_rule(steps)
        if steps // self.block * self.growing + self.growing > self.free.count:
            steps = min(steps, self._steps_in_memory())
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

    @staticmethod
    def _next(heap: list[tuple[int, int]], valid: list[int] | dict[int, int]) -> int:
        """The first iteration of a heap whose entry still holds, which must be there."""
        while valid[heap[0][1]] != heap[0][0]:
            heappop(heap)
        return heap[0][0]

    def _steps_in_rule(self, steps: int) -> int:
        """Iterations until a rule has something to say, or a request comes to a limit."""
        if self.blocked and self.again is not None:
            steps = min(steps, self.again - self.step)
        for heap, valid in ((self.leaving, self.leaves), (self.limiting, self.limits)):
            while heap and valid.get(heap[0][1]) != heap[0][0]:
                heappop(heap)
            if heap:
                steps = min(steps, heap[0][0] - self.step)
        return steps

    def _steps_in_memory(self) -> int:
        """Iterations for whose new blocks there is room."""
        cycles, free = divmod(self.free.count, self.growing)
        steps, at = cycles * self.block, self.step % self.block
        for need in self.needs[at : at + self.block]:
            free -= need
            if free < 0:
                break
            steps += 1
        return steps

    def _span(self, steps: int) -> float:
        """Seconds of the next decoding iterations."""
        growing, tokens = self.growing, self.offsets + self.growing * self.step
        if not self.flat:
            return self.cost.span(growing, tokens, steps)
        count, tokens = growing + len(self.flat), tokens + self.flat_tokens
        ends = self.cost.seconds(count, tokens) + self.cost.seconds(count, tokens + growing * (steps - 1))
        return steps * ends / 2

    # Iterations.

    def _decode(self, steps: int) -> None:
        """That many iterations of which nothing but growth comes, except what their end brings."""
        at, block = self.step % self.block, self.block
        need = steps // block * self.growing + sum(self.needs[at : at + steps % block])
        if need:
            self.free.take(need)
        seconds = self._span(steps)
        longest = seconds if steps == 1 else seconds - self._span(steps - 1)
        self._pass(steps, seconds, longest)
        self._ends()

    def _iterate(self) -> None:
        """One iteration: running requests first, then the prompt in part, then the queue."""
        prompts: list[tuple[int, int]] = []  # requests that compute a chunk, and its tokens
        if self.alone:
            self._admit(self.budget, prompts)
            if prompts:
                self._prompts_alone(prompts)
                return
        evicted = self._outgrown()
        evicted = self._grow() or evicted
        decoding = self.growing + len(self.flat)
        cached = self.offsets + self.growing * self.step + self.flat_tokens
        budget = self.budget - decoding
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
        if not (evicted or self.alone):
            self._admit(budget, prompts)
        seconds = self._seconds(decoding, cached, prompts)
        self._pass(1, seconds, seconds)
        self._computed(prompts)
        self._ends()

    def _prompts_alone(self, prompts: list[tuple[int, int]]) -> None:
        """An iteration of prompts, in which nobody grows."""
        seconds = self._seconds(0, 0, prompts)
        self.clock += seconds
        self.iterations += 1
        self.stall += seconds
        self._computed(prompts)
        self.joined += [request for request, _ in prompts]
        self._ends()

    def _seconds(self, decoding: int, cached: int, prompts: list[tuple[int, int]]) -> float:
        """Seconds of one iteration of decoding requests and chunks."""
        prefilled = 0
        for request, tokens in prompts:
            held = self.computed[request]
            if tokens == 1 and held >= self.inputs[request]:  # to vLLM a decoding request like others
                decoding, cached = decoding + 1, cached + held
            else:
                prefilled += tokens
        if prefilled or self.flat:
            return self.cost.seconds(decoding, cached, prefilled)
        return self.cost.span(decoding, cached, 1)

    def _computed(self, prompts: list[tuple[int, int]]) -> None:
        """Chunks have been computed; who has its whole prompt makes a token."""
        self.partial = None
        for request, tokens in prompts:
            again = min(self.known[request] - self.computed[request], tokens)
            if again > 0:
                self.recomputed[request] += again
            self.computed[request] += tokens
            if self.computed[request] < self.inputs[request] + self.generated[request]:
                self.partial = request
            else:
                self._token(request)

    def _pass(self, steps: int, seconds: float, longest: float) -> None:
        """Advance the clock by decoding iterations, and remember the longest of them."""
        self.step += steps
        self.iterations += steps
        self.clock += seconds
        if self.stall or self.joined:
            # Those whose prompts have just been computed waited for less than the others.
            for request in self.joined:
                if self.since[request] >= 0:
                    self._gap(request, self.clock - self.last[request])
                    self.since[request] = self.step
            longest += self.stall
            self.stall, self.joined = 0.0, []
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

    def _gap(self, request: int, seconds: float) -> None:
        if not self.worst[request] >= seconds:
            self.worst[request] = seconds

    # Memory.

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _grow(self) -> bool:
        """A block for each request that needs one, evicting while there is none; whether any was."""
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
        """Take the memory of a request, and put it back into the queue."""
        del self.running[request]
        if request == self.partial:
            self.partial = None
            known = self.computed[request]
        else:
            self._leave(request)
            self.generated[request] = self.outputs[request] - (self.ends[request] - self.step)
            self.ends[request] = -1
            if request not in self.joined:
                self.last[request] = self.clock - self.stall
            known = self.inputs[request] + self.generated[request] - 1
        self.leaves.pop(request, None)
        self._give(self.computed[request], request)
        self.known[request] = max(self.known[request], known)
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

    # Requests come and go.

    def _admit(self, budget: int, prompts: list[tuple[int, int]]) -> None:
        """Requests from the head of the queue, while they fit."""
        waiting, running, before = self.waiting, self.running, len(self.running)
        while waiting and not self.blocked and budget > 0 and len(running) < self.max_running:
            request = waiting[0]
            tokens = self.inputs[request] + self.generated[request]
            # Blocks of its own that it finds are free ones too: it takes all that its tokens need.
            if self._blocks(tokens) + (self.spare if running else 0) > self.free.count:
                self._refuse()
                return
            if self.whole and tokens > budget and prompts:
                return
            if self.gate is not None and not self._passes(request, len(running) - before):
                self._refuse()
                return
            waiting.popleft()
            running[request] = None
            found = self.free.revive(request)
            at = self.computed[request] = found * self.block
            if self.received and not self.preemptions[request]:
                at = self.computed[request] = self.inputs[request]
            chunk = tokens - at if self.whole else min(tokens - at, budget)
            self.free.take(self._blocks(at + chunk) - found)
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
        if self.first[request] != self.first[request]:
            self.first[request] = self.clock
        else:
            self._gap(request, self.clock - self.last[request])
        end = self.ends[request] = self.step + self.outputs[request] - made
        heappush(self.finishing, (end, request))
        grant = self.grants.pop(request, None)
        if grant is not None and grant < self.outputs[request]:
            self.leaves[request] = self.step + grant - made
            heappush(self.leaving, (self.leaves[request], request))
        self.since[request], self.last[request] = self.step, self.clock
        self._start(request, self.computed[request])
        if self.kept is not None:
            self._compress(request)

    def _start(self, request: int, tokens: int, sign: int = 1) -> None:
        """A request that holds so many tokens begins to grow, or stops."""
        offset = self.offset[request] = tokens - self.step
        self.growing += sign
        self.offsets += sign * offset
        key = -offset % self.block
        self.needs[key] += sign
        self.needs[key + self.block] += sign

    def _leave(self, request: int) -> None:
        """A request stops decoding; ``computed`` says what it holds."""
        if request in self.flat:
            held = self.flat.pop(request)
            self.flat_tokens -= held
        else:
            held = self.offset[request] + self.step
            self._start(request, held, -1)
        self.limits.pop(request, None)
        self.computed[request] = held
        at = bisect_right(self.peak_steps, self.since[request])
        if at < len(self.peak_steps):
            self._gap(request, self.peak_seconds[at])
        self.since[request] = -1

    def _ends(self) -> None:
        """Requests that have made their last token leave; others come to a limit."""
        heap = self.finishing
        if heap and heap[0][0] <= self.step and self.clock >= self.line.due:
            self._record()  # the most that they held
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
        heap = self.limiting
        while heap and heap[0][0] <= self.step:
            end, request = heappop(heap)
            if self.limits.get(request) == end:
                self._limit(request)

    # What is kept.

    def _compress(self, request: int) -> None:
        """A prompt has been computed: drop what is not kept of it."""
        row, tokens = int(self.rows[request]), self.computed[request]
        pages = floor(self.crossed.get(request, 0) * self.kept.share)
        most = self.kept.most[row] + pages * self.kept.page
        held = int(min(tokens, self.kept.prompts[row], most))
        if held < tokens:
            self._start(request, tokens, -1)
            self.free.give(0, self._blocks(tokens) - self._blocks(held))
            self.blocked = False
            self._start(request, held)
        if most < float("inf"):
            self._limit_at(request, self.step + int(most) - held)

    def _limit_at(self, request: int, step: int) -> None:
        self.limits[request] = step
        if step <= self.step:
            self._limit(request)
        else:
            heappush(self.limiting, (step, request))

    def _limit(self, request: int) -> None:
        """A request holds as much as it may: it gets a page more, or holds its tokens."""
        share, page = self.kept.share, self.kept.page
        number = self.crossed[request] = self.crossed.get(request, 0) + 1
        more = floor(number * share) > floor((number - 1) * share)
        if more and request in self.flat:
            held = self.flat.pop(request)
            self.flat_tokens -= held
            self._start(request, held)
        elif not more and request not in self.flat:
            held = self.flat[request] = self.offset[request] + self.step
            self.flat_tokens += held
            self._start(request, held, -1)
        if share:
            self._limit_at(request, self.step + page)
        else:
            del self.limits[request]
