"""How blocks are cut into objects, without a node and without memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moonpool import _native
from moonpool.connectors.objects import Refused
from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.kv_memory import KvMemory, page_keys, pages_by_group
from moonpool.connectors.tensorrt_llm.layout import (
    Memory,
    Region,
    Shape,
    model_of,
    pages_of,
    read_layout,
    read_tensor,
    rows_of,
    shape_of,
)
from moonpool.core.store.keys import Ranges

LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
DEEPSEEK = {"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 12, "qk_rope_head_dim": 4}


class Tensor:
    def __init__(self, *shape: int, strides: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.dtype = "torch.bfloat16"
        self.device = SimpleNamespace(type="cpu")
        dense = [1]
        for size in reversed(shape[1:]):
            dense.insert(0, dense[0] * size)
        self._strides = strides or tuple(dense)

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def data_ptr(self) -> int:
        return 4096


def shape(
    config: dict[str, Any], memory: Memory, *, rank: int = 0, size: int = 1, backend: str = "TRTLLM"
) -> Shape:
    return shape_of(memory, model_of(config, tp_rank=rank, tp_size=size, backend=backend))


def test_objects_of_heads() -> None:
    """Layer by layer, and in each head by head, the keys and then the values: 4 tokens of 8 numbers each."""
    found = shape(LLAMA, read_tensor(Tensor(10, 2, 2, 2 * 4 * 8), 4))
    run = 4 * 8 * 2
    assert [column.ranges for column in found.columns] == [Ranges(0, 0, 1, 0, 2), Ranges(0, 1, 1, 0, 2)]
    assert found.columns[0].rows == ((0, run), (2 * run, run), (4 * run, run), (6 * run, run))
    assert found.columns[1].rows == ((run, run), (3 * run, run), (5 * run, run), (7 * run, run))
    assert found.form == "tensorrt_llm k,v heads,tokens"


def test_a_rank_has_its_part_of_the_same_objects() -> None:
    memory = read_tensor(Tensor(10, 2, 2, 4 * 8), 4)
    second = shape(LLAMA, memory, rank=1, size=2)
    assert [column.ranges for column in second.columns] == [Ranges(0, 1, 1, 0, 2)]
    assert second.ranges == shape(LLAMA, read_tensor(Tensor(10, 2, 2, 64), 4)).ranges
    assert second.saves


@pytest.mark.parametrize(
    ("rank", "head", "saves"), [(0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False)]
)
def test_more_ranks_than_heads(rank: int, head: int, saves: bool) -> None:
    found = shape(LLAMA, read_tensor(Tensor(10, 2, 2, 4 * 8), 4), rank=rank, size=4)
    assert [column.ranges.first_head for column in found.columns] == [head]
    assert found.saves is saves


def test_latents_are_one_object_of_rank_0() -> None:
    memory = read_tensor(Tensor(10, 2, 1, 4 * 16), 4)
    first, second = shape(DEEPSEEK, memory, size=2), shape(DEEPSEEK, memory, rank=1, size=2)
    assert first.columns == second.columns
    assert first.columns[0].rows == ((0, 128), (128, 128))
    assert (first.saves, second.saves) == (True, False)
    assert first.form == "tensorrt_llm mla"


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (LLAMA, Tensor(10, 2, 2, 32)),
        (DEEPSEEK, Tensor(10, 2, 1, 64)),
    ],
)
def test_an_order_that_is_not_known_is_stored_as_it_lies(config: dict[str, Any], tensor: Tensor) -> None:
    memory, backend = read_tensor(tensor, 4), "FLASHINFER"
    found = shape(config, memory, rank=1, size=2, backend=backend)
    assert found.form.startswith("tensorrt_llm raw ")
    assert [column.rows for column in found.columns] == [((0, memory.bytes_per_block),)]
    assert [column.ranges for column in found.columns] == [Ranges(0, 1, 1, 0, 0)]
    assert found.ranges == (Ranges(0, 0, 1, 0, 0), Ranges(0, 1, 1, 0, 0))
    assert found.whole
    assert found.form != shape(config, memory, rank=1, size=2).form


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        (LLAMA, Tensor(10, 3, 2, 64)),  # the layers of a draft model, too
        (LLAMA, Tensor(10, 1, 2, 64)),  # the other layer lies in another pool
        (LLAMA, Tensor(10, 2, 2, 72)),
        (LLAMA, Tensor(10, 2, 2, 128)),  # attention DP: all heads, twice what a rank has
        (LLAMA, Tensor(10, 2, 2, 32)),
        (LLAMA, Tensor(10, 2, 1, 64)),
        (LLAMA, Tensor(10, 256)),
        (DEEPSEEK, Tensor(10, 2, 1, 128)),
        ({**LLAMA, "num_key_value_heads": [2, 1]}, Tensor(10, 2, 2, 64)),
        ({}, Tensor(10, 2, 2, 64)),
    ],
)
@pytest.mark.parametrize("backend", ["TRTLLM", "FLASHINFER"])
def test_a_tensor_that_is_not_all_of_the_model_is_refused(
    config: dict[str, Any], tensor: Tensor, backend: str
) -> None:
    with pytest.raises(Refused, match="elsewhere"):
        shape(config, read_tensor(tensor, 4), backend=backend)


def test_raw_forms_differ_by_how_the_engine_is_cut() -> None:
    given = read_layout(layout([region(512, [0, 1], ["key", "scale"])]))
    assert shape(LLAMA, given, rank=1, size=2).form != shape(LLAMA, given, size=4).form


def test_blocks_with_gaps_inside_are_refused() -> None:
    with pytest.raises(Refused, match="strides"):
        read_tensor(Tensor(10, 2, 2, 64, strides=(512, 256, 64, 1)), 4)


def test_blocks_may_lie_apart() -> None:
    memory = read_tensor(Tensor(10, 2, 2, 64, strides=(512, 128, 64, 1)), 4)
    assert (memory.groups[0][0].stride, memory.groups[0][0].size) == (1024, 512)


def test_heads_that_cannot_be_cut() -> None:
    config = {**LLAMA, "num_key_value_heads": 32, "num_attention_heads": 32}
    assert shape(config, read_tensor(Tensor(10, 2, 2, 4 * 4 * 8), 4), size=8).columns[0].ranges.heads == 4
    with pytest.raises(Refused, match="tensor-parallel size"):
        shape(config, read_tensor(Tensor(10, 2, 2, 2 * 4 * 8), 4), size=16)


def region(size: int, layers: list[int], roles: list[str], expansion: int = 1) -> Any:
    buffers = tuple(
        SimpleNamespace(layer_id=layer, role=role, expansion=expansion) for layer in layers for role in roles
    )
    return SimpleNamespace(
        base=4096, size=size, stride=size, num_slots=10, buffers=buffers, as_tensor=lambda: Tensor(10, size)
    )


def layout(*groups: list[Any], replicated: list[Any] | None = None) -> Any:
    return SimpleNamespace(
        tokens_per_block=4,
        groups=tuple(
            SimpleNamespace(
                layer_group_id=at, regions=tuple(each), replicated_regions=tuple(replicated or ())
            )
            for at, each in enumerate(groups)
        ),
    )


def test_a_layout_of_one_group_is_cut_as_the_tensor_is() -> None:
    as_tensor = shape(LLAMA, read_tensor(Tensor(10, 2, 2, 64), 4))
    assert shape(LLAMA, read_layout(layout([region(512, [0, 1], ["key", "value"])]))) == as_tensor
    apart = shape(LLAMA, read_layout(layout([region(256, [0, 1], ["key"]), region(256, [0, 1], ["value"])])))
    assert apart.columns[0].ranges == as_tensor.columns[0].ranges
    assert apart.columns[0].rows == ((0, 64), (256, 64), (128, 64), (384, 64))


@pytest.mark.parametrize(
    "given",
    [
        layout([region(256, [0], ["key", "value"])], [region(256, [1], ["key", "value"])]),
        layout([region(512, [0, 1], ["key", "value"], expansion=2)]),
        layout([region(512, [0, 1], ["key", "scale"])]),
        layout([region(512, [0, 1], ["key", "value"])], replicated=[region(64, [0, 1], ["index_key"])]),
    ],
    ids=["two groups", "expanded", "roles", "replicated"],
)
def test_other_layouts_are_stored_as_they_lie(given: Any) -> None:
    memory = read_layout(given)
    found = shape(LLAMA, memory)
    assert found.form.startswith("tensorrt_llm raw ")
    assert sum(column.size for column in found.columns) == memory.bytes_per_block
    assert [column.ranges.group for column in found.columns] == list(range(len(memory.groups)))


def test_pages_that_are_missing() -> None:
    """Their objects are neither saved nor loaded: one object a block in each of two groups here."""
    raw = shape_of_two_groups()
    memory = KvMemory(_native.PartTable(rows_of(*raw)), raw[1], pages=[10, 10], log=compat.Log())
    rows, pages, columns = memory.places(((1, 2), (3, -1)), 2)
    assert (rows.tolist(), pages.tolist(), columns.tolist()) == ([0, 1, 2], [1, 3, 2], [0, 1, 0])
    rows, pages, columns = memory.places(((1, 2), (3,)), 2)
    assert (rows.tolist(), pages.tolist(), columns.tolist()) == ([0, 1, 2], [1, 3, 2], [0, 1, 0])
    assert page_keys(((1, 2), (3, -1))) == {1, 2, (1 << 32) | 3}


def test_a_quarter_of_the_pages_of_each_group_wait_to_be_saved() -> None:
    """What the window of a group has passed has no page there, and takes no room."""
    raw = shape_of_two_groups()
    memory = KvMemory(_native.PartTable(rows_of(*raw)), raw[1], pages=[80, 12], log=compat.Log())
    pages = (tuple(range(16)), (-1,) * 13 + (5, 6, 7))  # 20 and 3 pages may wait
    assert memory.savable(pages, 16, {}) == 16
    assert memory.savable(pages, 16, {0: 10}) == 10
    assert memory.savable(pages, 16, {1: 1}) == 15
    assert memory.savable(pages, 16, pages_by_group(page_keys(((1, 2), (3, 4, 9))))) == 13
    assert memory.savable(((1, 2), (3, 4)), 2, {0: 20}) == 0


def test_each_group_has_its_number_of_pages() -> None:
    groups = tuple(
        tuple(Region(4096 + 8 * at, 8, 64, pages, ()) for at, pages in enumerate(each))
        for each in ((10, 10), (3, 4))
    )
    memory = Memory(4, groups, "bytes", "cpu", described=True)
    assert pages_of(memory, shape(LLAMA, memory)) == [10, 3]
    tensor = read_tensor(Tensor(10, 2, 2, 2 * 4 * 8), 4)
    assert pages_of(tensor, shape(LLAMA, tensor)) == [10, 10]


def shape_of_two_groups() -> tuple[Memory, Shape]:
    """Of two regions each, which lie apart."""
    groups = tuple(
        (Region(base, 16, 32, 10, ()), Region(base + 16, 8, 64, 10, ())) for base in (4096, 1 << 20)
    )
    memory = Memory(4, groups, "bytes", "cpu", described=True)
    return memory, shape(LLAMA, memory)


def test_rows_lie_in_the_regions() -> None:
    memory, raw = shape_of_two_groups()
    assert rows_of(memory, raw) == [
        [(4096, 32, 16), (4112, 64, 8)],
        [(1 << 20, 32, 16), ((1 << 20) + 16, 64, 8)],
    ]
    heads = read_tensor(Tensor(10, 2, 2, 2 * 4 * 8), 4)
    run = 4 * 8 * 2
    assert rows_of(heads, shape(LLAMA, heads))[1] == [
        (4096 + place * run, 8 * run, run) for place in (1, 3, 5, 7)
    ]
