"""Command lines: every assumption of a plan is a flag; what the engine would refuse is never printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from kvcache.groups import ServingGroup
from kvcache.hardware import GPU

__all__ = ["command", "served_name", "server_limits"]


def server_limits(gpu: GPU) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) of a vLLM server that is told neither, as of vLLM 0.32."""
    if gpu.memory_bytes >= 160 * 2**30:
        return 16384, 1024
    if gpu.memory_bytes >= 70 * 2**30 and "a100" not in gpu.name.lower():
        return 8192, 1024
    return 2048, 256


def command(
    group: ServingGroup,
    *,
    watermark: float = 0.0,
    prefix_caching: bool = True,
    phase: str = "both",
    port: int = 8000,
) -> str:
    """The command line that starts one group.

    Parameters
    ----------
    group : what was planned with.
    watermark : share of the pool's blocks kept free when requests are admitted (vLLM only).
    prefix_caching : whether blocks are found again.
    phase : ``prefill`` and ``decode`` groups pass the cache on through NIXL (vLLM only).

    Raises
    ------
    ValueError
        For limits that the engine refuses: more running requests than tokens in an iteration, a model length
        beyond the pool; for a watermark outside [0, 1), and phases that an engine has no flags for here.
    """
    if group.max_num_seqs > group.max_num_batched_tokens:
        raise ValueError(
            f"{group.name}: max_num_seqs is {group.max_num_seqs}; expected at most max_num_batched_tokens = "
            f"{group.max_num_batched_tokens}, or the engine refuses to start"
        )
    if group.max_model_len > group.kv_tokens:
        raise ValueError(
            f"{group.name}: max_model_len is {group.max_model_len:,}; expected at most the pool's "
            f"{group.kv_tokens:,} tokens, or the engine refuses to start"
        )
    if not 0 <= watermark < 1:
        raise ValueError(f"{group.name}: watermark is {watermark}; expected within [0, 1)")
    if phase != "both" and group.engine != "vllm":
        raise ValueError(f"{group.name}: no flags are known here for {phase} groups of {group.engine}")
    words = _WORDS[group.engine](group, watermark, prefix_caching, phase, port)
    return shlex.join(str(word) for word in words)


def served_name(group: ServingGroup) -> str:
    """What the engine is told to load, and by default calls it: a folder that exists, else the name."""
    folder = group.model.source
    return folder if folder and Path(folder).exists() else group.model.name


def _vllm(
    group: ServingGroup, watermark: float, prefix_caching: bool, phase: str, port: int
) -> list[str | int]:
    words: list[str | int] = ["vllm", "serve", served_name(group)]
    words += ["--tensor-parallel-size", group.parallel.tensor]
    words += ["--pipeline-parallel-size", group.parallel.pipeline]
    if group.parallel.expert > 1:
        words.append("--enable-expert-parallel")
    words += ["--gpu-memory-utilization", f"{group.memory_utilisation:g}"]
    words += ["--kv-cache-dtype", group.cache_dtype]
    words += ["--max-model-len", group.max_model_len]
    words += ["--max-num-batched-tokens", group.max_num_batched_tokens]
    words += ["--max-num-seqs", group.max_num_seqs]
    words += ["--enable-chunked-prefill"]
    words += ["--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching"]
    words += ["--watermark", f"{watermark:.4g}"]
    if phase != "both":
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[phase]
        words += ["--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})]
    return [*words, "--port", port]


def _sglang(
    group: ServingGroup, watermark: float, prefix_caching: bool, phase: str, port: int
) -> list[str | int]:
    words: list[str | int] = ["python", "-m", "sglang.launch_server", "--model-path", served_name(group)]
    words += ["--tp-size", group.parallel.tensor, "--pp-size", group.parallel.pipeline]
    if group.parallel.expert > 1:
        words += ["--ep-size", group.parallel.expert]
    words += ["--mem-fraction-static", f"{group.memory_utilisation:g}"]
    words += ["--kv-cache-dtype", {"fp8": "fp8_e4m3"}.get(group.cache_dtype, group.cache_dtype)]
    words += ["--context-length", group.max_model_len]
    words += ["--chunked-prefill-size", group.max_num_batched_tokens]
    words += ["--max-running-requests", group.max_num_seqs]
    words += [] if prefix_caching else ["--disable-radix-cache"]
    return [*words, "--port", port]


def _trtllm(
    group: ServingGroup, watermark: float, prefix_caching: bool, phase: str, port: int
) -> list[str | int]:
    words: list[str | int] = ["trtllm-serve", served_name(group)]
    words += ["--tp_size", group.parallel.tensor, "--pp_size", group.parallel.pipeline]
    if group.parallel.expert > 1:
        words += ["--ep_size", group.parallel.expert]
    words += ["--kv_cache_free_gpu_memory_fraction", f"{group.memory_utilisation:g}"]
    words += ["--max_seq_len", group.max_model_len]
    words += ["--max_num_tokens", group.max_num_batched_tokens]
    words += ["--max_batch_size", group.max_num_seqs]
    return [*words, "--port", port]


_WORDS = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
