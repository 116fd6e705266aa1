"""Transfers with a file beside fio: the same file, the same depth, past the page cache.

    apt-get install fio
    python -m benchmarks.files --dir DIR [--quick] [--json FILE]

Ours moves batches of slices between memory of this process and random places of a file (`engine.open_file`),
of which an engine keeps 64 under way; fio does the same with io_uring, at a depth of 64. Rounds
alternate; figures are medians. What was read is compared with what was written, outside of the timed part.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from benchmarks.store.workload import MIB
from moonpool import Batch, TransferEngine

TARGET = 0.9
DEPTH = 64  # what an engine keeps under way of one file
SIZES = {"64 KiB": 64 * 1024, "1 MiB": MIB}
DIRECTIONS = {"read": "randread", "write": "randwrite"}


class Ours:
    """A file of ``total`` bytes, filled, and as much memory."""

    def __init__(self, engine: TransferEngine, path: Path, total: int) -> None:
        self.engine = engine
        self.total = total
        self.here = engine.allocate(total)
        self.content = os.urandom(MIB) * (total // MIB)
        self.file = engine.open_file(path, size=total)
        self.here.view[:] = self.content
        engine.write(self.file, self.here, 0, total)

    def run(self, direction: str, size: int) -> float:
        """GB/s of one pass over the file in random order, each slice to or from its own place."""
        places = np.arange(self.total // size, dtype=np.uint64) * np.uint64(size)
        np.random.default_rng(random.getrandbits(32)).shuffle(places)
        if direction == "read":
            self.here.view[:] = bytes(self.total)
        local = places + np.uint64(self.here.address)
        started_s = time.perf_counter()
        self.engine.transfer(Batch(direction, self.file, local, places, size), deadline_s=60)
        spent_s = time.perf_counter() - started_s
        if direction == "read" and self.here.view != self.content:
            sys.exit("files: other bytes were read than were written")
        return self.total / spent_s / 1e9


def fio(path: Path, total: int, direction: str, size: int, seconds: float) -> float:
    """GB/s of one run on the same file."""
    command = [
        "fio", "--name=peer", f"--filename={path}", f"--size={total}", f"--rw={DIRECTIONS[direction]}",
        f"--bs={size}", "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH}",
        f"--runtime={seconds}", "--time_based", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"]) / 1e9


def main() -> None:
    parser = make_parser(__doc__, "under 40 s; figures are rougher")
    parser.add_argument("--dir", type=Path, help="a folder on the disk (default: the working directory)")
    parser.add_argument("--rounds", type=int, help="counted rounds (9; quick: 3)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 9)
    total = (256 if options.quick else 1024) * MIB
    has_fio = shutil.which("fio") is not None
    cells = [(direction, name) for direction in DIRECTIONS for name in SIZES]
    ours: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    his: dict[tuple[str, str], list[float]] = {cell: [] for cell in cells}
    with (
        tempfile.TemporaryDirectory(prefix="moonpool-files-", dir=options.dir or Path.cwd()) as folder,
        TransferEngine(token=b"bench", listen=None, transports=["file"]) as engine,
    ):
        mine, peer = Path(folder) / "ours", Path(folder) / "fio"
        client = Ours(engine, mine, total)
        if has_fio:
            shutil.copyfile(mine, peer)
        for number in range(rounds + 1):
            for direction, name in cells:
                rate = client.run(direction, SIZES[name])
                seconds = 0.6 if options.quick else 2.0
                other = fio(peer, total, direction, SIZES[name], seconds) if has_fio else 0.0
                if number != 0:  # the first warms both
                    ours[direction, name].append(rate)
                    his[direction, name].append(other)
            print(f"round {number} of {rounds}{'' if number else ' (not counted)'}", file=sys.stderr)
    table = []
    for direction, name in cells:
        rate, other = (statistics.median(found[direction, name]) for found in (ours, his))
        peers: dict[str, float | str] = {"fio": other if has_fio else "not run: apt-get install fio"}
        met = rate >= TARGET * other if has_fio else None
        work = f"{direction} {name} at random, depth {DEPTH} [{total // MIB} MiB]"
        table.append(Row(work, rate, "GB/s", peers, other if has_fio else None, "at least 90 % of fio", met))
    print_table(f"Transfers with a file and fio (io_uring), O_DIRECT, medians of {rounds} rounds", table)
    write_json(options.json, table)
    missed = [row.work for row in table if row.met is False]
    print(f"{sum(row.met is True for row in table)} targets met, {len(missed)} missed")


if __name__ == "__main__":
    main()
