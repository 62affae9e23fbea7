"""Where the project's files lie, and how one is written so that it appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path", "output_root", "project_root"]


def project_root() -> Path:
    """The folder that holds ``data/``, ``notebooks/`` and this package.

    It is ``KVCACHE_ROOT`` where that is set, else the folder above the package; an installed copy
    of the package has no project around it and falls back on the current folder.

    Raises
    ------
    NotADirectoryError
        When ``KVCACHE_ROOT`` names no folder.
    """
    named = os.environ.get("KVCACHE_ROOT")
    if named:
        root = Path(named).resolve()
        if not root.is_dir():
            raise NotADirectoryError(f"KVCACHE_ROOT is {named}; expected an existing folder")
        return root
    above = Path(__file__).resolve().parent.parent
    return above if (above / "pyproject.toml").is_file() else Path.cwd()


def output_root() -> Path:
    """The folder under which ``data/results/`` and ``figures/`` are written.

    It is the project itself, unless ``KVCACHE_OUTPUT`` names another: the tests run the committed
    notebooks that way and leave the tree as it was.
    """
    named = os.environ.get("KVCACHE_OUTPUT")
    return Path(named).resolve() if named else project_root()


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
