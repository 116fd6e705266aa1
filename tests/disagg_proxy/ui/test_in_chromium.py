"""The page in a real browser: behind a real proxy, of a thousand instances, without data, in the dark."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moonpool.core.service.cluster import MasterRow
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tools.mock_engine.server import MockEngine
from moonpool.disagg_proxy.tools.mock_engine.settings import MockSettings
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.replay.run import Plan, replay_here
from moonpool.disagg_proxy.tools.replay.sender import Bounds
from moonpool.disagg_proxy.ui.page import page_answer
from moonpool.disagg_proxy.ui.snapshot import ProxyGroup

from ..harness import with_deadline
from ..tools.replay.beds import trace_of
from .browser import needs_chromium, tab
from .made import page

pytestmark = [needs_chromium, pytest.mark.timeout(180)]
IN_TIME_S = 120.0
FRESH = "document.body.dataset.state === 'fresh'"
STALE = "document.body.dataset.state === 'stale'"


@asynccontextmanager
async def serving(answers: list[tuple[int, Any]]) -> AsyncIterator[str]:
    """The page with these answers of /ui/data by turns: (status, JSON). It asks every 2 s, so a test that
    looks at what came of one gives the next only then."""
    made = page_answer()
    fields = "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in made.headers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        except asyncio.IncompleteReadError:
            return  # a connection that was opened in advance
        status, body, kind = 404, b"", "text/plain"
        if path == b"/ui":
            status, body, kind = 200, made.body, made.content_type.decode()
        elif path == b"/ui/data":
            status, value = answers[0]
            answers.append(answers.pop(0))
            body, kind = value if isinstance(value, bytes) else msgspec.json.encode(value), "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\n{fields if path == b'/ui' else ''}"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/ui"


def in_time(test: Any) -> Any:
    return with_deadline(test, IN_TIME_S)


@in_time
async def test_behind_a_real_proxy(tmp_path: Path) -> None:
    engines = [MockEngine(replace(MockSettings(port=0), answer_tokens=4)) for _ in range(2)]
    urls = [await engine.open() for engine in engines]
    specs = tuple(EngineSpec(name, url) for name, url in zip(("left", "right"), urls, strict=True))
    proxy = Proxy(ProxySettings(port=0, engines=specs, policy="conductor"))
    try:
        url = await proxy.open()
        rows = [(float(at), 2048, 4, [1, 2, 3, 10 + at]) for at in range(12)]
        plan = Plan([url], speed=1e6, bounds=Bounds(concurrency=1))
        done = await replay_here(plan, trace_of(tmp_path, *rows), Prompts())
        assert len(done.results.ttft_s) == 12
        async with tab() as t:
            await t.open(f"{url}/ui")
            await t.until(FRESH)
            await t.until("document.querySelectorAll('#last tr').length === 12")
            assert "all healthy" in await t.text("#health")
            assert await t.text("#policy") == "policy conductor"
            assert await t.count("#engines tr") == 2
            assert "left" in await t.text("#engines")
            assert await t.count("#scatter circle.dot") == 12
            assert "within a factor of 1.5" in await t.text("#errors")
            said = await t.text("#last")
            assert "predicted" in said
            assert "no engine held its beginning" in said
            assert "behind 1,5" in said  # of 2,048 tokens three blocks of 512 are shared
            assert await t.count("#tiers rect.own") >= 1
            assert "own cache" in await t.text("#tiers-legend")
            assert not t.problems
            await proxy.drain()
            await proxy.close()
            await t.until(STALE)
            assert "does not answer" in await t.text("#notice")
            assert await t.count("#last tr") == 12  # what was there stays
    finally:
        await proxy.close()
        for engine in engines:
            await engine.close()


@in_time
async def test_a_thousand_instances() -> None:
    async with serving([(200, page(1000))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.count("#fleet rect.cell") == 1000
        assert await t.count("#fleet rect.bad") == 50
        tiles = await t.text("#tiles")
        for shown in ("1.2M", "51 s", "0.20 s / 0.90 s"):  # tokens not computed, prefill saved, first token
            assert shown in tiles
        assert await t.count("#fleet rect.warn") == 50
        assert await t.count("#engines tr") == 20
        assert await t.count("#engines .state.bad") == 20  # trouble first
        assert await t.count("img") == 0  # what an engine says stays text
        assert "<img" in await t.text("#engines")
        assert "50 of 1,000 not healthy" in await t.text("#health")
        await t.evaluate("document.getElementById('filter').value = 'engine-99'")
        await t.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
        assert await t.count("#engines tr") == 11
        await t.evaluate("document.getElementById('filter').value = ''")
        await t.evaluate("document.getElementById('sort').value = 'wait_s'")
        await t.evaluate("document.getElementById('sort').dispatchEvent(new Event('change'))")
        assert "2.80 s" in await t.text("#engines tr:first-child")
        await t.evaluate("document.getElementById('all').click()")
        assert await t.count("#engines tr") == 1000
        assert await t.count("#last tr") == 20
        await t.evaluate("document.getElementById('more').click()")
        assert await t.count("#last tr") == 60
        assert "ttft" in await t.text("#refused")
        wide = await t.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert wide  # nothing hangs out of the page
        assert not t.problems


@in_time
async def test_one_process_of_several_says_which_it_is_and_what_it_shares() -> None:
    first = page(3, group=ProxyGroup(1, 4, "127.0.0.1:9001", 3, 17), process=11)
    second = page(3, group=ProxyGroup(2, 4, "127.0.0.1:9002", 3, 17), process=12)
    answers = [(200, first)]
    async with serving(answers) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.text("#process") == "process 2 of 4"
        said = await t.text("#share")
        assert "3 others tell this one, of 17 requests" in said
        assert "this one is also at 127.0.0.1:9001" in said
        answers.append((200, second))
        await t.until(
            "document.getElementById('process').textContent === 'process 3 of 4' &&"
            "document.getElementById('share').innerText.includes('Another process than before')"
        )
        assert not t.problems
    async with serving([(200, page(3, group=ProxyGroup(others=1)))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.text("#process") == ""
        assert "1 other tells this one" in await t.text("#share")
    async with serving([(200, page(3))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.evaluate("document.getElementById('share').hidden")


@in_time
async def test_the_masters_of_the_pool() -> None:
    two = [
        MasterRow(
            "10.0.0.1:7700",
            "owner",
            "10.0.0.2:7700",
            True,
            True,
            0.004,
            12,
            3400,
            range="0/2",
            term=1_700_000_000_000,
        ),
        MasterRow("10.0.0.2:7700", why="the master at 10.0.0.2:7700 refuses: <img src=x>"),
    ]
    async with serving([(200, page(3, masters=two))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.count("#masters tr") == 2
        first, second = [await t.text(f"#masters tr:nth-child({row})") for row in (1, 2)]
        for text in ("10.0.0.1:7700", "owner", "in step", "10.0.0.2:7700", "4.0 ms", "12", "3,400", "0/2"):
            assert text in first
        assert "2023-11-14 22:13:20" in first
        assert "does not answer" in second
        assert "<img" in second
        assert not t.problems
    async with serving([(200, page(3))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        assert await t.evaluate("document.getElementById('masters-card').hidden")


@in_time
async def test_figures_that_are_missing_are_dashes() -> None:
    absurd = {
        "engines": "many",
        "engine_rows": 5,
        "steps": [[1], None],
        "points": [[None, "a"], 3],
        "last": "no",
    }
    holes = page(2, engine_columns=[], step_columns=None, last=[{}], rejected=None, rejected_lately=[])
    nobody = page(0, healthy=0, steps=[], points=[], last=[])
    async with tab() as t:
        for body in ({}, [], absurd, holes, nobody):
            async with serving([(200, body)]) as url:
                await t.open(url)
                await t.until(FRESH)
                assert await t.count("#tiles .tile") == 11 + 2 * ("total" in body)  # what was saved
                text = await t.text("main")
                assert "NaN" not in text
                assert "undefined" not in text
        assert not t.problems


@in_time
async def test_no_answer_is_said_and_healed() -> None:
    answers: list[tuple[int, Any]] = [(500, {})]
    async with serving(answers) as url, tab() as t:
        await t.open(url)
        await t.until(STALE)
        assert "it says 500" in await t.text("#notice")
        answers[0] = (200, b"no JSON")
        await t.until("document.getElementById('notice').innerText.includes('JSON')")
        answers[0] = (200, page(3))
        await t.until(FRESH)
        assert await t.evaluate("document.getElementById('notice').hidden")
        assert await t.count("#engines tr") == 3


@in_time
async def test_a_key_is_asked_for_and_sent(tmp_path: Path) -> None:
    engine, keys = MockEngine(MockSettings(port=0)), tmp_path / "keys"
    keys.write_text("alpha\n")
    spec = EngineSpec("left", await engine.open())
    proxy = Proxy(ProxySettings(port=0, engines=(spec,), policy="conductor", api_keys_file=str(keys)))
    try:
        url = await proxy.open()
        async with tab() as t:
            await t.open(f"{url}/ui")
            # Not STALE: a page that was slow to be answered is so, too.
            await t.until("document.getElementById('notice').innerText.includes('it wants an API key')")
            await t.evaluate("document.getElementById('key').value = 'alpha'")
            await t.evaluate("document.getElementById('key').dispatchEvent(new Event('change'))")
            await t.until(FRESH)
            assert await t.evaluate("document.getElementById('locked').hidden")
            assert await t.count("#engines tr") == 1
    finally:
        await proxy.close()
        await engine.close()


@in_time
async def test_on_a_telephone_rows_are_one_line(tmp_path: Path) -> None:
    """Newcomer 26: rows of the last requests were five lines high, and empty as far as they were seen."""
    async with serving([(200, page(30, explains=False))]) as url, tab() as t:
        await t.open(url)
        await t.picture(tmp_path / "small.png", width=420)
        await t.until(FRESH)
        heights = "Array.from(document.querySelectorAll('#last tr')).map(row => row.offsetHeight)"
        assert await t.evaluate(f"Math.max(...{heights})") < 70
        assert "what engines say" in await t.text("#last-note")
        labels = "Array.from(document.querySelectorAll('#tiers text, #line text')).map(t => t.textContent)"
        assert await t.evaluate(f"new Set({labels}.slice(0, 3)).size") == 3


@in_time
async def test_light_and_dark_differ_and_text_can_be_read(tmp_path: Path) -> None:
    """Contrast of text on its card, by WCAG's formula, at least 4.5 to 1 in both."""
    async with serving([(200, page(30))]) as url, tab() as t:
        await t.open(url)
        await t.until(FRESH)
        grounds = set()
        for scheme in ("light", "dark"):
            await t.picture(tmp_path / f"{scheme}.png", scheme=scheme)
            assert (tmp_path / f"{scheme}.png").stat().st_size > 20_000
            colours = {
                name: await t.evaluate(f"getComputedStyle(document.querySelector('{where}')).{name}")
                for name, where in (("color", ".tile .quiet"), ("backgroundColor", ".tile"))
            }
            grounds.add(colours["backgroundColor"])
            assert contrast(colours["color"], colours["backgroundColor"]) >= 4.5
        assert len(grounds) == 2


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """colour: "rgb(1, 2, 3)"."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
