"""The node's Unix socket, spoken to by wire_client.py: the handshake, and what comes from strangers
and broken clients. Others are served meanwhile, and the node's memory stays bounded."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import STORED, Presence, Store, _native
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import AuthError, Error, ProtocolError, Timeout, TooLarge, Unavailable

from . import wire_client as w
from .store_bed import AUTH, MIB, PROTOCOL, TIMEOUT, TOKEN, TOO_LARGE, NodeProcess, assert_serves, until
from .wire_client import FakeNode, Wire


@pytest.fixture
def path(runtime_dir: Path) -> Path:
    return runtime_dir / "node-t.sock"


@pytest.fixture
def server(path: Path) -> Iterator[_native.Server]:
    server = _native.Server(str(path), [("default", 16 * MIB), ("other", 4 * MIB)], TOKEN, node_settings())
    server.start()
    yield server
    assert server.check_integrity()
    server.stop()


@pytest.fixture
def node(path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(path)
    yield node
    assert node.is_sound()
    node.close()


# ---- the address


def test_an_address_in_use_is_left_to_its_owner(server: _native.Server, path: Path) -> None:
    second = _native.Server(str(path), [("default", 4 * MIB)], TOKEN, node_settings())
    with pytest.raises(Error, match="Address already in use") as caught:
        second.start()
    assert str(path) in str(caught.value)
    second.stop()  # of what never started: takes nothing away from the first
    assert path.exists()
    assert_serves(path)


def test_a_stale_socket_file_is_reported_not_stolen(path: Path) -> None:
    dead = NodeProcess(path)
    dead.kill()
    assert path.exists()
    server = _native.Server(str(path), [("default", 4 * MIB)], TOKEN, node_settings())
    with pytest.raises(Error, match="Address already in use"):
        server.start()
    path.unlink()  # what core/service/node_socket.py does once it holds the lock
    server.start()  # a start that failed can be repeated
    assert_serves(path)
    server.stop()
    assert not path.exists()


def test_a_path_that_is_too_long(runtime_dir: Path) -> None:
    server = _native.Server(str(runtime_dir / ("x" * 108)), [("default", 4 * MIB)], TOKEN, node_settings())
    with pytest.raises(Error, match="longer than"):
        server.start()


def test_only_its_user_may_connect(server: _native.Server, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_server_needs_a_token_tenants_and_distinct_names(path: Path) -> None:
    for tenants, token, complaint in (
        ([("default", 4 * MIB)], b"", "token"),
        ([], TOKEN, "tenant"),
        ([("a", 4 * MIB), ("a", 4 * MIB)], TOKEN, "named a"),
        ([("a", 0)], TOKEN, "1 MiB"),
    ):
        with pytest.raises(Error, match=complaint):
            _native.Server(str(path), tenants, token, node_settings())


def test_stop_and_start_again(path: Path) -> None:
    server = _native.Server(str(path), [("default", 4 * MIB)], TOKEN, node_settings())
    server.start()
    store = Store(str(path), token=TOKEN)
    store.put("k", b"kept over a stop")
    server.stop()
    server.stop()
    assert server.metrics() == {}
    with pytest.raises(Unavailable):
        store.put("k2", b"x")
    server.start()
    until(lambda: store.exists("k") is Presence.HIT)
    assert store.get("k", bytearray(100)) == 16
    assert server.check_integrity()
    store.close()
    server.stop()


# ---- the handshake


@pytest.mark.parametrize("token", [b"wrong", TOKEN + b"x", TOKEN[:-1], b"\0"])
def test_a_wrong_token_is_refused_with_one_sentence(server: _native.Server, path: Path, token: bytes) -> None:
    with pytest.raises(AuthError, match="cluster token is wrong"):
        Store(str(path), token=token)
    assert server.metrics()["auth_failures_total"] == 1
    assert_serves(path)


def test_without_a_token_the_one_of_the_runtime_folder_is_read(server: _native.Server, path: Path) -> None:
    with pytest.raises(AuthError):
        Store(str(path))  # it makes a random one, which this node does not know
    (path.parent / "token").write_bytes(TOKEN)
    Store(str(path)).close()


def test_an_unknown_tenant_is_refused(server: _native.Server, path: Path) -> None:
    with pytest.raises(AuthError, match="no such tenant"):
        Store(str(path), token=TOKEN, tenant="nobody")
    with Store(str(path), token=TOKEN, tenant="other") as store:
        assert store.put("k", b"x") == STORED


def test_a_proof_is_bound_to_its_nonces_its_tenant_and_its_role(server: _native.Server, path: Path) -> None:
    with Wire.dial(path) as wire:
        greeting = wire.receive().body
    node_nonce, incarnation = greeting[:32], greeting[32:]
    nonce = b"n" * 32
    good = w.mac(b"client", TOKEN, node_nonce, nonce, incarnation, b"default")
    for tenant, proof in (
        (b"default", good),  # played back to another connection: its nonce is another
        (b"other", good),
        (b"default", w.mac(b"node", TOKEN, nonce, node_nonce, incarnation, b"default")),
        (b"default", bytes(32)),
    ):
        with Wire.dial(path) as wire:
            wire.receive()
            wire.send(w.AUTH, w.auth(tenant, nonce, proof))
            assert wire.ended()[0] == AUTH


def test_a_node_that_does_not_know_the_token_is_refused(path: Path) -> None:
    fake = FakeNode(path)

    def impostor(wire: Wire) -> None:
        wire.send(w.CHALLENGE, w.challenge(b"c" * 32, b"i" * 16))
        request = wire.receive()
        memory = [os.memfd_create("moonpool-arena-fake"), os.memfd_create("moonpool-index")]
        for descriptor in memory:
            os.ftruncate(descriptor, MIB)
        limits = w.Limits(MIB, MIB, 4096, 4096, 1024, 4096, 8 * MIB, 16384)
        proof = w.mac(b"node", b"a guess", bytes(32), b"c" * 32, b"i" * 16, b"default")
        welcome = w.frame(w.WELCOME, proof + limits.pack(), request_id=request.request_id, flags=w.ANSWER)
        socket.send_fds(wire.socket, [welcome], memory)
        for descriptor in memory:
            os.close(descriptor)
        assert wire.is_closed()  # not one byte more than its proof

    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: _noting(errors, lambda: fake.serve(impostor)))
    thread.start()
    with pytest.raises(AuthError, match="does not know the cluster token"):
        Store(str(path), token=TOKEN)
    thread.join(10)
    assert not errors
    fake.close()


def _noting(errors: list[BaseException], call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except BaseException as error:
        errors.append(error)


@pytest.mark.parametrize(
    ("greeting", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (w.frame(w.CHALLENGE, b"too short"), ProtocolError),
        (w.frame(w.STAT, bytes(48)), ProtocolError),
        (w.frame(w.CHALLENGE, bytes(48), version=2), ProtocolError),
        (w.HEADER.pack(w.MAGIC, w.VERSION, w.CHALLENGE, 0, 0xFFFFFFFF, 0, 0), ProtocolError),
        (w.frame(w.ERROR, struct.pack("<HH", TOO_LARGE, 4) + b"full"), TooLarge),
        (w.frame(w.ERROR, struct.pack("<HH", 99, 4) + b"what"), ProtocolError),
        (w.frame(w.ERROR, b"\0"), ProtocolError),
        (b"MPL1", Unavailable),
        (b"", Unavailable),
    ],
    ids=[
        "http",
        "short",
        "kind",
        "version",
        "4 GiB",
        "error",
        "code",
        "half error",
        "half header",
        "nothing",
    ],
)
def test_what_answers_but_is_no_node(path: Path, greeting: bytes, error: type[Error]) -> None:
    fake = FakeNode(path)

    def script(wire: Wire) -> None:
        wire.socket.sendall(greeting)

    thread = threading.Thread(target=fake.serve, args=(script,))
    thread.start()
    with pytest.raises(error):
        Store(str(path), token=TOKEN)
    thread.join(10)
    fake.close()


def test_what_listens_and_says_nothing_times_out(path: Path) -> None:
    fake = FakeNode(path)
    began = time.monotonic()
    with pytest.raises(Timeout, match="did not answer in time"):
        Store(str(path), token=TOKEN, timeout_s=0.2)
    print(f"refused after {time.monotonic() - began:.3f} s, timeout_s=0.2")
    assert time.monotonic() - began < 1.0
    fake.close()


def test_what_no_longer_accepts_times_out(path: Path) -> None:
    fake = FakeNode(path)
    waiting = []
    while True:  # fills the queue of connections that nobody accepts
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        waiting.append(sock)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            break
    began = time.monotonic()
    with pytest.raises(Timeout, match="took no connection in time"):
        Store(str(path), token=TOKEN, timeout_s=0.2)
    assert time.monotonic() - began < 1.0
    for sock in waiting:
        sock.close()
    fake.close()


# ---- garbage


def test_garbage_ends_its_own_connection_only(node: NodeProcess, path: Path, rng: random.Random) -> None:
    before = node.rss_bytes()
    bystander = Store(str(path), token=TOKEN)
    for i in range(200):
        size = rng.choice((1, 23, 24, 25, 100, 5000))
        data = rng.randbytes(size) if i % 2 else w.frame(rng.randrange(256), rng.randbytes(size))
        with Wire.dial(path) as wire:
            wire.receive()
            wire.socket.sendall(data)
            wire.socket.shutdown(socket.SHUT_WR)
            while True:  # an ERROR frame or nothing, then the end
                try:
                    assert wire.receive().kind == w.ERROR
                except (w.Closed, ConnectionError):
                    break
        assert bystander.put(f"k{i}", data) == STORED
    bystander.close()
    assert node.metric("protocol_errors_total") > 50
    assert node.rss_bytes() - before < 4 * MIB
    until(lambda: node.metric("connections") == 0)


def test_garbage_after_the_handshake_ends_the_connection(server: _native.Server, path: Path) -> None:
    for kind in (0, w.ERROR, w.CHALLENGE, w.AUTH, w.WELCOME, 15, 29, 255):
        with Wire.open(path, TOKEN) as wire:
            wire.send(kind, b"")
            assert wire.ended()[0] == PROTOCOL
    with Wire.open(path, TOKEN) as wire:
        wire.socket.sendall(b"X" * 24)
        assert "magic" in wire.ended()[1]
    with Wire.open(path, TOKEN) as wire:
        wire.socket.sendall(w.frame(w.STAT, version=2))
        code, text = wire.ended()
        assert code == PROTOCOL
        assert "version 1" in text
        assert "2" in text
    assert_serves(path)


def requests(space: int) -> dict[str, tuple[int, bytes]]:
    """One good body of every kind that a client sends."""
    return {
        "open_space": (w.OPEN_SPACE, w.open_space(b"n", b"f")),
        "lease": (w.LEASE, w.lease(1, 4096)),
        "return": (w.RETURN, w.give_back(1 << 40)),
        "commit": (w.COMMIT, w.commit(space, [w.Row(0, 0, 0, b"name", b"parent")])),
        "lookup": (w.LOOKUP, w.lookup(space, [b"a", b"bc"])),
        "release": (w.RELEASE, w.release(7)),
        "touch": (w.TOUCH, w.touch(1, 1, [0, 1])),
        "remove": (w.REMOVE, w.remove(space, [b"a", b"bc"])),
        "list": (w.LIST, w.list_objects(space, 0, 10, b"p")),
    }


@pytest.mark.parametrize("name", requests(0))
def test_every_body_is_read_to_its_end_and_not_further(server: _native.Server, path: Path, name: str) -> None:
    """Each body cut off anywhere, or with a byte too many, is refused; nothing outside of it is read."""
    kind, body = requests(0)[name]
    for cut in range(len(body)):
        with Wire.open(path, TOKEN) as wire:
            wire.send(kind, body[:cut], request_id=5)
            assert wire.ended()[0] == PROTOCOL, cut
    with Wire.open(path, TOKEN) as wire:
        wire.send(kind, body + b"\0", request_id=5)
        assert wire.ended()[0] == PROTOCOL
    assert_serves(path)


@pytest.mark.parametrize("name", requests(0))
def test_random_bodies(server: _native.Server, path: Path, rng: random.Random, name: str) -> None:
    kind, body = requests(0)[name]
    for _ in range(100):
        spoiled = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            spoiled[rng.randrange(len(spoiled))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        with Wire.open(path, TOKEN) as wire, contextlib.suppress(w.Closed, ConnectionError):
            wire.send(kind, bytes(spoiled), request_id=5)
            wire.send(w.STAT, request_id=6)
            while wire.receive().request_id != 6:
                pass
    assert server.check_integrity()
    assert_serves(path)


def test_an_oversized_frame_is_refused_by_its_length(node: NodeProcess, path: Path) -> None:
    before = node.rss_bytes()
    stranger = Wire.dial(path)
    stranger.receive()
    stranger.socket.sendall(w.HEADER.pack(w.MAGIC, w.VERSION, w.AUTH, 0, 1025, 0, 0))
    code, text = stranger.ended()
    assert code == TOO_LARGE
    assert "1025 bytes is over the limit of 1024" in text
    with Wire.open(path, TOKEN) as wire:
        wire.socket.sendall(w.HEADER.pack(w.MAGIC, w.VERSION, w.LOOKUP, 0, (8 << 20) + 1, 0, 0))
        assert wire.ended()[0] == TOO_LARGE
    with Wire.open(path, TOKEN) as wire:
        wire.socket.sendall(w.HEADER.pack(w.MAGIC, w.VERSION, w.LOOKUP, 0, 0xFFFFFFFF, 0, 0))
        assert wire.ended()[0] == TOO_LARGE
    assert_serves(path)
    assert node.rss_bytes() - before < MIB
    stranger.close()


def test_half_frames_cost_what_was_sent(node: NodeProcess, path: Path) -> None:
    before = node.rss_bytes()
    wires = [Wire.open(path, TOKEN) for _ in range(100)]
    for wire in wires:  # claims 8 MiB, sends 100 bytes
        wire.socket.sendall(w.HEADER.pack(w.MAGIC, w.VERSION, w.LOOKUP, 0, 8 << 20, 0, 0) + bytes(100))
    assert_serves(path)
    grown = node.rss_bytes() - before
    print(f"100 half frames that claim 8 MiB each: {grown / MIB:.1f} MiB")
    assert grown < 24 * MIB
    for wire in wires:
        wire.close()
    until(lambda: node.metric("connections") == 0)


def test_a_half_frame_ends_by_itself(path: Path) -> None:
    """The deadline of a frame is 10 s; this waits for that of the handshake, 5 s, which ends the same way."""
    node = NodeProcess(path)
    stranger = Wire.dial(path, timeout_s=20)
    stranger.receive()
    stranger.socket.sendall(b"MPL1")
    began = time.monotonic()
    code, text = stranger.ended()
    print(f"ended after {time.monotonic() - began:.1f} s: {text}")
    assert code == TIMEOUT
    assert "handshake" in text
    assert node.metric("handshake_timeouts_total") == 1
    node.close()
    stranger.close()


# ---- many


def test_thousands_of_idle_strangers(node: NodeProcess, path: Path) -> None:
    """Only the newest 64 are kept. Who knows the token gets in at any time, and its connection stays."""
    resource_soft, resource_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(resource_hard, 8192), resource_hard))
    before = node.rss_bytes()
    friend = Store(str(path), token=TOKEN)
    strangers = []
    for i in range(3000):
        strangers.append(Wire.dial(path))
        if i % 500 == 0:
            assert friend.put(f"k{i}", b"x") == STORED
            assert_serves(path)
    metrics = node.metrics()
    assert metrics["connections"] <= 64 + 1
    assert metrics["connections_total"] >= 3000
    assert node.rss_bytes() - before < 8 * MIB
    assert all(friend.exists([f"k{i}" for i in range(0, 3000, 500)]))
    assert strangers[0].receive().kind == w.CHALLENGE
    assert strangers[0].is_closed()
    friend.close()
    for stranger in strangers:
        stranger.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource_soft, resource_hard))
    until(lambda: node.metric("connections") == 0)


def test_clients_hear_how_long_to_wait_for_the_master(path: Path) -> None:
    node = NodeProcess(path, clients_master_timeout_s=1.25)
    wire = Wire.open(path, TOKEN)
    assert wire.welcome.endswith(struct.pack("<I", 1250) + b"\0\0")  # before the salt, of which there is none
    wire.close()
    node.close()


def test_one_connection_more_than_the_limit_raises_it_as_far_as_open_files_allow(path: Path) -> None:
    node = NodeProcess(path, connections_max=4, remote_connections_max=1)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (1 + 64 + 10, 1 + 64 + 10))
    stores = [Store(str(path), token=TOKEN) for _ in range(4)]
    assert (node.metric("connections_max"), node.metric("limits_raised_total")) == (4, 0)
    stores += [Store(str(path), token=TOKEN) for _ in range(6)]
    assert (node.metric("connections_max"), node.metric("limits_raised_total")) == (10, 2)
    with pytest.raises(TooLarge, match=r"already has 10 connections of its host.*ulimit -n"):
        Store(str(path), token=TOKEN)
    assert node.metric("connections_refused_total") == 1
    for i, store in enumerate(stores):
        assert store.put(f"k{i}", b"x") == STORED
    stores.pop().close()
    until(lambda: node.metric("connections") == 9)
    stores.append(Store(str(path), token=TOKEN))
    for store in stores:
        store.close()
    node.close()


def test_a_node_without_descriptors_says_so_and_recovers(path: Path) -> None:
    node = NodeProcess(path, connections_max=400)
    used = len(os.listdir(f"/proc/{node.pid}/fd"))
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (used + 10, used + 10))
    friend = Store(str(path), token=TOKEN)
    wires = []
    refused = None
    while refused is None:
        assert len(wires) < 20
        wire = Wire.dial(path)
        wires.append(wire)
        greeting = wire.receive()
        refused = greeting.error if greeting.kind == w.ERROR else None
    assert refused == (TOO_LARGE, "the node is out of file descriptors")
    with pytest.raises(TooLarge, match="out of file descriptors"):
        Store(str(path), token=TOKEN)
    assert friend.put("k", b"x") == STORED  # who is in stays in
    cpu = cpu_s(node.pid)
    for _ in range(5):
        friend.stat()
    assert cpu_s(node.pid) - cpu < 1.0
    for wire in wires:
        wire.close()
    until(lambda: node.metric("connections") == 1)
    assert_serves(path)
    friend.close()
    node.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_node_at_rest_costs_nothing(node: NodeProcess, path: Path) -> None:
    with Store(str(path), token=TOKEN) as store:
        store.put("k", b"x")

        def rest() -> float:
            before, began = cpu_s(node.pid), time.monotonic()
            with Wire.dial(path) as stranger:
                stranger.receive()
                stranger.socket.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    stranger.receive()  # nothing comes: half a second of rest
            return (cpu_s(node.pid) - before) / (time.monotonic() - began)

        share = until(lambda: (spent := rest()) < 0.05 and [spent])  # once its start is over
        print(f"an idle node takes {100 * share[0]:.1f} % of a core")
