"""Sends conversations: the turns of each one after the other, so many conversations at a time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import aiohttp
import uvloop

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.replay.client import Client, Outcome
from moonpool.disagg_proxy.tools.replay.results import Results
from moonpool.disagg_proxy.tools.replay.run import NO_TIMEOUT, TELL_EVERY_S, first_model
from moonpool.disagg_proxy.tools.serve_bench.conversations import Conversations

_bad = partial(ConfigError, operation="bench")


@dataclass(frozen=True, slots=True)
class Target:
    """url: root of an OpenAI API. model: "": not chosen yet (``with_models``). concurrency: conversations at
    one time. deadline_s: of one request. Raises ConfigError."""

    url: str
    model: str = ""
    api_key: str = ""
    concurrency: int = 8
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise _bad(f"an engine's URL looks like http://host:port, not {self.url!r}")
        if self.concurrency < 1 or not 0 < self.deadline_s < float("inf"):
            raise _bad("the concurrency and the deadline must be positive")

    @property
    def root(self) -> str:
        """Without the path of the API: both forms are common."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Load:
    """What was sent to one target. stopped: by a signal, before the end."""

    target: Target
    results: Results
    stopped: bool


def with_models(targets: Sequence[Target]) -> list[Target]:
    """The same with a model each. Raises Unavailable for a target that does not name one: before a load is
    sent to any of them."""

    async def named(target: Target) -> Target:
        async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as session:
            return replace(target, model=await first_model(session, target.root, target.api_key))

    async def all_named() -> list[Target]:
        return [each if each.model else await named(each) for each in targets]

    return asyncio.run(all_named())


def run(target: Target, conversations: Conversations, tell: Callable[[Results], None]) -> Load:
    """tell: called every second with the results so far. SIGINT and SIGTERM end it early."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(target, conversations, tell))


async def _run(target: Target, conversations: Conversations, tell: Callable[[Results], None]) -> Load:
    loop = asyncio.get_running_loop()
    results, stop = Results(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=NO_TIMEOUT) as session:
        began_s = loop.time()

        def clock() -> float:
            return loop.time() - began_s

        client = Client(session, target.model, clock, api_key=target.api_key, deadline_s=target.deadline_s)
        waiting = iter(range(conversations.shape.sessions))
        users = [
            asyncio.ensure_future(_use(client, target.root, conversations, waiting, clock, results))
            for _ in range(target.concurrency)
        ]
        telling = asyncio.ensure_future(_tell(results, tell))
        stopping = asyncio.ensure_future(stop.wait())
        everything = asyncio.gather(*users)
        try:
            waits: set[asyncio.Future[Any]] = {everything, stopping}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (telling, stopping, *users):
                task.cancel()
            await asyncio.gather(telling, stopping, *users, return_exceptions=True)
    if everything.done() and not everything.cancelled():
        everything.result()  # our own mistake, if any
    return Load(target, results, stop.is_set())


async def _use(
    client: Client,
    url: str,
    conversations: Conversations,
    waiting: Iterator[int],
    clock: Callable[[], float],
    results: Results,
) -> None:
    """Holds one conversation after the other."""
    shape = conversations.shape
    for session in waiting:
        for turn in range(shape.turns):
            ids, reusable = conversations.ids(session, turn), conversations.reusable(session, turn)
            now_s = clock()
            outcome = Outcome(session * shape.turns + turn, now_s, now_s, len(ids), reusable)
            try:
                await client.ask(url, outcome, ids, shape.answer_tokens)
            finally:
                results.add(outcome)


async def _tell(results: Results, tell: Callable[[Results], None]) -> None:
    while True:
        await asyncio.sleep(TELL_EVERY_S)
        tell(results)
