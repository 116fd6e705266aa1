"""A proxy in front of mock engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import uvloop

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings

DEADLINE_S = 60.0
SEED = 20261121


@dataclass
class Fleet:
    url: str
    proxy: Proxy
    engines: dict[str, MockEngine]
    session: aiohttp.ClientSession

    async def ask(
        self, prompt: str, *, explain: bool = True, **more: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The answer, and what the proxy says of its decision."""
        body = {"model": "mock", "prompt": prompt, "max_tokens": 4, **more}
        headers = {"X-Moonpool-Decision": "1"} if explain else {}
        async with self.session.post(self.url + "/v1/completions", json=body, headers=headers) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            return content, json.loads(answer.headers.get("X-Moonpool-Decision", "{}"))

    async def hear(self) -> None:
        """Until the proxy has heard of every block that an engine has."""
        cached = sum(engine.accounts()["blocks_cached"] for engine in self.engines.values())
        while self.proxy._locator.stats().get("entries", 0) < cached:
            await asyncio.sleep(0.005)

    def is_clean(self) -> bool:
        names = ("waiting", "running", "blocks_held", "leases")
        return not any(engine.accounts()[name] for engine in self.engines.values() for name in names)

    async def settle(self) -> None:
        """Until nobody holds anything, in the engines and in the proxy's books."""
        while not self.is_clean():
            await asyncio.sleep(0.005)
        dispatcher = self.proxy._dispatcher
        while len(dispatcher.scheduler.inflight):
            dispatcher.learn()
            await asyncio.sleep(0.005)
        self.proxy.check_integrity()


@asynccontextmanager
async def fleet(
    *roles: str,
    policy: str = "conductor",
    events: bool = False,
    mock: MockSettings | None = None,
    handover: str = "two_step",
    health: HealthChecks | None = None,
    **more: Any,
) -> AsyncIterator[Fleet]:
    """An engine for each role, named by it and its place. A mock has its bootstrap page at its own port. With
    handover "one_shot" they are like SGLang's, and the proxy finds out by itself what they are."""
    async with AsyncExitStack() as stack:
        engines, specs, sources = {}, [], []
        for place, role in enumerate(roles):
            settings = replace(mock or MockSettings(), port=0)
            if handover == "one_shot":
                settings = replace(settings, sglang={"both": "null"}.get(role, role))
            if events:
                settings = replace(settings, events="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*")
            engine = MockEngine(settings)
            name = f"{role}-{place}"
            url = await engine.open()
            if handover == "one_shot":
                specs.append(EngineSpec(name, url))
            else:
                specs.append(EngineSpec(name, url, role, str(engine.port) if role == "prefill" else ""))
            stack.push_async_callback(engine.close)
            engines[name] = engine
            if events:
                sources.append(EventSource(name, *engine.endpoints))
        proxy = Proxy(
            ProxySettings(
                port=0,
                engines=tuple(specs),
                policy=policy,
                events=tuple(sources),
                handover="auto" if handover == "one_shot" else handover,
                health=health or HealthChecks(interval_s=0.2),
                **more,
            )
        )
        stack.push_async_callback(proxy.close)
        url = await proxy.open()
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Fleet(url, proxy, engines, session)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bounded())


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["text"]
    return text
