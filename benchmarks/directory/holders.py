"""Nodes of one master that hold very many rows: their connections and frames, without their stores.

    python -m benchmarks.directory.holders FD ADDRESS NODES ROWS

FD is a socket for JSON lines (benchmarks.processes.serve). NODES nodes join, each with an empty inventory,
and beat. {"do": "put"}: each tells ROWS / NODES rows as changes. {"do": "tell"}: they join another master at
the same address, and tell all rows as their inventory. Both last until the master has all rows. {"do":
"look_up", "keys": n}: about n of the keys, spread over all, are asked for. Each answers {"seconds", "keys"}.
The hashes are random bytes by seed, so that a frame is made again and not kept.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from benchmarks.processes import serve
from moonpool import _native
from moonpool.core.config.paths import read_or_create_token
from tests.core import master_wire as m
from tests.core import wire_client as w

FRAME_ROWS = 16_384
HASH_BYTES, ROW_BYTES = 16, 17
BEAT_S = 0.5
TIMEOUT_S = 60.0
BEAT = w.frame(m.BEAT, m.beat(0, m.Load(), 1), request_id=0, flags=w.ONE_WAY)


def hashes(frame: int) -> bytes:
    return random.Random(frame).randbytes(FRAME_ROWS * HASH_BYTES)


def rows(frame: int) -> bytes:
    """As DELTA has them: hash, then the tier, which is 0 for DRAM."""
    packed, of_hashes = bytearray(FRAME_ROWS * ROW_BYTES), hashes(frame)
    for byte in range(HASH_BYTES):
        packed[byte::ROW_BYTES] = of_hashes[byte::HASH_BYTES]
    return bytes(packed)


class Holders:
    def __init__(self, address: str, nodes: int, rows_wanted: int) -> None:
        self.address, self.token, self.nodes = address, read_or_create_token(), nodes
        self.frames = -(-rows_wanted // (FRAME_ROWS * nodes)) * nodes
        self.incarnations = [os.urandom(16) for _ in range(nodes)]
        self.sending = threading.Lock()
        self.wires: list[w.Wire] = []
        self.join()
        for wire in self.wires:
            wire.send(m.DELTA, m.delta_applied([], 1, flags=m.BEGIN | m.END), flags=w.ONE_WAY)
        threading.Thread(target=self._beat, daemon=True).start()

    def join(self) -> None:
        joined = []
        for number, incarnation in enumerate(self.incarnations):
            me = m.Identity(
                b"node-%d" % number,
                incarnation,
                host_id=b"host-%032d" % number,
                address=b"10.1.0.%d:7710" % number,
            )
            wire = m.connect(self.address, self.token, b"member", timeout_s=TIMEOUT_S)
            answer = wire.ask(m.JOIN, m.join(me, m.Load()))
            if answer.kind != m.JOIN:
                raise RuntimeError(str(answer.error))
            joined.append(wire)
        with self.sending:
            self.wires = joined

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            with self.sending:
                for wire in self.wires:
                    with suppress(OSError):  # the master was killed
                        wire.socket.sendall(BEAT)

    def put(self) -> int:
        return self._send(lambda frame: 0)

    def tell(self) -> int:
        self.join()
        first, last = self.nodes, self.frames - self.nodes
        return self._send(lambda frame: (m.BEGIN if frame < first else 0) | (m.END if frame >= last else 0))

    def _send(self, flags: Callable[[int], int]) -> int:
        """Every frame by its node, and then until the master has the last row of each."""
        for frame in range(self.frames):
            head = m.delta_applied([], 1, flags=flags(frame))
            body = head[:4] + FRAME_ROWS.to_bytes(4, "little") + head[8:] + rows(frame)
            with self.sending:
                self.wires[frame % self.nodes].send(m.DELTA, body, flags=w.ONE_WAY)
        with self._directory() as directory:
            for frame in range(self.frames - self.nodes, self.frames):
                tail = hashes(frame)[-HASH_BYTES:]
                deadline_s = time.monotonic() + TIMEOUT_S
                while directory.locate(tail).hits != 1:
                    if time.monotonic() > deadline_s:
                        raise RuntimeError(f"the master had not heard frame {frame} after {TIMEOUT_S:g} s")
                    time.sleep(0.001)
        return self.frames * FRAME_ROWS

    def look_up(self, n: int) -> int:
        step = max(1, self.frames * FRAME_ROWS // n)
        asked = range(0, self.frames, step)
        with self._directory() as directory:
            for frame in asked:
                hits = directory.locate(hashes(frame)).hits
                if hits != FRAME_ROWS:
                    raise RuntimeError(f"{hits} of {FRAME_ROWS} keys of frame {frame} were found")
        return len(asked) * FRAME_ROWS

    def _directory(self) -> closing[_native.DirectoryClient]:
        return closing(_native.DirectoryClient(self.address, self.token, timeout_s=TIMEOUT_S))


def start(address: str, nodes: str, rows_wanted: str) -> tuple[object, Callable[[Any], object]]:
    holders = Holders(address, int(nodes), int(rows_wanted))

    def answer(request: Any) -> object:
        began_s = time.monotonic()
        found = getattr(holders, request["do"])(*([request["keys"]] if "keys" in request else []))
        return {"seconds": time.monotonic() - began_s, "keys": found}

    return {"rows": holders.frames * FRAME_ROWS}, answer


if __name__ == "__main__":
    serve(sys.argv[1], lambda: start(*sys.argv[2:]))
