"""TLS at the proxy's port: what is served and refused, what a handshake may cost, and files that change."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from moonpool.core.config.config import load
from moonpool.core.config.proxy_section import Deadlines, Limits
from moonpool.core.errors import ConfigError
from moonpool.core.service.http_tls import own_proxy_context, own_proxy_url
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings
from moonpool.disagg_proxy.tools.savings import read_savings
from moonpool.launch.snapshot import take
from tests.disagg_proxy.harness import (
    Bed,
    Client,
    Exchange,
    bed,
    filler,
    request_bytes,
    until,
    with_deadline,
)
from tests.disagg_proxy.key_updates import Updater
from tests.disagg_proxy.stream_check import check_event_by_event
from tests.disagg_proxy.tls_files import Files

BODY = b'{"prompt":"x"}'
PATH = "/v1/completions"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "proxy")


def given(files: Files, **more: str) -> dict[str, Any]:
    """Settings of a proxy that shows these, and the context of its clients."""
    return {"tls_cert": files.cert, "tls_key": files.key, "tls": files.client(), **more}


async def fails(b: Bed, tls: ssl.SSLContext) -> str:
    """Why a client gets no answer: with TLS 1.3 it hears after its own side of the handshake."""
    try:
        client = await b.client(tls)
        await client.request("GET", "/health")
        assert not await client.reader.read()
    except ssl.SSLError as error:
        return str(error.reason)
    except ConnectionError:
        pass
    return "cut"


async def plain(b: Bed) -> Client:
    client = Client(*await asyncio.open_connection(b.host, b.port))
    b.clients.append(client)
    return client


@with_deadline
async def test_requests_on_one_connection(files: Files) -> None:
    async with bed(**given(files)) as b:
        client = await b.client()
        tls = client.writer.get_extra_info("ssl_object")
        assert tls.version() == "TLSv1.3"
        for number in range(3):
            answer = await client.ask("POST", PATH, b'{"prompt":"%d"}' % number)
            assert (answer.status, answer.body) == (200, b'{"engine":"engine-0"}')
        assert (await client.ask("GET", "/health")).status == 200
        assert b.counters.accepted == 1


@pytest.mark.parametrize(
    ("newest", "version"), [("TLSv1_2", "TLSv1.2"), ("TLSv1_3", "TLSv1.3")], ids=["1.2", "1.3"]
)
@pytest.mark.parametrize("offered", [["http/1.1"], ["h2", "http/1.1"]], ids=["one", "two"])
@with_deadline
async def test_versions_and_protocol(files: Files, newest: str, version: str, offered: list[str]) -> None:
    tls = files.client()
    tls.maximum_version = ssl.TLSVersion[newest]
    tls.set_alpn_protocols(offered)
    async with bed(**given(files) | {"tls": tls}) as b:
        client = await b.client()
        seen = client.writer.get_extra_info("ssl_object")
        assert (seen.version(), seen.selected_alpn_protocol()) == (version, "http/1.1")
        assert (await client.ask("POST", PATH, BODY)).status == 200


@with_deadline
async def test_a_client_that_speaks_only_http2_is_told(files: Files) -> None:
    tls = files.client()
    tls.set_alpn_protocols(["h2"])
    async with bed(**given(files)) as b:
        with pytest.raises(ssl.SSLError, match="no application protocol"):
            await b.client(tls)


@with_deadline
async def test_a_stream_arrives_event_by_event(files: Files) -> None:
    async with bed(**given(files)) as b:
        await check_event_by_event(b, PATH)


@with_deadline
async def test_large_bodies_in_both_directions(files: Files) -> None:
    async with bed(**given(files)) as b:

        async def echo(exchange: Exchange) -> None:
            await exchange.answer(exchange.body)

        b.engines[0].behave = echo
        body = filler(5_000_000)
        client = await b.client()
        for _ in range(2):
            assert (await client.ask("POST", PATH, body)).body == body


@with_deadline
async def test_a_client_that_does_not_read_holds_the_engine_back(files: Files) -> None:
    """What waits is bounded, and all of it comes when the client reads."""
    limits = Limits(write_buffer_bytes_max=65536)
    total = 32 << 20
    async with bed(limits=limits, **given(files)) as b:

        async def long(exchange: Exchange) -> None:
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % total)
            for _ in range(total >> 20):
                await exchange.send(bytes(1 << 20))

        b.engines[0].behave = long
        client = await b.client()
        await client.request("POST", PATH, BODY)
        await until(lambda: bool(b.connection()["write_paused"]))
        assert b.connection()["unwritten"] < 65536 + (1 << 19)
        assert len((await client.answer()).body) == total


def read_to_the_end(b: Bed, tls: ssl.SSLContext, request: bytes) -> bytes:
    """Raises SSLEOFError where the end is a cut: TLS tells it from one (close_notify)."""
    with (
        socket.create_connection((b.host, b.port)) as connection,
        tls.wrap_socket(connection, server_hostname=b.host, suppress_ragged_eofs=False) as inside,
    ):
        inside.sendall(request)
        return b"".join(iter(lambda: inside.recv(65536), b""))


@pytest.mark.parametrize(
    ("request_", "status"),
    [(request_bytes("POST", PATH, BODY, "Connection: close\r\n"), b"200"), (b"nonsense\r\n\r\n", b"400")],
    ids=["answered", "refused"],
)
@with_deadline
async def test_the_end_of_a_connection_is_no_cut(files: Files, request_: bytes, status: bytes) -> None:
    async with bed(**given(files)) as b:
        text = await asyncio.to_thread(read_to_the_end, b, files.client(), request_)
        assert text.startswith(b"HTTP/1.1 " + status)


@with_deadline
async def test_an_answer_that_breaks_off_is_a_cut(files: Files) -> None:
    async with bed(**given(files)) as b:

        async def half(exchange: Exchange) -> None:
            await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            exchange.cut()

        b.engines[0].behave = half
        request = request_bytes("POST", PATH, BODY, "Connection: close\r\n")
        with pytest.raises((ssl.SSLEOFError, ConnectionResetError)):
            await asyncio.to_thread(read_to_the_end, b, files.client(), request)


@with_deadline
async def test_plain_http_is_answered_in_plain(files: Files) -> None:
    async with bed(**given(files)) as b:
        client = await plain(b)
        answer = await client.ask("POST", PATH, BODY)
        assert answer.status == 400
        assert b"use https://" in answer.body
        assert await client.ended() == b""
        assert b.counters.rejected == {"plain_http": 1}
        assert not b.engines[0].seen


@with_deadline
async def test_garbage_is_closed(files: Files) -> None:
    async with bed(**given(files)) as b:
        client = await plain(b)
        await client.send(b"\x16\x03\x01\x00\x05hello")
        await client.ended()
        assert b.counters.rejected == {"tls_handshake": 1}
        assert b.counters.handshake_failure.startswith("TLS with 127.0.0.1 broke: ")
        assert (await b.ask("GET", "/health")).status == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@with_deadline
async def test_old_versions_are_refused(files: Files) -> None:
    tls = files.client()
    tls.set_ciphers("ALL:@SECLEVEL=0")
    tls.minimum_version = ssl.TLSVersion.TLSv1
    tls.maximum_version = ssl.TLSVersion.TLSv1_1
    async with bed(**given(files)) as b:
        with pytest.raises(ssl.SSLError):
            await b.client(tls)


# Client certificates.


@with_deadline
async def test_a_client_needs_a_certificate(files: Files, tmp_path: Path) -> None:
    with_one = files.client(shows=Files(tmp_path / "client", cert="caller"))
    async with bed(**given(files, tls_client_ca=files.ca) | {"tls": with_one}) as b:
        for _ in range(2):
            assert (await b.ask("POST", PATH, BODY)).status == 200
        assert await fails(b, files.client()) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        assert b.counters.handshake_failure == "TLS with 127.0.0.1 broke: peer did not return a certificate"
        assert b.counters.rejected == {"tls_handshake": 1}


@pytest.mark.parametrize(
    ("cert", "why"),
    [
        ("master-expired", "the certificate of 127.0.0.1 has expired; its owner needs a new one"),
        ("master-future", "the certificate of 127.0.0.1 is not valid yet; compare the clocks"),
        ("test-cert", "the certificate of 127.0.0.1 is not trusted (self"),
    ],
)
@with_deadline
async def test_certificates_of_clients_that_are_refused(
    files: Files, tmp_path: Path, cert: str, why: str
) -> None:
    async with bed(**given(files, tls_client_ca=files.ca)) as b:
        await fails(b, files.client(shows=Files(tmp_path / "client", cert=cert)))
        assert b.counters.handshake_failure.startswith(why)
        assert not b.engines[0].seen


# What a handshake may cost.


async def half_a_hello(b: Bed, files: Files) -> Client:
    """Has sent the first bytes of a handshake, and the proxy has read them."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = files.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    client = await plain(b)
    await client.send(outgoing.read()[:100])
    return client


@with_deadline
async def test_a_handshake_has_the_deadline_of_a_head(files: Files) -> None:
    async with bed(deadlines=Deadlines(head_s=5.0), **given(files)) as b:
        silent, slow = await plain(b), await half_a_hello(b, files)
        await until(lambda: b.client_count == 2)
        b.proxy.relay.advance_clock_for_test(4.0)
        await slow.send(b"\x00")  # earns no more time
        assert b.client_count == 2
        b.proxy.relay.advance_clock_for_test(1.5)
        await silent.ended()
        await slow.ended()
        await until(lambda: b.client_count == 0)


@with_deadline
async def test_unfinished_handshakes_make_room_for_others(files: Files) -> None:
    """They have the share of an address, and are the first to be closed where places are short."""
    async with bed(limits=Limits(client_connections_max=8), **given(files)) as b:
        for _ in range(20):
            await half_a_hello(b, files)
        for _ in range(3):
            assert (await b.ask("POST", PATH, BODY)).status == 200
        assert b.client_count <= 5
        assert b.counters.rejected["idle_closed"] >= 16


@with_deadline
async def test_a_flood_of_handshakes_lets_answers_go_on(files: Files) -> None:
    async with bed(**given(files)) as b:
        client = await b.client()

        async def knock() -> None:
            for _ in range(20):
                stranger = await plain(b)
                await stranger.send(b"\x16\x03\x01\x02\x00" + bytes(64))
                stranger.leave()

        knocking = [asyncio.ensure_future(knock()) for _ in range(8)]
        for _ in range(20):
            assert (await client.ask("POST", PATH, BODY)).status == 200
        await asyncio.gather(*knocking)
        assert (await b.ask("POST", PATH, BODY)).status == 200


# A record of a handshake that holds the header of a ClientHello of 128 KiB.
LARGE_HELLO = (b"\x16\x03\x01\x00\x04\x01\x02\x00\x00",)
IN_PIECES = tuple(b"\x16\x03\x01\x00\x01" + bytes([octet]) for octet in (1, 2, 0, 0))


@pytest.mark.parametrize("records", [LARGE_HELLO, IN_PIECES], ids=["one-record", "four-records"])
@with_deadline
async def test_a_hello_that_claims_too_much_is_refused_by_its_header(
    files: Files, records: tuple[bytes, ...]
) -> None:
    """Room for all of it would be made at once."""
    async with bed(**given(files)) as b:
        client = await plain(b)
        for record in records:
            await client.send(record)
        await client.ended()
        assert b.counters.rejected == {"tls_handshake": 1}
        assert (await b.ask("GET", "/health")).status == 200


@with_deadline
async def test_a_key_update_is_answered_at_once(files: Files) -> None:
    """Also by a connection without a request, or the answers would pile up."""
    async with bed(**given(files)) as b:
        with Updater(b.host, b.port) as client:
            await asyncio.to_thread(client.update, 3)
            assert await asyncio.to_thread(client.receive)


@with_deadline
async def test_a_flood_of_key_updates_ends_the_connection(files: Files) -> None:
    async with bed(**given(files)) as b:
        with Updater(b.host, b.port) as client:
            await asyncio.to_thread(client.update, 30)
            await asyncio.to_thread(client.receive)
            assert b.client_count == 1
            await asyncio.to_thread(client.update, 10)
            await until(lambda: b.client_count == 0)
        assert (await b.ask("GET", "/health")).status == 200


@with_deadline
async def test_cuts_in_mid_handshake(files: Files) -> None:
    async with bed(**given(files)) as b:
        for size in (0, 1, 5, 50):
            client = await half_a_hello(b, files) if size == 50 else await plain(b)
            await client.send(b"\x16\x03\x01\x02\x00"[:size])
            client.writer.close()
        await until(lambda: b.client_count == 0)
        assert (await b.ask("POST", PATH, BODY)).status == 200


@with_deadline
async def test_a_drain_waits_for_a_handshake_that_is_under_way(files: Files) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = files.client().wrap_bio(incoming, outgoing, server_hostname="localhost")
    async with bed(**given(files)) as b:
        client = await plain(b)
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        await client.send(outgoing.read())
        await until(lambda: b.client_count == 1)
        draining = asyncio.ensure_future(b.proxy.drain())
        while True:
            incoming.write(await client.reader.read(65536))
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await client.send(outgoing.read())
        tls.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + BODY)
        await client.send(outgoing.read())
        answer = b""
        while b"engine-0" not in answer:
            incoming.write(await client.reader.read(65536))
            answer += tls.read(65536)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert await draining


# Files that change.


def serial(client: Client) -> object:
    return client.writer.get_extra_info("ssl_object").getpeercert()["serialNumber"]


@with_deadline
async def test_a_rotation_under_load_fails_no_request(files: Files, tmp_path: Path) -> None:
    """Clients trust both; connections that are open go on, and new ones see the certificate that is there."""
    trusted = tmp_path / "both.pem"
    trusted.write_text(
        Path(files.ca).read_text() + Path(Files(tmp_path / "n", ca="test-cert").ca).read_text()
    )
    tls = ssl.create_default_context(cafile=str(trusted))
    async with bed(2, **given(files) | {"tls": tls}) as b:
        old, stop, served = await b.client(), False, 0
        before = serial(old)

        async def load() -> None:
            nonlocal served
            while not stop:
                assert (await b.ask("POST", PATH, BODY)).status == 200
                served += 1

        loads = [asyncio.ensure_future(load()) for _ in range(4)]
        for turn in range(6):
            files.show("master" if turn % 2 else "test-cert")
            target = served + 20
            await until(lambda target=target: served >= target or any(each.done() for each in loads))
            assert (serial(await b.client()) == before) == bool(turn % 2)
        stop = True
        await asyncio.gather(*loads)
        assert (await old.ask("POST", PATH, BODY)).status == 200
        assert not b.counters.rejected


@with_deadline
async def test_files_that_cannot_be_used_change_nothing(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with bed(**given(files)) as b:
        with caplog.at_level(logging.ERROR, "moonpool.proxy"):
            files.break_cert()
            for _ in range(3):
                assert (await b.ask("POST", PATH, BODY)).status == 200
            await until(lambda: "the files from before are in use" in caplog.text)
        assert f"proxy.tls_cert = {files.cert} cannot be used" in caplog.text
        assert caplog.text.count("the files from before") == 1
        files.show("test-cert")
        with pytest.raises(ssl.SSLCertVerificationError):
            await b.client()


@pytest.mark.parametrize("key_first", [False, True], ids=["together", "key-first"])
@with_deadline
async def test_a_key_that_others_can_read_is_not_taken_until_its_mode_changes(
    files: Files, caplog: pytest.LogCaptureFixture, key_first: bool
) -> None:
    async with bed(**given(files)) as b:
        with caplog.at_level(logging.ERROR, "moonpool.proxy"):
            files.open_key()
            if key_first:
                assert (await b.ask("GET", "/health")).status == 200
            files.show("test-cert")
            assert (await b.ask("GET", "/health")).status == 200  # with the certificate from before
            await until(lambda: f"run: chmod 600 {files.key}; the files from before" in caplog.text)
        Path(files.key).chmod(0o600)
        with pytest.raises(ssl.SSLCertVerificationError):
            await b.client()


@with_deadline
async def test_whom_clients_must_be_signed_by_can_change(files: Files, tmp_path: Path) -> None:
    authorities = Files(tmp_path / "clients")
    one, other = Files(tmp_path / "one", cert="caller"), Files(tmp_path / "other", cert="test-cert")
    async with bed(**given(files, tls_client_ca=authorities.ca)) as b:
        assert (await (await b.client(files.client(shows=one))).ask("GET", "/health")).status == 200
        await fails(b, files.client(shows=other))
        authorities.trust("test-cert")
        assert (await (await b.client(files.client(shows=other))).ask("GET", "/health")).status == 200
        await fails(b, files.client(shows=one))


# What is asked of a proxy, and settings.


@with_deadline
async def test_our_commands_ask_a_proxy_of_this_host(files: Files) -> None:
    """They trust the certificate that it shows, whatever its name and its authority."""
    for name in ("master-elsewhere", "test-cert"):
        files.show(name)
        async with bed(**given(files)) as b:
            ours = {"proxy.listen": f"127.0.0.1:{b.port}", "proxy.tls_cert": files.cert}
            config = load(env={}, arguments={"node.http": "off", **ours})
            seen = await asyncio.to_thread(take, config, timeout_s=10.0)
            assert (seen.proxy_url, seen.proxy_answers) == (f"https://127.0.0.1:{b.port}", True)
            url, tls = own_proxy_url(config), own_proxy_context(config)
            assert (await asyncio.to_thread(read_savings, [url], tls)).saved_tokens == 0
            files.show("master")
            seen = await asyncio.to_thread(take, config, timeout_s=10.0)
            assert seen.proxy_answers


@with_deadline
async def test_another_certificate_is_no_proxy_of_ours(files: Files, tmp_path: Path) -> None:
    async with bed(**given(files)) as b:
        other = Files(tmp_path / "other", cert="test-cert")
        ours = {"proxy.listen": f"127.0.0.1:{b.port}", "proxy.tls_cert": other.cert}
        config = load(env={}, arguments={"node.http": "off", **ours})
        assert not (await asyncio.to_thread(take, config, timeout_s=10.0)).proxy_answers


@with_deadline
async def test_another_certificate_of_its_authority_is_no_proxy_of_ours(files: Files, tmp_path: Path) -> None:
    """tls_cert may have the whole chain, whose authority has signed others, too."""
    files.show("master-elsewhere")
    async with bed(**given(files)) as b:
        chain = tmp_path / "chain.pem"
        for name, answers in (("master-elsewhere", True), ("master", False)):
            own = Path(Files(tmp_path / name, cert=name).cert).read_text()
            chain.write_text("# Of the proxy.\n" + own + Path(files.ca).read_text())
            ours = {"proxy.listen": f"127.0.0.1:{b.port}", "proxy.tls_cert": str(chain)}
            config = load(env={}, arguments={"node.http": "off", **ours})
            seen = await asyncio.to_thread(take, config, timeout_s=10.0)
            assert seen.proxy_answers == answers


def test_a_file_without_a_certificate_is_no_proxy_of_ours(files: Files) -> None:
    for file, why in ((files.key, "no certificate"), ("/no/cert", "No such file or directory")):
        with pytest.raises(ConfigError, match=f"proxy.tls_cert = {file} cannot be used: {why}"):
            own_proxy_context(load(env={}, arguments={"proxy.tls_cert": file}))


@with_deadline
async def test_settings_that_cannot_be_meant(files: Files, tmp_path: Path) -> None:
    engines = (EngineSpec("a", "http://127.0.0.1:1"),)
    with pytest.raises(ConfigError, match=r"tls_cert is set and proxy\.tls_key is not"):
        ProxySettings(engines=engines, tls_cert=files.cert)
    with pytest.raises(ConfigError, match="give the proxy one of its own"):
        ProxySettings(engines=engines, tls_client_ca=files.ca)
    for change, sentence in (
        ({"tls_cert": files.key}, "proxy.tls_cert = .* cannot be used"),
        ({"tls_key": str(tmp_path / "none")}, "cannot read proxy.tls_key"),
        ({"tls_client_ca": files.key}, "proxy.tls_client_ca = .* cannot be used"),
    ):
        made = {"tls_cert": files.cert, "tls_key": files.key, **change}
        with pytest.raises(ConfigError, match=sentence):
            Proxy(ProxySettings(engines=engines, **made))
    Path(files.key).chmod(0o644)
    with pytest.raises(ConfigError, match=r"proxy.tls_key = .* can be read by others"):
        Proxy(ProxySettings(engines=engines, tls_cert=files.cert, tls_key=files.key))
