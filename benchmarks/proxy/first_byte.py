"""Time to the first token, at a rate that does not wait for answers: half of the requests straight to the
engines, the others through the proxy, in random order, so that both see the same machine."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from benchmarks.proxy.mock_engine import EVENT

STREAM_END = b"\r\n0\r\n\r\n"
TIMEOUT_S = 30.0


class Connection(asyncio.Protocol):
    """One request at a time; ``answered`` is done when its stream has ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def ask(self, request: bytes) -> asyncio.Future[float]:
        """The seconds to its first token, when the stream has ended."""
        self.received = b""
        self.first_s: float | None = None
        self.answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.sent_s = time.perf_counter()
        self.transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.first_s is None and EVENT in self.received:
            self.first_s = time.perf_counter() - self.sent_s
        if self.received.endswith(STREAM_END) and not self.answered.done():
            if self.first_s is None:
                self.answered.set_exception(RuntimeError("a stream came back without a token"))
            else:
                self.answered.set_result(self.first_s)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answered.done():
            self.answered.set_exception(RuntimeError("a connection was closed"))


async def measure(
    targets: Mapping[str, Sequence[int]], make: Callable[[], bytes], count: int, per_s: float
) -> dict[str, list[float]]:
    """Seconds to the first token by target. targets: ports, which take turns. count, per_s: requests of each
    target, and their mean rate."""
    rng = random.Random(2)
    order = [name for name in targets for _ in range(count)]
    rng.shuffle(order)
    requests = [make() for _ in order]
    idle: dict[int, list[Connection]] = {port: [] for ports in targets.values() for port in ports}
    turns = dict.fromkeys(targets, 0)
    found: dict[str, list[float]] = {name: [] for name in targets}
    loop = asyncio.get_running_loop()

    async def ask(name: str, port: int, request: bytes) -> None:
        if idle[port]:
            connection = idle[port].pop()
        else:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        found[name].append(await asyncio.wait_for(connection.ask(request), TIMEOUT_S))
        idle[port].append(connection)

    asked = []
    gc.collect()
    gc.disable()  # a pause of ours would be nobody's time
    due_s = time.perf_counter()
    for name, request in zip(order, requests, strict=True):
        due_s += rng.expovariate(per_s * len(targets))
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        ports = targets[name]
        turns[name] += 1
        asked.append(loop.create_task(ask(name, ports[turns[name] % len(ports)], request)))
    await asyncio.gather(*asked)
    gc.enable()
    for connections in idle.values():
        for connection in connections:
            connection.transport.abort()
    return found
