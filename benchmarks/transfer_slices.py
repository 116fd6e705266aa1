"""What a slice costs over a NIC that costs nothing: posting, polling and the engine's books.

    python -m benchmarks.transfer_slices [--quick] [--json FILE]

Writes of 64 bytes within this process over the software libibverbs of the tests, which is built here. Beside
the engine stands a plain loop in C++ that posts the same requests to the same library and polls them: what is
left is the engine's own, called from Python. No peer runs over that library.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from functools import partial
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from moonpool import Batch, TransferEngine

ROOT = Path(__file__).resolve().parents[1]
BYTES = 64
BATCH = 128
TARGET_NS = {BATCH: 300, 1: 600}  # of the engine alone
TARGET_THREADS = 1.5
LIBRARY = "libibverbs.so.1"


def build(folder: Path) -> None:
    """Raises CalledProcessError or FileNotFoundError."""
    stub = ROOT / "tests" / "native" / "transport" / "soft_verbs"
    sources = [stub / "soft_verbs.cpp", Path(__file__).parent / "transfer" / "drivers" / "verbs_loop.cpp"]
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'core' / 'csrc'}", f"-I{stub}"]
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(folder / LIBRARY)], check=True)


class Engines:
    """Two in this process, each with memory of its own."""

    def __init__(self) -> None:
        token = b"of this benchmark only"
        self.here, self.there = (
            TransferEngine(name, token=token, transports=["rdma"], rdma_library=LIBRARY)
            for name in ("here", "there")
        )
        why = self.here.transports()["rdma"]
        if why:
            sys.exit(f"transfer_slices: {why}")
        size = 2 * BATCH * BYTES
        self.mine, self.theirs = self.here.allocate(size), self.there.allocate(size)
        self.segment = self.here.open(self.there.addresses[0])

    def call_s(self, batch: int, calls: int, thread: int = 0) -> float:
        """Seconds of one call."""
        offsets = [(thread * BATCH + i) * BYTES for i in range(batch)]
        here = array("Q", [self.mine.address + offset for offset in offsets])
        there = array("Q", [self.theirs.address + offset for offset in offsets])
        many = Batch(segment=self.segment, op="write", local=here, remote=there, lengths=BYTES)
        call = partial(self.here.transfer, many)
        if batch == 1:
            call = partial(self.here.write, self.segment, here[0], there[0], BYTES)
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start_s) / calls

    def both_s(self, calls: int) -> float:
        """Seconds of one call of 128, where two threads make them at once."""
        threads = [threading.Thread(target=self.call_s, args=(BATCH, calls, number)) for number in (0, 1)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - start_s) / calls / len(threads)


def measure(quick: bool, json: Path | None) -> None:
    loop = ctypes.CDLL(LIBRARY).verbs_loop
    loop.restype = ctypes.c_double
    engines = Engines()
    rounds, calls = (5, 200) if quick else (15, 2000)
    found: dict[str, list[float]] = {}
    engines.call_s(BATCH, calls)  # connects
    for _ in range(rounds):  # in turn: all see the same machine
        for batch in (BATCH, 1):
            many = calls * (1 if batch > 1 else 10)
            found.setdefault(f"ours {batch}", []).append(engines.call_s(batch, many) / batch)
            bare_s = loop(batch, BYTES, many)
            if bare_s < 0:
                sys.exit("transfer_slices: the plain loop failed")
            found.setdefault(f"bare {batch}", []).append(bare_s / many / batch)
        found.setdefault("two", []).append(engines.both_s(calls) / BATCH)
    median = {name: statistics.median(values) * 1e9 for name, values in found.items()}
    rows = [
        Row(
            f"write {f'{batch} x ' if batch > 1 else ''}{BYTES} B [{batch * BYTES} B]",
            median[f"ours {batch}"],
            "ns/slice",
            {},
            median[f"bare {batch}"],
            f"<= {target} ns above the plain loop",
            median[f"ours {batch}"] - median[f"bare {batch}"] <= target,
        )
        for batch, target in TARGET_NS.items()
    ]
    gain = median[f"ours {BATCH}"] / median["two"]
    rows.append(
        Row(
            f"write {BATCH} x {BYTES} B, two threads beside one [{2 * BATCH * BYTES} B]",
            gain,
            "x",
            {},
            None,
            f">= {TARGET_THREADS}",
            gain >= TARGET_THREADS,
        )
    )
    print_table("the software libibverbs", rows, "plain C++ loop")
    write_json(json, rows)


def main() -> None:
    options = make_parser(__doc__, "5 rounds of 200 calls").parse_args()
    if "MOONPOOL_SOFT_VERBS" in os.environ:
        measure(options.quick, options.json)
        return
    with tempfile.TemporaryDirectory(prefix="slices-") as folder:
        build(Path(folder))
        own = {"LD_LIBRARY_PATH": folder, "MOONPOOL_SOFT_VERBS": "devices=1"}
        own["MOONPOOL_RUNTIME_DIR"] = folder
        command = [sys.executable, "-m", "benchmarks.transfer_slices", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | own, check=False).returncode)


if __name__ == "__main__":
    main()
