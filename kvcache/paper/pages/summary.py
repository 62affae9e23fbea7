"""What a reproduction prints when it ends: the claims, and how long each notebook took."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import nbformat
import pandas as pd

from kvcache.files import atomic_path
from kvcache.paper.results import PROFILES, read_table, table_path, write_table

__all__ = ["claims_summary", "durations"]

CLAIMS = "claims.csv"
DURATIONS = "notebooks_timings.csv"
_COLUMNS = ("id", "where", "verdict", "paper", "ours")


def claims_summary(claims: pd.DataFrame, width: int = 100) -> str:
    """One block of lines per claim (id, where, verdict, the paper's number, ours), then the counts.

    Parameters
    ----------
    claims : DataFrame
        The rows of ``claims.csv``; of its columns those named above that it has, and ``verdict``.
    width : int
        Characters per line; long cells go on below themselves.
    """
    columns = [column for column in _COLUMNS if column in claims.columns]
    texts = claims[columns].astype("string").fillna("")
    natural = {column: max(len(column), int(texts[column].str.len().max() or 0)) for column in columns}
    room = width - 2 * (len(columns) - 1)
    wide = [column for column in columns if column in ("paper", "ours")]
    left = room - sum(natural[column] for column in columns if column not in wide)
    if wide and sum(natural[column] for column in wide) > left:
        share = max(16, left // len(wide))
        natural.update({column: min(natural[column], share) for column in wide})

    def lines(cells: Sequence[str]) -> list[str]:
        wrapped = [
            textwrap.wrap(cell, natural[column]) or [""] for column, cell in zip(columns, cells, strict=True)
        ]
        height = max(len(cell) for cell in wrapped)
        rows = zip(*(cell + [""] * (height - len(cell)) for cell in wrapped), strict=True)
        return [
            "  ".join(part.ljust(natural[column]) for column, part in zip(columns, row, strict=True)).rstrip()
            for row in rows
        ]

    body = [line for row in texts.itertuples(index=False) for line in lines(row)]
    rule = "  ".join("-" * natural[column] for column in columns)
    counts = claims["verdict"].value_counts(sort=False)
    total = ", ".join(f"{verdict} {count}" for verdict, count in counts.items())
    return "\n".join([*lines(columns), rule, *body, rule, f"{len(claims)} claims: {total}"])


def durations(executed: Sequence[Path]) -> pd.DataFrame:
    """How long executed notebooks took: ``notebook``, ``seconds`` and ``minutes``, then their ``total``."""
    books = [nbformat.read(path, as_version=4) for path in executed]
    seconds = [round(book.metadata.papermill.duration, 1) for book in books]
    return pd.DataFrame(
        {
            "notebook": [*(path.stem for path in executed), "total"],
            "seconds": [*seconds, sum(seconds)],
            "minutes": [round(value / 60, 1) for value in (*seconds, sum(seconds))],
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print the summary, write it to a file, and write the table of durations."""
    parser = argparse.ArgumentParser(prog="python -m kvcache.paper.pages.summary", description=__doc__)
    parser.add_argument("target", type=Path, help="the text file to write")
    parser.add_argument("--profile", choices=PROFILES, default="quick")
    parser.add_argument("notebooks", type=Path, nargs="*", help="the executed notebooks")
    options = parser.parse_args(arguments)
    took = durations(sorted(options.notebooks))
    write_table(took, DURATIONS, options.profile)
    if table_path(CLAIMS, options.profile).is_file():
        width = max(80, shutil.get_terminal_size((100, 24)).columns)
        text = claims_summary(read_table(CLAIMS, options.profile), width)
    else:
        text = "no claim has been judged yet"
    text += f"\n{len(took) - 1} notebooks took {took['minutes'].iloc[-1]:.1f} min ({options.profile})"
    with atomic_path(options.target) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
