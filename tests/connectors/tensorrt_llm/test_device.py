"""Copies between staging and memory of a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("MOONPOOL_VLLM_PYTHON")


@pytest.mark.skipif(not PYTHON, reason="needs a Python with torch: MOONPOOL_VLLM_PYTHON")
def test_copies_run_on_the_right_stream() -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(HERE / "device_mover.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2] / "src")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "ok\n", done.stderr
