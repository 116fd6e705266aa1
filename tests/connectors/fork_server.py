"""Forks a process for each command that a test wants to run with an engine, and has imported the engine once
for all of them: the imports are three quarters of an engine's start.

Run by forks.py with the interpreter that has the engine: ``fork_server.py CONTROL_FD MODULE...``, the modules
to import. It knows nothing of Moonpool: each process imports that itself. Requests are packets of a socket
(see ``Request``); when its other end is closed the server ends, and what it forked ends with it. One thread;
a forked process returns from ``serve`` and becomes its command.

A command whose engine starts processes of its own, by multiprocessing's method "spawn", gets a nursery: a
child, forked before the command has begun, that forks what would have been new interpreters.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUEST_BYTES = 1 << 20
DESCRIPTORS = 100
SPAWNED = "--multiprocessing-fork"  # is among the arguments of a process that multiprocessing spawns
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_libc = ctypes.CDLL(None)


class Request:
    """arguments: what follows ``python``: a script or ``-m`` and a module, and its arguments; a number among
    them is the place of a descriptor among the others, and becomes its number here. environment: all of it.
    session: whether it leads one. nursery: whether it gets one.

    With it come the descriptors: the socket that hears the process's number and exit code, stdin, stdout,
    stderr, and any others."""

    def __init__(self, packet: bytes, descriptors: list[int]) -> None:
        fields: dict[str, Any] = json.loads(packet)
        self.environment: dict[str, str] = fields["environment"]
        self.session: bool = fields["session"]
        self.nursery: bool = fields["nursery"]
        self.life = socket.socket(fileno=descriptors[0])
        self.standard = descriptors[1:4]
        self.others = descriptors[4:]
        self.arguments = [
            str(self.others[argument]) if isinstance(argument, int) else argument
            for argument in fields["arguments"]
        ]

    def close(self) -> None:
        """In the server, which keeps ``life`` alone."""
        for descriptor in (*self.standard, *self.others):
            os.close(descriptor)

    def become(self, paths: list[str]) -> Callable[[], object]:
        """In the process that was forked -> what it is to run, or a process of its nursery. paths: sys.path
        without what depends on command and environment."""
        if self.session:
            os.setsid()
        for target, descriptor in enumerate(self.standard):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        is_module = self.arguments[0] == "-m"
        name, *rest = self.arguments[1:] if is_module else self.arguments
        sys.path[:] = [os.getcwd() if is_module else str(Path(name).parent), *given_paths(), *paths]
        if self.nursery and (spawned := make_nursery(self.others)):
            return spawned
        sys.argv[:] = [name, *rest]
        if is_module:
            return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
        return lambda: runpy.run_path(name, run_name="__main__")


def given_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def end_with(parent: int) -> None:
    """When ``parent`` is killed, so is this process."""
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it was already
        os._exit(1)


def serve(control: socket.socket) -> Request | None:
    """Returns its request in each process that is forked, and None in the server at the end. Tells the number
    of each process, and then its exit code as subprocess has it."""
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lives: dict[int, socket.socket] = {}
    own = os.getpid()
    while True:
        readable, _, _ = select.select([control, wakes], [], [])
        if wakes in readable:
            wakes.recv(4096)
            for pid in list(lives):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    tell(lives.pop(pid), os.waitstatus_to_exitcode(status)).close()
        if control in readable:
            packet, descriptors = receive(control)
            if not packet:
                return None
            request = Request(packet, descriptors)
            pid = os.fork()
            if pid == 0:
                end_with(own)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (control, wakes, woken, request.life, *lives.values()):
                    each.close()
                return request
            request.close()
            lives[pid] = tell(request.life, pid)


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """A packet and its descriptors; an empty one at the end."""
    packet, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return packet, descriptors


def tell(life: socket.socket, number: int) -> socket.socket:
    with suppress(OSError):  # the test has ended
        life.send(array.array("i", [number]).tobytes())
    return life


def make_nursery(others: Sequence[int]) -> Callable[[], object] | None:
    """Forks this process's nursery, and from now on takes from it what multiprocessing spawns -> None here,
    and in each process of the nursery what it is to run. others: this process's alone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own = os.getpid()
    # What the nursery forks are children of a child that has ended: this process becomes their parent.
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.fork() == 0:
        end_with(own)
        ours.close()
        for descriptor in others:
            os.close(descriptor)
        return tend(theirs, own)
    theirs.close()
    lock, new_interpreter = threading.Lock(), multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        """As multiprocessing's own -> the process's number."""
        if SPAWNED not in arguments:
            return int(new_interpreter(path, arguments, descriptors))
        numbers = [int(descriptor) for descriptor in descriptors]
        rest = arguments[arguments.index("-c") + 1 :]
        fields = {"arguments": list(rest), "environment": dict(os.environ), "numbers": numbers}
        with lock:
            socket.send_fds(ours, [json.dumps(fields).encode()], numbers)
            return int(array.array("i", ours.recv(64))[0])

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]
    return None


def tend(control: socket.socket, parent: int) -> Callable[[], object]:
    """The nursery: returns in the processes that it forks, and ends with ``parent``'s end of the socket."""
    while True:
        packet, descriptors = receive(control)
        if not packet:
            os._exit(0)
        between = os.fork()
        if between:
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)
            continue
        between = os.getpid()
        pidfd = os.pidfd_open(between)
        if os.fork():
            os._exit(0)
        select.select([pidfd], [], [])  # it has ended, so the parent is another one
        os.close(pidfd)
        end_with(parent)
        tell(control, os.getpid()).close()
        return spawned(json.loads(packet), descriptors)


def spawned(fields: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    """In a process of a nursery -> what multiprocessing would have told a new interpreter to run."""
    numbers: list[int] = fields["numbers"]
    above = max(numbers, default=0) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(fields["environment"])
    code, *rest = fields["arguments"]
    sys.argv[:] = ["-c", *rest]
    return lambda: exec(code, {"__name__": "__main__"})


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    paths = sys.path[1 + len(given_paths()) :]
    for name in sys.argv[2:]:
        with suppress(ImportError):  # another version of the engine has others in their place
            importlib.import_module(name)
    assert "moonpool" not in sys.modules
    gc.collect()
    gc.freeze()  # else each process's collector would copy all pages
    request = serve(control)
    if request is None:
        os._exit(0)  # at once, and with it what it forked
    request.become(paths)()


if __name__ == "__main__":
    main()
