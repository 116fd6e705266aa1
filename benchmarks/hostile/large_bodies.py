"""Requests whose bodies are made to cost, several at once, against the proxy, while a victim sends one small
request after the other. How long the victim waits at worst, and what the proxy's memory does.

The longest wait is measured in the victim's process, so it has that process's own pauses in it: on a busy
machine look at the row without an attack first, which is the floor.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.hostile.bed import COMPLETIONS, HERE, Setting, memory
from benchmarks.processes import PYTHON, Process, free_port
from benchmarks.report import Row

BYTES, QUICK_BYTES = 62 << 20, 4 << 20
AT_ONCE, QUICK_AT_ONCE = 4, 2
WAIT_MS_MAX = 50.0
MEMORY_TIMES_MAX = 2.0
BACK_S_MAX = 10.0
VICTIM_PAUSE_S = 0.005
SMALL = b'{"model":"m","prompt":[1,2,3]}'


def many(part: bytes, size: int, before: bytes, behind: bytes) -> bytes:
    return before + part * ((size - len(before) - len(behind)) // len(part)) + behind


ATTACKS: dict[str, Callable[[int], bytes]] = {
    "members": lambda size: many(b'"a":1,', size, b"{", b'"prompt":"x"}'),
    "prompts": lambda size: many(b'"",', size, b'{"prompt":[', b'""]}'),
    "token ids": lambda size: many(b"1,", size, b'{"prompt":[', b"1]}"),
    "brackets": lambda size: many(b"[]," * 100, size, b'{"a":[', b"0]}"),
    "one text": lambda size: many(b"x", size, b'{"prompt":"', b'"}'),
    "reserved members": lambda size: many(b"x", size, b'{"rid":1,"prompt":"', b'"}'),
}


@dataclass
class Victim:
    """Sends one request after the other, on one connection, until it is stopped."""

    port: int
    longest_s: float = 0.0
    answered: int = 0
    refused: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Victim:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def _run(self) -> None:
        connection = http.client.HTTPConnection(HERE, self.port, timeout=60)
        while not self._ended.wait(VICTIM_PAUSE_S):
            began_s = time.monotonic()
            connection.request("POST", COMPLETIONS, SMALL, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            self.answered += 1
            self.refused += answer.status != 200
        connection.close()


def send(port: int, body: bytes) -> None:
    """One request; its answer, or the end, is waited for."""
    with suppress(OSError), socket.create_connection((HERE, port), 60) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: p\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        connection.sendall(body)
        while connection.recv(1 << 16):
            pass


@dataclass
class Outcome:
    longest_ms: float
    refused: int
    peak_bytes: int  # above what it had before
    back_s: float  # until no more was left of it than half the bodies


def attack(proxy: Process, port: int, body: bytes, at_once: int) -> Outcome:
    before, peak, left = memory(proxy.pid, "VmRSS"), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not left.wait(0.01):
            peak = max(peak, memory(proxy.pid, "VmRSS") - before)

    watching = threading.Thread(target=watch)
    watching.start()
    with Victim(port) as victim:
        attackers = [threading.Thread(target=send, args=(port, body)) for _ in range(at_once)]
        for attacker in attackers:
            attacker.start()
        for attacker in attackers:
            attacker.join()
    left.set()
    watching.join()
    began_s = time.monotonic()
    while (
        memory(proxy.pid, "VmRSS") - before > len(body) * at_once / 2
        and time.monotonic() - began_s < 6 * BACK_S_MAX
    ):
        time.sleep(0.05)
    return Outcome(victim.longest_s * 1e3, victim.refused, peak, time.monotonic() - began_s)


def floor_ms(port: int, seconds: float) -> float:
    with Victim(port) as victim:
        time.sleep(seconds)
    return victim.longest_s * 1e3


def large_bodies(setting: Setting) -> list[Row]:
    """Of 62 MiB, 4 at once; nothing is judged in the short form."""
    size, at_once = (QUICK_BYTES, QUICK_AT_ONCE) if setting.quick else (BYTES, AT_ONCE)
    engine_port = free_port()
    command = [PYTHON, "-m", "benchmarks.proxy.sink_engine", str(engine_port)]
    engine = Process(command, setting.folder / "sink.log")
    setting.stack.callback(engine.stop)
    engine.wait_for_port(socket.AF_INET, (HERE, engine_port))
    rows: list[Row] = []
    for policy in ("round_robin", "conductor"):
        words = ["--policy", policy, "--engine", f"http://{HERE}:{engine_port}"]
        proxy, port = setting.proxy(*words)
        rows += measure(proxy, port, policy, size, at_once, setting.long(2.0, 0.5))
        proxy.stop()
    return rows


def measure(proxy: Process, port: int, policy: str, size: int, at_once: int, floor_s: float) -> list[Row]:
    floor = floor_ms(port, floor_s)
    rows = [Row(f"{policy}: longest wait without an attack", floor, "ms", {}, None, "", None)]
    for name, make in ATTACKS.items():
        body = make(size)
        got = attack(proxy, port, body, at_once)
        what = f"{policy}: {name} [{len(body) >> 20} MiB x {at_once}]"
        held = got.peak_bytes / (len(body) * at_once)
        judged = size == BYTES
        rows += [
            Row(
                f"{what}: longest wait",
                got.longest_ms,
                "ms",
                {},
                floor,
                f"at most {WAIT_MS_MAX:g} ms",
                got.longest_ms <= WAIT_MS_MAX and not got.refused if judged else None,
            ),
            Row(
                f"{what}: memory at the peak",
                held,
                "x bodies",
                {},
                None,
                f"at most {MEMORY_TIMES_MAX:g}",
                held <= MEMORY_TIMES_MAX if judged else None,
            ),
            Row(
                f"{what}: until it is back",
                got.back_s,
                "s",
                {},
                None,
                f"at most {BACK_S_MAX:g} s",
                got.back_s <= BACK_S_MAX if judged else None,
            ),
        ]
    return rows
