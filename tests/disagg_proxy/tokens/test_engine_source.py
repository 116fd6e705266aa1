"""Asking an engine, over real sockets. The engine here is a page that answers in vLLM 0.32's form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from moonpool.disagg_proxy.tokens.engine_source import REST_S, EngineSource
from moonpool.disagg_proxy.tokens.source import IdCache, TextPrompt, key_of

CHAT = TextPrompt("chat", "m", b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5}')
COMPLETION = TextPrompt("completions", "m", b'{"model":"m","prompt":"hi"}')
Page = Callable[[web.Request], Coroutine[Any, Any, web.Response]]


@asynccontextmanager
async def engine(pages: dict[str, Page]) -> AsyncIterator[str]:
    app = web.Application()
    for path, page in pages.items():
        app.router.add_post(path, page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask(
    pages: dict[str, Page], *prompts: TextPrompt, deadline_s: float = 5.0
) -> tuple[list[list[int] | None], int]:
    async def scenario() -> tuple[list[list[int] | None], int]:
        async with engine(pages) as url:
            source = EngineSource(lambda model: [url], deadline_s=deadline_s)
            answers = [await source.ids(prompt) for prompt in prompts]
            await source.close()
            return [
                None if ids is None else np.frombuffer(ids, "<u4").tolist() for ids in answers
            ], source.failures

    return asyncio.run(scenario())


def answer(content: object, status: int = 200) -> Page:
    async def page(request: web.Request) -> web.Response:
        return web.Response(body=json.dumps(content).encode(), status=status)

    return page


def test_the_render_page_is_asked_with_the_bytes_of_the_client() -> None:
    seen = []

    async def page(request: web.Request) -> web.Response:
        seen.append(await request.read())
        return web.json_response({"token_ids": [1, 2, 4_000_000_000], "sampling_params": {}})

    answers, failures = ask({"/v1/chat/completions/render": page}, CHAT)
    assert (answers, failures) == ([[1, 2, 4_000_000_000]], 0)
    assert seen == [CHAT.body]


def rendered(*names: str, offset: int = 3, **changes: Any) -> dict[str, Any]:
    """The answer for a prompt of 40 tokens with images of five."""
    places = [{"offset": offset + 10 * number, "length": 5} for number in range(len(names))]
    features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, "kwargs_data": None}
    return {"token_ids": [*range(20), *[99] * 20], "features": features | changes}


def test_prompts_with_other_images_are_told_apart() -> None:
    pages = [rendered(), rendered("a"), rendered("b"), rendered("a"), rendered("a", "b"), rendered("b", "a")]
    answers = [ask({"/v1/chat/completions/render": answer(page)}, CHAT)[0][0] for page in pages]
    text, one, other, again, two, swapped = answers
    assert text is not None
    assert text == pages[0]["token_ids"]
    for ids in answers[1:]:
        assert ids is not None
        assert (len(ids), ids[:3], ids[23:]) == (40, text[:3], text[23:])
        assert not set(ids[3:8]) & set(text)
    assert one == again
    assert len({str(ids) for ids in (one, other, two, swapped)}) == 4
    assert two is not None
    assert two[8:13] == text[8:13]


@pytest.mark.parametrize(
    "features",
    [
        rendered("a", offset=36),
        rendered("a", offset=-1),
        rendered("a", mm_hashes={}),
        rendered("a", mm_hashes=3),
    ],
)
def test_odd_places_of_images_give_no_ids(features: dict[str, Any]) -> None:
    assert ask({"/v1/chat/completions/render": answer(features)}, CHAT) == ([None], 1)


@pytest.mark.parametrize(
    ("content", "ids"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "hi"}], None),
        ([{"type": "text", "text": "hi"}], [5, 6]),
        ("hi", [5, 6]),
    ],
)
def test_the_tokenize_page_tells_nothing_of_images(content: object, ids: list[int] | None) -> None:
    prompt = TextPrompt(
        "chat", "m", json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    )
    assert ask({"/tokenize": answer({"tokens": [5, 6]})}, prompt) == ([ids], 0)


def test_completions_take_the_only_prompt_of_a_list() -> None:
    one = answer([{"token_ids": [7]}])
    two = answer([{"token_ids": [7]}, {"token_ids": [8]}])
    assert ask({"/v1/completions/render": one}, COMPLETION)[0] == [[7]]
    assert ask({"/v1/completions/render": two}, COMPLETION)[0] == [None]


@pytest.mark.parametrize("status", [404, 403, 401])
def test_an_engine_without_render_is_asked_to_tokenize_and_for_render_only_once(status: int) -> None:
    """404: an older one; 403: vLLM 0.32, where it was not switched on."""
    renders, bodies = [], []

    async def render(request: web.Request) -> web.Response:
        renders.append(1)
        return web.Response(status=status)

    async def tokenize(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"tokens": [5, 6], "count": 2})

    pages: dict[str, Page] = {"/v1/chat/completions/render": render, "/tokenize": tokenize}
    assert ask(pages, CHAT, CHAT)[0] == [[5, 6], [5, 6]]
    assert len(renders) == 1
    assert bodies[0] == {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "content", [{"token_ids": [-1]}, {"token_ids": [2**33]}, {"token_ids": "x"}, {}, [], {"token_ids": [1.5]}]
)
def test_an_answer_that_lies_is_none(content: object) -> None:
    assert ask({"/v1/chat/completions/render": answer(content)}, CHAT) == ([None], 1)


def test_refusals_dead_engines_and_no_engines_are_none() -> None:
    assert ask({"/v1/chat/completions/render": answer({}, 400), "/tokenize": answer({}, 400)}, CHAT)[0] == [
        None
    ]

    async def scenario() -> None:
        gone = EngineSource(lambda model: ["http://127.0.0.1:1"])
        assert await gone.ids(CHAT) is None
        nobody = EngineSource(lambda model: [])
        assert await nobody.ids(CHAT) is None
        await gone.close()
        await nobody.close()

    asyncio.run(scenario())


def test_an_engine_that_hangs_costs_the_deadline() -> None:
    async def page(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert ask({"/v1/chat/completions/render": page}, CHAT, deadline_s=0.1) == ([None], 1)


def test_engines_take_turns_and_one_that_hangs_rests() -> None:
    asked = []
    clock = [0.0]

    async def hang(request: web.Request) -> web.Response:
        asked.append("hangs")
        await asyncio.Event().wait()
        raise AssertionError

    def well(name: str) -> Page:
        async def page(request: web.Request) -> web.Response:
            asked.append(name)
            return web.json_response({"token_ids": [1]})

        return page

    async def scenario() -> None:
        path = "/v1/chat/completions/render"
        async with (
            engine({path: hang}) as slow,
            engine({path: well("a")}) as a,
            engine({path: well("b")}) as b,
        ):
            source = EngineSource(lambda model: [slow, a, b], deadline_s=1.0, clock=lambda: clock[0])
            answers = [await source.ids(CHAT) is None for _ in range(9)]
            assert answers.count(True) == asked.count("hangs") == 1
            assert asked.count("a") == asked.count("b") == 4
            clock[0] = REST_S + 1
            for _ in range(3):
                await source.ids(CHAT)
            assert asked.count("hangs") == 2
            alone = EngineSource(lambda model: [slow], deadline_s=0.5, clock=lambda: clock[0])
            assert [await alone.ids(CHAT) for _ in range(5)] == [None] * 5
            assert asked.count("hangs") == 3  # four prompts waited for nothing
            await source.close()
            await alone.close()

    asyncio.run(scenario())


def test_an_engine_with_an_api_key_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    async def page(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=401)

    pages = {"/v1/chat/completions/render": page, "/tokenize": page}
    assert ask(pages, CHAT, CHAT, CHAT)[0] == [None] * 3
    assert len(asked) == 2
    (record,) = [each for each in caplog.records if each.name == "moonpool.proxy"]
    assert "--tokenizer MODEL=FOLDER" in record.getMessage()


def test_known_prompts_are_bounded_and_found() -> None:
    known: IdCache[bytes] = IdCache(bytes_max=1_000)
    for number in range(40):
        known.keep(key_of(TextPrompt("chat", "m", b"%d" % number)), b"abcd" * 10)
        known.check_integrity()
    assert known.find(key_of(TextPrompt("chat", "m", b"39"))) == b"abcd" * 10
    assert known.find(key_of(TextPrompt("chat", "m", b"0"))) is None
    assert known.find(key_of(TextPrompt("completions", "m", b"39"))) is None
