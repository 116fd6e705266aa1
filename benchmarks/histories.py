"""Whether real processes that are killed, stopped and cut off from each other ever give an old value.

    python -m benchmarks.histories [--minutes M] [--seed N] [--ranges R] [--only FAULT] [--plant MISTAKE]
                                   [--quick] [--json FILE]

etcd, masters that agree in it, nodes with host ids of their own and a client of each, all on this machine;
what goes between them by TCP goes over lines that can be cut. Clients replace, remove and get a few keys,
and note what they were told and when. Every few seconds something happens: a master, a node or etcd is
killed and started again, or stands still; lines are cut and healed; an owner hands over to its standby. In
the end all is healed, and every client reads the last keys again. Then each key's history is checked as
that of a register (benchmarks/history/operations.py): no read returns a removed or replaced value. What a
client reads while its own node is away does not count: that node serves what it has (docs/master.md). The
seed is printed.

With --ranges each of so many ranges of the keys has masters of its own. --only has one kind of fault
happen again and again.

--plant makes the clients lie, for the checker to find it: lost_removal or stale. Without --plant, short
runs with each of them come last.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.history.operations import GET, Operation, Violation, violations
from benchmarks.options import make_parser
from benchmarks.processes import PYTHON, Failed, Process, Talker, end_on_sigterm, free_port
from benchmarks.report import Row, print_table, write_json

MASTERS, HOSTS = 3, 6
LOG_LINES = 12
PLANTED = ("lost_removal", "stale")
FAULTS = (
    "kill master",
    "stop master",
    "kill node",
    "stop node",
    "stop etcd",
    "cut masters",
    "cut host",
    "cut node",
    "cut etcd",
    "promote",
)
PLANTED_S = 20.0
ROUND_S = 10.0
KEYS = 8  # of a round
KEPT_ROUNDS = 5  # whose keys are read again in the end
FAULT_EVERY_S = (1.0, 5.0)
BACK_AFTER_S = 4.0  # a node that was away has joined again, and dropped what it had missed
WAIT_S = 120.0
PROMOTE_S = 15.0
TOKEN = "of this benchmark, and of no other use"
OWN = {"MOONPOOL_CLUSTER_TOKEN": TOKEN}
MOONPOOL = [PYTHON, "-m", "moonpool"]


class Away(NamedTuple):
    """From when to when a host's own node was away."""

    host: int
    begin_s: float
    end_s: float


class Pool:
    """masters: of each range. only: a fault of FAULTS; "": any."""

    def __init__(
        self,
        folder: Path,
        hosts: int,
        masters: int,
        planted: str,
        stack: ExitStack,
        *,
        ranges: int = 1,
        only: str = "",
    ) -> None:
        self._folder, self._stack = folder, stack
        self._ranges, self._of_range, self._only = ranges, masters, only
        self._hosts, self._masters = range(hosts), range(masters * ranges)
        self._etcd_ports = free_port(), free_port()
        self._listen = [f"127.0.0.1:{free_port()}" for _ in self._masters]
        self._http = [f"127.0.0.1:{free_port()}" for _ in self._masters]
        self._node_listen = [f"127.0.0.1:{free_port()}" for _ in self._hosts]
        self._node_http = [f"127.0.0.1:{free_port()}" for _ in self._hosts]
        self._start_lines()
        self._etcd = self._start_etcd()
        self._master = [self._start_master(number) for number in self._masters]
        self._node = [self._start_node(host) for host in self._hosts]
        self.wait_well()
        self.clients = [self._start_client(host, planted) for host in self._hosts]
        self.away: list[Away] = []
        self.told: list[str] = []
        self.happened: Counter[str] = Counter()

    def _start_lines(self) -> None:
        """To etcd from each master; to each master from the others and from each host; to each node."""
        targets = [f"127.0.0.1:{self._etcd_ports[0]}" for _ in self._masters]
        self._of_peer = len(targets)
        targets += self._listen
        self._of_host = len(targets)
        targets += [self._listen[master] for _ in self._hosts for master in self._masters]
        self._of_node = len(targets)
        targets += self._node_listen
        self._lines = Talker(PYTHON, "benchmarks.history.lines", targets, self._folder / "lines.log")
        self._stack.callback(self._lines.close)
        self._address = list(self._lines.receive(WAIT_S))
        self._cut: set[int] = set()

    def _host_lines(self, host: int) -> list[int]:
        first = self._of_host + host * len(self._masters)
        return list(range(first, first + len(self._masters)))

    def _start_etcd(self) -> Process:
        program = shutil.which("etcd")
        if program is None:
            raise Failed("etcd is not installed: apt install etcd-server")
        client, peer = (f"http://127.0.0.1:{port}" for port in self._etcd_ports)
        command = [program, "--data-dir", str(self._folder / "etcd"), "--unsafe-no-fsync"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"default={peer}"]
        return self._started(command, "etcd", {})

    def _start_master(self, number: int) -> Process:
        where = ["--listen", self._listen[number], "--http", self._http[number]]
        where += ["--election", f"etcd://{self._address[number]}"]
        where += ["--range", f"{number // self._of_range}/{self._ranges}"]
        extra = OWN | {"MOONPOOL_MASTER_ADVERTISE": self._address[self._of_peer + number]}
        return self._started([*MOONPOOL, "master", *where], f"master{number}", extra)

    def _start_node(self, host: int) -> Process:
        runtime = self._folder / str(host)
        runtime.mkdir(mode=0o700, exist_ok=True)
        extra = OWN | {
            "MOONPOOL_NODE_HOST_ID": f"host{host}",
            "MOONPOOL_RUNTIME_DIR": str(runtime),
            "MOONPOOL_NODE_ADVERTISE": self._address[self._of_node + host],
        }
        lines = self._host_lines(host)
        firsts = range(0, len(lines), self._of_range)
        of_ranges = [lines[first : first + self._of_range] for first in firsts]
        masters = ";".join(",".join(self._address[line] for line in each) for each in of_ranges)
        where = ["--listen", self._node_listen[host], "--http", self._node_http[host], "--master", masters]
        return self._started(
            [*MOONPOOL, "node", "--name", f"node{host}", "--dram", "64MiB", *where], f"node{host}", extra
        )

    def _started(self, command: list[str | Path], name: str, extra: dict[str, str]) -> Process:
        process = Process(command, self._folder / f"{name}-{time.monotonic():.3f}.log", extra=extra)
        self._stack.callback(process.stop)
        return process

    def _start_client(self, host: int, planted: str) -> Talker:
        extra = OWN | {"MOONPOOL_RUNTIME_DIR": str(self._folder / str(host))}
        log = self._folder / f"client{host}.log"
        client = Talker(PYTHON, "benchmarks.history.client", [str(host), planted], log, extra)
        self._stack.callback(client.close)
        client.wait_ready()
        return client

    # ---- what happens

    def faults(self, rng: random.Random) -> Iterator[float]:
        """One after the other, each healed some seconds later; yields how long to wait for the next step."""
        kinds: list[Callable[[random.Random], object]] = [
            getattr(self, f"_{fault.replace(' ', '_')}") for fault in FAULTS if self._only in ("", fault)
        ]
        while True:
            kind = rng.choice(kinds)
            with self._fault(kind, rng):
                yield rng.uniform(0.2, 4.0)
            yield rng.uniform(*FAULT_EVERY_S)

    @contextmanager
    def _fault(self, kind: Callable[[random.Random], object], rng: random.Random) -> Iterator[None]:
        begin_s = time.monotonic()
        what = kind.__name__.strip("_").replace("_", " ")
        self.happened[what] += 1
        heal, host = kind(rng)  # type: ignore[misc]
        try:
            yield
        finally:
            heal()
            where = "" if host is None else f" of host {host}"
            self.told.append(f"  {begin_s:.4f} to {time.monotonic():.4f}  {what}{where}")
            if host is not None:
                self.away.append(Away(host, begin_s, time.monotonic() + BACK_AFTER_S))

    def _kill_master(self, rng: random.Random) -> object:
        number = rng.choice(self._masters)
        self._master[number].kill()

        def heal() -> None:
            self._master[number] = self._start_master(number)

        return heal, None

    def _stop_master(self, rng: random.Random) -> object:
        return self._stopped(self._master[rng.choice(self._masters)]), None

    def _stop_etcd(self, _: random.Random) -> object:
        return self._stopped(self._etcd), None

    def _kill_node(self, rng: random.Random) -> object:
        host = rng.choice(self._hosts)
        self._node[host].kill()

        def heal() -> None:
            self._node[host] = self._start_node(host)

        return heal, host

    def _stop_node(self, rng: random.Random) -> object:
        host = rng.choice(self._hosts)
        return self._stopped(self._node[host]), host

    def _promote(self, rng: random.Random) -> object:
        following = [
            self._http[number]
            for number in self._masters
            if metric(self._http[number], "master_is_following")
        ]
        if following:
            url = f"http://{rng.choice(following)}"
            asked = self._started([*MOONPOOL, "promote", "--graceful", "--url", url], "promote", OWN)
            give_up_s = time.monotonic() + PROMOTE_S  # it fails where something else happens meanwhile
            while asked.is_running and time.monotonic() < give_up_s:
                time.sleep(0.05)
        return lambda: None, None

    @staticmethod
    def _stopped(process: Process) -> Callable[[], None]:
        os.kill(process.pid, signal.SIGSTOP)
        return lambda: os.kill(process.pid, signal.SIGCONT)

    def _cut_masters(self, rng: random.Random) -> object:
        return self._cut_off([self._of_peer + rng.choice(self._masters)]), None

    def _cut_etcd(self, rng: random.Random) -> object:
        return self._cut_off([rng.choice(self._masters)]), None

    def _cut_host(self, rng: random.Random) -> object:
        host = rng.choice(self._hosts)
        lines = self._host_lines(host)
        return self._cut_off(rng.sample(lines, rng.randint(1, len(lines)))), host

    def _cut_node(self, rng: random.Random) -> object:
        return self._cut_off([self._of_node + rng.choice(self._hosts)]), None

    def _cut_off(self, lines: list[int]) -> Callable[[], None]:
        self._cut.update(lines)
        self._lines.ask({"cut": sorted(self._cut)})

        def heal() -> None:
            self._cut.difference_update(lines)
            self._lines.ask({"cut": sorted(self._cut)})

        return heal

    def wait_well(self) -> None:
        """Of each range one owner with a whole standby, which all nodes have joined."""
        give_up_s = time.monotonic() + WAIT_S
        while True:
            whole = [metric(http, "master_standby_is_whole") for http in self._http]
            joined = [metric(http, "node_masters_joined") for http in self._node_http]
            if sum(whole) == self._ranges and all(n == 2 * self._ranges for n in joined):
                return
            if time.monotonic() > give_up_s:
                owners = [metric(http, "master_is_owner") for http in self._http]
                for log in sorted(self._folder.rglob("*.log")):
                    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                    print(f"{log.name}:", *tail, sep="\n  ", file=sys.stderr)
                raise Failed(
                    f"the pool is not well within {WAIT_S:g} s: of masters {owners} are owners and {whole} "
                    f"have a whole standby; nodes have joined {joined} of them, each {2 * self._ranges} when "
                    f"all is well; the ends of their logs stand above"
                )
            time.sleep(0.2)

    # ---- what clients do

    def round(self, number: int, seed: int, faults: Iterator[float] | None) -> list[Operation]:
        keys = [f"{number} {i}" for i in range(KEYS)]
        for client in self.clients:
            client.tell({"keys": keys, "seconds": ROUND_S, "seed": seed + number})
        end_s = time.monotonic() + ROUND_S
        while faults is not None and time.monotonic() < end_s:
            time.sleep(max(0.0, min(next(faults), end_s - time.monotonic())))
        return [Operation(*row) for client in self.clients for row in client.receive(ROUND_S + WAIT_S)]

    def read_all(self, keys: list[str]) -> list[Operation]:
        found = []
        for _ in range(2):
            for client in self.clients:
                found += [Operation(*row) for row in client.ask({"read": keys}, WAIT_S)]
        return found

    def counts(self, operation: Operation) -> bool:
        """Not what a client read while its own node was away."""
        return operation.kind != GET or not any(
            away.host == operation.client
            and away.begin_s <= operation.end_s
            and operation.begin_s <= away.end_s
            for away in self.away
        )


class Outcome(NamedTuple):
    operations: int
    acknowledged: int
    found: list[Violation]
    happened: Counter[str]
    explained: list[str]


EXPLAINED_MAX = 5


def explain(found: list[Violation], operations: list[Operation], faults: list[str]) -> list[str]:
    """Of some violations all that was done with the two values, and what happened meanwhile."""
    lines = []
    for each in found[:EXPLAINED_MAX]:
        lines.append(f"key {each.key}: {each.what}, {each.value} and not {each.instead_of}")
        own = [
            one for one in operations if one.key == each.key and one.value in (each.value, each.instead_of)
        ]
        lines += [
            f"  {one.begin_s:.4f} to {one.end_s:.4f}  client {one.client} {one.kind} {one.value} "
            f"-> {one.outcome}"
            for one in sorted(own, key=lambda one: one.begin_s)
        ]
    return lines + (faults if found else [])


def play(
    folder: Path,
    *,
    minutes: float,
    seed: int,
    hosts: int,
    masters: int,
    planted: str = "",
    ranges: int = 1,
    only: str = "",
) -> Outcome:
    folder.mkdir()
    with ExitStack() as stack:
        pool = Pool(folder, hosts, masters, planted, stack, ranges=ranges, only=only)
        rng = random.Random(seed)
        faults = None if planted else pool.faults(rng)
        rounds = max(1, round(minutes * 60 / ROUND_S))
        operations: list[Operation] = []
        found: list[Violation] = []
        kept: list[Operation] = []
        for number in range(rounds):
            of_round = pool.round(number, seed, faults)
            operations += of_round
            kept += of_round
            if number % 6 == 5:
                print(
                    f"{number + 1} of {rounds} rounds, {len(operations):,} operations",
                    file=sys.stderr,
                    flush=True,
                )
        if faults is not None:
            faults.close()  # type: ignore[attr-defined]
        pool.wait_well()
        time.sleep(BACK_AFTER_S)
        healed_s = time.monotonic()
        last = [
            f"{number} {i}" for number in range(max(0, rounds - KEPT_ROUNDS), rounds) for i in range(KEYS)
        ]
        operations += pool.read_all(last)
        found = violations(filter(pool.counts, operations), healed_s)
        acknowledged = sum(1 for one in operations if one.kind != GET and one.outcome != "unknown")
        explained = explain(found, operations, pool.told)
        return Outcome(len(operations), acknowledged, found, pool.happened, explained)


def metric(http: str, name: str) -> int:
    """0 where the page does not answer."""
    try:
        with urllib.request.urlopen(f"http://{http}/metrics", timeout=2) as page:
            text = page.read().decode()
    except OSError:
        return 0
    found = re.search(rf"^moonpool_{name} (\S+)", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def main() -> None:
    parser = make_parser(__doc__, "half a minute, 3 nodes and 2 masters")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="default: 30")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: one by chance")
    parser.add_argument("--plant", choices=PLANTED, default="", help="what the clients lie about")
    parser.add_argument("--ranges", type=int, default=1, metavar="R", help="of the keys; default: 1")
    parser.add_argument("--only", choices=FAULTS, default="", help="the one fault that happens")
    options = parser.parse_args()
    end_on_sigterm()
    seed = options.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", file=sys.stderr)
    minutes, hosts, masters = (0.5, 3, 2) if options.quick else (options.minutes, HOSTS, MASTERS)
    of_ranges = f" of each of {options.ranges} ranges" if options.ranges > 1 else ""
    rows = []
    try:
        with tempfile.TemporaryDirectory(prefix="histories-") as name:
            if not options.plant:
                outcome = play(
                    Path(name) / "0",
                    minutes=minutes,
                    seed=seed,
                    hosts=hosts,
                    masters=masters,
                    ranges=options.ranges,
                    only=options.only,
                )
                for line in outcome.explained:
                    print(line, file=sys.stderr)
                told = ", ".join(f"{what} {times}" for what, times in sorted(outcome.happened.items()))
                print(f"faults: {told}", file=sys.stderr)
                rows.append(
                    Row(
                        f"violations in {outcome.operations:,} operations, {outcome.acknowledged:,} "
                        f"acknowledged writes, {outcome.happened.total()} faults "
                        f"[{masters} masters{of_ranges}, {hosts} nodes, "
                        f"{minutes:g} min, seed {seed}]",
                        len(outcome.found),
                        "",
                        {},
                        0,
                        "none",
                        not outcome.found,
                    )
                )
            wanted = [options.plant] if options.plant else PLANTED
            caught = 0
            for mistake in wanted:
                lied = play(
                    Path(name) / mistake,
                    minutes=PLANTED_S / 60,
                    seed=seed,
                    hosts=3,
                    masters=2,
                    planted=mistake,
                )
                caught += bool(lied.found)
            rows.append(
                Row(
                    f"planted mistakes that the checker finds [{', '.join(wanted)}]",
                    caught,
                    "",
                    {},
                    len(wanted),
                    f"{len(wanted)}",
                    caught == len(wanted),
                )
            )
    except Failed as error:
        sys.exit(f"histories: {error}")
    print_table("real processes, killed and cut off", rows)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
