"""`transfer_engine_bench`: `moonpool bench transfer` with the flags that scripts know."""

from __future__ import annotations

import logging
import os
import sys

from moonpool.core.errors import ConfigError

from ._flags import parse
from ._hosts import address_of

FLAGS = {
    "mode": "target: offers its memory until SIGTERM; initiator: measures; initiator",
    "local_server_name": "host:port where a target is reached; 127.0.0.1:7720",
    "segment_id": "host:port of the target to measure; without it: two processes of this host",
    "operation": "read or write; read",
    "block_size": "bytes of a slice; 65536",
    "batch_size": "slices of one operation; 128",
    "threads": "that work at the same time; 12",
    "duration": "seconds; 10",
    "buffer_size": "bytes of memory on each side; 1 GiB",
    "protocol": "tcp: nothing but TCP; others: what moonpool chooses",
    "metadata_server": "not needed: engines find each other by address",
}
DEFAULT_PORT = 7720


def main() -> None:
    """Replaces this process by moonpool's benchmark of transfers, with the flags translated."""
    logging.basicConfig(format="%(message)s")
    try:
        words = command(parse(sys.argv[1:], FLAGS, "transfer_engine_bench"))
    except ConfigError as error:
        raise SystemExit(f"transfer_engine_bench: {error}") from error
    os.execv(sys.executable, [sys.executable, "-m", "moonpool", *words])


def command(flags: dict[str, str]) -> list[str]:
    """The arguments of `moonpool`. Raises ConfigError."""
    memory = flags.get("buffer_size") or str(1 << 30)
    mode = flags.get("mode") or "initiator"
    if mode == "target":
        here = address_of(flags.get("local_server_name") or "127.0.0.1", "local_server_name", DEFAULT_PORT)
        return ["bench", "transfer", "--serve", "--listen", str(here), "--memory", memory]
    if mode != "initiator":
        raise ConfigError(f"mode = {mode} is neither target nor initiator", key="mode")
    given = {
        "--size": flags.get("block_size") or "65536",
        "--batch": flags.get("batch_size") or "128",
        "--threads": flags.get("threads") or "12",
        "--seconds": flags.get("duration") or "10",
        "--direction": flags.get("operation") or "read",
        "--working-set": memory,
    }
    if there := flags.get("segment_id"):
        given["--connect"] = str(address_of(there, "segment_id", DEFAULT_PORT))
    if flags.get("protocol") == "tcp":
        given["--transport"] = "tcp"
    return ["bench", "transfer", *(word for pair in given.items() for word in pair)]
