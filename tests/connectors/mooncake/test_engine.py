"""mooncake.engine: sessions, registration, transfers in all forms, messages, faults."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from mooncake import _rpc
from mooncake.engine import (
    InnerTransferEngine,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    create_rpc_client,
    create_rpc_server,
)

import moonpool
from moonpool.core.transfer.region import Region
from tests.core.store_bed import until

HOST, P2P = "127.0.0.1", "P2PHANDSHAKE"
ROOM = 1 << 16


class Side:
    """An engine with one registered array."""

    def __init__(self) -> None:
        self.engine = TransferEngine()
        assert self.engine.initialize(HOST, P2P, "tcp", "") == 0
        self.array = np.zeros(ROOM, np.uint8)
        self.start = self.array.ctypes.data
        assert self.engine.register_memory(self.start, ROOM) == 0
        self.session = f"{HOST}:{self.engine.get_rpc_port()}"


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    one, other = Side(), Side()
    one.array[:] = np.arange(ROOM) % 251
    yield one, other
    for side in (one, other):
        assert side.engine.unregister_memory(side.start) == 0


Pair = tuple[Side, Side]


def test_one_slice(pair: Pair) -> None:
    one, other = pair
    assert one.engine.transfer_sync_write(other.session, one.start, other.start + 10, 1000) == 0
    assert (other.array[10:1010] == one.array[:1000]).all()
    other.array[5000:5100] = 7
    assert one.engine.transfer_sync_read(other.session, one.start, other.start + 5000, 100, "hint") == 0
    assert (one.array[:100] == 7).all()
    assert one.engine.transfer_sync(other.session, one.start, other.start, 5, TransferOpcode.Write) == 0
    assert (
        one.engine.transfer_sync(other.session, one.start, other.start, 5, TransferOpcode.Read, None, "tcp")
        == 0
    )
    assert one.engine.transfer_sync_write(other.session, one.start, other.start, 0) == 0


def test_batches(pair: Pair) -> None:
    one, other = pair
    here, there = [one.start, one.start + 100], [other.start + 500, other.start]
    assert one.engine.batch_transfer_sync_write(other.session, here, there, [50, 60]) == 0
    assert (other.array[500:550] == one.array[:50]).all()
    assert (other.array[:60] == one.array[100:160]).all()
    assert one.engine.batch_transfer_sync_read(other.session, here, there, [50, 0]) == 0
    assert one.engine.batch_transfer_sync(other.session, here, there, [1, 1], TransferOpcode.Write) == 0
    assert one.engine.batch_transfer_sync_write(other.session, [], [], []) == 0
    # Of no bytes the addresses may be anything; a message comes all the same.
    assert one.engine.batch_transfer_sync_read(other.session, [0, one.start], [0, other.start], [0, 9]) == 0
    assert (one.array[:9] == other.array[:9]).all()
    said = TransferNotify("nothing", "moved")
    write = one.engine.batch_transfer_sync
    assert write(other.session, [0, 1], [0, 1], [0, 0], TransferOpcode.Write, said) == 0
    assert until(lambda: [note.msg for note in other.engine.get_notifies()]) == ["moved"]
    assert write(other.session, [1, one.start], [0, other.start], [8, 0], TransferOpcode.Write) == -1
    assert one.engine.batch_transfer_sync_write(other.session, here, there[:1], [1, 1]) == -1


@pytest.mark.parametrize("direction", ["read", "write"])
def test_transfers_that_are_looked_at_later(pair: Pair, direction: str) -> None:
    one, other = pair
    start = getattr(one.engine, f"batch_transfer_async_{direction}")
    number = start(other.session, [one.start, one.start + 5], [other.start, other.start + 5], [5, 5])
    assert number > 0
    assert until(lambda: one.engine.transfer_check_status(number)) == 1
    assert one.engine.transfer_check_status(number) == -1  # told once; no crash
    assert one.engine.transfer_check_status(999_999) == -1
    assert (one.array[:10] == other.array[:10]).all()


def test_waiting_for_many(pair: Pair) -> None:
    one, other = pair
    numbers = [one.engine.transfer_submit_write(other.session, one.start, other.start, 100) for _ in range(5)]
    last = one.engine.batch_transfer_async(
        other.session, [one.start], [other.start], [9], TransferOpcode.Read
    )
    assert len({*numbers, last}) == 6
    assert one.engine.get_batch_transfer_status([*numbers, last]) == 0
    assert one.engine.get_batch_transfer_status([]) == 0
    assert one.engine.get_batch_transfer_status(numbers) == -1


def test_what_fails(pair: Pair, free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    one, other = pair
    write = one.engine.transfer_sync_write
    assert write(other.session, one.start, other.start + ROOM - 10, 100) == -1
    assert "registered region" in caplog.text
    assert not other.array.any()
    assert write(f"{HOST}:{free_port}", one.start, other.start, 10) == -1
    assert write("no address", one.start, other.start, 10) == -1
    stray = np.zeros(4096, np.uint8)
    assert write(other.session, stray.ctypes.data, other.start, 10) == -1
    assert one.engine.batch_transfer_async_read(f"{HOST}:{free_port}", [one.start], [other.start], [10]) == 0
    number = one.engine.batch_transfer_async_write(other.session, [one.start], [other.start + ROOM], [10])
    assert number == 0 or until(lambda: one.engine.transfer_check_status(number)) == -1
    for bad in ((-1, other.start, 10), (1.5, other.start, 10), (one.start, other.start, "10")):
        with pytest.raises(TypeError):
            write(other.session, *bad)
    with pytest.raises(TypeError, match="foo"):
        write(other.session, one.start, other.start, 10, foo=1)
    with pytest.raises(TypeError):
        one.engine.initialize(local_hostname=HOST, metadata_server=P2P, protocol="tcp", device_name="")


def test_registration(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    engine = pair[0].engine
    array = np.zeros(10_000, np.uint8)
    start = array.ctypes.data
    assert engine.register_memory(start, 5000, "cpu:0") == 0
    assert engine.register_memory(start, 5000) == -7
    assert engine.register_memory(start + 10, 10) == -7
    assert engine.unregister_memory(start) == 0
    assert engine.unregister_memory(start) == -3
    assert engine.register_memory(start, 5000) == 0  # again, as callers do
    assert engine.batch_register_memory([start + 5000, start], [5000, 5000]) == -7
    assert engine.unregister_memory(start + 5000) == -3  # all or none
    assert engine.batch_register_memory([start + 5000], [5000]) == 0
    assert engine.batch_register_memory([start], [1, 2]) == -1
    assert engine.batch_register_memory([], []) == 0
    assert engine.batch_unregister_memory([start, start + 5000]) == 0
    assert engine.batch_unregister_memory([start]) == -3
    assert engine.register_memory(start, 0) == -1
    assert engine.register_memory(0, 10) == -1
    assert engine.register_memory(4096, 10) == -1
    assert "is no range of memory" in caplog.text


def test_an_unregister_that_took_too_long_can_be_done_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it has worked the memory must not be freed, and it is not registered anew."""
    engine = pair[0].engine
    array = np.zeros(10_000, np.uint8)
    start, managed = array.ctypes.data, engine.allocate_managed_buffer(4096)
    assert engine.register_memory(start, 5000) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Region, "close", stands_still)
        assert engine.unregister_memory(start) == -1
        assert engine.free_managed_buffer(managed, 4096) == -1
        assert engine.register_memory(start, 5000) == -7
        # The roll-back, too, is done as far as it goes; what it could not do is still there.
        assert engine.batch_register_memory([start + 5000, start], [1000, 10]) == -7
    assert engine.batch_unregister_memory([start, start + 5000]) == 0
    assert engine.free_managed_buffer(managed, 4096) == 0
    with pytest.raises(TypeError):
        engine.batch_register_memory([start, "x"], [5000, 5000])
    assert engine.unregister_memory(start) == -3


def stands_still(_: Region) -> None:
    raise moonpool.Timeout("a peer is inside of it")


def test_an_opcode_that_is_none(pair: Pair) -> None:
    one, other = pair
    for call in (
        lambda: one.engine.transfer_sync(other.session, one.start, other.start, 5, 7),
        lambda: one.engine.batch_transfer_sync(other.session, [one.start], [other.start], [5], None),
        lambda: one.engine.batch_transfer_async(other.session, [one.start], [other.start], [5], "Write"),
    ):
        with pytest.raises(TypeError, match="opcode"):
            call()
    assert one.engine.transfer_sync(other.session, one.start, other.start, 5, 1) == 0  # as Write is


def test_columns_of_numpy(pair: Pair) -> None:
    one, other = pair
    columns = [np.array([start, start + 100]) for start in (one.start, other.start)]
    assert one.engine.batch_transfer_sync_write(other.session, *columns, np.array([10, 10])) == 0
    assert (other.array[100:110] == one.array[100:110]).all()


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint64])
def test_numbers_of_numpy_are_numbers(pair: Pair, kind: Any) -> None:
    one, other = pair
    wide = np.int64 if kind is np.int32 else kind  # what an address fits into
    here, there = wide(one.start), wide(other.start)
    assert one.engine.transfer_sync_write(other.session, here, there, kind(10)) == 0
    assert (
        one.engine.batch_transfer_sync_write(other.session, [here + wide(10)], [there + wide(10)], [kind(10)])
        == 0
    )
    columns = [np.array([start + 20], wide) for start in (here, there)]
    assert one.engine.batch_transfer_sync_write(other.session, *columns, np.array([10], kind)) == 0
    assert (other.array[:30] == one.array[:30]).all()
    number = one.engine.batch_transfer_async_read(other.session, [here], [there], [kind(10)])
    assert number > 0
    assert one.engine.get_batch_transfer_status([number]) == 0
    assert one.engine.transfer_submit_write(other.session, here, there, kind(10)) > 0
    more = np.zeros(100, np.uint8)
    assert one.engine.register_memory(wide(more.ctypes.data), kind(100)) == 0
    assert one.engine.unregister_memory(wide(more.ctypes.data)) == 0
    with pytest.raises(TypeError):
        one.engine.batch_transfer_sync_write(other.session, [here], [there], [-1])


def test_an_end_is_told_to_one_thread(pair: Pair) -> None:
    one, other = pair
    number = one.engine.transfer_submit_write(other.session, one.start, other.start, 10)
    one.engine._transfers[number][0].wait()
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: one.engine.transfer_check_status(number), range(4)))
    assert sorted(codes) == [-1, -1, -1, 1]


def test_transfers_that_nobody_looked_at_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = pair
    monkeypatch.setattr("mooncake.engine.TRANSFERS_MAX", 2)
    for i in range(5):
        number = one.engine.transfer_submit_write(other.session, one.start, other.start + i, 1)
        assert number > 0
        one.engine._transfers[number][0].wait()
    assert one.engine.transfer_check_status(number) == 1
    assert len(one.engine._transfers) <= 2


def test_memory_registered_after_the_peer_was_opened(pair: Pair) -> None:
    one, other = pair
    assert one.engine.send_probe(other.session) == 0
    late = np.zeros(100, np.uint8)
    assert other.engine.register_memory(late.ctypes.data, 100) == 0
    assert one.engine.transfer_sync_write(other.session, one.start, late.ctypes.data, 100) == 0
    assert (late == one.array[:100]).all()
    assert other.engine.unregister_memory(late.ctypes.data) == 0
    assert one.engine.transfer_sync_write(other.session, one.start, late.ctypes.data, 100) == -1


def test_messages(pair: Pair) -> None:
    one, other = pair
    write = TransferOpcode.Write
    note = TransferNotify("name", "message ü")
    assert (TransferNotify().name, TransferNotify(name="n", msg="m").msg) == ("", "m")
    assert one.engine.transfer_sync(other.session, one.start, other.start, 10, write, note) == 0
    assert one.engine.transfer_sync(other.session, 0, 0, 0, write, notify=TransferNotify("alone", "")) == 0
    assert one.engine.batch_transfer_sync(other.session, [one.start], [other.start], [1], write, note) == 0
    got: list[Any] = []

    def all_of_them() -> bool:
        got.extend((one.name, one.msg) for one in other.engine.get_notifies())
        return len(got) == 3

    until(all_of_them)
    assert got == [("name", "message ü"), ("alone", ""), ("name", "message ü")]
    assert other.engine.get_notifies() == []


def test_a_message_of_another_kind_of_engine(pair: Pair) -> None:
    _, other = pair
    with moonpool.TransferEngine("plain") as plain:
        plain.notify(plain.open(other.session), b"bare bytes")
        (got,) = until(other.engine.get_notifies)
    assert (got.name, got.msg) == ("plain", "bare bytes")


def test_managed_buffers(pair: Pair) -> None:
    one, other = pair
    engine = one.engine
    address = engine.allocate_managed_buffer(1000)
    assert engine.write_bytes_to_buffer(address, "text", 4) == 0
    assert engine.read_bytes_from_buffer(address, 6) == b"text\0\0"
    assert engine.write_bytes_to_buffer(address, b"\xff\xfe", 1) == 0
    assert engine.write_bytes_to_buffer(address, "text", 5) == -1
    assert engine.write_bytes_to_buffer(address + 999, "text", 4) == -1
    with pytest.raises(moonpool.InvalidArgument, match="registered"):
        engine.read_bytes_from_buffer(address, 2000)
    assert engine.transfer_sync_write(other.session, address, other.start, 4) == 0
    assert other.array[:4].tobytes() == b"\xffext"
    assert engine.free_managed_buffer(address, 1000) == 0
    assert engine.free_managed_buffer(address, 1000) == -1
    assert engine.allocate_managed_buffer(0) == 0
    assert engine.allocate_managed_buffer(1 << 60) == 0


def test_what_is_known_of_peers(pair: Pair, free_port: int) -> None:
    one, other = pair
    assert one.engine.send_probe(other.session) == 0
    assert one.engine.send_probe(f"{HOST}:{free_port}") == -102
    assert one.engine.get_first_buffer_address(other.session) == other.start
    assert one.engine.get_first_buffer_address(f"{HOST}:{free_port}") == 0
    assert one.engine.warmup_efa_segment(other.session) == 0
    assert "cpu:0" in one.engine.get_local_topology()
    assert isinstance(one.engine.get_engine(), InnerTransferEngine)
    assert one.engine.get_engine_ptr() == 0


def test_before_initialize() -> None:
    engine = TransferEngine()
    array = np.zeros(100, np.uint8)
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(array.ctypes.data, 100) == -1
    assert engine.unregister_memory(array.ctypes.data) == -3
    assert engine.transfer_sync_write(f"{HOST}:1", 1, 1, 1) == -1
    assert engine.batch_transfer_async_read(f"{HOST}:1", [1], [1], [1]) == 0
    assert engine.transfer_check_status(1) == -1
    assert engine.send_probe(f"{HOST}:1") == -1
    assert engine.allocate_managed_buffer(10) == 0
    assert engine.get_notifies() == []
    assert engine.get_engine() is None


@pytest.mark.parametrize("form", ["initialize", "initialize_ext"])
def test_initialize(form: str, free_port: int, caplog: pytest.LogCaptureFixture) -> None:
    more = ("p2p",) if form.endswith("ext") else ()

    def call(engine: TransferEngine, host: str, metadata: str = P2P) -> int:
        return int(getattr(engine, form)(host, metadata, "rdma", "mlx5_0", *more))

    engine = TransferEngine()
    assert call(engine, HOST, "ftp://127.0.0.1") == -1
    assert "P2PHANDSHAKE" in caplog.text
    assert call(engine, "203.0.113.9") == -1  # no address of this host; may be tried again
    assert call(engine, f"{HOST}:{free_port}", "etcd://127.0.0.1:1") == 0  # it is there later
    assert engine.get_rpc_port() == free_port
    assert call(engine, HOST) == 0
    assert engine.get_rpc_port() == free_port
    other = TransferEngine()
    assert call(other, f"{HOST}:{free_port}") == -1  # taken
    assert call(other, HOST) == 0
    with pytest.raises(TypeError):
        getattr(TransferEngine(), form)(HOST, P2P, None, "", *more)


@pytest.mark.parametrize("form", ["[::1]:{}", "::1:{}"])
def test_ipv6(form: str) -> None:
    """Callers make session ids of any host by f"{host}:{port}"."""
    one, other = TransferEngine(), TransferEngine()
    assert one.initialize("::1", P2P, "tcp", "") == other.initialize("[::1]", P2P, "tcp", "") == 0
    assert one.send_probe(form.format(other.get_rpc_port())) == 0


PEER = """
import sys, numpy as np
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize(sys.argv[1], "P2PHANDSHAKE", "tcp", "") == 0
array = np.full(65536, int(sys.argv[2]), np.uint8)
assert engine.register_memory(array.ctypes.data, 65536) == 0
print(engine.get_rpc_port(), array.ctypes.data, flush=True)
sys.stdin.read()
"""


def start_peer(host: str, value: int) -> tuple[Any, int, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, host, str(value)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    port, address = process.stdout.readline().split()
    return process, int(port), int(address)


def test_a_peer_that_comes_back_is_found_by_those_who_only_look_later(pair: Pair, free_port: int) -> None:
    one, _ = pair
    session = f"{HOST}:{free_port}"
    process, _, address = start_peer(session, 3)

    def read() -> int:
        number = one.engine.batch_transfer_async_read(session, [one.start], [address], [100])
        return one.engine.get_batch_transfer_status([number])

    try:
        assert read() == 0
    finally:
        process.kill()
        process.communicate()
    assert read() == -1
    process, _, address = start_peer(session, 9)
    try:
        until(lambda: read() == 0)
        assert (one.array[:100] == 9).all()
    finally:
        process.kill()
        process.communicate()


def test_a_peer_that_dies_and_comes_back(pair: Pair, free_port: int) -> None:
    """Codes and no hang while it is gone; its successor at the same session id is another segment."""
    one, _ = pair
    session = f"{HOST}:{free_port}"
    process, _, address = start_peer(session, 3)
    try:
        assert one.engine.transfer_sync_read(session, one.start, address, 100) == 0
        assert (one.array[:100] == 3).all()
    finally:
        process.kill()
        process.communicate()
    assert one.engine.transfer_sync_read(session, one.start, address, 100) == -1
    assert one.engine.send_probe(session) == -102
    process, port, address = start_peer(session, 9)
    try:
        assert f"{HOST}:{port}" == session
        assert until(lambda: one.engine.transfer_sync_read(session, one.start, address, 100) == 0)
        assert (one.array[:100] == 9).all()
    finally:
        process.kill()
        process.communicate()


def test_a_peer_that_was_replaced_meanwhile(pair: Pair, free_port: int) -> None:
    """Nobody called while it was gone: the first call fails, the next one finds its successor."""
    one, _ = pair
    session = f"{HOST}:{free_port}"
    process, _, address = start_peer(session, 3)
    try:
        assert one.engine.transfer_sync_read(session, one.start, address, 100) == 0
    finally:
        process.kill()
        process.communicate()
    process, _, address = start_peer(session, 9)
    try:
        codes = [one.engine.transfer_sync_read(session, one.start, address, 100) for _ in range(3)]
        assert codes[-1] == 0
        assert (one.array[:100] == 9).all()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_peer_that_is_killed_in_the_middle_of_a_transfer(pair: Pair, verb: str) -> None:
    """The transfer ends with a code, soon, and so do those behind it; the engine goes on with others."""
    one, other = pair
    slices, transfers = 32768, 20
    process, port, address = start_peer(HOST, 3)
    session = f"{HOST}:{port}"
    columns = [one.start] * slices, [address] * slices, [ROOM] * slices  # 2 GiB: a tenth of a second
    try:
        assert one.engine.send_probe(session) == 0
        start = getattr(one.engine, f"batch_transfer_async_{verb}")
        numbers = [start(session, *columns) for _ in range(transfers)]
        assert all(number > 0 for number in numbers)
        process.kill()
        codes = [until(lambda number=number: one.engine.transfer_check_status(number)) for number in numbers]
        assert set(codes) <= {1, -1}
        assert codes[-1] == -1, "all transfers were over before their peer"
    finally:
        process.kill()
        process.communicate()
    assert one.engine.transfer_sync_read(session, one.start, address, 100) == -1
    assert one.engine.transfer_sync_write(other.session, one.start, other.start, 100) == 0


def test_a_peer_of_another_token(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Moves nothing, and says why."""
    _, other = pair
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another")
    stranger = Side()
    stranger.array[:] = 9
    try:
        assert stranger.engine.transfer_sync_write(other.session, stranger.start, other.start, 10) == -1
        assert "token" in caplog.text
        assert stranger.engine.send_probe(other.session) == -102
        assert not other.array.any()
    finally:
        assert stranger.engine.unregister_memory(stranger.start) == 0


# ---- the small ones beside it


def test_data_to_a_callback(caplog: pytest.LogCaptureFixture) -> None:
    server, client = create_rpc_server(), create_rpc_client()
    got: list[Any] = []
    assert client.send_data(f"{HOST}:1", b"x") == -1  # not initialized
    assert not server.start_server()
    assert server.initialize_server(f"{HOST}:0")
    server.set_data_receive_callback(
        lambda one: got.append((one.get_bytes(), one.data_size, one.source_address))
    )
    assert server.start_server_async()
    assert client.initialize()
    large = np.random.default_rng(3).integers(0, 256, 3_000_000, np.uint8).tobytes()
    for data in (b"small", large, b""):
        assert client.send_data(server.address, data) == 0
    until(lambda: len(got) == 3)
    assert [one[0] for one in got] == [b"small", large, b""]
    assert got[1][1] == len(large)
    server.set_data_receive_callback(lambda one: 1 / 0)
    assert client.send_data(server.address, b"x") == 0
    until(lambda: "a callback failed" in caplog.text)
    assert client.send_data("no address", b"x") == -1
    with pytest.raises(TypeError):
        client.send_data(server.address, "text")
    server.stop_server()
    server.stop_server()
    assert client.send_data(server.address or f"{HOST}:1", b"x") == -1
    client.stop_server()


def piece(sender: bytes, number: int, index: int, count: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode(_rpc._Head(sender, number, index, count, "", "", (), data))


def test_pieces_of_two_senders_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both count their messages from 1, and the engine may call both by one name."""
    server = create_rpc_server()
    got: list[bytes] = []
    server.set_data_receive_callback(lambda one: got.append(one.get_bytes()))
    server._take("peer", piece(b"one", 1, 0, 2, b"one's "))
    server._take("peer", piece(b"two", 1, 0, 2, b"two's "))
    server._take("peer", piece(b"two", 1, 1, 2, b"bytes"))
    server._take("peer", piece(b"one", 1, 1, 2, b"own"))
    assert got == [b"two's bytes", b"one's own"]
    server._take("peer", piece(b"one", 2, 5, 2, b"no such piece"))
    assert "piece 5 of 2" in caplog.text
    monkeypatch.setattr(_rpc, "PENDING_BYTES_MAX", 100)
    server._take("peer", piece(b"two", 7, 0, 2, b"waits "))
    for number in range(8, 40):  # a sender that never ends anything
        server._take("peer", piece(b"one", number, 0, 2, b"x" * 30))
    assert sum(server._pending_bytes.values()) <= 100 + 6
    assert "some are lost" in caplog.text
    server._take("peer", piece(b"two", 7, 1, 2, b"for long"))
    assert got[-1] == b"waits for long"
    monkeypatch.setattr(_rpc, "PENDING_MAX", 2)
    server._take("peer", piece(b"three", 1, 0, 2, b"x"))
    assert "the oldest is lost" in caplog.text


def test_a_server_that_nobody_holds_ends() -> None:
    server = create_rpc_server()
    assert server.initialize_server(f"{HOST}:0")
    assert server.start_server()
    gone, thread = weakref.ref(server), server._thread
    del server
    until(lambda: gone() is None)
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_data_by_asyncio() -> None:
    import asyncio

    server, client = create_rpc_server(), create_rpc_client()
    got: list[bytes] = []
    assert server.initialize(f"{HOST}:0")
    server.set_data_receive_callback(lambda one: got.append(bytes(one.get_memory_view())))
    assert server.start_server()
    assert client.initialize_client()

    async def send() -> int:
        return int(await client.send_data_async(server.address, b"later", asyncio.get_running_loop()))

    assert asyncio.run(send()) == 0
    until(lambda: got == [b"later"])
    server.stop_server()
    client.stop_server()
    assert not create_rpc_server().initialize_server("no address")


def test_a_shared_segment() -> None:
    from mooncake.engine import SharedSegment

    assert SharedSegment.supported()
    assert not SharedSegment.supported(host_register=True)
    made = [SharedSegment.create("seg", 1 << 20, 2, rank) for rank in range(2)]
    blobs = [blob for _, blob in made]
    owner, other = (segment for segment, _ in made)
    assert (owner.ready(), owner.base_addr(), owner.size()) == (False, 0, 1 << 20)
    with pytest.raises(moonpool.InvalidArgument, match="one blob"):
        owner.complete(blobs[:1])
    with pytest.raises(moonpool.InvalidArgument, match="no blobs"):
        owner.complete([b"garbage", b"{}"])
    for segment in (owner, other):
        segment.complete(blobs)
        assert segment.ready()
    assert owner.base_addr() != other.base_addr()
    ctypes.memmove(owner.base_addr(), b"shared", 6)
    assert ctypes.string_at(other.base_addr(), 6) == b"shared"
    assert owner.device_addr() == 0
    for bad in (("x", 0, 1, 0), ("x", 10, 1, 1), ("x", 10, 1, 0, 5)):
        with pytest.raises(moonpool.InvalidArgument):
            SharedSegment.create(*bad)


def test_a_shared_segment_of_two_processes() -> None:
    from mooncake.engine import SharedSegment

    owner, blob = SharedSegment.create("two", 4096, 2, 0)
    code = (
        "import ctypes, sys; from mooncake.engine import SharedSegment\n"
        "mine, blob = SharedSegment.create('two', 4096, 2, 1)\n"
        "print(blob.decode(), flush=True)\n"
        "mine.complete([sys.stdin.readline(), blob])\n"
        "ctypes.memmove(mine.base_addr() + 100, b'from the other', 14)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        owner.complete([blob, other.stdout.readline()])
        other.communicate(blob.decode() + "\n", timeout=60)
    assert other.returncode == 0
    assert ctypes.string_at(owner.base_addr() + 100, 14) == b"from the other"


def test_one_bad_transfer_does_not_end_the_others(pair: Pair) -> None:
    """The peer stays open when it is only the address that was wrong."""
    one, other = pair
    assert one.engine.send_probe(other.session) == 0
    opened = one.engine._peers.get(other.session)
    assert one.engine.transfer_sync_write(other.session, one.start, other.start + ROOM, 10) == -1
    assert one.engine._peers.get(other.session) is opened
    assert one.engine.transfer_sync_write(other.session, one.start, other.start, 10) == 0
