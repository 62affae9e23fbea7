"""vLLM's scheduler in virtual time: its decisions are its own, only the model is replaced by a clock.

A serving engine is a scheduler, which decides each iteration who computes how many tokens, and a model
that computes them. Here the scheduler and its KV manager are those of the installed ``vllm``; the model is
a `kvcache.engine.StepCost` that advances a clock. Nothing is computed, so a GPU is not needed and an hour of
a server takes a minute. Left out: prefixes shared between requests, speculative decoding, connectors, and
the CPU's own time. ``vllm`` is imported by :func:`drive` alone.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvcache.engine import StepCost

__all__ = ["TINY_LLAMA", "EngineRun", "drive"]

#: The configuration of a Llama too small to matter: the scheduler asks only for lengths.
TINY_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class EngineRun:
    """What a run of the scheduler gave.

    requests: one row each, in the order given: ``arrival_s, input_tokens, output_tokens, admitted_s,
    first_token_s, finish_s, preemptions, worst_gap_s`` (largest time between two tokens, or NaN for a
    single one) and ``recomputed_tokens`` (computed more than once); a request that the engine would refuse,
    since it fits neither its model length nor its pool, has NaN times. steps: iterations. seconds: from the
    first arrival to the last finish.
    """

    requests: pd.DataFrame
    steps: int
    seconds: float

    @property
    def preemptions(self) -> int:
        """Evictions of running requests, all together."""
        return int(self.requests["preemptions"].sum())

    def __repr__(self) -> str:
        return (
            f"{len(self.requests):,} requests: {self.steps:,} steps, {self.preemptions:,} preemptions, "
            f"{self.seconds:,.1f} s"
        )


def drive(
    requests: pd.DataFrame,
    *,
    pool: int,
    step_cost: StepCost,
    watermark: float = 0.0,
    scheduler: str | type = "Scheduler",
    block: int = 16,
    max_running: int = 256,
    max_batched_tokens: int = 2048,
    prefix_cache: bool = True,
    max_model_len: int = 8192,
    additional_config: Mapping[str, Any] | None = None,
) -> EngineRun:
    """Run vLLM's scheduler over ``requests`` (``arrival_s, input_tokens, output_tokens``, maybe ``class``).

    Parameters
    ----------
    pool : tokens of KV cache, rounded down to blocks of ``block`` tokens.
    step_cost : seconds of an iteration. Decoding are the requests that compute one token after their
        prompt; they hold the tokens that they had before the iteration. All other tokens are prefilled.
    watermark : vLLM's own, the share of blocks that an admission must leave free.
    scheduler : "Scheduler", "AsyncScheduler" (decides one iteration ahead, as vLLM does where the executor
        allows it), or a subclass of either.
    additional_config : handed to vLLM as it is; a scheduler of one's own reads it.

    Requests are served in the order of arrival, those of the same second in the order given; a class is
    handed to vLLM as the first part of the request's id, ``class/row``.

    Raises
    ------
    ImportError
        Without vLLM.
    RuntimeError
        If requests wait and the scheduler does nothing.
    """
    make = _Engine(
        blocks=pool // block,
        block=block,
        watermark=watermark,
        scheduler=scheduler,
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        prefix_cache=prefix_cache,
        max_model_len=max_model_len,
        additional_config=dict(additional_config or {}),
    )
    return make.run(requests, step_cost)


class _Engine:
    """A vLLM scheduler with its KV manager, and the requests that pass through it."""

    def __init__(
        self,
        *,
        blocks: int,
        block: int,
        watermark: float,
        scheduler: str | type,
        max_running: int,
        max_batched_tokens: int,
        prefix_cache: bool,
        max_model_len: int,
        additional_config: dict[str, Any],
    ) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched import async_scheduler
        from vllm.v1.core.sched import scheduler as plain
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        if isinstance(scheduler, str):
            known = {"Scheduler": plain.Scheduler, "AsyncScheduler": async_scheduler.AsyncScheduler}
            if scheduler not in known:
                raise ValueError(f"scheduler is {scheduler!r}; expected one of {', '.join(known)} or a class")
            scheduler = known[scheduler]
        self.ahead = int(issubclass(scheduler, async_scheduler.AsyncScheduler))
        self.limit = min(max_model_len, blocks * block)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(dict(TINY_LLAMA)), encoding="utf-8")
            config = EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="float32",
                enforce_eager=True,
                num_gpu_blocks_override=blocks + 1,
                watermark=watermark,
                max_num_seqs=max_running,
                max_num_batched_tokens=max_batched_tokens,
                max_model_len=max_model_len,
                enable_prefix_caching=prefix_cache,
                async_scheduling=bool(self.ahead),
                additional_config=additional_config,
            ).create_engine_config()
        # On a CPU the configuration asks for other blocks; and vLLM sets aside one block as empty.
        config.cache_config.block_size = block
        config.cache_config.num_gpu_blocks = blocks + 1
        spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block,
            log_stats=False,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(block, sha256) if prefix_cache else None

    def request(self, key: str, row: int, inputs: int, outputs: int, arrival: float) -> Any:
        """vLLM's request: no two share a token of their prompts, and it stops at its true length."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=key,
            prompt_token_ids=[row + 1] * inputs,
            sampling_params=SamplingParams(max_tokens=outputs, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival,
            block_hasher=self.hasher,
        )

    def run(self, requests: pd.DataFrame, step_cost: StepCost) -> EngineRun:
        from vllm.v1.outputs import ModelRunnerOutput

        arrival = requests["arrival_s"].to_numpy(float)
        inputs, outputs = (requests[name].to_numpy(int) for name in ("input_tokens", "output_tokens"))
        classes = requests["class"].astype(str) if "class" in requests else ["all"] * len(requests)
        keys = [f"{name}/{row}" for row, name in enumerate(classes)]
        rows = {key: row for row, key in enumerate(keys)}
        served = inputs + outputs <= self.limit
        coming = deque(int(row) for row in np.argsort(arrival, kind="stable") if served[row])

        admitted, first, finish, worst = (np.full(len(keys), np.nan) for _ in range(4))
        last = np.full(len(keys), np.nan)
        preemptions, computed = (np.zeros(len(keys), dtype=int) for _ in range(2))
        live: dict[str, Any] = {}
        flying: deque[tuple[Any, list[str], float]] = deque()
        clock, steps = (arrival[coming[0]] if coming else 0.0), 0

        while coming or live:
            while coming and arrival[coming[0]] <= clock:
                row = coming.popleft()
                live[keys[row]] = self.request(
                    keys[row], row, int(inputs[row]), int(outputs[row]), arrival[row]
                )
                self.scheduler.add_request(live[keys[row]])
            decision = self.scheduler.schedule() if live else None
            if decision is not None and decision.total_num_scheduled_tokens:
                decoding = cached = prefilled = 0
                sampled = []
                for key, tokens in decision.num_scheduled_tokens.items():
                    request = live[key]
                    before = request.num_computed_tokens - tokens
                    if tokens == 1 and before >= request.num_prompt_tokens:
                        decoding, cached = decoding + 1, cached + before
                    else:
                        prefilled += tokens
                    if not request.is_prefill_chunk:
                        sampled.append(key)
                    row = rows[key]
                    computed[row] += tokens
                    if np.isnan(admitted[row]):
                        admitted[row] = clock
                flying.append((decision, sampled, step_cost.seconds(decoding, cached, prefilled)))
                if len(flying) <= self.ahead:
                    continue
            elif not flying:
                if live and not coming:
                    raise RuntimeError(f"the scheduler does nothing while {len(live)} requests wait")
                clock = max(clock, arrival[coming[0]])
                continue
            decision, sampled, seconds = flying.popleft()
            clock, steps = clock + seconds, steps + 1
            order = {key: place for place, key in enumerate(decision.num_scheduled_tokens)}
            tokens = [[] for _ in order]
            for key in sampled:
                tokens[order[key]].append(0)
            self.scheduler.update_from_output(
                decision,
                ModelRunnerOutput(req_ids=list(order), req_id_to_index=order, sampled_token_ids=tokens),
            )
            for key in sampled:
                if (request := live.get(key)) is None:
                    continue
                row = rows[key]
                if np.isnan(first[row]):
                    first[row] = clock
                else:
                    worst[row] = np.fmax(worst[row], clock - last[row])
                last[row] = clock
                if request.is_finished():
                    finish[row] = clock
                    preemptions[row] = request.num_preemptions
                    del live[key]

        result = requests[["arrival_s", "input_tokens", "output_tokens"]].assign(
            admitted_s=admitted,
            first_token_s=first,
            finish_s=finish,
            preemptions=preemptions,
            worst_gap_s=worst,
            recomputed_tokens=np.where(served, computed - (inputs + outputs - 1), 0),
        )
        start = arrival[served].min() if served.any() else 0.0
        return EngineRun(result, steps, float(clock - start))
