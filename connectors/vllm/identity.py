"""The fingerprint of a vLLM engine's KV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.connectors.identity import identity_of, is_dummy, stored_dtype, weights_revision
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.identity_arguments import arguments, quantisation
from moonpool.connectors.vllm.layout import BlockLayout, LayerView
from moonpool.connectors.vllm.reach import Reach
from moonpool.core.store.keys import Json


def identity(vllm_config: Any, *, block_tokens: int, kv_dtype: str, form: str) -> dict[str, Json]:
    """The fields of the fingerprint: engines with equal fields may use each other's blocks.

    Raises ConfigError when the weights that the engine serves cannot be identified.
    """
    model = vllm_config.model_config
    return identity_of(
        model,
        quantisation=quantisation(vllm_config),
        revision=revision(vllm_config),
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        form=form,
        length=getattr(model, "max_model_len", None),
        arguments=arguments(vllm_config),
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


def form(
    vllm_config: Any, layout: BlockLayout, reaches: Sequence[Reach] = (), heads: Sequence[int] = ()
) -> str:
    """The order and type of the bytes of one (layer, head, block): once where all layers are alike, else by
    layer. With sliding windows or states also which layers are in which group, and how far back each looks:
    objects are named by their group. Where the groups' blocks differ in tokens, also how many parts each has
    of a block, and where they differ in heads, the heads of each in the whole model. With states also their
    shapes and types and, as kernels may order their numbers each in its own way, the number of ranks, the
    device and the version of vLLM. A pipeline worker knows its own layers only: where its layers differ from
    another worker's, the workers disagree and the engine serves without the pool.

    heads: of each group, where these are unlike.
    """
    unlike = f" heads {','.join(map(str, heads))}" if heads else ""
    if any(group.split > 1 for group in layout.groups):
        unlike += f" parts {','.join(str(group.split) for group in layout.groups)}"
    order = _order(vllm_config, layout) + unlike
    if all(reach.is_full for reach in reaches) and not unlike:
        return order
    groups = [
        f"{','.join(str(layer.number) for layer in group.layers)}:{reach}"
        + (f" ({group.state.form})" if group.state is not None else "")
        for group, reach in zip(layout.groups, reaches, strict=True)
    ]
    shape = f"{order} groups {' '.join(groups)}"
    if not any(reach.state for reach in reaches):
        return shape
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return f"{shape} of {ranks} ranks on {compat.device_name()} by vllm {compat.vllm_version()}"


def _order(vllm_config: Any, layout: BlockLayout) -> str:
    attentions = vllm_config.compilation_config.static_forward_context
    kinds: dict[int, list[str]] = {}
    for group in layout.groups:
        for layer in group.layers:
            kinds.setdefault(layer.number, []).append(_kind(attentions.get(layer.name), layer))
    by_layer = {number: "+".join(sorted(found)) for number, found in kinds.items()}
    if len(set(by_layer.values())) == 1:
        return f"vllm {next(iter(by_layer.values()))}"
    layers: dict[str, list[str]] = {}
    for number, kind in sorted(by_layer.items()):
        layers.setdefault(kind, []).append(str(number))
    return "vllm " + " ".join(f"{','.join(numbers)}:{kind}" for kind, numbers in sorted(layers.items()))


def _kind(attention: Any, layer: LayerView) -> str:
    """The form of one layer: the attention backend that reads its bytes, the instruction set that its packing
    depends on (CPU), the kernel's block size, the type of the numbers, their bytes per token and head, and
    the scales of quantised ones unless they are 1."""
    backend = getattr(attention, "attn_backend", None)
    name = backend.get_name() if backend is not None else type(attention).__name__
    packing = getattr(attention, "isa", None) or "plain"
    dtype = stored_dtype(getattr(attention, "kv_cache_dtype", None), layer.dtype)
    kind = f"{name}/{packing}/{layer.tokens}/{dtype}/{layer.content}"
    scales = [getattr(attention, f"_{each}_scale_float", 1.0) for each in ("k", "v")]
    return kind if scales == [1.0, 1.0] else f"{kind}/scales {scales[0]} {scales[1]}"
