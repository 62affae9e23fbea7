"""The free blocks of a paged KV cache, and which of an evicted request's blocks survive among them."""

from __future__ import annotations

from collections import deque

__all__ = ["FreeBlocks"]


class FreeBlocks:
    """Free blocks in the order in which they are handed out again: empty ones first, then the longest unused.

    A block that was filled keeps its content while it is free. A request's blocks are freed last block
    first, so what is left of them when it comes back is a prefix, and a count says how long. Blocks of
    finished requests are filled and wanted by nobody (prefixes are not shared), so they need no names.

    Parameters
    ----------
    blocks : blocks of the pool, all free and empty.
    """

    __slots__ = ("_empty", "_filled", "_of", "_unnamed", "count")

    def __init__(self, blocks: int) -> None:
        self.count = self._empty = blocks
        self._filled: deque[list[int]] = deque()  # one-element lists: how many are left of a run of blocks
        self._of: dict[int, list[int]] = {}
        self._unnamed: list[int] | None = None  # the last run, if it is nobody's

    def take(self, blocks: int) -> None:
        """Hand out that many, which must be free; the content of filled ones is lost."""
        self.count -= blocks
        if blocks <= self._empty:
            self._empty -= blocks
            return
        blocks -= self._empty
        self._empty = 0
        filled = self._filled
        while blocks >= filled[0][0]:
            blocks -= filled[0][0]
            filled.popleft()[0] = 0
            if not filled:
                self._unnamed = None
                return
        filled[0][0] -= blocks

    def give(self, filled: int, rest: int, owner: int | None = None) -> None:
        """Free a request's blocks: full ones, which keep their content for ``owner``, and the ``rest``."""
        self.count += filled + rest
        self._empty += rest
        if not filled:
            return
        if owner is None and self._unnamed is not None:
            self._unnamed[0] += filled
            return
        run = [filled]
        self._filled.append(run)
        self._unnamed = run if owner is None else None
        if owner is not None:
            self._of[owner] = run

    def revive(self, owner: int) -> int:
        """Hand an evicted request what is left of its blocks; returns how many."""
        run = self._of.pop(owner, None)
        if run is None:
            return 0
        blocks, run[0] = run[0], 0
        self.count -= blocks
        return blocks
