"""The store beside Mooncake, Redis, memcached and memcpy: another process stores, on this host or over TCP.

    python -m benchmarks.store_vs_peers --peers-venv DIR [--quick] [--json FILE]

Every store is up for the whole run. In each round each cell of the workload is done by each store in turn,
so that all meet the same neighbours and the same clock speed; the first round warms everything and is not
counted; figures are medians over all passes. README.md explains the rows.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks import peers
from benchmarks.namespace import Namespace
from benchmarks.options import MADE, make_parser
from benchmarks.processes import Failed, end_on_sigterm
from benchmarks.report import Row, print_table, write_json
from benchmarks.store import servers
from benchmarks.store.rows import Outcome, cable_rows, drop_in_rows, rows
from benchmarks.store.runs import OverCable, SameHost

PEERS = ("mooncake", "redis", "memcached")
CABLE_PEERS = ("mooncake", "redis")
PARTS = ("host", "cable")


class Bench:
    """The parts of one call: their rows so far, and which peers did not run."""

    def __init__(self, folder: Path, peers_python: Path | None, quick: bool, rounds: int | None) -> None:
        self.folder, self.peers_python, self.quick, self.rounds = folder, peers_python, quick, rounds
        self.started_s = time.monotonic()
        self.table: list[Row] = []
        self.missing: dict[str, str] = {}

    def same_host(self, tcp: bool) -> None:
        """Raises Failed when ours fails."""
        rounds = self.rounds or (3 if self.quick else 11)
        with ExitStack() as stack:
            run = SameHost(servers.Setting(self.folder, self.peers_python, tcp), stack)
            run.start(["ours", "drop-in", *PEERS])
            for number in range(rounds + 1):
                run.round(number, 0.08 if self.quick else 0.4)
                self.say(f"round {number} of {rounds}{'' if number else ' (warm-up, not counted)'}")
        found = list(rows(Outcome(run.passes, run.missing), list(PEERS)))
        title = f"Store, same host, another process; medians of {rounds} interleaved rounds"
        print_table(f"{title} (in brackets: how many times better ours is)", found, "memcpy")
        self.table += found
        self.missing |= run.missing
        if found := list(drop_in_rows(Outcome(run.passes, run.missing))):
            print_table("The drop-in `mooncake`, in the column ours, beside moonpool's own API", found)
            self.table += found

    def over_cable(self) -> None:
        """Raises Failed when ours fails."""
        rounds = self.rounds or (2 if self.quick else 7)
        with ExitStack() as stack:
            try:
                there = Namespace(self.folder / "namespace.log", stack)
            except Failed as error:
                self.missing["over a cable"] = str(error)
                return
            run = OverCable(servers.Setting(self.folder, self.peers_python, True, there), stack, there)
            run.start(["ours", *CABLE_PEERS])
            run.cells(rounds, 0.05 if self.quick else 0.4)
        self.say("over a cable")
        found = list(cable_rows(Outcome(run.passes, run.missing), list(CABLE_PEERS)))
        title = (
            f"Store over TCP, the node in another network namespace; medians of {rounds} interleaved rounds"
        )
        print_table(title, found)
        self.table += found
        self.missing |= {f"{name} over a cable": why for name, why in run.missing.items()}

    def say(self, what: str) -> None:
        print(f"{what} after {time.monotonic() - self.started_s:.0f} s", file=sys.stderr)


def main() -> None:
    parser = make_parser(__doc__, "under 50 s; figures are rougher", MADE)
    parser.add_argument("--rounds", type=int, help="counted rounds (11, over a cable 7; quick: 3, 2)")
    parser.add_argument("--tcp", action="store_true", help="Redis and memcached over TCP, not a Unix socket")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    options = parser.parse_args()
    end_on_sigterm()
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        bench = Bench(Path(folder), peers_python, options.quick, options.rounds)
        try:
            if "host" in options.parts:
                bench.same_host(options.tcp)
            if "cable" in options.parts:
                bench.over_cable()
        except Failed as error:
            sys.exit(f"store_vs_peers: {error}")
    for name, why in bench.missing.items():
        print(f"{name}: not run: {why}")
    write_json(options.json, bench.table)
    met = [row.met for row in bench.table]
    took_s = time.monotonic() - bench.started_s
    print(f"{met.count(True)} targets met, {met.count(False)} missed, in {took_s:.0f} s")


if __name__ == "__main__":
    main()
