"""The drop-in's TransferEngine with cluster.tls_data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mooncake.engine import TransferEngine

import moonpool
from moonpool.core.errors import ProtocolError
from moonpool.core.service.data_tls import EngineTls
from tests.core.store_bed import TOKEN
from tests.core.tls_bed import MAGIC, Sniffer, pem, set_data_tls

__all__ = ["pem"]

HOST, P2P, ROOM = "127.0.0.1", "P2PHANDSHAKE", 1 << 16


def test_what_travels_is_inside_tls(pem: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_data_tls(monkeypatch, pem, "on")
    one, other = TransferEngine(), TransferEngine()
    here, there = np.zeros(ROOM, np.uint8), np.zeros(ROOM, np.uint8)
    here[:] = 7
    for engine, array in ((one, here), (other, there)):
        assert engine.initialize(HOST, P2P, "tcp", "") == 0
        assert engine.register_memory(array.ctypes.data, ROOM) == 0
    address = f"{HOST}:{other.get_rpc_port()}"
    sniffer = Sniffer(address)
    try:
        assert one.transfer_sync_write(sniffer.address, here.ctypes.data, there.ctypes.data, ROOM) == 0
        assert (there == here).all()
        assert sniffer.passed
        assert MAGIC not in sniffer.passed  # of the frames by which engines meet, also those of one host
    finally:
        sniffer.close()
    with (
        moonpool.TransferEngine("plain", token=TOKEN, listen=None, metadata="", tls=EngineTls()) as plain,
        pytest.raises(ProtocolError, match="this port speaks TLS only"),
    ):
        plain.open(address)
    for engine, array in ((one, here), (other, there)):
        assert engine.unregister_memory(array.ctypes.data) == 0
