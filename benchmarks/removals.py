"""How long a replacement and a removal take where three hosts share a pool, beside another build of Moonpool.

    python -m benchmarks.removals [--before PYTHON] [--quick] [--json FILE]

Each contender is a master and three nodes with host ids of their own, all on this machine. In each round each
in turn replaces, removes, puts and gets objects of 4 KiB, one call after another, where the client's host has
the only copy and where each host has one. PYTHON is the interpreter of an environment that has the other
build. Every value read is compared.
"""

from __future__ import annotations

import itertools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from benchmarks.processes import (
    PYTHON,
    START_TIMEOUT_S,
    Failed,
    Process,
    Talker,
    end_on_sigterm,
    free_port,
    serve,
)
from benchmarks.report import Row, print_table, write_json
from moonpool import Store
from moonpool.core.bench.load import timed_calls

HOSTS = 3
BYTES = 4096
OLD, NEW = b"o" * BYTES, b"n" * BYTES
TOLD_AFTER_S = 0.3  # the directory has heard of new copies by then, and nodes of the removals before
TARGET = {"replace": 1.3, "remove": 1.3, "put": 1.03, "get": 1.03}  # times the other build's
WORK = {
    "replace, one copy": 1,
    "remove, one copy": 1,
    f"replace, {HOSTS} copies": HOSTS,
    f"remove, {HOSTS} copies": HOSTS,
    "put, one copy": 1,
    "get, one copy": 1,
}
TOKEN = "of this benchmark, and of no other use"


class Pool:
    """A master, three nodes and a client of the first one."""

    def __init__(self, python: str | Path, folder: Path, stack: ExitStack) -> None:
        folder.mkdir()
        command = [python, "-m", "moonpool"]
        master = f"127.0.0.1:{free_port()}"
        own = {"MOONPOOL_CLUSTER_TOKEN": TOKEN}
        ports = ["--http", "127.0.0.1:0"]
        started = Process([*command, "master", "--listen", master, *ports], folder / "master.log", extra=own)
        stack.callback(started.stop)
        for host in range(HOSTS):
            runtime = folder / str(host)
            runtime.mkdir(mode=0o700)
            extra = {"MOONPOOL_NODE_HOST_ID": f"host{host}", "MOONPOOL_RUNTIME_DIR": str(runtime)}
            node = [*command, "node", "--name", f"node{host}", "--dram", "256MiB", *ports]
            node += ["--listen", "127.0.0.1:0", "--master", master]
            started = Process(node, folder / f"node{host}.log", extra=own | extra)
            stack.callback(started.stop)
            started.wait_for_port(socket.AF_UNIX, str(runtime / "node.sock"))
        arguments = [str(HOSTS)]
        extra = {"MOONPOOL_RUNTIME_DIR": str(folder / "0")}
        self.client = Talker(python, "benchmarks.removals", arguments, folder / "client.log", own | extra)
        stack.callback(self.client.close)
        self.client.wait_ready()
        self.median_us: dict[str, list[float]] = {}

    def round(self, number: int, calls: int) -> None:
        for work, us in self.client.ask({"round": number, "calls": calls}).items():
            self.median_us.setdefault(work, []).append(us)


def start() -> tuple[object, Callable[[Any], object]]:
    """The client's side. It waits until each host takes a copy."""
    store = Store()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    for number in itertools.count():
        if store.put(f"first {number}", OLD, replicas=HOSTS).replicas == HOSTS:
            break
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the nodes have not joined within {START_TIMEOUT_S:g} s")
        time.sleep(0.2)
    calls: dict[str, Callable[[str], object]] = {
        "replace": lambda key: store.put(key, NEW, replace=True),
        "remove": store.remove,
        "put": lambda key: store.put(key, NEW),
        "get": store.get,
    }
    after = {"replace": NEW, "remove": None, "put": NEW, "get": OLD}

    def measure(asked: dict[str, int]) -> dict[str, float]:
        found = {}
        for number, (work, copies) in enumerate(WORK.items()):
            verb = work.split(",")[0]
            keys = [f"{asked['round']} {number} {i}" for i in range(asked["calls"])]
            if verb != "put":
                for key in keys:
                    store.put(key, OLD, replicas=copies)
            time.sleep(TOLD_AFTER_S)
            spent_s, _ = timed_calls([partial(calls[verb], key) for key in keys])
            found[work] = statistics.median(spent_s) * 1e6
            for key in keys:
                value = store.get(key)
                if (None if value is None else bytes(value)) != after[verb]:
                    raise RuntimeError(f"after {work}, {key} is not what it has to be")
                store.remove(key)
        return found

    return "ready", measure


def rows_of(ours: dict[str, float], before: dict[str, float]) -> list[Row]:
    rows = []
    for work, us in ours.items():
        most = TARGET[work.split(",")[0]]
        rows.append(
            Row(
                f"{work} [4 KiB, 3 nodes]",
                us,
                "us",
                {"before": before[work]} if before else {},
                None,
                f"<= {most:g}x before" if before else "",
                us <= most * before[work] if before else None,
            )
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__, "3 rounds of 50 calls")
    parser.add_argument("--before", type=Path, metavar="PYTHON", help="of the other build")
    options = parser.parse_args()
    end_on_sigterm()
    rounds, calls = (3, 50) if options.quick else (15, 200)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="removals-")))
            pools = {"ours": Pool(PYTHON, folder / "ours", stack)}
            if options.before:
                pools["before"] = Pool(options.before, folder / "before", stack)
            for number in range(rounds):
                for pool in pools.values():
                    pool.round(number, calls)
    except Failed as error:
        sys.exit(f"removals: {error}")
    median = {
        name: {work: statistics.median(values) for work, values in pool.median_us.items()}
        for name, pool in pools.items()
    }
    rows = rows_of(median["ours"], median.get("before", {}))
    print_table("three hosts, medians of all rounds", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        serve(sys.argv[1], start)
    else:
        main()
