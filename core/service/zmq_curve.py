"""ZMQ sockets under the cluster token: CURVE, with one pair of keys for all processes with the token.

Beyond loopback every ZMQ port of ours requires it. Messages are encrypted, and only a process that has the
token can subscribe or publish. A purpose separates ports: the keys of one open no other. While one secret
replaces the other a caller tries both.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from moonpool.core.config.cluster_token import secrets_of

PEERS = b"moonpool proxies"
EVENTS = b"moonpool events"
_log = logging.getLogger("moonpool.token")


def keys(purpose: bytes, secret: bytes) -> tuple[bytes, bytes]:
    """(public, secret), as text (z85): of SHA-256 of the purpose, a zero byte and the cluster's secret."""
    own = z85.encode(hashlib.sha256(purpose + b"\0" + secret).digest())
    return zmq.curve_public(own), own


def dial(socket: zmq.Socket[Any], purpose: bytes, secret: bytes) -> None:
    """Call it before the connect."""
    public, own = keys(purpose, secret)
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = public, public, own


def authenticate(context: zmq.Context[Any], purpose: bytes, token: bytes) -> ThreadAuthenticator:
    """Accepts only peers that have a secret of the token, for all sockets of ``context`` that serve, until
    its stop()."""

    class _SameToken:
        def callback(self, domain: str, key: bytes) -> bool:
            """key: as text (z85)."""
            return key in [keys(purpose, secret)[0] for secret in secrets_of(token)]

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_SameToken())
    return authenticator


class ServedEndpoints:
    """Endpoints that are bound under the first secret of the token. Where that is another one they are bound
    anew, which ends their connections; the callers connect again, by the new secret."""

    def __init__(self, purpose: bytes, token: bytes) -> None:
        self._purpose, self._token = purpose, token
        self._secret = secrets_of(token)[0]
        self._bound: list[tuple[zmq.Socket[Any], str]] = []
        self._unbound: list[tuple[zmq.Socket[Any], str]] = []
        self._told = False

    def prepare(self, socket: zmq.Socket[Any]) -> None:
        """Before a bind: ZMQ takes the keys that a socket has at a bind for that bind and later ones."""
        socket.curve_publickey, socket.curve_secretkey = keys(self._purpose, self._secret)
        socket.curve_server = True

    def add(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """What was bound after prepare(), with its real port."""
        self._bound.append((socket, endpoint))

    def clear(self) -> None:
        """All are unbound by their owner."""
        self._bound.clear()
        self._unbound.clear()

    def follow(self) -> None:
        """On the thread of the sockets, now and then."""
        if self._secret != (first := secrets_of(self._token)[0]):
            self._secret, self._told = first, False
            for socket, endpoint in self._bound:
                socket.unbind(endpoint)
            self._unbound += self._bound
            self._bound.clear()
        for each in tuple(self._unbound):
            if self._bind(*each):
                self._unbound.remove(each)
                self._bound.append(each)

    def _bind(self, socket: zmq.Socket[Any], endpoint: str) -> bool:
        """Whether it is bound: ZMQ closes the port of an unbind a little later."""
        self.prepare(socket)
        socket.setsockopt(zmq.IPV6, endpoint.startswith("tcp://["))
        try:
            socket.bind(endpoint)
            if endpoint.startswith("ipc://"):
                os.chmod(endpoint.removeprefix("ipc://"), 0o600)
        except (zmq.ZMQError, OSError) as error:
            if not self._told and getattr(error, "errno", None) != errno.EADDRINUSE:
                self._told = True
                _log.error("%s cannot be bound under the new secret yet: %s", endpoint, error)
            return False
        return True
