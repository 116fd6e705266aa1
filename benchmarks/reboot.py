"""What is left of a node's objects when its host is rebooted and the master is replaced meanwhile.

    python -m benchmarks.reboot [--quick] [--json FILE]

A master and three nodes with host ids of their own, on this machine. The last node has all objects, 64 bytes
each, which it writes to its SSD (a directory of this machine) when it is stopped. A client of the first node
removes one of the keys, the master is stopped and started anew, as for an upgrade, and the node comes back
under another host id, as after a reboot, with its directory. Then the client reads each key and compares its
value.
Targets alone judge: no peer keeps what it knows across the end of its master.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.options import make_parser
from benchmarks.processes import PYTHON, Failed, Process, Talker, end_on_sigterm, free_port, serve
from benchmarks.report import Row, print_table, write_json
from benchmarks.takeover import metric, wait
from moonpool import Error, Store

HOSTS = 3
HOLDER = 2
BATCH = 4096
REMOVED = 7
WAIT_S = 60.0
STOPPED_S = 60.0  # what a stop may take to write what is in memory alone
OWN = {"MOONPOOL_CLUSTER_TOKEN": "of this benchmark, and of no other use"}
MOONPOOL = [PYTHON, "-m", "moonpool"]


class Pool:
    """The master, the nodes, a client of the first node and one of the holder."""

    def __init__(self, folder: Path, keys: int, stack: ExitStack) -> None:
        self._folder, self._stack, self.keys = folder, stack, keys
        self._listen, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self._node_http = [f"127.0.0.1:{free_port()}" for _ in range(HOSTS)]
        self.master = self.start_master()
        self.nodes = [self.start_node(host, f"host{host}") for host in range(HOSTS)]
        self.client = self._start_client(0)
        holder = self._start_client(HOLDER)
        holder.ask({"fill": keys}, WAIT_S)
        holder.close()
        wait(lambda: metric(self.http, "master_directory_rows") == keys, "all rows at the master")

    def start_master(self) -> Process:
        command = [*MOONPOOL, "master", "--listen", self._listen, "--http", self.http]
        master = Process(command, self._folder / "master.log", extra=OWN)
        self._stack.callback(master.stop)
        return master

    def start_node(self, host: int, host_id: str) -> Process:
        runtime = self._folder / str(host)
        runtime.mkdir(mode=0o700, exist_ok=True)
        extra = {
            "MOONPOOL_NODE_HOST_ID": host_id,
            "MOONPOOL_RUNTIME_DIR": str(runtime),
            "MOONPOOL_NODE_OBJECTS_MAX": str(2 * self.keys),
            "MOONPOOL_NODE_SSD_RECORDS_MAX": str(2 * self.keys),
            "MOONPOOL_NODE_SSD_STOP_S": f"{STOPPED_S:g}s",
        }
        command = [*MOONPOOL, "node", "--name", f"node{host}", "--dram", "1GiB", "--master", self._listen]
        command += ["--listen", "127.0.0.1:0", "--http", self._node_http[host]]
        if host == HOLDER:
            command += ["--ssd", f"{self._folder / 'ssd'}:{1 + (self.keys * 10 >> 20)}GiB"]
        node = Process(command, self._folder / f"node{host}.log", extra=OWN | extra)
        self._stack.callback(node.stop)
        node.wait_for_port(socket.AF_UNIX, str(runtime / "node.sock"))
        return node

    def _start_client(self, host: int) -> Talker:
        extra = OWN | {"MOONPOOL_RUNTIME_DIR": str(self._folder / str(host))}
        client = Talker(PYTHON, "benchmarks.reboot", [], self._folder / f"client{host}.log", extra)
        self._stack.callback(client.close)
        client.wait_ready()
        return client

    def reboot(self) -> dict[str, float]:
        self.nodes[HOLDER].stop(STOPPED_S)
        self.client.ask({"remove": REMOVED})
        self.master.stop()
        self.master = self.start_master()
        self.nodes[HOLDER] = self.start_node(HOLDER, f"host{HOLDER}-rebooted")
        back_s = time.monotonic()
        wait(
            lambda: metric(self.http, "master_directory_rows") >= self.keys - 1, "all rows at the new master"
        )
        self.client.ask({"find": REMOVED + 1}, WAIT_S)
        back_s = time.monotonic() - back_s
        return {"back_s": back_s, **self.client.ask({"read": self.keys}, WAIT_S)}


def value(number: int) -> bytes:
    return f"{number:064d}".encode()


def start() -> tuple[object, Callable[[Any], object]]:
    """A client in that host."""
    store = Store()

    def batches(count: int) -> list[range]:
        return [range(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]

    def fill(count: int) -> str:
        for numbers in batches(count):
            rows = store.put([f"k{n}" for n in numbers], [value(n) for n in numbers])
            if not all(rows):
                raise RuntimeError(f"a put was refused: {next(row for row in rows if not row)}")
        return "filled"

    def remove(number: int) -> str:
        """The client may hear of the node's end only now."""
        give_up_s = time.monotonic() + WAIT_S
        while time.monotonic() < give_up_s:
            try:
                return repr(store.remove(f"k{number}"))
            except Error:
                time.sleep(0.05)
        raise RuntimeError(f"not removed within {WAIT_S:g} s")

    def find(number: int) -> str:
        """Until it is found: what a node brings from its SSD is not read before other nodes could join."""
        give_up_s = time.monotonic() + WAIT_S
        while store.get(f"k{number}") is None:
            if time.monotonic() > give_up_s:
                raise RuntimeError(f"not found within {WAIT_S:g} s")
            time.sleep(0.05)
        return "found"

    def read(count: int) -> dict[str, float]:
        hits = wrong = 0
        removed = 0
        began_s = time.monotonic()
        for numbers in batches(count):
            for number, got in zip(numbers, store.get([f"k{n}" for n in numbers]), strict=True):
                if number == REMOVED:
                    removed += got is not None
                elif got is not None:
                    hits += 1
                    wrong += bytes(got) != value(number)
        return {"hits": hits, "wrong": wrong, "removed": removed, "read_s": time.monotonic() - began_s}

    def measure(asked: dict[str, int]) -> object:
        ((what, number),) = asked.items()
        return {"fill": fill, "remove": remove, "find": find, "read": read}[what](number)

    return "ready", measure


def rows_of(found: dict[str, float], keys: int) -> list[Row]:
    work = f"[{keys:,} objects of 64 B on one node's SSD, 3 nodes]"
    bad = found["wrong"] + found["removed"]
    return [
        Row(
            f"node rebooted, master replaced, one key removed meanwhile: hits {work}",
            found["hits"],
            "",
            {},
            None,
            "all but the removed one",
            found["hits"] == keys - 1,
        ),
        Row(f"the same: wrong values, and the removed one {work}", bad, "", {}, None, "none", bad == 0),
        Row(
            f"from the node's start until a client finds them {work}",
            found["back_s"],
            "s",
            {},
            None,
            "",
            None,
        ),
    ]


def main() -> None:
    options = make_parser(__doc__, "20,000 objects").parse_args()
    end_on_sigterm()
    keys = 20_000 if options.quick else 200_000
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reboot-")))
            found = Pool(folder, keys, stack).reboot()
    except Failed as error:
        sys.exit(f"reboot: {error}")
    rows = rows_of(found, keys)
    print_table("a node that is rebooted while its master is replaced", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        serve(sys.argv[1], start)
    else:
        main()
