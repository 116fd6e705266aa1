"""Asks each engine ``GET /health`` again and again, over a new connection each time, so that accepting is
tested too.

One task per engine on the proxy's loop; what an outcome means is decided by ``conductor/liveness.py``.
"""

from __future__ import annotations

import asyncio

from moonpool.disagg_proxy.engine import Engine
from moonpool.disagg_proxy.http.response_reader import ResponseHead
from moonpool.disagg_proxy.settings import HealthChecks
from moonpool.disagg_proxy.upstream import Clock


class _StatusReceiver:
    """Waits for the status of one answer and does not care for its body."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status: asyncio.Future[int] = loop.create_future()

    def response_started(self, head: ResponseHead, body: bytes, complete: bool) -> None:
        if not self.status.done():
            self.status.set_result(head.status)

    def response_data(self, body: bytes, complete: bool) -> None:
        pass

    def response_failed(self, reason: str, why: str) -> None:
        if not self.status.done():
            self.status.set_exception(ConnectionError(why))


class HealthChecker:
    """Checks one engine until cancelled. ``first`` is done after the first outcome, good or bad."""

    def __init__(self, engine: Engine, checks: HealthChecks, clock: Clock) -> None:
        self._engine = engine
        self._checks = checks
        self._request = b"GET %b HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % (
            checks.path.encode("ascii"),
            engine.host,
        )
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        while True:
            began = self._loop.time()
            await self.check()
            if not self.first.done():
                self.first.set_result(None)
            await asyncio.sleep(max(0.0, began + self._checks.interval_s - self._loop.time()))

    async def check(self) -> None:
        """One check, with its outcome told to the engine."""
        engine, path = self._engine, self._checks.path
        try:
            async with asyncio.timeout(self._checks.timeout_s):  # wait_for of 3.11 can swallow a cancellation
                status = await self._ask()
        except TimeoutError:
            why = f"GET {path} was not answered within {self._checks.timeout_s:g} s"
            engine.answered_late(self._clock(), why)
        except OSError as error:
            engine.refused(self._clock(), f"GET {path} failed: {error.strerror or error}")
        else:
            if 200 <= status < 300:
                engine.answered_well(self._clock())
            else:
                engine.refused(self._clock(), f"GET {path} was answered with {status}")

    async def _ask(self) -> int:
        connection = await self._engine.pool.connect()
        if connection.closing:
            raise ConnectionError("closed the connection as soon as it was open")
        receiver = _StatusReceiver(self._loop)
        connection.send(receiver, self._request, b"", head_only=False, once=True)
        try:
            return await receiver.status
        finally:
            connection.let_go(receiver)
