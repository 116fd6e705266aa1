"""P/D between mock engines: what a prefill engine keeps for a decode engine, and how that engine fetches it.

Towards the proxy the mock engine has both forms of vLLM's connectors (``kv_transfer_params``: two-step,
NIXL-style; and concurrent, with ``transfer_id`` and a bootstrap address). Between mock engines there are no
bytes to move, so one endpoint serves both forms: ``POST /mock/handover {"id": ..., "engine_id": ...}``
answers with the number of tokens once the prompt is computed, and ends the lease. 0: decode computes the
prompt, because there is no such lease or engine.

In SGLang's form (``sglang.py``) the id is the room, decode computes nothing, and prefill's answer waits until
its blocks were fetched.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from moonpool.disagg_proxy.tools.mock_engine.blocks import Blocks

ANSWER_BYTES_MAX = 4096


class Leases:
    """Blocks that wait to be fetched. seconds: the longest wait. Runs on the event loop."""

    def __init__(self, blocks: Blocks, seconds: float) -> None:
        self._blocks = blocks
        self._seconds = seconds
        self._tokens: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waiters: dict[str, list[asyncio.Future[int]]] = {}
        self._ended: dict[str, Callable[[bool], None]] = {}
        self.expired = 0
        self.fetched = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def open(self, name: str, tokens: int, ended: Callable[[bool], None] = lambda taken: None) -> None:
        """The prompt is computed and its blocks are held under ("lease", name). ended: called with whether
        they were fetched."""
        self._tokens[name] = tokens
        self._ended[name] = ended
        self._timers[name] = asyncio.get_running_loop().call_later(self._seconds, self._expire, name)
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(self.take(name))

    def take(self, name: str) -> int:
        """Ends the lease and returns its tokens; 0 when there is none."""
        tokens = self._tokens.pop(name, 0)
        if tokens:
            self._timers.pop(name).cancel()
            self._blocks.free(("lease", name))
            self.fetched += 1
            self._ended.pop(name)(True)
        return tokens

    def drop(self, name: str) -> None:
        """Ends the lease without calling ``ended``."""
        if self._tokens.pop(name, 0):
            self._timers.pop(name).cancel()
            self._blocks.free(("lease", name))
            del self._ended[name]

    def refuse(self, name: str) -> None:
        """The prompt will not be computed: engines that wait for it get 0 tokens."""
        for waiter in self._waiters.pop(name, ()):
            if not waiter.done():
                waiter.set_result(0)

    async def wait(self, name: str) -> int:
        """As ``take``, after waiting for the prompt to be computed; 0 when that takes too long."""
        if name in self._tokens:
            return self.take(name)
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(name, []).append(waiter)
        try:
            async with asyncio.timeout(self._seconds):
                return await waiter
        except TimeoutError:
            return 0
        finally:
            waiters = self._waiters.get(name)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[name]

    def close(self) -> None:
        """Cancels the timers: leases then never expire. Does not end the tasks that ``wait``."""
        for timer in self._timers.values():
            timer.cancel()

    def _expire(self, name: str) -> None:
        if self._tokens.pop(name, 0):
            del self._timers[name]
            self._blocks.free(("lease", name))
            self.expired += 1
            self._ended.pop(name)(False)


async def fetch(host: str, port: int, name: str, engine_id: str, *, timeout_s: float) -> int:
    """Asks a prefill engine. Returns how many tokens were handed over; 0 for every kind of failure."""
    try:
        body = json.dumps({"id": name, "engine_id": engine_id}).encode()
        request = (
            b"POST /mock/handover HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\nConnection: close\r\n\r\n" % (host.encode("idna"), len(body))
        )
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request + body)
                answer = await reader.read(ANSWER_BYTES_MAX)
            finally:
                writer.close()
            return int(json.loads(answer.partition(b"\r\n\r\n")[2])["tokens"])
    except (OSError, TimeoutError, ValueError, KeyError, TypeError):
        return 0
