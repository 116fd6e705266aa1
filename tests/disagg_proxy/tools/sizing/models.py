"""Configurations of real models."""

from __future__ import annotations

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "torch_dtype": "bfloat16",
}
GEMMA_3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 4096,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "vision_config": {"num_hidden_layers": 27},
}
