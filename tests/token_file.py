"""The token file of one host, for tests in which one secret replaces another."""

from __future__ import annotations

import os
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from moonpool.core.config.cluster_token import ClusterToken, read_token
from moonpool.core.service import zmq_curve

OLD, NEW = b"the old secret of this cluster", b"the new secret of this cluster"
# What docs/security.md has an operator write, one step on all hosts before the next begins anywhere.
STEPS = (OLD + b"\n" + NEW, NEW + b"\n" + OLD, NEW)


class TokenFile:
    """A file that is replaced whole, as editors and Kubernetes do."""

    def __init__(self, path: Path, text: bytes = OLD) -> None:
        self.path = path
        self.replace(text)

    def replace(self, text: bytes, mode: int = 0o600) -> None:
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_bytes(text)
        draft.chmod(mode)
        os.replace(draft, self.path)

    def token(self) -> ClusterToken:
        """As a process on that host reads it at its start."""
        return read_token(self.path)


def is_refused(endpoint: str, purpose: bytes, secret: bytes, timeout_s: float = 20.0) -> bool:
    """Whether a port of ZMQ ends the connection of a caller with that secret before the handshake does."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    caller = context.socket(zmq.SUB)
    zmq_curve.dial(caller, purpose, secret)
    monitor = caller.get_monitor_socket()
    caller.connect(endpoint)
    ends = {zmq.EVENT_DISCONNECTED: True, zmq.EVENT_HANDSHAKE_SUCCEEDED: False}
    try:
        while monitor.poll(int(timeout_s * 1000)):
            event = recv_monitor_message(monitor)["event"]
            if event in ends:
                return ends[event]
        raise AssertionError(f"{endpoint} has neither taken nor refused a caller in {timeout_s:g} s")
    finally:
        caller.disable_monitor()
        context.destroy(linger=0)
