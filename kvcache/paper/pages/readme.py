"""README numbers, written from ``data/results`` between markers.

A marker is an HTML comment, so that it does not show; what stands between it and the next
``<!-- end -->`` is replaced. There are two kinds::

    <!-- table: table2.csv columns=trace,rho,dro query="rho == 10" head=5 -->
    <!-- end -->

    DRO costs <!-- value: table2.csv column=dro query="rho == 10" format=.1f --><!-- end --> there.

``columns`` picks and orders columns (``name:heading`` renames one), ``query`` filters rows as
``DataFrame.query`` does, ``head`` cuts, ``format`` is a format specification for floats (``.6g``
unless given), and ``profile`` names the folder (``quick`` unless given). A value's query must leave
one row. ``python -m kvcache.paper.pages.readme README.md`` rewrites the file; with ``--check`` it only tells
what differs, and leaves out the ``*_timings.csv``, which every run writes anew.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvcache.files import atomic_path
from kvcache.paper.results import read_table

__all__ = ["fill"]

_BLOCK = re.compile(
    r"(?P<marker><!-- (?P<kind>table|value): (?P<arguments>.+?) -->)(?P<old>.*?)<!-- end -->", re.DOTALL
)
_OPTIONS = {
    "table": {"columns", "query", "head", "format", "profile"},
    "value": {"column", "query", "format", "profile"},
}


def _text(value: object, spec: str) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else format(value, spec)
    return str(value).replace("|", r"\|")


def _table(frame: pd.DataFrame, options: dict[str, str]) -> str:
    picked = [name.partition(":") for name in options["columns"].split(",")] if "columns" in options else []
    headings = {name: heading or name for name, _, heading in picked} or {name: name for name in frame}
    frame = frame.head(int(options.get("head", len(frame))))
    spec = options.get("format", ".6g")
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in headings]
    cells = [[_text(value, spec) for value in frame[name]] for name in headings]
    rows = [
        list(headings.values()),
        ["--:" if number else ":--" for number in numeric],
        *zip(*cells, strict=True),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _filled(block: re.Match[str], timings: bool) -> str:
    kind, marker = block["kind"], block["marker"]
    name, *pairs = shlex.split(block["arguments"])
    if name.endswith("_timings.csv") and not timings:
        return block[0]
    options = dict(pair.split("=", 1) for pair in pairs)
    unknown = set(options) - _OPTIONS[kind]
    if unknown:
        raise ValueError(f"{marker}: unknown {', '.join(sorted(unknown))}; expected {sorted(_OPTIONS[kind])}")
    frame = read_table(name, options.get("profile", "quick"))
    if "query" in options:
        frame = frame.query(options["query"])
    if kind == "table":
        return f"{marker}\n{_table(frame, options)}\n<!-- end -->"
    if len(frame) != 1:
        raise ValueError(f"{marker}: {len(frame)} rows; expected one")
    value = frame[options["column"]].item()
    return f"{marker}{_text(value, options.get('format', '.6g'))}<!-- end -->"


def fill(text: str, timings: bool = True) -> str:
    """The text with every marked block rewritten from the tables; the rest as it was.

    Without ``timings`` the blocks that show a ``*_timings.csv`` stay as they were too.

    Raises
    ------
    ValueError
        For a marker without its end, an unknown option, or a value that is not one row.
    FileNotFoundError
        For a table that is not there.
    """
    for marker in re.finditer(r"<!-- (?:table|value): .+?-->", text):
        following = re.search(r"<!-- (table|value|end)\b", text[marker.end() :])
        if following is None or following[1] != "end":
            raise ValueError(f"{marker[0]}: has no <!-- end --> of its own")
    return _BLOCK.sub(lambda block: _filled(block, timings), text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; with ``--check`` 1 when a file is not what the tables say."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.pages.readme", description=__doc__.splitlines()[0]
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what differs")
    options = parser.parse_args(arguments)
    differ = []
    for path in options.files:
        old = path.read_text(encoding="utf-8")
        new = fill(old, timings=not options.check)
        if new == old:
            continue
        differ.append(path)
        if not options.check:
            with atomic_path(path) as partial:
                partial.write_text(new, encoding="utf-8")
    for path in differ:
        print(f"{path}: {'differs from data/results; run `make readme`' if options.check else 'rewritten'}")
    return 1 if options.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
