"""`mooncake_http_metadata_server`: small values by key over HTTP, where programs look each other up.

    GET, PUT, DELETE /metadata?key=KEY      the body is the value

Engines that are given its URL as metadata_server publish their names here, with leases (moonpool's
core/transfer/metadata/http_metadata.py). Any client may write, so it listens on 127.0.0.1 unless another
address is given. Connections, heads and bodies are bounded (_http).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import threading
from contextlib import suppress
from enum import Enum

from aiohttp import web

from moonpool.core.errors import ConfigError
from moonpool.core.service.exit_codes import guarded
from moonpool.core.transfer.metadata.leased_values import LeasedValues, page_of

from ._codes import logger
from ._http import CONNECTIONS_HELP, BoundedHttp, HttpLimits

VALUE_BYTES_MAX = 1 << 20
TOTAL_BYTES_MAX = 256 << 20
START_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MetadataServer:
    """Values in memory, gone with it. start() before anything else; ``url`` is known after it.

    connections_max: of all that are open, at most half of the files that the process may open; None: 1,024.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8080, connections_max: int | None = None) -> None:
        self._host, self._port = host, port
        self._values = LeasedValues(TOTAL_BYTES_MAX)
        app = web.Application()
        app.router.add_route("*", "/metadata", self._handle)
        app.router.add_get("/health", self._health)
        self.http = BoundedHttp(app, HttpLimits(VALUE_BYTES_MAX, connections_max))
        self.url = ""

    async def start(self) -> None:
        """Begins to listen. Raises ConfigError when the address is in use."""
        try:
            host, port = await self.http.start(self._host, self._port)
        except (OSError, OverflowError) as error:  # the latter for a port that is none
            raise ConfigError(
                f"cannot listen at {self._host}:{self._port}: {error}; give another --port",
                operation="metadata",
                key="port",
            ) from error
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metadata"

    async def close(self) -> None:
        """Stops listening and ends the requests under way."""
        await self.http.close()

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _handle(self, request: web.Request) -> web.Response:
        body = bytes(await self.http.body(request)) if request.method == "PUT" else b""
        page = page_of(self._values, request.method, request.query, body)
        return web.Response(
            status=page.status, body=page.body, content_type="application/json", headers=page.headers
        )


class KVPoll(Enum):
    """The state of a server that runs beside the program."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """The same server inside of a program, on a thread of its own: run(), poll(), close()."""

    def __init__(self, port: int, host: str = "127.0.0.1", connections_max: int | None = None) -> None:
        self.port, self.host, self.connections_max = port, host, connections_max
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_to_stop: asyncio.Event | None = None
        self._state = KVPoll.Failed
        self._settled = threading.Event()

    def run(self) -> threading.Thread:
        """Returns when it serves or has failed; poll() tells which, and the log why."""
        if self.thread is None or not self.thread.is_alive():
            self._settled.clear()
            self._state = KVPoll.Bootstrapping
            self.thread = threading.Thread(
                target=lambda: asyncio.run(self._serve()), name="mooncake-metadata", daemon=True
            )
            self.thread.start()
            self._settled.wait(START_TIMEOUT_S)
        return self.thread

    def poll(self) -> KVPoll:
        """Success while it serves, else Failed; Bootstrapping in between."""
        return self._state

    def close(self) -> None:
        """Harmless the second time."""
        loop, stop, thread = self._loop, self._asked_to_stop, self.thread
        if loop is not None and stop is not None:
            with suppress(RuntimeError):  # it ended by itself
                loop.call_soon_threadsafe(stop.set)
        if thread is not None:
            thread.join(START_TIMEOUT_S)

    async def _serve(self) -> None:
        self._loop, self._asked_to_stop = asyncio.get_running_loop(), asyncio.Event()
        server = MetadataServer(self.host, self.port, self.connections_max)
        try:
            await server.start()
            self._state = KVPoll.Success
            self._settled.set()
            await self._asked_to_stop.wait()
        except ConfigError as error:
            logger.warning("%s", error)
        finally:
            self._state = KVPoll.Failed
            self._settled.set()
            await server.close()


def main() -> None:
    """Until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="mooncake_http_metadata_server", description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="whatever reaches it may write")
    parser.add_argument("--connections-max", type=int, default=None, help=CONNECTIONS_HELP)
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    parser.add_argument("--log-level", default="INFO", choices=levels)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=options.log_level)
    raise SystemExit(guarded(lambda: asyncio.run(serve(options.host, options.port, options.connections_max))))


async def serve(host: str, port: int, connections_max: int | None = None) -> None:
    """Serves until SIGTERM or SIGINT. connections_max: at a time; None: the default."""
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    server = MetadataServer(host, port, connections_max)
    await server.start()
    try:
        if host not in LOOPBACK:
            logger.warning("every process that reaches %s may write and delete there", server.url)
        print(f"metadata at {server.url}", flush=True)
        await asked_to_stop.wait()
    finally:
        await server.close()
