"""What a policy tells the people who run the engines: groups to start, their limits, and who goes where."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from kvcache.hardware import ParallelConfig
from kvcache.policy import Policy, evaluate
from kvcache.problem import Problem

__all__ = ["FLAGS", "group_table", "launch_arguments", "routing_table"]

#: Command-line names of tensor parallelism, pipeline parallelism and the limit on running requests; and the
#: word that asks for prefix caching, where that is not always on. An engine gives its cached prefixes up when
#: memory is short, so none is told to do without.
FLAGS = {
    "vllm": (
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--max-num-seqs",
        "--enable-prefix-caching",
    ),
    "sglang": ("--tp-size", "--pp-size", "--max-running-requests", ""),
}


def group_table(problem: Problem, policy: Policy) -> pd.DataFrame:
    """The serving groups in use, one row per configuration.

    An engine does not reserve per request, but it does limit how many run at once. ``max_running`` is the
    largest number of requests whose reservations, at the mix that the routing sends there, fit beside the
    cached prefixes: (M_k - prefixes) over the mean reservation of a request in service. A limit below the
    policy's own ``running`` would make requests wait that the policy has memory for.

    Returns
    -------
    DataFrame
        ``config``, ``groups``, ``gpus`` (of all of them), ``kv_tokens`` (of one), ``mean_reservation``
        (tokens of a request in service, cached prefix taken off), ``running`` (requests in service in a
        group on average, by Little's law), ``max_running``, ``utilisation`` (v_k), ``caches_prefixes``.
    """
    measured = evaluate(problem, policy)
    rows = []
    for k in np.flatnonzero(policy.groups):
        config = problem.configs[k]
        running = problem.offered_loads[:, k] * policy.routing[:, k] / policy.groups[k]
        cached = policy.prefix_cache[:, k]
        held = policy.reservations - cached * problem.prefix_tokens
        mean = float(running @ held / running.sum()) if running.any() else float("nan")
        room = config.kv_tokens - float(cached @ problem.prefix_tokens)
        rows.append(
            {
                "config": config.name,
                "groups": int(policy.groups[k]),
                "gpus": int(policy.groups[k] * config.gpus),
                "kv_tokens": config.kv_tokens,
                "mean_reservation": mean,
                "running": float(running.sum()),
                "max_running": int(room / mean) if running.any() else 0,
                "utilisation": float(measured.utilisation[k]),
                "caches_prefixes": bool(cached.any()),
            }
        )
    return pd.DataFrame(rows)


def routing_table(problem: Problem, policy: Policy) -> pd.DataFrame:
    """Where each class goes: ``class``, ``reservation`` (tokens), ``rejected``, a share per configuration."""
    used = np.flatnonzero(policy.groups)
    table = pd.DataFrame(
        {
            "class": [c.name for c in problem.classes],
            "reservation": policy.reservations,
            "rejected": np.maximum(1 - policy.admission, 0.0),
        }
    )
    return table.assign(**{problem.configs[k].name: policy.routing[:, k] for k in used})


def launch_arguments(groups: pd.DataFrame, engine: str) -> dict[str, str]:
    """Command-line arguments with which to start one group of each configuration.

    Parameters
    ----------
    groups : of `group_table`; its configurations are named like ``TP4xPP2``.
    engine : a key of `FLAGS`.

    Raises
    ------
    ValueError
        For another engine, or a configuration whose name does not tell its parallelism.
    """
    if engine not in FLAGS:
        raise ValueError(f"engine is {engine!r}; expected one of {sorted(FLAGS)}")
    *names, caching = FLAGS[engine]
    arguments = {}
    for row in groups.itertuples():
        match = re.fullmatch(r"TP(\d+)xPP(\d+)", row.config)
        if match is None:
            example = ParallelConfig(4, 2).name
            raise ValueError(f"configuration {row.config!r}; expected a name such as {example}")
        values = (*match.groups(), max(row.max_running, 1))
        words = [f"{name} {value}" for name, value in zip(names, values, strict=True)]
        words += [caching] if caching and row.caches_prefixes else []
        arguments[row.config] = " ".join(words)
    return arguments
