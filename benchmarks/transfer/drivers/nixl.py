"""NIXL with its UCX backend: over TCP, and over shared memory and cross-memory attach (CMA).

Every request is prepared before it is timed, NIXL's fastest form. Over TCP the target has a progress thread,
without which it would not answer; the initiator makes progress by asking, which is faster than with a thread
of its own. Over shared memory neither has one: CMA writes from the caller's thread, and only the first
contact needs the target to poll.
"""

from __future__ import annotations

import base64
import importlib
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.transfer.drivers import Call, Caller, PythonCaller
from benchmarks.transfer.memory import Region

CONTACT_TIMEOUT_S = 30.0


def agent(name: str, region: Region, transport: str) -> Any:
    tcp = transport == "tcp"
    os.environ.update({"UCX_TLS": "tcp,self" if tcp else "posix,cma,self", "NIXL_LOG_LEVEL": "ERROR"})
    if tcp:
        os.environ["UCX_NET_DEVICES"] = "lo"
    api = importlib.import_module("nixl._api")
    made = api.nixl_agent(
        name, api.nixl_agent_config(enable_prog_thread=tcp and name == "target", backends=[])
    )
    # UCX's shared memory cannot tell that a peer is gone, and refuses to run unless that is not asked for.
    made.create_backend("UCX", {} if tcp else {"ucx_error_handling_mode": "none"})
    made.register_memory([(region.address, region.size, 0, name)], "DRAM")
    return made


class Target:
    def __init__(self, size: int, transport: str) -> None:
        self.region = Region(size)
        self._agent = agent("target", self.region, transport)
        self.about = {"agent": base64.b64encode(self._agent.get_agent_metadata()).decode()}
        if transport == "shm":
            threading.Thread(target=self._until_contact, daemon=True).start()

    def _until_contact(self) -> None:
        deadline_s = time.monotonic() + CONTACT_TIMEOUT_S
        while time.monotonic() < deadline_s and not self._agent.get_new_notifs():
            pass


class Initiator:
    op, limit = "write", ""

    def __init__(self, size: int, remote: int, about: dict[str, Any], transport: str) -> None:
        self.region, self._remote = Region(size), remote
        self._agent = agent("initiator", self.region, transport)
        self._peer = self._agent.add_remote_agent(base64.b64decode(about["agent"]))
        self._agent.make_connection(self._peer)
        self._move(self._request([0], 64, b"contact"))

    def caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        made: list[Call] = [partial(self._move, self._request(offsets, block)) for offsets in calls]
        return PythonCaller(made, expected="DONE")

    def limit_caller(self, thread: int, calls: Sequence[Sequence[int]], block: int) -> Caller:
        raise NotImplementedError

    def _request(self, offsets: Sequence[int], block: int, message: bytes = b"") -> Any:
        here, there = (
            self._agent.get_xfer_descs([(base + offset, block, 0) for offset in offsets], "DRAM")
            for base in (self.region.address, self._remote)
        )
        return self._agent.initialize_xfer("WRITE", here, there, self._peer, message)

    def _move(self, request: Any) -> str:
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        return str(state)
