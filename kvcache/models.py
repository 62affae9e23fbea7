"""Models as their Hugging Face ``config.json`` describes them: shapes, weights, cache and quantisation.

Nothing is fetched: a model is a file, a folder that holds one, or a name that ``aiconfigurator-core``
carries. Weights are counted from the shapes, so an architecture whose shapes are not known here is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from kvcache.hardware import CacheLayers, Model

__all__ = ["ARCHITECTURES", "ModelError", "carried_models", "read_model"]


class ModelError(ValueError):
    """A model that cannot be described, with what was missing."""


@dataclass(frozen=True)
class Architecture:
    """What a config does not say about the layers of an architecture.

    Parameters
    ----------
    qkv_bias, output_bias : biases on the projections; None where ``attention_bias`` decides.
    head_norms : ``head`` for a norm of one head on queries and keys, ``all`` for one over all heads.
    norms : norms of the layer's width in a layer.
    tied : whether embedding and head are one where the config does not say.
    sinks : whether a head learns an attention sink.
    expert_bias : whether the experts and their router have biases.
    router_bias : whether the router has a correction per expert.
    gated : whether a query carries a gate of its own size.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    head_norms: str | None = None
    norms: int = 2
    tied: bool = False
    sinks: bool = False
    expert_bias: bool = False
    router_bias: bool = False
    gated: bool = False


_LLAMA = Architecture()
_QWEN2 = Architecture(qkv_bias=True, output_bias=False)
_QWEN3 = Architecture(head_norms="head")
_DEEPSEEK = Architecture(router_bias=True)
_QWEN35 = Architecture(qkv_bias=False, output_bias=False, head_norms="head", gated=True)

#: The architectures whose weights can be counted.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Mistral3ForConditionalGeneration": _LLAMA,
    "Phi3ForCausalLM": _LLAMA,
    "GraniteForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2,
    "MiMoForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Gemma2ForCausalLM": Architecture(norms=4, tied=True),
    "Gemma3ForCausalLM": Architecture(norms=4, tied=True, head_norms="head"),
    "Gemma3ForConditionalGeneration": Architecture(norms=4, tied=True, head_norms="head"),
    "MixtralForCausalLM": _LLAMA,
    "Qwen2MoeForCausalLM": _QWEN2,
    "Qwen3MoeForCausalLM": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Glm4MoeForCausalLM": Architecture(output_bias=False, router_bias=True),
    "MiniMaxM2ForCausalLM": Architecture(
        qkv_bias=False, output_bias=False, head_norms="all", router_bias=True
    ),
    "GptOssForCausalLM": Architecture(qkv_bias=True, output_bias=True, sinks=True, expert_bias=True),
    "DeepseekV2ForCausalLM": _LLAMA,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": _DEEPSEEK,
    "KimiK25ForConditionalGeneration": _DEEPSEEK,
    "Qwen3_5ForConditionalGeneration": _QWEN35,
    "Qwen3_5MoeForConditionalGeneration": _QWEN35,
}

#: Bits of a quantised weight, with its scales, where the format fixes the group.
_FORMATS = {
    "fp8": 8.0,
    "fbgemm_fp8": 8.0,
    "mxfp4": 4.25,
    "NVFP4": 4.5,
    "FP8": 8.0,
    "INT8": 8.0,
}


def carried_models() -> dict[str, Path]:
    """Names that ``aiconfigurator-core`` carries a config of, each with its file; none where it is absent."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        return {}
    found = Path(spec.origin).parent.joinpath("model_configs").glob("*_config.json")
    return {
        path.name.removesuffix("_config.json").replace("--", "/", 1): path
        for path in sorted(found)
        if not path.name.endswith("_hf_quant_config.json")
    }


def _base_name(name: str) -> str:
    """A name without its organisation, its case, ``Meta-`` and ``-Instruct``: tuning changes no shape."""
    return name.split("/")[-1].lower().removeprefix("meta-").removesuffix("-instruct")


def read_model(source: str | Path, *, name: str | None = None) -> Model:
    """Describe a model from its ``config.json``.

    Parameters
    ----------
    source : a ``config.json``, a folder that holds one (and perhaps ``hf_quant_config.json``), or a name
        such as ``Qwen/Qwen3-32B`` that ``aiconfigurator-core`` carries, or that differs from the one name
        carried only by its organisation, its case, ``Meta-`` or ``-Instruct``.
    name : label; the name or the folder's by default.

    Raises
    ------
    ModelError
        For a name that is not carried, a file that is no config, an architecture whose weights cannot be
        counted here, or fields that are missing, which it names.
    """
    carried = carried_models()
    path = Path(source)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        quantised = file.with_name("hf_quant_config.json")
        known = str(file.parent) if file.name == "config.json" else None
        label = name or (file.parent.name if file.name == "config.json" else file.stem)
    else:
        alike = [k for k in carried if _base_name(k) == _base_name(str(source))]
        known = str(source) if str(source) in carried else alike[0] if len(alike) == 1 else None
        if known is None:
            near = alike or get_close_matches(str(source), carried, n=3, cutoff=0.5)
            have = (
                f"none of the {len(carried)} names carried"
                if carried
                else "aiconfigurator-core is not installed"
            )
            hint = f" (the nearest: {', '.join(near)})" if near else ""
            raise ModelError(
                f"model {source}: no such file or folder, and {have}{hint}; "
                "give the folder with its config.json"
            )
        file = carried[known]
        quantised = file.with_name(file.name.replace("_config.json", "_hf_quant_config.json"))
        label = name or str(source)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        quantisation = json.loads(quantised.read_text(encoding="utf-8")) if quantised.is_file() else {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"model {label}: {file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"model {label}: {file} holds a {type(config).__name__}; expected an object")
    model = describe(config, label, quantisation.get("quantization") or {})
    return replace(model, source=known)


def describe(config: Mapping, name: str, quantisation: Mapping | None = None) -> Model:
    """The model that a parsed ``config.json`` describes; see `read_model`."""
    fields = _Fields(name, config)
    architecture = fields.architecture()
    shape = _count(fields, architecture)
    bits, cache_bits = _bits(fields, quantisation or {}, shape)
    if indexer := fields.get("index_head_dim"):
        # An indexer's keys have 8 bits and a scale of 32, whatever the rest of the cache has.
        numbers = (8 * indexer + 32) / cache_bits
        shape.cache = tuple(replace(group, latent=group.latent + round(numbers)) for group in shape.cache)
    total = sum(shape.weights.values())
    return Model(
        name,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        parameters=total,
        bytes_per_weight=sum(n * bits[part] for part, n in shape.weights.items()) / 8 / total,
        bytes_per_kv=cache_bits / 8,
        cache=shape.cache,
        state_bytes=shape.state_bytes,
        active_parameters=total - shape.idle if shape.idle else None,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token,
        expert_parameters=shape.weights["experts"],
        hidden_size=fields.whole("hidden_size"),
        vocabulary=fields.whole("vocab_size"),
        max_position=fields.get("max_position_embeddings"),
    )


class _Fields:
    """A config's fields, with what was missing remembered by name."""

    def __init__(self, name: str, config: Mapping) -> None:
        self.name = name
        self.outer = config
        inner = config.get("text_config")
        self.config = inner if isinstance(inner, Mapping) else config

    def architecture(self) -> Architecture:
        names = self.outer.get("architectures") or self.config.get("architectures") or []
        for name in names:
            if name in ARCHITECTURES:
                return ARCHITECTURES[name]
        if not names:
            raise ModelError(f"model {self.name}: config lacks architectures")
        needed = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        missing = [field for field in needed if self.get(field) is None]
        also = f"; its config lacks {', '.join(missing)} too" if missing else ""
        raise ModelError(
            f"model {self.name}: the weights of {names[0]} cannot be counted{also}; expected one of "
            f"{', '.join(ARCHITECTURES)}, or a Model with its own numbers"
        )

    def get(self, *names: str, default: object = None) -> object:
        """The first of the names that the config has, within ``text_config`` first."""
        for source in (self.config, self.outer):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def whole(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if value is None:
            raise ModelError(f"model {self.name}: config lacks {' and '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"model {self.name}: {names[0]} is {value!r}; expected a whole number")
        return value


@dataclass
class _Shape:
    """Weights by part, and what the layers keep of a token."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    weights: dict[str, int]
    cache: tuple[CacheLayers, ...] = ()
    state_bytes: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    idle: int = 0


def _count(fields: _Fields, architecture: Architecture) -> _Shape:
    hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    heads, vocabulary = fields.whole("num_attention_heads"), fields.whole("vocab_size")
    latent = fields.get("kv_lora_rank") is not None
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    head_size = fields.whole("head_dim", default=hidden // heads) if not latent else 0
    tied = fields.get("tie_word_embeddings", default=architecture.tied)
    kinds = _layer_kinds(fields, layers)
    attention = {
        "linear": _linear_attention,
        "full": _latent_attention if latent else _attention,
        "window": _attention,
    }
    shape = _Shape(
        layers,
        heads,
        1 if latent else kv_heads,
        head_size or fields.whole("v_head_dim"),
        dict.fromkeys(("embedding", "head", "norms", "attention", "dense", "shared", "experts", "router"), 0),
    )
    weights = shape.weights
    weights["embedding"] = vocabulary * hidden
    weights["head"] = 0 if tied else vocabulary * hidden
    weights["norms"] = hidden * (1 + layers * architecture.norms)
    for kind in ("full", "window", "linear"):
        if number := kinds.count(kind):
            weights["attention"] += number * attention[kind](fields, architecture, hidden, heads, kv_heads)
    _count_experts(fields, architecture, shape, hidden, layers)
    window = fields.get("sliding_window") if "window" in kinds else None
    numbers = fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim") if latent else 0
    cache = [
        CacheLayers(kinds.count(kind), 1 if latent else kv_heads, shape.head_size, limit, numbers)
        for kind, limit in (("full", None), ("window", window))
        if kinds.count(kind)
    ]
    if latent or len(cache) > 1 or "linear" in kinds or window:
        shape.cache = tuple(cache)
    if states := kinds.count("linear"):
        shape.state_bytes = states * _state_bytes(fields)
    return shape


def _layer_kinds(fields: _Fields, layers: int) -> list[str]:
    """``full``, ``window`` or ``linear`` for every layer."""
    names = {
        "full_attention": "full",
        "attention": "full",
        "sliding_attention": "window",
        "linear_attention": "linear",
    }
    types = fields.get("layer_types")
    if types:
        unknown = sorted(set(types) - set(names))
        if unknown or len(types) != layers:
            raise ModelError(
                f"model {fields.name}: layer_types has {len(types)} entries with {unknown or 'known names'}; "
                f"expected {layers} of {sorted(names)}"
            )
        kinds = [names[kind] for kind in types]
    elif fields.get("linear_num_value_heads") is not None:
        every = fields.whole("full_attention_interval")
        kinds = ["full" if (i + 1) % every == 0 else "linear" for i in range(layers)]
    elif fields.get("sliding_window") is None or fields.get("use_sliding_window", default=True) is False:
        kinds = ["full"] * layers
    elif fields.get("sliding_window_pattern") is not None:
        every = fields.whole("sliding_window_pattern")
        kinds = ["full" if (i + 1) % every == 0 else "window" for i in range(layers)]
    elif "Gemma2ForCausalLM" in (fields.outer.get("architectures") or ()):
        kinds = ["window" if i % 2 == 0 else "full" for i in range(layers)]
    elif fields.get("max_window_layers") is not None:
        first = min(layers, fields.whole("max_window_layers"))
        kinds = ["full"] * first + ["window"] * (layers - first)
    else:
        kinds = ["window"] * layers
    if "window" in kinds and fields.get("sliding_window") is None:
        raise ModelError(
            f"model {fields.name}: layer_types has sliding windows, but config lacks sliding_window"
        )
    return kinds


def _attention(fields: _Fields, of: Architecture, hidden: int, heads: int, kv_heads: int) -> int:
    size = fields.whole("head_dim", default=hidden // heads)
    bias = bool(fields.get("attention_bias", default=False))
    queries, keys = heads * size * (2 if of.gated else 1), kv_heads * size
    count = hidden * (queries + 2 * keys) + heads * size * hidden
    count += (queries + 2 * keys) * (bias if of.qkv_bias is None else of.qkv_bias)
    count += hidden * (bias if of.output_bias is None else of.output_bias)
    use_norm = fields.get("use_qk_norm", default=False) and of.head_norms is None
    if of.head_norms == "head" or use_norm:
        count += 2 * size
    elif of.head_norms == "all":
        count += heads * size + keys
    return count + heads * of.sinks


def _latent_attention(fields: _Fields, of: Architecture, hidden: int, heads: int, kv_heads: int) -> int:
    rank, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
    nope, value = fields.whole("qk_nope_head_dim"), fields.whole("v_head_dim")
    query_rank = fields.get("q_lora_rank")
    queries = heads * (nope + rope)
    count = query_rank * (hidden + 1 + queries) if query_rank else hidden * queries
    count += hidden * (rank + rope) + rank + rank * heads * (nope + value) + heads * value * hidden
    if (size := fields.get("index_head_dim")) is not None:
        index_heads = fields.whole("index_n_heads")
        count += query_rank * index_heads * size + hidden * size + 2 * size + hidden * index_heads
    return count


def _linear_attention(fields: _Fields, of: Architecture, hidden: int, heads: int, kv_heads: int) -> int:
    """A gated delta rule: projections, a short convolution, decay and step per head, a gated norm."""
    key_heads, value_heads = fields.whole("linear_num_key_heads"), fields.whole("linear_num_value_heads")
    keys = key_heads * fields.whole("linear_key_head_dim")
    value_size = fields.whole("linear_value_head_dim")
    values = value_heads * value_size
    mixed = 2 * keys + values
    count = hidden * (mixed + values + 2 * value_heads) + mixed * fields.whole("linear_conv_kernel_dim")
    return count + 2 * value_heads + value_size + values * hidden


def _state_bytes(fields: _Fields) -> float:
    """Bytes of one linear layer's state: a matrix per head, and the inputs of its convolution."""
    keys = fields.whole("linear_num_key_heads") * fields.whole("linear_key_head_dim")
    heads, size = fields.whole("linear_num_value_heads"), fields.whole("linear_value_head_dim")
    width = 4 if fields.get("mamba_ssm_dtype") == "float32" else 2
    matrix = heads * size * fields.whole("linear_key_head_dim") * width
    return matrix + 2 * (2 * keys + heads * size) * (fields.whole("linear_conv_kernel_dim") - 1)


def _count_experts(fields: _Fields, of: Architecture, shape: _Shape, hidden: int, layers: int) -> None:
    """Add the feed-forward weights: dense, shared, of the experts and of their routers."""
    weights = shape.weights
    experts = fields.whole("num_local_experts", "n_routed_experts", "num_experts", default=0)
    dense = layers
    if experts:
        first = fields.whole("first_k_dense_replace", default=0)
        step = fields.whole("decoder_sparse_step", "moe_layer_freq", default=1)
        only = set(fields.get("mlp_only_layers", default=()))
        sparse = [i for i in range(layers) if i >= first and i not in only and (i + 1) % step == 0]
        dense = layers - len(sparse)
        inner = fields.whole("moe_intermediate_size", "intermediate_size")
        one = 3 * hidden * inner + (2 * inner + hidden) * of.expert_bias
        shape.experts = experts
        shape.experts_per_token = fields.whole("num_experts_per_tok", "top_k_experts")
        weights["experts"] = len(sparse) * experts * one
        shape.idle = len(sparse) * (experts - shape.experts_per_token) * one
        weights["router"] = len(sparse) * experts * (hidden + of.expert_bias + of.router_bias)
        shared = fields.get("shared_expert_intermediate_size")
        if shared is not None:
            weights["shared"] = len(sparse) * hidden * (3 * shared + 1)
        else:
            number = fields.whole("n_shared_experts", default=0)
            weights["shared"] = len(sparse) * number * 3 * hidden * inner
    if dense:
        inner = fields.whole("intermediate_size")
        biases = (2 * inner + hidden) * bool(fields.get("mlp_bias", default=False))
        weights["dense"] = dense * (3 * hidden * inner + biases)


def _bits(fields: _Fields, separate: Mapping, shape: _Shape) -> tuple[dict[str, float], float]:
    """Bits of a weight of each part, and of a cached number."""
    kind = fields.get("torch_dtype", "dtype", default="bfloat16")
    plain = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}.get(kind)
    if plain is None:
        raise ModelError(
            f"model {fields.name}: torch_dtype is {kind!r}; expected bfloat16, float16 or float32"
        )
    plain = min(plain, 16.0)  # engines serve 32-bit checkpoints in 16 bits
    bits = dict.fromkeys(shape.weights, plain)
    config = fields.get("quantization_config") or separate
    if not config:
        return bits, plain
    low = _quantised_bits(fields.name, config)
    kept = [
        *(config.get("modules_to_not_convert") or ()),
        *(config.get("ignore") or ()),
        *(config.get("exclude_modules") or ()),
    ]
    patterns = {
        "attention": r"attn(\*|\.\*)*$|self_attn\.(q|qkv|o|q_a|kv_a\w*)_proj",
        "shared": r"shared_expert(s)?(\*|\.\*|\.\w+)*$",
        "dense": r"\.mlp(\*|\.\*)?$|mlp\\?\.\(?gate\|up|mlp\.(gate_up|down|up)_proj",
        "experts": r"experts(\*|\.\*)?$",
    }
    for part, pattern in patterns.items():
        named = [entry for entry in kept if re.search(pattern, entry)]
        if part == "experts":
            named = [entry for entry in named if "shared" not in entry]
        bits[part] = plain if named else low
    return bits, 8.0 if _eight_bit_cache(config) else plain


def _quantised_bits(name: str, config: Mapping) -> float:
    method, algorithm = config.get("quant_method"), config.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        raise ModelError(
            f"model {name}: its layers have several precisions; expected one, or a Model of your own"
        )
    groups = config.get("config_groups")
    if algorithm in _FORMATS:
        return _FORMATS[algorithm]
    if method in _FORMATS:
        return _FORMATS[method]
    if groups:
        weights = next(iter(groups.values()))["weights"]
        number, group = weights["num_bits"], weights.get("group_size")
        return number + (16 / group if group and number < 8 else 0)
    if method in ("awq", "gptq", "gptq_marlin", "auto-round"):
        number, group = config.get("bits") or config.get("w_bit"), config.get("group_size", 128)
        if number is None:
            raise ModelError(f"model {name}: quantization_config lacks bits")
        return number + (16 + number) / group if group > 0 else number
    if method == "bitsandbytes":
        return 4.5 if config.get("load_in_4bit") else 8.0
    raise ModelError(
        f"model {name}: quantization_config has quant_method {method!r}, quant_algo {algorithm!r}; expected "
        f"fp8, mxfp4, awq, gptq, bitsandbytes, compressed-tensors or modelopt's FP8 or NVFP4"
    )


def _eight_bit_cache(config: Mapping) -> bool:
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8
    return "FP8" in (scheme, config.get("kv_cache_quant_algo"))
