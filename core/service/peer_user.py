"""Whose process is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer process belongs to this user or to root."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (os.getuid(), 0)
