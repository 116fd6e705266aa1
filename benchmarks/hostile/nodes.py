"""A node against callers that ask for replays and read none, and against connections and pins of other hosts;
and every port against connections without end from one address."""

from __future__ import annotations

import hashlib
import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import zmq

from benchmarks.hostile.bed import HERE, MIB, TOKEN, Setting, ask, at_most, memory
from benchmarks.processes import Failed, Process, free_port
from benchmarks.report import Row
from moonpool import Presence, Store
from moonpool.core.store.keys import Ranges, block_name
from tests.core import wire_client as w
from tests.core.wire_client import Wire

ASKERS, QUESTIONS = 20, 60
BLOCKS = 60_000
CONNECTIONS = 512
ARENA_MIB = 64
FLOODER, PROBER = "127.0.0.2", "127.0.0.3"
PROBE_S = 0.5
SERVED_MIN = 99.0


def replay_askers(setting: Setting) -> list[Row]:
    """20 connections ask again and again for the events of 60,000 blocks, and read none."""
    seconds = setting.long(60.0, 3.0)
    blocks = BLOCKS if not setting.quick else BLOCKS // 10
    events, replay = (f"tcp://{HERE}:{free_port()}" for _ in range(2))
    words = ["--dram", "256MiB", "--http", "off", "--events", events, "--events-replay", replay]
    node, path = setting.node("replays", *words)
    with Store(path, token=TOKEN.encode(), fingerprint=bytes(32)) as store:
        for first in range(0, blocks, 1000):
            names = [
                block_name(digest(number), Ranges(0, 0, 1, 0, 1)) for number in range(first, first + 1000)
            ]
            store.put(names, [bytes(64)] * len(names))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peak = before = memory(node.pid, "RssAnon")
    try:
        askers = []
        for _ in range(ASKERS):
            asker = context.socket(zmq.DEALER)
            asker.setsockopt(zmq.RCVHWM, 1)
            asker.setsockopt(zmq.RCVBUF, 4096)
            asker.connect(replay)
            askers.append(asker)
        deadline_s = time.monotonic() + seconds
        asked = 0
        while time.monotonic() < deadline_s:
            for asker in askers:
                try:
                    asker.send_multipart((b"", bytes(8)), zmq.NOBLOCK)
                    asked += 1
                except zmq.Again:
                    pass
            peak = max(peak, memory(node.pid, "RssAnon"))
            time.sleep(0.05 if asked > ASKERS * QUESTIONS else 0.0)
    finally:
        context.destroy(linger=0)
    work = (
        f"{ASKERS} replay askers that read nothing [{asked} questions for {blocks} blocks in {seconds:g} s]"
    )
    return [at_most(f"{work}: more memory", (peak - before) / MIB, 64, "MiB")]


def digest(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def call(port: int, purpose: bytes, *, source: str = HERE, timeout_s: float = 10.0) -> Wire:
    """A connection that has proved the token. Raises OSError, AssertionError, wire_client.Closed."""
    wire = Wire(socket.create_connection((HERE, port), timeout_s, (source, 0)), timeout_s)
    try:
        greeting = wire.receive()
        assert greeting.kind == w.CHALLENGE, greeting
        covered, nonce = b"default\0" + purpose, bytes(32)
        theirs, incarnation = greeting.body[:32], greeting.body[32:]
        proof = w.mac(b"client", TOKEN.encode(), theirs, nonce, incarnation, covered)
        wire.send(w.AUTH, w.auth(b"default", nonce, proof) + w.text16(purpose), request_id=1)
        assert wire.receive().kind == w.WELCOME
    except BaseException:
        wire.close()
        raise
    return wire


def other_hosts(setting: Setting) -> list[Row]:
    """512 connections by TCP, as other hosts have them; one of them pins all that it can. (A node does not
    look at addresses: what comes by TCP is another host's.)"""
    port = free_port()
    words = ["--dram", f"{ARENA_MIB}MiB", "--http", "off", "--listen", f"{HERE}:{port}"]
    _, path = setting.node("pins", *words)
    with Store(path, token=TOKEN.encode()) as store:
        old = [f"old{number}" for number in range(ARENA_MIB)]
        for key in old:
            store.put(key, bytes(MIB))
        there = [key for key, found in zip(old, store.exists(old), strict=True) if found is Presence.HIT]
    wires = []
    try:
        for _ in range(CONNECTIONS):
            wires.append(call(port, b"store"))
        pinner = wires[0]
        space = pinner.ask(w.OPEN_SPACE, w.open_space(b"default", b"")).body
        pinner.space = int.from_bytes(space, "little")
        found = [pinner.lookup([key.encode()], flags=w.PIN)[1] for key in there]
        pinned = sum(hits == 1 for hits in found)  # else with the bit that says that it was not pinned
        began_s = time.monotonic()
        with Store(path, token=TOKEN.encode()) as store:
            entered_s = time.monotonic() - began_s
            new = [f"new{number}" for number in range(ARENA_MIB)]
            for key in new:
                store.put(key, bytes(MIB))
            kept = sum(found is Presence.HIT for found in store.exists(new))
    finally:
        for wire in wires:
            wire.close()
    work = f"{CONNECTIONS} connections of other hosts"
    share = 100 * kept / ARENA_MIB
    many = f"one pins {pinned} of {len(there)} MiB: of the arena new objects take"
    return [
        at_most(f"{work}: until the own host's store is open", entered_s, 2, "s"),
        Row(f"{work}, {many}", share, "%", {}, None, "at least 50 %", share >= 50),
    ]


def connection_floods(setting: Setting) -> list[Row]:
    """One address opens connections to a port as fast as this machine lets it; another one shakes hands, or
    asks for /livez, every 20 ms, and each time has half a second."""
    master_port, master_http = free_port(), free_port()
    node_port, node_http = free_port(), free_port()
    setting.start(
        "master", "master", "--listen", f"{HERE}:{master_port}", "--http", f"{HERE}:{master_http}",
        ready="moonpool master",
    )  # fmt: skip
    words = ["--dram", "16MiB", "--listen", f"{HERE}:{node_port}", "--http", f"{HERE}:{node_http}"]
    setting.node("flooded", *words, "--master", f"{HERE}:{master_port}")
    _, engine = setting.mock_engine()
    _, proxy_port = setting.proxy("--engine", f"http://{HERE}:{engine}")
    ports: dict[str, tuple[int, Callable[[], bool]]] = {
        "node's wire": (node_port, partial(handshakes, node_port, b"store")),
        "master's wire": (master_port, partial(handshakes, master_port, b"directory")),
        "node's pages": (node_http, partial(lives, node_http)),
        "master's pages": (master_http, partial(lives, master_http)),
        "proxy": (proxy_port, partial(lives, proxy_port)),
    }
    return [flooded(setting, name, port, probe) for name, (port, probe) in ports.items()]


def handshakes(port: int, purpose: bytes) -> bool:
    try:
        with closing(call(port, purpose, source=PROBER, timeout_s=PROBE_S)):
            return True
    except (OSError, AssertionError, w.Closed):
        return False


def lives(port: int) -> bool:
    try:
        return ask(port, "GET", "/livez", source=PROBER, timeout_s=PROBE_S).status == 200
    except (OSError, http.client.HTTPException):
        return False


def flooded(setting: Setting, name: str, port: int, probe: Callable[[], bool]) -> Row:
    seconds = setting.long(10.0, 1.0)
    floor_s = time.monotonic() + seconds / 4
    floor = in_time(probe, lambda: time.monotonic() < floor_s)
    log = setting.folder / f"flood-{port}.log"
    words = [sys.executable, "-m", "benchmarks.hostile.flood", str(port), FLOODER, str(seconds)]
    flooder = Process(words, log)
    setting.stack.callback(flooder.stop)
    share = in_time(probe, lambda: flooder.is_running)
    try:
        rate = float(log.read_text())
    except ValueError:
        raise Failed(f"the flood of {name} ended: {log.read_text()}") from None
    work = f"{rate:,.0f} connections/s of one address, {name}: probes of another in time"
    return Row(work, share, "%", {}, floor, f"at least {SERVED_MIN:g} %", share >= SERVED_MIN)


def in_time(probe: Callable[[], bool], goes_on: Callable[[], bool]) -> float:
    """The share of probes, in percent, that were good within PROBE_S."""
    served: list[bool] = []

    def one() -> None:
        began_s = time.monotonic()
        good = probe()
        served.append(good and time.monotonic() - began_s <= PROBE_S)

    probes = []
    while goes_on():
        probes.append(threading.Thread(target=one))
        probes[-1].start()
        time.sleep(0.02)
    for each in probes:
        each.join()
    return 100 * sum(served) / len(served)
