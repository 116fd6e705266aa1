"""Both halves of the connector in an engine with a group of full attention and one with a sliding window."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.connectors.vllm.messages import NOTHING, Handshake, Load, Report, Save, Step
from moonpool.connectors.vllm.pd.step_plan import HandoverStep, Pull
from moonpool.connectors.vllm.reach import FULL, NULL_BLOCK, Reach
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.errors import Timeout
from moonpool.core.store.keys import BLOCK_NAME_BYTES, Ranges, block_digests, block_name
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    FINGERPRINT,
    LOG,
    Clock,
    FakeBlockPool,
    FakeBlocks,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    FakeTables,
    FakeTensor,
    New,
    engine_config,
    next_step,
    request,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import CONTENT, lookup, real_node, serving, wait_for

GROUPS = (("layers.0",), ("layers.1",))
REACHES = (FULL, Reach(window=2 * BLOCK_TOKENS))  # the last two blocks
COLUMNS = tuple(Ranges(group, head, 1, group, 1) for group in (0, 1) for head in (0, 1))
WIDTH = len(COLUMNS)
PROMPT = 18  # four blocks and a half


def half(pool: FakePool) -> tuple[SchedulerHalf, FakeBlockPool, FakeTables]:
    made, blocks = scheduler_half(pool, meet=False, clock=Clock(), groups=GROUPS, reaches=REACHES)
    made.meet_workers([Handshake(FINGERPRINT, COLUMNS)])
    tables = FakeTables()
    made.bind_block_tables(tables)
    return made, blocks, tables


def objects(*places: tuple[int, int]) -> bytes:
    """The names of the (block, group) of the prompt, both heads of each."""
    digests = block_digests(list(range(PROMPT)), BLOCK_TOKENS)
    return b"".join(
        block_name(digests[block], COLUMNS[2 * group + head]) for block, group in places for head in (0, 1)
    )


def asked(pool: FakePool) -> list[bytes]:
    names = pool.prefixes[-1][1]
    return [names[at : at + BLOCK_NAME_BYTES] for at in range(0, len(names), BLOCK_NAME_BYTES)]


def hit(made: SchedulerHalf, pool: FakePool, blocks: int = 4) -> FakeRequest:
    """A request for which the pool has all that it needs of its four blocks."""
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(len(asked(pool)))
    assert made.matched_tokens(one, 0) == (blocks * BLOCK_TOKENS, True)
    return one


def test_a_query_names_what_each_group_needs() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    made.arrived(request(PROMPT))
    assert b"".join(asked(pool)) == objects((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1))


def test_one_token_is_left_and_the_window_is_that_before_it() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    made.arrived(request(16))  # four blocks, of which three can be loaded
    assert b"".join(asked(pool)) == objects((0, 0), (1, 0), (2, 0), (2, 1), (1, 1))


def test_a_load_moves_what_is_needed() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = hit(made, pool)
    made.admitted(one, FakeBlocks(([11, 12, 13, 14], [0, 0, 23, 24])), 4 * BLOCK_TOKENS)

    (load,) = made.build_step(FakeStep()).loads

    assert load.block_ids == ((11, 12, 13, 14), (NULL_BLOCK, NULL_BLOCK, 23, 24))
    table = np.frombuffer(load.descriptors, np.uint8).reshape(4, WIDTH, 32)[:, :, 0]
    assert table.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 11, 12], [7, 8, 9, 10]]


def test_a_shorter_length_where_the_window_has_a_gap() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(10)  # all of the full group, and of the window's last block; not of the one before
    assert made.matched_tokens(one, 0) == (None, False)
    assert pool.released == [7]
    ticket, names = pool.presences[-1]
    assert b"".join(names) == b"".join(objects((block, 1))[:BLOCK_NAME_BYTES] for block in range(4))
    pool.answer(ticket, bytes([1, 1, 0, 1]))
    assert made.matched_tokens(one, 0) == (None, False)
    assert b"".join(asked(pool)) == objects((0, 0), (1, 0), (1, 1), (0, 1))
    pool.answer_objects(8)
    assert made.matched_tokens(one, 0) == (2 * BLOCK_TOKENS, True)
    assert made.lookups.pins == 1


def test_an_error_in_mid_search_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(8)
    assert made.matched_tokens(one, 0) == (None, False)
    with caplog.at_level(logging.WARNING):
        pool.answer(pool.presences[-1][0], Timeout("the node is silent"))
        assert made.matched_tokens(one, 0) == (0, False)
    assert "the node is silent" in caplog.text
    assert made.lookups.pins == 0
    assert not made.has_pending_work()


def test_a_request_that_ends_in_mid_search_leaves_no_pin() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(8)
    made.matched_tokens(one, 0)
    made.finished(one)
    pool.answer(pool.presences[-1][0], bytes([1, 1, 1, 1]))
    made.build_step(FakeStep())
    assert made.lookups.pins == 0
    assert not made.has_pending_work()
    assert len(pool.prefixes) == 1


def first_step(one: FakeRequest, scheduled: int) -> FakeStep:
    return FakeStep([New(one.request_id, ([], []), 0)], num_scheduled_tokens={one.request_id: scheduled})


def test_blocks_that_the_window_has_passed_are_not_saved() -> None:
    """Those of the last step are, and null blocks are neither held nor saved."""
    pool = FakePool()
    made, blocks, tables = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(0)
    assert made.matched_tokens(one, 0) == (0, False)
    made.admitted(one, FakeBlocks(([], [])), 0)
    tables.ids["r"] = ([11, 12], [21, 22])
    (first,) = made.build_step(first_step(one, 8)).saves
    tables.ids["r"] = ([11, 12, 13, 14, 15], [0, 0, 23, 24, 25])
    (second,) = made.build_step(next_step(one, 8, 8)).saves
    assert (first.block_ids, second.block_ids) == (((11, 12), (21, 22)), ((13, 14), (23, 24)))
    assert blocks.held() == [11, 12, 13, 14, 21, 22, 23, 24]
    nothing = bytes(BLOCK_NAME_BYTES)
    assert second.parents == objects((1, 0)) + 2 * nothing + objects((2, 0)) + 2 * nothing

    late = request(PROMPT, "late")
    made.arrived(late)
    pool.answer_objects(0)
    made.matched_tokens(late, 0)
    made.admitted(late, FakeBlocks(([], [])), 0)
    tables.ids["late"] = ([31, 32, 33, 34], [0, 0, 0, 44])
    (save,) = made.build_step(first_step(late, 16)).saves
    assert save.block_ids == ((31, 32, 33, 34), (0, 0, 0, 44))
    assert {31, 44} <= set(blocks.held())
    assert NULL_BLOCK not in blocks.held()


def test_without_tables_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A vLLM that does not show them, as behind a connector of its own."""
    pool = FakePool()
    made, _ = scheduler_half(pool, meet=False, groups=GROUPS, reaches=REACHES)
    made.meet_workers([Handshake(FINGERPRINT, COLUMNS)])
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(0)
    made.matched_tokens(one, 0)
    made.admitted(one, FakeBlocks(([], [])), 0)
    assert made.build_step(first_step(one, 18)) is NOTHING
    assert "nothing is saved: this vLLM does not tell" in caplog.text


# The worker


def memory() -> npt.NDArray[np.float32]:
    """[layers, blocks, heads, tokens, content]; both groups have a layer in one memory, as vLLM has it."""
    return np.zeros((2, 8, 2, BLOCK_TOKENS, CONTENT), np.float32)


def worker(kv: npt.NDArray[np.float32], tmp_path: Path) -> WorkerHalf:
    made = WorkerHalf(
        engine_config(groups=GROUPS, reaches=REACHES),
        ranks=lambda: (0, 0),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=real_node(tmp_path),
        log=LOG,
    )
    made.register({f"layers.{layer}": FakeTensor(kv[layer], kv) for layer in (0, 1)})
    assert made.handshake().columns == COLUMNS
    return made


def names(*blocks: int) -> bytes:
    return b"".join(block_name(bytes([block] * 32), ranges) for block in blocks for ranges in COLUMNS)


def test_null_blocks_are_neither_saved_nor_loaded(tmp_path: Path) -> None:
    kv = memory()
    kv[:] = np.random.default_rng(5).random(kv.shape, np.float32)
    before = kv.copy()
    with serving(tmp_path):
        made = worker(kv, tmp_path)
        save = Save(1, WIDTH, names(1, 2), bytes(len(names(1, 2))), ((1, 2), (NULL_BLOCK, 3)))
        made.start_saves(Step(saves=(save,)))
        assert wait_for(made).saved == {1: 1}
        assert made.tally.take().data["saved_objects"] == 6  # not the window's of the first block

        wanted = [each for at, each in enumerate(split(names(1, 2))) if at not in (2, 3)]
        client, found = lookup(tmp_path, b"".join(wanted), 1)
        assert found.blocks == 6
        table = np.zeros((2, WIDTH, 32), np.uint8)
        rows = np.frombuffer(found.descriptors, np.uint8).reshape(6, 32)
        table[0, :2], table[1] = rows[:2], rows[2:]
        load = Load("r", WIDTH, names(1), found.holders, table.tobytes(), ((5, 6), (NULL_BLOCK, 7)))
        made.start_loads(Step(loads=(load,)))
        assert wait_for(made).loaded == {"r": 2}
        assert made.take_finished() == ({"r"}, set())
        assert (kv[0, 5:7] == before[0, 1:3]).all()
        assert (kv[1, 7] == before[1, 3]).all()
        assert (kv[:, NULL_BLOCK] == before[:, NULL_BLOCK]).all()
        client.close()
        made.close()


@pytest.mark.parametrize("group", [0, 1])
def test_a_load_that_lacks_an_object_fails_as_a_whole(tmp_path: Path, group: int) -> None:
    """Blocks before it are no help: the window's are those before the end. No block id is reported."""
    kv = memory()
    with serving(tmp_path):
        made = worker(kv, tmp_path)
        save = Save(1, WIDTH, names(1, 2), bytes(len(names(1, 2))), ((1, 2), (3, 4)))
        made.start_saves(Step(saves=(save,)))
        wait_for(made)
        client, found = lookup(tmp_path, names(1, 2), WIDTH)
        table = np.frombuffer(found.descriptors, np.uint8).reshape(2, WIDTH, 32).copy()
        table[1, 2 * group, 8:] = 0  # of another size
        load = Load("r", WIDTH, names(1), found.holders, table.tobytes(), ((5, 6), (0, 7)))
        made.start_loads(Step(loads=(load,)))
        assert wait_for(made).loaded == {"r": 0}
        assert made.take_finished() == ({"r"}, {"r"})
        assert made.take_failed_blocks() == set()
        client.close()
        made.close()


def test_a_hand_over_of_which_a_block_is_missing_fails_as_a_whole(tmp_path: Path) -> None:
    with serving(tmp_path):
        made = worker(memory(), tmp_path)
        pull = Pull("r", 0, ((5, 6), (0, 7)))
        made.fail_pulls(HandoverStep(pulls=(pull,)))
        assert made.take_finished() == ({"r"}, {"r"})
        assert made.take_failed_blocks() == set()
        made.close()


def split(joined: bytes) -> list[bytes]:
    return [joined[at : at + BLOCK_NAME_BYTES] for at in range(0, len(joined), BLOCK_NAME_BYTES)]


def test_a_failed_load_is_computed_and_stored_again() -> None:
    pool = FakePool()
    made, _, tables = half(pool)
    one = hit(made, pool)
    made.admitted(one, FakeBlocks(([11, 12, 13, 14], [0, 0, 23, 24])), 4 * BLOCK_TOKENS)
    made.build_step(FakeStep())
    made.step_ended(FakeOutput({"r"}, Report(loaded={"r": 0})))
    assert pool.released == [7]
    assert made.matched_tokens(one, 0) == (0, False)
    made.admitted(one, FakeBlocks(([], [])), 0)
    tables.ids["r"] = ([11, 12, 13, 14, 15], [21, 22, 23, 24, 25])
    (save,) = made.build_step(first_step(one, 18)).saves
    assert save.block_ids == ((11, 12, 13, 14), (21, 22, 23, 24))


def test_the_native_answer_to_presence(tmp_path: Path) -> None:
    with serving(tmp_path):
        kv = memory()
        made = worker(kv, tmp_path)
        save = Save(1, WIDTH, names(1), bytes(len(names(1))), ((1,), (3,)))
        made.start_saves(Step(saves=(save,)))
        wait_for(made)
        node = real_node(tmp_path)(FINGERPRINT)
        pool = node.client
        assert pool is not None
        ticket = pool.submit_presence([*split(names(1))[:2], *split(names(2))[:1]])
        assert pool.wait_for_read(10)
        assert list(pool.poll()) == [(ticket, bytes([1, 1, 0]))]
        node.close()
        made.close()
