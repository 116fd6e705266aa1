"""Where the bytes of (layer, head, page) lie in SGLang's host memory: first a plain value, then the rows of
each object.

HiCache's host pool keeps all pages in one tensor, K and V one behind the other, in one of several orders.
An object of a page holds some heads of some layers, layer by layer and head by head: the tokens' keys, then
the tokens' values. That order is the same for every layout, so engines with different layouts share; the
native side joins rows that touch.

    page_first_direct   [K, V] page  layer token head        one row per token and head
    page_head           [K, V] page  head  token layer       the same
    layer_first         [K, V] layer slot  head              slot = page * tokens + token
    MLA                 without K, V, with one head          page_first_direct: the page is one row

A row is (address in page 0, bytes from page to page, bytes). Nothing here touches the memory or imports
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.connectors.objects import ROWS_MAX, Refused, Row, append_row, heads_of_objects
from moonpool.core.store.keys import Ranges

# The axes of the tensor between (K, V) and the numbers of one head; a slot is a token counted over all pages.
_AXES = {
    "layer_first": ("layer", "slot", "head"),
    "page_first": ("slot", "layer", "head"),
    "page_first_direct": ("page", "layer", "token", "head"),
    "page_head": ("page", "head", "token", "layer"),
}
_KINDS = {"MHATokenToKVPoolHost": 2, "MLATokenToKVPoolHost": 1}


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys, the values, or the latents of MLA, of all pages. Strides and ``content``, the size of one
    (layer, head, token), in bytes."""

    address: int
    page_stride: int
    layer_stride: int
    head_stride: int
    token_stride: int
    content: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The host memory of one rank. first_layer: the number of its layer 0 in the model."""

    planes: tuple[Plane, ...]
    pages: int
    first_layer: int
    layers: int
    heads: int
    tokens: int

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page over all layers and heads."""
        return self.layers * self.heads * self.tokens * sum(plane.content for plane in self.planes)


def read_layout(pool: Any) -> PageLayout:
    """The layout of a HostKVCache. Raises Refused for one that is not understood in full."""
    kind = type(pool).__name__
    if kind not in _KINDS:
        raise Refused(f"the pool holds plain MHA and MLA caches, and this model's is a {kind}")
    if pool.layout not in _AXES:
        known = ", ".join(_AXES)
        raise Refused(f"--hicache-mem-layout {pool.layout} is not understood; use one of {known}")
    if getattr(pool, "_layer_shard_enabled", False):
        raise Refused("each rank keeps only some of the layers, which the pool does not know yet")
    tensors = [pool.kv_buffer] if _KINDS[kind] == 1 else [pool.k_buffer, pool.v_buffer]
    if any(tensor is None for tensor in tensors):
        raise Refused("this rank has no host memory of its own")
    axes = _AXES[pool.layout]
    sizes = dict(zip(axes, tensors[0].shape, strict=False))
    layout = PageLayout(
        planes=tuple(_plane(tensor, axes, pool.page_size) for tensor in tensors),
        pages=sizes["page"] if "page" in sizes else sizes["slot"] // pool.page_size,
        first_layer=int(pool.start_layer or 0),
        layers=sizes["layer"],
        heads=sizes["head"],
        tokens=pool.page_size,
    )
    if layout.layers != pool.layer_num or sizes.get("token", layout.tokens) != layout.tokens:
        raise Refused(f"the host memory has the shape {tuple(tensors[0].shape)}, not that of {pool.layout}")
    return layout


def object_ranges(layout: PageLayout, *, kv_heads: int, first_head: int) -> tuple[Ranges, ...]:
    """The objects of a page that this rank holds, by layers and then heads. Raises Refused.

    Layers are cut only as far as a node's limit of parts demands, wherever the pages lie densest or not: page
    size, heads and the pipeline stage alone say how.
    """
    step = heads_of_objects(layout.heads, kv_heads)
    rows_per_layer = step * layout.tokens * len(layout.planes)
    if rows_per_layer > ROWS_MAX:
        raise Refused(
            f"pages of {layout.tokens} tokens are too large; use --page-size {ROWS_MAX // 2 // step}"
        )
    depth = ROWS_MAX // rows_per_layer
    end = layout.first_layer + layout.layers
    return tuple(
        Ranges(0, head, step, layer, min(depth, end - layer))
        for layer in range(layout.first_layer, end, depth)
        for head in range(first_head, first_head + layout.heads, step)
    )


def rows(layout: PageLayout, ranges: Ranges, *, first_head: int) -> list[Row]:
    """What an object of ``ranges`` gathers, in its own order. Neighbours are one row.

    first_head: the number, in the whole model, of this rank's head 0.
    """
    result: list[Row] = []
    first = ranges.first_layer - layout.first_layer
    head = ranges.first_head - first_head
    for layer in range(first, first + ranges.layers):
        for one in range(head, head + ranges.heads):
            for plane in layout.planes:
                start = plane.address + layer * plane.layer_stride + one * plane.head_stride
                for token in range(layout.tokens):
                    append_row(result, (start + token * plane.token_stride, plane.page_stride, plane.content))
    return result


def _plane(tensor: Any, axes: Sequence[str], tokens: int) -> Plane:
    if tensor.device.type != "cpu":
        raise Refused(f"HiCache's host memory lies on {tensor.device}, not on the CPU")
    size = tensor.element_size()
    shape, strides = list(tensor.shape), [stride * size for stride in tensor.stride()]
    if len(shape) != len(axes) + 1 or strides[-1] != size or min(strides) < 0:
        raise Refused(
            f"the host memory has the shape {tuple(shape)} and the strides {tuple(tensor.stride())}"
        )
    stride = dict(zip(axes, strides, strict=False))
    token_stride = stride["slot"] if "slot" in stride else stride["token"]
    return Plane(
        address=tensor.data_ptr(),
        page_stride=stride["page"] if "page" in stride else tokens * token_stride,
        layer_stride=stride["layer"],
        head_stride=stride["head"],
        token_stride=token_stride,
        content=shape[-1] * size,
    )
