"""Processes that are forked from an interpreter which has imported an engine already: see fork_server.py."""

from __future__ import annotations

import array
import atexit
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.descriptors import speaks

SERVER = Path(__file__).with_name("fork_server.py")
FORK_TIMEOUT_S = 480.0  # its imports included


@dataclass(frozen=True)
class Warm:
    """An interpreter that has imported ``modules`` with these variables in its environment, too."""

    python: str
    modules: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]


def inherited() -> dict[str, str]:
    """This process's environment, for processes that are to keep compiled bytecode."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


class ForkServer:
    """One fork_server.py."""

    def __init__(self, warm: Warm) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [warm.python, str(SERVER), str(theirs.fileno()), *warm.modules],
                stdin=subprocess.DEVNULL,
                env=inherited() | dict(warm.variables),
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def send(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


@functools.cache
def fork_servers(warm: Warm) -> Iterator[ForkServer]:
    """Two of them, by turns: of two engines started one after the other, as those that share keys are, each
    hashes strings in its own way, as two engines that were not forked do."""
    return itertools.cycle([ForkServer(warm) for _ in range(2)])


class ForkedProcess:
    """What subprocess.Popen would be for ``[warm.python, *arguments]``: ``-m`` and a module, or a script, and
    its arguments, among which a number is a descriptor that the process gets as well.

    Making it returns at once, even while the engine is being imported. spawns: whether the engine starts
    processes by multiprocessing's method "spawn". Killed with this process."""

    def __init__(
        self,
        warm: Warm,
        arguments: Sequence[str | int],
        env: Mapping[str, str],
        *,
        stdout: IO[bytes],
        stderr: IO[bytes] | int,
        stdin: int = subprocess.DEVNULL,
        start_new_session: bool = False,
        spawns: bool = False,
    ) -> None:
        self._life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stdin: IO[bytes] | None = None
        if stdin == subprocess.PIPE:
            reader, writer = os.pipe()
            self.stdin = os.fdopen(writer, "wb")
        else:
            reader = os.open(os.devnull, os.O_RDONLY)
        passed = [argument for argument in arguments if isinstance(argument, int)]
        places = iter(range(len(passed)))
        fields = {
            "arguments": [next(places) if isinstance(argument, int) else argument for argument in arguments],
            "environment": dict(env),
            "session": start_new_session,
            "nursery": spawns,
        }
        errors = stdout if isinstance(stderr, int) else stderr  # subprocess.STDOUT
        standard = [reader, stdout.fileno(), errors.fileno()]
        next(fork_servers(warm)).send(fields, [theirs.fileno(), *standard, *passed])
        theirs.close()
        os.close(reader)
        self._pid: int | None = None
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        """Waits for it while the engine is being imported."""
        if self._pid is None:
            self._pid = self._told(FORK_TIMEOUT_S)
        return self._pid

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float = FORK_TIMEOUT_S) -> int:
        deadline_s = time.monotonic() + timeout
        if self._pid is None:
            self._pid = self._told(timeout)
        if self.returncode is None:
            self.returncode = self._told(max(0.0, deadline_s - time.monotonic()))
            self._life.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        pid = self.pid
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _told(self, timeout_s: float) -> int:
        if not speaks(self._life, timeout_s):
            raise subprocess.TimeoutExpired("fork", timeout_s)
        packet = self._life.recv(64)
        assert packet, "the fork server has ended"
        return array.array("i", packet)[0]


AnyProcess = subprocess.Popen[bytes] | ForkedProcess
