"""The worker's half: every load and save of a step is reported once, and bytes go where they belong.

The last tests run on the real node and the real native threads, with numpy memory in the place of KV caches.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool import _native
from moonpool.connectors.vllm.messages import NOTHING, Load, Report, Step
from moonpool.connectors.vllm.pd.consumer_worker import Ended
from moonpool.connectors.vllm.pd.handover_worker import KvMemory
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.pd.step_plan import HandoverStep, Pull
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.connectors.weights import weights_digest
from moonpool.core.errors import Unavailable
from moonpool.core.store.keys import BLOCK_NAME_BYTES, Ranges, block_name
from tests.connectors.vllm.fakes import (
    FINGERPRINT,
    LIFE,
    LOG,
    FakePool,
    FakeTensor,
    Loaded,
    Saved,
    engine_config,
    node_at,
)
from tests.connectors.vllm.worker_bed import (
    GROUP,
    load,
    lookup,
    memory,
    real_node,
    save,
    serving,
    wait_for,
    worker_half,
)


def test_handshake_tells_the_objects() -> None:
    half = worker_half(memory(), node_at(FakePool()))
    assert half.handshake().fingerprint == FINGERPRINT
    assert half.handshake().columns == (Ranges(0, 0, 1, 0, 2), Ranges(0, 1, 1, 0, 2))
    second = worker_half(memory(1), node_at(FakePool()), rank=1, tp_size=2)
    assert second.handshake().columns == (Ranges(0, 1, 1, 0, 2),)


def test_the_hand_over_knows_the_sizes_of_the_engine() -> None:
    opened: list[KvMemory] = []
    half = WorkerHalf(
        engine_config(tp_size=2, workers=4, kv_heads=2),
        ranks=lambda: (1, 1),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=node_at(FakePool()),
        log=LOG,
        open_handover_worker=lambda memory, device: opened.append(memory),
    )
    kv = memory(1)
    half.register({name: FakeTensor(kv[number], kv) for number, name in enumerate(GROUP)})
    (given,) = opened
    assert given.sizes == Sizes(kv_heads=2, tp_size=2, pp_size=2)
    assert (given.rank, given.tp_rank, given.pp_rank) == (3, 1, 1)
    layer_bytes = kv[0, 0].nbytes
    assert given.held.layers == [[(number, layer_bytes) for number in range(len(GROUP))]]


def test_a_worker_that_waits_for_its_weights_joins_late(tmp_path: Path, held: threading.Event) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)

    def fingerprint(layout: object, tensor: object) -> bytes:
        return bytes.fromhex(weights_digest(tmp_path))

    kv = memory()
    half = WorkerHalf(
        engine_config(),
        ranks=lambda: (0, 0),
        fingerprint=fingerprint,
        open_node=node_at(pool := FakePool()),
        log=LOG,
    )
    half.register({name: FakeTensor(kv[number], kv) for number, name in enumerate(GROUP)})
    assert "are being read" in half.handshake().pending
    assert half.handshake().fingerprint == b""
    assert half.take_report() is None
    held.set()
    assert half._late is not None
    assert half._late.reading.over.wait(60)
    report = half.take_report()
    assert report is not None
    (late,) = report.handshakes
    assert (late.fingerprint, late.pending) == (bytes.fromhex(weights_digest(tmp_path)), "")
    assert late.columns == (Ranges(0, 0, 1, 0, 2), Ranges(0, 1, 1, 0, 2))
    assert half.take_report() is None
    half.start_loads(Step((load(half, 3, 5),)))
    assert len(pool.loads) == 1


def test_a_worker_whose_weights_changed_says_so_late(tmp_path: Path, held: threading.Event) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    kv = memory()
    half = WorkerHalf(
        engine_config(),
        ranks=lambda: (0, 0),
        fingerprint=lambda layout, tensor: bytes.fromhex(weights_digest(tmp_path)),
        open_node=node_at(FakePool()),
        log=LOG,
    )
    half.register({name: FakeTensor(kv[number], kv) for number, name in enumerate(GROUP)})
    (tmp_path / "model.safetensors").unlink()
    held.set()
    assert half._late is not None
    assert half._late.reading.over.wait(60)
    report = half.take_report()
    assert report is not None
    assert "holds no weight file" in report.handshakes[0].refusal


def test_load_ends_well() -> None:
    half = worker_half(memory(), node_at(pool := FakePool()))
    half.start_loads(Step((load(half, 3, 5),)))
    ((ticket, life, descriptors, indices, columns),) = pool.loads
    assert (life, len(descriptors)) == (LIFE, 4 * 32)
    assert indices == [3, 3, 5, 5]
    assert columns == [0, 1, 0, 1]
    half.poll()
    assert half.take_finished() == (set(), set())
    pool.answer(ticket, Loaded(bytes([1, 1, 1, 1]), 999))
    half.poll()
    assert half.take_finished() == ({"r"}, set())
    assert half.take_finished() == (set(), set())
    assert half.take_failed_blocks() == set()
    assert half.take_report() == Report(loaded={"r": 2})
    assert half.take_report() is None
    stats = half.tally.take()
    assert stats is not None
    assert stats.data["loaded_bytes"] == 999


def test_failed_objects_are_failed_blocks() -> None:
    half = worker_half(memory(), node_at(pool := FakePool()))
    half.start_loads(Step((load(half, 0, 2, 4),)))
    pool.answer(pool.loads[0][0], Loaded(bytes([1, 1, 1, 0, 1, 1]), 5, "a pinned object was removed"))
    half.poll()
    assert half.take_finished() == ({"r"}, set())
    assert half.take_failed_blocks() == {2}
    assert half.take_report() == Report(loaded={"r": 1})


def test_several_groups_fail_by_request() -> None:
    half = worker_half(memory(), node_at(pool := FakePool()), groups=(("layers.0",), ("layers.1",)))
    columns = half.handshake().columns
    assert [ranges.group for ranges in columns] == [0, 0, 1, 1]
    first = b"".join(block_name(bytes(32), ranges) for ranges in columns)
    half.start_loads(Step((Load("r", 4, first, LIFE, bytes(2 * 4 * 32), ((0, 1), (4, 5))),)))
    assert pool.loads[0][3] == [0, 0, 4, 4, 1, 1, 5, 5]
    assert pool.loads[0][4] == [0, 1, 2, 3] * 2
    pool.answer(pool.loads[0][0], Loaded(bytes([1] * 7 + [0])))
    half.poll()
    assert half.take_finished() == ({"r"}, {"r"})
    assert half.take_failed_blocks() == set()
    assert half.take_report() == Report(loaded={"r": 0})


@pytest.mark.parametrize("how", ["gone", "broken", "unplanned", "short"])
def test_every_load_ends(how: str) -> None:
    pool = FakePool(broken=Unavailable("gone") if how == "broken" else None)
    half = worker_half(memory(), node_at(None if how == "gone" else pool))
    job = load(half, 1, 2)
    if how == "unplanned":
        job = Load("r", 0, b"", b"", b"", ((1, 2),))
    half.start_loads(Step((job,)))
    if how == "short":
        pool.answer(pool.loads[0][0], Loaded(bytes([1, 1, 1])))
        half.poll()
    assert half.take_finished() == ({"r"}, set())
    assert half.take_failed_blocks() == {1, 2}


@pytest.mark.parametrize("how", ["gone", "broken", "replica", "answered"])
def test_every_save_ends(how: str) -> None:
    pool = FakePool(broken=Unavailable("gone") if how == "broken" else None)
    replica = {"rank": 1, "tp_size": 4} if how == "replica" else {}
    half = worker_half(memory(1 if replica else 2), node_at(None if how == "gone" else pool), **replica)
    half.start_saves(Step((), (save(half, 1, 2, job_id=8),)))
    if how == "answered":
        assert half.take_report() is None
        pool.answer(pool.saves[0][0], Saved(stored=3, existed=1, bytes_stored=77))
        half.poll()
    assert half.take_report() == Report(saved={8: 1})
    assert (len(pool.saves) == 1) == (how == "answered")


def test_after_an_exception_what_is_not_under_way_has_failed() -> None:
    half = worker_half(memory(), node_at(pool := FakePool()))
    step = Step((load(half, 1), load(half, 2, request_id="s")), (save(half, 3), save(half, 4, job_id=2)))
    half.start_loads(Step(step.loads[:1]))
    half.start_saves(Step((), step.saves[:1]))
    half.fail_loads(step)
    half.give_up_saves(step)
    assert half.take_finished() == ({"s"}, set())
    assert half.take_report() == Report(loaded={"s": 0}, saved={2: 1})
    assert len(pool.loads) == len(pool.saves) == 1


def test_an_end_is_told_once() -> None:
    """vLLM dies of the second."""
    half = worker_half(memory(), node_at(pool := FakePool()))
    job = load(half, 1)
    half.start_loads(Step((job,)))
    half.fail_loads(Step((dataclasses.replace(job, request_id="s"),)))
    pool.answer(pool.loads[0][0], Loaded(bytes([1, 1])))
    half.poll()
    assert half.take_finished() == ({"r", "s"}, set())
    half._finish("r", job.block_ids, ())
    assert half.take_finished() == (set(), set())


def test_pulls_without_a_station_end() -> None:
    half = worker_half(memory(), node_at(FakePool()))
    step = HandoverStep(pulls=(Pull("r", 0, ((1, 2),)),))
    half.fail_pulls(step)
    assert half.take_finished() == ({"r"}, set())
    assert half.take_failed_blocks() == {1, 2}


class EndedPulls:
    """A handover_worker whose pulls have all ended well."""

    def __init__(self) -> None:
        self.pulls: list[Pull] = []

    @property
    def has_news(self) -> bool:
        return bool(self.pulls)

    def begin(self, step: HandoverStep) -> None: ...

    def pull(self, step: HandoverStep) -> None:
        self.pulls += step.pulls

    def take_ended(self) -> list[Ended]:
        ended, self.pulls = [Ended(pull, pull.blocks, 64, 0.1, "") for pull in self.pulls], []
        return ended

    def take_heartbeats(self) -> tuple[set[int], dict[int, int]]:
        return set(), {}

    def take_lost(self) -> set[str]:
        return set()


def test_what_came_before_a_reset_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else blocks of the old weights would be in vLLM's cache once their request is computed."""
    half = worker_half(memory(), node_at(FakePool()))
    monkeypatch.setattr(half, "_handover_worker", EndedPulls())
    first, again = Pull("r", 0, ((1, 2),)), Pull("r", 0, ((3, 4),))
    half.start_pulls(HandoverStep(pulls=(first, Pull("s", 0, ((5,),)))))
    half.begin_handover(HandoverStep(drops=("r",), voids=("r",)))
    half.poll()
    assert half.take_finished() == ({"r", "s"}, set())
    assert half.take_failed_blocks() == {1, 2}
    assert half.take_report() == Report(loaded={"r": 0, "s": 1})
    half.begin_handover(HandoverStep(drops=("r",), voids=("r",)))  # it has ended: nothing is under way
    half.start_pulls(HandoverStep(pulls=(again,)))
    half.poll()
    assert half.take_finished() == ({"r"}, set())
    assert half.take_failed_blocks() == set()


def test_memory_that_cannot_be_used_is_refused_in_the_handshake() -> None:
    half = WorkerHalf(
        engine_config(),
        ranks=lambda: (0, 0),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=node_at(FakePool()),
        log=LOG,
    )
    half.register({name: FakeTensor(memory()[0], device="cuda") for name in GROUP})
    assert "this worker copies host memory only" in half.handshake().refusal
    half.start_loads(Step((Load("r", 2, b"", b"", b"", ((1,),)),)))
    assert half.take_finished() == ({"r"}, set())


def test_nothing_to_do_touches_nothing() -> None:
    half = worker_half(memory(), node_at(pool := FakePool()))
    half.start_loads(NOTHING)
    half.start_saves(NOTHING)
    half.poll()
    assert pool == FakePool()


# On the real node


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.Server]:
    with serving(tmp_path) as server:
        yield server


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_read_what_one_wrote(server: _native.Server, tmp_path: Path, ranks: int) -> None:
    """The canonical form: objects do not depend on how many ranks wrote or read them."""
    source = memory()
    source[:] = np.random.default_rng(1).random(source.shape, np.float32)
    writer = worker_half(source, real_node(tmp_path))
    job = save(writer, 1, 2, 3)
    writer.start_saves(Step((), (job,)))
    assert wait_for(writer).saved == {1: 1}
    assert server.metrics()["objects"] == 6

    keeper, found = lookup(tmp_path, job.names, job.width)
    assert found.blocks == 3
    target = memory()
    for rank in range(ranks):
        heads = 2 // ranks
        part = np.ascontiguousarray(target[:, :, rank * heads : (rank + 1) * heads])
        reader = worker_half(part, real_node(tmp_path), rank=rank, tp_size=ranks)
        wanted = Load(
            "r",
            job.width,
            job.names[: job.width * BLOCK_NAME_BYTES],
            found.holders,
            found.descriptors,
            ((5, 0, 4),),
        )
        reader.start_loads(Step((wanted,)))
        assert wait_for(reader).loaded == {"r": 3}
        target[:, :, rank * heads : (rank + 1) * heads] = part
        reader.close()

    assert (target[:, [5, 0, 4]] == source[:, [1, 2, 3]]).all()
    assert not target[:, [1, 2, 3]].any()
    assert server.check_integrity()
    keeper.close()
    writer.close()


def test_a_restarted_node_is_a_failed_load_and_never_wrong_bytes(
    server: _native.Server, tmp_path: Path
) -> None:
    source = memory()
    source[:] = 1.0
    writer = worker_half(source, real_node(tmp_path))
    job = save(writer, 1)
    writer.start_saves(Step((), (job,)))
    wait_for(writer)
    keeper, found = lookup(tmp_path, job.names, job.width)
    reader = worker_half(target := memory(), real_node(tmp_path))

    names, descriptors = job.names[: job.width * BLOCK_NAME_BYTES], found.descriptors
    reader.start_loads(Step((Load("r", job.width, names, bytes(16), descriptors, ((2,),)),)))
    assert wait_for(reader).loaded == {"r": 0}
    assert reader.take_failed_blocks() == {2}
    server.stop()
    reader.start_loads(Step((Load("s", job.width, names, found.holders, descriptors, ((3,),)),)))
    assert wait_for(reader).loaded.keys() == {"s"}
    assert not target[:, 2].any()
    for half in (reader, writer):
        half.close()
    keeper.close()
