"""The joint problem as data: request classes, serving configurations, costs, and the budget of GPUs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from numbers import Real
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.ambiguity import (
    AmbiguitySet,
    Contamination,
    CVaR,
    ScaleShift,
    Wasserstein1,
    WassersteinInf,
)
from kvcache.files import atomic_path
from kvcache.hardware import ServingConfig
from kvcache.lengths import LengthDistribution
from kvcache.queueing import mean_residual

__all__ = ["Costs", "Problem", "RequestClass"]

Floats = NDArray[np.float64]

# Utilisation stays below this, so that waits stay finite where there is no headroom.
_MAX_UTILISATION = 0.9999


def _check(condition: bool, what: str, found: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{what}: {found}; expected {expected}")


def _number(what: str, value: float) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"{what}: {value!r}, a {type(value).__name__}; expected a number")
    return value


def _all(what: str, values: tuple, kind: type) -> None:
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(f"{what}: {value!r}, a {type(value).__name__}; expected a {kind.__name__}")


@dataclass(frozen=True)
class RequestClass:
    """A class of requests that share an application, a prompt shape and a deadline.

    Parameters
    ----------
    name : unique label.
    arrival_rate : requests per second, > 0.
    input_tokens : prompt length L_in, tokens, > 0.
    prefix_tokens : shared cacheable prefix L_pre, tokens, within [0, input_tokens].
    latency_slo : deadline D for the mean response time, seconds, > 0.
    output : output lengths; ``output.upper`` is L_max.
    """

    name: str
    arrival_rate: float
    input_tokens: float
    prefix_tokens: float
    latency_slo: float
    output: LengthDistribution

    def __post_init__(self) -> None:
        where = f"class {self.name!r}"
        for name, unit in (
            ("arrival_rate", "requests/s"),
            ("input_tokens", "tokens"),
            ("latency_slo", "seconds"),
        ):
            value = _number(f"{where}: {name}", getattr(self, name))
            _check(0 < value < np.inf, f"{where}: {name}", value, f"> 0 {unit} and finite")
        _check(
            0 <= _number(f"{where}: prefix_tokens", self.prefix_tokens) <= self.input_tokens,
            f"{where}: prefix_tokens",
            self.prefix_tokens,
            f"within [0, input_tokens = {self.input_tokens}]",
        )
        _all(f"{where}: output", (self.output,), LengthDistribution)

    @property
    def max_output_tokens(self) -> int:
        """L_max, tokens: the support bound of the output length."""
        return self.output.upper


@dataclass(frozen=True)
class Costs:
    """Cost weights, in units of one wasted reserved token (the defaults are the paper's, A4 for ``gpu``).

    preemption (c_p) per preempted token; waste (c_w) per wasted token; slo per second of expected
    tardiness of a request; rejection per rejected request; gpu per GPU and second.
    """

    preemption: float = 10.0
    waste: float = 1.0
    slo: float = 5.0
    rejection: float = 5000.0
    gpu: float = 1.0

    def __post_init__(self) -> None:
        for name in ("preemption", "waste"):
            value = _number(f"costs: {name}", getattr(self, name))
            _check(0 < value < np.inf, f"costs: {name}", value, "> 0 and finite")
        for name in ("slo", "rejection", "gpu"):
            value = _number(f"costs: {name}", getattr(self, name))
            _check(0 <= value < np.inf, f"costs: {name}", value, ">= 0 and finite")

    @property
    def ratio(self) -> float:
        """rho = c_p / c_w."""
        return self.preemption / self.waste

    @property
    def fractile(self) -> float:
        """q* = rho / (1 + rho), the critical fractile."""
        return self.preemption / (self.preemption + self.waste)


@dataclass(frozen=True)
class Problem:
    """One joint reservation, routing, partition and prefix-caching problem (equation 6).

    Arrays derived from it use the order of ``classes`` (axis I) and ``configs`` (axis K).
    """

    classes: tuple[RequestClass, ...]
    configs: tuple[ServingConfig, ...]
    gpus: int
    costs: Costs = field(default_factory=Costs)
    headroom: float = 0.2
    ambiguity: AmbiguitySet = field(default_factory=lambda: Wasserstein1(0.15, relative=True))
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(self.classes))
        object.__setattr__(self, "configs", tuple(self.configs))
        _check(len(self.classes) > 0, "classes", "none", "at least one request class")
        _check(
            len(self.configs) > 0,
            "configs",
            "none",
            "at least one configuration; if weights fit no configuration, use more GPUs per group",
        )
        for what, values, kind in (
            ("classes", self.classes, RequestClass),
            ("configs", self.configs, ServingConfig),
            ("costs", (self.costs,), Costs),
            ("ambiguity", (self.ambiguity,), AmbiguitySet),
        ):
            _all(what, values, kind)
        for what, names in (
            ("classes", [c.name for c in self.classes]),
            ("configs", [c.name for c in self.configs]),
        ):
            repeated = sorted({n for n in names if names.count(n) > 1})
            _check(not repeated, f"{what}: repeated names", repeated, "each name once")
        whole = _number("gpus", self.gpus) >= 0 and self.gpus % 1 == 0
        _check(whole, "gpus", self.gpus, "a whole number >= 0")
        _check(0 <= _number("headroom", self.headroom) < np.inf, "headroom", self.headroom, ">= 0 and finite")

    # ---- arrays over classes ------------------------------------------------------------------

    @cached_property
    def arrival_rates(self) -> Floats:
        """(I,) requests/s."""
        return np.array([c.arrival_rate for c in self.classes], dtype=float)

    @cached_property
    def input_tokens(self) -> Floats:
        """(I,) L_in, tokens."""
        return np.array([c.input_tokens for c in self.classes], dtype=float)

    @cached_property
    def prefix_tokens(self) -> Floats:
        """(I,) L_pre, tokens."""
        return np.array([c.prefix_tokens for c in self.classes], dtype=float)

    @cached_property
    def max_output_tokens(self) -> Floats:
        """(I,) L_max, tokens."""
        return np.array([c.max_output_tokens for c in self.classes], dtype=float)

    @cached_property
    def latency_slos(self) -> Floats:
        """(I,) D, seconds."""
        return np.array([c.latency_slo for c in self.classes], dtype=float)

    # ---- arrays over configurations -----------------------------------------------------------

    @cached_property
    def group_gpus(self) -> NDArray[np.int64]:
        """(K,) n_k, GPUs of one group."""
        return np.array([c.gpus for c in self.configs], dtype=np.int64)

    @cached_property
    def kv_tokens(self) -> Floats:
        """(K,) M_k, KV capacity of one group, tokens."""
        return np.array([c.kv_tokens for c in self.configs], dtype=float)

    @cached_property
    def max_groups(self) -> NDArray[np.int64]:
        """(K,) the most groups of each configuration that the budget allows."""
        return self.gpus // self.group_gpus

    @cached_property
    def service_times(self) -> Floats:
        """(I, K) mean service time T_ik, seconds (equation 1)."""
        means = np.array([c.output.mean for c in self.classes])
        return np.column_stack([k.service_time(self.input_tokens, means) for k in self.configs])

    @cached_property
    def offered_loads(self) -> Floats:
        """(I, K) u_ik = lambda_i T_ik, requests in service if all of class i went to k (Little's law)."""
        return self.arrival_rates[:, None] * self.service_times

    @cached_property
    def queueing_factors(self) -> Floats:
        """(K,) phi_k, seconds, in W_k = phi_k v_k / (1 - v_k) (equation 7, choice A3).

        phi_k = E[T^2] / (2 E[T]) over the whole arrival mix, output variance included: it equals
        (1 + C2_k) Tbar_k / 2 with C2_k the squared coefficient of variation.
        """
        share = self.arrival_rates / self.arrival_rates.sum()
        variances = np.array([c.output.variance for c in self.classes])
        per_token = np.array([k.decode_s_per_token for k in self.configs])
        second = self.service_times**2 + variances[:, None] * per_token[None, :] ** 2
        return mean_residual(share @ self.service_times, share @ second)

    @cached_property
    def utilisation_bounds(self) -> Floats:
        """(K,) the largest v_k that (6e) allows: 1/(1 + kappa), more where cached prefixes take memory."""
        prefixes = np.minimum(self.prefix_tokens.sum() / self.kv_tokens, 1.0)
        return np.minimum((1 + self.headroom * prefixes) / (1 + self.headroom), _MAX_UTILISATION)

    # ---- reservation cost ---------------------------------------------------------------------

    def worst_case(self, i: int, eta: float | Floats) -> float | Floats:
        """WC_i(eta): worst-case preemption and waste cost of one request of class i.

        ``eta`` is an output reservation in tokens, or an array of them.
        """
        if isinstance(eta, np.ndarray):
            return self.ambiguity.worst_case(
                self.classes[i].output, eta, self.costs.preemption, self.costs.waste
            )
        return self._worst_case(i, float(eta))

    @cached_property
    def _worst_case(self) -> Callable[[int, float], float]:
        # Searches evaluate many policies that share their reservations.
        return lru_cache(maxsize=4096)(
            lambda i, eta: self.ambiguity.worst_case(
                self.classes[i].output, eta, self.costs.preemption, self.costs.waste
            )
        )

    def unconstrained_reservations(self) -> Floats:
        """(I,) eta that minimises WC_i when memory is free, tokens."""
        return np.array(
            [
                self.ambiguity.reservation(c.output, self.costs.preemption, self.costs.waste)
                for c in self.classes
            ]
        )

    def replace(self, **changes: object) -> Problem:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    # ---- JSON ---------------------------------------------------------------------------------

    def to_json(self, path: str | Path | None = None) -> str:
        """The problem as JSON text, also written to ``path`` when given; `from_json` reads it back."""
        document = {
            "name": self.name,
            "gpus": self.gpus,
            "headroom": self.headroom,
            "costs": dataclasses.asdict(self.costs),
            "ambiguity": {"set": type(self.ambiguity).__name__, **dataclasses.asdict(self.ambiguity)},
            "configs": [dataclasses.asdict(k) for k in self.configs],
            "classes": [
                {
                    **{f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name != "output"},
                    "output": {
                        "tokens": c.output.tokens.tolist(),
                        "weights": c.output.weights.tolist(),
                        "upper": c.output.upper,
                        "name": c.output.name,
                        "reconstructed": c.output.reconstructed,
                    },
                }
                for c in self.classes
            ],
        }
        text = json.dumps(document, indent=1)
        if path is not None:
            with atomic_path(Path(path)) as beside:
                beside.write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, source: str | Path) -> Problem:
        """Read what ``to_json`` wrote: a path, or the JSON text itself (which starts with a brace).

        Raises ValueError naming the field that is missing or malformed.
        """
        text = str(source)
        where = "JSON text"
        if not text.lstrip().startswith("{"):
            where = text
            text = Path(source).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} line {error.lineno}: not JSON ({error.msg})") from error
        try:
            choice = dict(document["ambiguity"])
            kind = choice.pop("set")
            known = {s.__name__: s for s in (Wasserstein1, WassersteinInf, CVaR, Contamination, ScaleShift)}
            if kind not in known:
                raise ValueError(f"{where}: ambiguity set {kind!r}; expected one of {sorted(known)}")
            return cls(
                classes=tuple(
                    RequestClass(**{**c, "output": LengthDistribution(**c["output"])})
                    for c in document["classes"]
                ),
                configs=tuple(ServingConfig(**k) for k in document["configs"]),
                gpus=document["gpus"],
                costs=Costs(**document["costs"]),
                headroom=document["headroom"],
                ambiguity=known[kind](**choice),
                name=document.get("name", ""),
            )
        except KeyError as error:
            raise ValueError(f"{where}: field {error} is missing") from error
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from error
