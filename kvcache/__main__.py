"""``python -m kvcache plan TRACE --model ... --gpu ... --gpus N``: a plan from a shell.

Exit codes: 0 for a plan that keeps its deadlines in the replay; 1 for one that does not, with ``--strict``;
2 for requests or options that were refused, with the reason on stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from kvcache.planner import plan
from kvcache.planner.bundle import write

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvcache", description="Plans for serving language models from real requests."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser(
        "plan",
        help="what to start for a trace, a model and some GPUs",
        description=plan.__doc__.split("\n")[0],
    )
    p.add_argument("trace", help="requests: CSV, JSON lines, JSON or Parquet; the layout is recognised")
    p.add_argument(
        "--model", default="Qwen/Qwen3-32B", help="a name, a folder or a config.json (%(default)s)"
    )
    p.add_argument("--gpu", default="h200_sxm", help="such as h100_sxm, a100_sxm, l40s (%(default)s)")
    p.add_argument("--gpus", type=int, default=8, help="how many there are (%(default)s)")
    p.add_argument("--engine", default="vllm", choices=("vllm", "sglang", "trtllm"))
    p.add_argument("--tpot", type=float, default=0.1, help="deadline, s per output token (%(default)s)")
    p.add_argument("--ttft", type=float, default=5.0, help="deadline, s to the first token (%(default)s)")
    p.add_argument("--share", type=float, default=0.95, help="of requests within both (%(default)s)")
    p.add_argument("--rate", type=float, help="requests/s to plan for; by default the trace's own")
    p.add_argument(
        "--percentile", type=float, default=95.0, help="of the trace's windows to plan for (%(default)s)"
    )
    p.add_argument(
        "--objective",
        default="goodput",
        choices=("goodput", "cost"),
        help="most requests in time on these GPUs, or the fewest GPUs for all (%(default)s)",
    )
    p.add_argument("--drift", type=float, help="factor on output lengths to plan for")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--max-num-batched-tokens", type=int, default=8192)
    p.add_argument("--memory-utilisation", type=float, default=0.9)
    p.add_argument("--cache-dtype", default="auto")
    p.add_argument("--top-n", type=int, default=5, help="candidates to list (%(default)s)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--out", type=Path, help="folder for launch.sh, manifests, router, load test and plan.json"
    )
    p.add_argument("--strict", action="store_true", help="exit with 1 where the replay misses the deadlines")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    trace, out, top = options.pop("trace"), options.pop("out"), options.pop("top_n")
    strict, quiet, _ = options.pop("strict"), options.pop("quiet"), options.pop("command")

    def say(what: str) -> None:
        if not quiet:
            print(f"plan: {what}", file=sys.stderr, flush=True)

    try:
        made = plan(trace, **options, progress=say)
        written = write(made, out) if out is not None else []
    except (ValueError, LookupError, OSError) as error:
        reason = error.args[0] if isinstance(error, LookupError) and error.args else error
        print(f"plan: {reason}", file=sys.stderr)
        return 2
    with pd.option_context("display.width", 160, "display.max_columns", None, "display.precision", 4):
        print(made, "\n")
        print(made.groups.drop(columns="label").to_string(index=False), "\n")
        print(made.routing.to_string(index=False), "\n")
        print(made.replayed.T.to_string(), "\n")
        print(made.candidates.head(top).to_string(index=False), "\n")
    print(*made.launch(), sep="\n")
    for warning in made.warnings:
        print(f"warning: {warning}")
    for path in written:
        print(f"written: {path}")
    return 1 if strict and not made.meets else 0


if __name__ == "__main__":
    sys.exit(main())
