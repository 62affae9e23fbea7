"""Command line: ``python -m kvcache.digests list`` and ``... build --raw DIR [names]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache.digests import list_digests, read_facts
from kvcache.digests.build import build_digests
from kvcache.traces import TraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.digests", description="Length digests of traces."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the digests at hand")
    build = commands.add_parser("build", help="build digests from raw traces")
    build.add_argument("--raw", required=True, type=Path, help="folder of the original or reduced traces")
    build.add_argument("names", nargs="*", help="digests to build (default: all)")
    options = parser.parse_args(arguments)
    if options.command == "list":
        print(list_digests().to_string(index=False))
        return 0
    try:
        built = build_digests(options.raw, options.names)
    except (TraceError, ValueError, OSError, ImportError) as error:
        print(f"digests: {error}", file=sys.stderr)
        return 1
    total = 0
    for name, path in built.items():
        if path is None:
            print(f"{name:24} left as it is: {options.raw} has none of its inputs")
            continue
        facts, size = read_facts(path), path.stat().st_size
        total += size
        requests = f"{facts['requests']:>15,} requests from {facts['made_from']}"
        print(f"{name:24} {size / 1e3:8.1f} kB  {requests}")
    print(f"{'':24} {total / 1e3:8.1f} kB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
