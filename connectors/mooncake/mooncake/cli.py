"""`mooncake_master`: `moonpool master` with the flags and the pages that scripts know."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from moonpool.core.config.config import Config
from moonpool.core.service.addresses import Address, parse_address
from moonpool.core.service.exit_codes import guarded
from moonpool.core.service.listen_addresses import require_token
from moonpool.core.service.master import Master
from moonpool.core.service.processes import allow_many_descriptors

from ._access import is_on
from ._flags import parse
from ._hosts import joined
from ._pages import MasterPages, config_of
from .http_metadata_server import MetadataServer

FLAGS = {
    "rpc_port": "where nodes and clients connect; 50051",
    "port": "the same, an older name",
    "rpc_address": "the address of that; 127.0.0.1, or 0.0.0.0 where a cluster token was chosen",
    "metrics_port": "of the pages; 9003",
    "metrics_host": "the address of those; as rpc_address",
    "enable_http_metadata_server": "also a server of metadata, for programs that look each other up there",
    "http_metadata_server_port": "of that; 8080",
    "http_metadata_server_host": "the address of that; 127.0.0.1, whatever the others are: it has no tokens",
    "client_ttl": "seconds after which a silent node is forgotten; 30",
}
LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"


def main() -> None:
    """Until SIGTERM or SIGINT."""
    logging.basicConfig(format="%(message)s")
    raise SystemExit(guarded(lambda: run(parse(sys.argv[1:], FLAGS, "mooncake_master"))))


def run(flags: dict[str, str]) -> None:
    """Starts the master that the flags describe and serves until SIGTERM or SIGINT. Raises ConfigError for a
    flag that is wrong."""
    from moonpool.core.config.config import load

    allow_many_descriptors()
    host = flags.get("rpc_address") or (ANY if load().token_is_configured else LOOPBACK)
    port = flags.get("rpc_port") or flags.get("port") or "50051"
    ttl = float(flags["client_ttl"]) if "client_ttl" in flags else None
    config = config_of(joined(host, port), master__gone_after_s=ttl)
    pages = parse_address(
        joined(flags.get("metrics_host") or host, flags.get("metrics_port") or "9003"), "metrics_port"
    )
    require_token(config, pages, "metrics_host")
    metadata = None
    if is_on(flags.get("enable_http_metadata_server", "")):
        metadata = parse_address(
            joined(
                flags.get("http_metadata_server_host") or LOOPBACK,
                flags.get("http_metadata_server_port") or "8080",
            ),
            "http_metadata_server_port",
        )
    asyncio.run(serve(config, pages, metadata))


async def serve(config: Config, address: Address, metadata: Address | None = None) -> None:
    """Runs the master and its HTTP pages until SIGTERM or SIGINT.

    address: of the pages.
    metadata: where the metadata server listens, or None.
    """
    asked_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_stop.set)
    master = Master(config)
    await master.start()
    try:
        pages = MasterPages(master, address)
        await pages.start()
        server = None if metadata is None else MetadataServer(*metadata)
        try:
            if server is not None:
                await server.start()
            more = f", metadata at {server.url}" if server is not None else ""
            print(f"moonpool master at {', '.join(master.addresses)}, {pages.url}/metrics{more}", flush=True)
            await asked_to_stop.wait()
        finally:
            if server is not None:
                await server.close()
            await pages.close()
    finally:
        await master.stop()
