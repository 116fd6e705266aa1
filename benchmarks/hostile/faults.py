"""Threads and processes that stand still, and memory that is not there."""

from __future__ import annotations

import itertools
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.hostile.bed import HERE, MIB, TOKEN, LeftOut, Setting, ask, at_most, stopped, until
from benchmarks.processes import PYTHON, environment, free_port
from benchmarks.report import Row
from moonpool import Store
from tests.core.frozen_thread import frozen, thread_of

BYTES = 64 << 10
ASK_S = 5.0


def frozen_threads(setting: Setting) -> list[Row]:
    """The thread that serves is stopped, and no other: until /livez says 503."""
    ports = [free_port() for _ in range(3)]
    words = ["--listen", f"{HERE}:0", "--http", f"{HERE}:{ports[0]}"]
    master = setting.start("master", "master", *words, ready="moonpool master")
    node, _ = setting.node("frozen", "--dram", "16MiB", "--http", f"{HERE}:{ports[1]}")
    _, engine = setting.mock_engine()
    proxy, ports[2] = setting.proxy("--engine", f"http://{HERE}:{engine}")
    return [
        until_503("node's mp-node", thread_of(node.pid, "mp-node"), ports[1]),
        until_503("master's mp-master", thread_of(master.pid, "mp-master"), ports[0]),
        until_503("proxy's own thread", proxy.pid, ports[2]),
        until_503("proxy's moonpool-relay", thread_of(proxy.pid, "moonpool-relay"), ports[2], silent=True),
    ]


def until_503(name: str, thread: int, port: int, *, silent: bool = False) -> Row:
    """silent: the thread is the one that answers, so a probe of a second gets no answer, which is as good."""
    ends = "/livez gets no answer within 1 s" if silent else "/livez is 503"
    until(lambda: ask(port, "GET", "/livez").status == 200, f"/livez of the {name} is 200")
    try:
        with frozen(thread):
            began_s = time.monotonic()
            while time.monotonic() - began_s < 2 * ASK_S:
                try:
                    if ask(port, "GET", "/livez", timeout_s=1.0 if silent else ASK_S).status == 503:
                        break
                except TimeoutError:
                    if silent:
                        break
            took_s = time.monotonic() - began_s
    except PermissionError as error:
        raise LeftOut(str(error)) from error
    return at_most(f"{name} frozen: until {ends}", took_s, 2, "s")


def too_much_memory(setting: Setting) -> list[Row]:
    """`--dram` above what the machine has available, and above the limit of the address space. (A limit of a
    control group needs the right to make one, and is tested with described machines alone.)"""
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    space = 2 << 30

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (space, space))

    return [
        ended("--dram of twice the machine's memory", 2 * total, setting, None),
        ended("--dram of 4 GiB with an address space of 2 GiB", 2 * space, setting, limit),
    ]


def ended(what: str, dram: int, setting: Setting, limit: Callable[[], None] | None) -> Row:
    words = ["--dram", f"{dram // MIB}MiB", "--http", "off", "--socket", str(setting.folder / "large.sock")]
    began_s = time.monotonic()
    done = subprocess.run(
        [PYTHON, "-m", "moonpool", "node", *words],
        env=environment({"MOONPOOL_CLUSTER_TOKEN": TOKEN, "MOONPOOL_RUNTIME_DIR": str(setting.folder)}),
        capture_output=True,
        timeout=60,
        preexec_fn=limit,
        check=False,
    )
    took_s = time.monotonic() - began_s
    good = done.returncode == 2 and not done.stdout and took_s <= 1
    return Row(f"{what}: exit {done.returncode}", took_s, "s", {}, None, "exit 2 within 1 s", good)


def two_stopped(setting: Setting) -> list[Row]:
    """A master and two nodes with hosts of their own; each two of the three are stopped in turn, while a
    client of one node calls one verb after the other."""
    seconds = setting.long(15.0, 3.0)
    listen = f"{HERE}:{free_port()}"
    processes = {
        "master": setting.start(
            "master", "master", "--listen", listen, "--http", "off", ready="moonpool master"
        )
    }
    paths = {}
    for name in ("own node", "remote node"):
        words = ["--dram", "128MiB", "--http", "off", "--listen", f"{HERE}:0", "--master", listen]
        host = {"MOONPOOL_NODE_HOST_ID": name.replace(" ", "-")}
        processes[name], paths[name] = setting.node(name.replace(" ", "-"), *words, extra=host)
    rows = []
    with (
        Store(paths["own node"], token=TOKEN.encode()) as own,
        Store(paths["remote node"], token=TOKEN.encode()) as remote,
    ):
        joined = itertools.count()
        until(
            lambda: own.put(f"joined {next(joined)}", b"x", replicas=2).replicas == 2, "both nodes are joined"
        )
        calls = Calls(own, remote)
        for two in itertools.combinations(processes, 2):
            with stopped([processes[name] for name in two], signal.SIGSTOP, signal.SIGCONT):
                longest_s, verb = calls.longest(seconds)
            rows.append(at_most(f"{two[0]} and {two[1]} stopped: longest call ({verb})", longest_s, 2.0, "s"))
            until(calls.all_well, f"all is well after {two[0]} and {two[1]} went on")
    return rows


class Calls:
    """Verbs about keys of the own node, of the remote one, and new ones."""

    def __init__(self, own: Store, remote: Store) -> None:
        self._own = own
        self._number = itertools.count()
        for number in range(32):
            own.put(f"own {number}", bytes(BYTES))
            remote.put(f"remote {number}", bytes(BYTES))
        until(self.all_well, "the own node finds what the remote one has")

    def all_well(self) -> bool:
        try:
            return all(self._own.get(key) is not None for key in ("own 0", "remote 0"))
        except (ConnectionError, TimeoutError):
            return False  # the first call after a stopped node went on may still be told so

    def longest(self, seconds: float) -> tuple[float, str]:
        """The longest of all calls, and its verb."""
        longest, deadline_s = (0.0, ""), time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            number = next(self._number)
            own, remote, new = f"own {number % 32}", f"remote {number % 32}", f"new {number}"
            verbs: dict[str, Callable[[], object]] = {
                "get of its own": partial(self._own.get, own),
                "get of a remote one": partial(self._own.get, remote),
                "get of none": partial(self._own.get, "no " + new),
                "exists": partial(self._own.exists, [own, remote, new]),
                "longest_prefix": partial(self._own.longest_prefix, [own, remote]),
                "put": partial(self._own.put, new, bytes(BYTES)),
                "remove": partial(self._own.remove, new),
            }
            for verb, call in verbs.items():
                began_s = time.monotonic()
                with suppress(ConnectionError, TimeoutError):
                    call()
                longest = max(longest, (time.monotonic() - began_s, verb))
        return longest
