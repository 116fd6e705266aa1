"""The connection to the pool: what is a miss, and what is a pool that does not answer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool import _native
from moonpool.connectors.tensorrt_llm import pool
from moonpool.core.config.native_settings import node_settings
from moonpool.core.errors import Error

TOKEN = b"the token"
MIB = 1 << 20
NAMES = [bytes([number]) * 42 for number in range(2)]


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        yield str(Path(folder) / "n.sock")


def connected(socket: str) -> tuple[_native.Client, pool.PoolClient]:
    client = _native.Client(socket, TOKEN, timeout_s=10)
    client.connect()
    return client, pool.PoolClient(client)


def test_pins_that_hold_their_share_are_a_miss(socket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a pool that does not answer, which the connector would leave alone for a while."""
    monkeypatch.setattr(pool, "LONG_WAIT_S", 60.0)  # whatever this machine does meanwhile
    server = _native.Server(socket, [("default", 8 * MIB)], TOKEN, node_settings(pins_share_max=0.2))
    server.start()
    client, connection = connected(socket)
    try:
        for name in NAMES:
            client.put([name], [[bytes(MIB)]])
        held = connection.hold(NAMES[:1], 1)
        assert held is not None
        assert connection.hold(NAMES[1:], 1) is None
        del held
        assert connection.hold(NAMES[1:], 1) is not None
    finally:
        connection.close()
        server.stop()


def test_a_node_that_is_gone_is_no_miss(socket: str) -> None:
    server = _native.Server(socket, [("default", 8 * MIB)], TOKEN, node_settings())
    server.start()
    _, connection = connected(socket)
    try:
        assert connection.hold(NAMES[:1], 1) is None
        server.stop()
        with pytest.raises(Error):
            connection.hold(NAMES[:1], 1)
    finally:
        connection.close()
