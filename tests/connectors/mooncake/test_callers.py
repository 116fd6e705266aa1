"""The other projects that import `mooncake`: their calls, played from two processes over the drop-in, and
their own code where it runs on a CPU (docs/callers.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.mooncake.commands import Command
from tests.core.master_bed import MasterProcess
from tests.descriptors import speaks

HERE = Path(__file__).parent
# What the two say to each other after the giver's first word: who speaks, in order.
PLAYED = {
    "checkpoint_engine": "gt",
    "lmdeploy": "gt",
    "lmdeploy_store": "gt",
    "vllm_omni": "gt tg gt",
    "flexkv": "gt tg gt",
    "flexkv_store": "gt",
    "lightx2v": "gt tg gt",
    "torchspec": "gt",
}
PYTHONS = {
    name: os.environ.get(f"MOONPOOL_{name}_PYTHON") for name in ("CHECKPOINT_ENGINE", "LMDEPLOY", "VLLM_OMNI")
}


@pytest.fixture(scope="module")
def master_and_pages(_environment: None) -> Iterator[tuple[str, str]]:
    """A `mooncake_master`, whose pages some of them read."""
    command = Command("cli", "--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_port=0")
    address, pages = command.line.removeprefix("moonpool master at ").split(", ")
    yield address, pages.removesuffix("/metrics")
    command.end()


class Caller:
    def __init__(self, python: str, script: str, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def hear(self, timeout_s: float = 100.0) -> Any:
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, timeout_s), "it says nothing"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, value: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Caller]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Caller] = []

    def start(*arguments: str, **environment: str) -> Caller:
        made.append(Caller(*arguments, **environment))
        return made[-1]

    yield start
    for one in made:
        one.end()


def converse(giver: Caller, taker: Caller, script: str) -> None:
    """Carries what one says to the other, until both say that all is right."""
    for turn in script.split():
        who, whom = (giver, taker) if turn == "gt" else (taker, giver)
        whom.tell(who.hear())
    assert taker.hear() == "right"
    giver.tell("end")
    assert giver.hear() == "right"


@pytest.mark.parametrize("name", PLAYED)
def test_their_calls(name: str, start: Start, master_and_pages: tuple[str, str], free_port: int) -> None:
    address, pages = master_and_pages
    where = {"CALLERS_MASTER": address, "CALLERS_PAGES": pages}
    giver = start(sys.executable, "callers.py", name, "give", **where)
    taker = start(sys.executable, "callers.py", name, "take", **where)
    if name == "flexkv":
        giver.tell(free_port)
    converse(giver, taker, PLAYED[name])


OWN = {
    "checkpoint_engine": ("CHECKPOINT_ENGINE", "gt"),
    "lmdeploy": ("LMDEPLOY", "gt tg"),
    "vllm_omni": ("VLLM_OMNI", "gt"),
    "vllm_omni_engine": ("VLLM_OMNI", "gt"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)  # importing torch and an engine takes long on a busy machine
@pytest.mark.parametrize("name", OWN)
def test_their_own_code(name: str, start: Start, master: MasterProcess, tmp_path: Path) -> None:
    variable, script = OWN[name]
    python = PYTHONS[variable]
    if not python:
        pytest.skip(f"needs a Python with that package: MOONPOOL_{variable}_PYTHON")
    cards = tmp_path / "ibv_devices"  # what LMDeploy asks for the names of network cards
    cards.write_text("#!/bin/sh\nprintf 'device\\tnode GUID\\n------\\t----\\nmlx5_0\\t0\\n'\n")
    cards.chmod(0o755)
    where = {"CALLERS_MASTER": master.address, "PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": "0"}
    giver = start(python, "callers_own.py", name, "give", **where)
    taker = start(python, "callers_own.py", name, "take", **where)
    converse(giver, taker, script)
