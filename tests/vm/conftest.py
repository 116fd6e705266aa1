"""The kernel for tests in a virtual machine; they are skipped, with the reason, where none can be started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm import machine


@pytest.fixture
def guest(tmp_path: Path) -> Callable[..., machine.Ended]:
    """Runs a command there and fails with its output where it fails."""
    found = os.environ.get("GUEST_KERNEL")
    kernel = Path(found) if found else None
    if why := machine.why_not(kernel):
        pytest.skip(why)
    assert kernel is not None

    def run(command: str, timeout_s: float = 280.0, **memory: int) -> machine.Ended:
        ended = machine.run(kernel, command, tmp_path, timeout_s=timeout_s, **memory)
        print(f"{ended.seconds:.1f} s\n{ended.output}")
        assert ended.code == 0, ended.output
        return ended

    return run
