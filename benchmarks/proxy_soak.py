"""Whether the proxy's memory stays flat: requests of every kind by the million, and what the process holds.

    python -m benchmarks.proxy_soak [--requests 1000000] [--policy NAME]

A round is 10,000 requests over 64 new connections (prompts of 2 KiB; every tenth round streams of 64 chunks,
a tenth as many), and 64 clients that leave in the middle of a head, of a body or of an answer. A tenth of the
rounds warms it up; it fails when the process holds 8 MiB more in the end than then, or 128 files more.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.processes import Failed, Process, free_port
from benchmarks.proxy import load, prompts

CLIENTS = 64
ROUND = 10_000
LEAVING = 64
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


def soak(requests: int, policy: str) -> bool:
    """Whether it held no more in the end. Raises Failed, or RuntimeError for a wrong answer."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(name: str, port: int, *words: str) -> Process:
            process = Process([sys.executable, "-m", *words], folder / f"{name}.log")
            stack.callback(process.stop)
            process.wait_for_port(socket.AF_INET, ("127.0.0.1", port))
            return process

        engines: list[str] = []
        for number in range(2):
            port = free_port()
            start(f"engine-{number}", port, "benchmarks.proxy.mock_engine", str(port))
            engines += ["--engine", f"http://127.0.0.1:{port}"]
        port = free_port()
        proxy = start("proxy", port, "moonpool", "proxy", "--port", str(port), "--policy", policy, *engines)
        tenth, began_s, number, done = requests // 10, time.monotonic(), 0, 0

        def look() -> tuple[int, int]:
            memory, files = held(proxy.pid)
            passed_s = time.monotonic() - began_s
            print(f"{done:>9} requests  {memory / 2**20:6.1f} MiB  {files} files  {passed_s:.0f} s")
            return memory, files

        seen = [look()]
        while done < requests:
            number += 1
            stream = number % 10 == 0
            count = ROUND // 10 if stream else ROUND
            sent = [prompts.plain(2 << 10, stream=stream)] * count
            uvloop.run(load.run(port, CLIENTS, sent, stream=stream))
            leave(port)
            done += count + LEAVING
            if done >= tenth * len(seen):
                seen.append(look())
        before, now = seen[1], seen[-1]
        grown, more = now[0] - before[0], now[1] - before[1]
        flat = grown <= GROWTH_MAX_BYTES and more <= FILES_GROWTH_MAX
        verdict = "flat" if flat else "NOT FLAT"
        print(f"{grown / 2**20:+.1f} MiB, {more:+d} files since it was warm: {verdict}")
        return flat


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", default="round_robin")
    options = parser.parse_args()
    try:
        return 0 if soak(options.requests, options.policy) else 1
    except (Failed, RuntimeError, TimeoutError) as error:
        print(f"proxy_soak: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
