"""What several tests of the core need."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of its own (short, because a socket's path is), and no setting of ours in the
    environment.
    """
    for variable in list(os.environ):
        if variable.startswith("MOONPOOL_"):
            monkeypatch.delenv(variable)
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
