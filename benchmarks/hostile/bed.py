"""What the scenarios share: processes with a token and a folder of their own, requests from a chosen address
of the loopback, memory, rows."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import PYTHON, START_TIMEOUT_S, Failed, Process, free_port
from benchmarks.report import Row

TOKEN = "of this benchmark, and of no other use"
MIB = 1 << 20
COMPLETIONS = "/v1/completions"
HERE = "127.0.0.1"


class LeftOut(Exception):
    """This machine does not allow the scenario; the message says why."""


@dataclass(frozen=True)
class Setting:
    """folder: for logs and sockets, empty. quick: the short form. stack: what was started ends with it."""

    folder: Path
    quick: bool
    stack: ExitStack

    def long(self, full: float, quick: float) -> float:
        return quick if self.quick else full

    def start(
        self, name: str, *words: str | Path, ready: str = "", extra: Mapping[str, str] | None = None
    ) -> Process:
        """`moonpool` with these words; returns when its log has ``ready``."""
        own = {"MOONPOOL_CLUSTER_TOKEN": TOKEN, "MOONPOOL_RUNTIME_DIR": str(self.folder)}
        command = [PYTHON, "-m", "moonpool", *words]
        process = Process(command, self.folder / f"{name}.log", extra={**own, **(extra or {})})
        self.stack.callback(process.stop)
        if ready:
            process.wait_for_output(ready)
        return process

    def proxy(self, *words: str | Path, extra: Mapping[str, str] | None = None) -> tuple[Process, int]:
        """A proxy that serves, and its port."""
        port = free_port()
        listen = ["--listen", f"{HERE}:{port}"]
        process = self.start(
            f"proxy-{port}", "proxy", *listen, *words, ready=f"http://{HERE}:{port}", extra=extra
        )
        return process, port

    def node(
        self, name: str, *words: str | Path, extra: Mapping[str, str] | None = None
    ) -> tuple[Process, str]:
        """A node that serves, and the path of its socket."""
        path = self.folder / f"{name}.sock"
        process = self.start(
            name, "node", "--name", name, "--socket", path, *words, ready="moonpool node", extra=extra
        )
        return process, str(path)

    def mock_engine(self, *words: str) -> tuple[Process, int]:
        """A real process of the mock engine, and its port."""
        port = free_port()
        process = self.start(f"engine-{port}", "mock-engine", "--port", str(port), *words)
        process.wait_for_port(socket.AF_INET, (HERE, port))
        return process, port


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    source: str = HERE,
    timeout_s: float = 60.0,
) -> Reply:
    """One request on a connection of its own, from the loopback's address ``source``. Raises OSError,
    HTTPException."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(HERE, port, timeout=timeout_s, source_address=(source, 0))
    try:
        connection.request(method, path, data, dict(headers or {}))
        answer = connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def memory(pid: int, what: str) -> int:
    """Bytes by their name in /proc/PID/status: VmRSS; VmHWM, its highest; RssAnon, without shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) << 10
    raise Failed(f"process {pid} has no {what}")


def until(condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Raises Failed, with ``what`` did not come."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise Failed(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)


@contextmanager
def stopped(processes: Sequence[Process], stop: int, go: int) -> Iterator[None]:
    """Inside, they have got the signal ``stop``; afterwards ``go``."""
    for process in processes:
        os.kill(process.pid, stop)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process.pid, go)


def at_most(work: str, value: float, most: float, unit: str) -> Row:
    return Row(work, value, unit, {}, None, f"at most {most:g} {unit}".rstrip(), value <= most)


def none_of(work: str, count: int) -> Row:
    """A count that has to be 0."""
    return Row(work, count, "", {}, None, "0", count == 0)
