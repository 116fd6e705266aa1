"""Notices over ZMQ that the host of a connection vanished, by TCP alone.

ZMQ's own heartbeats are not used: where a socket's queue is full, libzmq (4.3.5) reads no answers to them,
takes the connection for dead and aborts the process when the queue is read again ("Assertion failed:
_input_stopped", its issue 3937). The kernel answers a keepalive whatever the process does. A process that
hangs is noticed by other means: a message that does not come.
"""

from __future__ import annotations

from typing import Any

import zmq


def notice_vanished_host(socket: zmq.Socket[Any], after_s: float) -> None:
    """Call it before the bind or connect. The socket's connections end some ``after_s`` seconds after the
    other host is gone, 3 at least. Nothing for Unix sockets, whose ends are on one host."""
    every_s = max(round(after_s / 3), 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, every_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, every_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3 * every_s * 1000)  # of what was sent and not acknowledged
