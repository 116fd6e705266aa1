"""Mutated frames over real sockets against a living node, master and engine, by a peer that has the token.

Whatever they say, the processes live, stay small, keep what others stored and serve them. FUZZ_SECONDS=N
fuzzes each target for so long (two by default); the seed is printed, MOONPOOL_TEST_SEED repeats it.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from moonpool import Error, Store

from ..core import wire_client as w
from .bed import MIB, TOKEN, Cluster, until
from .hosts import Process
from .mutations import documented_frames, mutated, of_kinds
from .tcp_wire import TcpWire, connect

FUZZ_SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
STRANGER, STORE, MASTER, ENGINE = range(1, 5), range(16, 32), range(32, 48), range(48, 64)
HELLO, REGIONS, TRANSFER, NOTIFY, FENCE, ASK = 48, 49, 50, 51, 52, 56  # of the engine, over TCP
ENGINE_PORT = 7720


def drain(sock: socket.socket) -> bool:
    """Reads what is there -> whether the connection still stands"""
    while True:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        if not poll.poll(0):
            return True
        try:
            if not sock.recv(1 << 16):
                return False
        except OSError:
            return False


def fuzz(open_one: Callable[[], socket.socket], corpus: list[bytes], rng: random.Random) -> dict[str, int]:
    """Frames of the corpus, mutated, on one connection after the other."""
    counts = {"connections": 0, "frames": 0}
    end = time.monotonic() + FUZZ_SECONDS
    while time.monotonic() < end:
        with open_one() as sock:
            sock.settimeout(2)
            counts["connections"] += 1
            with contextlib.suppress(OSError):
                for _ in range(rng.randrange(1, 40)):
                    sock.sendall(mutated(rng, corpus))
                    counts["frames"] += 1
                    if not drain(sock):
                        break
                else:
                    if rng.random() < 0.5:
                        sock.shutdown(socket.SHUT_WR)
                        while sock.recv(1 << 16):
                            pass
    return counts


def all_is_well(cluster: Cluster, process: Process, rss_before: int) -> None:
    assert process.is_running, process.text()
    grown = process.rss_bytes() - rss_before
    print(f"grew by {grown / MIB:.1f} MiB")
    assert grown < 64 * MIB
    until(lambda: set(cluster.states().values()) == {"alive"})
    a, b = cluster.nodes
    on_a = cluster.puppet(a.host, namespace="after the fuzz")
    on_b = cluster.puppet(b.host, namespace="after the fuzz")
    assert on_a.put(["a"], 10_000, replace=True)[0][0] == "stored"
    until(lambda: on_b.has(["a"], 10_000))
    until(lambda: all(node.metric("pins") == 0 for node in cluster.nodes))
    until(lambda: all(node.metric("objects_detached") == 0 for node in cluster.nodes))


def proved(cluster: Cluster, address: str, purpose: bytes) -> socket.socket:
    wire = TcpWire.call(cluster.network.switch, address)
    wire.prove(TOKEN.encode(), purpose)
    return wire.socket


def test_the_handshake(shared_cluster: Cluster, rng: random.Random) -> None:
    cluster = shared_cluster
    node = cluster.nodes[0]
    before = node.process.rss_bytes()
    corpus = of_kinds(documented_frames("wire.md"), STRANGER)
    assert corpus
    for address in (node.address, cluster.master):
        print(fuzz(lambda address=address: connect(cluster.network.switch, address), corpus, rng))
    all_is_well(cluster, node.process, before)


def test_the_store(shared_cluster: Cluster, rng: random.Random) -> None:
    cluster = shared_cluster
    node = cluster.nodes[0]
    corpus = of_kinds(documented_frames("wire.md"), STORE)
    assert {frame[5] for frame in corpus} == {*range(16, 30)}
    kept = cluster.puppet(node.host, namespace="kept")
    names = [f"kept while fuzzing {i}" for i in range(50)]
    kept.put(names, 20_000)
    before = node.process.rss_bytes()

    def opened() -> socket.socket:
        sock = proved(cluster, node.address, b"store")
        sock.sendall(w.frame(w.OPEN_SPACE, w.open_space(b"default", b"")) * 2)
        return sock

    print(fuzz(opened, corpus, rng))
    assert kept.has(names, 20_000, verify=True)
    all_is_well(cluster, node.process, before)
    until(lambda: node.metric("leased_bytes") <= 2 * MIB)  # of the living clients


@pytest.mark.parametrize("purpose", ["member", "directory"])
def test_the_master(shared_cluster: Cluster, rng: random.Random, purpose: str) -> None:
    cluster = shared_cluster
    assert cluster.master_process is not None
    corpus = of_kinds(documented_frames("wire_master.md"), MASTER)
    assert {frame[5] for frame in corpus} >= {*range(32, 39)}
    before = cluster.master_process.rss_bytes()
    opened = lambda: proved(cluster, cluster.master, purpose.encode())  # noqa: E731
    if purpose == "member":
        join = next(frame for frame in corpus if frame[5] == 32)
        corpus = [frame for frame in corpus if frame[5] < 35]

        def joined() -> socket.socket:
            """As a node that nobody knows: the first frame is a valid JOIN with another incarnation."""
            sock = proved(cluster, cluster.master, b"member")
            incarnation = rng.randbytes(16)
            sock.sendall(join[:24] + incarnation + join[40:])
            return sock

        opened = joined
    print(fuzz(opened, corpus, rng))
    # What a liar joined as is suspect from the end of its connection on; the others were never in doubt.
    alive = [name for name, state in cluster.states().items() if state == "alive"]
    assert {node.name for node in cluster.nodes} <= {*alive}
    assert cluster.master_process.is_running
    print(f"grew by {(cluster.master_process.rss_bytes() - before) / MIB:.1f} MiB")
    assert cluster.master_process.rss_bytes() - before < 128 * MIB
    a, b = cluster.nodes
    on_a, on_b = cluster.puppet(a.host), cluster.puppet(b.host)
    assert on_a.put([f"after {purpose}"], 10_000)[0][0] == "stored"
    until(lambda: on_b.has([f"after {purpose}"], 10_000))


def greeted(cluster: Cluster, address: str, channel: int) -> w.Wire:
    """A connection to an engine, behind a HELLO that is in order."""
    wire = TcpWire.call(cluster.network.switch, address)
    segment = wire.prove(TOKEN.encode(), b"engine")[2:18]
    hello = struct.pack("<H", 3) + b"f" * 16 + segment + struct.pack("<I", channel) + w.text16(b"fuzz")
    assert wire.ask(HELLO, hello).kind == HELLO
    return wire


def test_the_engine(shared_cluster: Cluster, rng: random.Random) -> None:
    """Strangers, peers before HELLO, and peers behind it, which know where its memory is."""
    cluster = shared_cluster
    host, client = cluster.host("e"), cluster.host("f")
    address = f"{host.address}:{ENGINE_PORT}"
    process = host.moonpool(
        *("bench", "transfer", "--serve", "--listen", address, "--memory", "16MiB"), name="serve"
    )
    process.said("moonpool bench transfer --connect")
    corpus = of_kinds(documented_frames("wire_engine.md"), ENGINE)
    assert {frame[5] for frame in corpus} == {HELLO, REGIONS, TRANSFER, NOTIFY, FENCE, ASK}
    with greeted(cluster, address, 1).socket as sock:
        regions = w.Wire(sock, 5).ask(REGIONS, struct.pack("<H", 3)).body
    (n,) = struct.unpack_from("<I", regions, 8)
    assert n >= 1
    start, length = struct.unpack_from("<QQ", regions, 20)
    for kind, body in (
        (TRANSFER, struct.pack("<IIQIIQII", 2, 0, start, 4, 1, start + length - 100, 100, 0) + b"data"),
        (ASK, w.text16(b"rdma") + b"\0" + struct.pack("<HQQ", 1, start, length)),  # KEYS
        (ASK, w.text16(b"efa") + b"\1" + struct.pack("<IB", 3, 0) + b"\1" + w.text16(bytes(16))),  # CONNECT
        (ASK, w.text16(b"tcp")),
    ):
        corpus.append(w.frame(kind, body))
    before = process.rss_bytes()
    channels = iter(range(2, 1 << 32))
    strangers = of_kinds(documented_frames("wire.md"), STRANGER)
    print(fuzz(lambda: connect(cluster.network.switch, address), strangers, rng))
    print(fuzz(lambda: proved(cluster, address, b"engine"), corpus, rng))
    counts = fuzz(lambda: greeted(cluster, address, next(channels)).socket, corpus, rng)
    print(counts)
    assert counts["frames"] > 20
    assert process.is_running, process.text()
    grown = process.rss_bytes() - before
    print(f"grew by {grown / MIB:.1f} MiB")
    assert grown < 128 * MIB  # its inbox, which no user reads here, has 64
    measure = client.moonpool(
        *("bench", "transfer", "--connect", address, "--working-set", "16MiB", "--seconds", "1"),
        "--verify",
        name="measure",
    )
    assert measure.wait(60) == 0, measure.text()
    process.kill()


def lying_node(sock: socket.socket, answers: list[bytes], rng: random.Random) -> None:
    """Plays a node that greets rightly, then answers each question with a mutated frame."""
    wire = w.Wire(sock, 5)
    nonce, incarnation = bytes(32), b"i" * 16
    wire.send(w.CHALLENGE, w.challenge(nonce, incarnation))
    hello = wire.receive()
    (size,) = struct.unpack_from("<H", hello.body)
    tenant = hello.body[2 : 2 + size]
    client_nonce = hello.body[2 + size : 34 + size]
    covered = tenant + b"\0store"
    proof = w.mac(b"node", TOKEN.encode(), client_nonce, nonce, incarnation, covered)
    limits = w.Limits(1 << 26, 0, 1 << 18, 1 << 24, 1024, 4096, 8 << 20, 16384)
    texts = b"".join(map(w.text16, (b"liar", b"nowhere", b"", b"")))
    wire.send(w.WELCOME, proof + limits.pack() + texts, request_id=1, flags=1)
    while True:
        question = wire.receive()
        if question.kind == w.OPEN_SPACE and rng.random() < 0.9:
            wire.send(w.OPEN_SPACE, bytes(4), request_id=question.request_id, flags=w.ANSWER)
            continue
        same = [frame for frame in answers if frame[5] == question.kind] or answers
        frame = bytearray(mutated(rng, same))
        if len(frame) >= 24 and rng.random() < 0.9:
            frame[16:24] = question.request_id.to_bytes(8, "little")
        sock.sendall(frame)


def test_a_client_of_a_lying_node(shared_cluster: Cluster, rng: random.Random) -> None:
    """The other direction: what a client makes of mutated answers is an error of ours, a miss, or bytes."""
    frames = documented_frames("wire.md")
    answers = [frame for frame in frames if frame[5] in STORE and frame[6] & w.ANSWER]
    place = shared_cluster.nodes[0].host
    with place.namespace.entered():
        listener = socket.create_server((place.address, 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError, w.Closed, AssertionError, struct.error):
                    lying_node(sock, answers, rng)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    outcomes: dict[str, int] = {}
    end = time.monotonic() + FUZZ_SECONDS
    with place.namespace.entered():
        while time.monotonic() < end:
            try:
                with Store(f"tcp://{place.address}:{port}", token=TOKEN.encode(), timeout_s=0.2) as store:
                    for call in rng.choices(
                        (
                            lambda store: store.get("key"),
                            lambda store: store.get(["key", "no"], [bytearray(100), bytearray(3)]),
                            lambda store: store.longest_prefix(["key", "no"]),
                            lambda store: store.exists(["key", "no"], pin=True),
                            lambda store: store.put("key", b"hello"),
                            lambda store: store.remove(["key"]),
                            lambda store: store.list("k"),
                            lambda store: store.stat(),
                        ),
                        k=4,
                    ):
                        outcome = "fine"
                        try:
                            call(store)
                        except (Error, UnicodeDecodeError, ValueError) as error:
                            outcome = type(error).__name__
                        outcomes[outcome] = outcomes.get(outcome, 0) + 1
            except Error as error:
                outcomes[f"open: {type(error).__name__}"] = (
                    outcomes.get(f"open: {type(error).__name__}", 0) + 1
                )
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(10)
    print(outcomes)
    assert sum(outcomes.values()) > 10
    assert not {"UnicodeDecodeError", "ValueError"} & {*outcomes}
