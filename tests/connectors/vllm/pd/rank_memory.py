"""The KV memory of engines of several tensor-parallel ranks, of one model: numpy arrays in vLLM's layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moonpool.connectors.objects import first_head
from moonpool.connectors.vllm.layout import all_rows, layers_of_columns, object_ranges, read_layout, spans
from moonpool.connectors.vllm.pd.copy_ranges import Held
from tests.connectors.vllm.fakes import FakeTensor

LAYOUTS = ("HND", "NHD", "gaps")

Array = npt.NDArray[np.float32]


class Shape(NamedTuple):
    """Of a KV cache. content: numbers of a token and head."""

    layers: int = 3
    blocks: int = 12
    tokens: int = 4
    content: int = 3


SMALL = Shape()


@dataclass
class RankMemory:
    """One worker's.

    kv: [layer, block, head, token, content] as its model sees it, whatever the order of the bytes.
    heads, layers: numbers of its heads and layers in the whole model.
    """

    kv: Array
    memory: Array
    heads: range
    layers: range
    held: Held
    spans: tuple[tuple[int, int], ...]


def model_kv(kv_heads: int, seed: int, shape: Shape = SMALL) -> Array:
    """The KV of a whole model: [layer, block, head, token, content]."""
    layers, blocks, tokens, content = shape
    return np.random.default_rng(seed).random((layers, blocks, kv_heads, tokens, content), np.float32)


def rank_memory(
    kv_heads: int,
    tp_size: int,
    rank: int,
    layout: str,
    *,
    layers: range | None = None,
    content: Array | None = None,
    shape: Shape = SMALL,
) -> RankMemory:
    """The memory of one rank. layers: of its pipeline stage, None: all; content: KV of the whole model, None:
    noise."""
    layers = range(shape.layers) if layers is None else layers
    local = max(1, kv_heads // tp_size)
    first = first_head(kv_heads, local, rank, tp_size)
    heads = range(first, first + local)
    shapes: dict[str, Sequence[int]] = {
        "HND": (len(layers), shape.blocks, local, shape.tokens, shape.content),
        "NHD": (len(layers), shape.blocks, shape.tokens, local, shape.content),
        # All layers of a block, and padding.
        "gaps": (shape.blocks, len(layers), local, shape.tokens + 1, shape.content),
    }
    memory = np.random.default_rng(1000 + rank).random(shapes[layout], np.float32)
    views = {"HND": (0, 1, 2, 3, 4), "NHD": (0, 1, 3, 2, 4), "gaps": (1, 0, 2, 3, 4)}
    kv = memory.transpose(views[layout])[:, :, :, : shape.tokens]
    if content is not None:
        kv[:] = content[layers.start : layers.stop, :, first : first + local]
    caches = {f"layers.{number}": FakeTensor(kv[number - layers.start], memory) for number in layers}
    read = read_layout(caches, (tuple(caches),), shape.tokens)
    columns = object_ranges(read, kv_heads=[kv_heads], first_heads=[first])
    rows = all_rows(read, columns, first_heads=[first])
    held = Held(columns, rows, layers_of_columns(read, columns))
    return RankMemory(kv, memory, heads, layers, held, spans(caches))


def layers_of_stage(stage: int, stages: int, shape: Shape = SMALL) -> range:
    """The layers of one of so many pipeline stages."""
    count = shape.layers
    return range(stage * count // stages, (stage + 1) * count // stages)
