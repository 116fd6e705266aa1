"""What the tests of take-overs share: `moonpool node` in processes of its own that replace each other, and
two servers of this process, of which the second takes over from the first."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moonpool import STORED, Store, _native
from moonpool.core.config import paths
from moonpool.core.config.native_settings import node_settings
from moonpool.core.service import take_over
from moonpool.core.service.http_get import get_json
from tests.descriptors import speaks

from .master_bed import environment
from .store_bed import MIB, TOKEN

START_S = 60.0
PATIENCE_S = 30.0  # of clients, on a machine that pauses
READY = "moonpool node "


class NodeCommand:
    """`moonpool node NAME`, and those that replace it. arguments: of its command line; killed at the end."""

    def __init__(self, name: str, *arguments: str, dram: str = "32MiB") -> None:
        self.name = name
        command = [sys.executable, "-m", "moonpool", "node", "--name", name, "--host-id", f"host-{name}"]
        self._command = [*command, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments]
        self.dram = dram
        self.processes: list[subprocess.Popen[str]] = []
        self.line = self._start()

    def _popen(self, *arguments: str, dram: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._command, "--dram", dram or self.dram, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            text=True,
        )
        self.processes.append(process)
        return process

    def _start(self, *arguments: str) -> str:
        process = self._popen(*arguments)
        assert process.stdout is not None
        assert speaks(process.stdout, START_S), "the node says nothing"
        line = process.stdout.readline()
        assert line.startswith(READY), (line, process.stderr and process.stderr.read())
        return line

    @property
    def pid(self) -> int:
        return self.processes[-1].pid

    @property
    def http(self) -> str:
        word = next(word for word in self.line.split(", ") if "/metrics" in word)
        return word.partition(";")[0].strip().removesuffix("/metrics")

    @property
    def socket(self) -> Path:
        return paths.node_socket(self.name)

    def replace(self) -> None:
        """Another process takes over; the one before has ended with 0."""
        old = self.processes[-1]
        self.line = self._start("--take-over")
        assert old.wait(START_S) == 0

    def try_to_replace(self, *arguments: str, dram: str = "") -> tuple[int, str]:
        """Exit status of a process that may not take over, and what it says."""
        process = self._popen("--take-over", *arguments, dram=dram)
        self.processes.pop()
        _, said = process.communicate(timeout=START_S)
        return process.returncode, said

    def reserved_bytes(self) -> int:
        reserved: int = get_json(f"{self.http}/health")["memory"]["reserved_bytes"]
        return reserved

    def store(self, **options: Any) -> Store:
        return Store(str(self.socket), token=TOKEN, timeout_s=PATIENCE_S, **options)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


class Load:
    """Threads that put and read all the time over stores of their own, each byte compared. ``objects`` stay
    as they are: a miss of one is a fault."""

    def __init__(self, stores: Sequence[Store], objects: dict[str, bytes]) -> None:
        self.faults: list[str] = []
        self.rounds = [0] * len(stores)
        self._objects = objects
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(i, store), daemon=True) for i, store in enumerate(stores)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, store: Store) -> None:
        rng = random.Random(number)
        keys = list(self._objects)
        while not self._over.is_set() and len(self.faults) < 10:
            try:
                self._round(number, store, rng, keys)
            except Exception as error:
                self.faults.append(repr(error))
            self.rounds[number] += 1

    def _round(self, number: int, store: Store, rng: random.Random, keys: list[str]) -> None:
        key = rng.choice(keys)
        view = store.get(key)
        self._compare(key, view, self._objects[key])
        into = bytearray(len(self._objects[key]))
        if store.get(key, into=into) is None:
            self.faults.append(f"{key} is a miss")
        else:
            self._compare(key, memoryview(into), self._objects[key])
        own = f"own-{number}-{self.rounds[number] % 16}"
        value = rng.randbytes(rng.choice((100, 5_000, 70_000)))
        if store.put(own, value, replace=True) != STORED:
            self.faults.append(f"{own} was not stored")
        self._compare(own, store.get(own), value)

    def _compare(self, key: str, found: memoryview | None, wanted: bytes) -> None:
        if found is None:
            self.faults.append(f"{key} is a miss")
        elif bytes(found) != wanted:
            self.faults.append(f"{key} has other bytes")

    def more(self, rounds: int) -> bool:
        """Whether each has gone through so many rounds since reset()."""
        return min(self.rounds) >= rounds or bool(self.faults)

    def reset(self) -> None:
        self.rounds = [0] * len(self.rounds)

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(START_S)
            assert not thread.is_alive()


class OfferBed:
    """An offer whose node is not there: what becomes of it is noted in ``done``. ``events``: called where the
    node would close its KV events."""

    def __init__(self, name: str = "a") -> None:
        self.path = paths.node_socket(name)
        self.done: list[str] = []
        self.events: Callable[[], None] = lambda: None
        self._file = os.memfd_create("description")
        self._offer = take_over.Offer(
            self.path,
            lambda: (take_over.Facts(take_over.VERSIONS.lowest, os.getpid(), {}, ""), [self._file]),
            give=lambda: (os.dup(self._file), [self._file]),
            take_back=lambda: self.done.append("taken back"),
            close_events=lambda: self.events(),
            let_go=lambda: self.done.append("let go"),
        )

    def find(self) -> take_over.Predecessor:
        found = take_over.find_predecessor(self.path)
        assert found is not None
        return found

    def given(self) -> take_over.Predecessor:
        """A successor that has got all."""
        predecessor = self.find()
        description, numbers = predecessor.take_what_it_has()
        for number in (description, *numbers):
            os.close(number)
        return predecessor

    def close(self) -> None:
        self._offer.close()
        os.close(self._file)


ARGUMENTS = ("listen", "ssd", "master", "host_id", "limits", "data_tls")


def make_server(
    path: Path,
    mib: int = 16,
    predecessor: Any = None,
    tenants: Sequence[tuple[str, int]] = (),
    **options: Any,
) -> _native.Server:
    """tenants: with their bytes; none: the default one with ``mib``. options: settings of the section [node],
    or arguments of the native server."""
    arguments = {name: options.pop(name) for name in ARGUMENTS if name in options}
    sizes = list(tenants) or [("default", mib * MIB)]
    settings = node_settings(**options)
    return _native.Server(str(path), sizes, TOKEN, settings, predecessor=predecessor, **arguments)


def given_copies(server: _native.Server) -> tuple[int, list[int]]:
    """What ``server`` gives, in descriptors of our own."""
    description, numbers = server.give()
    return description, [os.dup(number) for number in numbers]


def replaced(server: _native.Server, path: Path, mib: int = 16, **options: Any) -> _native.Server:
    """Another one in the place of ``server``, which has ended."""
    new = make_server(path, mib, given_copies(server), **options)
    server.let_go()
    new.start()
    return new
