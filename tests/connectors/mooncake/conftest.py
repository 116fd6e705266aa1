"""What the tests of the drop-in share: the package itself, a master, and stores with a segment.

The package is not installed: it is taken from connectors/mooncake, here and in every process of a test.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "connectors" / "mooncake"
sys.path.insert(0, str(PACKAGE))

from tests.core.master_bed import ADMIN_TOKEN, MasterProcess  # noqa: E402
from tests.core.store_bed import MIB, TOKEN, until  # noqa: E402

from .long_waits import SUSPECT_S, wait_known, wait_long  # noqa: E402

SETTINGS = {
    "MOONPOOL_SSD_SIZE": "256MiB",
    "MOONPOOL_CLUSTER_TOKEN": TOKEN.decode(),
    "MOONPOOL_CLUSTER_ADMIN_TOKEN": ADMIN_TOKEN,
    "MOONPOOL_MASTER_SUSPECT_AFTER_S": str(SUSPECT_S),
}


@contextmanager
def _settings() -> Iterator[None]:
    before = dict(os.environ)
    path = os.pathsep.join([str(ROOT / "src"), str(PACKAGE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.update(SETTINGS, PYTHONPATH=path)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """The cluster token of these tests, and the package for other processes; of no other folder's tests."""
    with _settings(), pytest.MonkeyPatch.context() as patch:
        wait_long(patch.setattr)
        yield


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    """A pool for each file: a key of another file's, whose node has just ended, is neither there nor absent
    until its master has given that node up.
    """
    with _settings():
        process = MasterProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def make_store(master: MasterProcess) -> Iterator[Callable[..., Any]]:
    """Makes stores in the pool of ``master``; all are closed at the end of the file."""
    from mooncake.store import MooncakeDistributedStore

    made = []

    def make(segment: int = 32 * MIB, at: str = master.address, **more: Any) -> Any:
        store = MooncakeDistributedStore()
        made.append(store)
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 1 * MIB, "tcp", "", at, **more) == 0
        if segment:
            wait_known(store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture(scope="module")
def store(make_store: Callable[..., Any]) -> Any:
    """One store with a segment for all tests of a file."""
    return make_store()


@pytest.fixture
def keys(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """New keys of this test."""
    numbers = itertools.count()
    return lambda n: [f"{request.node.name}-{next(numbers)}" for _ in range(n)]


@pytest.fixture
def key(keys: Callable[[int], list[str]]) -> str:
    return keys(1)[0]


__all__ = ["until"]
