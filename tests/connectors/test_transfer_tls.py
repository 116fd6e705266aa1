"""Hand-overs with cluster.tls_data: what connectors give their engines to, and what these refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from moonpool import TransferEngine
from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine
from moonpool.connectors.sglang.transfer.settings import TRANSPORTS
from moonpool.core.errors import ProtocolError
from moonpool.core.service.data_tls import EngineTls
from tests.connectors.vllm.pd.worlds import world
from tests.core.store_bed import TOKEN
from tests.core.tls_bed import pem, set_data_tls

__all__ = ["pem"]

BYTES = 1 << 20


@pytest.fixture(autouse=True)
def data(pem: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    set_data_tls(monkeypatch, pem, "mutual")
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())
    monkeypatch.setenv(TRANSPORTS, "tcp")


def refuses_plain(address: str) -> None:
    with (
        TransferEngine("plain", token=TOKEN, listen=None, metadata="", tls=EngineTls()) as plain,
        pytest.raises(ProtocolError, match=r"this port speaks TLS only; set cluster\.tls_data"),
    ):
        plain.open(address)


def test_of_vllm() -> None:
    with world("P", seed=1) as prefill, world("D", seed=2, transports=["tcp"]) as decode:
        refuses_plain(prefill.handover_worker.address)
        there, here = [1, 3, 5, 7], [2, 4, 6, 8]
        decode.take(prefill.offer(there), here)
        ended = decode.ended()
        assert (ended.good, ended.error) == (4, "")
        np.testing.assert_array_equal(decode.kv[:, here], prefill.kv[:, there])
        assert decode.handover_worker.counters["tcp_read_bytes_total"] > ended.bytes


def test_of_sglang() -> None:
    one, other = MoonpoolTransferEngine("127.0.0.1"), MoonpoolTransferEngine("127.0.0.1")
    source = (ctypes.c_char * BYTES).from_buffer(bytearray(b"k" * BYTES))
    target = (ctypes.c_char * BYTES)()
    try:
        refuses_plain(other.get_session_id())
        assert one.batch_register([ctypes.addressof(source)], [BYTES]) == 0
        assert other.batch_register([ctypes.addressof(target)], [BYTES]) == 0
        session = other.get_session_id()
        code = one.transfer_sync(session, ctypes.addressof(source), ctypes.addressof(target), BYTES)
        assert code == 0
        assert target.raw == b"k" * BYTES
        assert one.engine.metrics()["tcp_write_bytes_total"] == BYTES
    finally:
        one.close()
        other.close()
