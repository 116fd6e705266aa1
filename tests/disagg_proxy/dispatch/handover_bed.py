"""Engines that hand over, and what is asked of a proxy before them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable

from moonpool.core.config.proxy_section import HealthChecks
from moonpool.disagg_proxy.tools.mock_engine import api
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import Timing
from tests.disagg_proxy.fleet_bed import Fleet

SELDOM = HealthChecks(interval_s=1e6)  # one check at the start: what happens later is found out by requests
SLOW_PREFILL = Timing(prefill_s_per_token=1e-4)  # 1,000 tokens: 0.1 s
PROMPT = "long " * 1_000


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def engine_of(f: Fleet, role: str) -> MockEngine:
    return next(engine for name, engine in f.engines.items() if name.startswith(role))


def prefill_takes(engines: Iterable[MockEngine], seconds_per_token: float) -> None:
    """Of what they compute from now on. Long for one that is to die in the middle of it: so much longer than
    anything holds a test up."""
    for engine in engines:
        engine.batch._timing = Timing(prefill_s_per_token=seconds_per_token)


async def metrics_of(f: Fleet) -> dict[str, float]:
    async with f.session.get(f.url + "/metrics") as page:
        lines = [line for line in (await page.text()).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def text_for(prompt: str) -> str:
    """What any mock engine answers: it depends on nothing but the prompt."""
    body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 4}).encode()
    return "".join(api.words(api.read(b"/v1/completions", body, 4)))


async def check(f: Fleet) -> None:
    """One round of health checks."""
    from moonpool.disagg_proxy.engines.health import HealthChecker

    for engine in f.proxy.engines:
        await HealthChecker(engine, HealthChecks()).check()
