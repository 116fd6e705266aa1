"""TransferEngine against peers in other processes: every kind of memory, every transport, batches, states,
priorities, messages, and what it refuses with which words."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import os
import pickle
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, cast

import numpy as np
import pytest

from moonpool import (
    Batch,
    Priority,
    Region,
    Segment,
    Slice,
    SliceState,
    TransferEngine,
    TransferError,
    TransferState,
)
from moonpool.core.errors import (
    AuthError,
    Closed,
    ConfigError,
    InvalidArgument,
    Timeout,
    TooLarge,
    Unavailable,
)
from moonpool.core.store.buffers import memory_of
from moonpool.core.transfer.region import RegionTable

from .engine_bed import Peer, Relay, moved
from .store_bed import MIB, TOKEN, Tensor, until

SIZE = MIB


@pytest.fixture(scope="module", params=["host_arena", "host"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    made = Peer(request.param, SIZE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own() -> Iterator[Peer]:
    made = Peer("host_arena", SIZE)
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[Callable[..., TransferEngine]]:
    """Makes engines that end with the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(TransferEngine(**({"token": TOKEN} | options)))


@pytest.fixture
def engine(engines: Callable[..., TransferEngine]) -> TransferEngine:
    return engines(name="here")


# ---- memory


class DlpackOnly:
    """What a library without the buffer protocol gives."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self._array = held

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


KINDS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(4096),
    "mmap": lambda: mmap.mmap(-1, 4096),
    "numpy": lambda: np.zeros((64, 16), np.float32),
    "array": lambda: array.array("Q", [0] * 512),
    "ctypes": lambda: (ctypes.c_char * 4096)(),
    "memoryview": lambda: memoryview(bytearray(8192))[1024:5120],
    "tensor": lambda: Tensor(np.zeros(4096, np.uint8)),
    "dlpack": lambda: DlpackOnly(np.zeros(1024, np.float32)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_buffer_is_read_into_and_written_from(
    engine: TransferEngine, own: Peer, rng: random.Random, kind: str
) -> None:
    memory = KINDS[kind]()
    with engine.register(memory) as region:
        segment = engine.open(own.address)
        data = rng.randbytes(4096)
        own.poke(data, 100)
        assert region.length == 4096
        assert engine.read(segment, memory, segment.at(100)) == 4096
        assert ctypes.string_at(region.address, 4096) == data
        assert engine.write(segment, region, segment.at(50000), 4096) == 4096
        assert own.peek(50000, 4096) == data


def test_an_address_and_a_length(engine: TransferEngine, own: Peer) -> None:
    memory = ctypes.create_string_buffer(b"twelve bytes", 12)
    segment = engine.open(own.address)
    with engine.register((ctypes.addressof(memory), 12)) as region:
        assert engine.write(segment, region, segment.at(0)) == 12
        assert engine.write(segment, region.at(7), segment.at(20), 5) == 5
    assert own.peek(0, 12) == b"twelve bytes"
    assert own.peek(20, 5) == b"bytes"


def test_allocated_memory_is_zero_aligned_and_has_a_view(engine: TransferEngine) -> None:
    region = engine.allocate(3 * 4096 + 1, "cpu:1")
    assert region.address % mmap.PAGESIZE == 0
    assert region.length == len(region) == len(region.view) == 3 * 4096 + 1
    assert bytes(region.view) == bytes(region.length)
    assert region.location == "cpu:1"
    region.view[:5] = b"hello"
    assert ctypes.string_at(region.at(0), 5) == b"hello"
    view = region.view
    region.close()
    region.close()
    assert bytes(view[:5]) == b"hello"  # the last reference frees it
    with pytest.raises(Closed, match="closed"):
        region.view  # noqa: B018
    assert "closed" in repr(region)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (b"read-only", "read-only"),
        (memoryview(b"read-only"), "read-only"),
        (bytearray(), "no bytes"),
        (np.zeros((64, 64))[:, ::2], "not contiguous"),
        (Tensor(np.zeros(64), contiguous=False), "contiguous"),
        (Tensor(np.zeros(64), device="cuda"), "CUDA driver of this process does not know"),
        ("text", "no buffer"),
        (7, "no buffer"),
        ((0, 10), "no range"),
        ((4096, 0), "no range"),
        ((4096, -1), "no range"),
        ((1 << 63, 1 << 63), None),
        (("a", "b"), "two integers"),
        ((1, 2, 3), "two integers"),
    ],
    ids=str,
)
def test_what_is_no_memory(engine: TransferEngine, memory: Any, words: str | None) -> None:
    if words is None:
        assert memory_of(memory).length == 1 << 63  # an (address, length) is believed as far as it goes
        return
    with pytest.raises(InvalidArgument, match=words):
        engine.register(memory)


def test_overlapping_and_repeated_registrations(engine: TransferEngine) -> None:
    memory = bytearray(8192)
    region = engine.register(memory)
    with pytest.raises(InvalidArgument, match="overlap"):
        engine.register((region.address + 4096, 4096))
    region.close()
    engine.register(memory).close()
    engine.register((region.address, 4096)).close()


def test_a_bytearray_cannot_move_while_it_is_registered(engine: TransferEngine) -> None:
    memory = bytearray(4096)
    with engine.register(memory), pytest.raises(BufferError):
        memory.extend(b"x")
    memory.extend(b"x")


def test_a_region_keeps_its_object_alive(engine: TransferEngine) -> None:
    class Held(bytearray):
        pass

    memory = Held(4096)
    alive = weakref.ref(memory)
    region = engine.register(memory)
    del memory
    gc.collect()
    assert alive() is not None
    region.close()
    gc.collect()
    assert alive() is None


def test_an_engine_that_ends_before_its_transfers_frees_no_memory(
    engine: TransferEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The native close that comes to its deadline is tested in C++; this is what its answer does."""
    memory = bytearray(4096)
    region = engine.register(memory)
    engine._native.close()
    assert not engine._regions.close_all(may_free=False)
    assert "its regions stay in memory" in caplog.text
    with pytest.raises(Timeout, match="close the engine again"):
        region.close()
    del region
    gc.collect()
    with pytest.raises(BufferError):
        memory.extend(b"x")
    assert engine.close()  # nothing is left
    memory.extend(b"x")


def test_a_region_and_its_engine_are_closed_at_once(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's close comes between the end of the registration and that of the region."""
    region = engine.register(bytearray(4096))
    table, native = engine._regions, engine._native

    class Closing:
        @staticmethod
        def deregister(address: int) -> None:
            native.deregister(address)
            engine.close()

    monkeypatch.setattr(table, "_native", Closing)
    region.close()
    assert "closed" in repr(region)
    region.close()


def test_offsets_outside_of_a_region(engine: TransferEngine, own: Peer) -> None:
    region = engine.allocate(100)
    segment = engine.open(own.address)
    for place in (region, segment, segment.regions[0]):
        for offset in (-1, 1 << 40):
            with pytest.raises(InvalidArgument, match="outside"):
                place.at(offset)
    with pytest.raises(InvalidArgument, match="none of number 3"):
        segment.at(0, 3)


@pytest.mark.parametrize(
    ("protection", "why"), [(0, "without access"), (mmap.PROT_READ, "read-only"), (None, "nothing is mapped")]
)
def test_memory_that_the_cpu_may_not_touch_is_refused(
    engine: TransferEngine, protection: int | None, why: str
) -> None:
    """Any GPU's addresses are such: a peer's write would end this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, *[ctypes.c_int] * 2, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = 4096  # where no process maps anything
    if protection is not None:
        address = libc.mmap(None, MIB, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    with pytest.raises(InvalidArgument, match=f"{address:#x} .*{why}.* memory of a CUDA card"):
        engine.register((address, MIB))
    assert engine.metrics()["regions"] == 0
    if protection is not None:
        libc.munmap(address, MIB)


def test_memory_beyond_what_the_machine_has_is_too_large(engine: TransferEngine) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(TooLarge, match="cannot be had"):
        engine.allocate(total)


def test_local_memory_must_be_registered(engine: TransferEngine, own: Peer) -> None:
    segment = engine.open(own.address)
    own.poke(b"before")
    region = engine.allocate(4096)
    stranger = bytearray(4096)
    for local in (stranger, memory_of(stranger).address, region.at(4095), 8):
        with pytest.raises(InvalidArgument, match="register"):
            engine.write(segment, local, segment.at(0), 100)
        with pytest.raises(InvalidArgument, match="register"):
            engine.submit([Slice("write", segment, local, segment.at(0), 100)])
    assert own.peek(0, 6) == b"before"
    with pytest.raises(InvalidArgument, match="do not fit"):
        engine.read(segment, region, segment.at(0), 5000)
    with pytest.raises(InvalidArgument, match="give a length"):
        engine.read(segment, region.at(0), segment.at(0))


# ---- peers and transports


def test_what_a_peer_says_of_itself(engine: TransferEngine, peer: Peer) -> None:
    segment = engine.open(peer.address)
    assert segment.name == "peer"
    assert len(segment.id) == 16
    assert segment.address == peer.address
    (region,) = segment.regions
    assert (region.address, region.length) == (peer.region, SIZE)
    assert region.kind == peer.kind
    assert region.location == {"host_arena": "cpu:0", "host": "cpu:1"}[peer.kind]
    assert region.transport == segment.transport == "shm"
    assert "peer" in repr(segment)


def test_a_region_that_comes_later_is_found(engines: Callable[..., TransferEngine]) -> None:
    left, right = engines(name="left"), engines(name="right")
    segment = left.open(right.addresses[0])
    assert segment.regions == ()
    assert segment.transport == ""
    here, there = left.allocate(4096), right.register(bytearray(4096))
    there.view[:4] = b"late"
    assert left.read(segment, here, there.address, 4) == 4  # also without refresh()
    assert bytes(here.view[:4]) == b"late"
    segment.refresh()
    assert segment.at(0) == there.address


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_random_ranges_over_each_transport(
    engines: Callable[..., TransferEngine], peer: Peer, rng: random.Random, transport: str
) -> None:
    """Against a plain model of both memories; the engine's counters say which way the bytes went."""
    engine = engines(transports=[transport])
    region = engine.allocate(SIZE)
    segment = engine.open(peer.address)
    here, there = bytearray(rng.randbytes(SIZE)), bytearray(rng.randbytes(SIZE))
    region.view[:] = here
    peer.poke(there)
    moved_by = {"read": 0, "write": 0}
    for _ in range(200):
        length = rng.choice((1, 7, 64, 4096, 65536, rng.randrange(1, SIZE // 4)))
        local, remote = rng.randrange(SIZE - length), rng.randrange(SIZE - length)
        if rng.random() < 0.5:
            assert engine.read(segment, region.at(local), segment.at(remote), length) == length
            here[local : local + length] = there[remote : remote + length]
            moved_by["read"] += length
        else:
            assert engine.write(segment, region.at(local), segment.at(remote), length) == length
            there[remote : remote + length] = here[local : local + length]
            moved_by["write"] += length
    assert region.view == here
    assert peer.peek() == there
    for direction, nbytes in moved_by.items():
        assert moved(engine, direction) == {transport: nbytes}


def test_another_engine_of_this_process_is_reached_by_loopback(
    engines: Callable[..., TransferEngine],
) -> None:
    """Several engines in one process, all pairs, each with itself too."""
    many = [engines(name=f"engine {number}") for number in range(4)]
    regions = [one.allocate(4096) for one in many]
    for number, region in enumerate(regions):
        region.view[:] = bytes([number]) * 4096
    for reader in range(4):
        for owner in range(4):
            segment = many[reader].open(many[owner].addresses[0])
            assert segment.name == f"engine {owner}"
            assert segment.transport == "loopback"
            place = regions[reader].at(100 * owner)
            many[reader].read(segment, place, segment.at(4000), 96)
            assert bytes(regions[reader].view[100 * owner : 100 * owner + 96]) == bytes([owner]) * 96
        assert moved(many[reader]) == {"loopback": 4 * 96}
    assert len({one.segment_id for one in many}) == 4


def test_only_the_listed_transports_are_used(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(transports=["tcp"])
    region = engine.allocate(65536)
    segment = engine.open(own.address)
    assert segment.transport == "tcp"
    engine.read(segment, region, segment.at(0))
    engine.read(segment, [region.at(0), region.at(100)], [segment.at(5), segment.at(9)], 50)
    engine.submit([Slice("write", segment, region, segment.at(0), 1000)]).result()
    assert moved(engine) == {"tcp": 65536 + 100 + 1000}
    reasons = engine.transports()
    assert reasons["tcp"] == ""
    assert reasons["shm"]
    with pytest.raises(InvalidArgument, match="carrier pigeon"):
        engines(transports=["carrier pigeon"])


def test_the_paths_to_a_peer(engines: Callable[..., TransferEngine], own: Peer) -> None:
    """Each transport has a path or a reason, and says which kinds of memory the path does not reach."""
    engine = engines()
    paths = {path.transport: path for path in engine.paths(engine.open(own.address))}
    assert list(paths)[:3] == ["loopback", "shm", "cuda_ipc"]
    assert set(paths) == set(engine.transports())
    assert (paths["loopback"].path, paths["loopback"].unreached) == ("", {})
    assert "process" in paths["loopback"].why
    for name in ("shm", "tcp"):
        assert paths[name].path.startswith(name)
        assert not paths[name].why
    assert set(paths["shm"].unreached) == {"device"}
    assert "shared memory does not reach" in paths["shm"].unreached["device"]
    assert paths["tcp"].unreached == {}
    alone = engines(transports=["tcp"])
    paths = {path.transport: path for path in alone.paths(alone.open(own.address))}
    assert paths["shm"].why == "it is not among the transports of this engine"
    assert not paths["shm"].path
    segment = engine.open(own.address)
    segment.close()
    with pytest.raises(InvalidArgument, match=r"no segment .* is open"):
        engine.paths(segment)


def test_transports_that_cannot_reach_a_peer_say_so(
    engines: Callable[..., TransferEngine], own: Peer
) -> None:
    engine = engines(transports=["loopback"])
    with pytest.raises(Unavailable, match="loopback: the peer is not in this process") as caught:
        engine.open(own.address)
    assert caught.value.peer == own.address


# ---- batches


def model_batch(
    rng: random.Random, segments: list[Segment], region: Region, slots: int, length: int
) -> list[Slice]:
    """Slices that do not overlap: local slot i with a slot of a random peer, read or written."""
    free = {index: list(range(slots)) for index in range(len(segments))}
    made = []
    for slot in range(slots):
        index = rng.randrange(len(segments))
        place = free[index].pop(rng.randrange(len(free[index])))
        op = rng.choice(("read", "write"))
        segment = segments[index]
        made.append(Slice(op, segment, region.at(slot * length), segment.at(place * length), length))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("form", ["slices", "lists", "arrays"])
@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=["any", "tcp"])
def test_reads_and_writes_of_several_peers_in_one_transfer(
    engines: Callable[..., TransferEngine],
    rng: random.Random,
    form: str,
    transports: list[str] | None,
    own: Peer,
) -> None:
    engine = engines(transports=transports)
    length, slots = 1000, 96
    others = [Peer("host", SIZE), Peer("host_arena", SIZE)]
    peers = [own, *others]
    try:
        segments = [engine.open(one.address) for one in peers]
        region = engine.allocate(slots * length)
        here = bytearray(rng.randbytes(len(region)))
        region.view[:] = here
        there = [bytearray(rng.randbytes(SIZE)) for _ in peers]
        for one, data in zip(peers, there, strict=True):
            one.poke(bytes(data))
        slices = model_batch(rng, segments, region, slots, length)
        assert {item.op for item in slices} == {"read", "write"}
        for item in slices:
            data = there[segments.index(item.segment)]
            at, remote = item.local - region.address, item.remote - item.segment.at(0)
            if item.op == "read":
                here[at : at + length] = data[remote : remote + length]
            else:
                data[remote : remote + length] = here[at : at + length]
        columns: Any = np.array if form == "arrays" else list
        if form == "slices":
            done = engine.transfer(slices)
        else:
            dtype = {"dtype": np.uint64} if form == "arrays" else {}
            done = engine.transfer(
                Batch(
                    [item.op for item in slices],
                    [item.segment for item in slices],
                    columns([item.local for item in slices], **dtype),
                    columns([item.remote for item in slices], **dtype),
                    columns([item.length for item in slices], **dtype),
                )
            )
        assert done == slots * length
        assert region.view == here
        for one, data in zip(peers, there, strict=True):
            assert one.peek() == data
    finally:
        for one in others:
            one.close()


def test_read_and_write_take_lists(engine: TransferEngine, own: Peer) -> None:
    segment = engine.open(own.address)
    region = engine.allocate(4096)
    region.view[:] = bytes(range(256)) * 16
    own.poke(bytes(4096))
    places = [segment.at(at) for at in (0, 1000, 2000)]
    assert engine.write(segment, [region.at(1), region.at(2), region.at(3)], places, [1, 2, 3]) == 6
    assert own.peek(0, 1) + own.peek(1000, 2) + own.peek(2000, 3) == bytes([1, 2, 3, 3, 4, 5])
    assert engine.read(segment, [region.at(at) for at in (100, 200, 300)], places, 3) == 9
    assert bytes(region.view[300:303]) == bytes([3, 4, 5])
    arrays = [np.array(column, np.uint64) for column in ([region.at(0)], [segment.at(0)], [1])]
    assert engine.read(segment, *arrays) == 1


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (lambda s, r: [], "at least one"),
        (lambda s, r: Batch("read", s, [], [], []), "different lengths, or none"),
        (lambda s, r: Batch("read", s, [], [], 4), "different lengths, or none"),
        (lambda s, r: Batch("read", s, [r.at(0)], [s.at(0), s.at(1)], 4), "different lengths"),
        (lambda s, r: Batch("read", s, [r.at(0)], [s.at(0)], [4, 4]), "different lengths"),
        (lambda s, r: Batch("read", [s, s], [r.at(0)], [s.at(0)], 4), "different lengths"),
        (lambda s, r: Batch(["read", "read"], s, [r.at(0)], [s.at(0)], 4), "different lengths"),
        (lambda s, r: Batch("copy", s, [r.at(0)], [s.at(0)], 4), "not 'copy'"),
        (lambda s, r: [Slice("copy", s, r, s.at(0), 4)], '"read" or "write"'),
        (lambda s, r: ["read"], "Slices or a Batch"),
    ],
)
def test_batches_that_make_no_sense(
    engine: TransferEngine, own: Peer, batch: Callable[[Any, Any], Any], words: str
) -> None:
    segment, region = engine.open(own.address), engine.allocate(4096)
    for verb in (engine.transfer, engine.submit):
        with pytest.raises(InvalidArgument, match=words):
            verb(batch(segment, region))


def test_a_large_batch(engine: TransferEngine, own: Peer, rng: random.Random) -> None:
    segment, region = engine.open(own.address), engine.allocate(SIZE)
    data = rng.randbytes(SIZE)
    own.poke(data)
    places = list(range(0, SIZE, 16))
    rng.shuffle(places)
    local = [region.at(at) for at in places]
    assert engine.read(segment, local, [segment.at(at) for at in places], 16) == SIZE
    assert region.view == data


# ---- states


@pytest.mark.parametrize("transports", [None, ["tcp"]], ids=["any", "tcp"])
def test_each_slice_has_a_state_of_its_own(
    engines: Callable[..., TransferEngine], own: Peer, transports: list[str] | None
) -> None:
    """One slice lies outside of the peer's memory: the others are done all the same."""
    engine = engines(transports=transports)
    segment, region = engine.open(own.address), engine.allocate(4096)
    own.poke(b"a" * 4096)
    outside = segment.at(0) + SIZE - 50
    slices = [
        Slice("read", segment, region.at(0), segment.at(0), 100),
        Slice("read", segment, region.at(100), outside, 100),
        Slice("read", segment, region.at(200), segment.at(200), 100),
    ]
    transfer = engine.submit(slices)
    assert transfer.wait(10)
    assert transfer.state is TransferState.FAILED
    assert transfer.slices == [SliceState.DONE, SliceState.FAILED, SliceState.DONE]
    assert (transfer.bytes_done, transfer.bytes_total) == (200, 300)
    with pytest.raises(TransferError) as caught:
        engine.transfer(slices)
    for error in (caught.value, transfer.error):
        assert isinstance(error, TransferError)
        assert error.states == bytes([1, 2, 1])
        assert (error.bytes, error.bytes_done) == (300, 200)
        assert error.peer == own.address
        assert (error.path or "").startswith("tcp" if transports else "shm")
        assert f"{outside:#x}" in str(error)
        assert own.address in str(error)
    with pytest.raises(TransferError):
        transfer.result()
    assert bytes(region.view[:100]) == b"a" * 100
    assert bytes(region.view[200:300]) == b"a" * 100
    again = [one for one, state in zip(slices, transfer.slices, strict=True) if state != SliceState.DONE]
    assert again == [slices[1]]


def test_one_slice_that_fails(engine: TransferEngine, own: Peer) -> None:
    segment, region = engine.open(own.address), engine.allocate(4096)
    for remote in (segment.at(0) - 1, segment.at(0) + SIZE - 99, segment.at(0) + SIZE, 1 << 50):
        for verb in (engine.read, engine.write):
            with pytest.raises(TransferError) as caught:
                verb(segment, region.at(0), remote, 100)
            assert (caught.value.bytes, caught.value.bytes_done) == (100, 0)
            assert caught.value.peer == own.address


def test_a_transfer_that_nobody_keeps_goes_on(engines: Callable[..., TransferEngine], own: Peer) -> None:
    """Neither the transfer, nor the region, nor its memory is kept by anybody but the engine."""
    engine = engines(transports=["tcp"])
    with Relay(own.address) as relay:
        segment = engine.open(relay.address)
        memory = np.zeros(65536, np.uint8)
        alive = weakref.ref(memory)
        region = engine.register(memory)
        relay.stall()
        transfer = engine.submit([Slice("read", segment, memory, segment.at(0), 65536)])
        assert not transfer.done
        del memory, transfer, region
        gc.collect()
        assert alive() is not None
        relay.go_on()
        until(lambda: moved(engine) == {"tcp": 65536})
        assert alive() is not None
        engine.close()
        gc.collect()
        assert alive() is None


def test_transfers_that_nobody_keeps_are_forgotten(engines: Callable[..., TransferEngine]) -> None:
    """More of them than there are places in the table of those that were not looked at."""
    engine, other = engines(), engines()
    region = engine.allocate(4096)
    other.allocate(4096)
    segment = engine.open(other.addresses[0])
    batch = Batch("read", segment, [region.at(0)], [segment.at(0)], 1)
    for _ in range(80):
        seen = [engine.submit(batch) for _ in range(1000)]
        engine.submit(batch)
        engine.submit(batch)  # looks for those that ended; the 1,000 are still kept
        del seen
    until(lambda: moved(engine) == {"loopback": 80 * 1002})


def test_a_transfer_that_has_ended_keeps_no_memory(engines: Callable[..., TransferEngine], own: Peer) -> None:
    """However long its caller keeps it, and whether or not its result was asked for."""

    def is_mapped(address: int) -> bool:
        with open("/proc/self/maps") as maps:
            shared = [line.split()[0].split("-") for line in maps if "memfd:" in line]
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in shared)

    engine = engines(transports=["tcp"])
    segment, region = engine.open(own.address), engine.allocate(65536)
    address = region.address
    transfer = engine.submit([Slice("read", segment, region, segment.at(0), 65536)])
    assert transfer.wait(10)
    assert is_mapped(address)
    region.close()
    del region
    gc.collect()
    until(lambda: not is_mapped(address))
    assert transfer.result() == 65536


def test_waiting_with_a_time_limit(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(transports=["tcp"])
    with Relay(own.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(4096)
        engine.read(segment, region, segment.at(0))
        relay.stall()
        transfer = engine.submit([Slice("read", segment, region, segment.at(0), 4096)])
        assert not transfer.wait(0.05)
        assert not transfer.wait(0)
        with pytest.raises(Timeout, match="goes on"):
            transfer.result(0.05)
        assert transfer.state is TransferState.WAITING
        assert transfer.error is None
        assert transfer.slices == [SliceState.WAITING]
        assert "waiting" in repr(transfer)
        relay.go_on()
        assert transfer.result(10) == 4096
        assert transfer.wait()
        assert transfer.done
        assert transfer.slices == [SliceState.DONE]
        transfer.cancel()  # too late, and harmless
        assert transfer.result() == 4096


def test_cancel(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(transports=["tcp"])
    with Relay(own.address) as relay:
        segment, region = engine.open(relay.address), engine.allocate(8 * MIB)
        engine.read(segment, region, segment.at(0), 4096)
        relay.stall()
        transfer = engine.submit([Slice("read", segment, region, segment.at(0), SIZE)])
        assert not transfer.wait(0.05)
        transfer.cancel()
        assert transfer.wait(3)
        assert transfer.state is TransferState.CANCELLED
        assert transfer.slices == [SliceState.CANCELLED]
        with pytest.raises(TransferError, match="cancel") as caught:
            transfer.result()
        assert caught.value.bytes_done == 0
        relay.go_on()
        assert engine.read(segment, region, segment.at(0), 4096) == 4096  # the engine goes on


def test_foreground_goes_before_background(engines: Callable[..., TransferEngine]) -> None:
    """A read that nobody gave way to would wait for all that was submitted before it."""
    peer = Peer("host_arena", 16 * MIB)
    engine = engines(transports=["tcp"], connections_per_peer=1, io_threads=1)
    try:
        with Relay(peer.address) as relay:
            segment, region = engine.open(relay.address), engine.allocate(32 * MIB)
            engine.read(segment, region, segment.at(0), 4096)
            relay.pace(16e6)
            offsets = range(0, 16 * MIB, 65536)
            background = engine.submit(
                Batch(
                    "read",
                    segment,
                    [region.at(at) for at in offsets],
                    [segment.at(at) for at in offsets],
                    65536,
                ),
                priority=Priority.BACKGROUND,
            )
            until(lambda: background.bytes_done > 0)
            foreground = engine.submit([Slice("read", segment, region.at(20 * MIB), segment.at(0), 4096)])
            assert foreground.result(10) == 4096
            assert not background.done
            print(f"background: {background.bytes_done / MIB:.1f} of 16 MiB when the foreground was done")
            assert background.bytes_done < 12 * MIB
            relay.pace(0)
            assert background.result(30) == 16 * MIB
    finally:
        peer.close()


# ---- messages


@pytest.mark.parametrize("transports", [["shm"], ["tcp"]], ids=["shm", "tcp"])
def test_a_message_arrives_after_the_data(
    engines: Callable[..., TransferEngine], peer: Peer, transports: list[str]
) -> None:
    engine = engines(name="writer", transports=transports)
    segment, region = engine.open(peer.address), engine.allocate(SIZE)
    step = 65536
    rounds = 30
    peer.tell(f'["check on message", {rounds}]\n')
    for number in range(rounds):
        region.view[:] = bytes([number % 256]) * SIZE
        offsets = range(0, SIZE, step)
        local, remote = [region.at(at) for at in offsets], [segment.at(at) for at in offsets]
        if number % 2:
            engine.write(segment, local, remote, step, notify=b"%d" % number)
        else:
            engine.submit(Batch("write", segment, local, remote, step), notify=b"%d" % number).result()
        assert peer.hear() == number


def test_messages_without_data(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(name="sender")
    segment = engine.open(own.address)
    for number in range(10):
        engine.notify(segment, b"message %d" % number)
    found: list[Any] = []
    while len(found) < 10:
        found += own.ask("notifications", 10)
    assert found == [["sender", (b"message %d" % number).hex()] for number in range(10)]
    assert own.ask("notifications", 0) == []
    assert engine.notifications() == []
    assert engine.notifications(0.01) == []
    own.ask("send", engine.addresses[0], b"back".hex())
    assert engine.notifications(10) == [("peer", b"back")]


def test_one_slice_with_a_message_a_deadline_or_a_priority(engines: Callable[..., TransferEngine]) -> None:
    """The short way for one slice must not be taken for these."""
    one, two = engines(name="one"), engines(name="two")
    here, there = one.allocate(4096).address, two.allocate(4096).address
    segment = one.open(two.addresses[0])
    for verb in (one.read, one.write):
        verb(segment, here, there, 10, notify=b"news")
        assert two.notifications(10) == [("one", b"news")]
        verb(segment, here, there, 10, notify=b"")
        assert two.notifications(10) == [("one", b"")]
        with pytest.raises(InvalidArgument, match="deadline_s"):
            verb(segment, here, there, 10, deadline_s=-1)
        assert verb(segment, here, there, 10, priority=Priority.BACKGROUND, deadline_s=1) == 10


def test_each_peer_of_a_transfer_gets_the_message(engines: Callable[..., TransferEngine]) -> None:
    one, two, three = engines(name="one"), engines(name="two"), engines(name="three")
    region = one.allocate(4096)
    slices = []
    for other in (two, three):
        other.allocate(4096)
        segment = one.open(other.addresses[0])
        slices.append(Slice("write", segment, region, segment.at(0), 10))
    one.transfer(slices, notify=b"news")
    for other in (two, three):
        assert other.notifications(10) == [("one", b"news")]
        assert other.notifications() == []


def test_a_failed_transfer_sends_no_message(engines: Callable[..., TransferEngine]) -> None:
    one, two = engines(name="one"), engines(name="two")
    region = one.allocate(4096)
    two.allocate(4096)
    segment = one.open(two.addresses[0])
    with pytest.raises(TransferError):
        one.write(segment, region.at(0), segment.at(0) + 4000, 4096, notify=b"never")
    one.notify(segment, b"after")
    assert two.notifications(10) == [("one", b"after")]


def test_messages_have_a_largest_size(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines()
    segment, region = engine.open(own.address), engine.allocate(4096)
    own.poke(b"before")
    message = bytes(MIB + 1)
    for call in (
        lambda: engine.notify(segment, message),
        lambda: engine.write(segment, region, segment.at(0), notify=message),
        lambda: engine.submit([Slice("write", segment, region, segment.at(0), 6)], notify=message),
    ):
        with pytest.raises(TooLarge, match="1048576 bytes, not 1048577"):
            call()
    assert own.peek(0, 6) == b"before"  # refused before anything was moved
    engine.notify(segment, message[1:])
    assert own.ask("notifications", 10) == [[engine.name, message[1:].hex()]]


# ---- options


def test_addresses(engines: Callable[..., TransferEngine]) -> None:
    silent = engines(listen=None)
    assert silent.addresses == []
    several = engines(listen=["127.0.0.1:0", "[::1]:0"], name="several")
    assert len(several.addresses) == 2
    several.allocate(4096)
    region = silent.allocate(4096)
    for address in several.addresses:
        segment = silent.open(address)
        assert segment.name == "several"
        assert silent.read(segment, region, segment.at(0)) == 4096
    port = several.addresses[0].rpartition(":")[2]
    with pytest.raises((ConfigError, OSError, Exception), match=port):
        engines(listen=f"127.0.0.1:{port}")


def test_other_hosts_need_a_token_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a cluster token"):
        TransferEngine(listen="0.0.0.0:0")
    with pytest.raises(ConfigError, match="is no address"):
        TransferEngine(listen="7720")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "chosen")
    for token in (None, b"fifteen letters"):
        with pytest.raises(ConfigError, match="fewer than 16 can be guessed"):
            TransferEngine(listen="0.0.0.0:0", token=token)
    with TransferEngine() as engine:
        assert engine.addresses
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "chosen by a person")
    for token in (None, b"sixteen letters."):
        with TransferEngine(listen="0.0.0.0:0", token=token) as engine:
            assert engine.addresses


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_wait_of_no_time_can_only_fail(timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match="timeout_s must be above 0"):
        TransferEngine(timeout_s=timeout_s)


@pytest.mark.parametrize("what", ["name", "tenant", "host_id", "interface"])
def test_text_that_peers_could_not_read_is_refused(what: str) -> None:
    with pytest.raises(InvalidArgument, match=f"the {what} of an engine must be UTF-8"):
        TransferEngine(token=TOKEN, **{what: "\udcff"})  # type: ignore[arg-type]


def test_the_kernel_is_asked_about_memory_once() -> None:
    class Native:
        def register(self, address: int, length: int, location: str) -> str:
            return location or f"cpu:{length}"

        # No describe(): it asks the kernel as register() does, which costs as much as all else.

    table = RegionTable(cast(Any, Native()))
    assert table.register((4096, 7), "").location == "cpu:7"
    assert table.register(bytearray(9), "cpu:1").location == "cpu:1"


def test_a_location_that_peers_could_not_read_is_refused(engine: TransferEngine, own: Peer) -> None:
    for call in (lambda: engine.allocate(4096, "\udcff"), lambda: engine.register(bytearray(10), "\udcff")):
        with pytest.raises(InvalidArgument, match="a location must be UTF-8"):
            call()
    assert engine.metrics()["regions"] == 0
    with pytest.raises(InvalidArgument, match="NUL"):
        engine.open(own.address.replace(":", "\0.example:"))


def test_an_engine_that_was_shut_out(engines: Callable[..., TransferEngine]) -> None:
    owner, writer, other = engines(name="owner"), engines(name="writer"), engines(name="other")
    memory = owner.allocate(4096)
    region = writer.allocate(4096)
    segment = writer.open(owner.addresses[0])
    assert writer.write(segment, region, segment.at(0)) == 4096
    owner.shut_out(writer.segment_id)
    owner.shut_out(writer.segment_id)  # again is the same
    with pytest.raises(TransferError, match="shut out"):
        writer.write(segment, region, segment.at(0))
    with pytest.raises(AuthError):
        writer.open(owner.addresses[0])
    there = other.open(owner.addresses[0])
    assert other.read(there, other.allocate(4096), there.at(0)) == 4096
    owner.admit(writer.segment_id)
    segment = writer.open(owner.addresses[0])
    assert writer.write(segment, region, segment.at(0)) == 4096
    assert memory.length == 4096
    for call in (owner.shut_out, owner.admit):
        with pytest.raises(InvalidArgument, match="16 bytes"):
            call(b"short")


def test_a_failed_write_says_whether_it_is_settled(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(transports=["tcp"])
    relay = Relay(own.address)
    region = engine.allocate(SIZE)
    segment = engine.open(relay.address)
    outside = segment.at(0) + SIZE
    with pytest.raises(TransferError) as caught:
        engine.write(segment, region.at(0), outside, 10)
    assert caught.value.settled  # the peer has refused it
    relay.stall()
    with pytest.raises(TransferError) as caught:
        engine.write(segment, region, segment.at(0), deadline_s=0.3)
    assert not caught.value.settled
    assert not pickle.loads(pickle.dumps(caught.value)).settled
    transfer = engine.submit([Slice("write", segment, region, segment.at(0), 10)], deadline_s=0.3)
    assert transfer.wait(20)
    assert transfer.error is not None
    assert not transfer.error.settled
    relay.close()


def test_a_transfer_that_is_dropped_at_the_very_end_says_nothing(own: Peer) -> None:
    program = (
        "import sys, moonpool\n"
        "engine = moonpool.TransferEngine(token=sys.argv[1].encode(), transports=['tcp'])\n"
        "segment = engine.open(sys.argv[2])\n"
        "region = engine.allocate(4096)\n"
        "transfer = engine.submit([moonpool.Slice('read', segment, region, segment.at(0), 4096)])\n"
        "sys.modules['kept until all modules are gone'] = transfer\n"
        "if len(sys.argv) > 3: engine.close()\n"
    )
    for more in ([], ["closed"]):
        done = subprocess.run(
            [sys.executable, "-c", program, TOKEN.decode(), own.address, *more],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == ""


def test_the_default_name_and_token(runtime_dir: Any) -> None:
    with TransferEngine() as one, TransferEngine() as two:
        assert str(os.getpid()) in one.name
        two.allocate(10)
        assert one.open(two.addresses[0]).regions[0].length == 10


def test_metrics_count_operations_and_failures(engines: Callable[..., TransferEngine], own: Peer) -> None:
    engine = engines(transports=["shm"])
    segment, region = engine.open(own.address), engine.allocate(4096)
    before = engine.metrics()
    engine.read(segment, [region.at(0), region.at(10)], [segment.at(0), segment.at(10)], 5)
    engine.write(segment, region, segment.at(0), 7)
    with pytest.raises(TransferError):
        engine.read(segment, region.at(0), 4096, 10)
    after = engine.metrics()
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown["shm_read_slices_total"] == 2
    assert grown["shm_read_bytes_total"] == 10
    assert grown["shm_write_slices_total"] == 1
    assert grown["shm_write_bytes_total"] == 7
    assert grown["transfers_failed_total"] == 1
