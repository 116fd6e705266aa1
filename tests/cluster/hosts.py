"""The switch and the hosts on its cables, processes in hosts, and partitions.

    switch (10.77.N.1 on the cable of host N)  <-- veth -->  host N (10.77.N.2, eth0)

The switch routes. A partition is a routing rule of the switch that drops packets without a word, as a
firewall or a broken path does; an unplugged cable is a link that is down. Neither asks the processes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.store_bed import until
from .namespaces import ROOT, Namespace

LOG_SHOWN_BYTES = 8192


class Process:
    """A process in a host; what it says goes to a log. Killed at the end, whatever it does then."""

    def __init__(self, host: Host, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.name = f"{host.name}: {name}"
        self.log = host.log_dir / f"{host.name}-{len(host.processes)}-{name}.log"
        with self.log.open("wb") as log:
            self._process = host.namespace.popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **host.env, **env},
            )
        host.processes.append(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def said(self, pattern: str, timeout_s: float = 20.0) -> re.Match[str]:
        """Waits until its log matches; a process that ends before fails the test with its log."""

        def look() -> re.Match[str] | None:
            ended = not self.is_running
            found = re.search(pattern, self.text(), re.MULTILINE)
            assert found or not ended, f"{self.name} ended with {self._process.returncode}:\n{self.text()}"
            return found

        found: re.Match[str] = until(look, timeout_s)
        return found

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def terminate(self, timeout_s: float = 10.0) -> int:
        """SIGTERM -> its exit code"""
        self._process.terminate()
        return self._process.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """SIGSTOP, and waits until it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def rss_bytes(self) -> int:
        """Its own memory, without what it shares with others."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")


class Host:
    """A machine as far as Moonpool can tell. ``env`` is added to what its processes see."""

    def __init__(self, name: str, number: int, log_dir: Path) -> None:
        self.name = name
        self.cable = f"cable{number}"
        self.address = f"10.77.{number}.2"
        self.log_dir = log_dir
        self.env = {"MOONPOOL_RUNTIME_DIR": "/run/moonpool"}
        self.namespace = Namespace()
        self.processes: list[Process] = []
        self.at_end: list[Callable[[], Any]] = []

    def start(self, name: str, command: Sequence[str | Path], **env: str) -> Process:
        return Process(self, name, command, env)

    def moonpool(self, *arguments: object, name: str = "", **env: str) -> Process:
        """``moonpool ARGUMENTS`` in this host."""
        words = [str(argument) for argument in arguments]
        return self.start(name or words[0], [sys.executable, "-m", "moonpool", *words], **env)

    def path(self, inside: str) -> Path:
        """Where the test finds a file of this host."""
        return self.namespace.path(inside)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for end in self.at_end:
            end()
        self.namespace.close()


class Network:
    """The switch and its hosts; closes all of them."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        log_dir.mkdir(parents=True, exist_ok=True)
        self.switch = Namespace()
        self.switch.forward_packets()
        self.hosts: dict[str, Host] = {}
        self._cuts: list[str] = []

    def host(self, name: str) -> Host:
        number = len(self.hosts) + 1
        host = self.hosts[name] = Host(name, number, self.log_dir)
        self.switch.ip(
            f"link add {host.cable} type veth peer name eth0 netns {host.namespace.pid}",
            f"addr add 10.77.{number}.1/24 dev {host.cable}",
            f"link set {host.cable} up",
        )
        host.namespace.ip(
            f"addr add {host.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via 10.77.{number}.1",
        )
        return host

    def cut(self, *pairs: tuple[Host, Host]) -> None:
        """Nothing passes between these hosts any more, in either direction; nobody is told."""
        self.drop(*pairs, *((b, a) for a, b in pairs))

    def drop(self, *pairs: tuple[Host, Host]) -> None:
        """Nothing passes from the first host to the second."""
        rules = [f"iif {a.cable} to {b.address} blackhole" for a, b in pairs]
        self.switch.ip(*(f"rule add {rule}" for rule in rules))
        self._cuts += rules

    def heal(self) -> None:
        """Ends all cuts and drops."""
        rules, self._cuts = self._cuts, []
        self.switch.ip(*(f"rule del {rule}" for rule in rules))

    def switch_rules(self) -> list[str]:
        return self.switch.ip("rule list").splitlines()

    def unplug(self, host: Host) -> None:
        self.switch.ip(f"link set {host.cable} down")

    def plug(self, host: Host) -> None:
        self.switch.ip(f"link set {host.cable} up")

    def logs(self) -> list[tuple[str, str]]:
        """(title, the end of the log) of every process that ran."""
        return [
            (f"log of {process.name} (pid {process.pid})", process.text()[-LOG_SHOWN_BYTES:])
            for host in self.hosts.values()
            for process in host.processes
        ]

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self.switch.close()


def clean_environment() -> dict[str, str]:
    """Ours without what would lead a process out of its host."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MOONPOOL_", "XDG_"))}
    source = str(ROOT / "src")
    env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [env.get("PYTHONPATH")])])
    return env


def measured(what: str, condition: Callable[[], Any], promise_s: float, times: int = 5) -> Any:
    """Waits for ``condition`` at most ``times`` x the promised time, and prints the measured one."""
    began = time.monotonic()
    value = until(condition, promise_s * times)
    print(f"{what}: {time.monotonic() - began:.3f} s (promised: {promise_s} s)")
    return value
