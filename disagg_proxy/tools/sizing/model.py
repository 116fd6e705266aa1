"""What a model's config.json says of its KV cache and of what a prompt costs to compute.

    KV of a token and layer   MHA, GQA, MQA:  2 x KV heads x head size values
                              MLA:            kv_lora_rank + qk_rope_head_dim values, once for all heads
    operations of n tokens    l (a n^2 d + b n d^2), as in the Mooncake paper (FAST '25, section 2.2): a = 4
                              for the products with K and with V (d: heads x head size), and b d^2 twice the
                              weights that a token meets in a layer; the paper has b = 22 for LLaMA3-70B

Layers differ: those with a sliding window keep its tokens only, those without attention (Mamba, linear
attention) have a state of fixed size and no KV. Weights are counted from the sizes in the file; experts count
as often as a token meets them. Embeddings and the head are left out: a prompt passes them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.core.errors import ConfigError

VALUE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # of models that also see or hear
# Of model types whose MLP has two matrices; all newer ones have a third, for the gate.
_OLD = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi")
UNGATED = frozenset((*_OLD, "nemotron", "starcoder2"))
FULL_KINDS = ("full_attention", "attention", "full", "global", "attention_full")
SLIDING_KINDS = ("sliding_attention", "sliding", "local", "chunked_attention")
COUNT_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class Layer:
    """count: of alike ones. kv_values: of a token; 0: none is kept. window: tokens that are kept, 0: all.
    width: values that a token's attention compares and sums for each other token (2 d; 0: without).
    weights: that a token meets."""

    count: int
    kv_values: int
    window: int
    width: int
    weights: int


@dataclass(frozen=True, slots=True)
class Model:
    """attention: MHA, GQA, MQA or MLA. value_bytes: of one value of KV."""

    name: str
    attention: str
    value_bytes: int
    layers: tuple[Layer, ...]

    @property
    def token_bytes(self) -> int:
        """KV of one token in the layers that keep all tokens."""
        return sum(
            layer.count * layer.kv_values * self.value_bytes for layer in self.layers if not layer.window
        )

    def kv_bytes(self, tokens: int) -> int:
        """KV of a prefix, of sliding layers their window."""
        return sum(
            layer.count * layer.kv_values * self.value_bytes * min(tokens, layer.window or tokens)
            for layer in self.layers
        )

    def operations(self, tokens: int) -> float:
        """Floating-point operations of computing a prefix."""
        return sum(
            layer.count
            * (
                2.0 * layer.weights * tokens
                + 2.0 * layer.width * tokens * min(tokens, layer.window or tokens)
            )
            for layer in self.layers
        )

    def link_bytes_s(self, tokens: int, operations_s: float) -> float:
        """How fast a link must be so that fetching a prefix takes as long as computing it."""
        return self.kv_bytes(tokens) * operations_s / self.operations(tokens)


def read_model(config: Mapping[str, Any], name: str, dtype: str = "auto") -> Model:
    """dtype: of the KV cache; auto: the model's own. Raises ConfigError that names what is missing or absurd,
    and for models that have no KV cache to share."""
    config = _text_part(config)
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise _bad(name, "is an encoder and a decoder: its KV is no prefix's, so nothing of it can be shared")
    count = _number(config, name, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    hidden = _number(config, name, "hidden_size", "n_embd", "d_model", "dim")
    heads = _number(config, name, "num_attention_heads", "n_head", "n_heads")
    if _is_mla(config):
        attention = "MLA"
        values, width, weights = _latent(config, name, hidden, heads)
    else:
        size = _head_size(config, name, hidden, heads)
        kv_heads = _kv_heads(config, name, kind, heads)
        attention = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        values, width = 2 * kv_heads * size, 2 * heads * size
        weights = 2 * hidden * (heads + kv_heads) * size
    layers: dict[tuple[int, int, int, int], int] = {}
    for keeps, dense in zip(_windows(config, name, count), _dense(config, name, count), strict=True):
        met = weights + (_mlp(config, name, kind, hidden) if dense else _experts(config, name, hidden))
        alike = (0, 0, 0, met) if keeps is None else (values, keeps, width, met)
        layers[alike] = layers.get(alike, 0) + 1
    if not any(values for values, *_ in layers):
        raise _bad(name, "has no layer with attention: there is no KV cache")
    return Model(
        name,
        attention,
        _value_bytes(config, name, dtype),
        tuple(Layer(count, *alike) for alike, count in layers.items()),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in NESTED:
        part = config.get(key)
        if isinstance(part, Mapping):
            types = {each: config[each] for each in ("torch_dtype", "dtype") if each in config}
            return _text_part({**types, **part})
    return config


def _is_mla(config: Mapping[str, Any]) -> bool:
    return config.get("kv_lora_rank") is not None


def _latent(config: Mapping[str, Any], name: str, hidden: int, heads: int) -> tuple[int, int, int]:
    """(values of a token, width of its attention, weights) with MLA. K and V are unfolded while a prompt is
    computed; only what they are made of is kept."""
    rank = _number(config, name, "kv_lora_rank")
    rope = _number(config, name, "qk_rope_head_dim")
    nope = _number(config, name, "qk_nope_head_dim")
    value = _number(config, name, "v_head_dim")
    asked = heads * (nope + rope)
    low = config.get("q_lora_rank")
    query = hidden * asked if low is None else (hidden + asked) * _number(config, name, "q_lora_rank")
    unfold = rank * heads * (nope + value)
    weights = query + hidden * (rank + rope) + unfold + heads * value * hidden
    return rank + rope, heads * (nope + rope + value), weights


def _head_size(config: Mapping[str, Any], name: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _number(config, name, "head_dim")
    if hidden % heads:
        raise _bad(name, f"has hidden_size {hidden}, which its {heads} heads do not divide, and no head_dim")
    return hidden // heads


def _kv_heads(config: Mapping[str, Any], name: str, kind: str, heads: int) -> int:
    for key in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"):
        if config.get(key) is not None and not (
            kind == "falcon" and not config.get("new_decoder_architecture")
        ):
            found = _number(config, name, key)
            if heads % found:
                raise _bad(name, f"has {heads} heads, which its {found} KV heads do not divide")
            return found
    return 1 if config.get("multi_query") else heads


def _windows(config: Mapping[str, Any], name: str, count: int) -> list[int | None]:
    """Of each layer the tokens that it keeps: 0 for all, None for a layer without KV."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and len(kinds) == count:
        return [_window(config, name, str(kind)) for kind in kinds]
    for every, offset in (("attn_layer_period", "attn_layer_offset"), ("full_attention_interval", "")):
        if config.get(every) is not None:
            period = _number(config, name, every)
            first = int(config.get(offset, 0)) if offset else period - 1
            return [0 if at % period == first else None for at in range(count)]
    drawn = config.get("hybrid_override_pattern")
    if isinstance(drawn, str) and len(drawn) == count:
        return [0 if letter == "*" else None for letter in drawn]
    pattern = config.get("sliding_window_pattern", 2 if config.get("model_type") == "gemma2" else None)
    if isinstance(pattern, int) and pattern > 1 and config.get("sliding_window"):
        window = _number(config, name, "sliding_window")
        return [0 if at % pattern == pattern - 1 else window for at in range(count)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return [_number(config, name, "sliding_window")] * count
    return [0] * count


def _window(config: Mapping[str, Any], name: str, kind: str) -> int | None:
    if kind in FULL_KINDS:
        return 0
    if kind in SLIDING_KINDS:
        return _number(config, name, "sliding_window", "attention_chunk_size")
    return None


def _dense(config: Mapping[str, Any], name: str, count: int) -> list[bool]:
    """Whether each layer has one MLP instead of experts."""
    if not any(config.get(key) for key in ("num_experts_per_tok", "experts_per_token")):
        return [True] * count
    first = int(config.get("first_k_dense_replace") or 0)
    only = config.get("mlp_only_layers")
    alone = set(only) if isinstance(only, list) else set()
    step = 1
    for key in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "expert_layer_period"):
        if isinstance(config.get(key), int):
            step = _number(config, name, key)
    return [at < first or at in alone or (at + 1) % step != 0 for at in range(count)]


def _mlp(config: Mapping[str, Any], name: str, kind: str, hidden: int) -> int:
    keys = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    found = [key for key in keys if config.get(key) is not None]
    inner = _number(config, name, found[0]) if found else 4 * hidden
    return (2 if kind in UNGATED else 3) * hidden * inner


def _experts(config: Mapping[str, Any], name: str, hidden: int) -> int:
    chosen = _number(config, name, "num_experts_per_tok", "experts_per_token")
    inner = _number(config, name, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = int(config.get("n_shared_experts") or 0) * inner
    shared += int(config.get("shared_expert_intermediate_size") or 0)
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    all_of_them = next((_number(config, name, key) for key in keys if config.get(key) is not None), chosen)
    return 3 * hidden * (chosen * inner + shared) + hidden * all_of_them


def _value_bytes(config: Mapping[str, Any], name: str, dtype: str) -> int:
    if dtype == "auto":
        own = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        dtype = str(own).removeprefix("torch.")
        if dtype not in VALUE_BYTES:
            raise _bad(
                name, f"has the dtype {dtype}; give that of its KV cache: --dtype bfloat16, fp8, float32"
            )
    if dtype not in VALUE_BYTES:
        raise ConfigError(
            f"--dtype is auto or one of {', '.join(VALUE_BYTES)}, not {dtype}", operation="plan", key="dtype"
        )
    return VALUE_BYTES[dtype]


def _number(config: Mapping[str, Any], name: str, *keys: str) -> int:
    """The first of these that is there."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < COUNT_MAX:
            raise _bad(name, f"has {key} = {value!r}, which is no positive number")
        return value
    raise _bad(name, f"does not say {' or '.join(keys)} in its config.json; is it a language model?")


def _bad(name: str, what: str) -> ConfigError:
    return ConfigError(f"{name} {what}", operation="plan", key="model")
