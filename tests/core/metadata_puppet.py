"""An engine that is published under a name: ``metadata_puppet.py peer TOKEN URL LEASE_S VALUE OPTIONS``. It
says on stdout what it did, one JSON value a line, and ends when its stdin does."""

from __future__ import annotations

import json
import sys
from typing import Any

from moonpool import TransferEngine
from moonpool.core.transfer.metadata.connection_string import metadata_of


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


def peer(token: str, url: str, lease_s: str, value: str, options: str) -> None:
    store = metadata_of(url, token.encode())
    assert store is not None
    store.lease_s = float(lease_s)
    engine = TransferEngine(token=token.encode(), metadata=store, **json.loads(options))
    region = engine.allocate(4096)
    region.view[0] = int(value)
    say({"address": engine.addresses[0], "id": engine.segment_id.hex()})
    for line in sys.stdin:
        what = json.loads(line)
        if what == "problem":
            say(engine.publication_problem)
        elif what == "close":
            engine.close()
            say("closed")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
