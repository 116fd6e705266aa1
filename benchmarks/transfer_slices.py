"""What a slice costs over a NIC that costs nothing: posting, polling and the engine's books.

    python -m benchmarks.transfer_slices [--quick] [--json FILE]

Writes of 64 bytes within one process over the software libibverbs of the tests. The engine is called in C++,
by a driver that is built here with the core (some minutes, the first time), and beside it a plain loop posts
the same requests to the same library and polls them: what is left is the engine's own. Two threads at once
write to a peer each, which is what is judged, and to one peer, whose connection they share. The engine called
from Python is shown without a target. No peer runs over that library.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from moonpool import Batch, TransferEngine

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "tests" / "native"
DRIVER = ROOT / "build" / "native-tests" / "slices" / "engine_loop"
BYTES = 64
BATCH = 128
TARGET_NS = {BATCH: 300, 1: 600}  # of the engine alone
TARGET_THREADS = 1.5


def build(library: Path) -> None:
    """Raises CalledProcessError or FileNotFoundError."""
    stub = NATIVE / "transport" / "soft_verbs"
    sources = [stub / "soft_verbs.cpp", Path(__file__).parent / "transfer" / "drivers" / "verbs_loop.cpp"]
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'core' / 'csrc'}", f"-I{stub}"]
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, *flags, *map(str, sources), "-o", str(library)], check=True)
    subprocess.run(["make", "-C", str(NATIVE), "slices"], check=True)


def by_driver(library: Path, rounds: int, calls: int) -> dict[str, float]:
    """What was measured -> ns for each slice, the median of the rounds. Raises CalledProcessError."""
    done = subprocess.run(
        [DRIVER, library, str(rounds), str(calls)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        name, value = line.split()
        found.setdefault(name, []).append(float(value))
    return {name: statistics.median(values) for name, values in found.items()}


def from_python(library: Path, rounds: int, calls: int) -> dict[int, float]:
    """Slices of a call -> ns for each, the median of the rounds."""
    with (
        TransferEngine("here", token=b"bench", transports=["rdma"], rdma_library=str(library)) as here,
        TransferEngine("there", token=b"bench", transports=["rdma"], rdma_library=str(library)) as there,
    ):
        mine, theirs = here.allocate(BATCH * BYTES), there.allocate(BATCH * BYTES)
        segment = here.open(there.addresses[0])
        offsets = range(0, BATCH * BYTES, BYTES)
        local = array("Q", [mine.address + offset for offset in offsets])
        remote = array("Q", [theirs.address + offset for offset in offsets])
        many = Batch(segment=segment, op="write", local=local, remote=remote, lengths=BYTES)
        forms: dict[int, Callable[[], object]] = {
            BATCH: partial(here.transfer, many),
            1: partial(here.write, segment, local[0], remote[0], BYTES),
        }
        found: dict[int, list[float]] = {BATCH: [], 1: []}
        for _ in range(rounds):
            for slices, call in forms.items():
                began_s = time.perf_counter()
                for _ in range(calls):
                    call()
                found[slices].append((time.perf_counter() - began_s) / calls / slices * 1e9)
    return {slices: statistics.median(values) for slices, values in found.items()}


def measure(library: Path, quick: bool, json: Path | None) -> None:
    rounds, calls = (5, 200) if quick else (15, 2000)
    found = by_driver(library, rounds, calls)
    python = from_python(library, rounds, calls)
    rows = []
    for slices, name in ((BATCH, "batch"), (1, "alone")):
        own = found[name] - found[f"{name}-plain"]
        rows.append(
            Row(
                f"write {f'{slices} x ' if slices > 1 else ''}{BYTES} B [{slices * BYTES} B], "
                "less the plain loop",
                own,
                "ns/slice",
                {"all of it": found[name], "from Python": python[slices]},
                found[f"{name}-plain"],
                f"<= {TARGET_NS[slices]} ns",
                own <= TARGET_NS[slices],
            )
        )
    machine = found["batch-plain"] / found["two-plain"]
    for name, what in (("two-peers", "to a peer each"), ("one-peer", "to one peer")):
        gain = found["batch"] / found[name]
        judged = name == "two-peers"
        rows.append(
            Row(
                f"write {BATCH} x {BYTES} B, two threads {what}, beside one [{2 * BATCH * BYTES} B]",
                gain,
                "x",
                {},
                machine,
                f">= {TARGET_THREADS}" if judged else "",
                gain >= TARGET_THREADS if judged else None,
            )
        )
    print_table("the software libibverbs", rows, "plain C++ loop")
    write_json(json, rows)


def main() -> None:
    options = make_parser(__doc__, "5 rounds of 200 calls").parse_args()
    with tempfile.TemporaryDirectory(prefix="slices-") as folder:
        library = Path(folder) / "libibverbs.so.1"
        build(library)
        os.environ["MOONPOOL_SOFT_VERBS"] = "devices=1"
        os.environ["MOONPOOL_RUNTIME_DIR"] = folder
        measure(library, options.quick, options.json)


if __name__ == "__main__":
    main()
