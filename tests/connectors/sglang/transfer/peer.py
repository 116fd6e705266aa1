"""An engine in a process of its own, for tests: ``python -m tests.connectors.sglang.transfer.peer BYTES``.

Says ``{"session": ..., "address": ...}`` of its registered zeros, then answers each line of its input:
``digest`` with the SHA-256 of the memory, ``deregister`` with ``done``. It ends with its input, and closes
nothing before.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys

from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine


def main() -> None:
    memory = bytearray(int(sys.argv[1]))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = MoonpoolTransferEngine("127.0.0.1")
    assert engine.batch_register([address], [len(memory)]) == 0
    print(json.dumps({"session": engine.get_session_id(), "address": address}), flush=True)
    for line in sys.stdin:
        if line.strip() == "deregister":
            engine.deregister(address)
            print("done", flush=True)
        else:
            print(hashlib.sha256(memory).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
