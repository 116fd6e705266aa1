"""What the tests of the store share: nodes and clients in processes of their own, waiting with a deadline."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moonpool import STORED, Presence, Store
from tests.descriptors import speaks

TOKEN = b"the token of these tests"
PUPPET = Path(__file__).with_name("store_puppet.py")
MIB = 1 << 20


def stop_process(pid: int) -> None:
    """SIGSTOP, and waits until all threads stand still: one takes the signal, and others may go on for a
    while where the cores are busy."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(task) == "T" for task in tasks.iterdir()))


def _state(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """The first true value of ``condition``, looked at again and again until the deadline."""
    deadline = time.monotonic() + timeout_s
    nothing = select.poll()
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        nothing.poll(2)  # lets others run; no event ends it


class Puppet:
    """A process of store_puppet.py. It is killed at the end, whatever the test left it doing."""

    script = PUPPET

    def __init__(self, verb: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(self.script), verb, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self, timeout_s: float = 30.0) -> Any:
        """The next thing that it says."""
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, timeout_s), f"it said nothing for {timeout_s} s"
        line = self.process.stdout.readline()  # written whole, so it is all there
        assert line, f"it ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, text: str = "\n") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and waits until it stands still."""
        stop_process(self.pid)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()  # also ends a stopped one
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def rss_bytes(self) -> int:
        """Its own memory, without what it shares with others."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


class NodeProcess(Puppet):
    """A node that can be killed and stopped. ``options``: as of moonpool._native.Server."""

    def __init__(self, socket_path: Path, **options: Any) -> None:
        super().__init__("node", socket_path, TOKEN.decode(), json.dumps(options))
        self.socket_path = socket_path
        assert self.hear() == "ready"

    def metrics(self) -> dict[str, int]:
        self.tell()
        rows: dict[str, int] = self.hear()
        return rows

    def metric(self, name: str) -> int:
        return self.metrics()[name]

    def is_sound(self) -> bool:
        return bool(self.metrics()["integrity"])

    def arena_file(self) -> Path:
        """The memfd of its first tenant, which root and its own user may open."""
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            if link.readlink().name.startswith("memfd:moonpool-arena-"):
                return link
        raise AssertionError("the node has no arena")


class Tensor:
    """What Store uses of a torch tensor."""

    def __init__(self, array: np.ndarray[Any, Any], device: str = "cpu", contiguous: bool = True) -> None:
        self.array = array
        self.device = type("Device", (), {"type": device, "__str__": lambda self: f"{device}:0"})()
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return self._contiguous


INVALID, UNAVAILABLE, AUTH, TIMEOUT, CLOSED, FORKED, PROTOCOL, TOO_LARGE = range(8)  # codes of ERROR


def assert_serves(path: Path) -> None:
    """Another client still puts and gets."""
    with Store(str(path), token=TOKEN) as store:
        key = os.urandom(8)
        assert store.put(key, key) == STORED
        assert store.get(key) == key
        assert store.exists("absent") is Presence.MISS
