"""Running the notebooks headless, and putting their outputs back into the committed files.

``python -m kvcache.paper.pages.notebook run notebooks/01_data.ipynb --profile quick`` executes one notebook
into ``build/quick/01_data.ipynb``; ``python -m kvcache.paper.pages.notebook embed notebooks/*.ipynb`` copies
the outputs of the quick run into the committed notebooks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from kvcache.files import atomic_path
from kvcache.paper.project import project_root
from kvcache.paper.results import PROFILES

__all__ = ["build_dir", "committed_form", "embed", "execute", "run"]

#: The kernel of the running environment; jupyter_client replaces its ``python`` by ``sys.executable``.
KERNEL = "python3"
# Without it each kernel warns that its loopback socket is open to eavesdroppers.
_CLIENT = Config({"KernelManager": {"transport_encryption": "auto"}})
# Written by papermill: cells and metadata that carry paths, dates and durations.
_INJECTED = "injected-parameters"


def build_dir(profile: str) -> Path:
    """The folder of a profile's executed notebooks, ``build/<profile>``."""
    if profile not in PROFILES:
        raise ValueError(f"profile is {profile!r}; expected one of {', '.join(PROFILES)}")
    return project_root() / "build" / profile


def run(source: Path, profile: str, timeout_s: int = 3 * 3600) -> Path:
    """Execute a notebook with ``PROFILE`` set; its result appears whole or not at all.

    Parameters
    ----------
    source : Path
        The notebook. It runs in its own folder, as in JupyterLab.
    profile : {"quick", "full"}
        The value given to the notebook's ``parameters`` cell.
    timeout_s : int
        Bound on one cell, in seconds.

    Returns
    -------
    Path
        The executed notebook in `build_dir`.

    Raises
    ------
    PapermillExecutionError
        When a cell fails. What had run by then is kept beside the result as ``<name>.failed.ipynb``.
    """
    return execute(source, build_dir(profile) / source.name, {"PROFILE": profile}, timeout_s=timeout_s)


def execute(
    source: Path,
    target: Path,
    parameters: Mapping[str, object],
    *,
    timeout_s: int | None = None,
    progress: bool = True,
) -> Path:
    """Execute a notebook with these parameters into ``target``, whole or not at all; see `run`."""
    failed = target.with_suffix(".failed.ipynb")
    with atomic_path(target) as partial:
        try:
            papermill.execute_notebook(
                str(source),
                str(partial),
                parameters=dict(parameters),
                kernel_name=KERNEL,
                language="python",
                cwd=str(source.parent),
                execution_timeout=timeout_s,
                progress_bar=progress,
                config=_CLIENT,
            )
        except PapermillExecutionError:
            os.replace(partial, failed)
            raise
    failed.unlink(missing_ok=True)
    return target


def committed_form(executed: NotebookNode) -> NotebookNode:
    """An executed notebook as it is committed: outputs and source, without a trace of the run.

    The injected parameters go (the committed notebooks show the defaults), as do the progress bars on
    stderr and the metadata that names paths, dates, durations and the Python release. Cells are
    numbered from 1.
    """
    book = nbformat.from_dict(executed)
    book.cells = [cell for cell in book.cells if _INJECTED not in cell.metadata.get("tags", [])]
    count = 0
    for cell in book.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    widgets = book.metadata.get("widgets")
    book.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": KERNEL},
            "language_info": {"name": "python"},
            **({"widgets": widgets} if widgets else {}),
        }
    )
    return book


def embed(source: Path) -> None:
    """Put the outputs of the quick run into the committed notebook.

    Its executed copy is touched afterwards, since the outputs do not make it out of date.

    Raises
    ------
    ValueError
        When the executed notebook ran from other sources than the committed one has.
    """
    executed = build_dir("quick") / source.name
    book = committed_form(nbformat.read(executed, as_version=4))
    committed = nbformat.read(source, as_version=4)
    if [cell.source for cell in book.cells] != [cell.source for cell in committed.cells]:
        raise ValueError(f"{source}: its cells are not those of {executed}; run it again first")
    with atomic_path(source) as partial:
        nbformat.write(book, partial)
    executed.touch()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 when a cell fails."""
    parser = argparse.ArgumentParser(
        prog="python -m kvcache.paper.pages.notebook", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="execute one notebook into build/<profile>")
    runner.add_argument("notebook", type=Path)
    runner.add_argument("--profile", choices=PROFILES, default="quick")
    embedder = commands.add_parser("embed", help="put the outputs of the quick run into the notebooks")
    embedder.add_argument("notebooks", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    if options.command == "embed":
        for source in options.notebooks:
            embed(source)
        return 0
    started = time.perf_counter()
    try:
        run(options.notebook, options.profile)
    except PapermillExecutionError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.notebook.stem}: {time.perf_counter() - started:.1f} s ({options.profile})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
