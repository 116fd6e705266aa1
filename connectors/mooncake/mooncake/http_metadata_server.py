"""`mooncake_http_metadata_server`: small values by key over HTTP, where programs look each other up.

    GET, PUT, DELETE /metadata?key=KEY      the body is the value

Moonpool's engines need no such server: they find each other by address. Who reaches it may write, so it
listens on 127.0.0.1 unless another address is named.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

from aiohttp import web

from moonpool.core.cli.entry import guarded
from moonpool.core.errors import ConfigError

from ._codes import logger

VALUE_BYTES_MAX = 1 << 20
TOTAL_BYTES_MAX = 256 << 20
ENTRY_BYTES = 256  # of a value in memory, beside its key and its bytes
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class MetadataServer:
    """Values in memory, gone with it. start() before anything else; ``url`` is known after it."""

    def __init__(self, host: str = "127.0.0.1", port: int = 8080) -> None:
        self._host, self._port = host, port
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        app = web.Application(client_max_size=VALUE_BYTES_MAX)
        app.router.add_route("*", "/metadata", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        self.url = ""

    async def start(self) -> None:
        """Raises ConfigError when somebody else listens there."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except (OSError, OverflowError) as error:  # the latter for a port that is none
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen at {self._host}:{self._port}: {error}; give another --port",
                operation="metadata",
                key="port",
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/metadata"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.query.get("key", "")
        if request.method not in ("GET", "PUT", "DELETE"):
            return said("Method not allowed", 405)
        if not key:
            return said("metadata key is required", 400)
        if request.method == "PUT":
            return self._put(key, await request.read())
        value = self._values.get(key)
        if value is None:
            return said("metadata not found", 404)
        if request.method == "GET":
            return web.Response(body=value, content_type="application/json")
        self._drop(key)
        return said("metadata deleted")

    def _put(self, key: str, value: bytes) -> web.Response:
        size = size_of(key, value)
        old = self._values.get(key)
        if self._bytes - (0 if old is None else size_of(key, old)) + size > TOTAL_BYTES_MAX:
            return said("no room for more metadata", 507)  # and the old value stays
        self._drop(key)
        self._values[key] = value
        self._bytes += size
        return said("metadata updated")

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= size_of(key, value)


def size_of(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value) + ENTRY_BYTES


def said(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="application/json")


def main() -> None:
    """Until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="mooncake_http_metadata_server", description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="who reaches it may write")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    parser.add_argument("--log-level", default="INFO", choices=levels)
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=options.log_level)
    raise SystemExit(guarded(lambda: asyncio.run(serve(options.host, options.port))))


async def serve(host: str, port: int) -> None:
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    server = MetadataServer(host, port)
    await server.start()
    try:
        if host not in LOOPBACK:
            logger.warning("everybody who reaches %s may write and delete there", server.url)
        print(f"metadata at {server.url}", flush=True)
        await asked_to_stop.wait()
    finally:
        await server.close()
