"""/livez and /readyz: a proxy without an engine lives and is not ready; one whose own thread is stuck does
not live, and says so in time."""

from __future__ import annotations

import http.client
import json
import threading

from ..harness import MockEngine, bed, with_deadline


def status_of(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@with_deadline
async def test_a_proxy_without_an_engine_lives_and_is_not_ready() -> None:
    def sick(engines: list[MockEngine]) -> None:
        engines[0].healthy = False

    async with bed(1, prepare=sick) as b:
        await b.probe("/livez", 200)
        refusal = await b.probe("/readyz", 503)
        assert json.loads(refusal.body)["error"]["code"] == "no_engine"
    async with bed(1) as b:
        for path in ("/livez", "/readyz"):
            await b.probe(path, 200)


@with_deadline
async def test_a_proxy_whose_own_thread_is_stuck_does_not_live() -> None:
    async with bed(1) as b:
        for path in ("/livez", "/readyz"):
            seen: list[int] = []
            asking = threading.Thread(target=lambda path=path, to=seen: to.append(status_of(b.port, path)))
            asking.start()
            asking.join(10)  # the loop, in which the proxy makes its pages, stands still meanwhile
            assert seen == [503]
        await b.probe("/livez", 200)
