"""`moonpool up` as a child of a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from moonpool.core.service.processes import descendants
from tests.descriptors import speaks

DEADLINE_S = 60


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
