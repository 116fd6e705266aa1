"""What is under way on a connection while its node is given to another process: it goes on exactly, or it has
ended before the node is described. Both servers are of this process."""

from __future__ import annotations

import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.errors import Error
from moonpool.core.service.data_tls import data_server

from ..cluster.tcp_wire import TcpWire
from . import wire_client as w
from .store_bed import MIB, TOKEN, assert_serves, until
from .take_over_bed import PATIENCE_S, given_copies, make_server
from .tls_bed import made, pem

__all__ = ["pem"]

READ_BYTES = 16 * MIB  # more than any socket buffers
UNAVAILABLE = 1  # Code::kUnavailable


@pytest.fixture
def path(runtime: Path) -> Path:
    return runtime / "node-t.sock"


@pytest.fixture
def listen(free_port: int) -> list[str]:
    return [f"127.0.0.1:{free_port}"]


@pytest.fixture
def server(path: Path, listen: list[str]) -> Iterator[_native.Server]:
    server = make_server(path, 32, listen=listen)
    server.start()
    yield server
    server.stop()


class TlsWire(TcpWire):
    """Inside TLS, where Python passes no descriptors."""

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise w.Closed
            data += piece
        return data


def call(address: str, context: ssl.SSLContext | None = None) -> TcpWire:
    host, _, port = address.rpartition(":")
    plain = socket.create_connection((host, int(port)), PATIENCE_S)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # it grows no more by itself
    if context is None:
        wire = TcpWire(plain, PATIENCE_S)
    else:
        wire = TlsWire(context.wrap_socket(plain), PATIENCE_S)
    wire.prove(TOKEN, b"store")
    wire.space = int.from_bytes(wire.ask(w.OPEN_SPACE, w.open_space(b"default", b"")).body, "little")
    return wire


def begin_put(wire: TcpWire, server: _native.Server) -> None:
    data = os.urandom(4 * MIB)
    frame = w.frame(w.PUT, w.put(wire.space, [(_native.crc32c(data), b"slow", b"", data)]), request_id=5)
    wire.socket.sendall(frame[: 2 * MIB])
    until(lambda: server.metrics()["leased_bytes"] >= 4 * MIB, PATIENCE_S)


def begin_read(wire: TcpWire, server: _native.Server, store: Store) -> None:
    """Its answer is so long that most of it cannot leave the node."""
    names = [f"r{i}" for i in range(8)]
    for name in names:
        assert store.put(name, os.urandom(READ_BYTES // 8)) == STORED
    rows = [w.by_name(name.encode(), room=READ_BYTES) for name in names]
    wire.send(w.READ, w.read(wire.space, rows), request_id=6)
    until(lambda: server.metrics()["objects_pinned"] > 0, PATIENCE_S)


def bytes_until_end(wire: TcpWire) -> int:
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
    count = 0
    try:
        while data := wire.socket.recv(1 << 20):
            count += len(data)
    except ConnectionError:
        pass
    return count


def test_a_put_that_is_under_way_ends_before_its_memory_is_anothers(
    server: _native.Server, path: Path, listen: list[str], rng: random.Random
) -> None:
    with call(listen[0]) as wire:
        begin_put(wire, server)
        given = given_copies(server)
        # Already now, so that nothing more is received into that memory; what comes is read and dropped.
        wire.socket.sendall(bytes(MIB))
        code, why = wire.ended()
        assert code == UNAVAILABLE
        assert why.startswith("another process takes over from this node (moonpool node --take-over)")
    new = make_server(path, 32, given, listen=listen)
    server.let_go()
    new.start()
    try:
        with Store(str(path), token=TOKEN, timeout_s=PATIENCE_S) as store:
            assert new.metrics()["leased_bytes"] == 0
            values = {f"k{i}": rng.randbytes(MIB) for i in range(24)}
            assert {store.put(key, value) for key, value in values.items()} == {STORED}
            assert store.exists("slow") is Presence.MISS
            assert [bytes(each or b"") for each in store.get(list(values))] == list(values.values())
        with call(listen[0]) as wire:
            data = rng.randbytes(1000)
            row = (_native.crc32c(data), b"anew", b"", data)
            assert wire.ask(w.PUT, w.put(wire.space, [row])).body[4] == w.STORED
        assert new.check_integrity()
    finally:
        new.stop()


def test_a_read_that_is_under_way_ends_before_its_memory_is_anothers(
    server: _native.Server, path: Path, listen: list[str]
) -> None:
    with Store(str(path), token=TOKEN, timeout_s=PATIENCE_S) as store, call(listen[0]) as wire:
        begin_read(wire, server, store)
        given = given_copies(server)
        assert bytes_until_end(wire) < READ_BYTES
        new = make_server(path, 32, given, listen=listen)
        server.let_go()
        new.start()
        try:
            assert new.metrics()["objects_pinned"] == 0
            assert new.check_integrity()
            assert_serves(path)
        finally:
            new.stop()


@pytest.mark.parametrize("begins", ["put", "read"])
def test_what_has_ended_leaves_nothing_in_a_node_that_is_taken_back(
    server: _native.Server, path: Path, listen: list[str], begins: str
) -> None:
    with Store(str(path), token=TOKEN, timeout_s=PATIENCE_S) as store, call(listen[0]) as wire:
        if begins == "put":
            begin_put(wire, server)
        else:
            begin_read(wire, server, store)
        description, numbers = given_copies(server)
        bytes_until_end(wire)
        for number in (description, *numbers):
            os.close(number)
        server.take_back()
        with call(listen[0]) as other:
            assert other.ask(w.STAT).kind == w.STAT
        until(lambda: server.metrics()["leased_bytes"] == server.metrics()["pins"] == 0, PATIENCE_S)
        assert server.metrics()["objects_pinned"] == 0
        assert server.check_integrity()
        assert_serves(path)


class Asked:
    """A client of the own host that sends requests until the node's answers fill its socket."""

    def __init__(self, wire: w.Wire, server: _native.Server) -> None:
        self._wire, self._server = wire, server
        self._left = b""  # of the last request
        self.count = 0
        wire.socket.setblocking(False)
        stuck = 0
        while stuck < 5:  # each look at the metrics is at least one turn of the node
            stuck = 0 if self._send() else stuck + 1
            server.metrics()
        self._came = b""

    def _send(self) -> bool:
        sent = False
        while True:
            if not self._left:
                self.count += 1
                self._left = w.frame(w.STAT, request_id=self.count)
            try:
                self._left = self._left[self._wire.socket.send(self._left) :]
            except BlockingIOError:
                return sent
            sent = True

    def read_what_is_there(self) -> None:
        self._wire.socket.setblocking(False)
        try:
            while data := self._wire.socket.recv(1 << 20):
                self._came += data
        except BlockingIOError:
            return

    def read_all(self) -> None:
        """Each answer comes once, and in the order of the requests."""
        self._wire.socket.settimeout(PATIENCE_S)
        answers, at = [], 0
        while len(answers) < self.count:
            if len(answers) == self.count - 1:
                self._wire.socket.sendall(self._left)
            while len(self._came) - at < w.HEADER.size or len(self._came) - at < self._bytes_at(at):
                data = self._wire.socket.recv(1 << 20)
                assert data, "the connection has ended"
                self._came += data
            answers.append(w.HEADER.unpack_from(self._came, at)[6])
            at += self._bytes_at(at)
        assert answers == list(range(1, self.count + 1))
        assert at == len(self._came)

    def _bytes_at(self, at: int) -> int:
        magic, _, kind, _, size, _, _ = w.HEADER.unpack_from(self._came, at)
        assert (magic, kind) == (w.MAGIC, w.STAT)
        return w.HEADER.size + int(size)


@pytest.mark.parametrize("taken", [True, False])
def test_answers_that_are_still_to_go_out_come_once(
    server: _native.Server, path: Path, listen: list[str], taken: bool
) -> None:
    with ExitStack() as stack:
        wire = stack.enter_context(w.Wire.open(path, TOKEN))
        asked = Asked(wire, server)
        given = given_copies(server)
        # There is room now, which the one that has given must not use.
        for _ in range(3):
            asked.read_what_is_there()
            server.metrics()
        if taken:
            new = make_server(path, 32, given, listen=listen)
            server.let_go()
            new.start()
            stack.callback(new.stop)
        else:
            for number in (given[0], *given[1]):
                os.close(number)
            server.take_back()
        asked.read_all()
        assert wire.lookup([b"absent"])[0] == 0


def test_a_connection_inside_tls_ends_when_its_node_is_given(
    path: Path, listen: list[str], pem: Callable[[str], str]
) -> None:
    cluster = {"tls_data": "on", "tls_cert": pem("master"), "tls_key": pem("test-key")}
    tls = data_server(made({**cluster, "tls_ca": pem("authority")}))
    context = ssl.create_default_context(cafile=pem("authority"))
    context.check_hostname = False
    server = make_server(path, 32, listen=listen, data_tls=tls)
    server.start()
    with call(listen[0], context) as wire:
        given = given_copies(server)
        assert bytes_until_end(wire) == 0
    new = make_server(path, 32, given, listen=listen, data_tls=tls)
    server.let_go()
    new.start()
    with call(listen[0], context) as wire:
        assert wire.ask(w.STAT).kind == w.STAT
    new.stop()


def test_a_server_that_is_prepared_and_never_started_changes_nothing(
    server: _native.Server, path: Path, listen: list[str]
) -> None:
    with Store(str(path), token=TOKEN) as store, w.Wire.open(path, TOKEN) as wire, call(listen[0]) as far:
        store.put("a", b"1")
        offset, _, why = wire.lease(MIB, MIB)
        assert not why
        new = make_server(path, 32, given_copies(server), listen=listen)
        new.prepare()
        assert new.check_integrity()
        # It answers no caller, neither those that are there nor new ones.
        wire.send(w.STAT, request_id=70)
        far.send(w.STAT, request_id=71)
        with w.Wire.dial(path) as later:
            new.stop()
            del new
            server.take_back()
            assert wire.receive().request_id == 70
            assert far.receive().request_id == 71
            later.handshake(TOKEN)
        wire.send(w.RETURN, w.give_back(offset), flags=w.ONE_WAY)
        assert store.get("a") == b"1"
        assert server.check_integrity()


def test_a_stop_ends_what_waits_to_be_accepted(server: _native.Server, path: Path) -> None:
    other = path.with_name("other")
    os.link(path, other)  # the name by which the socket is still found
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        w.Wire.dial(other)


@pytest.mark.slow
def test_an_ssd_that_cannot_be_opened_again_lets_the_node_serve_and_be_given_no_more(
    path: Path, tmp_path: Path
) -> None:
    ssd = [(str(tmp_path), 256 * MIB)]
    server = make_server(path, ssd=ssd)
    server.start()
    other = make_server(path, 16, given_copies(server), ssd=ssd)
    server.take_back()  # the other one has the directories, and gives them up too late
    del other
    assert_serves(path)
    with pytest.raises(Error, match="its SSD directories are closed since a take-over failed"):
        server.give()
    assert_serves(path)
    assert server.check_integrity()
    server.stop()
