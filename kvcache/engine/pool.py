"""What a running engine is told about its pool: who may enter, as a file that its scheduler reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from kvcache.engine.bursts import BurstRule
from kvcache.engine.headroom import headroom, lundberg_exponent
from kvcache.engine.joint import JointLengths
from kvcache.engine.steps import StepCost
from kvcache.files import atomic_path
from kvcache.lengths import LengthDistribution

__all__ = ["PoolPolicy"]

SCHEMA = 1
RULES = ("bursts", "headroom")
_KEYS = ("pool", "theta", "headroom", "block", "rule", "classes")


@dataclass(frozen=True, eq=False)
class PoolPolicy:
    """The admission rule of one pool of paged memory.

    Parameters
    ----------
    pool : M, tokens, that the headroom was computed for.
    theta : the Lundberg exponent of the traffic, per token. headroom : u*, tokens.
    classes : name -> law of the output lengths. An engine tells a request's class by its name.
    shares : of the requests, one per class, for the law of requests whose class is not known.
    block : tokens per block.
    rule : "bursts" asks a `BurstRule`; "headroom" keeps u* tokens free, as a watermark does.
    priorities : priority -> class, for engines that are told a priority and no name.

    Raises
    ------
    ValueError
        For constants out of their range, no class, or a priority of an unknown class.
    """

    pool: int
    theta: float
    headroom: float
    classes: Mapping[str, LengthDistribution]
    shares: tuple[float, ...] = ()
    block: int = 16
    rule: str = "bursts"
    priorities: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("pool policy: no classes; expected at least one")
        object.__setattr__(self, "shares", tuple(self.shares) or (1.0,) * len(self.classes))
        if len(self.shares) != len(self.classes) or not all(0 < s < np.inf for s in self.shares):
            raise ValueError(
                f"pool policy: shares are {self.shares}; expected {len(self.classes)} numbers > 0"
            )
        if self.block != int(self.block) or self.block < 1 or not self.block <= self.pool < np.inf:
            raise ValueError(f"pool policy: {self.pool} tokens in blocks of {self.block}; expected a block")
        if not 0 <= self.headroom < self.pool:
            raise ValueError(
                f"pool policy: headroom is {self.headroom} tokens; expected within [0, {self.pool})"
            )
        if self.rule not in RULES:
            raise ValueError(f"pool policy: rule is {self.rule!r}; expected one of {', '.join(RULES)}")
        if not (0 <= self.theta < np.inf and (self.theta > 0 or self.rule == "headroom")):
            raise ValueError(f"pool policy: theta is {self.theta} per token; expected > 0 and finite")
        for priority, name in self.priorities.items():
            if name not in self.classes:
                raise ValueError(
                    f"pool policy: priority {priority} is class {name!r}; expected one of "
                    f"{', '.join(self.classes)}"
                )

    @classmethod
    def of(
        cls,
        classes: Mapping[str, JointLengths],
        pool: int,
        step_cost: StepCost,
        *,
        rates: Mapping[str, float] | None = None,
        block: int = 16,
        prefix_cache: bool = True,
        rule: str = "bursts",
        priorities: Mapping[int, str] | None = None,
    ) -> PoolPolicy:
        """From the lengths of the classes that share the pool.

        ``rates``, requests/s of each, weigh them; without, they are pooled by the requests behind them. Where
        nothing can overflow the headroom is 0 and it is the rule.
        """
        shares = [rates[name] if rates else law.total for name, law in classes.items()]
        mixed = JointLengths.mix(list(classes.values()), shares)
        theta = lundberg_exponent(mixed, block)
        return cls(
            pool=int(pool),
            theta=theta if np.isfinite(theta) else 0.0,
            headroom=float(headroom(mixed, pool, step_cost, block, prefix_cache)),
            classes={name: law.output_lengths for name, law in classes.items()},
            shares=tuple(float(share / sum(shares)) for share in shares),
            block=block,
            rule=rule if 0 < theta < np.inf else "headroom",
            priorities=dict(priorities or {}),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The classes, in order."""
        return tuple(self.classes)

    @cached_property
    def pooled(self) -> LengthDistribution:
        """The law of a request whose class is not known."""
        return LengthDistribution.mix(list(self.classes.values()), self.shares)

    def kind(self, name: str | None, priority: int | None = None) -> int:
        """Where in ``names`` a class is, by name or else priority; an unknown one is past the last."""
        name = name if name in self.classes else self.priorities.get(priority)
        return self.names.index(name) if name is not None else len(self.names)

    def burst_rule(self, pool: int | None = None) -> BurstRule:
        """The rule with the laws of the classes and, last, of all; for another pool if given."""
        laws = (*self.classes.values(), self.pooled)
        return BurstRule(laws, pool or self.pool, self.theta, self.headroom, self.block)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "kvcache_pool_policy": SCHEMA,
            "pool": int(self.pool),
            "block": int(self.block),
            "theta": float(self.theta),
            "headroom": float(self.headroom),
            "rule": self.rule,
            "priorities": {str(priority): name for priority, name in self.priorities.items()},
            "classes": [
                {
                    "name": name,
                    "share": float(share),
                    "upper": law.upper,
                    "tokens": law.tokens.tolist(),
                    "weights": law.weights.tolist(),
                }
                for (name, law), share in zip(self.classes.items(), self.shares, strict=True)
            ],
        }

    def write(self, path: str | PathLike[str]) -> None:
        """Write the policy as JSON; the file appears whole or not at all."""
        with atomic_path(path) as partial:
            Path(partial).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike[str]) -> PoolPolicy:
        """Read what `write` wrote.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If it is not JSON, or not such a policy; the message begins with the path.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:  # of JSON, or of the encoding
            raise ValueError(f"{path}: not JSON: {error}") from None
        try:
            return cls._from_dict(data)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def _from_dict(cls, data: Any) -> PoolPolicy:
        if not isinstance(data, dict) or data.get("kvcache_pool_policy") != SCHEMA:
            found = data.get("kvcache_pool_policy") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"kvcache_pool_policy is {found}; expected {SCHEMA}")
        missing = [key for key in _KEYS if key not in data]
        rows = data.get("classes") or []
        missing += [
            f"classes[{k}].{key}"
            for k, row in enumerate(rows)
            for key in ("name", "share", "upper", "tokens", "weights")
            if key not in row
        ]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing")
        return cls(
            pool=data["pool"],
            theta=data["theta"],
            headroom=data["headroom"],
            classes={
                row["name"]: LengthDistribution(
                    np.array(row["tokens"]), np.array(row["weights"], dtype=float), row["upper"], row["name"]
                )
                for row in rows
            },
            shares=tuple(row["share"] for row in rows),
            block=data["block"],
            rule=data["rule"],
            priorities={int(k): v for k, v in data.get("priorities", {}).items()},
        )
