"""Engines that end by a request, publish events without end, or stand still."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import msgspec
import zmq

from benchmarks.hostile.bed import COMPLETIONS, HERE, MIB, LeftOut, Setting, ask, at_most, memory, stopped
from benchmarks.report import Row
from moonpool.core.service.kv_event_publisher import Batch, BlockStored
from tests.disagg_proxy.harness import Client, Exchange, MockEngine

ENGINES = 4
BLOCK, BLOCKS = 16, 60_000  # of a message, which has 4 MiB
BATCHES = 8
CLIENTS = 8


def killers(setting: Setting) -> list[Row]:
    """An engine that gets the request ends for good, in mid answer."""

    async def attack() -> int:
        engines = [MockEngine(f"e{number}") for number in range(ENGINES)]
        for engine in engines:

            async def die(exchange: Exchange, engine: MockEngine = engine) -> None:
                await exchange.send(b"HTTP/1.1 200 OK\r\nContent-Le")
                exchange.cut()
                await engine.stop()

            engine.behave = die
            await engine.start()
        try:
            words = [
                word for each in engines for word in ("--engine", f"{each.name}=http://{HERE}:{each.port}")
            ]
            _, port = await asyncio.to_thread(setting.proxy, "--tokenizer", "none", *words)
            client = Client(*await asyncio.open_connection(HERE, port))
            await client.ask("POST", COMPLETIONS, b'{"prompt":"x"}')
            client.leave()
            return sum(bool(each.seen) for each in engines)
        finally:
            for engine in engines:
                await engine.stop()

    return [at_most(f"engines that one request ends, of {ENGINES}", asyncio.run(attack()), 2, "engines")]


def event_flood(setting: Setting) -> list[Row]:
    """Batches of 4 MiB, as fast as the proxy takes them."""
    seconds = setting.long(60.0, 5.0)
    batches = [batch(number) for number in range(BATCHES)]  # again and again: to make one takes long
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.XPUB_NODROP, 1)
    pub.setsockopt(zmq.SNDHWM, 1)
    pub.setsockopt(zmq.SNDTIMEO, 100)
    pub.bind(f"tcp://{HERE}:0")
    endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
    try:
        _, engine = setting.mock_engine()
        words = ["--tokenizer", "none", "--engine", f"a=http://{HERE}:{engine}", "--events", f"a={endpoint}"]
        proxy, _ = setting.proxy(*words)
        if not pub.poll(60_000):
            raise LeftOut("the proxy did not subscribe within 60 s")
        before, sent = memory(proxy.pid, "VmRSS"), 0
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            try:
                pub.send_multipart((b"kv", sent.to_bytes(8, "big"), batches[sent % BATCHES]))
                sent += 1
            except zmq.Again:
                continue
        more = memory(proxy.pid, "VmHWM") - before
    finally:
        context.destroy(linger=0)
    work = f"event flood of one engine [{sent} batches of 4 MiB in {seconds:g} s]: more memory"
    return [at_most(work, more / MIB, 256, "MiB")]


def batch(number: int) -> bytes:
    """Of blocks that no other batch has."""
    names = [(1 << 62) + number * BLOCKS + each for each in range(BLOCKS)]
    return msgspec.msgpack.encode(Batch(0.0, [BlockStored(names, None, TOKENS, BLOCK)]))


TOKENS = [(1 << 16) + number for number in range(BLOCKS * BLOCK)]


def stopped_engine(setting: Setting) -> list[Row]:
    """One of two engines gets SIGSTOP while 8 clients ask one request after the other."""
    engines = [setting.mock_engine() for _ in range(2)]
    words = [word for _, port in engines for word in ("--engine", f"http://{HERE}:{port}")]
    _, port = setting.proxy("--policy", "round_robin", *words)
    seconds = setting.long(30.0, 8.0)
    longest_s, failed = [0.0] * CLIENTS, [0] * CLIENTS

    def client(number: int, until_s: float) -> None:
        body = {"model": "mock", "prompt": "x", "max_tokens": 1}
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            failed[number] += ask(port, "POST", COMPLETIONS, body).status != 200
            longest_s[number] = max(longest_s[number], time.monotonic() - began_s)

    with stopped([engines[0][0]], signal.SIGSTOP, signal.SIGCONT):
        until_s = time.monotonic() + seconds
        clients = [threading.Thread(target=client, args=(number, until_s)) for number in range(CLIENTS)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
    work = f"one of two engines stopped for {seconds:g} s: longest request"
    return [at_most(f"{work} ({sum(failed)} failed)", max(longest_s), 5, "s")]
