"""ZMQ sockets under the cluster token: CURVE, with one pair of keys for all processes with the token.

Beyond loopback every ZMQ port of ours requires it. Messages are encrypted, and only a process that has the
token can subscribe or publish. A purpose separates ports: the keys of one open no other.
"""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

PEERS = b"moonpool proxies"
EVENTS = b"moonpool events"


def keys(purpose: bytes, token: bytes) -> tuple[bytes, bytes]:
    """(public, secret), as text (z85): the secret is SHA-256 of the purpose, a zero byte and the token."""
    secret = z85.encode(hashlib.sha256(purpose + b"\0" + token).digest())
    return zmq.curve_public(secret), secret


def serve(socket: zmq.Socket[Any], purpose: bytes, token: bytes) -> None:
    """Call it before the bind. authenticate() decides, once for its context, which peers may connect."""
    socket.curve_publickey, socket.curve_secretkey = keys(purpose, token)
    socket.curve_server = True


def dial(socket: zmq.Socket[Any], purpose: bytes, token: bytes) -> None:
    """Call it before the connect."""
    public, secret = keys(purpose, token)
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = public, public, secret


def authenticate(context: zmq.Context[Any], purpose: bytes, token: bytes) -> ThreadAuthenticator:
    """Accepts only peers that have the token, for all sockets of ``context`` that serve; until its stop()."""
    allowed, _ = keys(purpose, token)

    class _SameToken:
        def callback(self, domain: str, key: bytes) -> bool:
            """key: as text (z85)."""
            return key == allowed

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=_SameToken())
    return authenticator
