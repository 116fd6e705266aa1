"""Fields that no client may say to an engine: forty ways to say them, and none arrives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from tests.disagg_proxy.harness import Bed, bed, with_deadline
from tests.hostile.forged import CHAT, COMPLETIONS, FORGED, GENERATE, WORDS, shown


def test_there_are_forty() -> None:
    assert len(FORGED) == 40


@with_deadline
async def test_of_forty_forged_requests_none_reaches_an_engine() -> None:
    async with bed(1) as b:
        arrived = []
        for path, body, head in FORGED:
            answer = await b.ask("POST", path, body.encode(), head)
            assert answer.status == 200, (path, body, answer.body)
            (exchange,) = b.engines[0].seen
            b.engines[0].seen.clear()
            if WORDS.search(shown(exchange)):
                arrived.append((path, body, head))
        assert arrived == []
        kinds = ("member", "field", "request_id")
        dropped = [b.metric("moonpool_proxy_reserved_dropped_total", kind=kind) for kind in kinds]
        assert dropped == [33, 5, 1]  # a credential is not counted: each client with a key sends one


# What an engine's reader might take for an object, and the proxy's does not: it could hide anything.
UNREADABLE = [
    b'\xef\xbb\xbf{"prompt":"x"}',
    '{"prompt":"x"}'.encode("utf-16"),
    '{"prompt":"x"}'.encode("utf-32"),
    b'{"prompt":"x","temperature":NaN}',
    b'[{"prompt":"x"}]',
    b'{"prompt":"x"} {"prompt":"y"}',
    b'{"prompt":"x",}',
    b"\x1f\x8b\x08\x00",
    b'{"a":%b}' % (b"[" * 600 + b"]" * 600),
    b"prompt=x&kv_transfer_params=y",
]


@with_deadline
@pytest.mark.parametrize("body", UNREADABLE)
async def test_a_body_that_cannot_be_read_reaches_no_engine(body: bytes) -> None:
    async with bed(1) as b:
        for path in (CHAT, COMPLETIONS, GENERATE, "/v1/responses", "/tokenize"):
            answer = await b.ask("POST", path, body)
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (400, "no_object")
        assert not b.engines[0].seen


@with_deadline
async def test_nothing_else_is_taken_out() -> None:
    """The names mean nothing where engines do not look for them, and what stays keeps its bytes."""
    tools = '[{"function":{"parameters":{"properties":{"request_id":{},"kv_transfer_params":{}}}}}]'
    whole = f'{{ "messages":[{{"rid":"\\u00e5"}}], "tools": {tools} ,"metadata":{{"rid":1}} , "n":1.50}}'
    async with bed(1) as b:
        await b.ask("POST", CHAT, whole.encode(), "X-Custom: 7\r\ntracestate: a=b\r\n")
        await b.ask("POST", CHAT, b'{"a":1.0, "rid":2 ,"b":[ ]}')
        kept, cut = b.engines[0].seen
        assert kept.body == whole.encode()
        assert (kept.headers["x-custom"], kept.headers["tracestate"]) == ("7", "a=b")
        assert cut.body == b'{"a":1.0,"b":[ ]}'


# Where prefill and decode are apart, the proxy says such fields itself.
FORGERY = re.compile(r"169\.254|(?<![0-9a-f])7777(?![0-9a-f])")


async def forged_to_all(b: Bed) -> list[str]:
    for path, body, head in FORGED:
        await b.ask("POST", path, body.encode(), head)
    said = [shown(exchange) for engine in b.engines for exchange in engine.seen]
    return [one for one in said if FORGERY.search(one)]


@with_deadline
@pytest.mark.parametrize("handover", ["two_step", "one_shot", "context_first", "generation_first"])
async def test_nor_where_two_engines_share_the_work(handover: str) -> None:
    async with bed(2, roles=("prefill", "decode"), policy="conductor", handover=handover) as b:
        assert await forged_to_all(b) == []


@with_deadline
async def test_an_engine_is_shown_its_own_key(tmp_path: Any) -> None:
    """By its address, its name, or as one of the settings; and also by health checks."""
    keys = tmp_path / "keys"
    keys.write_text("# remark\nof-all\nengine-1 of-one\n")
    async with bed(2, engine_key_file=str(keys)) as b:
        for _ in range(2):
            await b.ask("POST", CHAT, b"{}", "Authorization: Bearer of-the-client\r\n")
        shown = [engine.seen[0].headers["authorization"] for engine in b.engines]
        assert shown == ["Bearer of-all", "Bearer of-one"]


def test_a_path_that_cannot_be_meant_is_refused() -> None:
    engine = EngineSpec("a", "http://127.0.0.1:1")
    for path in ("v1/x", "/v1/../x", "/metrics", "/v1//x", "/*", "/v1/x?y", "/v1/%2e%2e"):
        with pytest.raises(ConfigError, match="proxy: "):
            ProxySettings(engines=(engine,), relay_paths=(path,))
    ProxySettings(engines=(engine,), relay_paths=("/v1/audio/*", "/run.it"))
