"""Strangers who hold bodies and places, so that others find none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from moonpool.core.config.proxy_section import Deadlines, Limits
from tests.disagg_proxy.harness import Bed, Client, FakeClock, bed, request_bytes, until, with_deadline

COMPLETIONS = "/v1/completions"
KEY = "Authorization: Bearer of-a-client\r\n"
SMALL = Limits(bodies_bytes_max=1 << 20, body_bytes_max=128 << 10)
# A client that was refused is never cut for being slow here: its next bytes would meet a reset.
PATIENT = Deadlines(linger_s=1000)
BODY = b'{"prompt":"%b"}' % (b"a" * 20_000)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    file = tmp_path / "keys"
    file.write_text("of-a-client\n")
    return str(file)


async def from_(address: str, b: Bed) -> Client:
    client = Client(*await asyncio.open_connection(b.host, b.port, limit=1 << 22, local_addr=(address, 0)))
    b.clients.append(client)
    return client


async def hold(client: Client, size: int, head: str = "") -> None:
    """All of a request but its body's last byte."""
    await client.send(request_bytes("POST", COMPLETIONS, b"x" * size, head)[:-1])


@with_deadline
async def test_a_strangers_body_is_not_read(keys: str) -> None:
    """Refused by its head: 401 comes although the body does not."""
    async with bed(1, api_keys_file=keys, deadlines=PATIENT) as b:
        for head in ("", "Authorization: Bearer wrong\r\n", "Expect: 100-continue\r\n"):
            for length in ("Content-Length: 8000000", "Transfer-Encoding: chunked"):
                client = await b.client()
                await client.send(
                    f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{head}{length}\r\n\r\n".encode()
                )
                answer = await client.answer()
                assert answer.status == 401
                assert answer.headers["connection"] == "close"
                assert await client.ended() == b""
        for method, path, status in (
            ("POST", "/v1/load_lora_adapter", 404),
            ("GET", COMPLETIONS, 405),
            ("POST", "/v1/../x", 400),
        ):
            client = await b.client()
            await client.send(
                f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n".encode()
            )
            assert (await client.answer()).status == status
        assert b.counters.held_body_bytes == 0
        assert not b.engines[0].seen


@with_deadline
async def test_a_small_body_of_a_refused_request_is_dropped_and_the_connection_kept(keys: str) -> None:
    async with bed(1, api_keys_file=keys, deadlines=PATIENT) as b:
        client = await b.client()
        for _ in range(3):
            assert (await client.ask("POST", COMPLETIONS, b"x" * 60_000)).status == 401
            assert (await client.ask("POST", COMPLETIONS, b"{}", KEY)).status == 200


@with_deadline
async def test_a_refusal_does_not_wait_for_a_body_that_does_not_come(keys: str) -> None:
    clock = FakeClock()
    async with bed(1, api_keys_file=keys, clock=clock, deadlines=Deadlines(linger_s=100)) as b:
        client = await b.client()
        await hold(client, 1000)
        await until(lambda: bool(b.connection()["reading_body"]))
        clock.now += 101
        assert (await client.answer()).status == 401


@with_deadline
async def test_no_keyed_request_is_refused_because_strangers_hold_bodies(keys: str) -> None:
    """The bodies of 16 strangers would take all of ``bodies_bytes_max`` twice."""
    async with bed(1, api_keys_file=keys, limits=SMALL, deadlines=PATIENT) as b:
        strangers = [await b.client() for _ in range(16)]
        for stranger in strangers:
            await hold(stranger, 120 << 10)
        refused = 0
        for _ in range(50):
            refused += (await b.ask("POST", COMPLETIONS, BODY, KEY)).status != 200
        assert refused == 0
        assert b.metric("moonpool_proxy_rejected_total", reason="bodies_held") == 0


@with_deadline
async def test_nor_because_they_hold_bodies_of_the_proxys_own_pages(keys: str) -> None:
    async with bed(1, api_keys_file=keys, limits=SMALL, deadlines=PATIENT) as b:
        for _ in range(16):
            stranger = await b.client()
            await stranger.send(request_bytes("GET", "/metrics", b"x" * (120 << 10))[:-1])
        await until(lambda: b.counters.rejected.get("bodies_held", 0) > 0)  # of their own purse
        assert b.counters.held_body_bytes <= SMALL.bodies_bytes_max / 8
        assert (await b.ask("POST", COMPLETIONS, BODY, KEY)).status == 200


@with_deadline
async def test_one_address_holds_its_share_of_bodies() -> None:
    """Without keys all are strangers; one address leaves half to the others."""
    async with bed(1, limits=SMALL, deadlines=PATIENT) as b:
        for _ in range(8):
            await hold(await from_("127.0.0.2", b), 100 << 10)
        await until(lambda: b.counters.rejected.get("address_bodies", 0) > 0)
        late = await from_("127.0.0.2", b)
        await late.request("POST", COMPLETIONS, b"x" * (100 << 10))
        answer = await late.answer()
        assert answer.status == 429
        assert "retry-after" in answer.headers
        assert "address_share" in json.loads(answer.body)["error"]["message"]
        other = await from_("127.0.0.3", b)
        assert (await other.ask("POST", COMPLETIONS, BODY)).status == 200
        assert b.counters.held_body_bytes <= SMALL.bodies_bytes_max // 2


@with_deadline
async def test_bytes_that_came_fast_do_not_pay_for_those_that_drip() -> None:
    clock = FakeClock()
    deadlines = Deadlines(body_stall_s=300, body_bytes_per_s_min=1024)
    async with bed(1, clock=clock, deadlines=deadlines) as b:
        client = await b.client()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n"
        await client.send(head.encode() + b"x" * 1_000_000)  # earned 16 minutes once
        await until(lambda: b.connection()["body"] == 1_000_000)
        for sent in range(1, 4):
            await client.send(b"x")
            await until(lambda want=sent: b.connection()["body"] == 1_000_000 + want)
            clock.now += 120
        assert (await client.answer()).status == 408


@with_deadline
async def test_who_waits_for_nothing_gives_his_place_to_who_comes() -> None:
    """Strangers whose requests were refused are idle for 75 s; they do not keep others out meanwhile."""
    async with bed(1, limits=Limits(client_connections_max=20, address_share=1)) as b:
        regular = await b.client()
        assert (await regular.ask("POST", COMPLETIONS, b"{}")).status == 200
        strangers = [await b.client() for _ in range(40)]
        for stranger in strangers:
            await stranger.send(b"GET /x HTTP/1.1\r\nHost: p\r\n\r\n")
        await until(lambda: b.counters.rejected.get("idle_closed", 0) >= 21)
        for _ in range(30):
            assert (await b.ask("POST", COMPLETIONS, b"{}")).status == 200
        assert (await regular.ask("POST", COMPLETIONS, b"{}")).status == 200  # strangers went first
        assert b.client_count <= 20
        assert b.metric("moonpool_proxy_rejected_total", reason="connections") == 0


@with_deadline
async def test_one_address_has_its_share_of_places() -> None:
    never = asyncio.Event()
    async with bed(1, limits=Limits(client_connections_max=20)) as b:

        async def hang(exchange: object) -> None:
            await never.wait()

        b.engines[0].behave = hang  # type: ignore[assignment]
        for _ in range(10):  # busy ones: there is none that could be closed for another
            await (await from_("127.0.0.2", b)).request("POST", COMPLETIONS, b"{}")
        await until(lambda: len(b.engines[0].seen) == 10)
        eleventh = await from_("127.0.0.2", b)
        answer = await eleventh.answer()
        assert (answer.status, b.counters.rejected["address_connections"]) == (429, 1)
        b.engines[0].behave = b.engines[0].say_name
        other = await from_("127.0.0.3", b)
        assert (await other.ask("POST", COMPLETIONS, b"{}")).status == 200
