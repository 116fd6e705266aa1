"""Certificates, settings and a sniffer for tests with TLS of a cluster's connections."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moonpool.core.config import config
from moonpool.core.config.config import Config

MAGIC = b"MPL1"
CERTIFICATES = Path(__file__).parent / "certificates"


@pytest.fixture
def pem(tmp_path: Path) -> Callable[[str], str]:
    """The path of a certificate of the tests; the key is private, as git does not keep it."""
    shutil.copytree(CERTIFICATES, tmp_path / "pem")
    (tmp_path / "pem" / "test-key.pem").chmod(0o600)
    return lambda name: str(tmp_path / "pem" / f"{name}.pem")


@pytest.fixture
def control(pem: Callable[[str], str]) -> dict[str, str]:
    """[cluster] of a master and of who dials it, without mutual proof."""
    return {
        "tls_control": "on",
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }


def made(cluster: dict[str, str]) -> Config:
    return config.load(env={}, arguments={f"cluster.{name}": value for name, value in cluster.items()})


def variables(cluster: dict[str, str]) -> dict[str, str]:
    return {f"MOONPOOL_CLUSTER_{name.upper()}": value for name, value in cluster.items()}


def set_data_tls(monkeypatch: pytest.MonkeyPatch, pem: Callable[[str], str], mode: str) -> None:
    """Engines of this process take it from their environment. mode: of tls_data."""
    cluster = {
        "tls_data": mode,
        "tls_cert": pem("master"),
        "tls_key": pem("test-key"),
        "tls_ca": pem("authority"),
    }
    for name, value in variables(cluster).items():
        monkeypatch.setenv(name, value)


class Sniffer:
    """Forwards TCP connections to ``target`` and keeps all that passes."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.up, self.down = bytearray(), bytearray()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def passed(self) -> bytes:
        return bytes(self.up) + bytes(self.down)

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        host, _, port = self._target.rpartition(":")
        while True:
            try:
                caller, _ = self._listener.accept()
                callee = socket.create_connection((host, int(port)), 10)
            except OSError:
                return
            self._sockets += [caller, callee]
            for source, sink, seen in ((caller, callee, self.up), (callee, caller, self.down)):
                threading.Thread(target=self._forward, args=(source, sink, seen), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                seen += data
                sink.sendall(self.change(seen, data))
            sink.shutdown(socket.SHUT_WR)

    def change(self, seen: bytearray, piece: bytes) -> bytes:
        """What is forwarded in place of ``piece``, the last of ``seen``."""
        return piece
