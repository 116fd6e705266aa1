"""Child processes of the benchmark: started with a log, waited for with a deadline, always taken down."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 180.0
# For an interpreter that has no moonpool: this checkout's, as far as it needs the standard library alone.
SOURCES = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


class Failed(Exception):
    """A process ended, was silent for too long, or said that it failed."""


def environment(extra: dict[str, str]) -> dict[str, str]:
    """This checkout on the path, compiled bytecode kept."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**inherited, "PYTHONPATH": path, **extra}


class Process:
    """One child; its output goes to a log whose end is quoted when it fails."""

    def __init__(
        self,
        command: Sequence[str | Path],
        log: Path,
        *,
        extra: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.command = [str(word) for word in command]
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(extra or {}),
                cwd=ROOT,
                pass_fds=pass_fds,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def failed(self, what: str) -> Failed:
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
        return Failed(f"{Path(self.command[0]).name} {what}\n{tail}")

    def wait_for_output(self, text: str) -> None:
        """Returns when its log has ``text``. Raises Failed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while text not in self.log.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise self.failed(f"did not say {text!r}")
            time.sleep(0.02)

    def wait_for_port(self, family: int, address: str | tuple[str, int]) -> None:
        """Returns when something listens at ``address``. Raises Failed."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process.poll() is not None:
                raise self.failed(f"ended with {self._process.returncode} while it started")
            with socket.socket(family) as probe:
                if probe.connect_ex(address) == 0:
                    return
            if time.monotonic() > deadline_s:
                raise self.failed(f"did not listen within {START_TIMEOUT_S:g} s")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = 3) -> None:
        """SIGTERM, and SIGKILL after ``timeout_s``."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Talker:
    """A child that answers JSON lines on a socket: its standard output belongs to whatever it imports."""

    def __init__(
        self,
        python: str | Path,
        module: str,
        arguments: Sequence[str],
        log: Path,
        extra: dict[str, str] | None = None,
        prefix: Sequence[str | Path] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [*prefix, python, "-m", module, str(theirs.fileno()), *arguments]
            self.process = Process(command, log, extra=extra, pass_fds=[theirs.fileno()])
        self._socket = ours
        self._arrivals = select.poll()
        self._arrivals.register(ours, select.POLLIN)
        self._pending = b""

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Reads the first line, which says that the child is ready. Raises Failed."""
        self.receive(timeout_s)

    def ask(self, request: object, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The answer to ``request``. Raises Failed, also for an answer that is {"error": text}."""
        self.tell(request)
        return self.receive(timeout_s)

    def tell(self, request: object) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def receive(self, timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            left_s = deadline_s - time.monotonic()
            # Not select(): a benchmark may hold more than 1,024 descriptors.
            if left_s <= 0 or not self._arrivals.poll(left_s * 1000):
                raise self.process.failed(f"gave no answer within {timeout_s:g} s")
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise self.process.failed("ended")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise self.process.failed(f"said: {answer['error']}")
        return answer

    def close(self) -> None:
        """Its end of the socket ends: that is how it knows."""
        self._socket.close()
        self.process.stop()


def serve(descriptor: str, start: Callable[[], tuple[object, Callable[[Any], object]]]) -> None:
    """The child's side of a Talker, until the socket ends.

    start: makes what is measured; returns the first line, which says that it is ready, and the function that
    answers a request. What either raises goes into the log and, as {"error": text}, to the parent, and is the
    last answer.
    """
    with socket.socket(fileno=int(descriptor)) as channel, channel.makefile("rw", buffering=1) as lines:

        def say(value: object) -> None:
            lines.write(json.dumps(value) + "\n")
            lines.flush()

        try:
            ready, answer = start()
            say(ready)
            for line in lines:
                say(answer(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


def end_on_sigterm() -> None:
    """From now on SIGTERM unwinds this process, as Ctrl-C does: its children go with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PYTHON = sys.executable
