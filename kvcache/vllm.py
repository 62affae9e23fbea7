"""A scheduler for vLLM that admits by the newsvendor of the pool.

    KVCACHE_POLICY=policy.json vllm serve MODEL --scheduler-cls kvcache.vllm.PooledScheduler

The policy is what `kvcache.engine.PoolPolicy` writes; it may also be named in vLLM's configuration, by
``--additional-config '{"kvcache_policy": "policy.json"}'``. It decides alone whether a waiting or preempted
request may enter while others run; everything else is vLLM's. A request's class is what its id (header
``X-Request-Id``) has before the first ``/``, else what the policy says of its priority; a request of no known
class follows the law of all. Without a policy that can be read, the scheduler warns once and admits as vLLM
does.

`vllm` is imported when ``PooledScheduler`` is asked for, not before.
"""

from __future__ import annotations

import logging
import math
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.engine import PoolPolicy

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as PooledScheduler

__all__ = ["POLICY", "PooledScheduler", "class_name"]

#: The environment variable that names the policy file.
POLICY = "KVCACHE_POLICY"

_log = logging.getLogger("vllm.kvcache")
_ENDPOINT = re.compile(r"^(chatcmpl|cmpl|resp|generate-tokens)-")


def class_name(request_id: str) -> str | None:
    """What an id has before its first ``/``, less the endpoint that vLLM puts in front; None without one."""
    name, slash, _ = _ENDPOINT.sub("", request_id).partition("/")
    return name if slash else None


class _Pooled:
    """Mixed into vLLM's scheduler: asks the policy before the KV manager gives a newcomer its blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        self._pool_tokens = (self.cache_config.num_gpu_blocks - 1) * self.block_size  # one is vLLM's own
        self._policy = self._read_policy()
        self._told = False
        if self._policy is None:
            return
        if self._policy.rule == "headroom":
            spare = math.ceil(self._policy.headroom / self.block_size)
            manager.watermark_blocks = max(manager.watermark_blocks, spare)
            return
        self._rule = self._policy.burst_rule(self._pool_tokens)
        allocate = manager.allocate_slots

        def admit_and_allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
            newcomer = request.status.name in ("WAITING", "PREEMPTED")
            if newcomer and self.running and not self._admits(request):
                return None
            return allocate(request, *args, **kwargs)

        manager.allocate_slots = admit_and_allocate

    def _read_policy(self) -> PoolPolicy | None:
        extra = getattr(self.vllm_config, "additional_config", None)
        path = extra.get("kvcache_policy") if isinstance(extra, dict) else None
        path = path or os.environ.get(POLICY)
        if not path:
            _log.warning("kvcache: no policy: %s is not set; admitting as vLLM does", POLICY)
            return None
        try:
            policy = PoolPolicy.read(path)
        except (OSError, ValueError) as error:
            _log.warning("kvcache: no policy: %s; admitting as vLLM does", error)
            return None
        if policy.headroom >= self._pool_tokens:
            _log.warning(
                "kvcache: no policy: %s keeps %.0f tokens free, the engine has %d; admitting as vLLM does",
                path,
                policy.headroom,
                self._pool_tokens,
            )
            return None
        if abs(policy.pool - self._pool_tokens) > max(policy.block, self.block_size):
            _log.warning(
                "kvcache: %s was made for a pool of %d tokens, the engine has %d; its headroom of %.0f "
                "tokens is kept, make it again for this pool",
                path,
                policy.pool,
                self._pool_tokens,
                policy.headroom,
            )
        _log.info(
            "kvcache: %s: rule %s, headroom %.0f of %d tokens, classes %s",
            path,
            policy.rule,
            policy.headroom,
            self._pool_tokens,
            ", ".join(policy.names),
        )
        return policy

    def _kind(self, request: Any) -> int:
        """The request's class, remembered with it."""
        kind = getattr(request, "_kvcache_kind", None)
        if kind is None:
            name = class_name(request.request_id)
            kind = request._kvcache_kind = self._policy.kind(name, request.priority)
            if kind == len(self._policy.names) and name is not None and not self._told:
                self._told = True
                _log.warning(
                    "kvcache: request %s is of class %r, unknown to the policy (%s); it and others like it "
                    "follow the law of all",
                    request.request_id,
                    name,
                    ", ".join(self._policy.names),
                )
        return kind

    def _admits(self, candidate: Any) -> bool:
        requests = [*self.running, candidate]
        prompt, age, kind = np.array(
            [(r.num_prompt_tokens, r.num_output_tokens, self._kind(r)) for r in requests]
        ).T
        return self._rule.admits(prompt, age, kind)


@cache
def _scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return type("PooledScheduler", (_Pooled, AsyncScheduler), {"__module__": __name__, "__doc__": __doc__})


def __getattr__(name: str) -> Any:
    if name == "PooledScheduler":
        return _scheduler()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
