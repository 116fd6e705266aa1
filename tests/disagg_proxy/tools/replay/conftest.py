"""A mock engine on a thread of its own, for commands that run their own loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings


@pytest.fixture
def mock_engine_url() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def make() -> tuple[MockEngine, str]:
        engine = MockEngine(MockSettings(port=0))
        return engine, await engine.open()

    engine, url = asyncio.run_coroutine_threadsafe(make(), loop).result(20)
    yield url
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()
