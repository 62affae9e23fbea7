"""Where the files of the reproduction lie."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["output_root", "project_root"]


def project_root() -> Path:
    """The folder that holds ``data/``, ``notebooks/`` and the package.

    It is ``KVCACHE_ROOT`` where that is set, else the folder above the package, else the current one.

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
    above = Path(__file__).resolve().parents[2]
    return above if (above / "pyproject.toml").is_file() else Path.cwd()


def output_root() -> Path:
    """The folder under which ``data/results/`` and ``figures/`` are written.

    It is the project itself, unless ``KVCACHE_OUTPUT`` names another: the tests run the committed
    notebooks that way and leave the tree as it was.
    """
    named = os.environ.get("KVCACHE_OUTPUT")
    return Path(named).resolve() if named else project_root()
