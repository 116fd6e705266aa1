"""`transfer_engine_topology_dump`: the transports of this host, from TransferEngine.get_local_topology()."""

from __future__ import annotations

import json
import logging

from ._metadata import P2P
from .engine import TransferEngine


def main() -> None:
    """Prints the transports that work on this host, as JSON. Exits with 1 when the engine cannot start."""
    logging.basicConfig(format="%(message)s")
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", P2P, "tcp", ""):
        raise SystemExit(1)
    print(f"Local topology: {json.dumps(json.loads(engine.get_local_topology()), indent=4)}")
