"""These run in an interpreter that has LMCache (see ../test_real.py): nothing of it is replaced.

LMCache finds us by our entry point, so this checkout is made to look installed: a folder with its name and
its entry points, for this process and those it starts.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.connectors import node_connection
from tests.connectors.own_node import Node

ROOT = Path(__file__).resolve().parents[4]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _installed(folder: Path) -> None:
    info = folder / f"moonpool-{_PROJECT['version']}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: moonpool\nVersion: {_PROJECT['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
        for group, points in _PROJECT["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))


_site = tempfile.TemporaryDirectory(prefix="moonpool-site-")
_installed(Path(_site.name))
sys.path.insert(0, _site.name)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), _site.name, str(ROOT), str(ROOT / "connectors" / "mooncake")]
)
os.environ.update(LMCACHE_TRACK_USAGE="false", PYTHONHASHSEED="0", LMCACHE_LOG_LEVEL="WARNING")


@pytest.fixture(autouse=True)
def _runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default node of these tests is the one in ``folder``; one that is lost is found again soon."""
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(node_connection, "RETRY_FIRST_S", 0.05)
    monkeypatch.setattr(node_connection, "RETRY_MAX_S", 0.2)
    (folder / "node.sock").symlink_to(folder / "n.sock")


@pytest.fixture
def make(node: Node) -> Iterator[Callable[..., Any]]:
    """make(**options): a Backend, closed at the end."""
    from tests.connectors.lmcache.real.beds import Backend  # LMCache reads the environment above

    made: list[Backend] = []

    def make(**options: Any) -> Backend:
        made.append(Backend(**options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What our loggers said; LMCache's own do not hand on."""
    logger = logging.getLogger("lmcache.moonpool.remote")
    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    yield lambda: caplog.text
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)
