"""How a file is written so that it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path"]


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a hidden path beside ``path`` to write to; rename it to ``path`` on success.

    The given path keeps the suffix, from which writers tell the format. After an error or an
    interrupt ``path`` is as it was and the partial file is gone. Missing folders are made.

    Raises
    ------
    FileNotFoundError
        When the block ends well without having written the file.

    Examples
    --------
    >>> with atomic_path("out/table.parquet") as partial:   # doctest: +SKIP
    ...     frame.to_parquet(partial)
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    try:
        yield partial
        if not partial.exists():
            raise FileNotFoundError(f"{target}: nothing was written to the path given for it")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
