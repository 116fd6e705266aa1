"""Layouts as values: which bytes an object gathers, checked by gathering them."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.connectors.objects import Refused, first_head
from moonpool.connectors.vllm.layout import (
    all_rows,
    object_ranges,
    read_layout,
    rows,
)
from moonpool.core.store.keys import Ranges
from tests.connectors.vllm.fakes import FakeTensor

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 5, 4, 8, 6, 3
NAMES = [f"model.layers.{number}.attn" for number in range(LAYERS)]
Memory = npt.NDArray[np.float32]

# Physical order of (layer, block, head, token), by vLLM's names for it.
ORDERS = {
    "LBHNC": (0, 1, 2, 3),
    "LBNHC": (0, 1, 3, 2),
    "BLHNC": (1, 0, 2, 3),
    "BLNHC": (1, 0, 3, 2),
    "LHBNC": (0, 2, 1, 3),
    "BHLNC": (1, 2, 0, 3),
}


def caches(order: str, heads: int = HEADS) -> tuple[dict[str, FakeTensor], Memory]:
    """One view [blocks, heads, tokens, content] per layer, over one memory in this physical order; and the
    same memory as [layers, blocks, heads, tokens, content]."""
    sizes = (LAYERS, BLOCKS, heads, TOKENS)
    physical = np.arange(int(np.prod(sizes)) * CONTENT, dtype=np.float32)
    shaped = physical.reshape(*(sizes[axis] for axis in ORDERS[order]), CONTENT)
    logical = shaped.transpose(*np.argsort(ORDERS[order]), 4)
    return {name: FakeTensor(logical[number], physical) for number, name in enumerate(NAMES)}, logical


def gather(table: list[tuple[int, int, int]], index: int) -> bytes:
    """What the native threads copy for one object."""
    return b"".join(ctypes.string_at(address + index * stride, length) for address, stride, length in table)


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_objects_hold_layer_by_layer_head_by_head(order: str, heads: int) -> None:
    tensors, logical = caches(order)
    layout = read_layout(tensors, [NAMES], TOKENS)
    for first, block in itertools.product(range(0, HEADS, heads), range(BLOCKS)):
        table = rows(layout, Ranges(0, first, heads, 0, LAYERS), first_head=0)
        assert gather(table, block) == logical[:, block, first : first + heads].tobytes()


def test_neighbours_are_one_row() -> None:
    def count(order: str, heads: int) -> int:
        layout = read_layout(caches(order)[0], [NAMES], TOKENS)
        return len(rows(layout, Ranges(0, 0, heads, 0, LAYERS), first_head=0))

    assert count("LBHNC", 1) == LAYERS
    assert count("LBHNC", HEADS) == LAYERS  # heads lie side by side
    assert count("BLHNC", HEADS) == 1  # and so do layers
    assert count("LBNHC", 1) == LAYERS * TOKENS
    assert count("BHLNC", 1) == 1


def test_kernel_blocks_make_one_block() -> None:
    """vLLM may cut a block of 16 tokens into two of the kernel's 8: block i is kernel blocks 2i and 2i +
    1."""
    tensors, logical = caches("LBHNC")
    layout = read_layout({name: FakeTensor(t.view[:4], t.memory) for name, t in tensors.items()}, [NAMES], 16)
    table = rows(layout, Ranges(0, 1, 1, 0, LAYERS), first_head=0)
    for block in range(2):
        assert gather(table, block) == logical[:, 2 * block : 2 * block + 2, 1].tobytes()
    assert layout.bytes_per_block == 2 * LAYERS * HEADS * TOKENS * CONTENT * 4


def test_layers_that_share_memory_count_once() -> None:
    tensors, _ = caches("LBHNC")
    shared = {**tensors, "model.layers.3.attn": tensors[NAMES[2]]}
    layout = read_layout(shared, [[*NAMES, "model.layers.3.attn"]], TOKENS)
    assert len(layout.groups[0].layers) == LAYERS
    assert layout.groups[0].layer_count == LAYERS


def test_layers_are_ordered_by_number() -> None:
    names = [f"model.layers.{number}.attn" for number in (10, 9, 2)]
    tensors = dict(zip(names, caches("LBHNC")[0].values(), strict=True))
    layout = read_layout(tensors, [names], TOKENS)
    assert [layer.number for layer in layout.groups[0].layers] == [2, 9, 10]
    assert object_ranges(layout, kv_heads=[HEADS], first_heads=[0])[0] == Ranges(0, 0, 1, 2, 9)


def test_latent_attention_has_one_head() -> None:
    memory = np.arange(BLOCKS * TOKENS * CONTENT, dtype=np.float32).reshape(BLOCKS, TOKENS, CONTENT)
    layout = read_layout({"layers.0": FakeTensor(memory)}, [["layers.0"]], TOKENS)
    assert layout.groups[0].heads == 1
    table = rows(layout, Ranges(0, 0, 1, 0, 1), first_head=0)
    assert gather(table, 3) == memory[3].tobytes()


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (16, 4), (2, 2)])
def test_ranks_together_hold_what_one_rank_holds(kv_heads: int, size: int) -> None:
    def columns(rank: int, ranks: int) -> list[Ranges]:
        local = kv_heads // ranks
        layout = read_layout(caches("LBHNC", local)[0], [NAMES], TOKENS)
        return list(
            object_ranges(layout, kv_heads=[kv_heads], first_heads=[first_head(kv_heads, local, rank, ranks)])
        )

    together = [ranges for rank in range(size) for ranges in columns(rank, size)]
    assert together == columns(0, 1)


def refusal(tensor: FakeTensor, block_tokens: int = TOKENS) -> str:
    with pytest.raises(Refused) as refused:
        read_layout({"layers.0": tensor}, [["layers.0"]], block_tokens)
    return str(refused.value)


def test_refusals_are_sentences() -> None:
    good: Any = next(iter(caches("LBHNC")[0].values()))
    assert "the KV cache lies in xpu memory" in refusal(FakeTensor(good.view, good.memory, device="xpu"))
    assert "not dense" in refusal(FakeTensor(good.view.reshape(BLOCKS, 2, HEADS // 2, TOKENS, CONTENT)))
    assert "not dense" in refusal(FakeTensor(good.view[:, :, :, ::2], good.memory))
    assert "beyond its own memory" in refusal(FakeTensor(good.view, good.memory[:100]))
    assert "whole blocks" in refusal(good, block_tokens=12)
    with pytest.raises(Refused, match="registered no KV cache"):
        read_layout({}, [["layers.0"]], TOKENS)


def test_too_many_rows_are_refused() -> None:
    memories = [np.zeros((2, 4096, 2, 2), np.float32) for _ in range(2)]
    tensors = {
        f"layers.{number}": FakeTensor(memory.transpose(0, 2, 1, 3), memory)
        for number, memory in enumerate(memories)
    }
    layout = read_layout(tensors, [list(tensors)], 4096)
    with pytest.raises(Refused, match="HND"):
        all_rows(layout, [Ranges(0, 0, 1, 0, 2)], first_heads=[0])
