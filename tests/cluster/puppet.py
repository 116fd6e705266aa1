"""A client of the pool in a host, in a process of its own that a test drives and may kill at any point.

What it stores is made of the key, a version and a size on both sides (contents()), so that bytes need not
pass through the pipe and a stale, foreign or torn read shows by its checksum.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..core.store_bed import until
from .hosts import Host, clean_environment
from .puppet_process import checksum, contents

T = TypeVar("T")
PROGRAM = Path(__file__).with_name("puppet_process.py")

__all__ = ["Failed", "Puppet", "checksum", "contents", "unless_lost"]


@dataclass
class Failed(Exception):
    """What a call raised in the puppet: the name of the class and the text."""

    name: str
    text: str
    seconds: float


def unless_lost(call: Callable[[], T]) -> T | None:
    """Its result; None where it raises what a store raises for a lost node. Nothing else may happen."""
    try:
        return call()
    except Failed as failed:
        if failed.name not in ("Timeout", "Unavailable"):
            raise
        print(f"after {failed.seconds:.3f} s: {failed.text}")
        return None


class Puppet:
    """``options``: of Store. The store is opened at once unless open=False."""

    def __init__(self, host: Host, *, open: bool = True, **options: Any) -> None:
        self.host = host
        self.log = host.log_dir / f"{host.name}-puppet-{len(host.at_end)}.log"
        with self.log.open("wb") as log:
            self.process = host.namespace.popen(
                [sys.executable, PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**clean_environment(), **host.env},
            )
        host.at_end.append(self.close)
        self.seconds = 0.0  # that the last call took, in the puppet
        self._waiting = False
        if open:
            self.call("open", **options)

    @property
    def pid(self) -> int:
        return self.process.pid

    # ---- calls; each raises Failed with what the store raised

    def put(self, names: Sequence[str], size: int, version: int = 0, **options: Any) -> list[list[Any]]:
        """-> for each [status, reason, replicas]"""
        rows: list[list[Any]] = self.call("put", names=names, size=size, version=version, options=options)
        return rows

    def get(self, names: Sequence[str], size: int | None = None, **options: Any) -> list[list[int] | None]:
        """-> for each [bytes, checksum], or None for a miss. With ``size`` into buffers, else as views."""
        rows: list[list[int] | None] = self.call("get", names=names, size=size, options=options)
        return rows

    def has(
        self, names: Sequence[str], size: int, version: int = 0, *, room: int | None = None, **options: Any
    ) -> bool:
        """Whether it gets all of these, with that content; wrong bytes fail the test. ``room``: of get()'s
        buffers."""
        rows = self.get(names, room, **options)
        for name, row in zip(names, rows, strict=True):
            assert row is None or row == [size, checksum(name, version, size)], f"wrong bytes under {name}"
        return None not in rows

    def exists(self, names: Sequence[str]) -> list[str]:
        """-> hit, miss or unknown, for each"""
        return list(self.call("exists", names=names))

    def longest_prefix(self, names: Sequence[str], **options: Any) -> dict[str, Any]:
        """-> blocks, holders, hosts, tiers, why. The pin is kept, as the last one, until release()."""
        answer: dict[str, Any] = self.call("longest_prefix", names=names, options=options)
        return answer

    def pinned(self, names: Sequence[str]) -> list[list[int] | None]:
        """Reads under the last pin."""
        rows: list[list[int] | None] = self.call("pinned", names=names)
        return rows

    def release(self) -> None:
        self.call("release")

    def hold(self, names: Sequence[str]) -> int:
        """Views that it keeps -> how many there are"""
        return int(self.call("hold", names=names))

    def held(self) -> list[list[int]]:
        """What is in those views now."""
        return list(self.call("held"))

    def remove(self, names: Sequence[str]) -> list[bool | str]:
        """A text: which nodes may still have it."""
        return list(self.call("remove", names=names))

    def list(self, prefix: str = "") -> list[str]:
        return list(self.call("list", prefix=prefix))

    def stat(self) -> dict[str, int]:
        rows: dict[str, int] = self.call("stat")
        return rows

    # ---- the pipe

    def call(self, verb: str, **arguments: Any) -> Any:
        self.begin(verb, **arguments)
        return self.end()

    def begin(self, verb: str, **arguments: Any) -> None:
        """Starts a call; end() gives its result. Between them the test may do its worst."""
        assert not self._waiting
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        self._waiting = True

    def end(self, timeout_s: float = 60.0) -> Any:
        assert self._waiting
        answer = self._hear(timeout_s)
        self._waiting = False
        self.seconds = answer["seconds"]
        if "error" in answer:
            raise Failed(answer["error"], answer["text"], self.seconds)
        return answer["result"]

    def _hear(self, timeout_s: float) -> Any:
        assert self.process.stdout is not None
        poll = select.poll()  # select() knows no descriptor above 1,023
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(timeout_s * 1000), f"the puppet in {self.host.name} said nothing for {timeout_s} s"
        line = self.process.stdout.readline()  # written whole, so it is all there
        assert line, (
            f"the puppet in {self.host.name} ended with {self.process.wait()}: {self.log.read_text()}"
        )
        return json.loads(line)

    # ---- its process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and waits until it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()  # also ends a stopped one
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def until(self, condition: Callable[[Puppet], Any], timeout_s: float = 10.0) -> Any:
        return until(lambda: condition(self), timeout_s)


def replaced_at_once(on_a: Puppet, on_b: Puppet, names: Sequence[str], size: int) -> list[Any]:
    """Two hosts replace the same keys at the same moment. What the first one reads then: of each key one of
    the two values."""
    with ThreadPoolExecutor(2) as pool:
        puts = [pool.submit(on.put, names, size, seed, replace=True) for on, seed in ((on_a, 1), (on_b, 2))]
        for put in puts:
            assert [row[0] for row in put.result()] == ["stored"] * len(names)
    until(lambda: None not in on_a.get(names))
    values: list[Any] = on_a.get(names)
    assert all(
        value in ([size, checksum(name, 1, size)], [size, checksum(name, 2, size)])
        for name, value in zip(names, values, strict=True)
    )
    return values
