"""aiohttp's log of malformed requests: a short line each, at a bounded rate, without the request."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from moonpool.core.printable import printable

REASON_CHARACTERS_MAX = 120
BURST = 10  # lines at once, and one a second after that
SERVER = "moonpool"  # instead of the versions of Python and aiohttp
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Budget:
    """A token bucket of log lines."""

    def __init__(self) -> None:
        self.left_out = 0
        self._tokens = float(BURST)
        self._filled_s = time.monotonic()

    def take(self) -> bool:
        """Takes one token; False when none is left."""
        now = time.monotonic()
        self._tokens = min(float(BURST), self._tokens + now - self._filled_s)
        self._filled_s = now
        if self._tokens < 1:
            self.left_out += 1
            return False
        self._tokens -= 1
        return True

    def more(self) -> str:
        """A remark about the lines dropped since the last one; "" for none."""
        left_out, self.left_out = self.left_out, 0
        return f" ({left_out:,} more like it were not logged)" if left_out else ""


class _ClientFaults(logging.Filter):
    """Turns a client's error into one line without a traceback; an error of ours stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._budget = Budget()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | ConnectionError | TimeoutError):
            return True
        if not self._budget.take():
            return False
        reason = printable(" ".join(str(error)[: 4 * REASON_CHARACTERS_MAX].split()))[:REASON_CHARACTERS_MAX]
        peer = record.args[0] if isinstance(record.args, tuple) and record.args else "a client"
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.msg, record.args = "%s: no request that is served: %s%s", (peer, reason, self._budget.more())
        record.exc_info = record.exc_text = None
        return True


def logger() -> logging.Logger:
    """For aiohttp's servers."""
    found = logging.getLogger("moonpool.http")
    if not any(isinstance(each, _ClientFaults) for each in found.filters):
        found.addFilter(_ClientFaults())
    return found


async def hide_versions(_request: web.Request, response: web.StreamResponse) -> None:
    """For ``on_response_prepare`` of an application."""
    response.headers["Server"] = SERVER


def calm(loop: asyncio.AbstractEventLoop) -> None:
    """For a process's event loop: an accept that fails for lack of descriptors is one line, not a traceback
    each."""
    budget = Budget()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_ROOM):
            loop.default_exception_handler(context)
        elif budget.take():
            logging.getLogger("moonpool.http").warning(
                "a connection waits: %s; raise the limit of open files%s", error.strerror, budget.more()
            )

    loop.set_exception_handler(handle)
