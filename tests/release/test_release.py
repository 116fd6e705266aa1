"""Processes of this release and of the one before, each really built, speak to each other.

MOONPOOL_RELEASE_PYTHON: a Python with the other release. `make matrix VERSIONS=release` builds it and runs
this; the frames that an earlier release sends and understands are tested in CI, too (tests/native).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.core.store_bed import until
from tests.descriptors import speaks
from tests.release.side import TOKEN

OTHER = os.environ.get("MOONPOOL_RELEASE_PYTHON", "")
pytestmark = [
    pytest.mark.skipif(not OTHER, reason="needs MOONPOOL_RELEASE_PYTHON; `make matrix VERSIONS=release`"),
    pytest.mark.timeout(180),
]
PYTHONS = {"this": sys.executable, "before": OTHER}
SIDE = Path(__file__).with_name("side.py")
START_S = 60.0
PAIRS = [("this", "before"), ("before", "this")]


class Side:
    """A process of one of the releases that says lines of JSON."""

    def __init__(self, release: str, *arguments: object) -> None:
        self._release = release
        self.process = subprocess.Popen(
            [PYTHONS[release], str(SIDE), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert speaks(self.process.stdout, START_S), f"the process of {self._release} release says nothing"
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def ask(self, **what: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def side(stack: ExitStack, release: str, *arguments: object) -> Side:
    made = Side(release, *arguments)
    stack.callback(made.close)
    return made


def command(stack: ExitStack, release: str, *words: object) -> str:
    """`moonpool WORDS`; the line that it says when it serves."""
    process = subprocess.Popen(
        [PYTHONS[release], "-m", "moonpool", *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MOONPOOL_CLUSTER_TOKEN": TOKEN.decode()},
    )

    def end() -> None:
        process.kill()
        process.communicate()

    stack.callback(end)
    assert process.stdout is not None
    assert speaks(process.stdout, START_S), f"moonpool {words[0]} of {release} release says nothing"
    return process.stdout.readline()


def node(stack: ExitStack, release: str, folder: Path, name: str, *more: object) -> Path:
    socket = folder / f"{name}.sock"
    memory = ["--dram", "64MiB", "--http", "off"]
    command(stack, release, "node", "--name", name, *memory, "--socket", socket, *more)
    return socket


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("serving", "calling"), PAIRS)
def test_engines(stack: ExitStack, runtime: Path, serving: str, calling: str, transport: str) -> None:
    target = side(stack, serving, "engine", transport)
    told = target.hear()
    found = side(stack, calling, "transfer", transport, told["address"], told["at"]).hear()
    assert found == {"read": True, "pieces": True}
    assert target.ask() == {"holds": 2}


@pytest.mark.parametrize(("serving", "calling"), PAIRS)
def test_a_store_and_its_node(stack: ExitStack, runtime: Path, serving: str, calling: str) -> None:
    socket = node(stack, serving, runtime, "a")
    store = side(stack, calling, "store", socket)
    assert store.hear() == {"ready": True}
    assert store.ask(do="put", name="k", number=1) == {"done": True}
    assert store.ask(do="get", name="k") == {"holds": 1}
    assert store.ask(do="put", name="k", number=2, replace=True) == {"done": True}
    assert store.ask(do="get", name="k") == {"holds": 2}
    assert store.ask(do="remove", name="k") == {"removed": [True]}
    assert store.ask(do="get", name="k") == {"holds": 0}


@pytest.mark.parametrize(
    ("master", "first", "second"),
    [
        ("this", "before", "before"),
        ("this", "this", "before"),
        ("before", "this", "this"),
        ("before", "this", "before"),
    ],
)
def test_a_pool(stack: ExitStack, runtime: Path, master: str, first: str, second: str) -> None:
    """As in the middle of an upgrade: neither a value nor a removal is lost."""
    line = command(stack, master, "master", "--listen", "127.0.0.1:0", "--http", "off")
    address = line.removeprefix("moonpool master at ").split(",")[0].strip()
    stores = []
    for name, release in (("a", first), ("b", second)):
        more = ["--listen", "127.0.0.1:0", "--master", address, "--host-id", f"host-{name}"]
        socket = node(stack, release, runtime, name, *more)
        stores.append(side(stack, release, "store", socket))
        assert stores[-1].hear() == {"ready": True}
    a, b = stores
    assert a.ask(do="put", name="one", number=3) == {"done": True}
    until(lambda: b.ask(do="get", name="one") == {"holds": 3})
    assert b.ask(do="put", name="two", number=4, replicas=2) == {"done": True}
    until(lambda: a.ask(do="get", name="two") == {"holds": 4})
    assert a.ask(do="remove", name="one") == {"removed": [True]}
    until(lambda: b.ask(do="get", name="one") == {"holds": 0})
    assert b.ask(do="remove", name="two") == {"removed": [True]}
    until(lambda: a.ask(do="get", name="two") == {"holds": 0})
