"""Many independent computations: in parallel, resumable, with the same bytes whatever runs them.

A task is a mapping of JSON values, the keyword arguments of one module-level function, which returns
one row (a mapping) or several (a list of them) of JSON values. What a task returns is kept under
``build/sweeps/`` as soon as it is known, under a key made of the function, the task, and the code and
data of this package; a sweep that was stopped goes on where it stopped, and one that is run again after
a change of the code starts anew.

The executor is chosen by the environment: ``EXECUTOR=joblib`` (the default) uses local processes,
``EXECUTOR=serial`` none, and ``EXECUTOR=dask`` a Dask cluster: the one at ``DASK_SCHEDULER_ADDRESS``,
or a local one started for the sweep. ``JOBS`` limits the local processes (default: one per core).
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from joblib import Parallel, cpu_count, delayed, parallel_config
from tqdm import tqdm

from kvcache.files import atomic_path
from kvcache.paper.project import output_root, project_root
from kvcache.solvers.highs import quietly

__all__ = ["EXECUTORS", "SweepError", "run", "table"]

EXECUTORS = ("joblib", "dask", "serial")

Task = Mapping[str, Any]
Row = dict[str, Any]


class SweepError(RuntimeError):
    """A task failed; the message names it. Tasks that finished before are kept."""


def _plain(value: object) -> object:
    """NumPy values as JSON ones."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _text(value: object, *, sort_keys: bool = False) -> str:
    return json.dumps(value, sort_keys=sort_keys, default=_plain)


def _digest_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def _fingerprint() -> str:
    """A hash of the package's modules and of the digests they read; drawing changes no result."""
    package = Path(__file__).resolve().parents[2]
    files = [p for p in package.rglob("*.py") if p.parent.name != "plots"]
    for folder in (package / "data", package / "paper" / "data", project_root() / "data" / "digests"):
        files += [p for p in folder.rglob("*") if p.is_file()]
    return _digest_of(files)


def _key(function: Callable, task: Task) -> str:
    """What a result depends on, as a file name."""
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        arguments = _text(dict(task), sort_keys=True)
    except TypeError as error:
        raise TypeError(f"sweep {name}: task {dict(task)!r}: {error}; expected JSON values only") from error
    source = _digest_of([Path(inspect.getsourcefile(function))])
    return hashlib.sha256("\n".join([name, source, _fingerprint(), arguments]).encode()).hexdigest()[:32]


def _call(function: Callable, position: int, task: Task) -> tuple[int, str, str | None]:
    """Run one task where it is; its position, its result as JSON text, and what went wrong."""
    try:
        with quietly():
            return position, _text(function(**task)), None
    except Exception as error:
        return position, "", f"{type(error).__name__}: {error}"


def _with_joblib(function: Callable, todo: Sequence[tuple[int, Task]], workers: int) -> Iterator:
    with parallel_config("loky", n_jobs=workers, inner_max_num_threads=1):
        yield from Parallel(return_as="generator_unordered")(
            delayed(_call)(function, position, task) for position, task in todo
        )


def _with_dask(function: Callable, todo: Sequence[tuple[int, Task]], workers: int) -> Iterator:
    from dask.distributed import Client, LocalCluster, as_completed

    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    cluster = None
    if not address:
        cluster = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
    try:
        with Client(address or cluster, set_as_default=False) as client:
            # A task whose worker dies is given to another one, twice over.
            futures = [
                client.submit(_call, function, position, task, pure=False, retries=2)
                for position, task in todo
            ]
            for _, result in as_completed(futures, loop=client.loop, with_results=True):
                yield result
    finally:
        if cluster is not None:
            cluster.close()


def _serially(function: Callable, todo: Sequence[tuple[int, Task]], workers: int) -> Iterator:
    return (_call(function, position, task) for position, task in todo)


_BACKENDS = {"joblib": _with_joblib, "dask": _with_dask, "serial": _serially}


def run(
    function: Callable[..., Row | list[Row]],
    tasks: Sequence[Task],
    *,
    executor: str | None = None,
    workers: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> list[Any]:
    """The result of every task, in the order of the tasks.

    Parameters
    ----------
    function : a module-level function of keyword arguments; what it returns may depend on nothing else.
    tasks : keyword arguments, JSON values only. Equal tasks are computed once.
    executor : one of `EXECUTORS`; without it the environment's ``EXECUTOR``, else joblib.
    workers : local processes; without it the environment's ``JOBS``, else one per core.
    folder : where finished tasks are kept; ``build/sweeps`` of the project without it.
    progress : show a progress bar.

    Raises
    ------
    SweepError
        When a task fails, naming it; the tasks finished so far need not run again.
    TypeError
        For a task that holds anything but JSON values.
    ValueError
        For an unknown executor.
    """
    executor = executor or os.environ.get("EXECUTOR", "joblib")
    if executor not in EXECUTORS:
        raise ValueError(f"EXECUTOR is {executor!r}; expected one of {', '.join(EXECUTORS)}")
    workers = workers or int(os.environ.get("JOBS", 0)) or cpu_count()
    folder = Path(folder) if folder is not None else output_root() / "build" / "sweeps"

    keys = [_key(function, task) for task in tasks]
    paths = {key: folder / f"{key}.json" for key in keys}
    positions = {key: position for position, key in reversed(list(enumerate(keys)))}
    todo = [(position, tasks[position]) for key, position in positions.items() if not paths[key].is_file()]
    todo.sort(key=lambda item: item[0])
    done = len(positions) - len(todo)
    with tqdm(
        total=len(positions), initial=done, desc=function.__name__, leave=False, disable=not progress
    ) as bar:
        for position, text, error in _BACKENDS[executor](function, todo, workers) if todo else ():
            if error is not None:
                name = f"{function.__module__}.{function.__qualname__}"
                raise SweepError(f"sweep {name} task {_text(tasks[position])}: {error}")
            with atomic_path(paths[keys[position]]) as partial:
                partial.write_text(text, encoding="utf-8")
            bar.update()
    # Read back even what was just computed: fresh and resumed sweeps cannot differ.
    return [json.loads(paths[key].read_text(encoding="utf-8")) for key in keys]


def table(function: Callable[..., Row | list[Row]], tasks: Sequence[Task], **options: Any) -> pd.DataFrame:
    """The rows of all tasks as one table, in the order of the tasks; ``options`` as in `run`."""
    rows: list[Row] = []
    for result in run(function, tasks, **options):
        rows.extend(result if isinstance(result, list) else [result])
    return pd.DataFrame(rows)
