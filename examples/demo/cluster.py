"""`moonpool up` with one node or two, a prefill and a decode engine and the proxy; a child of ours that never
outlives us.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from model_choice import Model

PREFILL, DECODE = ENGINES = ("prefill", "decode")  # each is its name and its role
NODES = ("a", "b")  # of the engines in turn, where there are two
ARENA = "512MiB"
READY_TIMEOUT_S = 900.0
PROGRESS_S = 10.0
STOP_S = 40.0
PR_SET_CHILD_SUBREAPER = 36

Address = tuple[str, int]


class StartFailed(Exception):
    """Something did not come up; the text says what, and where its log is."""


def held_port(stack: ExitStack, preferred: int = 0) -> int:
    """The preferred port when nobody listens there, else any free one. The kernel gives it to nobody else as
    long as ``stack`` is open; a server that sets SO_REUSEADDR may bind there.
    """
    for port in (preferred, 0):
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            continue
        return int(holder.getsockname()[1])
    raise StartFailed("no free TCP port on 127.0.0.1")


def answers(address: Address, path: str = "/health") -> bool:
    """Whether GET path answers 200 there."""
    connection = http.client.HTTPConnection(*address, timeout=2.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Cluster:
    """Context manager: nothing runs before it, nothing is left after it."""

    def __init__(self, model: Model, cpu: bool, nodes: int = 1) -> None:
        # Of its own, so that it meets no other node of this machine; short, because a socket's path is
        # limited.
        self.folder = Path(tempfile.mkdtemp(prefix="moonpool-demo-", dir="/tmp"))
        self.runtime = self.folder / "run"
        self.runtime.mkdir(mode=0o700)
        held = self._held = ExitStack()
        self.proxy: Address = ("127.0.0.1", held_port(held, 8080))
        names = ["node"] if nodes == 1 else [f"node-{name}" for name in NODES]
        self.nodes: dict[str, Address] = {
            name: ("127.0.0.1", held_port(held, 0 if index else 7711)) for index, name in enumerate(names)
        }
        self.master: Address | None = ("127.0.0.1", held_port(held, 7701)) if nodes > 1 else None
        self.engines: dict[str, Address] = {name: ("127.0.0.1", held_port(held)) for name in ENGINES}
        self.config = self.folder / "up.toml"
        self.config.write_text(self._toml(model, cpu))
        self.logs = self.folder / "logs"
        self._process: subprocess.Popen[bytes] | None = None

    def _toml(self, model: Model, cpu: bool) -> str:
        """JSON strings and lists of strings are TOML too."""
        lines = [
            "[node]",
            f"dram = {json.dumps(ARENA)}",
            *([] if self.master else [f"http = {json.dumps(_text(self.nodes['node']))}"]),
            "",
            "[proxy]",
            f"listen = {json.dumps(_text(self.proxy))}",
            "",
            "[up]",
            f"log_dir = {json.dumps(str(self.folder / 'logs'))}",
            f"ready_timeout_s = {READY_TIMEOUT_S}",
            "start_attempts_max = 1",  # what does not start the first time should be seen at once
            *(self._cluster_toml(self.master) if self.master else []),
        ]
        for node, (name, (host, port)) in zip(NODES, self.engines.items(), strict=True):
            environment = ", ".join(
                f"{key} = {json.dumps(text)}" for key, text in model.environment(cpu).items()
            )
            lines += [
                "",
                "[[up.engine]]",
                f"name = {json.dumps(name)}",
                f"model = {json.dumps(model.source)}",
                f'host = "{host}"',
                f"port = {port}",
                f"role = {json.dumps(name)}",
                *([f"node = {json.dumps(node)}"] if self.master else []),
                f"args = {json.dumps(model.arguments(cpu))}",
                f"env = {{ {environment} }}",
            ]
        return "\n".join(lines) + "\n"

    def _cluster_toml(self, master: Address) -> list[str]:
        """Two nodes that count as two hosts: what one reads of the other has to come over TCP."""
        lines = [
            "master = true",
            "",
            "[master]",
            'listen = "127.0.0.1:0"',
            f"http = {json.dumps(_text(master))}",
        ]
        for name, (process, address) in zip(NODES, self.nodes.items(), strict=True):
            lines += [
                "",
                "[[up.node]]",
                f"name = {json.dumps(name)}",
                f"http = {json.dumps(_text(address))}",
                'listen = "127.0.0.1:0"',
                f"host_id = {json.dumps(f'host of {process}')}",
            ]
        return lines

    def __enter__(self) -> Cluster:
        _adopt_orphans()
        temporary = self.folder / "tmp"  # engines leave sockets behind in theirs
        temporary.mkdir()
        env = {**os.environ, "MOONPOOL_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(temporary)}
        with (self.folder / "up.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moonpool", "up", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Takes everything down. The folder stays when something went wrong, for its logs."""
        failed = kind is not None and issubclass(kind, Exception)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                failed = True
        _kill_descendants()
        self._held.close()
        if not failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_until_ready(self, say: Callable[[str], None]) -> None:
        """Says what got ready, and every ten seconds what is still awaited. Raises StartFailed."""
        master = {"master": self.master} if self.master else {}
        waiting = {**master, **self.nodes, **self.engines, "proxy": self.proxy}
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        next_word_s = time.monotonic() + PROGRESS_S
        while waiting:
            for name in [name for name, address in waiting.items() if answers(address)]:
                say(f"    {name} is ready at {waiting[name][0]}:{waiting[name][1]}")
                del waiting[name]
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise StartFailed(
                    f"{', '.join(waiting)}: not ready after {READY_TIMEOUT_S:.0f} s\n{self.tails()}"
                )
            if waiting and time.monotonic() > next_word_s:
                say(f"    waiting for {', '.join(waiting)}")
                next_word_s += PROGRESS_S
            time.sleep(0.2)

    def check_alive(self) -> None:
        if self._process is not None and (code := self._process.poll()) is not None:
            raise StartFailed(f"`moonpool up` ended with {code}\n{self.tails()}")

    def tails(self) -> str:
        """The ends of all logs, for the person who has to find out."""
        parts = []
        for path in [self.folder / "up.log", *sorted(self.logs.glob("*"))]:
            if path.is_file():
                lines = path.read_text(errors="replace").splitlines()[-15:]
                parts.append(f"--- the end of {path}\n" + "\n".join(lines))
        return "\n".join(parts)


def _text(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _adopt_orphans() -> None:
    """Processes whose parent dies become our children, so that none escapes _kill_descendants."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_descendants() -> None:
    """SIGKILL to everything below us, until nothing is left. There is nothing after a clean stop."""
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        below = _descendants()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


def _descendants() -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(after_name[1])
    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [pid for pid, parent in parents.items() if parent in level]
        found += level
    return found
