"""The drop-in's engine, driven as Mooncake's is. It chooses the way itself: foreign memory of this host."""

from __future__ import annotations

from typing import Any

from benchmarks import drop_in
from benchmarks.transfer.drivers import mooncake


class Target(mooncake.Target):
    def __init__(self, size: int) -> None:
        drop_in.use()
        super().__init__(size)


class Initiator(mooncake.Initiator):
    op = "read"  # as ours of foreign memory

    def __init__(self, size: int, remote: int, about: dict[str, Any]) -> None:
        drop_in.use()
        super().__init__(size, remote, about)
