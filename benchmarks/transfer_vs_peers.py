"""The transfer engine beside Mooncake, NIXL and what the machine itself can do: two processes of one host.

    python -m benchmarks.transfer_vs_peers --peers-venv DIR [--quick] [--json FILE]

Each engine has its pair of processes for the whole run. In each round each cell is done by each engine in
turn, so that all meet the same neighbours and the same clock speed; the first round warms everything and is
not counted; figures are medians over the rounds. README.md explains the rows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.options import MADE, make_parser
from benchmarks.placement import APART, FREE, TOGETHER, Placement
from benchmarks.processes import PYTHON, SOURCES, START_TIMEOUT_S, Failed, Talker, end_on_sigterm
from benchmarks.report import print_table, write_json
from benchmarks.transfer.cells import CELLS, LARGE_SET, Cell
from benchmarks.transfer.drivers import DRIVERS
from benchmarks.transfer.drivers.plain import LIBRARY
from benchmarks.transfer.rows import TABLES, Outcome, Passes

OURS = ("ours shm", "ours foreign", "ours tcp", "ours tcp reads", "ours submit")
NEED_PEERS = ("mooncake", "nixl shm", "nixl tcp")


COPIES = ("ours shm", "ours foreign", "drop-in", "nixl shm")  # only the caller works: nobody is woken
POLLS = ("nixl tcp",)  # both sides work all the time: they need a core each
ONE_THREAD = (
    "nixl shm",
    "nixl tcp",
    "ours submit",
)  # an agent belongs to one; one says it all


def placements(name: str, cell: Cell) -> tuple[Placement, ...]:
    if cell.threads > 1 or name in COPIES:
        return (FREE,)
    return (APART,) if name in POLLS else (TOGETHER, APART)


@dataclass
class Pair:
    name: str
    target: Talker
    initiator: Talker

    @contextmanager
    def turn(self, where: Placement | None = None) -> Iterator[None]:
        if where:
            where.pin([self.initiator.process.pid], [self.target.process.pid])
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self.name in POLLS:  # or its threads would take the cores of those whose turn it is
            for talker in (self.target, self.initiator):
                os.kill(talker.process.pid, number)


class Run:
    """The pairs of one run, and what they have measured so far."""

    def __init__(self, folder: Path, peers_python: Path | None, stack: ExitStack) -> None:
        self.folder, self.peers_python, self.stack = folder, peers_python, stack
        self.pairs: dict[str, Pair] = {}
        self.missing: dict[str, str] = {}
        self.passes: Passes = {}
        self.environment = {"MOONPOOL_RUNTIME_DIR": str(folder), LIBRARY: str(folder / "plain_loop.so")}

    def start(self, names: Iterable[str]) -> None:
        """Starts the engines' processes, all at once; an engine that fails is left out of the run."""
        waiting = []
        for name in names:
            if name in NEED_PEERS and self.peers_python is None:
                self.missing[name] = "needs --peers-venv DIR"
            else:
                waiting.append((name, self._talker("target", name)))
        started = []
        for name, target in waiting:
            try:
                told = target.receive(START_TIMEOUT_S)
                initiator = self._talker("initiator", name, str(target.process.pid), json.dumps(told))
            except Failed as error:
                self.missing[name] = str(error)
                continue
            started.append(Pair(name, target, initiator))
        for pair in started:
            try:
                pair.initiator.wait_ready()
            except Failed as error:
                self.missing[pair.name] = str(error)
                continue
            self.pairs[pair.name] = pair
            with pair.turn():
                pass

    def _talker(self, side: str, name: str, *rest: str) -> Talker:
        python = self.peers_python if name in NEED_PEERS else PYTHON
        assert python is not None
        talker = Talker(
            python,
            f"benchmarks.transfer.{side}",
            [name, str(LARGE_SET), *rest],
            self.folder / f"{side} {name}.log",
            self.environment | (SOURCES if name in NEED_PEERS else {}),
        )
        self.stack.callback(talker.close)
        return talker

    def round(self, number: int, cells: Sequence[Cell], budget_s: float) -> None:
        """Every cell by every pair; number 0 is not counted."""
        for cell in cells:
            names = list(self.pairs)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                pair = self.pairs[name]
                if name in ONE_THREAD and cell.threads > 1:
                    continue
                try:
                    for where in placements(name, cell):
                        with pair.turn(where):
                            answer = pair.initiator.ask({"cell": asdict(cell), "budget_s": budget_s})
                        for what, figures in answer.items() if number else ():
                            found = self.passes.setdefault(what, {}).setdefault(cell.name, {})
                            found.setdefault(where.name, []).append(figures)
                except Failed as error:
                    self.missing[name] = str(error)
                    self.pairs.pop(name)
                    self.passes.pop(name, None)


def build_plain_loop(folder: Path) -> None:
    """Raises CalledProcessError or FileNotFoundError."""
    source = Path(__file__).parent / "transfer" / "drivers" / "plain_loop.cpp"
    compiler = os.environ.get("CXX", "c++").split()
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, *flags, str(source), "-o", str(folder / "plain_loop.so")], check=True)


def main() -> None:
    parser = make_parser(__doc__, "under 50 s; figures are rougher, and none of 4 threads", MADE)
    parser.add_argument("--rounds", type=int, help="counted rounds (9; quick: 1)")
    parser.add_argument("--only", nargs="+", choices=DRIVERS, metavar="DRIVER", help=", ".join(DRIVERS))
    options = parser.parse_args()
    end_on_sigterm()
    rounds = options.rounds or (1 if options.quick else 9)
    cells = [cell for cell in CELLS if cell.threads < 4] if options.quick else CELLS
    budget_s = 0.02 if options.quick else 0.2
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None

    started_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        build_plain_loop(folder)
        run = Run(folder, peers_python, stack)
        run.start(options.only or DRIVERS)
        for number in range(rounds + 1):
            run.round(number, cells, budget_s if number else budget_s / 4)
            done = f"round {number} of {rounds} after {time.monotonic() - started_s:.0f} s"
            print(done if number else f"{done} (warm-up, not counted)", file=sys.stderr)
    outcome = Outcome(run.passes, run.missing)
    table = []
    for title, (section, make) in TABLES.items():
        found = [row for row in make(outcome) if row is not None]
        table += found
        if found:
            print_table(f"{title}; medians of {rounds} interleaved rounds", found, section.limit)
            print()
    for name, why in run.missing.items():
        print(f"{name}: not run: {why}")
    write_json(options.json, table)
    missed = [row.work for row in table if row.met is False]
    print(
        f"{sum(row.met is True for row in table)} targets met, {len(missed)} missed, "
        f"in {time.monotonic() - started_s:.0f} s"
    )
    if any(name in run.missing for name in OURS):
        sys.exit("transfer_vs_peers: ours did not run to its end")


if __name__ == "__main__":
    main()
