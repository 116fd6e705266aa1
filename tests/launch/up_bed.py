"""`moonpool up` as a child of a test."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from moonpool.core.service.processes import descendants
from tests.descriptors import speaks

DEADLINE_S = 60

# An "engine": answers GET /health, and has a child that left its session.
ENGINE = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def toml(folder: Path, *, engines: int = 1, node: bool = False, proxy: bool = False, more: str = "") -> Path:
    script = folder / "engine.py"
    script.write_text(ENGINE)
    command = json.dumps([sys.executable, str(script), "{host}", "{port}"])
    text = f"[up]\nnode = {str(node).lower()}\nproxy = {str(proxy).lower()}\nbackoff_initial_s = 0.05\n"
    text += '[node]\ndram = "64MiB"\nhttp = "127.0.0.1:0"\n[proxy]\nlisten = "127.0.0.1:0"\n'
    text += f"[[up.engine]]\ncommand = {command}\n" * engines + more
    file = folder / "up.toml"
    file.write_text(text)
    return file


def watch(pids: list[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def assert_gone(watched: list[int]) -> None:
    for descriptor in watched:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(DEADLINE_S * 1000), "a process outlived its supervisor"
        os.close(descriptor)


class Command:
    """A running `moonpool up`, read line by line."""

    def __init__(self, file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonpool", "up", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.said = ""

    def until(self, text: str, times: int = 1) -> None:
        """Reads until ``text`` was printed ``times`` times."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + DEADLINE_S
        while self.said.count(text) < times:
            readable = speaks(self.process.stdout, max(0.0, deadline - time.monotonic()))
            piece = os.read(self.process.stdout.fileno(), 65536).decode() if readable else ""
            assert piece, f"{text!r} did not come; it said:\n{self.said}"
            self.said += piece

    def tree(self) -> list[int]:
        return [entry.pid for entry in descendants(self.process.pid)]

    def wait(self) -> int:
        return self.process.wait(DEADLINE_S)

    def kill(self) -> None:
        """Whatever is left of it and of all that it started."""
        for pid in [*self.tree(), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
