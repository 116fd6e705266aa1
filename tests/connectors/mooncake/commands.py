"""A command of the drop-in, run in a process of its own."""

from __future__ import annotations

import select
import signal
import subprocess
import sys


class Command:
    """One of the commands as its script starts it; it says one line when it is ready."""

    def __init__(self, module: str, *arguments: str, function: str = "main") -> None:
        code = (
            "from tests.connectors.mooncake.long_waits import wait_long; wait_long()\n"
            f"from mooncake.{module} import {function}; {function}()"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        says = select.poll()  # unlike select(), for any number of open files
        says.register(self.process.stdout, select.POLLIN)
        assert says.poll(60_000), "it says nothing"
        self.line = self.process.stdout.readline().strip()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode
