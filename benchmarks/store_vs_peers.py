"""The store beside Mooncake, Redis, memcached and memcpy: same host, another process stores.

    python -m benchmarks.store_vs_peers --peers-venv DIR [--quick] [--json FILE]

Every store is up for the whole run. In each round each cell of the workload is done by each store in turn,
so that all meet the same neighbours and the same clock speed; the first round warms everything and is not
counted; figures are medians over all passes. README.md explains the rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.processes import PYTHON, Failed, Talker, end_on_sigterm
from benchmarks.report import print_table, write_json
from benchmarks.store import servers
from benchmarks.store.rows import Outcome, rows
from benchmarks.store.workload import CELLS

PEERS = ("mooncake", "redis", "memcached")
PASSES_MAX = 6


@dataclass
class Backend:
    client: Talker
    pids: list[int]


class Run:
    """All backends of one run, and what they have measured so far."""

    def __init__(self, setting: servers.Setting, stack: ExitStack) -> None:
        self.setting, self.stack = setting, stack
        self.backends: dict[str, Backend] = {}
        self.missing: dict[str, str] = {}
        self.passes: dict[str, dict[str, dict[str, list[dict[str, float]]]]] = {}

    def start(self, name: str) -> None:
        """Starts a store and its client. Raises Failed."""
        server = servers.START[name](self.setting, self.stack)
        python: str | Path | None = PYTHON if name == "ours" else self.setting.peers_python
        assert python is not None
        client = Talker(
            python,
            "benchmarks.store.client",
            [name, server.address, *(["memcpy"] if name == "ours" else [])],
            self.setting.log(f"client-{name}"),
            servers.runtime(self.setting),
        )
        self.stack.callback(client.close)
        client.wait_ready()
        self.backends[name] = Backend(client, server.pids)

    def start_peer(self, name: str) -> None:
        """As start, but without the peer the others still run."""
        if self.setting.peers_python is None:
            self.missing[name] = "needs --peers-venv DIR"
            return
        try:
            self.start(name)
        except Failed as error:
            self._drop(name, error)

    def round(self, number: int, budget_s: float) -> None:
        """Every cell by every backend; number 0 is not counted."""
        for cell in CELLS:
            names = list(self.backends)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                backend = self.backends[name]
                request = {
                    "cell": asdict(cell),
                    "pids": backend.pids,
                    "budget_s": budget_s,
                    "passes_max": PASSES_MAX,
                }
                try:
                    answer = backend.client.ask(request)
                except Failed as error:
                    if name == "ours":
                        raise
                    self._drop(name, error)
                    continue
                if number == 0:
                    continue
                verbs = self.passes.setdefault(name, {}).setdefault(cell.name, {})
                for verb, figures in answer.items():
                    verbs.setdefault(verb, []).extend(figures)

    def _drop(self, name: str, error: Failed) -> None:
        self.missing[name] = str(error)
        self.backends.pop(name, None)
        self.passes.pop(name, None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store_vs_peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="under 50 s; figures are rougher")
    parser.add_argument("--rounds", type=int, help="counted rounds (11; quick: 3)")
    parser.add_argument(
        "--peers-venv", type=Path, metavar="DIR", help="environment with the peers; made if missing"
    )
    parser.add_argument("--tcp", action="store_true", help="Redis and memcached over TCP, not a Unix socket")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    end_on_sigterm()
    rounds = options.rounds or (3 if options.quick else 11)
    budget_s = 0.08 if options.quick else 0.4
    peers_python = peers.python(options.peers_venv) if options.peers_venv else None

    started_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-bench-")))
        run = Run(servers.Setting(folder, peers_python, options.tcp), stack)
        try:
            run.start("ours")
            for name in PEERS:
                run.start_peer(name)
            for number in range(rounds + 1):
                run.round(number, budget_s)
                done = f"round {number} of {rounds} after {time.monotonic() - started_s:.0f} s"
                print(done if number else f"{done} (warm-up, not counted)", file=sys.stderr)
        except Failed as error:
            sys.exit(f"store_vs_peers: {error}")

    table = list(rows(Outcome(run.passes, run.missing), list(PEERS)))
    title = f"Store, same host, another process; medians of {rounds} interleaved rounds"
    print_table(f"{title} (in brackets: how many times better ours is)", table, "memcpy")
    for name, why in run.missing.items():
        print(f"{name}: not run: {why}")
    if options.json:
        write_json(options.json, table)
    missed = [row.work for row in table if row.met is False]
    print(
        f"{sum(row.met is True for row in table)} targets met, {len(missed)} missed, "
        f"in {time.monotonic() - started_s:.0f} s"
    )


if __name__ == "__main__":
    main()
