"""Where the bytes of (layer, head, block) lie in this process: first a plain value, then the rows of each
object.

vLLM hands over one view per layer, logically [blocks, heads, tokens, content], whose strides tell the
physical order. An object of a block holds some heads of some layers, layer by layer and head by head, in the
engine's own bytes:

    LBHNC, two heads per object                       rows of the column (heads 0-1, layers 0-1)
    layer 0 | block 0: h0 h1 h2 h3 | block 1: ...      (layer 0 + h0, block stride, 2 heads)    <- h0, h1
    touch: one row layer 1 | block 0: h0 h1 h2 h3 | block 1: ...      (layer 1 + h0, block stride, 2 heads)

    LBNHC (tokens before heads)                       one row per token, layer and run of heads

A row is (address of block 0, bytes from block to block, bytes); see Pool.submit_load. Nothing here
touches the memory or imports torch.

A layer with a state (states.py) has pages of bytes, [blocks, 1, 1, bytes]; an object holds the states of all
such layers of a group in one rank, without the padding of a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from moonpool.connectors.objects import ROWS_MAX, Refused, Row, append_row, heads_of_objects
from moonpool.connectors.vllm.engine_config import EngineConfig, layer_number
from moonpool.connectors.vllm.pool import Rows
from moonpool.connectors.vllm.states import State
from moonpool.core.store.keys import Ranges


class Storage(Protocol):
    """The memory that a tensor views."""

    def data_ptr(self) -> int:
        """Its address."""

    def nbytes(self) -> int:
        """Its size in bytes."""


class Device(Protocol):
    """A torch device."""

    @property
    def type(self) -> str:
        """The kind of device: "cpu", "cuda" and so on."""

    @property
    def index(self) -> int | None:
        """Which of them; None: the current one, or there is one only."""


class Tensor(Protocol):
    """The part of torch.Tensor that this module uses."""

    @property
    def device(self) -> Device:
        """Where its memory is."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements of each dimension."""

    @property
    def dtype(self) -> object:
        """The type of an element."""

    def data_ptr(self) -> int:
        """The address of the first element."""

    def stride(self) -> Sequence[int]:
        """Elements from one index to the next, of each dimension."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def untyped_storage(self) -> Storage:
        """The memory it views."""


@dataclass(frozen=True, slots=True)
class LayerView:
    """One layer's KV cache. Strides and sizes in bytes; ``blocks`` are the kernel's, of ``tokens`` tokens
    each; ``content``: of one token and head; ``dtype``: of the memory, as torch names it; ``device``: the
    CUDA device that has the memory, None: the host."""

    name: str
    number: int
    address: int
    blocks: int
    heads: int
    tokens: int
    content: int
    block_stride: int
    head_stride: int
    token_stride: int
    dtype: str = ""
    device: int | None = None


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layers of one KV cache group, by number and name, each memory once.

    pieces: how many kernel blocks make one of the group's blocks.
    split: how many of these are parts of a block of ``block_tokens`` tokens (group_blocks.py).
    state: of layers with a state, what a block of each holds; None: KV.
    """

    layers: tuple[LayerView, ...]
    pieces: int
    state: State | None = None
    split: int = 1

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return self.layers[0].heads

    @property
    def first_layer(self) -> int:
        """The number of the first layer."""
        return self.layers[0].number

    @property
    def layer_count(self) -> int:
        """Layers from the first to the last, inclusive."""
        return self.layers[-1].number - self.first_layer + 1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The KV memory of one worker, group by group."""

    groups: tuple[GroupLayout, ...]
    block_tokens: int

    @property
    def device(self) -> int | None:
        """The CUDA device that has the memory; None: the host."""
        return self.groups[0].layers[0].device

    @property
    def blocks(self) -> int:
        """Blocks of every layer, of its group's own size."""
        return min(layer.blocks // group.pieces for group in self.groups for layer in group.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in this worker, all layers and heads of all groups."""
        return sum(
            layer.heads * layer.tokens * layer.content * group.pieces * group.split
            for group in self.groups
            for layer in group.layers
        )


def read_layout(
    caches: Mapping[str, Tensor],
    groups: Sequence[Sequence[str]],
    block_tokens: int,
    states: Sequence[State | None] = (),
    splits: Sequence[int] = (),
) -> BlockLayout:
    """The layout of ``caches``, the views that vLLM registered. Raises Refused.

    states: for each group what its layers have in the place of KV; (): all have KV.
    splits: for each group how many of its blocks are parts of a block; (): one.
    """
    kinds, parts = states or (None,) * len(groups), splits or (1,) * len(groups)
    read = [
        _read_group(caches, names, block_tokens, split)
        if state is None
        else _read_states(caches, names, state)
        for names, state, split in zip(groups, kinds, parts, strict=True)
    ]
    layout = BlockLayout(tuple(read), block_tokens)
    if len({layer.device for group in layout.groups for layer in group.layers}) > 1:
        raise Refused("the layers of the KV cache lie on several devices")
    return layout


def spans(caches: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    """(address, bytes) of the memory under ``caches``, each once: layers may be views of one storage."""
    found: list[tuple[int, int]] = []
    storages = {(each.data_ptr(), each.nbytes()) for each in (t.untyped_storage() for t in caches.values())}
    for address, length in sorted(storages):
        if found and address < sum(found[-1]):  # views that overlap
            start = found[-1][0]
            found[-1] = (start, max(sum(found[-1]), address + length) - start)
        else:
            found.append((address, length))
    return tuple(found)


def object_ranges(
    layout: BlockLayout, *, kv_heads: Sequence[int], first_heads: Sequence[int], tp_rank: int = 0
) -> tuple[Ranges, ...]:
    """The objects of a block that this worker holds, in the order group, layers, heads. Raises Refused.

    kv_heads: of each group in the whole model.
    first_heads: of each group the number, in the whole model, of this worker's head 0.
    tp_rank: of this worker; each rank has its own part of a state, which is named by it.
    """
    ranges = []
    for number, group in enumerate(layout.groups):
        if group.state is not None:
            ranges.append(Ranges(number, tp_rank, 1, group.first_layer, group.layer_count))
            continue
        step, first_head = heads_of_objects(group.heads, kv_heads[number]), first_heads[number]
        ranges += [
            Ranges(number, head, step, group.first_layer, group.layer_count)
            for head in range(first_head, first_head + group.heads, step)
        ]
    return tuple(ranges)


def heads_of_groups(layout: BlockLayout, engine_config: EngineConfig) -> tuple[int, ...]:
    """The KV heads of each group in the whole model; of a group of states, those of the model.

    Where groups have unlike numbers of heads, vLLM tells the model's number and what a rank has of each
    group, but not which ranks hold copies: each rank then counts as the holder of heads of its own.
    """
    total, ranks = engine_config.kv_heads, engine_config.tp_size
    counts = [group.heads for group in layout.groups if group.state is None]
    if not engine_config.unlike_heads and len(set(counts)) < 2:
        return (total,) * len(layout.groups)
    return tuple(total if group.state is not None else group.heads * ranks for group in layout.groups)


def unlike_heads(layout: BlockLayout, engine_config: EngineConfig) -> tuple[int, ...]:
    """The same where it is not the model's number in each; else ()."""
    heads = heads_of_groups(layout, engine_config)
    return () if set(heads) == {engine_config.kv_heads} else heads


def rows(layout: BlockLayout, ranges: Ranges, *, first_head: int) -> list[Row]:
    """The rows of one column: what an object of ``ranges`` gathers, in its own order. Neighbours are one row.

    first_head: the number, in the whole model, of this worker's head 0 of that group. Raises Refused when
    there are too many rows for a CPU to gather; a card has a kernel for that.
    """
    group = layout.groups[ranges.group]
    result: list[Row] = []
    head = 0 if group.state is not None else ranges.first_head - first_head
    for layer in group.layers:
        for one in range(head, head + ranges.heads):
            for row in _head_rows(layer, one, group.pieces):
                append_row(result, row)
    if layout.device is None and len(result) > ROWS_MAX:
        raise Refused(
            f"an object would be gathered from {len(result)} places (at most {ROWS_MAX}); use a KV layout "
            f"with heads before tokens (LBHNC, also called HND)"
        )
    return result


def all_rows(layout: BlockLayout, columns: Sequence[Ranges], *, first_heads: Sequence[int]) -> Rows:
    """The rows of every column, in order; first_heads: see ``object_ranges``."""
    return [rows(layout, ranges, first_head=first_heads[ranges.group]) for ranges in columns]


def layers_of_columns(layout: BlockLayout, columns: Sequence[Ranges]) -> list[list[tuple[int, int]]]:
    """For each column the layers that its object holds, in order: (number, bytes of a block)."""
    return [
        [
            (layer.number, ranges.heads * layer.tokens * layer.content * group.pieces)
            for group in [layout.groups[ranges.group]]
            for layer in group.layers
        ]
        for ranges in columns
    ]


def _head_rows(layer: LayerView, head: int, pieces: int) -> list[Row]:
    stride = layer.block_stride * pieces
    dense = layer.token_stride == layer.content
    starts = [
        layer.address + piece * layer.block_stride + head * layer.head_stride for piece in range(pieces)
    ]
    if dense:
        return [(start, stride, layer.tokens * layer.content) for start in starts]
    return [
        (start + token * layer.token_stride, stride, layer.content)
        for start in starts
        for token in range(layer.tokens)
    ]


def _read_group(
    caches: Mapping[str, Tensor], names: Sequence[str], block_tokens: int, split: int
) -> GroupLayout:
    missing = [name for name in names if name not in caches]
    if missing:
        raise Refused(f"vLLM registered no KV cache for the layer {missing[0]}")
    views = sorted((_view(name, caches[name]) for name in names), key=lambda view: (view.number, view.name))
    seen: set[tuple[int, int]] = set()
    layers = []
    for view in views:  # layers that share another layer's KV name the same memory again
        if (view.address, view.block_stride) not in seen:
            seen.add((view.address, view.block_stride))
            layers.append(view)
    if len({(view.heads, view.tokens) for view in layers}) > 1:
        raise Refused("the layers of one KV cache group differ in heads or tokens")
    tokens, own = layers[0].tokens, block_tokens // split
    if own % tokens:
        raise Refused(f"blocks of {own} tokens are not whole blocks of the kernel's {tokens}")
    return GroupLayout(tuple(layers), own // tokens, split=split)


def _read_states(caches: Mapping[str, Tensor], names: Sequence[str], state: State) -> GroupLayout:
    missing = [name for name in names if name not in caches]
    if missing:
        raise Refused(f"vLLM registered no states for the layer {missing[0]}")
    if not all(hasattr(caches[name], "untyped_storage") for name in names):
        raise Refused("this vLLM registers states as several tensors, not as the pages of their blocks")
    views = sorted((_view(name, caches[name]) for name in names), key=lambda view: (view.number, view.name))
    for view in views:
        if view.heads != 1 or view.tokens != 1 or view.content < state.bytes:
            raise Refused(
                f"the states of {view.name} do not lie in pages of at least {state.bytes} bytes, one for "
                f"each block"
            )
    return GroupLayout(tuple(replace(view, content=state.bytes) for view in views), 1, state)


def _view(name: str, tensor: Tensor) -> LayerView:
    if tensor.device.type not in ("cpu", "cuda"):
        raise Refused(
            f"moonpool copies memory of CPUs and of CUDA devices, and the KV cache lies in "
            f"{tensor.device.type} memory"
        )
    size = tensor.element_size()
    shape, strides = list(tensor.shape), [stride * size for stride in tensor.stride()]
    if len(shape) == 3:  # MLA before 0.29: [blocks, tokens, content]
        shape.insert(1, 1)
        strides.insert(1, shape[2] * strides[1])
    if len(shape) != 4 or strides[3] != size:
        raise Refused(
            f"the KV cache of {name} has the shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())}, not dense [blocks, heads, tokens, content]"
        )
    blocks, heads, tokens, content = shape
    view = LayerView(
        name=name,
        number=layer_number(name),
        address=tensor.data_ptr(),
        blocks=blocks,
        heads=heads,
        tokens=tokens,
        content=content * size,
        block_stride=strides[0],
        head_stride=strides[1],
        token_stride=strides[2],
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=(tensor.device.index or 0) if tensor.device.type == "cuda" else None,
    )
    _check_inside(view, tensor.untyped_storage())
    return view


def _check_inside(view: LayerView, storage: Storage) -> None:
    """Every byte that a row can name must belong to the tensor's storage: the copies are not
    bounds-checked."""
    strides = (view.block_stride, view.head_stride, view.token_stride)
    counts = (view.blocks, view.heads, view.tokens)
    last = sum(stride * (count - 1) for stride, count in zip(strides, counts, strict=True))
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if min(strides) < 0 or view.address < start or view.address + last + view.content > end:
        raise Refused(f"the KV cache of {view.name} reaches beyond its own memory")
