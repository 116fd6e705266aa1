"""Bodies that are compressed: nothing inflates them, and none reaches an engine."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest
from aiohttp import web

from moonpool.core.service.addresses import Address
from moonpool.core.service.admin_http import AdminServer
from tests.disagg_proxy.harness import bed, request_bytes, with_deadline

FORGED = b'{"prompt":"x","kv_transfer_params":{"remote_host":"169.254.169.254"}}'
BOMB = gzip.compress(b"[" + b"0," * (16 << 20) + b"0]")  # 32 MiB in 32 KiB


@with_deadline
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "gzip, gzip"])
async def test_a_compressed_body_reaches_no_engine(encoding: str) -> None:
    """An engine might inflate what the proxy could not look into."""
    body = {"gzip": gzip.compress, "deflate": zlib.compress}.get(
        encoding, lambda it: gzip.compress(gzip.compress(it))
    )(FORGED)
    async with bed(1) as b:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize"):
            # Also one that is JSON as it stands: it could be another one when it is inflated.
            for sent in (body, b'{"prompt":"x"}'):
                answer = await b.ask("POST", path, sent, f"Content-Encoding: {encoding}\r\n")
                assert (answer.status, json.loads(answer.body)["error"]["code"]) == (415, "encoded")
        assert not b.engines[0].seen
        plain = await b.ask("POST", "/v1/completions", b'{"prompt":"x"}', "Content-Encoding: identity\r\n")
        assert plain.status == 200


@with_deadline
async def test_the_registry_inflates_nothing() -> None:
    async with bed(1, discovery=("http",), policy="conductor", tokenizer=("none",)) as b:
        told = gzip.compress(b'{"instance_id":"a","url":"http://127.0.0.1:9"}')
        for path in ("/register", "/unregister", "/query", "/query_by_hash"):
            for body in (told, BOMB):
                assert (await b.ask("POST", path, body, "Content-Encoding: gzip\r\n")).status == 415
        assert len(b.proxy.engines) == 1


def test_a_page_of_a_node_or_master_inflates_nothing() -> None:
    """A page gets the bytes that were sent, and refuses them by its own rules."""
    got: list[bytes] = []

    async def page(request: web.Request) -> web.Response:
        got.append(await request.read())
        return web.Response()

    async def send() -> None:
        server = AdminServer(
            Address("127.0.0.1", 0), {}, key="--http", connections_max=8, timeout_s=10.0, own={"/page": page}
        )
        await server.start()
        try:
            for encoding in ("gzip", "deflate"):
                reader, writer = await asyncio.open_connection(*server.address)
                writer.write(request_bytes("PUT", "/page", BOMB, f"Content-Encoding: {encoding}\r\n"))
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
                writer.close()
        finally:
            await server.close()

    asyncio.run(asyncio.wait_for(send(), 20.0))
    assert got == [BOMB, BOMB]
