"""A node in a process of its own, so that it can be killed: ``node_process.py SOCKET BYTES``. Says "ready" on
stdout, then answers each line on stdin with its metrics as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.config.native_settings import node_settings


def main() -> None:
    Path(sys.argv[1]).unlink(missing_ok=True)  # left by one that was killed
    tenants = [("default", int(sys.argv[2]))]
    # No scrub: a test changes a stored byte and wants it served.
    token = paths.read_or_create_token()
    # Tests fill it with what is pinned.
    server = _native.Server(
        sys.argv[1], tenants, token, node_settings(scrub_bytes_per_s=0, pins_share_max=1.0)
    )
    server.start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(server.metrics() | {"integrity": server.check_integrity()}), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
