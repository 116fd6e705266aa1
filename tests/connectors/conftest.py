"""What the tests of several connectors share."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.connectors import files, weights
from tests.connectors.own_node import TOKEN, Node


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:  # sockets have short paths only
        yield Path(path)


@pytest.fixture(autouse=True)
def models_of_tests(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests make the models of the engines in this process after it began, and what they are is kept for one
    test."""
    kept = tmp_path_factory.mktemp("kept")
    monkeypatch.setattr(weights, "started_ns", time.time_ns)
    monkeypatch.setattr(files, "cache_dir", lambda: kept)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Makes weights_digest wait for no file, and each reading wait until this event is set."""
    event, read = threading.Event(), files.Reading._read

    def waits(reading: files.Reading) -> list[bytes]:
        assert event.wait(60)
        return read(reading)

    monkeypatch.setattr(weights, "SMALL_BYTES", -1)
    monkeypatch.setattr(files.Reading, "_read", waits)
    yield event
    event.set()


@pytest.fixture
def node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """Not started."""
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", TOKEN.decode())
    node = Node(folder)
    yield node
    node.stop()
