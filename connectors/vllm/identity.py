"""The fingerprint of a vLLM engine's KV."""

from __future__ import annotations

from typing import Any

from moonpool.connectors.identity import identity_of, is_dummy, stored_dtype, weights_revision
from moonpool.connectors.vllm.layout import BlockLayout
from moonpool.core.keys import Json, fingerprint


def engine_fingerprint(vllm_config: Any, *, block_tokens: int, kv_dtype: str, form: str) -> bytes:
    """32 bytes; engines with equal fingerprints may use each other's blocks.

    Raises ConfigError when it cannot be told which weights the engine serves.
    """
    return fingerprint(identity(vllm_config, block_tokens=block_tokens, kv_dtype=kv_dtype, form=form))


def identity(vllm_config: Any, *, block_tokens: int, kv_dtype: str, form: str) -> dict[str, Json]:
    """The fields of the fingerprint, for logs and tests."""
    model = vllm_config.model_config
    return identity_of(
        model,
        quantisation=model.quantization,
        revision=revision(vllm_config),
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        form=form,
    )


def revision(vllm_config: Any) -> str:
    """Which weights: the hub commit, or a digest over the files of a local path."""
    model = vllm_config.model_config
    if is_dummy(vllm_config.load_config.load_format):
        parallel = vllm_config.parallel_config
        return f"dummy tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size}"
    return weights_revision(model.model, getattr(model, "model_weights", "") or model.model, model.hf_config)


def kv_dtype(vllm_config: Any, tensor_dtype: object) -> str:
    """The type of the stored numbers."""
    return stored_dtype(vllm_config.cache_config.cache_dtype, tensor_dtype)


def form(vllm_config: Any, layout: BlockLayout) -> str:
    """How the bytes of one (layer, head, block) are ordered: the attention backend that reads them, the
    instruction set that its packing depends on where it has one (CPU), and the kernel's block."""
    layers = vllm_config.compilation_config.static_forward_context
    kinds = set()
    for group in layout.groups:
        for layer in group.layers:
            attention = layers.get(layer.name)
            backend = getattr(attention, "attn_backend", None)
            name = backend.get_name() if backend is not None else type(attention).__name__
            packing = getattr(attention, "isa", None) or "plain"
            kinds.add(f"{name}/{packing}/{layer.tokens}")
    return "vllm " + ",".join(sorted(kinds))
