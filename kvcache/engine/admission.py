"""Who may enter a paged group: the rules that an engine's scheduler can be given.

A rule is asked when the head of the queue has room and something runs; an empty group always takes the next
request, so nobody starves. A rule that keeps a fixed number of blocks free says so once (``free_blocks``);
any other makes a `Gate` for each run (``gate``) and is asked request by request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from kvcache.engine.bursts import BurstRule

__all__ = [
    "Bursts",
    "Candidate",
    "FreeBlocksRule",
    "Gate",
    "GateRule",
    "Headroom",
    "MaxRunning",
    "Reserve",
    "Running",
    "Watermark",
    "per_row",
]

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Candidate:
    """The request at the head of the queue.

    row : its position in the table of requests. input_tokens, generated : its prompt, and the tokens that it
    made before it was evicted. step : iterations so far.
    """

    row: int
    input_tokens: int
    generated: int
    step: int


@dataclass(frozen=True, eq=False)
class Running:
    """The running requests when somebody may enter: arrays over them, in order of admission.

    rows, input_tokens, generated : as of a `Candidate`. fresh : how many, the last, have been admitted in the
    same iteration. free_blocks : of the pool. finished : output lengths of all that ended, oldest first.
    """

    rows: Ints
    input_tokens: Ints
    generated: Ints
    fresh: int
    free_blocks: int
    finished: Sequence[int]

    def __len__(self) -> int:
        return self.rows.size


class Gate:
    """A rule at work in one run. As it stands, it admits all; override what differs.

    patience : iterations after which a refused request is looked at again although nobody has left; None if
    only that can change the rule's mind. ranks : per row of the requests, the order of the queue (lowest
    first) instead of their arrival. to_back : an evicted request goes to the end of the queue.
    """

    patience: int | None = None
    ranks: Sequence[float] | None = None
    to_back: ClassVar[bool] = False
    #: ``victim(running)``: the position of who leaves when blocks run out; without it, the last admitted.
    victim = None

    def admits(self, running: Running, candidate: Candidate) -> bool:
        """Whether it may enter; it has room."""
        return True

    def enters(self, candidate: Candidate, running: int) -> int | None:
        """It enters, beside so many. The number of generated tokens at which it must leave, if any."""
        return None

    def evicted(self, running: Running, step: int) -> None:
        """Blocks ran out, and this is who still runs."""


class FreeBlocksRule(Protocol):
    """A rule that keeps a fixed number of blocks free."""

    def free_blocks(self, blocks: int, block: int) -> int:
        """Blocks to leave free in a pool of ``blocks`` blocks of ``block`` tokens."""


class GateRule(Protocol):
    """A rule that looks at the requests."""

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for one run of a pool of ``blocks`` blocks of ``block`` tokens."""


@dataclass(frozen=True)
class Watermark:
    """Admit only what leaves that share of the blocks free: vLLM's ``--watermark``.

    Parameters
    ----------
    share : in [0, 1); vLLM's default is 0.

    Raises
    ------
    ValueError
        For a share outside [0, 1).
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ValueError(f"watermark: share is {self.share}; expected a value in [0, 1)")

    def free_blocks(self, blocks: int, block: int) -> int:
        """Blocks to leave free; vLLM counts the one it sets aside as empty."""
        return int(self.share * (blocks + 1))


@dataclass(frozen=True)
class Headroom:
    """Admit only what leaves that many tokens free, as `kvcache.engine.headroom` advises.

    The same as ``Watermark(tokens / pool)``, so what is simulated is what the flag does.

    Raises
    ------
    ValueError
        For a negative number of tokens.
    """

    tokens: float

    def __post_init__(self) -> None:
        if not self.tokens >= 0:
            raise ValueError(f"headroom: tokens is {self.tokens}; expected >= 0")

    def free_blocks(self, blocks: int, block: int) -> int:
        """Blocks to leave free."""
        return Watermark(min(self.tokens / (blocks * block), 1 - 1e-9)).free_blocks(blocks, block)


@dataclass(frozen=True)
class Reserve:
    """Admit while prompts and reservations fit: eta output tokens for each request, held to its end.

    A request that outgrows its reservation goes on, with blocks on demand. eta is a fractile of the lengths
    (equation 10 of the paper), their mean, or L_max: then nothing is ever evicted, which is TensorRT-LLM's
    ``GUARANTEED_NO_EVICT`` (https://nvidia.github.io/TensorRT-LLM) and, with contiguous memory, Orca's rule.

    Parameters
    ----------
    tokens : eta of every request, of each ``class``, or of each row of the requests.

    Raises
    ------
    ValueError
        For a negative reservation; and, when it is used, for a class without one.
    """

    tokens: float | Mapping[str, float] | Sequence[float]

    def __post_init__(self) -> None:
        values = list(self.tokens.values()) if isinstance(self.tokens, Mapping) else self.tokens
        if not (np.asarray(values, dtype=float) >= 0).all():
            raise ValueError(f"reserve: tokens is {self.tokens}; expected >= 0")

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        return _Reserving(per_row(self.tokens, requests), blocks, block)


def per_row(value: float | Mapping[str, float] | ArrayLike, requests: pd.DataFrame) -> NDArray[np.float64]:
    """One number per request, from a number for all, one per ``class``, or one each.

    Raises
    ------
    ValueError
        If a class has none, or there are more or fewer numbers than requests.
    """
    if isinstance(value, Mapping):
        classes = requests["class"] if "class" in requests else pd.Series("", index=requests.index)
        unknown = sorted(set(map(str, classes)) - set(value))
        if unknown:
            raise ValueError(f"no value for class {unknown[0]!r}; expected one of {', '.join(value)}")
        return np.array([value[str(name)] for name in classes], dtype=float)
    values = np.asarray(value, dtype=float)
    if values.ndim and values.shape != (len(requests),):
        raise ValueError(f"{values.size} values for {len(requests)} requests; expected one each")
    return np.broadcast_to(values, (len(requests),))


class _Reserving(Gate):
    """Prompts and reservations in blocks; whoever has outgrown its own counts with what it holds."""

    def __init__(self, eta: NDArray[np.float64], blocks: int, block: int) -> None:
        self.eta, self.blocks, self.block = eta, blocks, block

    def admits(self, running: Running, candidate: Candidate) -> bool:
        held = running.input_tokens + np.maximum(running.generated, self.eta[running.rows])
        own = candidate.input_tokens + max(candidate.generated, self.eta[candidate.row])
        return bool(np.ceil(held / self.block).sum() + np.ceil(own / self.block) <= self.blocks)


@dataclass(frozen=True)
class MaxRunning(Gate):
    """Admit while fewer than that many run, as ``--max-num-seqs`` does, set from reservations for example.

    Raises
    ------
    ValueError
        For a limit below 1.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ValueError(f"max running: limit is {self.limit}; expected at least 1")

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule itself: it has no state."""
        return self

    def admits(self, running: Running, candidate: Candidate) -> bool:
        """Whether a place is free."""
        return len(running) < self.limit


@dataclass(frozen=True)
class Bursts:
    """Admit while a `BurstRule` bounds the overflow at every horizon.

    Parameters
    ----------
    rule : the bound. classes : the ``class`` of each of its laws, in order; empty if one law is for all.
    patience : iterations after which a refused request is looked at again, since those that run have aged.

    Raises
    ------
    ValueError
        For a patience below 1; and, when it is used, for a class without a law.
    """

    rule: BurstRule
    classes: Sequence[str] = ()
    patience: int = 1

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"bursts: patience is {self.patience}; expected at least 1 iteration")

    def gate(self, requests: pd.DataFrame, blocks: int, block: int) -> Gate:
        """The rule for these requests."""
        kinds = per_row({name: k for k, name in enumerate(self.classes)} if self.classes else 0, requests)
        return _Bursts(self, kinds.astype(np.int64))


class _Bursts(Gate):
    def __init__(self, bursts: Bursts, kinds: Ints) -> None:
        self.rule, self.patience, self.kinds = bursts.rule, bursts.patience, kinds

    def admits(self, running: Running, candidate: Candidate) -> bool:
        return self.rule.admits(
            np.append(running.input_tokens, candidate.input_tokens),
            np.append(running.generated, candidate.generated),
            self.kinds[np.append(running.rows, candidate.row)],
        )
