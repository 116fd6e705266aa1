"""What only the kernel knows about the other end of a connection."""

from __future__ import annotations

import asyncio
import socket

_CLOSE, _CLOSE_WAIT = 7, 8  # states of linux/tcp_states.h: reset, and closed by the peer


def notice_dead_peer(transport: asyncio.Transport, within_s: int) -> None:
    """Let the kernel end a connection whose host vanished: keep-alive probes while nothing is under way, and
    a limit on unacknowledged data while something is. Without it a lost peer is noticed after some 15
    minutes, or never."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    probe_s = max(1, within_s // 6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, within_s // 2))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, within_s * 1000)


def peer_left(transport: asyncio.Transport) -> bool:
    """Whether the peer has closed or reset a connection from which nothing is being read (Linux; elsewhere:
    False)."""
    connection = transport.get_extra_info("socket")
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    except OSError:
        return False
    return info[0] in (_CLOSE, _CLOSE_WAIT)
