"""Forks a process for each script that a test wants to run with vLLM, and has imported vLLM once for all of
them: the imports are three quarters of an engine's start.

Run by processes.py with the interpreter that has vLLM: ``fork_server.py CONTROL_FD``. It knows nothing of
Moonpool: each process imports that itself. Requests are packets of a socket (see ``Request``); when its other
end is closed the server ends. One thread; a forked process returns from ``serve`` and runs its script.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# Another version of vLLM may not have all of them: it imports what it has in their place later.
IMPORTED = ("vllm", "vllm.lora.request", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
REQUEST_BYTES = 1 << 20
DESCRIPTORS = 8


class Request:
    """script: a file; environment: all of it; arguments: a number among them is the place of a descriptor
    among the others, and becomes its number here.

    With it come the descriptors: the socket that hears the process's number and exit code, stdin, stdout,
    stderr, and any others."""

    def __init__(self, packet: bytes, descriptors: list[int]) -> None:
        fields: dict[str, Any] = json.loads(packet)
        self.script: str = fields["script"]
        self.environment: dict[str, str] = fields["environment"]
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

    def run(self, paths: list[str]) -> None:
        """In the process that was forked. paths: sys.path without what depends on script and environment."""
        for target, descriptor in enumerate(self.standard):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = [str(Path(self.script).parent), *given_paths(), *paths]
        sys.argv[:] = [self.script, *self.arguments]
        runpy.run_path(self.script, run_name="__main__")


def given_paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def serve(control: socket.socket) -> Request | None:
    """Returns its request in each process that is forked, and None in the server at the end. Tells the number
    of each process, and then its exit code as subprocess has it."""
    wakes, woken = socket.socketpair()
    for end in (wakes, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    lives: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([control, wakes], [], [])
        if wakes in readable:
            wakes.recv(4096)
            for pid in list(lives):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    tell(lives.pop(pid), os.waitstatus_to_exitcode(status)).close()
        if control in readable:
            packet, descriptors, _, _ = socket.recv_fds(
                control, REQUEST_BYTES, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            if not packet:
                return None
            request = Request(packet, descriptors)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (control, wakes, woken, request.life, *lives.values()):
                    each.close()
                return request
            request.close()
            lives[pid] = tell(request.life, pid)


def tell(life: socket.socket, number: int) -> socket.socket:
    with suppress(OSError):  # the test has ended
        life.send(array.array("i", [number]).tobytes())
    return life


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    paths = sys.path[1 + len(given_paths()) :]
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    assert "moonpool" not in sys.modules
    gc.collect()
    gc.freeze()  # else each process's collector would copy all pages
    request = serve(control)
    if request is not None:
        request.run(paths)


if __name__ == "__main__":
    main()
