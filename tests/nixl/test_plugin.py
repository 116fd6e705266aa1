"""NIXL's own agents over the backend plugin, in two processes: memory, transfers, messages, failures. Needs a
Python with NIXL 1.5 (docs/nixl.md)."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.capi import root

HERE = Path(__file__).parent
PYTHON = os.environ.get("MOONPOOL_NIXL_PYTHON")
SIZE = 4 << 20
DISCONNECTED = "nixlRemoteDisconnectError"

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs a Python with NIXL: MOONPOOL_NIXL_PYTHON")


class Agent:
    def __init__(self, name: str, token: str) -> None:
        environment = {**os.environ, "NIXL_PLUGIN_DIR": str(root() / "nixl"), "MOONPOOL_CLUSTER_TOKEN": token}
        environment.pop("MOONPOOL_CLUSTER_TOKEN_FILE", None)
        assert PYTHON is not None
        self.name = name
        self.process = subprocess.Popen(
            [PYTHON, str(HERE / "agent.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._hear() == "ready"

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps([verb, *arguments]) + "\n")
            self.process.stdin.flush()
            return self._hear()

        return call

    def _hear(self, timeout_s: float = 60.0) -> Any:
        assert self.process.stdout is not None
        poll = select.poll()  # unlike select(), for any number of open files
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(timeout_s * 1000), "it says nothing"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def start(name: str, token: str = "of these agents") -> Agent:
        made.append(Agent(name, token))
        return made[-1]

    yield start
    for agent in made:
        agent.kill()


def acquaint(one: Agent, other: Agent) -> tuple[int, int]:
    """Both register their memory and know each other; where it lies."""
    places = one.register(), other.register()
    assert one.add(other.metadata()) == other.name
    assert other.add(one.metadata()) == one.name
    return places


def test_bytes_and_messages(start: Callable[..., Agent]) -> None:
    one, other = start("one"), start("other")
    _, remote = acquaint(one, other)
    one.fill(1)
    one.prepare("WRITE", "other", remote, 128, "written")
    assert one.run("WRITE") == "DONE"
    assert other.messages() == {"one": ["written"]}
    assert other.is_filled(1, 0, SIZE)
    other.fill(2)
    one.prepare("READ", "other", remote, 1, "")
    assert one.run("READ") == "DONE"
    assert one.is_filled(2, 0, SIZE)
    one.fill(3)
    assert one.run("WRITE") == "DONE"  # the same transfer, posted again
    assert other.messages() == {"one": ["written"]}
    assert other.is_filled(3, 0, SIZE)
    one.release("WRITE")
    one.release("READ")
    other.send("one", "by itself")
    assert one.messages() == {"other": ["by itself"]}
    one.remove("other")
    one.deregister()


def test_within_one_agent(start: Callable[..., Agent]) -> None:
    one = start("one")
    here = one.register()
    one.fill(4)
    one.prepare("WRITE", "one", here, 2, "")  # onto itself: the same bytes
    assert one.run("WRITE") == "DONE"
    assert one.is_filled(4, 0, SIZE)


def test_a_peer_that_dies(start: Callable[..., Agent]) -> None:
    one, other = start("one"), start("other")
    _, remote = acquaint(one, other)
    one.fill(5)
    one.prepare("WRITE", "other", remote, 4, "")
    assert one.run("WRITE") == "DONE"
    other.kill()
    assert one.run("WRITE") == DISCONNECTED
    one.release("WRITE")
    one.remove("other")
    again = start("other")  # another process of that name
    remote = again.register()
    one.add(again.metadata())
    one.prepare("WRITE", "other", remote, 4, "")
    assert one.run("WRITE") == "DONE"
    assert again.is_filled(5, 0, SIZE)


def test_memory_that_is_none_and_is_gone(start: Callable[..., Agent]) -> None:
    one, other = start("one"), start("other")
    _, remote = acquaint(one, other)
    assert one.register_wrong() == "nixlBackendError"
    assert one.create_wrong() == "nixlBackendError"
    one.prepare("READ", "other", remote, 4, "")
    other.deregister()
    assert one.run("READ") == DISCONNECTED


def test_another_token(start: Callable[..., Agent]) -> None:
    one, stranger = start("one"), start("stranger", token="another")
    one.register()
    remote = stranger.register()
    one.add(stranger.metadata())
    one.prepare("READ", "stranger", remote, 4, "")
    assert one.run("READ") == DISCONNECTED
