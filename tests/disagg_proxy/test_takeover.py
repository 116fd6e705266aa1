"""A new proxy at the address of a running one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import socket
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy import takeover
from moonpool.disagg_proxy.listen_sockets import take_over_or_bind
from moonpool.disagg_proxy.peers.settings import PeerSettings
from moonpool.disagg_proxy.server import Proxy
from moonpool.disagg_proxy.settings import ProxySettings
from moonpool.disagg_proxy.takeover import Offer, Predecessor, find_predecessor
from tests.ports import held_ports

from .harness import Client, Exchange, MockEngine, bed, proxy_process, until, with_deadline

CHAT = "/v1/chat/completions"
PAUSE_S = 0.01  # of each client, so that the interpreters that start meanwhile get a processor


class Load:
    """Clients that ask over a new connection each time, and which proxies answered: a request's id begins
    with its proxy's own digits."""

    def __init__(self, port: int, clients: int) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self._port = port
        self._tasks = [asyncio.ensure_future(self._ask_forever()) for _ in range(clients)]

    async def _ask_forever(self) -> None:
        while True:
            try:
                client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
                answer = await client.ask("POST", CHAT, b"{}")
                client.leave()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.errors.append(repr(error))
                return
            if answer.status != 200:
                self.errors.append(f"{answer.status} {answer.body!r}")
            self.answers[answer.headers["x-request-id"].partition("-")[0]] += 1
            await asyncio.sleep(PAUSE_S)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@functools.partial(with_deadline, deadline_s=90.0)  # four interpreters start in it
async def test_a_restart_refuses_no_connection_and_cuts_no_answer() -> None:
    goon = asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        if exchange.body != b'{"long":1}':
            return await exchange.answer(b"{}")
        await exchange.begin_stream()
        await exchange.event("first")
        await goon.wait()
        await exchange.end_stream()

    engine = MockEngine("a")
    engine.behave = answer
    await engine.start()
    async with contextlib.AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxy_process(engine, take_over=True))  # of nobody
        load = Load(proxy.port, clients=8)
        stack.push_async_callback(load.stop)
        for restart in range(3):
            await until(lambda: bool(load.errors) or sum(load.answers.values()) > 100)
            served = len(load.answers)
            long = await proxy.client()
            await long.request("POST", CHAT, b'{"long":1}')
            await long.head()
            goon.clear()
            successor = await stack.enter_async_context(
                proxy_process(engine, port=proxy.port, take_over=True)
            )
            await until(lambda served=served: bool(load.errors) or len(load.answers) > served)  # type: ignore[misc]
            goon.set()
            assert (await long.ended()).endswith(b"0\r\n\r\n")
            assert await proxy.process.wait() == 0
            proxy = successor
            print(f"restart {restart}: {dict(load.answers)}")
        assert load.errors == []
        assert len(load.answers) == 4
    await engine.stop()


@with_deadline
async def test_a_successor_that_fails_changes_nothing() -> None:
    async with bed(1) as b:
        for _ in range(2):
            found = await asyncio.to_thread(find_predecessor, b.host, b.port)
            assert found is not None
            assert [each.getsockname() for each in found.listening] == [(b.host, b.port)]
            for each in found.listening:
                each.close()
            found.close()
        assert (await b.ask("POST", CHAT, b"{}")).status == 200
        assert not b.proxy.replaced.is_set()


@with_deadline
async def test_nobody_to_take_over_from() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert find_predecessor(*free.getsockname()) is None
    assert not ProxySettings(engines=(MockEngine("a").spec,)).take_over


@with_deadline
async def test_a_lack_of_open_files_ends_no_offer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(takeover, "_PAUSE_S", 0.01)
    async with bed(1) as b:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket(socket.AF_UNIX) as early:
            early.setblocking(False)
            held: list[int] = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
            try:
                for _ in range(10):  # connections of the first health check are closed meanwhile
                    with contextlib.suppress(OSError):
                        while True:
                            held.append(os.dup(early.fileno()))
                    await asyncio.sleep(0)
                early.connect(takeover._name(b.host, b.port))
                await until(lambda: "could not be answered" in caplog.text)
            finally:
                for number in held:
                    os.close(number)
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            greeting = await asyncio.get_running_loop().sock_recv(early, 64)  # what it came with is dropped
        assert greeting == takeover._GREETING
        found = await asyncio.to_thread(find_predecessor, b.host, b.port)
        assert found is not None
        for each in found.listening:
            each.close()
        found.close()


@with_deadline
async def test_registrations_that_no_file_hands_on_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"discovery_registry_file": str(tmp_path / "registered.json")}
    for more, warnings in ((kept, 0), ({}, 1)):
        listening: list[socket.socket] = []
        settings = ProxySettings(port=0, discovery=("http",), take_over=True, **more)  # type: ignore[arg-type]
        assert await take_over_or_bind(settings, listening) is None
        for each in listening:
            each.close()
        assert caplog.text.count("--discovery-registry-file hands registrations on") == warnings


@with_deadline
async def test_a_name_that_is_given_up_late_is_had_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_PAUSE_S", 0.01)
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as old:
        listening.bind(("127.0.0.1", 0))
        host, port = listening.getsockname()
        old.bind(takeover._name(host, port))
        offer = Offer(host, port, [listening], lambda: None)
        old.close()
        found = None
        while found is None:
            found = await asyncio.to_thread(find_predecessor, host, port)
        for each in found.listening:
            each.close()
        found.close()
        await offer.close()


@with_deadline
async def test_a_predecessor_that_says_nothing_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(0.01)
    with theirs:
        await Predecessor(ours, []).release()
        assert theirs.recv(16) == takeover._TAKEN
    assert "has not confirmed that it will end" in caplog.text


@with_deadline
async def test_the_address_for_other_proxies_goes_to_the_successor() -> None:
    """The same command each time: it is in use until the predecessor has been told to go."""
    engine = MockEngine("a")
    await engine.start()
    with held_ports(2) as (port, peer_port):
        settings = ProxySettings(
            port=port,
            engines=(engine.spec,),
            policy="conductor",
            tokenizer=("none",),
            take_over=True,
            peers=PeerSettings((f"127.0.0.1:{peer_port}",)),
        )
        old, new = Proxy(settings), Proxy(settings)
        try:
            await old.open()
            await new.open()
            await asyncio.wait_for(old.replaced.wait(), 20)
            link = new._peer_sync.bus if new._peer_sync is not None else None
            assert link is not None
            assert link._unbound
            assert await old.drain()
            await until(lambda: not link._unbound)
            assert link.where.endswith(f":{peer_port}")
        finally:
            await new.close()
            await old.close()
        with (
            socket.create_server(("127.0.0.1", peer_port)),
            pytest.raises(ConfigError, match="--peer-listen"),
        ):
            Proxy(msgspec.structs.replace(settings, take_over=False))
    await engine.stop()
