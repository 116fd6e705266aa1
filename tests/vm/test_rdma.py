"""The transport rdma over the soft RoCE of a real kernel; native tests have a software libibverbs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.machine import Ended

PROGRAM = Path(__file__).with_name("transfer_by_rdma.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_engines_move_bytes_over_two_rails(guest: Callable[..., Ended]) -> None:
    ended = guest(f"rails 2 && ulimit -l unlimited && python {PROGRAM}")
    assert "all bytes came by RDMA" in ended.output
