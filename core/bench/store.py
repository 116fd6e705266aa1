"""`moonpool bench store`: put, get, exists and longest_prefix against one node."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from moonpool.core.bench import control, load
from moonpool.core.bench.load import Gauge
from moonpool.core.config import paths
from moonpool.core.errors import CorruptObject, Error, InvalidArgument, Unavailable
from moonpool.core.store.store import Store
from moonpool.core.store.types import Presence, PutStatus

VERBS = ("put", "get", "exists", "longest_prefix")
START_TIMEOUT_S = 30.0
KEYS_MAX = 16384  # of each thread
_SHARE = 4  # the objects of all threads fill at most a quarter of the node


@dataclass(frozen=True)
class Plan:
    """One row. size: bytes of an object; batch: keys of one call."""

    verb: str
    size: int
    batch: int = 1
    threads: int = 1
    seconds: float = 5.0
    verify: bool = False


@dataclass
class Row:
    """What was measured. An operation is a call; the CPU seconds are for a million keys, of this process and
    of the node's.
    """

    verb: str
    size: int
    batch: int
    threads: int
    seconds: float
    operations: int
    keys_per_s: float
    gb_per_s: float
    p50_us: float
    p99_us: float
    cpu_s_per_million: float
    node_cpu_s_per_million: float
    verified_bytes: int
    interrupted: bool = False


class Bench:
    """A node, and how to open stores over it."""

    def __init__(self, open_store: Callable[[], Store], arena_bytes: int, node_pid: int | None) -> None:
        self.open_store = open_store
        self.arena_bytes = arena_bytes
        self._node_pid = node_pid

    def run(self, plan: Plan, on_second: Callable[[float, int], None]) -> Row:
        """Measures one row; its objects are removed afterwards. Raises Unavailable when the node is lost."""
        workers = [_Worker(self, plan, number) for number in range(plan.threads)]
        try:
            for worker in workers:
                worker.prepare()
            node_before_s, before_s = self._node_cpu_s(), time.process_time()
            outcome = load.run(workers, plan.seconds, on_second)
            cpu_s, node_cpu_s = time.process_time() - before_s, self._node_cpu_s() - node_before_s
            verified = sum(worker.verified() for worker in workers) if plan.verify else 0
        finally:
            for worker in workers:
                worker.clean_up()
        keys = outcome.operations * plan.batch
        per_million = 1e6 / keys if keys else 0.0
        moved = keys * plan.size / 1e9 / outcome.seconds if plan.verb in ("put", "get") else 0.0
        return Row(
            plan.verb,
            plan.size,
            plan.batch,
            plan.threads,
            outcome.seconds,
            outcome.operations,
            keys / outcome.seconds,
            moved,
            outcome.p50_us,
            outcome.p99_us,
            cpu_s * per_million,
            node_cpu_s * per_million,
            verified,
            outcome.interrupted,
        )

    def _node_cpu_s(self) -> float:
        if self._node_pid is None:  # it is ours, and counted there
            return 0.0
        with suppress(OSError):
            return load.cpu_seconds([self._node_pid])
        return 0.0


class _Worker:
    """One thread, with a store and keys of its own."""

    def __init__(self, bench: Bench, plan: Plan, number: int) -> None:
        self._plan = plan
        self._store = bench.open_store()
        room = bench.arena_bytes // _SHARE // plan.threads // plan.size
        count = min(KEYS_MAX, room) // plan.batch * plan.batch
        if count == 0:
            self._store.close()
            raise InvalidArgument(
                f"{plan.threads} threads x {plan.batch} objects of {plan.size} bytes do not fit into a "
                f"quarter of the node's {bench.arena_bytes} bytes: lower --size, --batch or --threads",
                operation="bench",
            )
        self._keys = [b"%d/%d" % (number, index) for index in range(count)]
        self._data = bytes(control.pattern(number, plan.size).data)
        self._into = [bytearray(plan.size) for _ in range(plan.batch)]
        self._checked = 0

    def prepare(self) -> None:
        """Stores the objects that are to be found; a put is to replace some too."""
        for keys in self._batches():
            self._put(keys)

    def __call__(self, gauge: Gauge) -> None:
        operation = getattr(self, f"_{self._plan.verb}")
        clock = time.perf_counter_ns
        for keys in cycle(list(self._batches())):
            began = clock()
            operation(keys)
            gauge.add(clock() - began)
            if self._plan.verify and self._plan.verb == "get":
                self._compare(self._into)
            if gauge.stop:
                return

    def verified(self) -> int:
        """Bytes that were compared: those of each get, or, after puts, all objects."""
        if self._plan.verb == "put":
            for keys in self._batches():
                self._get(keys)
                self._compare(self._into)
        return self._checked

    def clean_up(self) -> None:
        with suppress(Error):
            self._store.remove(self._keys)
        self._store.close()

    def _batches(self) -> Iterator[list[bytes]]:
        for at in range(0, len(self._keys), self._plan.batch):
            yield self._keys[at : at + self._plan.batch]

    def _put(self, keys: list[bytes]) -> None:
        for result in self._store.put(keys, [self._data] * len(keys), replace=True):
            if result.status is not PutStatus.STORED:
                raise Unavailable(f"the node refused a put: {result}", operation="bench")

    def _get(self, keys: list[bytes]) -> None:
        if None in self._store.get(keys, self._into):
            raise Unavailable(
                "an object was evicted: the node is too small, or others use it", operation="bench"
            )

    def _exists(self, keys: list[bytes]) -> None:
        if Presence.UNKNOWN in self._store.exists(keys):
            raise Unavailable("the node does not answer", operation="bench")

    def _longest_prefix(self, keys: list[bytes]) -> None:
        prefix = self._store.longest_prefix(keys)
        if prefix.why:
            raise Unavailable(prefix.why, operation="bench")
        if prefix.pin is not None:
            prefix.pin.release()

    def _compare(self, found: list[bytearray]) -> None:
        for one in found:
            if one != self._data:
                raise CorruptObject("a get gave wrong bytes", operation="bench")
            self._checked += len(one)
            one[:8] = bytes(min(8, len(one)))  # the next get must write it anew


@contextmanager
def running_node(socket_path: str | None, token: bytes | None) -> Iterator[Bench]:
    """A node that already runs; None: the host's first one. Objects go into a namespace of their own."""
    namespace = f"bench-{secrets.token_hex(8)}"
    path = socket_path or str(paths.default_node_socket())

    def open_store() -> Store:
        return Store(path, namespace=namespace, token=token)

    with open_store() as store:
        yield Bench(open_store, store.stat()["arena_bytes"], _owner(path))


@contextmanager
def own_node(arena_bytes: int) -> Iterator[Bench]:
    """A node in a process of its own, gone afterwards."""
    token = secrets.token_hex(16)
    env = {name: value for name, value in os.environ.items() if name != paths.TOKEN_FILE_VARIABLE}
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "moonpool", "node", "--http", "off"),
                *("--dram", str(arena_bytes), "--socket", f"{folder}/node.sock"),
            ],
            env={"MOONPOOL_LOG_LEVEL": "warning"}
            | env
            | {paths.TOKEN_VARIABLE: token, paths.RUNTIME_DIR_VARIABLE: folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_until_served(process, Path(folder, "node.sock"), token.encode())
            with running_node(f"{folder}/node.sock", token.encode()) as bench:
                yield bench
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@contextmanager
def embedded_node(arena_bytes: int) -> Iterator[Bench]:
    """A node inside this process, on a socket of its own, so that each thread has its connection."""
    from moonpool import _native
    from moonpool.core.config.native_settings import node_settings

    token = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        server = _native.Server(f"{folder}/node.sock", [("default", arena_bytes)], token, node_settings())
        server.start()
        try:
            yield Bench(lambda: Store(f"{folder}/node.sock", token=token), arena_bytes, None)
        finally:
            server.stop()


def _wait_until_served(process: subprocess.Popen[bytes], path: Path, token: bytes) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            Store(str(path), token=token).close()
            return
        except Unavailable as error:
            code = process.poll()
            if code is not None:
                raise Unavailable(
                    f"the node ended with {code} while it started", operation="bench"
                ) from error
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.02)


def _owner(path: str) -> int | None:
    """The process that listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        credentials: Any = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid or None
