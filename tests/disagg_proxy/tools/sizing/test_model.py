"""KV bytes and operations of models whose figures are published, and of files that are none."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.sizing.gpus import TFLOPS
from moonpool.disagg_proxy.tools.sizing.model import Layer, Model, read_model
from tests.disagg_proxy.tools.sizing.models import GEMMA_3, LLAMA_70B

OPT_125M = {
    "model_type": "opt",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "torch_dtype": "float16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
FALCON_7B = {
    "model_type": "falcon",
    "num_hidden_layers": 32,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "multi_query": True,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "attention", "token_bytes"),
    [
        (LLAMA_70B, "GQA", 2 * 80 * 8 * 128 * 2),
        (OPT_125M, "MHA", 2 * 12 * 768 * 2),
        (DEEPSEEK_V3, "MLA", 61 * 576 * 2),
        (MIXTRAL, "GQA", 2 * 32 * 8 * 128 * 2),
        (FALCON_7B, "MQA", 2 * 32 * 64 * 2),
    ],
)
def test_kv_of_a_token(config: dict[str, Any], attention: str, token_bytes: int) -> None:
    model = read_model(config, "it")
    assert (model.attention, model.token_bytes) == (attention, token_bytes)
    assert model.kv_bytes(1000) == 1000 * token_bytes
    assert read_model(config, "it", "fp8").token_bytes == token_bytes // 2


@pytest.mark.parametrize(
    ("config", "active"),
    [
        (LLAMA_70B, 70.6e9 - 2 * 128256 * 8192),  # all weights but embedding and head
        (OPT_125M, 85e6),
        (DEEPSEEK_V3, 37.0e9 - 2 * 129280 * 7168),
        (MIXTRAL, 12.9e9 - 2 * 32000 * 4096),
    ],
)
def test_weights_that_a_token_meets(config: dict[str, Any], active: float) -> None:
    """As published, within 3 %."""
    model = read_model(config, "it")
    assert sum(layer.count * layer.weights for layer in model.layers) == pytest.approx(active, rel=0.03)
    assert model.operations(1) == pytest.approx(2 * active, rel=0.03)


@pytest.mark.parametrize(("gpu", "gigabytes"), [("a800", 5.9), ("h800", 18.6)])
def test_the_papers_break_even(gpu: str, gigabytes: float) -> None:
    """LLaMA3-70B with a = 4, b = 22, eight GPUs, 8,192 tokens: section 2.2 prints 6 and 19 GB/s."""
    model = Model("paper", "GQA", 2, (Layer(80, 2 * 8 * 128, 0, 2 * 8192, 11 * 8192**2),))
    found = model.link_bytes_s(8192, 8 * TFLOPS[gpu] * 1e12)
    assert found / 1e9 == pytest.approx(gigabytes, abs=0.05)
    by_hand = 2 * 8192 * 2 * 8 * TFLOPS[gpu] * 1e12 / (8 * (4 * 8192 * 8192 + 22 * 8192**2))
    assert found == pytest.approx(by_hand)


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    model = read_model(GEMMA_3, "it")
    of_a_layer = 2 * 4 * 256 * 2
    assert model.token_bytes == 2 * of_a_layer  # every sixth of 12
    assert model.kv_bytes(100) == 12 * 100 * of_a_layer
    assert model.kv_bytes(10_000) == (2 * 10_000 + 10 * 512) * of_a_layer
    assert model.operations(20_000) < read_model(
        {**GEMMA_3["text_config"], "sliding_window": None}, "it"
    ).operations(20_000)


@pytest.mark.parametrize(
    ("more", "layers"),
    [
        ({"layer_types": ["full_attention"] * 60 + ["sliding_attention"] * 20, "sliding_window": 64}, 60),
        ({"layer_types": ["linear_attention", "full_attention"] * 40}, 40),
        ({"full_attention_interval": 4}, 20),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, 10),
        ({"hybrid_override_pattern": "M-M*" * 20}, 20),
        ({"sliding_window": 4096, "use_sliding_window": False}, 80),
        ({"sliding_window": 4096}, 0),
        ({"model_type": "gemma2", "sliding_window": 4096}, 40),
    ],
)
def test_layers_that_keep_all_tokens(more: dict[str, Any], layers: int) -> None:
    assert read_model({**LLAMA_70B, **more}, "it").token_bytes == layers * 4096


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"num_hidden_layers": None}, "does not say num_hidden_layers or n_layer"),
        ({"num_attention_heads": 0}, "no positive number"),
        ({"num_attention_heads": "64"}, "no positive number"),
        ({"hidden_size": True}, "no positive number"),
        ({"hidden_size": 8193}, "do not divide"),
        ({"num_key_value_heads": 7}, "do not divide"),
        ({"is_encoder_decoder": True}, "encoder and a decoder"),
        ({"torch_dtype": "int4"}, "give that of its KV cache"),
        ({"layer_types": ["mamba"] * 80}, "no layer with attention"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
)
def test_a_file_that_is_no_such_models(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_model({**LLAMA_70B, **wrong}, "it")


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        read_model(LLAMA_70B, "it", "int2")
