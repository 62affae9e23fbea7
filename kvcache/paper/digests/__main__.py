"""Command line: ``python -m kvcache.paper.digests list`` and ``... build --raw DIR [names]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache.paper.digests import list_digests, read_facts
from kvcache.paper.digests.build import build_digest
from kvcache.paper.digests.joint import build_joint
from kvcache.paper.digests.sources import load_sources
from kvcache.traces import TraceError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.digests", description="Length digests of traces."
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
    return _build(options.raw, options.names)


def _build(raw: Path, names: Sequence[str]) -> int:
    sources = load_sources()
    unknown = [name for name in names if name not in sources.digests]
    if unknown or not raw.is_dir():
        choices = f"{unknown[0]!r} is no digest; there are {', '.join(sources.digests)}" if unknown else ""
        print(f"digests: {choices or f'{raw}: no such folder'}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or sources.digests:
        try:
            path = build_digest(sources.digests[name], raw, sources)
            build_joint(sources.digests[name], raw, sources)
        except ImportError as error:
            print(f"{name:24} left as it is: {error}")
            continue
        except (TraceError, OSError) as error:
            print(f"digests: {name}: {error}", file=sys.stderr)
            failed += 1
            continue
        if path is None:
            print(f"{name:24} left as it is: {raw} has none of its inputs")
            continue
        facts, size = read_facts(path), path.stat().st_size
        print(f"{name:24} {size / 1e3:8.1f} kB {facts['requests']:>15,} requests from {facts['made_from']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
