"""Sockets of ZMQ notice a vanished host by TCP, never by ZMQ's heartbeats: a socket whose queue is full
aborts the process at the next read after one of them was missed (libzmq's issue 3937)."""

from __future__ import annotations

import re
from pathlib import Path

import zmq

from moonpool.core.service.zmq_liveness import notice_vanished_host

ROOT = Path(__file__).resolve().parent.parent.parent


def test_a_vanished_host_is_noticed_in_time_by_the_kernel() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for after_s, every_s in ((0.6, 1), (6.0, 2), (30.0, 10)):
        socket = context.socket(zmq.SUB)
        notice_vanished_host(socket, after_s)
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
        assert (
            socket.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == socket.getsockopt(zmq.TCP_KEEPALIVE_INTVL) == every_s
        )
        assert (
            every_s * (1 + socket.getsockopt(zmq.TCP_KEEPALIVE_CNT))
            == socket.getsockopt(zmq.TCP_MAXRT) / 1000
        )
        socket.close(0)
    context.term()


def test_no_socket_has_heartbeats_of_zmq() -> None:
    folders = [ROOT / each for each in ("core", "disagg_proxy", "connectors")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 200
    assert [str(path) for path in sources if re.search(r"zmq\.HEARTBEAT", path.read_text())] == []
