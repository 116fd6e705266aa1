"""Switches of single requests: whose word counts, which bodies carry them, and what is refused because no
engine could be told."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool._native import ProxyRequest
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.clients import Client
from moonpool.disagg_proxy.conductor.choice import Choice
from moonpool.disagg_proxy.conductor.hidden_pool import HiddenPool
from moonpool.disagg_proxy.dispatch import request_switches
from moonpool.disagg_proxy.dispatch.candidates import Candidates
from moonpool.disagg_proxy.dispatch.intake import Intake
from moonpool.disagg_proxy.dispatch.request_hints import BadHeader
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tools.mock_engine import api
from tests.disagg_proxy.client_rows import ROWS, shown
from tests.disagg_proxy.dispatch.handover_bed import PROMPT, text_for
from tests.disagg_proxy.fleet_bed import fleet, play, text_of
from tests.disagg_proxy.harness import Bed, Exchange, MockEngine, bed, with_deadline

COMPLETIONS = "/v1/completions"
BODY = b'{"prompt":[1,2,3]}'
FORGED = b'{"kv_transfer_params":{"moonpool":{"store":true,"load":true},"x":1},"prompt":[1,2,3]}'
STORE_OFF = "X-Moonpool-Store: off\r\n"
LOAD_OFF = "X-Moonpool-Load: off\r\n"
BOTH = ("store", "load")
POLICIES = ("round_robin", "least_load", "conductor")
SILENT: dict[str, Any] = {"tokenizer": ("none",)}


def told(exchange: Exchange) -> Any:
    return json.loads(exchange.body).get("kv_transfer_params")


async def last(b: Bed, body: bytes = BODY, head: str = "", path: str = COMPLETIONS, engine: int = 0) -> Any:
    answer = await b.ask("POST", path, body, head)
    assert answer.status == 200, answer.body
    return told(b.engines[engine].seen[-1])


def answered(engine: MockEngine, path: str = COMPLETIONS) -> int:
    """Requests that it got on this path; it may have been asked for ids on others."""
    return sum(each.target == path for each in engine.seen)


async def refused(b: Bed, head: str, path: str = COMPLETIONS, body: bytes = BODY) -> tuple[str, str]:
    """(reason, sentence)"""
    before = [answered(engine, path) for engine in b.engines]
    answer = await b.ask("POST", path, body, head)
    assert answer.status == 400, answer.body
    assert [answered(engine, path) for engine in b.engines] == before
    error = json.loads(answer.body)["error"]
    return error["code"], error["message"]


KEPT = {"moonpool": {"keep_s": 600}}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Row "a" stores nothing, "b" loads nothing, "free" does both, and what is saved for "kept" stays
    longer."""
    text = ROWS.replace('key = "key-of-a"\n', 'key = "key-of-a"\nstore = false\n')
    text = text.replace('key = "key-of-b"\n', 'key = "key-of-b"\nload = false\n')
    path = tmp_path / "clients.toml"
    text += '[[clients]]\nname = "free"\nkey = "key-of-free"\n'
    path.write_text(text + '[[clients]]\nname = "kept"\nkey = "key-of-kept"\nkeep_s = 600\n')
    return path


def test_a_header_switches_off_and_never_on() -> None:
    def read(client: Client | None = None, **fields: bytes) -> tuple[bool, bool]:
        return request_switches.read(fields, BOTH, client)[:2]

    shy = Client(name="shy", key="k", store=False)
    assert request_switches.read(None) is request_switches.NO_SWITCH
    assert read() == read(decision=b"1") == read(store=b"on", load=b"on") == (True, True)
    assert read(store=b"off") == (True, False)
    assert read(load=b"off", store=b"off") == (False, False)
    assert read(shy, store=b"on") == read(shy) == (True, False)
    assert read(shy, load=b"off") == (False, False)
    for value in (b"", b"OFF", b"false", b"0", b"off "):
        with pytest.raises(BadHeader, match="X-Moonpool-Store is on or off"):
            read(store=value)
    for taken in ((), ("load",)):
        with pytest.raises(BadHeader, match=r"X-Moonpool-Store is not taken here.*proxy\.switch_headers"):
            request_switches.read({"store": b"off"}, taken)


def test_a_switch_that_is_none_is_no_setting() -> None:
    engines = (EngineSpec("a", "http://127.0.0.1:1"),)
    assert ProxySettings(engines=engines, switch_headers=list(BOTH)).switch_headers == ["store", "load"]
    with pytest.raises(ConfigError, match="a switch is load or store, not 'priority'"):
        ProxySettings(engines=engines, switch_headers=["priority"])


@with_deadline
@pytest.mark.parametrize("policy", POLICIES)
async def test_the_row_of_a_key_switches_under_every_policy(rows: Path, policy: str) -> None:
    async with bed(1, policy=policy, clients_file=str(rows), **SILENT) as b:
        assert await last(b, head=shown("free")) is None
        assert b.engines[0].seen[-1].body.startswith(b'{"prompt":[1,2,3],"cache_salt"')
        assert await last(b, head=shown("a")) == {"moonpool": {"store": False}}
        assert await last(b, head=shown("b")) == {"moonpool": {"load": False}}
        assert await last(b, head=shown("kept")) == KEPT
        assert await last(b, FORGED, shown("a")) == {"moonpool": {"store": False}}
        assert await last(b, FORGED, shown("free")) is None
        for name in ("free", "a"):  # no header is taken here: nothing is left undone in silence
            reason, sentence = await refused(b, shown(name) + STORE_OFF)
            assert (reason, "is not taken here" in sentence) == ("bad_header", True)


@with_deadline
@pytest.mark.parametrize("policy", POLICIES)
async def test_headers_that_the_operator_takes(policy: str) -> None:
    async with bed(1, policy=policy, switch_headers=["store"], **SILENT) as b:
        assert await last(b) is None
        assert await last(b, head="X-Moonpool-Store: on\r\n") is None
        assert b.engines[0].seen[-1].body == BODY
        assert await last(b, FORGED, STORE_OFF) == {"moonpool": {"store": False}}
        assert (await refused(b, "X-Moonpool-Store: no\r\n"))[0] == "bad_header"
        assert (await refused(b, LOAD_OFF))[0] == "bad_header"
        why = json.loads(
            (await b.ask("POST", COMPLETIONS, BODY, STORE_OFF + "X-Moonpool-Decision: 1\r\n")).headers[
                "x-moonpool-decision"
            ]
        )
        assert why["switches"] == {"store": False}


@with_deadline
@pytest.mark.parametrize("policy", ["conductor", "round_robin"])
async def test_a_reload_switches_for_requests_from_then_on(
    rows: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "moonpool.proxy")
    text = rows.read_text()
    async with bed(1, policy=policy, clients_file=str(rows), **SILENT) as b:
        assert await last(b, head=shown("free")) is None
        rows.write_text(text.replace('"key-of-free"', '"key-of-free"\nstore = false'))
        b.proxy.reload()
        assert await last(b, head=shown("free")) == {"moonpool": {"store": False}}
        wrongs = ("store = 'off'", "store = 0", "store = []", "load = 'no'", "load = 1")
        for wrong in (*wrongs, "keep_s = true", "keep_s = nan", "keep_s = -1", "keep_s = 4233601"):
            rows.write_text(text.replace("store = false", wrong))
            b.proxy.reload()
            assert "the clients stay as they were: proxy: row 1 (a)" in caplog.text
            caplog.clear()
            assert await last(b, head=shown("a")) == {"moonpool": {"store": False}}
        rows.write_text(text.replace("store = false\n", ""))
        b.proxy.reload()
        assert await last(b, head=shown("a")) is None


@pytest.mark.parametrize("handover", ["two_step", "concurrent"])
def test_both_engines_are_told_and_the_hand_over_goes_on(
    handover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    read = api.read

    def noted(path: bytes, body: bytes, answer_tokens: int) -> api.Asked:
        if (params := json.loads(body).get("kv_transfer_params")) is not None:  # it is no question for ids
            seen.append(params)
        return read(path, body, answer_tokens)

    monkeypatch.setattr(api, "read", noted)

    async def scenario() -> None:
        async with fleet("prefill", "decode", handover=handover, switch_headers=list(BOTH)) as f:
            body = {"model": "mock", "prompt": PROMPT, "max_tokens": 4}
            headers = {"X-Moonpool-Store": "off", "X-Moonpool-Load": "off"}
            async with f.session.post(f.url + COMPLETIONS, json=body, headers=headers) as answer:
                assert text_of(await answer.json()) == text_for(PROMPT)
            assert f.engines["decode-1"].counts["fetched_tokens"] > 1_000
            await f.settle()

    play(scenario)
    assert [one["moonpool"] for one in seen] == [{"load": False, "store": False}] * 2
    assert [one["do_remote_decode"] for one in seen] == [True, False]
    assert [one["do_remote_prefill"] for one in seen] == [False, True]


@with_deadline
async def test_what_prefill_says_of_its_blocks_stays_beside_the_switches() -> None:
    offer = {"remote_host": "h", "moonpool": {"handover": {"lease": 7}, "store": True}, "remote_port": 1}

    async def offers(exchange: Exchange) -> None:
        await exchange.answer(json.dumps({"kv_transfer_params": offer}).encode())

    async with bed(2, roles=("prefill", "decode"), switch_headers=["store"]) as b:
        b.engines[0].behave = offers
        expected = offer | {"moonpool": {"handover": {"lease": 7}, "store": False}}
        assert await last(b, head=STORE_OFF, engine=1) == expected
        assert told(b.engines[0].seen[-1])["moonpool"] == {"store": False}
        assert told(b.engines[0].seen[-1])["do_remote_decode"] is True


@with_deadline
@pytest.mark.parametrize("how", ["500", "no parameters", "cut"])
async def test_an_engine_that_computes_alone_is_told_too(how: str) -> None:
    async def fails(exchange: Exchange) -> None:
        if how == "cut":
            return exchange.cut()
        await exchange.answer(b"{}", 500 if how == "500" else 200)

    async with bed(2, roles=("prefill", "decode"), switch_headers=["store"]) as b:
        b.engines[0].behave = fails
        assert await last(b, head=STORE_OFF, engine=1) == {"moonpool": {"store": False}}


@with_deadline
async def test_a_second_engine_is_told_too() -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    async with bed(2, switch_headers=["store"]) as b:
        b.engines[0].behave = cut
        for _ in range(2):
            assert await last(b, head=STORE_OFF, engine=1) == {"moonpool": {"store": False}}
        assert told(b.engines[0].seen[0]) == {"moonpool": {"store": False}}


def cards(*makers: str) -> Callable[[list[MockEngine]], None]:
    """Engines of these makers, all of the model "m"."""

    def prepare(engines: list[MockEngine]) -> None:
        for engine, maker in zip(engines, makers, strict=True):
            engine.models = json.dumps({"data": [{"id": "m", "owned_by": maker}]}).encode()

    return prepare


def broken(*_: Any) -> Any:
    raise RuntimeError("a policy of the user's own")


@with_deadline
@pytest.mark.parametrize("prompt", ["[1,2,3]", '"a text"'], ids=["ids", "text"])
@pytest.mark.parametrize("policy", ["least_load", "conductor"])
async def test_a_policy_that_fails_loses_no_switch(
    policy: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where it fails at once, nor after an engine was asked for the ids of a text."""
    body = b'{"model":"m","prompt":%b}' % prompt.encode()
    for makers in (("sglang", "vllm", "sglang"), ("sglang", "sglang")):
        more: dict[str, Any] = {"policy": policy, "switch_headers": ["store"], "prepare": cards(*makers)}
        async with bed(len(makers), **more) as b:
            dispatcher = b.proxy._dispatcher
            monkeypatch.setattr(type(dispatcher.scheduler.policy), "choose", broken)
            for count in range(1, 5):  # the data plane would take each engine in turn
                if "vllm" in makers:
                    expected = {"moonpool": {"store": False}}
                    assert await last(b, body, STORE_OFF, engine=1) == expected
                    assert [answered(engine) for engine in b.engines] == [0, count, 0]
                else:
                    reason, sentence = await refused(b, STORE_OFF, body=body)
                    assert (reason, "no engine that is left" in sentence) == ("switches", True)
                assert b.metric("moonpool_proxy_policy_errors_total") == count


@with_deadline
@pytest.mark.parametrize("policy", ["least_load", "conductor"])
async def test_a_policy_that_chooses_another_engine_than_it_may(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data plane refuses the plan, and would send the request to any engine of the model."""

    def prepare(engines: list[MockEngine]) -> None:
        cards("sglang", "vllm", "vllm")(engines)
        engines[2].models = b'{"data":[{"id":"other","owned_by":"vllm"}]}'

    async with bed(3, policy=policy, prepare=prepare, switch_headers=["store"], **SILENT) as b:
        dispatcher = b.proxy._dispatcher
        other = Choice(dispatcher.workers[2])
        monkeypatch.setattr(type(dispatcher.scheduler.policy), "choose", lambda *_: other)
        for _ in range(2):
            reason, sentence = await refused(b, STORE_OFF, body=b'{"model":"m","prompt":[1]}')
            assert (reason, "engine-2, which the policy chose" in sentence) == ("switches", True)
        assert await last(b, b'{"model":"other","prompt":[1]}', STORE_OFF, engine=2) is not None


@with_deadline
async def test_paths_on_which_no_engine_can_be_told() -> None:
    async with bed(1, switch_headers=["store"], relay_paths=["/v1/audio/*"]) as b:
        for path in ("/v1/embeddings", "/pooling", "/v1/score", "/generate", "/v1/audio/speech"):
            reason, sentence = await refused(b, STORE_OFF, path)
            assert (reason, "on this path" in sentence) == ("switches", True)
            assert await last(b, path=path) is None
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            assert await last(b, head=STORE_OFF, path=path) == {"moonpool": {"store": False}}
        for path in ("/tokenize", "/v1/messages/count_tokens"):  # which compute nothing
            assert await last(b, head=STORE_OFF, path=path) is None
        assert (await b.ask("GET", "/v1/models/x", head=STORE_OFF)).status == 200


@with_deadline
@pytest.mark.parametrize("head", [STORE_OFF, LOAD_OFF])
async def test_beams_cannot_be_told(head: str) -> None:
    """vLLM gives each beam sampling parameters of its own, without kv_transfer_params."""
    off = {"moonpool": {"load" if head == LOAD_OFF else "store": False}}
    async with bed(1, switch_headers=list(BOTH)) as b:
        for path in ("/v1/chat/completions", COMPLETIONS):
            for name, value in ((b"use", b"true"), (b"use", b"1"), (rb"\u0075se", b'"yes"')):
                body = b'{"prompt":[1],"%b_beam_search":%b}' % (name, value)
                reason, sentence = await refused(b, head, path, body)
                assert (reason, "with use_beam_search" in sentence) == ("switches", True)
                assert await last(b, body, path=path) is None
            for value in (b"false", b"0", b"null"):
                body = b'{"prompt":[1],"use_beam_search":%b}' % value
                assert await last(b, body, head, path) == off
        assert await last(b, b'{"input":"a","use_beam_search":true}', head, "/v1/responses") == off


@with_deadline
async def test_beams_are_not_hidden_by_what_is_no_json() -> None:
    """Python's reader, which is vLLM's, takes half a surrogate pair."""
    deep = b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"  # as the proxy takes it
    async with bed(1, switch_headers=["store"]) as b:
        body = b'{"use_beam_search":true,"prompt":"\\ud83d"}'
        reason, sentence = await refused(b, STORE_OFF, body=body)
        assert (reason, "half a surrogate pair" in sentence) == ("switches", True)
        assert await last(b, body) is None
        assert await last(b, deep, STORE_OFF) == {"moonpool": {"store": False}}


@with_deadline
async def test_a_longer_life_is_no_reason_to_refuse(rows: Path) -> None:
    """It is not told where it cannot be; a prompt that is not stored has no life."""

    def prepare(engines: list[MockEngine]) -> None:
        engines[1].models = b'{"data":[{"id":"s","owned_by":"sglang"}]}'
        engines[0].models = b'{"data":[{"id":"v","owned_by":"vllm"}]}'

    more: dict[str, Any] = {"clients_file": str(rows), "switch_headers": ["store"]}
    async with bed(2, policy="round_robin", prepare=prepare, **more) as b:
        head = shown("kept")
        assert await last(b, b'{"model":"v","prompt":[1]}', head) == KEPT
        assert await last(b, b'{"model":"v","prompt":[1]}', head, path="/v1/embeddings") is None
        assert await last(b, b'{"model":"s","prompt":[1]}', head, engine=1) is None
        assert await last(b, b'{"model":"v","prompt":[1],"use_beam_search":true}', head) == KEPT
        off = await last(b, b'{"model":"v","prompt":[1]}', head + STORE_OFF)
        assert off == {"moonpool": {"store": False}}


@with_deadline
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("maker", ["sglang", "tensorrt_llm", "vllm"])
async def test_engines_of_other_kinds(maker: str, policy: str) -> None:
    """SGLang's could not be told, and TensorRT-LLM's would refuse the member."""

    def prepare(engines: list[MockEngine]) -> None:
        card = {"id": "m", "owned_by": maker}
        engines[0].models = json.dumps({"data": [card]}).encode()

    async with bed(1, policy=policy, prepare=prepare, switch_headers=["store"], **SILENT) as b:
        if maker == "vllm":
            assert await last(b, head=STORE_OFF) == {"moonpool": {"store": False}}
        else:
            reason, sentence = await refused(b, STORE_OFF)
            assert (reason, "engine-0, which is not vLLM's" in sentence) == ("switches", True)
        assert await last(b, FORGED) is None


@with_deadline
@pytest.mark.parametrize("handover", ["context_first", "generation_first", "one_shot"])
async def test_hand_overs_of_other_kinds(handover: str) -> None:
    async with bed(2, roles=("prefill", "decode"), handover=handover, switch_headers=["store"]) as b:
        assert (await refused(b, STORE_OFF))[0] == "switches"


def test_the_pool_is_no_reason_to_choose_for_a_request_that_does_not_load() -> None:
    locator = SimpleNamespace(find=lambda ids, seed: SimpleNamespace(own=[16], pool=48))
    scheduler = SimpleNamespace(inflight=SimpleNamespace(hidden_pool=HiddenPool(lambda: "")))
    intake = Intake(Candidates(1), cast(Any, locator), cast(Any, scheduler))

    def pool_of(*off: tuple[str, str]) -> tuple[int, int]:
        request = SimpleNamespace(model="", cache_salt=None, candidates=(), max_tokens=1, switches=list(off))
        asked, _ = intake.look_up(cast(ProxyRequest, request), bytes(4 * 64))
        return asked.pool, asked.presumed

    assert pool_of() == pool_of(("store", "false")) == (48, 0)
    assert pool_of(("load", "false")) == (0, 0)
