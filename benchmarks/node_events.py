"""What publishing KV events costs a put: a node that publishes none beside one that no process follows, and
beside one that a subscriber of the proxy follows.

    python -m benchmarks.node_events [--quick] [--json FILE]

Blocks of four objects each, under the names that engines give them, always new ones, so that old ones are
evicted. The nodes take turns; figures are medians of one put over the node's Unix socket.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.processes import Process
from benchmarks.report import Row, print_table, write_json
from moonpool import Store
from moonpool.core.store.keys import Ranges, block_name
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.events.subscriber import Subscriber

EVENTS = {"none": "none", "unfollowed": "auto", "followed": "auto"}  # name of the node -> node.events
OBJECTS = [Ranges(0, head, 1, 0, 4) for head in range(4)]  # of a block
WORK = ((4, 4096), (64, 4096), (64, 65536))  # objects of a put, bytes of one
TURNS, PUTS = 40, 50


class Names:
    """Of blocks that no node has yet."""

    def __init__(self) -> None:
        self._number = itertools.count()

    def take(self, objects: int) -> list[bytes]:
        digests = (hashlib.sha256(str(next(self._number)).encode()).digest() for _ in itertools.count())
        return [block_name(next(digests), each) for _ in range(objects // 4) for each in OBJECTS]


def start(folder: Path, stack: ExitStack) -> dict[str, Store]:
    """A client of each node."""
    stores = {}
    for name, events in EVENTS.items():
        command = [sys.executable, "-m", "moonpool", "node", "--name", name, "--dram", "512MiB"]
        command += ["--http", "off", "--listen", "off", "--events", events]
        process = Process(command, folder / f"{name}.log")
        stack.callback(process.stop)
        process.wait_for_output("moonpool node")
        store = Store(str(folder / f"node-{name}.sock"), fingerprint=bytes(32))
        stores[name] = stack.enter_context(store)
    socket = f"ipc://{folder}/node-followed.sock"
    source = EventSource("followed", f"{socket}.pub", f"{socket}.replay", pool=True)
    indexes = PrefixIndexes()
    indexes.obtain(64)
    follower = Subscriber((source,), indexes, {"followed": 0})
    stack.callback(follower.stop)
    follower.start()
    return stores


def measure(stores: dict[str, Store], names: Names, objects: int, size: int, turns: int) -> dict[str, float]:
    """Microseconds of a put, by the node's name."""
    data = [bytes(size)] * objects
    taken: dict[str, list[float]] = {name: [] for name in stores}
    for turn in range(turns):
        for name in list(stores)[:: 1 if turn % 2 else -1]:
            for _ in range(PUTS):
                keys = names.take(objects)
                began = time.perf_counter()
                stores[name].put(keys, data)
                taken[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = make_parser(__doc__, "two turns, which judge nothing")
    arguments = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-", dir="/tmp")))
        os.environ["MOONPOOL_RUNTIME_DIR"] = str(folder)
        stores, names = start(folder, stack), Names()
        for objects, size in WORK:
            found = measure(stores, names, objects, size, 2 if arguments.quick else TURNS)
            ours = found["unfollowed"]
            peers: dict[str, float | str] = {"none": found["none"], "followed": found["followed"]}
            met = None if arguments.quick else ours <= 1.03 * found["none"]
            work = f"put {objects} objects [{size // 1024} KiB each], not followed"
            rows.append(Row(work, ours, "us", peers, None, "<= 1.03x of none", met))
    print_table("a node's KV events", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
