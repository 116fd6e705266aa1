"""The KV memory of engines of several tensor-parallel ranks, of one model: numpy arrays in vLLM's layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.objects import first_head
from moonpool.connectors.vllm.layout import all_rows, layers_of_columns, object_ranges, read_layout, spans
from moonpool.connectors.vllm.pd.copy_ranges import Held
from tests.connectors.vllm.fakes import FakeTensor

LAYERS = ("layers.0", "layers.1", "layers.2")
BLOCKS, TOKENS, CONTENT = 12, 4, 3
ALL_LAYERS = range(len(LAYERS))
LAYOUTS = ("HND", "NHD", "gaps")

Array = npt.NDArray[np.float32]


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


def model_kv(kv_heads: int, seed: int, blocks: int = BLOCKS) -> Array:
    """The KV of a whole model: [layer, block, head, token, content]."""
    shape = (len(LAYERS), blocks, kv_heads, TOKENS, CONTENT)
    return np.random.default_rng(seed).random(shape, np.float32)


def rank_memory(
    kv_heads: int,
    tp_size: int,
    rank: int,
    layout: str,
    *,
    layers: range = ALL_LAYERS,
    content: Array | None = None,
    blocks: int = BLOCKS,
) -> RankMemory:
    """The memory of one rank. layers: of its pipeline stage; content: KV of the whole model, None: noise."""
    local = max(1, kv_heads // tp_size)
    first = first_head(kv_heads, local, rank, tp_size)
    heads = range(first, first + local)
    shapes: dict[str, Sequence[int]] = {
        "HND": (len(layers), blocks, local, TOKENS, CONTENT),
        "NHD": (len(layers), blocks, TOKENS, local, CONTENT),
        "gaps": (blocks, len(layers), local, TOKENS + 1, CONTENT),  # all layers of a block, and padding
    }
    memory = np.random.default_rng(1000 + rank).random(shapes[layout], np.float32)
    views = {"HND": (0, 1, 2, 3, 4), "NHD": (0, 1, 3, 2, 4), "gaps": (1, 0, 2, 3, 4)}
    kv = memory.transpose(views[layout])[:, :, :, :TOKENS]
    if content is not None:
        kv[:] = content[layers.start : layers.stop, :, first : first + local]
    caches = {LAYERS[number]: FakeTensor(kv[number - layers.start], memory) for number in layers}
    read = read_layout(caches, (tuple(caches),), TOKENS)
    columns = object_ranges(read, kv_heads=kv_heads, first_head=first)
    rows = all_rows(read, columns, first_head=first)
    held = Held(columns, rows, layers_of_columns(read, columns))
    return RankMemory(kv, memory, heads, layers, held, spans(caches))


def layers_of_stage(stage: int, stages: int) -> range:
    """The layers of one of so many pipeline stages."""
    count = len(LAYERS)
    return range(stage * count // stages, (stage + 1) * count // stages)
