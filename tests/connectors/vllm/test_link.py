"""The connection to the node: there at start, later, or demanded."""

from __future__ import annotations

import logging
import threading

import pytest

from moonpool.connectors.vllm.link import Link
from moonpool.connectors.vllm.pool import Pool
from moonpool.core.errors import AuthError, Unavailable
from tests.connectors.vllm.fakes import LOG, FakePool


def test_there_at_start() -> None:
    link = Link(lambda: pool, address="here", log=LOG)
    pool = FakePool()
    link.open(required=True)
    assert link.pool is pool
    link.close()
    assert pool.closed
    assert link.pool is None


def test_joins_later(caplog: pytest.LogCaptureFixture) -> None:
    pool, dialled, there = FakePool(), threading.Semaphore(0), threading.Event()

    def dial() -> Pool:
        dialled.release()
        if not there.is_set():
            raise Unavailable("nobody listens")
        return pool

    link = Link(dial, address="/run/x.sock", log=LOG, retry_s=0.001)
    with caplog.at_level(logging.INFO):
        link.open(required=False)
        assert link.pool is None
        for _ in range(3):
            assert dialled.acquire(timeout=10)
        there.set()
        assert link._thread is not None
        link._thread.join(10)
    assert link.pool is pool
    warning, joined = [record.getMessage() for record in caplog.records]
    assert "no pool at /run/x.sock (nobody listens)" in warning
    assert "serves without it and joins" in warning
    assert joined == "moonpool: joined the pool at /run/x.sock"
    link.close()


@pytest.mark.parametrize("error", [Unavailable("nobody"), AuthError("wrong token")])
def test_demanded(error: Exception) -> None:
    def dial() -> Pool:
        raise error

    with pytest.raises(type(error)):
        Link(dial, address="x", log=LOG).open(required=True)


def test_closing_ends_the_thread() -> None:
    def dial() -> Pool:
        raise Unavailable("nobody")

    link = Link(dial, address="x", log=LOG, retry_s=3600)
    link.open(required=False, quiet=True)
    link.close()
    assert link._thread is not None
    assert not link._thread.is_alive()
