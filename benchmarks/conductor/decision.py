"""A whole decision of the proxy, as its data plane asks for it: the ids out of the JSON, the digests, the
question to the index, the policy (``conductor``), the books. Engines tell their blocks by event streams, or
the index is told for them, which is how a thousand fit into one process.

Requests come over a socket and wait until there is a batch of them; then all are decided one after the other,
on one thread, and its CPU time is what counts. Every prompt is seen for the first time: half of it all share.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import uvloop

from benchmarks.proxy.mock_engine import MockEngine
from moonpool._native import ProxyRequest
from moonpool.core.config.proxy_section import HealthChecks
from moonpool.core.service.kv_event_publisher import (
    Batch,
    BlockStored,
    KvEvent,
    KvEventPublisher,
    QueuedEventSource,
)
from moonpool.disagg_proxy.conductor.plan import Decision
from moonpool.disagg_proxy.dispatch.dispatcher import Dispatcher
from moonpool.disagg_proxy.events.settings import EventSource
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import EngineSpec, ProxySettings

BATCH = 32
EVENT_BLOCKS = 64
READY_TIMEOUT_S = 60.0
SELDOM = HealthChecks(interval_s=600.0)  # those of a thousand engines would take the loop's time
VOCABULARY = 50_000


class Cost(NamedTuple):
    """Of one decision. cpu_us: the median over the rounds. native_calls: functions of the C++ half that its
    Python half calls; reading an attribute is none, and neither is what the data plane hands over when it
    asks for the decision.
    """

    cpu_us: float
    native_calls: float


def measure(
    engines: int, tokens: int, block_tokens: int, blocks_each: int, rounds: int, *, streams: bool = True
) -> Cost:
    """Raises TimeoutError."""
    return uvloop.run(_measure(engines, tokens, block_tokens, blocks_each, rounds, streams))


async def _measure(
    engines: int, tokens: int, block_tokens: int, blocks_each: int, rounds: int, streams: bool
) -> Cost:
    rng = random.Random(1)
    shared = _tokens(rng, tokens // 2)
    waiting: asyncio.Queue[tuple[ProxyRequest, float, bytes, bytes | None]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def later(
        dispatcher: Dispatcher, request: ProxyRequest, now_s: float, records: bytes, ids: bytes | None
    ) -> Decision:
        loop.call_soon_threadsafe(waiting.put_nowait, (request, now_s, records, ids))
        return None

    async with AsyncExitStack() as stack:
        specs, sources, told = [], [], []
        for place in range(engines):
            server = await loop.create_server(MockEngine, "127.0.0.1", 0)
            stack.callback(server.close)
            specs.append(EngineSpec(f"e{place}", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            depth = max(1, len(shared) // block_tokens - 2 * place)
            told.append([_stored(rng, shared[: depth * block_tokens], block_tokens)])
            told[-1] += [_stored(rng, _tokens(rng, EVENT_BLOCKS * block_tokens), block_tokens)
                         for _ in range(blocks_each // EVENT_BLOCKS)]  # fmt: skip
            if streams:
                queue = QueuedEventSource()
                stack.callback(queue.close)
                publisher = KvEventPublisher(queue, "tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0")
                stack.callback(publisher.close)
                sources.append(EventSource(f"e{place}", publisher.endpoint, publisher.replay))
                queue.add(told[-1])
        settings = ProxySettings(
            port=0, engines=tuple(specs), policy="conductor", events=tuple(sources), health=SELDOM
        )
        with patch.object(Dispatcher, "decide", later):
            proxy = Proxy(settings)
        stack.push_async_callback(proxy.close)
        port = int((await proxy.open()).rsplit(":", 1)[1])
        if not streams:
            index = proxy._indexes.obtain(block_tokens)
            assert index is not None
            for place, events in enumerate(told):
                index.ingest(place, msgspec.msgpack.encode(Batch(time.time(), events)))
        await _until_told(proxy, engines * blocks_each)
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(BATCH)]
        found = []
        calls = 0

        def count(frame: FrameType, event: str, function: Any) -> None:
            nonlocal calls
            calls += event == "c_call" and _is_native(function)

        for number in range(rounds + 1):
            for _, writer in clients:
                writer.write(_request(shared + _tokens(rng, tokens - len(shared))))
            questions = [await asyncio.wait_for(waiting.get(), READY_TIMEOUT_S) for _ in clients]
            start_s = time.thread_time()
            for request, *_ in questions:  # the data plane's part, before it calls: it counts as time
                request.prompt_tokens()
            sys.setprofile(
                count if number == 0 else None
            )  # the first round warms up; its time does not count
            decisions = [proxy._dispatcher.decide(*question) for question in questions]
            sys.setprofile(None)
            found.append((time.thread_time() - start_s) / BATCH * 1e6)
            for (request, *_), decision in zip(questions, decisions, strict=True):
                proxy.relay.resume(request, decision)
            for reader, _ in clients:
                await asyncio.wait_for(_read_answer(reader), READY_TIMEOUT_S)
        for _, writer in clients:
            writer.close()
        proxy.check_integrity()
        return Cost(statistics.median(found[1:]), calls / BATCH)


def _is_native(function: Any) -> bool:
    """pybind11's functions have a record of its own in the place of an object."""
    owner = getattr(function, "__self__", None)
    return "pybind11" in type(owner).__name__ or type(owner).__module__.startswith("moonpool._native")


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [number % VOCABULARY for number in memoryview(rng.randbytes(4 * count)).cast("I")]


def _stored(rng: random.Random, tokens: list[int], block_tokens: int) -> KvEvent:
    hashes = [rng.randrange(1 << 63) for _ in range(len(tokens) // block_tokens)]
    return BlockStored(hashes, None, tokens, block_tokens, medium="GPU")


def _request(tokens: list[int]) -> bytes:
    body = json.dumps({"model": "m", "prompt": tokens, "max_tokens": 64}, separators=(",", ":")).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    ) + body


async def _until_told(proxy: Proxy, blocks: int) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while (known := proxy._locator.stats().get("entries", 0)) < blocks:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the index has {known:.0f} of {blocks} blocks")
        await asyncio.sleep(0.02)


async def _read_answer(reader: asyncio.StreamReader) -> None:
    """Raises RuntimeError when it is none."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a request was answered {head.splitlines()[0]!r}")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(int(length.partition(b":")[2]))
