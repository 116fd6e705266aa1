"""Engines at https://: which are trusted, what is shown to them, and files that change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.config.proxy_section import Deadlines, HealthChecks
from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tls import EngineTls
from moonpool.disagg_proxy.tokens.engine_source import EngineSource
from moonpool.disagg_proxy.tokens.source import TextPrompt
from tests.disagg_proxy.harness import NEVER_S, Bed, Exchange, bed, filler, until, with_deadline
from tests.disagg_proxy.stream_check import check_event_by_event
from tests.disagg_proxy.tls_files import Files

BODY = b'{"prompt":"x"}'
PATH = "/v1/completions"
OFTEN = HealthChecks(interval_s=0.02, timeout_s=10.0)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """What engines show, and their authority."""
    return Files(tmp_path / "engine")


def given(files: Files, **more: Any) -> dict[str, Any]:
    return {"engine_tls": files.server(), "engine_tls_ca": files.ca, **more}


def health(b: Bed, place: int = 0) -> tuple[bool, str]:
    liveness = b.proxy.engines[place].liveness
    return liveness.healthy, liveness.why


@with_deadline
async def test_requests_reuse_a_connection(files: Files) -> None:
    async with bed(**given(files)) as b:
        for number in range(3):
            answer = await b.ask("POST", PATH, b'{"prompt":"%d"}' % number)
            assert (answer.status, answer.body) == (200, b'{"engine":"engine-0"}')
        assert b.engines[0].connections == 1
        seen = b.engines[0].seen[0].writer.get_extra_info("ssl_object")
        assert seen.version() == "TLSv1.3"
        assert seen.selected_alpn_protocol() is None  # the mock engine names none
        assert b.proxy.engines[0].url.startswith("https://")


@pytest.mark.parametrize("newest", ["TLSv1_2", "TLSv1_3"])
@with_deadline
async def test_versions(files: Files, newest: str) -> None:
    server = files.server()
    server.maximum_version = ssl.TLSVersion[newest]
    server.set_alpn_protocols(["h2", "http/1.1"])
    async with bed(**given(files, engine_tls=server)) as b:
        assert (await b.ask("POST", PATH, BODY)).status == 200
        seen = b.engines[0].seen[0].writer.get_extra_info("ssl_object")
        assert (seen.version(), seen.selected_alpn_protocol()) == (newest.replace("_", "."), "http/1.1")


@with_deadline
async def test_streams_and_large_bodies(files: Files) -> None:
    async with bed(**given(files)) as b:
        client = await check_event_by_event(b, PATH)

        async def echo(exchange: Exchange) -> None:
            await exchange.answer(exchange.body)

        b.engines[0].behave = echo
        body = filler(5_000_000)
        for _ in range(2):
            assert (await client.ask("POST", PATH, body)).body == body


@with_deadline
async def test_both_sides_of_the_proxy(files: Files, tmp_path: Path) -> None:
    own = Files(tmp_path / "proxy")
    async with bed(2, **given(files, tls=own.client(), tls_cert=own.cert, tls_key=own.key)) as b:
        for _ in range(4):
            assert (await b.ask("POST", PATH, BODY)).status == 200


# Engines that are not trusted.


@pytest.mark.parametrize(
    ("cert", "why"),
    [
        ("master-expired", "certificate has expired"),
        ("master-elsewhere", "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("test-cert", "self-signed certificate"),
    ],
)
@with_deadline
async def test_the_health_check_says_why_a_certificate_is_refused(files: Files, cert: str, why: str) -> None:
    files.show(cert)
    async with bed(**given(files)) as b:
        healthy, said = health(b)
        assert not healthy
        assert said.startswith("GET /health failed: its certificate is not accepted (")
        assert why in said.replace("self signed", "self-signed")
        answer = await b.ask("POST", PATH, BODY)
        assert (answer.status, b.engines[0].seen) == (503, [])


@contextlib.asynccontextmanager
async def once_healthy(files: Files, caplog: pytest.LogCaptureFixture, **more: Any) -> AsyncIterator[Bed]:
    """Two engines at https://, which were checked once and are not checked again."""
    health = HealthChecks(interval_s=NEVER_S, timeout_s=10.0)
    with caplog.at_level(logging.WARNING, "moonpool.proxy"):
        async with bed(2, **given(files, health=health, **more)) as b:
            assert (await b.ask("POST", PATH, BODY)).status == 200
            yield b


@pytest.mark.parametrize(
    ("cert", "why"),
    [
        ("master-expired", "has expired; the engine needs a new one"),
        (
            "master-elsewhere",
            "is not for 127.0.0.1; dial it by a name or address that the certificate has, and",
        ),
        ("test-cert", "is not trusted ("),
    ],
)
@with_deadline
async def test_the_data_plane_refuses_a_certificate(
    files: Files, caplog: pytest.LogCaptureFixture, cert: str, why: str
) -> None:
    """As a refused connection: another engine answers, and this one leaves the rotation at once."""
    async with once_healthy(files, caplog, deadlines=Deadlines(upstream_idle_s=0.001)) as b:
        bad = b.engines[0]
        await bad.stop()
        files.show(cert)
        bad.tls = files.server()
        await bad.start()
        bad.seen.clear()
        await until(lambda: b.engine(0).connections == 0)
        for _ in range(3):
            assert (await b.ask("POST", PATH, BODY)).engine == "engine-1"
        assert not bad.seen
        assert b.engine(0).failures == {("before_first_byte", "connect"): 1}
        await until(lambda: not health(b)[0])
        assert why in health(b)[1]
        assert f"engine-0 ({bad.spec.url}) leaves the rotation: the certificate of 127.0.0.1" in caplog.text


async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that does not speak TLS."""
    await reader.read(65536)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    writer.close()


@with_deadline
async def test_an_engine_in_plain_is_refused(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    async with once_healthy(files, caplog, deadlines=Deadlines(upstream_idle_s=0.001)) as b:
        await b.engines[0].stop()
        server = await asyncio.start_server(plain, "127.0.0.1", b.engines[0].port)
        try:
            await until(lambda: b.engine(0).connections == 0)
            for _ in range(3):
                assert (await b.ask("POST", PATH, BODY)).engine == "engine-1"
            assert b.engine(0).failures == {("before_first_byte", "connect"): 1}
            await until(lambda: not health(b)[0])
            assert health(b)[1] == f"127.0.0.1:{b.engines[0].port} does not speak TLS"
        finally:
            server.close()


@with_deadline
async def test_an_engine_that_never_finishes_its_handshake(files: Files) -> None:
    """It has connect_s, and another engine answers."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()

    health = HealthChecks(interval_s=NEVER_S, timeout_s=10.0)
    async with bed(
        2, **given(files, health=health, deadlines=Deadlines(connect_s=3.0, upstream_idle_s=0.001))
    ) as b:
        assert (await b.ask("POST", PATH, BODY)).status == 200
        await b.engines[0].stop()
        server = await asyncio.start_server(silent, "127.0.0.1", b.engines[0].port)
        try:
            await until(lambda: b.engine(0).connections == 0)
            while True:  # until it is the turn of that engine
                asking = asyncio.ensure_future(b.ask("POST", PATH, BODY))
                await until(lambda asking=asking: asking.done() or b.engine(0).connections == 1)
                if not asking.done():
                    break
            b.proxy.relay.advance_clock_for_test(3.5)
            assert (await asking).engine == "engine-1"
            assert b.engine(0).failures == {("before_first_byte", "connect"): 1}
        finally:
            server.close()


@with_deadline
async def test_an_answer_that_is_cut_is_not_taken_for_a_whole_one(files: Files) -> None:
    """Without a length its end is that of the connection: an attacker can make one, but no close_notify."""
    async with bed(**given(files)) as b:

        async def unframed(exchange: Exchange) -> None:
            await exchange.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhalf")
            transport = exchange.writer.transport
            if b"whole" in exchange.body:
                transport.close()
            else:
                transport.abort()

        b.engines[0].behave = unframed
        answer = await b.ask("POST", PATH, b'{"prompt":"whole"}')
        assert answer.body == b"half"
        client = await b.client()
        await client.request("POST", PATH, BODY)
        with pytest.raises(ConnectionResetError):
            await client.answer()
        assert b.engine(0).failures == {("after_first_byte", "lost"): 1}


# The own certificate.


@with_deadline
async def test_engines_are_shown_a_certificate(files: Files, tmp_path: Path) -> None:
    own = Files(tmp_path / "own", cert="caller")
    settings = {"engine_tls_cert": own.cert, "engine_tls_key": own.key}
    async with bed(**given(files, engine_tls=files.server(client_ca=files.ca), **settings)) as b:
        assert (await b.ask("POST", PATH, BODY)).status == 200
        peer = b.engines[0].seen[0].writer.get_extra_info("ssl_object").getpeercert()
        assert ("DNS", "node.example") in peer["subjectAltName"]


@with_deadline
async def test_an_engine_that_wants_a_certificate_is_unreachable_without(files: Files) -> None:
    async with bed(**given(files, engine_tls=files.server(client_ca=files.ca))) as b:
        healthy, why = health(b)
        assert not healthy
        # Python's servers may close without the alert that says so.
        assert "certificate required" in why or why.endswith("set proxy.engine_tls_cert")
        assert (await b.ask("POST", PATH, BODY)).status == 503


@with_deadline
async def test_a_certificate_that_an_engine_stops_to_accept(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With TLS 1.3 it says so behind the handshake: the request goes to another engine all the same."""
    own = Files(tmp_path / "own", cert="caller")
    settings = {"engine_tls_cert": own.cert, "engine_tls_key": own.key}
    async with once_healthy(files, caplog, deadlines=Deadlines(upstream_idle_s=0.001), **settings) as b:
        strict = b.engines[0]
        await strict.stop()
        other = Files(tmp_path / "other", ca="test-cert")
        strict.tls = files.server(client_ca=other.ca)
        await strict.start()
        strict.seen.clear()
        await until(lambda: b.engine(0).connections == 0)
        for _ in range(3):
            assert (await b.ask("POST", PATH, BODY)).engine == "engine-1"
        assert not strict.seen
        (failure,) = b.engine(0).failures
        assert failure in (("before_first_byte", "connect"), ("before_first_byte", "lost"))


@with_deadline
async def test_what_breaks_behind_a_request_is_no_refused_certificate(files: Files) -> None:
    """The engine has the request: it is not sent to another one as if this one had refused it."""
    ssl_of_engine = files.server()

    async def spoiled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = ssl_of_engine.wrap_bio(incoming, outgoing, server_side=True)
        request = b""
        while b'"x"' not in request:
            try:
                request += tls.read(65536)
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
        writer.write(outgoing.read() + b"\x17\x03\x03\x00\x20" + bytes(32))  # no record of this connection
        await reader.read()
        writer.close()

    health = HealthChecks(interval_s=NEVER_S, timeout_s=10.0)
    async with bed(**given(files, health=health, deadlines=Deadlines(upstream_idle_s=0.001))) as b:
        assert (await b.ask("POST", PATH, BODY)).status == 200
        await b.engines[0].stop()
        server = await asyncio.start_server(spoiled, "127.0.0.1", b.engines[0].port)
        try:
            await until(lambda: b.engine(0).connections == 0)
            await b.ask("POST", PATH, BODY)
            assert b.engine(0).failures == {("before_first_byte", "lost"): 1}
        finally:
            server.close()


# Files that change.


@with_deadline
async def test_a_rotation_under_load_fails_no_request(files: Files, tmp_path: Path) -> None:
    """Engines show another certificate each time, the proxy trusts both, and shows new ones of its own."""
    own = Files(tmp_path / "own", cert="caller")
    both = tmp_path / "both.pem"
    both.write_text(Path(files.ca).read_text() + Path(Files(tmp_path / "n", ca="test-cert").ca).read_text())
    server = files.server(client_ca=str(both))
    settings = {"engine_tls_cert": own.cert, "engine_tls_key": own.key, "engine_tls_ca": str(both)}
    deadlines = Deadlines(upstream_idle_s=0.001)  # each request connects
    async with bed(2, health=OFTEN, deadlines=deadlines, engine_tls=server, **settings) as b:
        stop, served = False, 0

        async def load() -> None:
            nonlocal served
            while not stop:
                assert (await b.ask("POST", PATH, BODY)).status == 200
                served += 1

        def shown() -> set[str]:
            """The proxy's certificates, as each engine saw it last."""
            last = [each.seen[-1].writer.get_extra_info("ssl_object") for each in b.engines if each.seen]
            return {each.getpeercert()["serialNumber"] for each in last}

        loads = [asyncio.ensure_future(load()) for _ in range(4)]
        old: set[str] = set()
        for turn in range(6):
            own.show("caller" if turn % 2 else "master")
            files.show("master" if turn % 2 else "test-cert")
            server.load_cert_chain(files.cert, files.key)
            for engine in b.engines:
                engine.seen.clear()
            target = served + 30
            await until(
                lambda target=target, old=old: (
                    (served >= target and shown() - old) or any(each.done() for each in loads)
                )
            )
            old = shown() - old
        stop = True
        await asyncio.gather(*loads)
        assert all(not b.engine(place).failures for place in (0, 1))
        assert all(health(b, place)[0] for place in (0, 1))


@with_deadline
async def test_files_that_cannot_be_used_change_nothing(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with bed(**given(files, health=OFTEN, deadlines=Deadlines(upstream_idle_s=0.001))) as b:
            before = b.engines[0].health_checks
            Path(files.ca).write_text("no certificate")
            for _ in range(3):
                assert (await b.ask("POST", PATH, BODY)).status == 200
            await until(lambda: b.engines[0].health_checks >= before + 3)
            await until(lambda: caplog.text.count("the files from before are in use") >= 2)
            assert health(b)[0]
        assert f"proxy.engine_tls_ca = {files.ca} cannot be used" in caplog.text
        assert (
            caplog.text.count("the files from before are in use") == 2
        )  # of health checks, of the data plane


# The rest of what is asked of engines, and settings.


@with_deadline
async def test_token_ids_are_asked_for_inside_tls(files: Files) -> None:
    async with bed(**given(files)) as b:

        async def render(exchange: Exchange) -> None:
            assert exchange.target == "/v1/completions/render"
            await exchange.answer(b'[{"token_ids":[1,2]}]')

        b.engines[0].behave = render
        tls = EngineTls(ProxySettings(engines=(b.engines[0].spec,), engine_tls_ca=files.ca))
        source = EngineSource(lambda _model: [b.engines[0].spec.url], tls=tls.context)
        prompt = TextPrompt("completions", "m", b'{"model":"m","prompt":"hi"}')
        assert await source.ids(prompt) == b"\x01\0\0\0\x02\0\0\0"
        await source.close()
        strange = EngineSource(lambda _model: [b.engines[0].spec.url])
        assert await strange.ids(prompt) is None
        assert strange.failures == 1
        await strange.close()


@with_deadline
async def test_all_engines_may_have_the_certificate_of_one_name(files: Files) -> None:
    """As pods have, whose addresses no certificate has."""
    files.show("master-elsewhere")  # of master.example
    async with bed(**given(files, engine_tls_name="master.example")) as b:
        assert health(b) == (True, "")
        assert (await b.ask("POST", PATH, BODY)).status == 200

        async def render(exchange: Exchange) -> None:
            await exchange.answer(b'[{"token_ids":[1,2]}]')

        b.engines[0].behave = render
        tls = EngineTls(
            ProxySettings(
                engines=(b.engines[0].spec,), engine_tls_ca=files.ca, engine_tls_name="master.example"
            )
        )
        source = EngineSource(lambda _model: [b.engines[0].spec.url], tls=tls.context, tls_name=tls.name)
        prompt = TextPrompt("completions", "m", b'{"model":"m","prompt":"hi"}')
        assert await source.ids(prompt) == b"\x01\0\0\0\x02\0\0\0"
        await source.close()
    async with bed(**given(files, engine_tls_name="other.example")) as b:
        assert not health(b)[0]


@with_deadline
async def test_a_question_for_token_ids_follows_no_redirect(files: Files) -> None:
    """It would lead out of TLS."""
    asked = asyncio.Event()

    async def elsewhere(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.close()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    target = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/tokenize"

    async def redirect(exchange: Exchange) -> None:
        await exchange.send(f"HTTP/1.1 307 T\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())

    try:
        async with bed(**given(files)) as b:
            b.engines[0].behave = redirect
            source = EngineSource(lambda _model: [b.engines[0].spec.url], tls=files.client)
            assert await source.ids(TextPrompt("completions", "m", b'{"model":"m","prompt":"hi"}')) is None
            await source.close()
            assert [each.target for each in b.engines[0].seen] == ["/v1/completions/render", "/tokenize"]
            assert not asked.is_set()
    finally:
        server.close()


@with_deadline
async def test_settings_that_cannot_be_meant(files: Files) -> None:
    spec = EngineSpec("a", "https://localhost")
    assert (spec.address, spec.is_https) == (("localhost", 443), True)
    with pytest.raises(ConfigError, match=r"engine_tls_cert is set and proxy\.engine_tls_key is not"):
        ProxySettings(engines=(spec,), engine_tls_cert=files.cert)
    with pytest.raises(ConfigError, match=r"proxy\.engine_tls_ca = .* cannot be used"):
        Proxy(ProxySettings(engines=(spec,), engine_tls_ca=files.key))
    with pytest.raises(ConfigError, match=r"proxy\.engine_tls_cert = .* cannot be used"):
        Proxy(ProxySettings(engines=(spec,), engine_tls_cert=files.key, engine_tls_key=files.key))
