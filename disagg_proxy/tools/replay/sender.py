"""Sends a trace's requests at their times, at most ``concurrency`` in flight.

A request that is due while the maximum is reached waits for another one to end. It is late, and the results
report it, because a replay that its own maximum delays measures less load than the trace has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.replay.client import Client, Outcome
from moonpool.disagg_proxy.tools.replay.prompts import Prompts
from moonpool.disagg_proxy.tools.simulator.trace import Arrival


@dataclass(frozen=True, slots=True)
class Bounds:
    """concurrency: the most requests in flight; answer_max: tokens, 0: as the trace says."""

    concurrency: int = 256
    answer_max: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.answer_max < 0:
            raise ConfigError(
                "a replay has one request at once or more, and answers of a positive length",
                operation="replay",
            )


class Sender:
    """urls: get the requests in turn. done: called with each outcome. clock: seconds since the beginning."""

    def __init__(
        self,
        client: Client,
        urls: Sequence[str],
        prompts: Prompts,
        bounds: Bounds,
        clock: Callable[[], float],
        done: Callable[[Outcome], None],
    ) -> None:
        self.sent = 0
        self._client = client
        self._urls = urls
        self._prompts = prompts
        self._bounds = bounds
        self._clock = clock
        self._done = done
        self._out: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()  # a request has ended, or all must

    @property
    def in_flight(self) -> int:
        """Requests that are sent and not over."""
        return len(self._out)

    async def run(self, arrivals: Iterable[Arrival], stop: asyncio.Event) -> None:
        """Returns when all requests have ended, or, once ``stop`` is set, were cut."""
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: self._moved.set())
        try:
            for arrival in arrivals:
                await self._until(arrival.at_s, stop)
                if stop.is_set():
                    break
                self._send(arrival)
            while self._out and not stop.is_set():
                await self._wait()
        finally:
            stopping.cancel()
            for task in self._out:
                task.cancel()
            await asyncio.gather(*self._out, return_exceptions=True)

    async def _until(self, at_s: float, stop: asyncio.Event) -> None:
        """It is due, and there is room."""
        while not stop.is_set():
            wait_s = at_s - self._clock()
            if wait_s > 0:
                await self._wait(wait_s)
            elif len(self._out) >= self._bounds.concurrency:
                await self._wait()
            else:
                return

    async def _wait(self, at_most_s: float | None = None) -> None:
        self._moved.clear()
        try:
            async with asyncio.timeout(at_most_s):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _send(self, arrival: Arrival) -> None:
        prompt = self._prompts.make(arrival)
        answer = max(arrival.answer_tokens, 1)
        if self._bounds.answer_max:
            answer = min(answer, self._bounds.answer_max)
        url = self._urls[self.sent % len(self._urls)]
        outcome = Outcome(self.sent, arrival.at_s, self._clock(), len(prompt.ids), prompt.reusable)
        self.sent += 1
        task = asyncio.ensure_future(self._ask(url, outcome, prompt.ids, answer))
        self._out.add(task)
        task.add_done_callback(self._ended)

    async def _ask(self, url: str, outcome: Outcome, ids: list[int], answer: int) -> None:
        try:
            await self._client.ask(url, outcome, ids, answer)
        finally:
            self._done(outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._out.discard(task)
        self._moved.set()
        if not task.cancelled():
            task.result()
