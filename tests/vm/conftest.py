"""The kernel for tests in a virtual machine; they are skipped, with the reason, where none can be started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vm import machine


@pytest.fixture
def kernel() -> Path:
    found = os.environ.get("GUEST_KERNEL")
    kernel = Path(found) if found else None
    if why := machine.why_not(kernel):
        pytest.skip(why)
    assert kernel is not None
    return kernel


@pytest.fixture
def guest(kernel: Path, tmp_path: Path) -> Callable[..., machine.Ended]:
    """Runs a command there and fails with its output where it fails."""

    def run(command: str, timeout_s: float = 280.0, **machine_options: Any) -> machine.Ended:
        ended = machine.run(kernel, command, tmp_path, timeout_s=timeout_s, **machine_options)
        print(f"{ended.seconds:.1f} s\n{ended.output}")
        assert ended.code == 0, ended.output
        return ended

    return run
