"""A model without weights on the disk: its config.json, and what an engine makes of vLLM's dummy weights.

vLLM's dummy loader draws every parameter from -0.001 to 0.001, norms too, so that all logits are about equal
and say nothing about the KV cache. Here norms are 1 and the rest is as large as in a trained model.

One seed gives parameters of one shape the same numbers, so all layers are alike already, and they can share
one layer's memory: several engines fit one card, and a step still reads as many bytes, since a layer is many
times the card's cache.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCALE = 20.0  # -0.02 to 0.02


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    dtype: str

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.layers * 2 * self.kv_heads * self.head_size * self._number_bytes

    @property
    def weights_bytes(self) -> int:
        mixing = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        layer = mixing + 3 * self.hidden * self.intermediate
        return (self.layers * layer + 2 * self.vocabulary * self.hidden) * self._number_bytes

    @property
    def _number_bytes(self) -> int:
        return {"bfloat16": 2, "float32": 4}[self.dtype]


def write_model(folder: Path, shape: Shape, context_tokens: int) -> Path:
    """A model that vLLM serves with load_format="dummy" and skip_tokenizer_init; its path."""
    path = folder / "dummy"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocabulary,
        "torch_dtype": shape.dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
        "use_cache": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def give_weights(share_layers: bool) -> None:
    """In the engine's process, before the engine is made: scales its dummy weights, and gives all layers the
    memory of the first."""
    from vllm.v1.worker.gpu_worker import Worker

    load_model = Worker.load_model

    def load_and_scale(self: Any, **arguments: Any) -> None:
        load_model(self, **arguments)
        scale(self.model_runner.get_model(), share_layers)

    Worker.load_model = load_and_scale


def scale(model: Any, share_layers: bool) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.mul_(SCALE)
    if share_layers:
        first, *others = model.model.layers
        memory = dict(first.named_parameters())
        for layer in others:
            for name, parameter in layer.named_parameters():
                parameter.data = memory[name].data
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
