"""Both halves of the connector in an engine with a group of full attention and one with states."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.layout import read_layout
from moonpool.connectors.vllm.messages import Handshake, Load, Save, Step
from moonpool.connectors.vllm.reach import FULL, NULL_BLOCK, Reach
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.states import State, read_state, snapshots
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.store.keys import BLOCK_NAME_BYTES, Ranges, block_digests, block_name
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    FINGERPRINT,
    LOG,
    Clock,
    FakeBlockPool,
    FakeBlocks,
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

GROUPS = (("layers.0",), ("layers.1", "layers.2"))
REACHES = (FULL, Reach(state=True))
STATE = State("GDN_ATTN 3x5 float32", 60)
STATES = (None, STATE)
PAGE = BLOCK_TOKENS * 2 * CONTENT * 4  # bytes of an attention block, to which vLLM pads those of states
COLUMNS = (Ranges(0, 0, 1, 0, 1), Ranges(0, 1, 1, 0, 1), Ranges(1, 0, 1, 1, 2))
WIDTH = len(COLUMNS)
PROMPT = 18  # four blocks and a half


# What a step leaves


@pytest.mark.parametrize(
    ("computed", "scheduled", "told", "kept"),
    [
        (16, 16, {}, [0, 0, 0, 24]),
        (16, 8, {}, [0, 22, 0, 24]),  # the snapshot that the step began with is still there
        (18, 2, {}, [0, 0, 0, 24]),
        (14, 14, {}, [0, 0, 0, 0]),
        (15, 1, {}, [0, 0, 0, 0]),  # the last block is overwritten by the next step
        (14, 14, {12: 23}, [0, 0, 23, 0]),  # vLLM wrote one within the step
        (14, 14, {12: 99}, [0, 0, 99, 0]),
        (14, 14, {10: 99, 40: 99, 0: 99}, [0, 0, 0, 0]),  # inside of a block, and beyond the request
    ],
)
def test_snapshots(computed: int, scheduled: int, told: dict[int, int], kept: list[int]) -> None:
    assert snapshots([21, 22, 23, 24], computed, scheduled, BLOCK_TOKENS, told) == kept


def test_a_state_is_described_by_its_shapes_and_types() -> None:
    kind = SimpleNamespace(name="GDN_ATTN")
    types = SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4)
    spec = SimpleNamespace(shapes=((3, 8), (2, 4, 4)), dtypes=types, mamba_type=kind)
    state = read_state(spec)
    assert state.bytes == 3 * 8 * 2 + 2 * 4 * 4 * 4
    assert state.form.startswith("GDN_ATTN 3x8 ")
    assert " + 2x4x4 " in state.form


# The scheduler's half


def half(pool: FakePool) -> tuple[SchedulerHalf, FakeBlockPool, FakeTables]:
    made, blocks = scheduler_half(
        pool, meet=False, clock=Clock(), groups=GROUPS, reaches=REACHES, states=STATES
    )
    made.meet_workers([Handshake(FINGERPRINT, COLUMNS, handover_address="127.0.0.1:1")])
    tables = FakeTables()
    made.bind_block_tables(tables)
    return made, blocks, tables


def objects(*places: tuple[int, int]) -> bytes:
    """The names of the (block, group) of the prompt."""
    digests = block_digests(list(range(PROMPT)), BLOCK_TOKENS)
    return b"".join(
        block_name(digests[block], ranges)
        for block, group in places
        for ranges in COLUMNS
        if ranges.group == group
    )


def missed(made: SchedulerHalf, pool: FakePool) -> FakeRequest:
    """A request of which the pool has nothing, admitted."""
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(0)
    assert made.matched_tokens(one, 0) == (0, False)
    made.admitted(one, FakeBlocks(([], [])), 0)
    return one


def first_step(one: FakeRequest, computed: int, scheduled: int, told: Any = None) -> FakeStep:
    step = FakeStep(
        [New(one.request_id, ([], []), computed)], num_scheduled_tokens={one.request_id: scheduled}
    )
    if told is not None:
        vars(step)["kv_connector_block_state"] = SimpleNamespace(boundary_state_offloads=told)
    return step


def test_a_query_names_one_snapshot() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    made.arrived(request(PROMPT))
    assert pool.prefixes[-1][1] == objects((0, 0), (1, 0), (2, 0), (3, 0), (3, 1))


def test_a_hit_ends_where_there_is_a_snapshot() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(8)  # all KV, and no snapshot at the end
    assert made.matched_tokens(one, 0) == (None, False)
    ticket, names = pool.presences[-1]
    assert b"".join(names) == objects((0, 1), (1, 1), (2, 1), (3, 1))
    pool.answer(ticket, bytes([1, 1, 0, 0]))
    assert made.matched_tokens(one, 0) == (None, False)
    assert pool.prefixes[-1][1] == objects((0, 0), (1, 0), (1, 1))
    pool.answer_objects(5)
    assert made.matched_tokens(one, 0) == (2 * BLOCK_TOKENS, True)
    made.admitted(one, FakeBlocks(([11, 12], [NULL_BLOCK, 22])), 2 * BLOCK_TOKENS)
    (load,) = made.build_step(FakeStep()).loads
    assert load.block_ids == ((11, 12), (NULL_BLOCK, 22))
    table = np.frombuffer(load.descriptors, np.uint8).reshape(2, WIDTH, 32)[:, :, 0]
    assert table.tolist() == [[1, 2, 0], [3, 4, 5]]


def test_without_any_snapshot_there_is_no_hit() -> None:
    pool = FakePool()
    made, _, _ = half(pool)
    one = request(PROMPT)
    made.arrived(one)
    pool.answer_objects(8)
    assert made.matched_tokens(one, 0) == (None, False)
    pool.answer(pool.presences[-1][0], bytes(4))
    assert made.matched_tokens(one, 0) == (0, False)
    assert made.lookups.pins == 0


def test_snapshots_are_saved_and_other_states_are_not() -> None:
    pool = FakePool()
    made, blocks, tables = half(pool)
    one = missed(made, pool)
    tables.ids["r"] = ([11, 12], [NULL_BLOCK, 22])
    (first,) = made.build_step(first_step(one, 0, 8)).saves
    tables.ids["r"] = ([11, 12, 13, 14], [NULL_BLOCK, 22, NULL_BLOCK, 24])
    (second,) = made.build_step(next_step(one, 8, 6)).saves  # its last state is that of 14 tokens
    (third,) = made.build_step(next_step(one, 14, 2)).saves
    assert first.block_ids == ((11, 12), (NULL_BLOCK, 22))
    assert second.block_ids == ((13,), (NULL_BLOCK,))
    assert third.block_ids == ((14,), (24,))
    assert blocks.held() == [11, 12, 13, 14, 22, 24]
    nothing = bytes(BLOCK_NAME_BYTES)
    assert third.parents == objects((2, 0)) + nothing  # a snapshot has no parent


def test_the_snapshot_of_the_engines_own_prefix_is_saved() -> None:
    pool = FakePool()
    made, _, tables = half(pool)
    one = missed(made, pool)
    tables.ids["r"] = ([11, 12, 13, 14, 15], [NULL_BLOCK, 22, NULL_BLOCK, NULL_BLOCK, 25])
    (save,) = made.build_step(first_step(one, 8, 10)).saves
    assert save.block_ids == ((11, 12, 13, 14), (NULL_BLOCK, 22, NULL_BLOCK, NULL_BLOCK))


def test_a_snapshot_within_a_step_is_saved_where_vllm_tells() -> None:
    pool = FakePool()
    made, _, tables = half(pool)
    one = missed(made, pool)
    tables.ids["r"] = ([11, 12, 13, 14, 15], [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 24, 25])
    step = first_step(one, 0, 18, {"r": [(1, 24, 16)], "another": [(1, 99, 4)]})
    (save,) = made.build_step(step).saves
    assert save.block_ids == ((11, 12, 13, 14), (NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 24))


def test_nothing_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made, _, _ = half(FakePool())
        made.arrived(request(PROMPT, kv_transfer_params={"do_remote_decode": True}))
    assert made.handover.producer is made.handover.consumer is None
    assert "takes part in no hand-over: its model has layers with states" in caplog.text
    assert "request r is not handed over: its model has layers with states" in caplog.text


# The worker


def caches(blocks: int = 8) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8], dict[str, FakeTensor]]:
    """KV [blocks, heads, tokens, content], pages of states [layers, blocks, 1, 1, bytes]; both by layer."""
    kv = np.zeros((blocks, 2, BLOCK_TOKENS, CONTENT), np.float32)
    pages = np.zeros((2, blocks, 1, 1, PAGE), np.uint8)
    tensors = {"layers.0": FakeTensor(kv)}
    tensors |= {f"layers.{layer + 1}": FakeTensor(pages[layer], pages) for layer in (0, 1)}
    return kv, pages, tensors


def worker(tensors: dict[str, FakeTensor], tmp_path: Path, *, rank: int = 0, **changes: Any) -> WorkerHalf:
    seen: list[object] = []
    made = WorkerHalf(
        engine_config(groups=GROUPS, reaches=REACHES, states=STATES, **changes),
        ranks=lambda: (rank, 0),
        fingerprint=lambda layout, tensor: seen.append(tensor) or FINGERPRINT,
        open_node=real_node(tmp_path),
        log=LOG,
    )
    made.register(tensors)
    assert seen in ([], [tensors["layers.0"]])  # the type of KV is that of a layer with KV
    return made


def names(*blocks: int) -> bytes:
    return b"".join(block_name(bytes([block] * 32), ranges) for block in blocks for ranges in COLUMNS)


def test_states_are_moved_without_the_padding_of_their_pages(tmp_path: Path) -> None:
    kv, pages, tensors = caches()
    source = np.random.default_rng(5)
    kv[:] = source.random(kv.shape, np.float32)
    pages[:] = source.integers(0, 256, pages.shape, np.uint8)
    kv_before, before = kv.copy(), pages.copy()
    with serving(tmp_path):
        made = worker(tensors, tmp_path)
        assert made.handshake().columns == COLUMNS
        save = Save(1, WIDTH, names(1, 2), bytes(len(names(1, 2))), ((1, 2), (NULL_BLOCK, 3)))
        made.start_saves(Step(saves=(save,)))
        assert wait_for(made).saved == {1: 1}
        counted = made.tally.take().data
        assert counted["saved_objects"] == 5
        assert counted["saved_bytes"] == 2 * kv[0].nbytes + 2 * STATE.bytes

        wanted = names(1, 2)[: 2 * BLOCK_NAME_BYTES] + names(2)
        client, found = lookup(tmp_path, wanted, 1)
        assert found.blocks == 5
        table = np.zeros((2, WIDTH, 32), np.uint8)
        rows = np.frombuffer(found.descriptors, np.uint8).reshape(5, 32)
        table[0, :2], table[1] = rows[:2], rows[2:]
        load = Load("r", WIDTH, names(1), found.holders, table.tobytes(), ((5, 6), (NULL_BLOCK, 7)))
        made.start_loads(Step(loads=(load,)))
        assert wait_for(made).loaded == {"r": 2}
        assert made.take_finished() == ({"r"}, set())
        assert (kv[5:7] == kv_before[1:3]).all()
        assert (pages[:, 7, 0, 0, : STATE.bytes] == before[:, 3, 0, 0, : STATE.bytes]).all()
        assert (pages[:, 7, 0, 0, STATE.bytes :] == before[:, 7, 0, 0, STATE.bytes :]).all()
        assert (pages[:, :7] == before[:, :7]).all()
        client.close()
        made.close()


def test_each_rank_has_a_state_of_its_own(tmp_path: Path) -> None:
    kv = np.zeros((8, 1, BLOCK_TOKENS, CONTENT), np.float32)
    _, _, tensors = caches()
    tensors["layers.0"] = FakeTensor(kv)
    with serving(tmp_path):
        for rank in (0, 1):
            made = worker(tensors, tmp_path, rank=rank, tp_size=2)
            assert made.handshake().columns == (Ranges(0, rank, 1, 0, 1), Ranges(1, rank, 1, 1, 2))
            made.close()
        made = worker(tensors, tmp_path, tp_size=2, kv_heads=1)
        assert "several ranks hold the same KV heads" in made.handshake().refusal


def test_states_that_are_no_pages_are_refused() -> None:
    _, pages, tensors = caches()
    cut = tensors | {"layers.2": FakeTensor(pages[1, :, :, :, : STATE.bytes - 1], pages)}
    several: Any = tensors | {"layers.2": [tensors["layers.2"]]}
    missing = {name: tensors[name] for name in ("layers.0", "layers.1")}
    for caches_of, why in (
        (cut, "pages of at least 60 bytes"),
        (several, "several tensors"),
        (missing, "no states"),
    ):
        with pytest.raises(Refused, match=why):
            read_layout(caches_of, GROUPS, BLOCK_TOKENS, STATES)
