"""A plan as files: what starts it, what routes to it, and what tests it once it runs.

`write` makes a folder with

- ``launch.sh``: one command per group; ``launch.sh 3`` starts the third, ``launch.sh all`` all on this host;
- ``kubernetes.yaml``: a Deployment and a Service per kind of group;
- ``envoy.yaml``: a bootstrap of the Envoy proxy, which admits and splits each class as planned (a request
  says its class in the header `CLASS_HEADER`); not where prefill and decode are apart, since they need a
  router that moves the cache;
- ``requests.jsonl`` and ``loadtest.sh``: the held-out requests in Mooncake's layout, sent by AIPerf;
- ``plan.json``: everything, with where each figure is from, as `Plan.to_json` writes it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcache.files import atomic_path
from kvcache.planner.judge import arrivals
from kvcache.planner.launch import served_name

if TYPE_CHECKING:
    from kvcache.planner.plan import Plan

__all__ = ["CLASS_HEADER", "write"]

#: The request header by which a client, or what stands before the router, names the class.
CLASS_HEADER = "x-request-class"
#: Container images; vLLM's has ``--watermark`` from this version on.
IMAGES = {
    "vllm": "vllm/vllm-openai:v0.32.0",
    "sglang": "lmsysorg/sglang:latest",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:latest",
}
#: The most requests of a load test.
TESTED = 10_000
#: Envoy's fractions are whole numbers out of this.
MILLION = 1_000_000


def write(plan: Plan, folder: str | PathLike[str], port: int = 8000) -> list[Path]:
    """Write a plan's files, each whole or not at all; returns their paths.

    Parameters
    ----------
    folder : made where it is missing; files of an earlier plan are replaced.
    port : of the first group; the others count up from it. The router listens on the one before.
    """
    texts = {
        "launch.sh": _launcher(plan, port),
        "kubernetes.yaml": _documents(_manifests(plan)),
        "envoy.yaml": None if _apart(plan) else _documents([_envoy(plan, port)]),
        "requests.jsonl": _requests(plan),
        "loadtest.sh": _load_test(plan, port),
    }
    written = []
    for name, text in texts.items():
        path = Path(folder) / name
        if text is None:
            path.unlink(missing_ok=True)
            continue
        with atomic_path(path) as partial:
            partial.write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                partial.chmod(0o755)
        written.append(path)
    plan.to_json(Path(folder) / "plan.json")
    return [*written, Path(folder) / "plan.json"]


def _apart(plan: Plan) -> bool:
    return bool((plan.groups["phase"] != "both").any())


def _documents(documents: Sequence[dict]) -> str:
    """YAML documents. JSON is YAML, and needs no library to be written."""
    return "".join(f"---\n{json.dumps(document, indent=2)}\n" for document in documents)


# ---- starting -------------------------------------------------------------------------------------


def _launcher(plan: Plan, port: int) -> str:
    commands = plan.launch(port)
    sizes = np.repeat(plan.groups["gpus"] // plan.groups["groups"], plan.groups["groups"]).tolist()
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int).tolist()
    cases = []
    for i, (command, size, gpu) in enumerate(zip(commands, sizes, first, strict=True), start=1):
        devices = ",".join(str(gpu + g) for g in range(size))
        cases.append(f'    {i}) CUDA_VISIBLE_DEVICES="${{GPUS_OF_GROUP:-{devices}}}" exec {command} ;;')
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# {plan!r}",
            f"# {len(commands)} groups. On several hosts start each group where its GPUs are, for example",
            "# GPUS_OF_GROUP=0,1,2,3 ./launch.sh 5",
            "set -euo pipefail",
            "start() {",
            '  case "$1" in',
            *cases,
            f'    *) echo "group $1: expected 1 to {len(commands)}, or all" >&2; exit 2 ;;',
            "  esac",
            "}",
            'if [ "${1:-}" = all ]; then',
            f'  for group in $(seq {len(commands)}); do (start "$group") & done',
            "  wait",
            "else",
            '  start "${1:-none}"',
            "fi",
            "",
        ]
    )


def _manifests(plan: Plan) -> list[dict]:
    engine = plan.options.engine
    documents, at = [], 0
    commands = plan.launch(8000)
    for row in plan.groups.itertuples():
        words = shlex.split(commands[at])
        at += row.groups
        words[words.index("--port") + 1] = "8000"
        name = _dns(row.label)
        labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "kv-plan"}
        container = {
            "name": "engine",
            "image": IMAGES[engine],
            "command": words,
            "ports": [{"name": "http", "containerPort": 8000}],
            "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10},
            "resources": {"limits": {"nvidia.com/gpu": row.gpus // row.groups}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
        documents += [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": name, "labels": labels},
                "spec": {
                    "replicas": int(row.groups),
                    "selector": {"matchLabels": labels},
                    "template": {
                        "metadata": {"labels": labels},
                        "spec": {
                            "containers": [container],
                            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                        },
                    },
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name, "labels": labels},
                "spec": {"selector": labels, "ports": [{"name": "http", "port": 8000, "targetPort": "http"}]},
            },
        ]
    return documents


def _dns(label: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in label.lower()).strip("-")


# ---- routing --------------------------------------------------------------------------------------


def _envoy(plan: Plan, port: int) -> dict:
    """Per class a share that is answered 429, and the rest split over the kinds by weight."""
    labels = plan.groups["label"].tolist()
    routes = []
    for row in plan.routing.to_dict("records"):
        match = {
            "prefix": "/",
            "headers": [{"name": CLASS_HEADER, "string_match": {"exact": str(row["class"])}}],
        }
        routes += _class_routes(
            match, float(row["rejected"]), [float(row[label]) for label in labels], labels
        )
    shares = plan.routing[labels].to_numpy() * plan.routing[["rate"]].to_numpy()
    admitted = shares.sum() / plan.routing["rate"].sum()
    routes += _class_routes({"prefix": "/"}, max(0.0, 1 - admitted), shares.sum(axis=0).tolist(), labels)
    clusters, at = [], port
    for row in plan.groups.itertuples():
        ends = [{"endpoint": {"address": _address("127.0.0.1", at + g)}} for g in range(int(row.groups))]
        at += int(row.groups)
        clusters.append(
            {
                "name": _dns(row.label),
                "type": "STATIC",
                "connect_timeout": "5s",
                "lb_policy": "LEAST_REQUEST",
                "load_assignment": {"cluster_name": _dns(row.label), "endpoints": [{"lb_endpoints": ends}]},
            }
        )
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "requests",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {
        "name": "router",
        "address": _address("0.0.0.0", port - 1),
        "filter_chains": [{"filters": filters}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _address(host: str, port: int) -> dict:
    return {"socket_address": {"address": host, "port_value": port}}


def _class_routes(match: dict, rejected: float, shares: list[float], labels: list[str]) -> list[dict]:
    routes = []
    part = round(rejected * MILLION)
    if part:
        fraction = {"default_value": {"numerator": part, "denominator": "MILLION"}}
        full = {"status": 429, "body": {"inline_string": "beyond the planned capacity; try again later\n"}}
        routes.append({"match": {**match, "runtime_fraction": fraction}, "direct_response": full})
    if part < MILLION:
        whole = sum(shares)
        weights = [
            {"name": _dns(label), "weight": max(1, round(share / whole * MILLION))}
            for label, share in zip(labels, shares, strict=True)
            if share > 0
        ]
        routes.append(
            {"match": match, "route": {"weighted_clusters": {"clusters": weights}, "timeout": "0s"}}
        )
    return routes


# ---- testing --------------------------------------------------------------------------------------


def _requests(plan: Plan) -> str:
    """The requests that judged the plan, in order, at the rate that was planned for."""
    half = plan.workload.judging
    rng = np.random.default_rng(plan.options.seed)
    table = arrivals(half, plan.workload.rates, min(len(half), TESTED), rng)
    return "".join(
        json.dumps(
            {
                "timestamp": int(1000 * row.arrival_s),
                "input_length": int(row.input_tokens),
                "output_length": int(row.output_tokens),
            }
        )
        + "\n"
        for row in table.itertuples()
    )


def _load_test(plan: Plan, port: int) -> str:
    model = served_name(plan.draft.kinds[plan.draft.used[0]].serving)
    o = plan.options
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Sends the held-out requests to the running plan, at their times, and reports percentiles.",
            f"# Planned: {o.share:.0%} of the admitted in TTFT {o.ttft:g} s, {1e3 * o.tpot:g} ms a token.",
            "# Needs AIPerf (the package aiperf). URL=... for another router or a single group.",
            "set -euo pipefail",
            'cd "$(dirname "$0")"',
            f'aiperf profile --model {shlex.quote(model)} --url "${{URL:-http://127.0.0.1:{port - 1}}}" \\',
            "  --endpoint-type completions --streaming \\",
            "  --input-file requests.jsonl --custom-dataset-type mooncake_trace --fixed-schedule \\",
            f'  --goodput "time_to_first_token:{1e3 * o.ttft:g} inter_token_latency:{1e3 * o.tpot:g}"',
            "",
        ]
    )
