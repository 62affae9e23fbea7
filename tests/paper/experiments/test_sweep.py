"""The same bytes from every executor, resumption, and a Dask worker that dies on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvcache.paper.experiments import sweep
from kvcache.paper.results import write_table

HERE = Path(__file__).resolve().parent


def draw(seed, size, log=None, pause=0.0):
    """A computation whose result shows its task: moments of a seeded sample."""
    if log is not None:
        with open(log, "a", encoding="utf-8") as handle:
            handle.write(f"{seed}\n")
    time.sleep(pause)
    sample = np.random.default_rng(seed).normal(size=size)
    return {"seed": seed, "mean": sample.mean(), "largest": sample.max(), "missing": float("nan")}


def several(count):
    return [{"count": count, "index": index} for index in range(count)]


def failing(seed):
    if seed == 2:
        raise ZeroDivisionError("no such seed")
    return {"seed": seed}


TASKS = [{"seed": seed, "size": 1_000} for seed in range(8)]


def bytes_of(frame, folder, name):
    return write_table(frame, folder / f"{name}.csv").read_bytes()


@pytest.fixture
def dask_cluster(monkeypatch):
    """A real scheduler and two workers, each its own process; gives the address and the workers."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[2])])
    # The default is to knock at a dead worker's door for half a minute.
    environment["DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT"] = "1s"
    environment["DASK_DISTRIBUTED__COMM__RETRY__COUNT"] = "0"
    dask = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker"]
    processes = []

    def start(command):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    def wait_for(process, text):
        for line in process.stderr:
            if text in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return line
        raise AssertionError(f"{process.args}: ended without {text!r}")

    try:
        scheduler = start([*dask, "--host", "127.0.0.1", "--port", "0", "--no-dashboard"])
        address = wait_for(scheduler, "Scheduler at:").split()[-1]
        workers = [
            start([*worker, address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]) for _ in range(2)
        ]
        for process in workers:
            wait_for(process, "Registered to:")
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
        monkeypatch.setenv("EXECUTOR", "dask")
        yield workers
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_worker_that_dies_half_way_changes_nothing(dask_cluster, tmp_path):
    folder = tmp_path / "dask"
    tasks = [{**task, "pause": 0.15} for task in TASKS]

    def kill_one_half_way():
        deadline = time.monotonic() + 60
        while len(list(folder.glob("*.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        dask_cluster[0].send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_one_half_way, daemon=True)
    killer.start()
    frame = sweep.table(draw, tasks, folder=folder, progress=False)
    killer.join()
    assert dask_cluster[0].wait() == -signal.SIGKILL
    assert dask_cluster[1].poll() is None
    expected = sweep.table(draw, tasks, executor="serial", folder=tmp_path / "serial", progress=False)
    assert bytes_of(frame, tmp_path, "dask") == bytes_of(expected, tmp_path, "serial")
    assert frame.seed.tolist() == list(range(8))
    assert frame.columns.tolist() == ["seed", "mean", "largest", "missing"]


def test_joblib_and_serial_write_the_same_bytes(tmp_path):
    frames = {
        executor: sweep.table(
            draw, TASKS, executor=executor, workers=2, folder=tmp_path / executor, progress=False
        )
        for executor in ("joblib", "serial")
    }
    texts = {name: bytes_of(frame, tmp_path, name) for name, frame in frames.items()}
    assert texts["joblib"] == texts["serial"]
    cached = [sorted(p.name for p in (tmp_path / name).glob("*.json")) for name in frames]
    assert cached[0] == cached[1]
    assert len(cached[0]) == len(TASKS)
    sample = np.random.default_rng(3).normal(size=1_000)
    assert frames["joblib"]["mean"][3] == sample.mean()


def test_without_an_address_dask_starts_its_own_workers(tmp_path, monkeypatch):
    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    monkeypatch.setenv("EXECUTOR", "dask")
    ours = sweep.run(draw, TASKS[:3], workers=1, folder=tmp_path / "dask", progress=False)
    assert repr(ours) == repr(
        sweep.run(draw, TASKS[:3], executor="serial", folder=tmp_path / "serial", progress=False)
    )


def test_a_stopped_sweep_goes_on_where_it_stopped(tmp_path):
    log = tmp_path / "log"
    tasks = [{**task, "log": str(log)} for task in TASKS]
    sweep.run(draw, tasks[:5], executor="serial", folder=tmp_path / "kept", progress=False)
    first = log.read_text().split()
    results = sweep.run(draw, tasks, executor="serial", folder=tmp_path / "kept", progress=False)
    assert first == ["0", "1", "2", "3", "4"]
    assert log.read_text().split() == [str(seed) for seed in range(8)]
    again = sweep.run(draw, tasks, executor="serial", folder=tmp_path / "kept", progress=False)
    assert len(log.read_text().split()) == 8
    assert repr(again) == repr(results)


def test_equal_tasks_run_once_and_keep_their_places(tmp_path):
    log = tmp_path / "log"
    tasks = [{"seed": s, "size": 10, "log": str(log)} for s in (1, 2, 1, 1, 2)]
    results = sweep.run(draw, tasks, executor="serial", folder=tmp_path, progress=False)
    assert [r["seed"] for r in results] == [1, 2, 1, 1, 2]
    assert log.read_text().split() == ["1", "2"]


def test_another_argument_or_another_code_is_another_result(tmp_path, monkeypatch):
    keys = {sweep._key(draw, {"seed": 1, "size": 10}), sweep._key(draw, {"seed": 1, "size": 11})}
    keys.add(sweep._key(several, {"seed": 1, "size": 10}))
    monkeypatch.setattr(sweep, "_fingerprint", lambda: "changed")
    keys.add(sweep._key(draw, {"seed": 1, "size": 10}))
    assert len(keys) == 4
    assert sweep._key(draw, {"seed": 1, "size": 10}) == sweep._key(draw, {"size": 10, "seed": 1})


def test_a_task_may_give_several_rows(tmp_path):
    frame = sweep.table(
        several, [{"count": 2}, {"count": 3}], executor="serial", folder=tmp_path, progress=False
    )
    assert frame["index"].tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("executor", ["serial", "joblib"])
def test_a_failing_task_is_named_and_the_others_kept(tmp_path, executor):
    tasks = [{"seed": s} for s in range(4)]
    with pytest.raises(sweep.SweepError, match=r'test_sweep.failing task {"seed": 2}: ZeroDivisionError'):
        sweep.run(failing, tasks, executor=executor, workers=1, folder=tmp_path, progress=False)
    assert len(list(tmp_path.glob("*.json"))) >= 2


def test_errors(tmp_path):
    with pytest.raises(ValueError, match="EXECUTOR is 'cloud'; expected one of joblib"):
        sweep.run(draw, TASKS, executor="cloud")
    with pytest.raises(TypeError, match=r"task {'seed': <object object.*JSON values only"):
        sweep.run(draw, [{"seed": object()}], folder=tmp_path)
