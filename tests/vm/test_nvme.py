"""A block device of another host, by NVMe over TCP, as a segment of the transfer engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.machine import Ended

PROGRAM = Path(__file__).with_name("transfer_by_nvme.py")
FILE = "/dev/shm/namespace"


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_block_device_over_tcp_is_a_segment(guest: Callable[..., Ended]) -> None:
    ended = guest(f"nvme_over_tcp {FILE} 64 && python {PROGRAM} {FILE}")
    assert "all bytes went by NVMe over TCP" in ended.output
