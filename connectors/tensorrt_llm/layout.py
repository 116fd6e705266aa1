"""Where the bytes of a block lie in TensorRT-LLM's KV cache: first a plain value, then the objects of a
block.

A rank's KV cache is one tensor [block, layer, (K, V), numbers], or, where layers differ, several layer groups
of several regions; a *page* is what one block has in one group. Either way a page is a few byte ranges that
repeat with a stride.

Where it is known how the numbers of a layer are ordered (the TRTLLM attention backend: heads, then tokens), a
page is cut into objects of some heads, layer by layer and head by head, the keys before the values: engines
with different tensor-parallel sizes share them. MLA's latents are one object that every rank has. Anything
else is stored as it lies, one object for a page of a rank (``raw``), and shared by engines that are cut
alike.

Nothing here touches the memory or imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.objects import TP_SIZE_MAX, Refused, Row, append_row, heads_per_object
from moonpool.core.store.keys import Json, Ranges, digest_of

KNOWN_BACKEND = "TRTLLM"
# Behind the reason why one tensor is not enough.
SHOWS_ALL = (
    "; newer versions of TensorRT-LLM show a connector all pools where kv_cache_config has "
    "use_kv_cache_manager_v2"
)


@dataclass(frozen=True, slots=True)
class Buffer:
    """The numbers of one layer in a region, from ``offset`` on.

    role: what the numbers are, as the engine names it.
    offset, size: in bytes.
    """

    layer: int
    role: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Region:
    """A byte range that repeats once a page: [base + stride * page, + size)."""

    base: int
    size: int
    stride: int
    pages: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """The KV cache of one rank.

    groups: the regions of each layer group.
    described: whether the engine described all of the memory, and did not only show a tensor.
    item: bytes of a number; 0 where that is not known.
    ordinal: of the device among those that this process sees; 0 for the host.
    """

    tokens: int
    groups: tuple[tuple[Region, ...], ...]
    dtype: str
    device: str
    described: bool
    item: int = 0
    ordinal: int = 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block over all layer groups."""
        return sum(region.size for regions in self.groups for region in regions)


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of the whole model.

    heads: KV heads; 0 where layers differ.
    latent: numbers of a token in an MLA layer; 0 for other models.
    """

    layers: int
    heads: int
    head_numbers: int
    latent: int
    tp_rank: int
    tp_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Column:
    """An object of a block on this rank: rows of (offset in the block, bytes), in the object's own order."""

    ranges: Ranges
    rows: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes of the object of one block."""
        return sum(length for _, length in self.rows)


@dataclass(frozen=True, slots=True)
class Shape:
    """How the blocks of this engine are cut into objects.

    columns: the objects of a block that this rank holds.
    ranges: heads and layers of the objects of all ranks, in one order.
    saves: whether no lower rank holds the same bytes.
    whole: whether pages are stored as they are in memory.
    """

    form: str
    columns: tuple[Column, ...]
    ranges: tuple[Ranges, ...]
    saves: bool
    whole: bool = False


def read_tensor(tensor: Any, tokens: int) -> Memory:
    """The KV cache as one tensor, block by block. Raises Refused when its blocks are not contiguous."""
    shape = [int(size) for size in tensor.shape]
    item = tensor.element_size()
    strides = [int(stride) for stride in tensor.stride()]
    block = math.prod(shape[1:])
    if block == 0 or strides[1:] != [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]:
        raise Refused(f"the KV cache has the shape {tuple(shape)} and the strides {tuple(strides)}")
    buffers: tuple[Buffer, ...] = ()
    if len(shape) == 4 and shape[2] <= 2:  # [block, layer, (K, V), numbers]
        layers, planes, numbers = shape[1:]
        roles = ("key", "value")[:planes]
        buffers = tuple(
            Buffer(layer, role, (layer * planes + plane) * numbers * item, numbers * item)
            for layer in range(layers)
            for plane, role in enumerate(roles)
        )
    region = Region(tensor.data_ptr(), block * item, strides[0] * item, shape[0], buffers)
    device, ordinal = _device(tensor)
    return Memory(tokens, ((region,),), _text(tensor.dtype), device, False, item, ordinal)


def read_layout(layout: Any) -> Memory:
    """The KV cache as a KvCacheLayout: one or several layer groups."""
    device, ordinal = _device(layout.groups[0].regions[0].as_tensor())
    return Memory(
        int(layout.tokens_per_block),
        tuple(
            tuple(_region(region) for region in (*group.regions, *getattr(group, "replicated_regions", ())))
            for group in layout.groups
        ),
        "bytes",
        device,
        described=True,
        ordinal=ordinal,
    )


def _device(tensor: Any) -> tuple[str, int]:
    return _text(tensor.device.type), int(getattr(tensor.device, "index", None) or 0)


def _region(region: Any) -> Region:
    count = len(region.buffers)
    each = region.size // count if count and region.size % count == 0 else 0
    known = each and all(buffer.expansion == 1 for buffer in region.buffers)
    buffers = (
        tuple(
            Buffer(int(buffer.layer_id), str(buffer.role), index * each, each)
            for index, buffer in enumerate(region.buffers)
        )
        if known
        else ()
    )
    return Region(int(region.base), int(region.size), int(region.stride), int(region.num_slots), buffers)


def model_of(config: Mapping[str, Any], *, tp_rank: int, tp_size: int, backend: str) -> Model:
    """What the model's config.json says about its KV cache."""
    text = config.get("text_config", config)
    attention = text.get("num_attention_heads") or 0
    heads = text.get("num_key_value_heads", attention)
    numbers = text.get("head_dim") or (text.get("hidden_size", 0) // attention if attention else 0)
    latent = (text.get("kv_lora_rank") or 0) and text["kv_lora_rank"] + text.get("qk_rope_head_dim", 0)
    return Model(
        layers=int(text.get("num_hidden_layers", 0)),
        heads=heads if isinstance(heads, int) else 0,
        head_numbers=int(numbers),
        latent=int(latent),
        tp_rank=tp_rank,
        tp_size=tp_size,
        backend=backend,
    )


def shape_of(memory: Memory, model: Model) -> Shape:
    """How this rank's blocks are cut into objects. Raises Refused where a tensor is not exactly the keys and
    values (or the latents) of all of the model's layers: where layers differ there are several, and one is
    shown."""
    offsets, buffers = _by_layer(memory)
    if offsets is not None and set(buffers) == set(range(model.layers)):
        roles = {tuple(sorted(planes)) for planes in buffers.values()}
        sizes = {size for planes in buffers.values() for _, size in planes.values()}
        if len(sizes) == 1:
            size, known = sizes.pop(), model.backend == KNOWN_BACKEND
            if model.latent and roles == {("key",)} and _fits(size, memory.tokens * model.latent, memory):
                return _latents(buffers, model) if known else _raw(memory, model)
            local = max(1, model.heads // model.tp_size) if model.heads else 0
            even = local and (
                local * model.tp_size == model.heads or (local == 1 and model.tp_size % model.heads == 0)
            )
            numbers = local * memory.tokens * model.head_numbers
            if not model.latent and roles == {("key", "value")} and even and _fits(size, numbers, memory):
                return _heads(buffers, model, local) if known else _raw(memory, model)
    if not memory.described:
        raise Refused(
            "the KV cache that TensorRT-LLM shows is not the keys and values of the layers and heads in "
            f"config.json, so some of it may lie elsewhere{SHOWS_ALL}"
        )
    return _raw(memory, model)


def _fits(size: int, numbers: int, memory: Memory) -> bool:
    """Whether a buffer holds that many numbers."""
    if not numbers:
        return False
    return size == numbers * memory.item if memory.item else size % numbers == 0


_Planes = dict[str, tuple[int, int]]  # role -> (offset in the block, bytes)


def _by_layer(memory: Memory) -> tuple[int | None, dict[int, _Planes]]:
    """The buffers of a block by layer, when its one group is all of known buffers."""
    layers: dict[int, _Planes] = {}
    at = 0
    for region in memory.groups[0]:
        if not region.buffers or len(memory.groups) > 1:
            return None, {}
        for buffer in region.buffers:
            layers.setdefault(buffer.layer, {})[buffer.role] = (at + buffer.offset, buffer.size)
        at += region.size
    return at, layers


def _heads(buffers: Mapping[int, _Planes], model: Model, local: int) -> Shape:
    step = heads_per_object(model.heads)
    if local % step:
        raise Refused(
            f"a rank has {local} of {model.heads} KV heads, and objects of {step} heads cannot be cut from "
            f"them; use a tensor-parallel size up to {TP_SIZE_MAX}"
        )
    first = model.tp_rank * model.heads // model.tp_size
    columns = tuple(
        Column(
            Ranges(0, first + start, step, 0, model.layers),
            tuple(
                (buffers[layer][role][0] + head * (size // local), size // local)
                for layer in range(model.layers)
                for head in range(start, start + step)
                for role in ("key", "value")
                for size in (buffers[layer][role][1],)
            ),
        )
        for start in range(0, local, step)
    )
    return Shape(
        form="tensorrt_llm k,v heads,tokens",
        columns=columns,
        ranges=tuple(Ranges(0, head, step, 0, model.layers) for head in range(0, model.heads, step)),
        # Several ranks hold one head where there are more ranks than heads; the first of them saves it.
        saves=model.tp_rank == 0 or (model.tp_rank - 1) * model.heads // model.tp_size != first or local > 1,
    )


def _latents(buffers: Mapping[int, _Planes], model: Model) -> Shape:
    ranges = Ranges(0, 0, 1, 0, model.layers)
    column = Column(ranges, tuple(buffers[layer]["key"] for layer in range(model.layers)))
    return Shape("tensorrt_llm mla", (column,), (ranges,), saves=model.tp_rank == 0)


def _raw(memory: Memory, model: Model) -> Shape:
    """One object for a rank's page of each group. The form says how it is cut, so that only engines that are
    cut alike share; the ranges' head is the rank."""
    structure: Json = [
        [
            [region.size, [[buffer.layer, buffer.role, buffer.offset] for buffer in region.buffers]]
            for region in regions
        ]
        for regions in memory.groups
    ]
    form = digest_of({"tp": model.tp_size, "backend": model.backend, "groups": structure})
    columns, at = [], 0
    for group, regions in enumerate(memory.groups):
        size = sum(region.size for region in regions)
        columns.append(Column(Ranges(group, model.tp_rank, 1, 0, 0), ((at, size),)))
        at += size
    return Shape(
        form=f"tensorrt_llm raw {form}",
        columns=tuple(columns),
        ranges=tuple(
            Ranges(group, rank, 1, 0, 0)
            for rank in range(model.tp_size)
            for group in range(len(memory.groups))
        ),
        saves=True,
        whole=True,
    )


def rows_of(memory: Memory, shape: Shape) -> list[list[Row]]:
    """Where the bytes of each column lie in page 0, in the object's order."""
    regions, at = [], 0
    for group in memory.groups:
        for region in group:
            regions.append((at, region))
            at += region.size
    columns: list[list[Row]] = []
    for column in shape.columns:
        columns.append([])
        for offset, size in column.rows:
            for start, region in regions:
                first, last = max(offset, start), min(offset + size, start + region.size)
                if first < last:
                    append_row(columns[-1], (region.base + first - start, region.stride, last - first))
    return columns


def pages_of(memory: Memory, shape: Shape) -> list[int]:
    """For each column how many pages its layer group has, in each of its regions."""
    pages = [min(region.pages for region in regions) for regions in memory.groups]
    return [pages[column.ranges.group] for column in shape.columns]


def _text(value: object) -> str:
    return str(value).removeprefix("torch.")
