"""Runs the tests in real/ with the interpreter that has LMCache: nothing of it is replaced there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT_S = 900


@pytest.mark.lmcache
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_with_the_real_lmcache() -> None:
    python = os.environ["MOONPOOL_LMCACHE_PYTHON"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    run = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "real")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0
