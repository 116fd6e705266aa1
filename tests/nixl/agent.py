"""One NIXL agent over the plugin, under a Python that has NIXL: ``agent.py NAME``. Reads commands as JSON
lists from stdin, answers each with one line; test_plugin.py drives two."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 4 << 20


class Agent:
    def __init__(self, name: str) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        plugins = self.agent.get_plugin_list()
        assert "MOONPOOL" in plugins, plugins
        self.agent.create_backend("MOONPOOL", {})
        self.memory = np.zeros(SIZE, np.uint8)
        self.base = int(self.memory.ctypes.data)
        self.handles: dict[str, Any] = {}

    def fill(self, seed: int) -> None:
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)

    def is_filled(self, seed: int, first: int, last: int) -> bool:
        expected = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
        return bool((self.memory[first:last] == expected[first:last]).all())

    def register(self) -> int:
        self.registered = self.agent.register_memory([(self.base, SIZE, 0, "")], "DRAM")
        return self.base

    def deregister(self) -> None:
        self.agent.deregister_memory(self.registered)

    def metadata(self) -> str:
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def add(self, metadata: str) -> str:
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        self.agent.remove_remote_agent(peer)

    def prepare(self, op: str, peer: str, remote: int, pieces: int, notif: str) -> None:
        """All of the memory in so many pieces."""
        each = SIZE // pieces
        here = [(self.base + at * each, each, 0) for at in range(pieces)]
        there = [(remote + at * each, each, 0) for at in range(pieces)]
        self.handles[op] = self.agent.initialize_xfer(
            op,
            self.agent.get_xfer_descs(here, "DRAM"),
            self.agent.get_xfer_descs(there, "DRAM"),
            peer,
            notif.encode(),
            backends=["MOONPOOL"],
        )

    def run(self, op: str) -> str:
        """Posts the prepared transfer and waits for its end."""
        try:
            state = self.agent.transfer(self.handles[op])
            while state == "PROC":
                state = self.agent.check_xfer_state(self.handles[op])
            return str(state)
        except Exception as error:  # of NIXL: how it tells some failures
            return type(error).__name__

    def release(self, op: str) -> None:
        self.agent.release_xfer_handle(self.handles.pop(op))

    def send(self, peer: str, text: str) -> None:
        self.agent.send_notif(peer, text.encode())

    def messages(self) -> dict[str, list[str]]:
        """Waits for some."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            found = self.agent.get_new_notifs()
            if found:
                return {name: [one.decode() for one in texts] for name, texts in found.items()}
        return {}

    def create_wrong(self) -> str:
        """A backend that cannot listen, in an agent of its own."""
        other = nixl_agent("wrong", nixl_agent_config(enable_prog_thread=False, backends=[]))
        try:
            other.create_backend("MOONPOOL", {"listen": "no address"})
        except Exception as error:  # of NIXL
            return type(error).__name__
        return "taken"

    def register_wrong(self) -> str:
        try:
            self.agent.register_memory([(0x7000_0000_0000, 4096, 0, "")], "DRAM", backends=["MOONPOOL"])
        except Exception as error:  # of NIXL
            return type(error).__name__
        return "taken"


ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # NIXL writes its log there

agent = Agent(sys.argv[1])
print(json.dumps("ready"), file=ANSWERS, flush=True)
for line in sys.stdin:
    verb, *arguments = json.loads(line)
    print(json.dumps(getattr(agent, verb)(*arguments)), file=ANSWERS, flush=True)
