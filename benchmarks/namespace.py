"""A second host on this machine: a network and mount namespace with its own /run and /dev/shm, and one cable.

What runs there shares no loopback and no file of shared memory with what runs here; every byte between
the two goes over the cable, whose counters say how many there were.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from benchmarks.processes import Failed, Process

HERE, THERE, PREFIX = "10.213.77.1", "10.213.77.2", 30
PRIVATE = ("/run", "/dev/shm")
HOLD = (
    "".join(f"mount -t tmpfs none {folder} && " for folder in PRIVATE) + "echo ready && exec sleep infinity"
)


class Namespace:
    """Gone when ``stack`` ends. Raises Failed with the reason where the system does not allow it."""

    def __init__(self, log: Path, stack: ExitStack) -> None:
        if os.geteuid() != 0:
            raise Failed("needs root, to make a network namespace")
        command = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", HOLD]
        self._holder = Process(command, log)
        stack.callback(self._holder.stop)
        self._holder.wait_for_output("ready")
        self._enter = ["nsenter", "-t", str(self._holder.pid), "--net"]
        self._cable = f"mp{self._holder.pid}"
        ip = ["ip", "link", "add", self._cable, "type", "veth", "peer", "name", "cable", "netns"]
        run([*ip, str(self._holder.pid)])
        stack.callback(
            subprocess.run, ["ip", "link", "delete", self._cable], capture_output=True, check=False
        )
        for prefix, device, address in (([], self._cable, HERE), (self._enter, "cable", THERE)):
            run([*prefix, "ip", "address", "add", f"{address}/{PREFIX}", "dev", device])
            run([*prefix, "ip", "link", "set", device, "up"])
        run([*self._enter, "ip", "link", "set", "lo", "up"])

    @property
    def enter(self) -> list[str | Path]:
        """In front of a command: it runs there, with the process id that it was started with."""
        return [*self._enter, "--mount"]

    def bytes_sent(self) -> int:
        """Over the cable, from here to there, frames included."""
        return self._counter("tx_bytes")

    def bytes_received(self) -> int:
        return self._counter("rx_bytes")

    def _counter(self, name: str) -> int:
        return int(Path(f"/sys/class/net/{self._cable}/statistics/{name}").read_text())


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise Failed(f"{' '.join(command)}: {result.stderr.strip()}")
