"""Runs the tests in real/ with the interpreter that has LMCache: nothing of it is replaced there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_with_the_real_lmcache() -> None:
    python = os.environ.get("MOONPOOL_LMCACHE_PYTHON")
    if not python:
        pytest.skip("MOONPOOL_LMCACHE_PYTHON is not set: it names a Python with LMCache, see docs/lmcache.md")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    chosen = [] if os.environ.get("HEAVY") else ["-m", "not slow"]
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(HERE / "real")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0
