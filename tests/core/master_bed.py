"""What the tests of the master share: the real command in a process of its own, and a relay to cut cables."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from moonpool import _native
from moonpool.core.errors import Error
from moonpool.core.service.http_get import get_json
from moonpool.core.service.http_tls import own_child_context
from tests.descriptors import speaks

from .store_bed import TOKEN, until

ADMIN_TOKEN = "the admin token of these tests"
START_TIMEOUT_S = 60.0


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "MOONPOOL_CLUSTER_TOKEN": TOKEN.decode(),
        "MOONPOOL_CLUSTER_ADMIN_TOKEN": ADMIN_TOKEN,
    }


class MasterProcess:
    """`moonpool master`; killed at the end, whatever the test left it doing. settings: of [master]; env: more
    variables. With a certificate its pages are asked without a look at it.
    """

    def __init__(
        self,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        more = {f"MOONPOOL_MASTER_{name.upper()}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "moonpool", "master", "--listen", listen, "--http", "127.0.0.1:0"]
        self.process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, env=environment() | more | (env or {}), text=True
        )
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, START_TIMEOUT_S), "the master says nothing"
        line = self.process.stdout.readline()
        assert line.startswith("moonpool master at "), line
        self.address, self.http = line.removeprefix("moonpool master at ").strip().split(", ")
        self.http = self.http.removesuffix("/metrics")

    def page(self, path: str) -> Any:
        """A page behind the admin token."""
        request = urllib.request.Request(self.http + path, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
        tls = own_child_context() if self.http.startswith("https:") else None
        with urllib.request.urlopen(request, timeout=10, context=tls) as response:
            return json.load(response)

    def health(self) -> Any:
        """The page. Its code is 503 while the master's loop does not answer within a second."""

        def page() -> Any:
            with suppress(Error):
                return get_json(f"{self.http}/health")
            return None

        return until(page, START_TIMEOUT_S)

    def states(self) -> dict[str, str]:
        """name -> state, of the nodes that are not gone."""
        return {n["name"]: n["state"] for n in self.page("/nodes")["nodes"] if n["state"] != "gone"}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def close(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Relay:
    """Forwards TCP connections to ``target`` until it is cut: then bytes wait, as behind a pulled cable, and
    new connections are taken and not served."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: list[socket.socket] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        """Whatever was open is reset, as after a long cut."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()
        self._flows.set()

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.heal()

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
                callee = socket.create_connection(self._target, 10)
            except OSError:
                continue
            self._sockets += [caller, callee]
            for source, sink in ((caller, callee), (callee, caller)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def hashes(names: Sequence[str]) -> bytes:
    """Of names in the space that a Store has by default."""
    return b"".join(_native.key_hash("default", "default", b"", name.encode()) for name in names)


def hits(directory: _native.DirectoryClient, names: Sequence[str]) -> int:
    """How many of them have a holder; 0 while there is no answer."""
    try:
        return directory.locate(hashes(names)).hits
    except Error:
        return 0


def found(directory: _native.DirectoryClient, names: Sequence[str], n: int, timeout_s: float = 15.0) -> None:
    """Waits until exactly ``n`` of them have a holder."""
    until(lambda: hits(directory, names) == n, timeout_s)
