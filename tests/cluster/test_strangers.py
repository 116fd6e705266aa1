"""Every TCP port against who does not know the token, or does not speak the protocol: refused, counted, and
nobody else notices. Each test runs against the port of a node, of the master and of a transfer engine."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from moonpool import AuthError, ProtocolError, Store

from ..core import wire_client as w
from .bed import TOKEN, Cluster, until
from .hosts import Process
from .tcp_wire import TcpWire, connect

AUTH_CODE, PROTOCOL_CODE = 2, 6
HANDSHAKE_S = 5.0  # of the listener
UNPROVED_MAX = 64


@dataclass
class Port:
    """One listening port, and how to see that it still serves those who may."""

    cluster: Cluster
    address: str
    purpose: bytes
    process: Process

    def call(self, timeout_s: float = 10.0) -> TcpWire:
        return TcpWire.call(self.cluster.network.switch, self.address, timeout_s)

    def connect(self, timeout_s: float = 10.0) -> socket.socket:
        return connect(self.cluster.network.switch, self.address, timeout_s)

    def prove(self) -> TcpWire:
        wire = self.call()
        wire.prove(TOKEN.encode(), self.purpose)
        return wire

    def serves(self) -> None:
        assert self.process.is_running
        with self.prove():
            pass


ENGINE = """
import os, sys
from moonpool import TransferEngine
token = os.environ["MOONPOOL_CLUSTER_TOKEN"].encode()
engine = TransferEngine("engine", listen=[sys.argv[1]], token=token)
print("engine at", engine.addresses[0], flush=True)
while True:
    engine.notifications(timeout_s=60)
"""


@pytest.fixture(scope="module")
def engine(shared_cluster: Cluster) -> Process:
    host = shared_cluster.nodes[0].host
    process = host.start("engine", [sys.executable, "-c", ENGINE, f"{host.address}:7720"])
    process.said("^engine at")
    return process


@pytest.fixture(params=["node", "master", "engine"])
def port(request: pytest.FixtureRequest, shared_cluster: Cluster, engine: Process) -> Iterator[Port]:
    cluster = shared_cluster
    node = cluster.nodes[0]
    if request.param == "node":
        port = Port(cluster, node.address, b"store", node.process)
    elif request.param == "engine":
        port = Port(cluster, f"{node.host.address}:7720", b"engine", engine)
    else:
        assert cluster.master_process is not None
        port = Port(cluster, cluster.master, b"directory", cluster.master_process)
    port.serves()
    before = port.process.rss_bytes()
    yield port
    port.serves()
    assert port.process.rss_bytes() - before < 32 << 20
    until(lambda: set(cluster.states().values()) == {"alive"})


def refused(wire: TcpWire) -> tuple[int, str]:
    """Waits for the ERROR frame and the end."""
    last = wire.receive()
    assert last.kind == w.ERROR, last
    assert wire.is_closed()
    return last.error


def is_ended(sock: socket.socket) -> None:
    """Reads until the other side has ended it, in time."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 4096,
        b"\xff" * 4096,
        b"GET / HTTP/1.1\r\nHost: moonpool\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 500,
        w.frame(w.STAT),
        w.frame(w.WELCOME, b"x" * 32),
        w.frame(w.AUTH, b""),
        w.frame(w.AUTH, w.auth(b"default", b"n" * 32, b"p" * 31)),
        w.frame(w.AUTH, w.text16(b"t" * 900)),
        w.frame(0),
        w.frame(255, b"x" * 1000),
        w.HEADER.pack(w.MAGIC, w.VERSION, w.AUTH, 0, 1025, 0, 1)
        + b"x" * 1025,  # over what a stranger may send
        w.HEADER.pack(w.MAGIC, w.VERSION, w.AUTH, 0, 0xFFFFFFFF, 0, 1),
        w.HEADER.pack(w.MAGIC, w.VERSION, w.AUTH, 0, 10, 1, 1) + b"x" * 10,  # "zero" is not
    ],
    ids=lambda data: data[:6].hex(),
)
def test_garbage_instead_of_a_proof(port: Port, garbage: bytes) -> None:
    sock = port.connect()
    sock.sendall(garbage)
    is_ended(sock)
    sock.close()


def test_random_bytes(port: Port, rng: random.Random) -> None:
    for _ in range(100):
        with port.connect() as sock, contextlib.suppress(ConnectionError):
            sock.sendall(rng.randbytes(rng.randrange(1, 3000)))
            sock.shutdown(socket.SHUT_WR)
            is_ended(sock)


@pytest.mark.parametrize("cut", [1, 3, 23, 24, 25, 60])
def test_half_a_frame_and_then_the_end(port: Port, cut: int) -> None:
    proof = w.frame(w.AUTH, w.auth(b"default", b"n" * 32, b"p" * 32) + w.text16(port.purpose))
    with port.connect() as sock:
        sock.sendall(proof[:cut])
        sock.shutdown(socket.SHUT_WR)
        is_ended(sock)


def test_a_proof_byte_by_byte_is_good(port: Port) -> None:
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        nonce = os.urandom(32)
        covered = b"default\0" + port.purpose
        proof = w.mac(b"client", TOKEN.encode(), node_nonce, nonce, incarnation, covered)
        frame = w.frame(w.AUTH, w.auth(b"default", nonce, proof) + w.text16(port.purpose), request_id=1)
        for i in range(len(frame)):
            wire.socket.sendall(frame[i : i + 1])
        assert wire.receive().kind == w.WELCOME


@pytest.mark.parametrize("token", [b"wrong", b"", TOKEN.encode() + b"x", b"x" * 4096])
def test_a_wrong_token(port: Port, token: bytes) -> None:
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        proof = w.mac(b"client", token, node_nonce, b"n" * 32, incarnation, b"default\0" + port.purpose)
        wire.send(w.AUTH, w.auth(b"default", b"n" * 32, proof) + w.text16(port.purpose), request_id=1)
        code, text = refused(wire)
        assert code == AUTH_CODE
        print(text)


def test_a_proof_is_good_for_one_connection_and_one_purpose(port: Port) -> None:
    other = {b"directory": b"member", b"store": b"engine", b"engine": b"store"}[port.purpose]
    with port.call() as first, port.call() as second, port.call() as third:
        node_nonce, incarnation = first.challenged()
        second_nonce, _ = second.challenged()
        third_nonce, _ = third.challenged()
        assert len({node_nonce, second_nonce, third_nonce}) == 3
        covered = b"default\0" + port.purpose
        proof = w.mac(b"client", TOKEN.encode(), node_nonce, b"n" * 32, incarnation, covered)
        body = w.auth(b"default", b"n" * 32, proof)
        second.send(w.AUTH, body + w.text16(port.purpose), request_id=1)  # replayed on another connection
        assert refused(second)[0] == AUTH_CODE
        proof = w.mac(b"client", TOKEN.encode(), third_nonce, b"n" * 32, incarnation, covered)
        third.send(w.AUTH, w.auth(b"default", b"n" * 32, proof) + w.text16(other), request_id=1)
        assert refused(third)[0] in (AUTH_CODE, PROTOCOL_CODE)
        first.send(w.AUTH, body + w.text16(port.purpose), request_id=1)
        assert first.receive().kind == w.WELCOME
        first.send(w.AUTH, body + w.text16(port.purpose), request_id=2)  # and once only
        assert refused(first)[0] == PROTOCOL_CODE


def test_the_nodes_own_proof_sent_back(port: Port) -> None:
    """A mirror: what the node proves with must not open it."""
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        covered = b"default\0" + port.purpose
        proof = w.mac(b"node", TOKEN.encode(), node_nonce, node_nonce, incarnation, covered)
        wire.send(w.AUTH, w.auth(b"default", node_nonce, proof) + w.text16(port.purpose), request_id=1)
        assert refused(wire)[0] == AUTH_CODE


@pytest.mark.parametrize("purpose", [b"", b"ENGINE", b"nonsense", b"store\0", b"p" * 500])
def test_a_purpose_that_nobody_serves_here(port: Port, purpose: bytes) -> None:
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        proof = w.mac(b"client", TOKEN.encode(), node_nonce, b"n" * 32, incarnation, b"default\0" + purpose)
        wire.send(w.AUTH, w.auth(b"default", b"n" * 32, proof) + w.text16(purpose), request_id=1)
        code, text = refused(wire)
        assert code != 0 or text
        print(code, text)


@pytest.mark.parametrize(
    ("tenant", "code"),
    [(b"nobody", AUTH_CODE), (b"", AUTH_CODE), (b"default\0", AUTH_CODE), (b"\xff\xfe", PROTOCOL_CODE)],
)
def test_a_tenant_that_is_not_here(port: Port, tenant: bytes, code: int) -> None:
    if port.purpose != b"store":
        pytest.skip("only a node has a list of tenants")
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        covered = tenant + b"\0" + port.purpose
        proof = w.mac(b"client", TOKEN.encode(), node_nonce, b"n" * 32, incarnation, covered)
        wire.send(w.AUTH, w.auth(tenant, b"n" * 32, proof) + w.text16(port.purpose), request_id=1)
        last = wire.receive()
        assert (last.kind, int.from_bytes(last.body[:2], "little")) == (w.ERROR, code)
        assert wire.is_closed()


def test_a_flood_of_one_address_ends_no_handshake_of_another(port: Port) -> None:
    """The one that makes room is of the address that has the most, however long another one waits."""
    with TcpWire.call(port.cluster.nodes[1].host, port.address) as slow:
        greeting = slow.receive()
        flood = [port.connect() for _ in range(UNPROVED_MAX + 8)]
        port.prove().close()  # they were accepted before it
        nonce, covered = os.urandom(32), b"default" + b"\0" + port.purpose
        node_nonce, incarnation = greeting.body[:32], greeting.body[32:]
        proof = w.mac(b"client", TOKEN.encode(), node_nonce, nonce, incarnation, covered)
        slow.send(w.AUTH, w.auth(b"default", nonce, proof) + w.text16(port.purpose), request_id=1)
        assert slow.receive().kind == w.WELCOME
    for sock in flood:
        sock.close()


def test_idle_connections_keep_nobody_out(port: Port) -> None:
    """Three times as many as there are places for them; and one that is proved, which may be idle."""
    quiet = port.prove()
    idle = [port.connect() for _ in range(3 * UNPROVED_MAX)]
    worst = 0.0
    for _ in range(10):
        began = time.monotonic()
        port.prove().close()
        worst = max(worst, time.monotonic() - began)
    print(f"the slowest handshake beside {len(idle)} idle connections: {worst:.3f} s")
    assert worst < HANDSHAKE_S / 2
    for sock in idle[: 2 * UNPROVED_MAX]:
        is_ended(sock)  # made room for the later ones
    began = time.monotonic()
    for sock in idle:
        is_ended(sock)
        sock.close()
    print(f"the last of them was ended after {time.monotonic() - began:.3f} s")
    if port.purpose == b"store":
        assert quiet.stat()["objects"] >= 0
    elif port.purpose == b"directory":
        assert quiet.ask(35, struct.pack("<Q", 0)).kind == 35  # MEMBERS
    else:
        assert quiet.is_closed()  # an engine wants its peer's HELLO in time
    quiet.close()


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_of_the_wire(port: Port, version: int) -> None:
    """One step older or newer: one clear sentence that names the versions."""
    with port.call() as wire:
        node_nonce, incarnation = wire.challenged()
        proof = w.mac(
            b"client", TOKEN.encode(), node_nonce, b"n" * 32, incarnation, b"default\0" + port.purpose
        )
        body = w.auth(b"default", b"n" * 32, proof) + w.text16(port.purpose)
        wire.socket.sendall(w.frame(w.AUTH, body, request_id=1, version=version))
        code, text = refused(wire)
        assert code == PROTOCOL_CODE
        print(text)
        assert "version" in text
    with port.prove() as wire:
        wire.socket.sendall(w.frame(w.STAT, request_id=5, version=version))
        code, text = refused(wire)
        assert code == PROTOCOL_CODE
        assert "version" in text


# ---- the other way round: what a client makes of a stranger's port


def listener(cluster: Cluster, script: list[bytes]) -> tuple[socket.socket, str]:
    """A port in a's host that says these bytes to whoever comes, reading a little after each."""
    host = cluster.nodes[0].host
    with host.namespace.entered():
        server = socket.create_server((host.address, 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = server.accept()
                with sock, contextlib.suppress(OSError):
                    sock.settimeout(10)
                    for data in script:
                        sock.sendall(data)
                        sock.recv(4096)

    threading.Thread(target=serve, daemon=True).start()
    return server, f"tcp://{host.address}:{server.getsockname()[1]}"


CHALLENGE = w.frame(w.CHALLENGE, bytes(48))


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"], ProtocolError),
        ([b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"], ProtocolError),
        ([w.frame(w.CHALLENGE, bytes(48), version=2)], ProtocolError),
        ([w.frame(w.CHALLENGE, bytes(48), version=0)], ProtocolError),
        ([w.frame(w.CHALLENGE, bytes(47))], ProtocolError),
        ([w.HEADER.pack(w.MAGIC, 1, w.CHALLENGE, 0, 0xFFFFFFFF, 0, 0)], ProtocolError),
        ([CHALLENGE, w.frame(w.WELCOME, bytes(200), flags=1, request_id=1)], AuthError),  # no proof
        ([CHALLENGE, w.frame(w.WELCOME, bytes(8), flags=1, request_id=1)], ProtocolError),
        ([CHALLENGE, w.frame(w.STAT, bytes(200), flags=1, request_id=1)], ProtocolError),
        ([CHALLENGE, w.frame(w.ERROR, struct.pack("<HH", 2, 2) + b"no", flags=1)], AuthError),
        ([CHALLENGE, w.frame(w.ERROR, b"\xff\xff\xff", flags=1)], ProtocolError),
    ],
    ids=lambda value: value[-1][5:9].hex() if isinstance(value, list) else "",
)
def test_a_port_that_is_no_node(shared_cluster: Cluster, script: list[bytes], error: type[Exception]) -> None:
    server, address = listener(shared_cluster, script)
    with shared_cluster.nodes[1].host.namespace.entered(), pytest.raises(error) as caught:
        Store(address, token=TOKEN.encode(), timeout_s=10)
    print(caught.value)
    peer = getattr(caught.value, "peer", "")
    assert address.removeprefix("tcp://") in f"{caught.value} {peer}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def test_what_strangers_did_is_counted(shared_cluster: Cluster) -> None:
    node = shared_cluster.nodes[0]
    before = node.metrics()
    place = shared_cluster.network.switch
    with TcpWire.call(place, node.address) as wire:
        wire.challenged()
        wire.send(w.AUTH, w.auth(b"default", b"n" * 32, b"p" * 32) + w.text16(b"store"), request_id=1)
        refused(wire)
    with connect(place, node.address) as sock:
        sock.sendall(b"\0" * 100)
        is_ended(sock)
    grown = node.since(before)
    print({name: n for name, n in grown.items() if n})
    assert grown["auth_failures_total"] == 1
    assert grown["protocol_errors_total"] == 1
