"""A network namespace with a /run, /tmp and /dev/shm of its own, kept by one small process.

The keeper is a `cat` that ends with the pipe to us, so nothing outlives the test run, however that ends. What
runs inside is started by nsenter, which becomes it (so its pid is known, and a test may kill exactly it), and
the kernel kills it when we die.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
OWN_FOLDERS = ("/run", "/dev/shm", "/tmp")  # /tmp last: it hides the place from which the others are made
PROGRAMS = ("ip", "unshare", "nsenter", "mount")

_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_not() -> str:
    """Why this machine cannot have test hosts, in one sentence; empty when it can."""
    if os.geteuid() != 0:
        return "test hosts are namespaces, which only root may make here"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"test hosts need {', '.join(missing)} (Debian packages iproute2, util-linux and mount)"
    try:
        with Namespace() as a, Namespace() as b:
            a.ip(f"link add try type veth peer name try2 netns {b.pid}", "rule add to 192.0.2.1 blackhole")
            a.forward_packets()
    except OSError as error:
        return f"this machine gives no namespaces, cables between them or routing rules: {error}"
    return ""


class Namespace:
    """From construction to close(). ``self.path`` leads into its file system from outside."""

    def __init__(self) -> None:
        hold = tempfile.mkdtemp(prefix="moonpool-host-", dir="/tmp")
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", _setup(hold)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        ready = self._keeper.stdout.readline() == b"ready\n"
        os.rmdir(hold)  # a mount in the namespace only, which keeps what it needs of it
        if not ready:
            _, said = self._keeper.communicate()
            raise OSError(said.decode())
        self.pid = self._keeper.pid
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def path(self, inside: str | Path) -> Path:
        """Where a path of its file system is for the test."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Runs it inside. To be called from the main thread: the kernel watches the thread that starts it."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", f"--wd={ROOT}"]
        parent = os.getpid()
        return subprocess.Popen([*enter, *map(str, command)], preexec_fn=lambda: _die_with(parent), **options)

    def ip(self, *commands: str) -> str:
        """Runs commands of ip(8) in its network -> what they say"""
        try:
            ran = subprocess.run(
                ["nsenter", "--target", str(self.pid), "--net", "ip", "-batch", "-"],
                input="\n".join(commands),
                text=True,
                check=True,
                capture_output=True,
            )
        except subprocess.CalledProcessError as error:
            raise OSError(f"ip: {error.stderr.strip()}") from error
        return ran.stdout

    def forward_packets(self) -> None:
        with self.entered():
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # shows the reading thread's network

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread is in its network: sockets made here stay there for their whole life."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter_network(self._network)
            yield
        finally:
            enter_network(before)
            os.close(before)

    def close(self) -> None:
        if self._keeper.poll() is None:
            os.close(self._network)
            self._keeper.kill()
        self._keeper.wait()
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _die_with(parent: int) -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew that we care
        os._exit(1)


def enter_network(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _setup(hold: str) -> str:
    """A shell script. What we run from may lie in a folder that gets hidden: it is put back."""
    needed = {ROOT, *(Path(place).resolve() for place in (sys.prefix, sys.base_prefix))}
    lines = ["set -e", "ip link set lo up", f"mount -t tmpfs tmpfs {hold}"]
    for number, folder in enumerate(OWN_FOLDERS):
        own = f"{hold}/{number}"
        lines.append(f"mkdir -m 1777 {own}")
        for place in (place for place in needed if place.is_relative_to(folder)):
            kept = f"{own}/'{place.relative_to(folder)}'"
            lines += [f"mkdir -p {kept}", f"mount --bind '{place}' {kept}"]
    lines += [f"mount --rbind {hold}/{number} {folder}" for number, folder in enumerate(OWN_FOLDERS)]
    return "\n".join([*lines, "echo ready", "exec cat > /dev/null"])
