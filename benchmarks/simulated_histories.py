"""How many operations of a simulated cluster end without a finding, and how many a core simulates a second.

    python -m benchmarks.simulated_histories [--operations N] [--seed FIRST] [--quick] [--json FILE]

tests/sim runs the real client, master, node, SSD tier and log above a simulated network, disk and clock
(docs/master.md). One process on each core takes a condition (which faults, how many ranges, disks, stripes)
and 400 seeds at a time, in turn, until N operations have ended or one has a finding, which is printed with
its shortest history. Targets alone judge: no peer has a simulator.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator

from benchmarks.options import make_parser
from benchmarks.processes import ROOT, end_on_sigterm
from benchmarks.report import Row, print_table, write_json

SIMULATOR = ROOT / "build" / "native-tests" / "sim" / "simulator"
SEEDS = 400
OPERATIONS = 100_000_000
OPERATIONS_A_SECOND = 20_000
CONDITIONS = (
    "clients=2 jumps=2",
    "one_writer=1 apart_ms=0",
    "replaces=0 restarts=3 stops=2 disks=1",
    "puts=0 pins=0 keys=2 apart_ms=0",
    "puts=0 pins=0 keys=2 uniques=4 apart_ms=0",
    "ranges=3 uniques=4 stops=2 cuts=2 broken_links=2",
    "uniques=4 replaces=0 restarts=3 disks=1 standby=1 owner_dies=1",
    "replaces=0 stops=2 cuts=2 broken_links=2",
    "replaces=0 stops=4 gets=2 pins=0 lasts_ms=5000",
    "ranges=3 restarts=1 cuts=1 broken_links=1 master_restarts=1 stops=2 disks=1",
    "ranges=3 restarts=1 cuts=1 broken_links=1 stops=2 disks=1 standby=1 owner_dies=1",
    "master_restarts=1 restarts=1 cuts=1 disks=1",
    "replaces=0 stops=2 cuts=2 standby=1 owner_dies=1",
    "replaces=0 stops=2 cuts=2 standby=1 owner_stops=1",
    "replaces=0 restarts=3 broken_links=2 disks=1",
    "puts=0 pins=0 keys=2 cuts=4 standby=1 owner_dies=1 apart_ms=0",
    "restarts=2 standby_restarts=2 cuts=2 broken_links=2 standby=1",
    "restarts=1 stops=2 broken_links=2 cuts=1 master_restarts=1 clients=1 jumps=1 disks=1 apart_ms=0 "
    "for_ever_only=1",
    "standby=1 hand_overs=3",
    "standby=1 hand_overs=3 stops=1 cuts=1 broken_links=1 restarts=1 standby_restarts=1 disks=1",
    "ranges=3 standby=1 hand_overs=3 stops=1 cuts=1 broken_links=1 restarts=1 standby_restarts=1 disks=1 "
    "full=10",
    "full=20 restarts=1 stops=2 cuts=1 disks=1",
    "disks=1 memory_objects=4 torn=1 slow_disk=20 restarts=3",
    "disks=1 memory_objects=3 torn=1 slow_disk=500 cuts=1 master_restarts=1 restarts=1",
    "disks=1 memory_objects=4 disk_fails=10 disk_full=30 restarts=2 stops=1",
    "stripes=100 restarts=2 disks=1 master_restarts=1",
    "stripes=100 cuts=2 stops=2 broken_links=2",
    "stripes=50 standby=1 hand_overs=2 restarts=1 disks=1",
    "disks=1 standby=1 hand_overs=2 restarts=1 master_restarts=1",
    "disks=1 standby=1 restarts=2 owner_dies=1 master_restarts=1",
    "disks=1 standby=1 restarts=2 owner_stops=1 master_restarts=1 stops=1 cuts=1 standby_restarts=1",
    "standby=1 restarts=1 hand_overs=3 master_restarts=2 standby_restarts=1 ranges=2 disks=1",
)


class Search:
    """What all processes share."""

    def __init__(self, first: int, seeds: int, operations: int) -> None:
        self._lock = threading.Lock()
        self._chunks = self._all_chunks(first, seeds)
        self._wanted = operations
        self.operations = 0
        self.a_second: list[float] = []  # operations, of each chunk
        self.findings: list[str] = []

    @staticmethod
    def _all_chunks(first: int, seeds: int) -> Iterator[tuple[str, int, int]]:
        for begin in itertools.count(first, seeds):
            for condition in CONDITIONS:
                yield condition, begin, seeds

    def run(self) -> None:
        """One core's part."""
        while True:
            with self._lock:
                if self.operations >= self._wanted or self.findings:
                    return
                condition, first, seeds = next(self._chunks)
            words = ["apart_ms=300", *condition.split(), f"first={first}", f"seeds={seeds}"]
            ended = subprocess.run([SIMULATOR, *words], capture_output=True, text=True, check=False)
            done = re.search(r"(\d+) operations, (\d+) operations a second", ended.stdout)
            with self._lock:
                if ended.returncode != 0 or done is None:
                    self.findings.append(f"{' '.join(words)}\n{ended.stdout}{ended.stderr}")
                if done is not None:
                    self.operations += int(done[1])
                    self.a_second.append(float(done[2]))
                self._show()

    def _show(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{self.operations:,} of {self._wanted:,} operations", end="", file=sys.stderr)


def rows_of(found: Search, wanted: int, cores: int) -> list[Row]:
    speed = statistics.median(found.a_second) if found.a_second else 0.0
    return [
        Row(
            f"operations of a simulated cluster without a finding [{len(CONDITIONS)} conditions, "
            f"{cores} processes]",
            found.operations,
            "",
            {},
            None,
            f">= {wanted:,}",
            found.operations >= wanted and not found.findings,
        ),
        Row(
            "operations a second of one core, median of all conditions",
            speed,
            "1/s",
            {},
            None,
            f">= {OPERATIONS_A_SECOND:,}",
            speed >= OPERATIONS_A_SECOND,
        ),
    ]


def main() -> None:
    parser = make_parser(__doc__, "10 seeds of each condition")
    parser.add_argument("--operations", type=float, default=OPERATIONS, help="until a finding (100,000,000)")
    parser.add_argument("--seed", type=int, default=1, metavar="FIRST", help="of the first history (1)")
    options = parser.parse_args()
    end_on_sigterm()
    subprocess.run(
        ["make", "-s", "-C", ROOT / "tests" / "native", "sim"], check=True, stdout=subprocess.DEVNULL
    )
    seeds = 10 if options.quick else SEEDS
    wanted = 10 * 250 * len(CONDITIONS) if options.quick else int(options.operations)
    cores = len(os.sched_getaffinity(0))
    search = Search(options.seed, seeds, wanted)
    threads = [threading.Thread(target=search.run) for _ in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = rows_of(search, wanted, cores)
    print_table("histories of a simulated cluster", rows)
    write_json(options.json, rows)
    if search.findings:
        sys.exit("\n".join(search.findings))


if __name__ == "__main__":
    main()
