"""`transfer_engine_topology_dump`: which NICs are near which memory, by get_local_topology()."""

from __future__ import annotations

import json

from .engine import TransferEngine


def main() -> None:
    """Prints the matrix of this machine as JSON. It starts no engine."""
    print(f"Local topology: {json.dumps(json.loads(TransferEngine().get_local_topology()), indent=4)}")
