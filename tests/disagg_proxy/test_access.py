"""Who may use the proxy, which models it serves, and what it writes down."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy import server
from moonpool.disagg_proxy.settings import read_api_keys

from .harness import MockEngine, bed, proxy_process, until, with_deadline

CHAT = "/v1/chat/completions"
OBSERVATION = struct.Struct("<Qqii6d4iHBBBBBB16s8s8s")  # relay/observations.hpp


@with_deadline
async def test_api_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta \n")
    async with bed(1, api_keys_file=str(file)) as b:
        for shown in (
            "",
            "Authorization: Bearer gamma\r\n",
            "Authorization: alpha\r\n",
            "X-Key: alpha\r\n",
            "Authorization: Bearer alpha2\r\n",
            "Authorization: Bearer \r\n",
        ):
            client = await b.client()
            for _ in range(2):  # the connection stays usable
                answer = await client.ask("POST", CHAT, b"{}", shown)
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert json.loads(answer.body)["error"]["code"] == "invalid_api_key"
        assert not b.engines[0].seen
        assert (await b.ask("POST", CHAT, b"{}", "Authorization: Bearer alpha\r\n")).status == 200
        assert (await b.ask("POST", CHAT, b"{}", "authorization: bearer beta\r\n")).status == 200
        assert (await b.ask("GET", "/health")).status == 200
        assert b.metric("moonpool_proxy_rejected_total", reason="invalid_api_key") == 12


@pytest.mark.parametrize("text", [None, "", "\n# only words\n"])
def test_a_file_without_keys_does_not_open_the_proxy(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError):
        read_api_keys(str(tmp_path / "keys"))
    assert read_api_keys("") == []


@with_deadline
async def test_requests_go_where_their_model_is() -> None:
    def models(engines: list[MockEngine]) -> None:
        engines[0].models = b'{"object":"list","data":[{"id":"big","max_model_len":10},{"id":"lora"}]}'
        engines[1].models = b'{"object":"list","data":[{"id":"small"},{"id":"big"}]}'

    async with bed(2, prepare=models) as b:
        for model, engines in (
            ("lora", {"engine-0"}),
            ("small", {"engine-1"}),
            ("big", {"engine-0", "engine-1"}),
        ):
            asked = [await b.ask("POST", CHAT, b'{"model":"%b"}' % model.encode()) for _ in range(4)]
            assert {answer.engine for answer in asked} == engines
        answer = await b.ask("POST", CHAT, b'{"model":"other"}')
        assert answer.status == 404
        assert json.loads(answer.body)["error"]["code"] == "model_not_found"
        assert (await b.ask("POST", CHAT, b"{}")).status == 200  # names none: the engine decides
        page = json.loads((await b.ask("GET", "/v1/models")).body)
        assert page["object"] == "list"
        assert [row["id"] for row in page["data"]] == ["big", "lora", "small"]
        assert page["data"][0]["max_model_len"] == 10
        await b.engines[1].stop()
        b.proxy.engines[1].refused("gone")
        await until(lambda: not b.engine(1).healthy)
        assert (await b.ask("POST", CHAT, b'{"model":"small"}')).status == 503  # known, but not there now


@with_deadline
async def test_keys_of_flat_files_are_read_again_and_a_bad_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clients, registrars = tmp_path / "clients", tmp_path / "registrars"
    clients.write_text("one\n")
    registrars.write_text("of-a-registrar\n")
    keys = {"api_keys_file": str(clients), "discovery_keys_file": str(registrars)}
    async with bed(1, discovery=("http",), **keys) as b:

        async def statuses() -> list[int]:
            """Of both keys of clients: a request, and a page; of the registrar's: to register nothing."""
            heads = [f"Authorization: Bearer {key}\r\n" for key in ("one", "two", "of-a-registrar")]
            asked = [(await b.ask("POST", CHAT, b"{}", head)).status for head in heads[:2]]
            looked = [(await b.ask("GET", "/engines", head=head)).status for head in heads[:2]]
            return [*asked, *looked, (await b.ask("POST", "/register", b"{}", heads[2])).status]

        assert await statuses() == [200, 401, 200, 401, 400]
        clients.write_text("two\n")
        registrars.write_text("of-another\n")
        b.proxy.reload()
        assert await statuses() == [401, 200, 401, 200, 401]
        for bad in ("# none\n", "two\nof-another\n"):
            clients.write_text(bad)
            b.proxy.reload()
        assert caplog.text.count("the keys stay as they were") == 2
        assert await statuses() == [401, 200, 401, 200, 401]


@with_deadline
async def test_access_log(tmp_path: Path) -> None:
    file = tmp_path / "access"
    async with bed(1, access_log=str(file)) as b:
        body = (await b.ask("POST", CHAT + '?a="b', b"{}", "X-Request-Id: my-id\r\n")).body
        await b.ask("GET", "/nowhere", head="X-Request-Id: other\r\n")
        await b.proxy.close()
    first, second = file.read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z 127\.0\.0\.1 "
        rf'"POST /v1/chat/completions\?a=\?b" 200 {len(body)} \d+\.\d{{6}} \d+\.\d{{6}} engine-0 - my-id',
        first,
    )
    assert '"GET /nowhere" 404 ' in second
    assert second.endswith(" - - other")


@with_deadline
async def test_the_access_log_goes_on_in_a_new_file_after_a_rotation(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    file, renamed = folder / "access", folder / "access.1"
    async with bed(1, access_log=str(file)) as b:

        async def ask(name: str, written_to: Path) -> None:
            await b.ask("GET", f"/{name}")
            await until(lambda: written_to.exists() and f"/{name}" in written_to.read_text())

        await ask("first", file)
        file.rename(renamed)
        await ask("second", renamed)
        b.proxy.reload()
        await ask("third", file)
        folder.rename(tmp_path / "elsewhere")
        b.proxy.reload()  # cannot be opened: it goes on with what it has
        await ask("fourth", tmp_path / "elsewhere" / "access")
    lines = [(tmp_path / "elsewhere" / name).read_text().count("\n") for name in ("access.1", "access")]
    assert lines == [2, 2]


@with_deadline
async def test_lines_and_what_else_is_written_to_one_file_stand_behind_each_other(tmp_path: Path) -> None:
    """As in a shell: moonpool proxy --access-log - > log 2>&1."""
    log, engine = tmp_path / "log", MockEngine("a")
    await engine.start()
    try:
        with log.open("wb") as file:
            async with proxy_process(engine, output=file, access_log="-") as proxy:
                client = await proxy.client()
                for number in range(1, 4):
                    assert (await client.ask("POST", CHAT, b"{}")).status == 200
                    await until(lambda number=number: log.read_bytes().count(b'"POST ') >= number)
                    os.write(file.fileno(), b"something else\n")
                client.leave()
    finally:
        await engine.stop()
    lines = log.read_bytes().splitlines()
    assert sum(b'"POST ' in line for line in lines) == 3
    assert lines.count(b"something else") == 3


@with_deadline
async def test_an_access_log_that_nobody_reads_holds_up_neither_requests_nor_the_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with bed(1, access_log=str(pipe)) as b:
            client = await b.client()
            for _ in range(200):  # more than a pipe holds
                assert (await client.ask("POST", CHAT + "?" + "a" * 1000, b"{}")).status == 200
        lines = os.read(reader, 1 << 20).splitlines()
        assert 10 < len(lines) < 200
        assert all(b" 200 " in line for line in lines[:-1])
    finally:
        os.close(reader)


@with_deadline
async def test_traces_pass_or_begin_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 1e6)  # the records are for the test
    async with bed(1) as b:
        given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
        for sent, kept in (
            (given, True),
            ("cc" + given[2:] + "-more", True),
            ("", False),
            ("ff" + given[2:], False),
            (given[:3] + "0" * 32 + given[35:], False),
            (given.upper(), False),
            (given + "-more", False),
        ):
            b.proxy.relay.take_observations()
            await b.ask("POST", CHAT, b"{}", f"traceparent: {sent}\r\n" if sent else "")
            got = b.engines[0].seen[-1].headers["traceparent"]
            assert re.fullmatch(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-more)?", got)
            assert (got == sent) == kept
            *_, trace, parent, span = OBSERVATION.unpack(b.proxy.relay.take_observations())
            assert trace.hex() == got[3:35]
            assert span.hex() == got[36:52]
            assert parent == (span if kept else bytes(8))
        other = given.replace("b7ad", "c8be")
        head = f"traceparent: {given}\r\ntraceparent: {other}\r\nX-Moonpool-Decision: 1\r\n"
        await b.ask("POST", CHAT, b"{}", head)
        seen = b.engines[0].seen[-1].headers
        assert seen["traceparent"] == given  # one trace
        assert "x-moonpool-decision" not in seen


@with_deadline
async def test_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OBSERVE_EVERY_S", 1e6)  # the records are for the test

    async def usage(exchange: object) -> None:
        await exchange.answer(  # type: ignore[attr-defined]
            b'{"choices":[],"usage":{"prompt_tokens":11,"total_tokens":14,"completion_tokens":3,'
            b'"prompt_tokens_details":{"cached_tokens":8}},"kv_transfer_params":{"a":1}}'
        )

    async with bed(2, roles=["prefill", "decode"]) as b:
        for engine in b.engines:
            engine.behave = usage
        b.proxy.relay.take_observations()
        assert (await b.ask("POST", CHAT, b'{"stream":false}')).status == 200
        (
            _,
            note,
            prefill,
            decode,
            arrived,
            to_p,
            p_done,
            to_d,
            first,
            last,
            prompt,
            cached,
            completion,
            p_cached,
            status,
            outcome,
            attempts,
            handed,
            streams,
            *_,
        ) = OBSERVATION.unpack(b.proxy.relay.take_observations())
        assert (note, prefill, decode) == (0, 0, 1)
        assert 0 < arrived <= to_p <= p_done <= to_d <= first <= last <= b.proxy.relay.now()
        assert (prompt, cached, completion, p_cached) == (11, 8, 3, 8)
        assert (status, outcome, attempts, handed, streams) == (200, 0, 1, 1, 0)
        assert b.proxy.relay.take_observations() == b""
