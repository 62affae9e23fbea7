"""A plan as a notebook, a page and files, by one command.

``python -m kvcache.paper.pages.plan --trace requests.csv --model Qwen/Qwen3-32B --gpu h200_sxm --gpus 16``
runs ``notebooks/10_plan.ipynb`` with these parameters into ``build/plan/NAME``: the executed notebook,
``report.html`` (one file, without scripts), the plan's files, and its tables and figures.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
from papermill.exceptions import PapermillExecutionError

from kvcache.files import atomic_path
from kvcache.paper.pages.notebook import execute
from kvcache.paper.pages.report import standalone
from kvcache.paper.project import project_root

__all__ = ["main", "make"]

NOTEBOOK = "10_plan.ipynb"


def make(folder: Path, parameters: Mapping[str, object]) -> Path:
    """Run the notebook with these parameters into ``folder``; returns the page.

    Raises
    ------
    PapermillExecutionError
        When a cell fails; what had run is kept as ``plan.failed.ipynb``.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    source = project_root() / "notebooks" / NOTEBOOK
    before = os.environ.get("KVCACHE_OUTPUT")
    os.environ["KVCACHE_OUTPUT"] = str(folder)
    try:
        target = execute(source, folder / "plan.ipynb", {"OUT": str(folder), **parameters}, progress=False)
    finally:
        if before is None:
            del os.environ["KVCACHE_OUTPUT"]
        else:
            os.environ["KVCACHE_OUTPUT"] = before
    page = folder / "report.html"
    with atomic_path(page) as partial:
        text = standalone(nbformat.read(target, as_version=4), "What to start")
        partial.write_text(text, encoding="utf-8")
    return page


def _name(trace: str | None, model: str, gpu: str, gpus: int) -> str:
    """A folder's name that tells what was planned."""
    parts = (Path(trace).name.split(".")[0] if trace else "bundled", Path(model).name, gpu, str(gpus))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 2 when the plan is refused or a cell fails."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.pages.plan", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--trace", help="requests; the bundled trace without it")
    parser.add_argument("--model", default="Qwen/Qwen3-32B")
    parser.add_argument("--gpu", default="h200_sxm")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--tpot", type=float, default=0.1)
    parser.add_argument("--ttft", type=float, default=5.0)
    parser.add_argument("--rate", type=float, help="requests/s; by default the trace's own")
    parser.add_argument("--objective", choices=("goodput", "cost"), default="goodput")
    parser.add_argument("--name", help="folder under build/plan")
    o = parser.parse_args(arguments)
    trace = str(Path(o.trace).resolve()) if o.trace else None
    parameters = {
        "TRACE": trace,
        "MODEL": o.model,
        "GPU": o.gpu,
        "GPUS": o.gpus,
        "ENGINE": o.engine,
        "TPOT": o.tpot,
        "TTFT": o.ttft,
        "OBJECTIVE": o.objective,
    }
    if o.rate is not None or trace:
        parameters["RATE"] = o.rate
    folder = project_root() / "build" / "plan" / (o.name or _name(trace, o.model, o.gpu, o.gpus))
    try:
        page = make(folder, parameters)
    except PapermillExecutionError as error:
        print(f"plan: {error.ename}: {error.evalue}", file=sys.stderr)
        return 2
    print(f"plan: {page}")
    for path in sorted(folder.iterdir()):
        if path.is_file() and path != page:
            print(f"plan: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
