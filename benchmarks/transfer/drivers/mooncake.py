"""mooncake.engine over TCP: registered memory, peer to peer handshake."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.processes import free_port
from benchmarks.transfer.drivers import Call, Caller, PythonCaller
from benchmarks.transfer.memory import Region


def engine(region: Region) -> Any:
    os.environ["MC_FORCE_TCP"] = "true"
    made = importlib.import_module("mooncake.engine").TransferEngine()
    if code := made.initialize(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"initialize failed with {code}")
    if code := made.register_memory(region.address, region.size):
        raise RuntimeError(f"register_memory failed with {code}")
    return made


class Target:
    def __init__(self, size: int) -> None:
        self.region = Region(size)
        self._engine = engine(self.region)
        self.about = {"session": f"127.0.0.1:{self._engine.get_rpc_port()}"}


class Initiator:
    op, limit = "write", ""

    def __init__(self, size: int, remote: int, about: dict[str, Any]) -> None:
        self.region, self._remote, self._session = Region(size), remote, about["session"]
        self._engine = engine(self.region)

    def caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        one = getattr(self._engine, f"transfer_sync_{self.op}")
        many = getattr(self._engine, f"batch_transfer_sync_{self.op}")
        made: list[Call] = []
        for offsets in calls:
            here = [self.region.address + offset for offset in offsets]
            there = [self._remote + offset for offset in offsets]
            if len(offsets) == 1:
                made.append(partial(one, self._session, here[0], there[0], block))
            else:
                made.append(partial(many, self._session, here, there, [block] * len(offsets)))
        return PythonCaller(made, expected=0)

    def limit_caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        raise NotImplementedError
