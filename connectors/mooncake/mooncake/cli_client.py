"""`mooncake_client`: a node of a Moonpool, which dummy clients of its host join, as any other client may."""

from __future__ import annotations

import logging
import sys

from moonpool.core.config.config import load
from moonpool.core.service.exit_codes import guarded
from moonpool.core.service.listen_addresses import master_text
from moonpool.core.service.node import Node
from moonpool.core.service.node import run as run_node

from ._access import Settings, name_of_client, size_of
from ._flags import parse
from ._hosts import joined

FLAGS = {
    "host": "the address that others use; 127.0.0.1, or 0.0.0.0 where a cluster token was chosen",
    "port": "of that, by which setup_dummy() finds this node; 50052",
    "global_segment_size": "bytes of its memory, such as 4GB; 4 GB",
    "master_server_address": "host:port; 127.0.0.1:50051",
    "http": "host:port of /metrics and /health; off",
}
DEFAULT_HOSTS = ("", "0.0.0.0")


def main() -> None:
    """Until SIGTERM or SIGINT."""
    logging.basicConfig(format="%(message)s")
    raise SystemExit(guarded(lambda: run(parse(sys.argv[1:], FLAGS, "mooncake_client"))))


def run(flags: dict[str, str]) -> None:
    """Serves the memory that the flags describe until SIGTERM or SIGINT. Raises ConfigError for a flag that
    is wrong."""
    host, port = flags.get("host", ""), int(flags.get("port") or 50052)
    if host in DEFAULT_HOSTS:
        host = "0.0.0.0" if load().token_is_configured else "127.0.0.1"
    size = size_of(flags.get("global_segment_size", "4 GB"), "global_segment_size")
    listen = joined(host, port)
    settings = Settings(listen, flags.get("master_server_address") or "127.0.0.1:50051", size)
    config = settings.config(
        node__name=name_of_client(port),
        node__listen=listen,
        node__dram=size,
        node__http=flags.get("http") or "off",
        node__object_share_max=0.5,
    )

    def on_ready(node: Node) -> None:
        print(
            f"moonpool node {config.node.name} at {node.advertise}, master {master_text(config)}",
            flush=True,
        )

    run_node(config, on_ready=on_ready)
