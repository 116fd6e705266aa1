"""Whether the proxy's memory stays flat: a million requests, and what the process holds.

    python -m benchmarks.proxy_soak [--requests 1000000] [--quick] [--json FILE]

Two proxies take turns: one with round robin over two engines, and one that hands over between prefill and
decode engines, chosen by the KV events that they tell, for prompts of token ids that are all new. A round is
5,000 requests for each over 64 new connections (2 KiB; every tenth round streams of 64 chunks, a tenth as
many), and 64 clients that leave in the middle of a head, of a body or of an answer. Three tenths of
the rounds warm up; it fails when a process holds 8 MiB more in the end than then, or 128 files more.
"""

from __future__ import annotations

import os
import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.options import make_parser
from benchmarks.processes import Failed, Process
from benchmarks.proxy import load, prompts
from benchmarks.proxy.bed import Bed
from benchmarks.report import Row, write_json

CLIENTS = 64
REQUESTS, QUICK_REQUESTS = 1_000_000, 40_000
ROUND = 5_000
LEAVING = 64
WARM = 3  # of ten looks
GROWTH_MAX_BYTES = 8 << 20
FILES_GROWTH_MAX = 2 * CLIENTS  # idle connections to engines come and go


def held(pid: int) -> tuple[int, int]:
    """(bytes of memory that a process has resident, files that it has open)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def leave(port: int) -> None:
    """Clients that go at every stage of a request."""
    whole = prompts.plain(2 << 10, stream=True)
    for number in range(LEAVING):
        with socket.create_connection(("127.0.0.1", port)) as client:
            sent = (whole[:40], whole[:1000], whole, whole + whole)[number % 4]
            client.sendall(sent)
            if number % 8 == 2:
                client.recv(100)


class Watched:
    """A proxy, and what it held at each look."""

    def __init__(self, name: str, process: Process, port: int) -> None:
        self.name, self.port, self._pid = name, port, process.pid
        self._seen: list[tuple[int, int]] = []

    def look(self, done: int) -> None:
        memory, files = held(self._pid)
        print(f"{self.name}: {done:>9} requests  {memory / 2**20:6.1f} MiB  {files} files")
        self._seen.append((memory, files))

    def row(self) -> Row:
        """What it held more in the end than when it was warm."""
        (warm, files), (now, more) = self._seen[WARM], self._seen[-1]
        flat = now - warm <= GROWTH_MAX_BYTES and more - files <= FILES_GROWTH_MAX
        print(f"{self.name}: {(now - warm) / 2**20:+.1f} MiB, {more - files:+d} files since it was warm")
        target = f"<= {GROWTH_MAX_BYTES >> 20} MiB, <= {FILES_GROWTH_MAX} files"
        return Row(f"{self.name}: growth", (now - warm) / 2**20, "MiB", {}, None, target, flat)


def soak(requests: int) -> list[Row]:
    """What each proxy held more in the end. Raises Failed, or RuntimeError for a wrong answer."""
    with ExitStack() as stack:
        bed = Bed(stack, None)
        plain = Watched("plain", *bed.routers("")["ours"])
        aware = Watched("aware", *bed.aware(bed.telling))
        ids = prompts.Ids(random.Random(4))

        def make(watched: Watched, count: int, *, stream: bool) -> list[bytes]:
            if watched is plain:
                return [prompts.plain(2 << 10, stream=stream)] * count
            return [ids.request(stream=stream) for _ in range(count)]

        for watched in (plain, aware):
            watched.look(0)
        number, done, looks = 0, 0, 1
        while done < requests:
            number += 1
            stream = number % 10 == 0
            count = ROUND // 10 if stream else ROUND
            for watched in (plain, aware):
                uvloop.run(
                    load.run(watched.port, CLIENTS, make(watched, count, stream=stream), stream=stream)
                )
                leave(watched.port)
                done += count + LEAVING
            if done >= requests // 10 * looks:
                looks += 1
                for watched in (plain, aware):
                    watched.look(done // 2)
        return [watched.row() for watched in (plain, aware)]


def main() -> int:
    parser = make_parser(__doc__, "fewer requests")
    parser.add_argument("--requests", type=int, help="1,000,000; quick: 40,000")
    options = parser.parse_args()
    try:
        rows = soak(options.requests or (QUICK_REQUESTS if options.quick else REQUESTS))
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_soak: {error}", file=sys.stderr)
        return 1
    flat = all(row.met for row in rows)
    print("flat" if flat else "NOT FLAT")
    write_json(options.json, rows)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
