"""The SSD log beside fio: the same file system, the same depth, past the page cache.

    apt-get install fio
    python -m benchmarks.ssd --dir DIR [--quick] [--json FILE]

Ours writes objects into a log that has been filled once, and reads others at random from another log, each
with its checksum, from and into the memory of this process. fio writes a file that it has filled, reads the
file of our other log at random, so that both read the same blocks, and looks at no byte. Rounds alternate;
figures are medians. A log's objects have a header of 4 KiB each, not counted.

A full log keeps what was read since it was written, by a copy. The rows beside fio write into a log of which
nothing was read; the rows "all in use" into one of which everything was, where each byte costs the reading
and the writing of up to another one. Only bytes of the caller count.
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
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.options import make_parser
from benchmarks.report import Row, print_table, write_json
from benchmarks.store.workload import MIB
from moonpool import Store, _native
from moonpool.core.config.native_settings import node_settings

TARGET = 0.7
READ_SHARE = 0.75  # of a log: what is read from
SIZES = {"1 MiB": MIB, "64 KiB": 64 * 1024}


@dataclass
class Setting:
    folder: Path
    depth: int
    working_set: int
    log_bytes: int
    fio_s: float
    fio: str | None


@dataclass
class Cell:
    """One line of the table, as it gathers."""

    work: str
    ours: list[float] = field(default_factory=list)
    fio: list[float] = field(default_factory=list)

    def row(self, missing: str) -> Row:
        ours = statistics.median(self.ours)
        fio = statistics.median(self.fio) if self.fio else None
        peers: dict[str, float | str] = {"fio": missing if fio is None else fio}
        met = None if fio is None else ours >= TARGET * fio
        return Row(self.work, ours, "GB/s", peers, fio, "at least 70 % of fio", met)


class Ours:
    """A log, and what was written to it: each pass writes the working set once."""

    def __init__(self, setting: Setting, name: str) -> None:
        self.setting = setting
        self.source = memoryview(bytearray(os.urandom(MIB) * (setting.working_set // MIB)))
        self.target = memoryview(bytearray(setting.working_set))
        self.file = setting.folder / name / "moonpool.ssd"
        self.log = _native.SsdLog(str(self.file.parent), setting.log_bytes, depth=setting.depth)
        self.names: dict[int, list[str]] = {size: [] for size in SIZES.values()}
        self.passes = 0

    def go_round(self, used: bool) -> None:
        """Fills it, so that each write goes where one has gone before. used: each object is read once."""
        while self.log.metrics()["ssd_reclaimed_segments_total"] == 0:
            self.write(MIB)
            if used:
                self.read(MIB, last=True)

    def fill(self) -> None:
        """With objects of all sizes, all of which stay."""
        while self.passes * self.setting.working_set < self.setting.log_bytes * READ_SHARE:
            for size in SIZES.values():
                self.write(size)

    def write(self, size: int) -> float:
        """GB/s of one pass over the working set."""
        self.passes += 1
        n = self.setting.working_set // size
        names = [f"{self.passes}-{i}" for i in range(n)]
        started_s = time.perf_counter()
        written = self.log.write(names, self.source, size)
        spent_s = time.perf_counter() - started_s
        if written != n:
            sys.exit(f"ssd: {n - written} of {n} objects were not written")
        self.names[size] += names
        return n * size / spent_s / 1e9

    def read(self, size: int, last: bool = False) -> float:
        """GB/s of as many objects as one pass writes, at random; last: those of the last pass."""
        n = self.setting.working_set // size
        names = self.names[size][-n:] if last else self.names[size]
        names = random.sample(names, n)
        started_s = time.perf_counter()
        read = self.log.read(names, self.target, size)
        spent_s = time.perf_counter() - started_s
        if read != n:
            sys.exit(f"ssd: {n - read} of {n} objects were not read")
        for place, name in enumerate(names):
            i = int(name.split("-")[1])
            if self.target[place * size : (place + 1) * size] != self.source[i * size : (i + 1) * size]:
                sys.exit("ssd: other bytes were read than were written")
        return n * size / spent_s / 1e9


def fio(setting: Setting, what: str, size: int, engine: str, log: Path) -> float:
    """GB/s of one run."""
    assert setting.fio is not None
    reads = what == "randread"
    command = [
        setting.fio, "--name=peer", f"--filename={log if reads else setting.folder / 'fio'}",
        f"--size={int(setting.log_bytes * READ_SHARE) if reads else setting.log_bytes // 2}",
        f"--rw={what}", f"--bs={size}", "--direct=1", f"--ioengine={engine}", f"--iodepth={setting.depth}",
        f"--runtime={setting.fio_s}", "--time_based", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    return float(job["read" if reads else "write"]["bw_bytes"]) / 1e9


def node_rates(setting: Setting, size: int) -> tuple[float, float]:
    """GB/s through a whole store: puts until they are on the disk, and gets of what only the disk has."""
    folder = setting.folder / "node"
    shutil.rmtree(folder, ignore_errors=True)
    total = setting.working_set
    n = total // size
    source = memoryview(bytearray(os.urandom(MIB) * (total // MIB)))
    into = memoryview(bytearray(total))
    socket = str(setting.folder / "n.sock")

    def server() -> _native.Server:
        node = _native.Server(
            socket,
            [("default", 2 * total)],
            b"bench",
            node_settings(ssd_clean_share=1.0, ssd_depth=setting.depth),
            ssd=[(str(folder), setting.log_bytes)],
        )
        node.start()
        return node

    node = server()
    with Store(socket, token=b"bench") as store:
        started_s = time.perf_counter()
        for i in range(n):
            store.put(f"k{i}", source[i * size : (i + 1) * size])
        while node.metrics()["ssd_written_total"] < n:
            time.sleep(0.001)
        write = total / (time.perf_counter() - started_s) / 1e9
    node.stop()
    node = server()
    with Store(socket, token=b"bench") as store:
        names = [f"k{i}" for i in random.sample(range(n), n)]
        step = max(1, total // 8 // size)
        started_s = time.perf_counter()
        for at in range(0, n, step):
            some = names[at : at + step]
            parts = [into[(at + k) * size : (at + k + 1) * size] for k in range(len(some))]
            if store.get(some, parts) != [size] * len(some):
                sys.exit("ssd: the node did not have its content back")
        read = total / (time.perf_counter() - started_s) / 1e9
    node.stop()
    return write, read


def main() -> None:
    parser = make_parser(__doc__, "under 40 s; figures are rougher")
    parser.add_argument("--dir", type=Path, help="a folder on the disk (default: the working directory)")
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--rounds", type=int, help="counted rounds (9; quick: 3)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 9)
    missing = "not run: apt-get install fio"
    with tempfile.TemporaryDirectory(prefix="moonpool-ssd-", dir=options.dir or Path.cwd()) as folder:
        setting = Setting(
            Path(folder),
            options.depth,
            working_set=(128 if options.quick else 512) * MIB,
            log_bytes=(1024 if options.quick else 4096) * MIB,
            fio_s=0.6 if options.quick else 2.0,
            fio=shutil.which("fio"),
        )
        ours, in_use, to_read = (Ours(setting, name) for name in ("log", "in-use", "to-read"))
        ours.go_round(used=False)
        in_use.go_round(used=True)
        to_read.fill()
        io = ours.log.io
        engine = "io_uring" if io == "io_uring" else "libaio"
        if setting.fio:
            fio(setting, "write", MIB, engine, to_read.file)
        cells = {
            (what, name): Cell(f"{what} {name}, depth {options.depth} [{setting.working_set // MIB} MiB]")
            for what in ("write", "randread")
            for name in SIZES
        }
        copying = {
            name: Cell(f"write {name}, all in use [{setting.working_set // MIB} MiB]") for name in SIZES
        }
        through = {
            (what, name): Cell(f"node: {what} {name} [{setting.working_set // MIB} MiB]")
            for what in ("write", "read")
            for name in SIZES
        }
        for number in range(rounds + 1):
            for (what, name), cell in cells.items():
                if what == "write":
                    mine = ours.write(SIZES[name])
                else:
                    mine = to_read.read(SIZES[name])
                his = fio(setting, what, SIZES[name], engine, to_read.file) if setting.fio else None
                if number == 0:
                    continue  # warms everybody
                cell.ours.append(mine)
                if his is not None:
                    cell.fio.append(his)
            for name, size in SIZES.items():
                written = in_use.write(size)
                in_use.read(size, last=True)
                if number != 0:
                    copying[name].ours.append(written)
            print(f"round {number} of {rounds}{'' if number else ' (not counted)'}", file=sys.stderr)
        for name, size in SIZES.items():
            for _ in range(3):
                write, read = node_rates(setting, size)
                through["write", name].ours.append(write)
                through["read", name].ours.append(read)
        for log in (ours, in_use, to_read):
            log.log.close()
    table = [cell.row(missing) for cell in cells.values()]
    for cell in [*copying.values(), *through.values()]:
        rate = statistics.median(cell.ours)
        table.append(Row(cell.work, rate, "GB/s", {"fio": "does not apply"}, None, "", None))
    print_table(f"SSD log ({io}) and fio ({engine}), O_DIRECT, medians of {rounds} rounds", table)
    write_json(options.json, table)
    missed = [row.work for row in table if row.met is False]
    print(f"{sum(row.met is True for row in table)} targets met, {len(missed)} missed")


if __name__ == "__main__":
    main()
