"""HiGHS as the solvers here use it: on one thread, and without a word on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import highspy

__all__ = ["new_highs", "quietly"]


@contextmanager
def quietly() -> Iterator[None]:
    """Drop what goes to standard output, from compiled code too."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@cache
def _greeted() -> None:
    """The first HiGHS of a process prints a greeting, before any option can forbid it."""
    with quietly():
        highspy.Highs()


def new_highs(**options: object) -> highspy.Highs:
    """A solver with these options of HiGHS, silent and on one thread."""
    _greeted()
    made = highspy.Highs()
    for name, value in {"output_flag": False, "threads": 1, **options}.items():
        if made.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise ValueError(f"HiGHS option {name}: {value!r} is not accepted")
    return made
