"""Our engine: its own memory and foreign memory of the same host, and TCP.

The limits run in the same process over the same memory: memcpy into the very pages that the target allocated,
and process_vm_readv of the very ranges.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.transfer.drivers import Call, Caller, PythonCaller
from benchmarks.transfer.memory import Region, address_of, mapped, process_vm_readv

TOKEN = b"of this benchmark only"


def engine(name: str, transport: str) -> Any:
    return importlib.import_module("moonpool").TransferEngine(name, token=TOKEN, transports=[transport])


def memory(made: Any, size: int, own: bool) -> Region:
    if own:
        allocated = made.allocate(size)
        return Region(size, allocated, allocated.address)
    region = Region(size)
    made.register((region.address, size))
    return region


class Target:
    def __init__(
        self, size: int, transport: str, own: bool, reads: bool = False, submits: bool = False
    ) -> None:
        self._engine = engine("target", transport)
        self.region = memory(self._engine, size, own)
        self.about = {"address": self._engine.addresses[0], "pid": os.getpid()}


class Initiator:
    def __init__(
        self,
        size: int,
        remote: int,
        about: dict[str, Any],
        transport: str,
        own: bool,
        reads: bool = False,
        submits: bool = False,
    ) -> None:
        self._engine, self._submits = engine("initiator", transport), submits
        self.region, self._remote, self._pid = memory(self._engine, size, own), remote, about["pid"]
        self._segment = self._engine.open(about["address"])
        foreign = transport == "shm" and not own
        self.op = "read" if foreign or reads else "write"
        self.limit = "process_vm_readv" if foreign else "memcpy" if own else ""
        self._shared = mapped(self._pid, remote, size) if own else None
        if own and self._shared is None:
            raise RuntimeError("the memory that the target allocated is not shared memory")

    def caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        batch = importlib.import_module("moonpool").Batch
        one = self._engine.read if self.op == "read" else self._engine.write
        made: list[Call] = []
        for offsets in calls:
            here = array("Q", [self.region.address + offset for offset in offsets])
            there = array("Q", [self._remote + offset for offset in offsets])
            if len(offsets) == 1 and not self._submits:
                made.append(partial(one, self._segment, here[0], there[0], block))
            else:
                many = batch(segment=self._segment, op=self.op, local=here, remote=there, lengths=block)
                made.append(partial(self._submitted if self._submits else self._engine.transfer, many))
        return PythonCaller(made, expected=block * len(calls[0]))

    def _submitted(self, batch: Any) -> int:
        moved: int = self._engine.submit(batch).result()
        return moved

    def limit_caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        return self._copies(calls, block) if self.limit == "memcpy" else self._raw_reads(calls, block)

    def _copies(self, calls: Sequence[Sequence[int]], block: int) -> Caller:
        here, there, copy = self.region.address, address_of(self._shared), ctypes.memmove

        def many(pairs: list[tuple[int, int]]) -> None:
            for to, source in pairs:
                copy(to, source, block)

        made: list[Call] = []
        for offsets in calls:
            pairs = [(there + offset, here + offset) for offset in offsets]
            made.append(partial(copy, *pairs[0], block) if len(pairs) == 1 else partial(many, pairs))
        return PythonCaller(made, expected=None)

    def _raw_reads(self, calls: Sequence[Sequence[int]], block: int) -> Caller:
        made: list[Call] = []
        for offsets in calls:
            here, there = (iovecs(base, offsets, block) for base in (self.region.address, self._remote))
            count = len(offsets)
            made.append(partial(process_vm_readv, self._pid, here, count, there, count, 0))
        return PythonCaller(made, expected=block * len(calls[0]))


def iovecs(base: int, offsets: Sequence[int], block: int) -> Any:
    words = [word for offset in offsets for word in (base + offset, block)]
    return (ctypes.c_uint64 * len(words))(*words)
