"""Puts and reads objects of 1 MiB, all new, on 10 threads as fast as it can until SIGTERM: of a tenant of a
node; or, with ``nowhere`` for the socket, as copies in its own memory, which take as much of the machine and
nothing of the node.

python -m benchmarks.hostile.tenant_flood SOCKET TENANT
"""

from __future__ import annotations

import itertools
import os
import sys
import threading

from moonpool import Store

THREADS = 10
OBJECT_BYTES = 1 << 20
NOWHERE = "nowhere"


def flood(socket: str, tenant: str, thread: int) -> None:
    content = os.urandom(OBJECT_BYTES)
    with Store(socket, tenant=tenant, token=os.environb[b"MOONPOOL_CLUSTER_TOKEN"]) as store:
        for number in itertools.count():
            store.put(f"{thread}-{number}", content)
            store.get(f"{thread}-{max(number - 4, 0)}", bytearray(OBJECT_BYTES))


def copy() -> None:
    content, target = os.urandom(OBJECT_BYTES), bytearray(OBJECT_BYTES)
    while True:
        target[:] = content


def main() -> int:
    socket, tenant = sys.argv[1:]
    for thread in range(THREADS):
        work = (lambda: copy()) if socket == NOWHERE else (lambda n=thread: flood(socket, tenant, n))
        threading.Thread(target=work, daemon=True).start()
    print("floods", flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
