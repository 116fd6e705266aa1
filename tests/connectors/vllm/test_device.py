"""A worker whose KV cache lies on a card: the real node, the real native threads, and the software device in
the place of a CUDA driver. The engine's forward is an operation of a stream, which runs late."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moonpool import _native
from moonpool.connectors.pinned_arena import ALL
from moonpool.connectors.vllm import device_memory
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.messages import Load, Save, Step
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.store.keys import BLOCK_NAME_BYTES
from tests.connectors.vllm.card_bed import CardTensor, card_half
from tests.connectors.vllm.fakes import (
    FINGERPRINT,
    LOG,
    FakePool,
    FakeTensor,
    engine_config,
    node_at,
)
from tests.connectors.vllm.processes import Node
from tests.connectors.vllm.worker_bed import GROUP, lookup, memory, real_node, save, serving, wait_for
from tests.core.store_bed import until
from tests.soft_card import COMPILER, POLICIES, CardArray, SoftCard, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

DEADLINE_S = 30.0


@pytest.fixture(params=POLICIES)
def card(request: pytest.FixtureRequest, library: Path, rng: random.Random) -> Iterator[SoftCard]:
    with soft_card(library, request.param, rng.randrange(1 << 32)) as card:
        yield card


@pytest.fixture
def late_card(library: Path) -> Iterator[SoftCard]:
    with soft_card(library, "late") as card:
        yield card


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.Server]:
    with serving(tmp_path) as server:
        yield server


def load_of(found: _native.PrefixAnswer, job: Save, *blocks: int) -> Load:
    first = job.names[: job.width * BLOCK_NAME_BYTES]
    return Load("r", job.width, first, found.holders, found.descriptors, (blocks,))


def test_what_one_card_computed_is_loaded_on_another(
    server: _native.Server, tmp_path: Path, card: SoftCard, rng: random.Random
) -> None:
    values = np.random.default_rng(rng.randrange(1 << 32)).random(memory().shape, np.float32)
    source, target = card.array(values.shape), card.array(values.shape)
    writer = card_half(card, source, real_node(tmp_path))
    reader = card_half(card, target, real_node(tmp_path))

    card.forward(source, card.pinned(values))
    job = save(writer, 1, 2, 3)
    writer.start_saves(Step((), (job,)))
    assert wait_for(writer).saved == {1: 1}
    assert stored(server, writer) == 6

    keeper, found = lookup(tmp_path, job.names, job.width)
    assert found.blocks == 3
    card.forward(target, card.pinned(np.full_like(values, 7.0)))  # an earlier owner of the blocks
    reader.begin_loads()
    reader.start_loads(Step((load_of(found, job, 5, 0, 4),)))
    assert wait_for(reader).loaded == {"r": 3}
    card.settle()
    for wrote, read in ((1, 5), (2, 0), (3, 4)):
        np.testing.assert_array_equal(target.view[:, read], values[:, wrote])
    np.testing.assert_array_equal(target.view[:, 1], 7.0)
    keeper.close()
    writer.close()
    reader.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_card_reads_the_nodes_memory_by_itself(
    tmp_path: Path, card: SoftCard, rng: random.Random, caplog: pytest.LogCaptureFixture, refused: bool
) -> None:
    shape = (*memory().shape[:-1], 1024)  # objects of 32 KiB
    values = np.random.default_rng(rng.randrange(1 << 32)).random(shape, np.float32)
    source, target = card.array(shape), card.array(shape)
    with serving(tmp_path):
        settle(card, tmp_path)
        caplog.set_level(logging.INFO, LOG.name)
        writer = card_half(card, source, real_node(tmp_path))
        assert caplog.text.count("pinned") == 0
        card.limit_pinned(32 << 20 if refused else 1 << 40)
        reader = card_half(card, target, real_node(tmp_path), pin_bytes=ALL)
        card.forward(source, card.pinned(values))
        job = save(writer, 1, 2, 3)
        writer.start_saves(Step((), (job,)))
        told(writer)
        keeper, found = lookup(tmp_path, job.names, job.width)
        batches = card.calls("cuMemcpyBatchAsync")
        reader.begin_loads()
        reader.start_loads(Step((load_of(found, job, 5, 0, 4),)))
        assert told(reader) == {"r": 3}
        card.settle()
        for wrote, read in ((1, 5), (2, 0), (3, 4)):
            np.testing.assert_array_equal(target.view[:, read], values[:, wrote])
        assert (card.calls("cuMemcpyBatchAsync") > batches) == (not refused)
        if refused:
            assert "0 B of the node's 64.0 MiB are pinned for the card; loads of the rest go" in caplog.text
            assert "cuMemHostRegister: " in caplog.text
        else:
            assert "64.0 MiB of the node's 64.0 MiB are pinned for the card" in caplog.text
        keeper.close()
        writer.close()
        reader.close()


def test_an_answer_that_comes_too_late_ends_no_pin_and_the_end_of_the_node_ends_all(
    tmp_path: Path, late_card: SoftCard, rng: random.Random
) -> None:
    card, shape = late_card, (*memory().shape[:-1], 1024)
    values = np.random.default_rng(rng.randrange(1 << 32)).random(shape, np.float32)
    source, target = card.array(shape), card.array(shape)
    node = Node(tmp_path / "runtime", 64 << 20).start()
    token = (node.runtime / "token").read_bytes().strip()
    settle(card, node.runtime, token)
    writer = card_half(card, source, real_node(node.runtime, token, DEADLINE_S))
    reader = card_half(card, target, real_node(node.runtime, token, 1.0), pin_bytes=ALL)
    card.forward(source, card.pinned(values))
    job = save(writer, 1, 2, 3)
    writer.start_saves(Step((), (job,)))
    told(writer)
    keeper, found = lookup(node.runtime, job.names, job.width, token)
    released = card.calls("cuMemHostUnregister")

    node.pause()
    reader.start_saves(Step((), (save(reader, 4, job_id=2),)))
    told(reader)  # the node did not answer
    for answers in (False, True):
        if answers:
            node.resume()
        batches = card.calls("cuMemcpyBatchAsync")
        card.forward(target, card.pinned(np.zeros_like(values)))
        reader.begin_loads()
        reader.start_loads(Step((load_of(found, job, 5, 0, 4),)))
        assert told(reader) == {"r": 3}
        card.settle()
        for wrote, read in ((1, 5), (2, 0), (3, 4)):
            np.testing.assert_array_equal(target.view[:, read], values[:, wrote])
        assert card.calls("cuMemcpyBatchAsync") > batches
    assert card.calls("cuMemHostUnregister") == released

    node.kill()
    reader.begin_loads()
    reader.start_loads(Step((load_of(found, job, 5, 0, 4),)))
    assert told(reader) == {"r": 0}
    until(lambda: card.calls("cuMemHostUnregister") > released)
    keeper.close()
    writer.close()
    reader.close()


def settle(card: SoftCard, tmp_path: Path, token: bytes = b"token") -> None:
    """Waits until the node has gathered its memory into huge pages, or knows that it cannot."""
    array = card.array((1, 64))
    kv = _native.DeviceKv(0, _native.PartTable([[(array.address, 256, 256)]]), 1, 8 << 20, 1)
    client = _native.Client(str(tmp_path / "node.sock"), token, fingerprint=FINGERPRINT)
    client.connect()
    deadline_s = time.monotonic() + DEADLINE_S
    while "settled" in kv.pin_arena(client, ALL).why and time.monotonic() < deadline_s:
        threading.Event().wait(0.001)
    kv.close(1.0)


def stored(server: _native.Server, half: WorkerHalf) -> int:
    """Objects at the node, once the save has ended; what it reports then was reported when it was staged."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not half.is_idle and time.monotonic() < deadline_s:
        half.poll()
        threading.Event().wait(0.001)
    assert half.is_idle
    assert half.take_report() is None
    return int(server.metrics()["objects"])


def test_blocks_of_saves_are_free_while_the_node_does_not_answer(
    tmp_path: Path, card: SoftCard, rng: random.Random
) -> None:
    values = np.random.default_rng(rng.randrange(1 << 32)).random(memory().shape, np.float32)
    source = card.array(values.shape)
    node = Node(tmp_path / "runtime").start()
    token = (node.runtime / "token").read_bytes().strip()
    # Of 4 slots saves may hold 2, one for each.
    half = card_half(card, source, real_node(node.runtime, token, DEADLINE_S), ring_bytes=16 << 20)
    card.forward(source, card.pinned(values))
    node.pause()
    half.start_saves(Step((), (save(half, 1), save(half, 2, 3, job_id=2))))
    saved: dict[int, int] = {}
    while len(saved) < 2:
        saved |= wait_for(half).saved
    assert saved == {1: 1, 2: 1}
    assert not half.is_idle  # neither is in the pool
    card.forward(source, card.pinned(np.zeros_like(values)))
    node.resume()
    while not half.is_idle:
        half.poll()
        threading.Event().wait(0.001)
    assert node.metrics()["objects"] == 6
    half.close()
    node.stop()


def test_a_load_without_a_point_in_the_engines_stream_fails(
    server: _native.Server, tmp_path: Path, late_card: SoftCard
) -> None:
    source = late_card.array(memory().shape)
    half = card_half(late_card, source, real_node(tmp_path))
    job = save(half, 1)
    half.start_saves(Step((), (job,)))
    wait_for(half)
    stored(server, half)
    keeper, found = lookup(tmp_path, job.names, job.width)
    half.start_loads(Step((load_of(found, job, 2),)))
    assert wait_for(half).loaded == {"r": 0}
    keeper.close()
    half.close()


def test_a_card_that_dies_is_reported_once_for_each_request(
    server: _native.Server, tmp_path: Path, library: Path
) -> None:
    with soft_card(library, "late") as card:
        half = card_half(card, card.array(memory().shape), real_node(tmp_path))
        job = save(half, 1)
        half.start_saves(Step((), (job,)))
        wait_for(half)
        stored(server, half)
        keeper, found = lookup(tmp_path, job.names, job.width)
        half.begin_loads()
        card.die(1, 700)
        for number in range(10):
            load = dataclasses.replace(load_of(found, job, 2), request_id=f"r{number}")
            half.start_loads(Step((load,)))
        loaded: dict[str, int] = {}
        while len(loaded) < 10:
            report = wait_for(half)
            assert not loaded.keys() & report.loaded.keys()
            loaded |= report.loaded
        assert set(loaded.values()) == {0}
        half.start_saves(Step((), (dataclasses.replace(job, job_id=2),)))
        assert wait_for(half).saved == {2: 1}
        keeper.close()
        half.close()


def test_a_card_that_hangs_does_not_keep_an_engine_from_closing(
    server: _native.Server, tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "CLOSE_TIMEOUT_S", 0.1)
    with soft_card(library, "late") as card:
        half = card_half(card, card.array(memory().shape), real_node(tmp_path))
        card.hang(1)
        half.start_saves(Step((), (save(half, 1),)))
        half.close()


def told(half: WorkerHalf) -> dict[str, int]:
    """Polls until nothing is under way: the loads that were reported, each once."""
    loaded: dict[str, int] = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        half.poll()
        report = half.take_report()
        if report is not None:
            assert not loaded.keys() & report.loaded.keys()
            loaded |= report.loaded
        half.take_finished()
        half.take_failed_blocks()
        if half.is_idle:
            return loaded
        threading.Event().wait(0.001)
    raise AssertionError("loads or saves did not end")


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_for_ever_amid_a_hundred_loads_is_told_once_for_each(
    server: _native.Server, tmp_path: Path, library: Path, rng: random.Random, policy: str
) -> None:
    with soft_card(library, policy, rng.randrange(1 << 32)) as card:
        values = np.random.default_rng(rng.randrange(1 << 32)).random(memory().shape, np.float32)
        source, target = card.array(values.shape), card.array(values.shape)
        writer, half = (card_half(card, kv, real_node(tmp_path)) for kv in (source, target))
        card.forward(source, card.pinned(values))
        job = save(writer, 1)
        writer.start_saves(Step((), (job,)))
        told(writer)
        keeper, found = lookup(tmp_path, job.names, job.width)
        half.begin_loads()
        loads = [dataclasses.replace(load_of(found, job, 2), request_id=f"r{n}") for n in range(100)]
        half.start_loads(Step(tuple(loads[:50])))
        first = told(half)
        assert first == {load.request_id: 1 for load in loads[:50]}
        card.die(rng.randrange(1, 20), 700)
        half.start_loads(Step(tuple(loads[50:])))
        last = told(half)
        assert last.keys() == {load.request_id for load in loads[50:]}
        assert 0 in last.values()
        assert half.take_finished() == (set(), set())
        keeper.close()
        half.close()
        writer.close()


def test_an_engine_closes_with_copies_under_way(
    server: _native.Server, tmp_path: Path, card: SoftCard, rng: random.Random
) -> None:
    source, target = card.array(memory().shape), card.array(memory().shape)
    writer, half = (card_half(card, kv, real_node(tmp_path)) for kv in (source, target))
    job = save(writer, 1, 2, 3)
    writer.start_saves(Step((), (job,)))
    told(writer)
    keeper, found = lookup(tmp_path, job.names, job.width)
    half.begin_loads()
    loads = (dataclasses.replace(load_of(found, job, 5, 0, 4), request_id=f"r{n}") for n in range(20))
    half.start_loads(Step(tuple(loads)))
    half.start_saves(Step((), tuple(save(half, 1, job_id=n) for n in range(5))))
    half.close()
    target.view[:] = 9.0  # another owner's from now on
    card.settle()
    np.testing.assert_array_equal(target.view, 9.0)
    keeper.close()
    writer.close()


def test_a_child_of_fork_leaves_copies_under_way_to_its_parent(
    server: _native.Server, tmp_path: Path, card: SoftCard, rng: random.Random
) -> None:
    values = np.random.default_rng(rng.randrange(1 << 32)).random(memory().shape, np.float32)
    source, target = card.array(values.shape), card.array(values.shape)
    writer, half = (card_half(card, kv, real_node(tmp_path)) for kv in (source, target))
    card.forward(source, card.pinned(values))
    job = save(writer, 1, 2, 3)
    writer.start_saves(Step((), (job,)))
    told(writer)
    keeper, found = lookup(tmp_path, job.names, job.width)
    half.begin_loads()
    loads = [dataclasses.replace(load_of(found, job, 5, 0, 4), request_id=f"r{n}") for n in range(20)]
    half.start_loads(Step(tuple(loads)))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            half.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert told(half) == {load.request_id: 3 for load in loads}
    card.settle()
    np.testing.assert_array_equal(target.view[:, 5], values[:, 1])
    keeper.close()
    half.close()
    writer.close()


def tensors(kv: CardArray) -> dict[str, CardTensor]:
    return {name: CardTensor(kv, number) for number, name in enumerate(GROUP)}


def test_an_engine_sleeps_and_wakes_up_at_other_addresses(
    server: _native.Server, tmp_path: Path, card: SoftCard, rng: random.Random
) -> None:
    values = np.random.default_rng(rng.randrange(1 << 32)).random(memory().shape, np.float32)
    before, after = card.array(values.shape), card.array(values.shape)
    half = card_half(card, before, real_node(tmp_path))
    card.forward(before, card.pinned(values))
    job = save(half, 1, 2, 3)
    half.start_saves(Step((), (job,)))
    assert wait_for(half).saved == {1: 1}
    stored(server, half)
    keeper, found = lookup(tmp_path, job.names, job.width)
    half.begin_loads()
    loads = tuple(
        dataclasses.replace(load_of(found, job, 5, 0, 4), request_id=f"r{number}") for number in range(5)
    )
    half.start_loads(Step(loads))
    half.start_saves(Step((), (dataclasses.replace(save(half, 4, job_id=2)),)))

    half.sleep()
    half.sleep()

    card.settle()
    before.view[:] = 9.0  # another owner's from now on
    late = dataclasses.replace(loads[0], request_id="asleep")
    half.begin_loads()
    half.start_loads(Step((late,)))
    half.start_saves(Step((), (save(half, 5, job_id=3),)))
    assert told(half) == {load.request_id: 0 for load in (*loads, late)}

    half.wake_up(tensors(after))
    half.begin_loads()
    half.start_loads(Step((dataclasses.replace(loads[0], request_id="awake"),)))
    assert told(half) == {"awake": 3}
    card.settle()
    for wrote, read in ((1, 5), (2, 0), (3, 4)):
        np.testing.assert_array_equal(after.view[:, read], values[:, wrote])
    np.testing.assert_array_equal(before.view, 9.0)
    half.start_saves(Step((), (save(half, 5, job_id=4),)))
    assert wait_for(half).saved == {4: 1}
    told(half)
    keeper.close()
    half.close()


def test_memory_that_cannot_be_used_after_a_sleep_is_not_touched(
    server: _native.Server, tmp_path: Path, late_card: SoftCard
) -> None:
    half = card_half(late_card, late_card.array(memory().shape), real_node(tmp_path))
    half.wake_up()  # it does not sleep
    job = save(half, 1)
    half.start_saves(Step((), (job,)))
    told(half)
    keeper, found = lookup(tmp_path, job.names, job.width)
    half.sleep()
    kv = memory()
    half.wake_up({name: FakeTensor(kv[number], kv, device="cuda") for number, name in enumerate(GROUP)})
    half.begin_loads()
    half.start_loads(Step((load_of(found, job, 2),)))
    half.start_saves(Step((), (dataclasses.replace(job, job_id=2),)))
    assert told(half) == {"r": 0}
    half.wake_up()  # where it was
    half.begin_loads()
    half.start_loads(Step((load_of(found, job, 2),)))
    assert told(half) == {"r": 1}
    keeper.close()
    half.close()


def refusal_of_host_memory() -> str:
    """What a worker says of memory of the host that is called a card's."""
    kv: npt.NDArray[np.float32] = memory()
    half = WorkerHalf(
        engine_config(),
        ranks=lambda: (0, 0),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=node_at(FakePool()),
        open_device=functools.partial(
            DeviceMemory, current_stream=lambda device: 0, ring_bytes=8 << 20, copy_threads=2, log=LOG
        ),
        log=LOG,
    )
    half.register({name: FakeTensor(kv[number], kv, device="cuda") for number, name in enumerate(GROUP)})
    return half.handshake().refusal


def test_without_a_driver_the_engine_serves_without_the_pool() -> None:
    _native.use_driver_for_tests("/no/such/libcuda.so.1")
    try:
        assert "/no/such/libcuda.so.1" in refusal_of_host_memory()
    finally:
        _native.use_driver_for_tests("")


def test_memory_of_the_host_that_is_called_a_cards_is_refused(late_card: SoftCard) -> None:
    assert "does not lie in memory of device 0" in refusal_of_host_memory()
