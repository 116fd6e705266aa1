"""`mc_store_rest_server`: a store with a segment, and put, get, exist and remove over HTTP on 127.0.0.1.

Connections, heads and bodies are bounded (_http). A value is sent out of the pool's memory, which is pinned
for as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
from typing import Any

from aiohttp import web

from moonpool.core.errors import Error, Unavailable
from moonpool.core.service.exit_codes import guarded

from ._codes import Code, code_of
from ._http import CONNECTIONS_HELP, BoundedHttp, HttpLimits
from .mooncake_config import MooncakeConfig
from .store import MooncakeDistributedStore

TRY_AGAIN_S = 0.5
BODY_BYTES_MAX = 64 << 20


class MooncakeStoreService:
    """A store behind a REST interface.

    config_path: a JSON file; None: the environment.
    cli_config: values that override those of the file.
    """

    def __init__(self, config_path: str | None = None, cli_config: dict[str, Any] | None = None) -> None:
        given = dict(cli_config or {})
        complete = {"local_hostname", "metadata_server", "master_server_address"} <= given.keys()
        if config_path is None and complete:
            self.config = given
        else:
            config = (
                MooncakeConfig.load_from_env()
                if config_path is None
                else MooncakeConfig.from_file(config_path)
            )
            self.config = vars(config) | given
        self.store = MooncakeDistributedStore()
        self.http: BoundedHttp | None = None
        self.url = ""

    async def start_store_service(
        self, max_wait_time: float = 60, shutdown_event: asyncio.Event | None = None
    ) -> bool:
        """Whether the store is set up, tried again until ``max_wait_time`` seconds are over."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + max_wait_time
        while True:
            code = await asyncio.to_thread(self.store.setup, self.config)
            final = (Code.OK, Code.INVALID_PARAMS, Code.ILLEGAL_CLIENT)  # no later try makes it another
            if code in final or loop.time() >= give_up_s:
                return code == Code.OK
            if shutdown_event is not None and shutdown_event.is_set():
                return False
            await asyncio.sleep(TRY_AGAIN_S)

    async def start_http_service(self, port: int = 8080, connections_max: int | None = None) -> bool:
        """Listens on 127.0.0.1 only, since any client may write. Returns whether it could.

        port: where it listens.
        connections_max: open connections, at most half of the files that the process may open; None: 1,024.
        """
        app = web.Application()
        app.add_routes(
            [
                web.put("/api/put", self.handle_put),
                web.get("/api/get/{key}", self.handle_get),
                web.get("/api/exist/{key}", self.handle_exist),
                web.delete("/api/remove/{key}", self.handle_remove),
                web.delete("/api/remove_all", self.handle_remove_all),
            ]
        )
        self.http = BoundedHttp(app, HttpLimits(BODY_BYTES_MAX, connections_max))
        _, port = await self.http.start("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        return True

    async def stop(self) -> None:
        """Stops listening, then closes the store."""
        if self.http is not None:
            await self.http.close()
        await asyncio.to_thread(self.store.close)

    def _served(self) -> BoundedHttp:
        if self.http is None:
            raise RuntimeError("a request before start_http_service()")
        return self.http

    async def handle_put(self, request: web.Request) -> web.Response:
        """{"key": ..., "value": text}"""
        try:
            body = json.loads(await self._served().body(request))
            key, value = str(body["key"]), str(body["value"]).encode()
        except (ValueError, KeyError, TypeError, RecursionError):
            return web.json_response({"error": "put takes a JSON object with key and value"}, status=400)
        return _answer(await asyncio.to_thread(self.store.put, key, value))

    async def handle_get(self, request: web.Request) -> web.StreamResponse:
        """The bytes; 404 for a miss, 503 when the pool does not answer."""
        try:
            value = await asyncio.to_thread(self.store.get_buffer, request.match_info["key"])
        except Error as error:
            return web.json_response({"error": str(error), "code": int(code_of(error, "get"))}, status=503)
        if value is None:
            return web.json_response({"error": "not found"}, status=404)
        return await self._served().send(request, value, "application/octet-stream")

    async def handle_exist(self, request: web.Request) -> web.Response:
        """GET: {"exists": bool}; 503 when the pool does not answer."""
        found = await asyncio.to_thread(self.store.is_exist, request.match_info["key"])
        if found < 0:
            return web.json_response({"error": "not known"}, status=503)
        return web.json_response({"exists": bool(found)})

    async def handle_remove(self, request: web.Request) -> web.Response:
        """DELETE of one key."""
        return _answer(await asyncio.to_thread(self.store.remove, request.match_info["key"]))

    async def handle_remove_all(self, _request: web.Request) -> web.Response:
        """DELETE of all keys."""
        return _answer(await asyncio.to_thread(self.store.remove_all))


def _answer(code: int) -> web.Response:
    if code >= 0:
        return web.json_response({"status": "success", "result": code})
    status = {Code.OBJECT_NOT_FOUND: 404, Code.INVALID_PARAMS: 400, Code.NO_AVAILABLE_HANDLE: 507}.get(
        Code(code), 503
    )
    return web.json_response({"error": Code(code).name, "code": code}, status=status)


def parse_arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="mc_store_rest_server", description=__doc__)
    parser.add_argument("--config", help="JSON file of the settings; else the environment")
    parser.add_argument(
        "-D", "--define", action="append", default=[], metavar="KEY=VALUE", help="one setting"
    )
    parser.add_argument("--port", type=int, default=8080, help="of the pages; 0: a free one")
    parser.add_argument("--connections-max", type=int, default=None, help=CONNECTIONS_HELP)
    parser.add_argument("--max-wait-time", type=float, default=60, help="seconds to wait for the master")
    return parser.parse_args()


async def main() -> None:
    """Serves until SIGTERM or SIGINT. Exits with the reason when the settings are wrong."""
    options = parse_arguments()
    defined = dict(word.partition("=")[::2] for word in options.define)
    try:
        service = MooncakeStoreService(options.config, defined)
    except (OSError, ValueError) as error:
        raise SystemExit(f"mc_store_rest_server: {error}") from error
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    if not await service.start_store_service(options.max_wait_time, asked_to_stop):
        if asked_to_stop.is_set():
            return
        raise Unavailable("the store was not set up; the sentence before says why", operation="setup")
    try:
        await service.start_http_service(options.port, options.connections_max)
        print(f"store at {service.store.get_hostname()}, {service.url}/api", flush=True)
        await asked_to_stop.wait()
    finally:
        await service.stop()


def sync_main() -> None:
    """The console command."""
    logging.basicConfig(format="%(message)s")
    raise SystemExit(guarded(lambda: asyncio.run(main())))
