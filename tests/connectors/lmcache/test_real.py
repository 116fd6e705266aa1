"""Runs the tests in real/ with the interpreter that has LMCache: nothing of it is replaced there."""

from __future__ import annotations

import contextlib
import os
import signal
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
    run = subprocess.Popen(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "real")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # so that its engines and nodes end with it
    )
    try:
        assert run.wait(LIMIT_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
