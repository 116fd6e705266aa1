"""The fingerprint of the outputs of a vLLM engine's encoder."""

from __future__ import annotations

from typing import Any

from moonpool.connectors.identity import plain
from moonpool.connectors.vllm import compat, identity
from moonpool.connectors.vllm.encoder.compat import embedding_width, model_class
from moonpool.core.store.keys import Json


def encoder_identity(vllm_config: Any) -> dict[str, Json]:
    """The fields of the fingerprint: those of KV, but for the form, which is that of an encoder's output. How
    many tokens an output has for an item, and what is packed beside an embedding, is vLLM's code, so its
    version and the class that it runs the model with count. Raises ConfigError when the weights cannot be
    identified."""
    model = vllm_config.model_config
    code = f"{model_class(model)} of vllm {compat.vllm_version()}"
    return identity.identity(
        vllm_config,
        block_tokens=0,
        kv_dtype=str(plain(model.dtype)),
        form=f"encoder outputs of {embedding_width(model)} by {code}",
    )
