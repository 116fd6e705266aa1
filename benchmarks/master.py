"""The master beside Mooncake's and Redis: CPU and memory of the process that knows where a million keys are.

    python -m benchmarks.master --peers-venv DIR [--quick] [--json FILE]

In each round every contender in turn puts all keys in batches, looks all of them up, and removes them; ours
also loses its master to kill -9 and rebuilds it. Figures are medians over the rounds. Last, the nodes and
clients of a large pool are played to a master of ours, and nodes that hold 125 M rows. README.md explains the
rows.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from benchmarks import peers
from benchmarks.directory import large_pool, many_rows, servers
from benchmarks.directory.client import BATCH
from benchmarks.options import MADE, make_parser
from benchmarks.processes import PYTHON, Failed, Talker, end_on_sigterm
from benchmarks.report import NOT_RUN, Row, print_table, write_json
from benchmarks.store.servers import Setting, runtime
from moonpool.core.bench.load import cpu_seconds

PEERS = ("mooncake", "redis")
LOOKUPS = 3  # of all keys, in each round
TIMEOUT_S = 300.0
KEPT_AFTER_S = 10.0  # by then a process has given back what it means to


class Backend:
    def __init__(self, name: str, setting: Setting, stack: ExitStack, keys: int) -> None:
        self.name, self.keys = name, keys
        self.contender = servers.START[name](setting, stack, keys)
        python: str | Path | None = PYTHON if name == "ours" else setting.peers_python
        assert python is not None
        driver = [name, self.contender.address, *self.contender.client_arguments]
        log = setting.log(f"client-{name}")
        self.client = Talker(python, "benchmarks.directory.client", driver, log, runtime(setting))
        stack.callback(self.client.close)
        self.client.wait_ready()
        self.client.ask({"do": "prepare", "n": keys}, TIMEOUT_S)
        self.figures: dict[str, list[float]] = {}

    def round(self) -> None:
        """Raises Failed."""
        empty = self._memory_bytes()
        found = {"put": self._cpu_us("put")}
        found["memory"] = (self._memory_bytes() - empty) / self.keys
        lookups = ["exists", "prefix"] if self.name == "ours" else ["exists"]
        for verb in lookups:
            found[verb] = statistics.median(self._cpu_us(verb) for _ in range(LOOKUPS))
        found.setdefault("prefix", found["exists"])
        self._ask("remove")
        time.sleep(KEPT_AFTER_S)
        found["kept"] = max(0.0, (self._memory_bytes() - empty) / self.keys)
        if self.contender.restart is not None:
            self._ask("put")
            self.contender.restart()
            found["rebuild"] = self._ask("rebuilt")
            self._ask("remove")
        for verb, figure in found.items():
            self.figures.setdefault(verb, []).append(figure)

    def _ask(self, verb: str) -> float:
        return float(self.client.ask({"do": verb, "n": self.keys}, TIMEOUT_S)["seconds"])

    def _cpu_us(self, verb: str) -> float:
        pids = [self.contender.knows.pid]
        before_s = cpu_seconds(pids)
        self._ask(verb)
        return (cpu_seconds(pids) - before_s) * 1e6 / self.keys

    def _memory_bytes(self) -> int:
        return servers.private_bytes(self.contender.knows)

    def median(self, verb: str) -> float | None:
        found = self.figures.get(verb)
        return statistics.median(found) if found else None


def rows(ours: Backend, others: dict[str, Backend | None]) -> list[Row]:
    """Every row of the table, in order."""
    keys = f"{ours.keys / 1e6:g} M keys"

    def row(work: str, verb: str, unit: str, at_most: float, nothing: str = NOT_RUN) -> Row:
        figure = ours.median(verb)
        assert figure is not None
        beside: dict[str, float | str] = {}
        for name, backend in others.items():
            found = None if backend is None else backend.median(verb)
            beside[name] = (NOT_RUN if backend is None else nothing) if found is None else found
        return Row(
            f"{work} [{keys}]", figure, unit, beside, None, f"<= {at_most:g} {unit}", figure <= at_most
        )

    kept = row(f"of it, still held {KEPT_AFTER_S:g} s after removal", "kept", "B/key", 10.0)
    if ours.keys < 1_000_000:  # a few MB of buffers, which do not grow with the keys
        kept = replace(kept, met=None)
    return [
        row(f"put in batches of {BATCH}: CPU of the master", "put", "us/key", 1.0),
        row("memory of the master", "memory", "B/key", 100.0),
        kept,
        row("exists: CPU of the master", "exists", "us/key", 0.5),
        row("longest_prefix: CPU of the master (peers: exists)", "prefix", "us/key", 0.5),
        row("found again after the master's restart (kill -9)", "rebuild", "s", 3.0, "forgets all"),
    ]


def main() -> None:
    parser = make_parser(__doc__, "200,000 keys, one round", MADE)
    parser.add_argument("--keys", type=int, help="keys (1,000,000; quick: 200,000)")
    parser.add_argument("--rounds", type=int, help="counted rounds (3; quick: 1)")
    parser.add_argument("--only-large-pool", action="store_true", help="its rows alone")
    parser.add_argument("--only-many-rows", action="store_true", help="its rows alone; 125 M rows take 8 GB")
    options = parser.parse_args()
    end_on_sigterm()
    keys = options.keys or (200_000 if options.quick else 1_000_000)
    rounds = options.rounds or (1 if options.quick else 3)
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None

    if options.only_large_pool:
        finish(options.json, measured(large_pool, options.quick), "A master of a large pool", {})
        return
    if options.only_many_rows:
        finish(options.json, measured(many_rows, options.quick), "A master with very many rows", {})
        return
    started_s = time.monotonic()
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        setting = Setting(folder, peers_python, False)
        backends: dict[str, Backend] = {}
        try:
            backends["ours"] = Backend("ours", setting, stack, keys)
            for name in PEERS:
                if peers_python is None:
                    missing[name] = "needs --peers-venv DIR"
                    continue
                try:
                    backends[name] = Backend(name, setting, stack, keys)
                except Failed as error:
                    missing[name] = str(error)
            for number in range(rounds):
                for name, backend in list(backends.items()):
                    try:
                        backend.round()
                    except Failed as error:
                        if name == "ours":
                            raise
                        missing[name] = str(error)
                        del backends[name]
                done_s = time.monotonic() - started_s
                print(f"round {number + 1} of {rounds} after {done_s:.0f} s", file=sys.stderr)
        except Failed as error:
            sys.exit(f"master: {error}")

    table = rows(backends["ours"], {name: backends.get(name) for name in PEERS})
    table += measured(large_pool, options.quick) + measured(many_rows, options.quick)
    title = f"The process that knows where the keys are; medians of {rounds} interleaved rounds"
    finish(options.json, table, f"{title} (in brackets: how many times better ours is)", missing)
    print(f"in {time.monotonic() - started_s:.0f} s")


def measured(part: ModuleType, quick: bool) -> list[Row]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        try:
            found: list[Row] = part.measure(Setting(folder, None, False), stack, quick)
            return found
        except Failed as error:
            sys.exit(f"master: {error}")


def finish(json_file: Path | None, table: list[Row], title: str, missing: dict[str, str]) -> None:
    print_table(title, table)
    for name, why in missing.items():
        print(f"{name}: not run: {why}")
    write_json(json_file, table)
    missed = [row.work for row in table if row.met is False]
    print(f"{sum(row.met is True for row in table)} targets met, {len(missed)} missed")


if __name__ == "__main__":
    main()
