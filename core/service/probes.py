"""The answers of /livez, /readyz and /health of node and master, for orchestrators.

/livez   200 while the threads that serve answer; 503: end this process and start it again
/readyz  200 while the process serves in full: joined, its memory there, not stopping; 503 with reasons
/health  200 while it is live, with "ok" or what keeps it from being ready; the older page
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from moonpool import _native

STOPPING = "this process is stopping"
ALIVE_TIMEOUT_S = 1.0  # of one check of the loop: with the network, an answer comes within 2 s
_log = logging.getLogger(__name__)


class Probes:
    """The health of one process.

    reasons: what keeps a live process from being ready, a sentence each. facts: what else the pages show.
    is_stopping: such a process counts as live, whatever its threads do: they are being ended.
    """

    def __init__(
        self,
        server: _native.Server | _native.MasterServer,
        *,
        reasons: Callable[[], list[str]],
        facts: Callable[[], Mapping[str, object]],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._server = server
        self._reasons = reasons
        self._facts = facts
        self._is_stopping = is_stopping
        self._asked: asyncio.Task[bool] | None = None
        self._was_alive = True

    async def livez(self) -> web.Response:
        """The answer to GET /livez: 200 or 503."""
        alive = await self._is_alive()
        reasons = [] if alive else [_STUCK]
        return _page(200 if alive else 503, {"alive": alive, "reasons": reasons, **self._facts()})

    async def readyz(self) -> web.Response:
        """The answer to GET /readyz: 200 or 503."""
        reasons = self._all_reasons(await self._is_alive())
        return _page(503 if reasons else 200, {"ready": not reasons, "reasons": reasons, **self._facts()})

    async def health(self) -> web.Response:
        """The answer to GET /health: 200 while the process is live."""
        alive = await self._is_alive()
        reasons = self._all_reasons(alive)
        status = "ok" if not reasons else "not ready" if alive else "stuck"
        return _page(200 if alive else 503, {"status": status, "reasons": reasons, **self._facts()})

    def _all_reasons(self, alive: bool) -> list[str]:
        if self._is_stopping():
            return [STOPPING]
        return self._reasons() if alive else [_STUCK]

    async def _is_alive(self) -> bool:
        """One check at a time, however many requests ask."""
        if self._is_stopping():
            return True
        if self._asked is None or self._asked.done():
            self._asked = asyncio.create_task(asyncio.to_thread(self._server.is_alive, ALIVE_TIMEOUT_S))
        alive = await asyncio.shield(self._asked)
        if alive != self._was_alive:
            self._was_alive = alive
            _log.log(
                logging.INFO if alive else logging.ERROR, "the data plane answers again" if alive else _STUCK
            )
        return alive


_STUCK = f"the data plane did not answer within {ALIVE_TIMEOUT_S:g} s"


def _page(status: int, page: Mapping[str, object]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(page), content_type="application/json")
