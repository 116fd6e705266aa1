"""The committed PTX of the GPU kernels is that of their source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import environments, kernels

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(600)
def test_the_ptx_is_that_of_the_source() -> None:
    """Skipped where NVIDIA's run-time compiler, a wheel of 23 MB, is not to be had."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.kernels", "--check"],
        cwd=ROOT,
        env=environments.clean_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == kernels.NOT_INSTALLABLE:
        pytest.skip(f"NVRTC cannot be installed: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ptx_is_for_cards_from_2017_and_drivers_of_cuda_11_8() -> None:
    for source in kernels.FOLDER.glob("*.cu"):
        text = source.with_name(f"{source.stem}_ptx.hpp").read_text()
        assert ".version 7.8" in text
        assert ".target sm_70" in text
        assert len(text) < 20_000
