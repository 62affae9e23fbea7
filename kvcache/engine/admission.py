"""Who may enter a paged group: the rules that an engine's scheduler can be given.

A rule is asked when the head of the queue has room and something runs; an empty group always takes the next
request. Rules that keep a fixed number of blocks free say so once (``free_blocks``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Headroom", "Watermark"]


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
        """Blocks to leave free in a pool of ``blocks``; vLLM counts the one it sets aside as empty."""
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
        """Blocks to leave free in a pool of ``blocks`` blocks of ``block`` tokens."""
        return Watermark(min(self.tokens / (blocks * block), 1 - 1e-9)).free_blocks(blocks, block)
