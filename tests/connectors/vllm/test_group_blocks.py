"""Both halves of the connector in an engine whose KV cache groups have blocks of unlike numbers of tokens:
full attention with blocks of 4 tokens, and a sliding window with blocks of 2 and another number of heads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.group_blocks import by_part, part_columns, part_numbers
from moonpool.connectors.vllm.layout import heads_of_groups, read_layout, unlike_heads
from moonpool.connectors.vllm.messages import Handshake, Load, Report, Save, Step
from moonpool.connectors.vllm.reach import FULL, NULL_BLOCK, Reach
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.store.keys import Ranges, block_digests, block_name
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    FINGERPRINT,
    LOG,
    Clock,
    FakeBlockPool,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeStep,
    FakeTables,
    FakeTensor,
    New,
    engine_config,
    request,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import CONTENT, lookup, real_node, serving, wait_for

GROUPS = (("layers.0",), ("layers.1",))
SPLITS = (1, 2)
REACHES = (FULL, Reach(window=2))  # the last block of the two of a window
COLUMNS = (Ranges(0, 0, 1, 0, 1), Ranges(1, 0, 1, 1, 1), Ranges(1, 1, 1, 1, 1))
# Of a block: the full layer's object, and of each of the window's heads one for each part.
WIDTH = 5
PROMPT = 14  # three blocks and a half


def half(pool: FakePool) -> tuple[SchedulerHalf, FakeBlockPool, FakeTables]:
    made, blocks = scheduler_half(
        pool, meet=False, clock=Clock(), groups=GROUPS, reaches=REACHES, splits=SPLITS
    )
    made.meet_workers([Handshake(FINGERPRINT, COLUMNS)])
    tables = FakeTables()
    made.bind_block_tables(tables)
    return made, blocks, tables


def full_object(end: int) -> bytes:
    """The name of the full layer's block that ends behind so many tokens."""
    return block_name(block_digests(list(range(PROMPT)), 2)[end // 2 - 1], COLUMNS[0])


def window_objects(end: int) -> bytes:
    digest = block_digests(list(range(PROMPT)), 2)[end // 2 - 1]
    return block_name(digest, COLUMNS[1]) + block_name(digest, COLUMNS[2])


def test_parts_of_blocks() -> None:
    tables = ([10, 11, 12], [20, 21, 22, 23, 24])
    assert by_part(tables, (), 1, 3) == ((11, 12), (21, 22))
    assert by_part(tables, SPLITS, 1, 3) == ((11, 12), (22, 24), (23,))  # what is missing stays missing
    assert by_part(tables, SPLITS, 1, 3, pad=True) == ((11, 12), (22, 24), (23, NULL_BLOCK))
    assert part_numbers(COLUMNS, SPLITS) == [0, 1, 2, 1, 2]
    assert [one.group for one in part_columns(COLUMNS, SPLITS)] == [0, 1, 2, 1, 2]
    assert part_columns(COLUMNS, ()) == list(COLUMNS)


def test_a_load_moves_the_parts_that_are_needed() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    names = pool.prefixes[-1][1]
    assert names == full_object(4) + full_object(8) + full_object(12) + window_objects(12)
    pool.answer_objects(5)
    assert made.matched_tokens(one, 0) == (12, True)
    made.admitted(one, FakeBlocks(([11, 12, 13], [0, 0, 0, 0, 0, 26])), 12)

    (load,) = made.build_step(FakeStep()).loads

    assert load.blocks == 3
    assert load.block_ids == ((11, 12, 13), (0, 0, 0), (0, 0, 26))
    table = np.frombuffer(load.descriptors, np.uint8).reshape(3, WIDTH, 32)[:, :, 0]
    assert table.tolist() == [[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [3, 0, 4, 0, 5]]
    made.step_ended(FakeOutput({"r"}, Report(loaded={"r": 3})))
    assert pool.released == [7]


def test_a_save_names_each_part() -> None:
    pool = FakePool()
    made, blocks, tables = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(0)
    made.matched_tokens(one, 0)
    made.admitted(one, FakeBlocks(([], [])), 0)
    tables.ids["r"] = ([11, 12, 13, 14], [0, 22, 23, 24, 25, 26, 27])
    (save,) = made.build_step(FakeStep([New("r", ([], []), 0)], num_scheduled_tokens={"r": 14})).saves
    assert save.block_ids == ((11, 12, 13), (0, 23, 25), (22, 24, 26))
    assert blocks.held() == [11, 12, 13, 22, 23, 24, 25, 26]
    names = [save.names[at : at + 42] for at in range(0, len(save.names), 42)]
    assert len(names) == 3 * WIDTH
    assert names[WIDTH] == full_object(8)
    assert names[WIDTH + 1] + names[WIDTH + 3] == window_objects(6)
    assert names[WIDTH + 2] + names[WIDTH + 4] == window_objects(8)


def test_nothing_is_loaded_behind_tokens_that_end_within_a_block() -> None:
    """A vLLM may find two tokens in its own cache, where another group's block has four."""
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(5)
    assert made.matched_tokens(one, 2) == (0, False)
    assert made.matched_tokens(one, 4) == (8, True)


def test_a_load_that_could_not_be_planned_fails_as_a_whole() -> None:
    made, _, _ = half(FakePool())
    made.fail_load("r", FakeBlocks(([11, 12, 13], [0, 0, 0, 0, 25, 26])), 8)
    (load,) = made.build_step(FakeStep()).loads
    assert (load.width, load.block_ids) == (0, ((12, 13), (0, 25), (0, 26)))


# The worker


def memory() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """[blocks, heads, tokens, content] of the full layer, of one head, and of the window's, of two."""
    return (
        np.zeros((8, 1, BLOCK_TOKENS, CONTENT), np.float32),
        np.zeros((16, 2, BLOCK_TOKENS // 2, CONTENT), np.float32),
    )


def test_parts_are_saved_and_loaded(tmp_path: Path) -> None:
    full, window = memory()
    random = np.random.default_rng(5)
    full[:], window[:] = random.random(full.shape, np.float32), random.random(window.shape, np.float32)
    was = full.copy(), window.copy()
    with serving(tmp_path):
        made = WorkerHalf(
            engine_config(groups=GROUPS, reaches=REACHES, splits=SPLITS),
            ranks=lambda: (0, 0),
            fingerprint=lambda layout, tensor: FINGERPRINT,
            open_node=real_node(tmp_path),
            log=LOG,
        )
        made.register({"layers.0": FakeTensor(full), "layers.1": FakeTensor(window)})
        assert made.handshake().refusal == ""
        assert made.handshake().columns == COLUMNS
        names = [
            block_name(bytes([block, part] + [0] * 30), COLUMNS[place])
            for block in (1, 2)
            for place, part in ((0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
        ]
        joined = b"".join(names)
        save = Save(1, WIDTH, joined, bytes(len(joined)), ((1, 2), (NULL_BLOCK, 4), (3, 5)))
        made.start_saves(Step(saves=(save,)))
        assert wait_for(made).saved == {1: 1}
        stored = [name for at, name in enumerate(names) if at not in (1, 3)]
        assert made.tally.take().data["saved_objects"] == len(stored)

        client, found = lookup(tmp_path, b"".join(stored), 1)
        assert found.blocks == len(stored)
        table = np.zeros((2, WIDTH, 32), np.uint8)
        rows = np.frombuffer(found.descriptors, np.uint8).reshape(-1, 32)
        table[0, [0, 2, 4]], table[1] = rows[:3], rows[3:]
        ids = ((5, 6), (NULL_BLOCK, 11), (10, 12))
        load = Load("r", WIDTH, joined[: WIDTH * 42], found.holders, table.tobytes(), ids)
        made.start_loads(Step(loads=(load,)))
        assert wait_for(made).loaded == {"r": 2}
        assert (full[5:7] == was[0][1:3]).all()
        assert (window[10:13] == was[1][3:6]).all()
        assert (window[:10] == was[1][:10]).all()
        client.close()
        made.close()


def test_heads_of_groups() -> None:
    """A rank counts as the holder of heads of its own where it cannot be told which ranks hold copies."""

    def heads(*local: int, model: int, ranks: int, unlike: bool = False) -> tuple[tuple[int, ...], ...]:
        caches = {
            f"layers.{number}": FakeTensor(np.zeros((2, count, 4, 2), np.float32))
            for number, count in enumerate(local)
        }
        layout = read_layout(caches, [[name] for name in caches], 4)
        config = engine_config(kv_heads=model, tp_size=ranks, unlike_heads=unlike)
        return heads_of_groups(layout, config), unlike_heads(layout, config)

    assert heads(4, 4, model=4, ranks=1) == ((4, 4), ())
    assert heads(1, 1, model=2, ranks=4) == ((2, 2), ())
    assert heads(1, 4, model=4, ranks=1) == ((1, 4), (1, 4))
    assert heads(1, 2, model=4, ranks=2) == ((2, 4), (2, 4))
    assert heads(1, 1, model=2, ranks=2, unlike=True) == ((2, 2), ())
    assert heads(1, 1, model=4, ranks=8, unlike=True) == ((8, 8), (8, 8))
