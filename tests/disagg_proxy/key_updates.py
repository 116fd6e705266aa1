"""A client that updates the keys of its connection (RFC 8446, 4.6.3), which Python's ssl cannot ask for. Each
update wants one of the server in return."""

from __future__ import annotations

import ctypes
import socket
from types import TracebackType
from typing import Self

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_FUNCTIONS = {
    "TLS_client_method": (_POINTER, []),
    "SSL_CTX_new": (_POINTER, [_POINTER]),
    "SSL_CTX_free": (None, [_POINTER]),
    "SSL_new": (_POINTER, [_POINTER]),
    "SSL_free": (None, [_POINTER]),
    "SSL_set_fd": (_INT, [_POINTER, _INT]),
    "SSL_connect": (_INT, [_POINTER]),
    "SSL_key_update": (_INT, [_POINTER, _INT]),
    "SSL_do_handshake": (_INT, [_POINTER]),
}
_UPDATE_REQUESTED = 1


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libssl.so.3")
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Updater:
    """Blocks: for a thread."""

    def __init__(self, host: str, port: int) -> None:
        self._lib = _library()
        self._address = (host, port)

    def __enter__(self) -> Self:
        self._context = self._lib.SSL_CTX_new(self._lib.TLS_client_method())
        self._ssl = self._lib.SSL_new(self._context)
        self._socket = socket.create_connection(self._address)
        self._lib.SSL_set_fd(self._ssl, self._socket.fileno())
        assert self._lib.SSL_connect(self._ssl) == 1
        return self

    def update(self, times: int) -> None:
        """Sends so many, or fewer where the server has ended the connection."""
        for _ in range(times):
            if self._lib.SSL_key_update(self._ssl, _UPDATE_REQUESTED) != 1:
                return
            if self._lib.SSL_do_handshake(self._ssl) != 1:
                return

    def receive(self) -> bytes:
        """What the server has sent, encrypted; waits for some of it. b"": it has ended the connection."""
        return self._socket.recv(65536)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lib.SSL_free(self._ssl)
        self._lib.SSL_CTX_free(self._context)
        self._socket.close()
