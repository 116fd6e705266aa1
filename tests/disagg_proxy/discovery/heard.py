"""What the tests of sources share: somebody who listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence, Set

from moonpool.disagg_proxy.discovery.source import DiscoveredEngine, Source


class Heard:
    """What a source has told: the names of each set, the names that ended, and why it failed."""

    def __init__(self) -> None:
        self.sets: list[list[str]] = []
        self.last: list[DiscoveredEngine] = []
        self.ended: list[set[str]] = []
        self.failures: list[str] = []

    def found(self, engines: Sequence[DiscoveredEngine], ended: Set[str] = frozenset()) -> None:
        self.last = list(engines)
        self.sets.append([each.name for each in engines])
        self.ended.append(set(ended))

    def failed(self, why: str) -> None:
        self.failures.append(why)


@contextlib.asynccontextmanager
async def heard(source: Source) -> AsyncIterator[Heard]:
    """Listens to a source, which must not end by itself."""
    listener = Heard()
    task = asyncio.ensure_future(source.run(listener))
    try:
        yield listener
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
