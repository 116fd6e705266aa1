"""What TLS on the data path costs: objects read from and put to a node over TCP, and slices between transfer
engines, inside TLS and in plain.

    python -m benchmarks.data_tls [--quick] [--json FILE]

Two nodes in processes of their own, one of them with cluster.tls_data; in each round each in turn serves the
same reads and puts of 1 MiB, by one thread and by two. Two engines likewise serve reads and writes, of memory
that they allocated ("own") and of memory that its user registered ("registered"), which passes through one
more copy inside TLS. CPU is that of both sides. Every byte is compared. The openssl command makes the
certificate.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.processes import PYTHON, Failed, Process, end_on_sigterm, free_port
from benchmarks.report import Row, print_table, write_json
from moonpool import Store, TransferEngine
from moonpool.core.bench.load import cpu_seconds
from moonpool.core.bench.memory import FOREIGN, OWN, Memory
from moonpool.core.config import config
from moonpool.core.service.data_tls import engine_tls, pool_tls

MIB = 1 << 20
OBJECTS = 64
THREADS = (1, 2)
TARGET = 0.6  # of plain
TOKEN = "of this benchmark, and of no other use"


class Node:
    """A node, and a client of it for each thread."""

    def __init__(self, folder: Path, cluster: dict[str, str], stack: ExitStack) -> None:
        folder.mkdir(mode=0o700)
        address = f"127.0.0.1:{free_port()}"
        own = {f"MOONPOOL_CLUSTER_{name.upper()}": value for name, value in cluster.items()}
        own |= {"MOONPOOL_CLUSTER_TOKEN": TOKEN, "MOONPOOL_RUNTIME_DIR": str(folder)}
        command = [PYTHON, "-m", "moonpool", "node", "--dram", "512MiB", "--http", "127.0.0.1:0"]
        self.process = Process([*command, "--listen", address], folder / "log", extra=own)
        stack.callback(self.process.stop)
        self.process.wait_for_port(socket.AF_UNIX, str(folder / "node.sock"))
        settings = config.load(
            env={}, arguments={f"cluster.{name}": value for name, value in cluster.items()}
        )
        self.stores = [
            stack.enter_context(Store(f"tcp://{address}", token=TOKEN.encode(), tls=pool_tls(settings)))
            for _ in range(max(THREADS))
        ]
        self.objects = {f"object {number}": os.urandom(MIB) for number in range(OBJECTS)}
        self.into = [[bytearray(MIB) for _ in range(OBJECTS)] for _ in self.stores]
        assert all(self.stores[0].put(list(self.objects), list(self.objects.values())))

    def read(self, thread: int) -> None:
        keys = list(self.objects)
        for key, into in zip(keys, self.into[thread], strict=True):
            self.stores[thread].get(key, into=into)

    def put(self, thread: int) -> None:
        for number, data in enumerate(self.objects.values()):
            self.stores[thread].put(f"put {thread} {number}", data, replace=True)

    def verbs(self) -> list[tuple[str, Callable[[int], None]]]:
        return [("read", self.read), ("put", self.put)]

    def check(self) -> None:
        for into in self.into:
            if into != list(self.objects.values()):
                raise Failed("what was read is not what was put")
        for thread in range(len(self.stores)):
            for number, data in enumerate(self.objects.values()):
                if bytes(self.stores[0].get(f"put {thread} {number}") or b"") != data:
                    raise Failed("what is there is not what was put")

    def run(self, work: Callable[[int], None], threads: int) -> tuple[float, float]:
        """(GB/s, CPU seconds for a GB)."""
        return timed(self.process.pid, work, threads)


class Engine:
    """A transfer engine with memory of that kind in a process of its own, and one here."""

    def __init__(self, folder: Path, kind: str, cluster: dict[str, str], stack: ExitStack) -> None:
        folder.mkdir(mode=0o700)
        own = {f"MOONPOOL_CLUSTER_{name.upper()}": value for name, value in cluster.items()}
        own |= {"MOONPOOL_CLUSTER_TOKEN": TOKEN, "MOONPOOL_RUNTIME_DIR": str(folder)}
        nbytes = max(THREADS) * OBJECTS * MIB
        command = [PYTHON, "-m", "moonpool.core.bench.peer", str(os.getpid()), str(nbytes), kind, "{}"]
        self.process = Process(command, folder / "log", extra=own)
        stack.callback(self.process.stop)
        self.process.wait_for_output("address")
        address = json.loads((folder / "log").read_text())["address"]
        settings = config.load(
            env={}, arguments={f"cluster.{name}": value for name, value in cluster.items()}
        )
        engine = stack.enter_context(
            TransferEngine(
                token=TOKEN.encode(),
                listen=None,
                transports=["tcp"],
                metadata="",
                tls=engine_tls(settings, listens=False),
            )
        )
        self.engine, self.segment = engine, engine.open(address)
        self.there = max(self.segment.regions, key=lambda region: region.length).address
        self.here, self.back = Memory(engine, nbytes, kind), Memory(engine, nbytes, kind)
        self.here.region.view[:] = os.urandom(nbytes)

    def _places(self, thread: int) -> Iterator[int]:
        return (at * MIB for at in range(thread * OBJECTS, (thread + 1) * OBJECTS))

    def write(self, thread: int) -> None:
        for at in self._places(thread):
            self.engine.write(self.segment, self.here.region.address + at, self.there + at, MIB)

    def read(self, thread: int) -> None:
        for at in self._places(thread):
            self.engine.read(self.segment, self.back.region.address + at, self.there + at, MIB)

    def verbs(self) -> list[tuple[str, Callable[[int], None]]]:
        return [("engine: read", self.read), ("engine: write", self.write)]

    def check(self) -> None:
        for thread in range(max(THREADS)):
            self.write(thread)
            self.read(thread)
        if bytes(self.back.region.view) != bytes(self.here.region.view):
            raise Failed("what was read is not what was written")

    def run(self, work: Callable[[int], None], threads: int) -> tuple[float, float]:
        """As of a Node."""
        return timed(self.process.pid, work, threads)


def timed(pid: int, work: Callable[[int], None], threads: int) -> tuple[float, float]:
    """OBJECTS of 1 MiB by each thread, beside that process -> (GB/s, CPU seconds for a GB)."""
    gigabytes = threads * OBJECTS * MIB / 1e9
    pids = [os.getpid(), pid]
    cpu_s, begun_s = cpu_seconds(pids), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    spent_s = time.perf_counter() - begun_s
    return gigabytes / spent_s, (cpu_seconds(pids) - cpu_s) / gigabytes


def certificate(folder: Path) -> dict[str, str]:
    """[cluster] of a node and its clients."""
    if shutil.which("openssl") is None:
        raise Failed("the openssl command is missing: apt-get install openssl")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command: list[str | Path] = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", key, "-out", cert]
    command += ["-subj", "/CN=benchmark", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return {"tls_data": "on", "tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(cert)}


def measure(folder: Path, rounds: int, stack: ExitStack) -> list[Row]:
    ways = {"plain": {}, "tls": certificate(folder)}
    nodes = {name: Node(folder / name, cluster, stack) for name, cluster in ways.items()}
    kinds = {OWN: "own", FOREIGN: "registered"}
    engines = {
        (kind, name): Engine(folder / f"{kind}-{name}", kind, cluster, stack)
        for kind in kinds
        for name, cluster in ways.items()
    }
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(rounds + 1):
        work: list[tuple[str, str, Node | Engine, Callable[[int], None]]] = []
        for name, node in nodes.items():
            work += [(f"{verb} [{OBJECTS} objects", name, node, do) for verb, do in node.verbs()]
        for (kind, name), engine in engines.items():
            what = f"[{kinds[kind]} memory, {OBJECTS} slices"
            work += [(f"{verb} {what}", name, engine, do) for verb, do in engine.verbs()]
        for what, name, there, do in work:
            for threads in THREADS:
                plural = "s" if threads > 1 else ""
                figure = there.run(do, threads)
                if turn > 0:  # the first warms
                    row = f"{what} of 1 MiB, {threads} thread{plural}]"
                    figures.setdefault((row, name), []).append(figure)
    for checked in [*nodes.values(), *engines.values()]:
        checked.check()

    def median(what: str, name: str, part: int) -> float:
        return statistics.median(figure[part] for figure in figures[what, name])

    rows = []
    for what in dict.fromkeys(what for what, _ in figures):
        tls, plain = median(what, "tls", 0), median(what, "plain", 0)
        met = tls >= TARGET * plain
        rows.append(
            Row(f"{what}, inside TLS", tls, "GB/s", {"plain": plain}, None, f">= {TARGET:g}x plain", met)
        )
        costs = median(what, "tls", 1), median(what, "plain", 1)
        rows.append(Row(f"{what}, CPU of both sides", costs[0], "s/GB", {"plain": costs[1]}, None, "", None))
    return rows


def main() -> None:
    options = make_parser(__doc__, "5 rounds").parse_args()
    end_on_sigterm()
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="data-tls-")))
            rows = measure(folder, 5 if options.quick else 25, stack)
    except Failed as error:
        sys.exit(f"data_tls: {error}")
    print_table("the data path inside TLS, medians of all rounds", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
