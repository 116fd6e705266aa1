"""The connections that carry objects, of the store and of the engine, are not on BBR between near peers."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from moonpool import Store, TransferEngine, _native
from moonpool.core.config.native_settings import node_settings

from .store_bed import MIB, TOKEN


def congestion_of(port: int) -> list[str]:
    """Of each end, in this process, of the TCP connections to one of its ports."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with copy:
            if copy.family != socket.AF_INET or copy.type != socket.SOCK_STREAM:
                continue
            try:
                ends = {copy.getsockname()[1], copy.getpeername()[1]}
            except OSError:
                continue  # it listens
            if port in ends:
                option = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                found.append(option.rstrip(b"\0").decode())
    return found


def expected() -> str:
    chosen = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return "reno" if chosen.startswith("bbr") else chosen


def test_both_ends_of_a_stores_connection(tmp_path: Path) -> None:
    server = _native.Server(
        str(tmp_path / "node.sock"), [("default", 64 * MIB)], TOKEN, node_settings(), listen=["127.0.0.1:0"]
    )
    server.start()
    with Store(f"tcp://{server.addresses[0]}", token=TOKEN) as store:
        store.put("k", bytes(MIB))
        assert congestion_of(int(server.addresses[0].rsplit(":", 1)[1])) == [expected()] * 2
    server.stop()


def test_both_ends_of_an_engines_connection() -> None:
    with TransferEngine(token=TOKEN, transports=["tcp"]) as near, TransferEngine(token=TOKEN) as far:
        there, here = far.allocate(MIB), near.allocate(MIB)
        near.write(near.open(far.addresses[0]), here.address, there.address, MIB)
        assert congestion_of(int(far.addresses[0].rsplit(":", 1)[1])) == [expected()] * 2
