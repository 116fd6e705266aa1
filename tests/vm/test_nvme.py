"""A block device of another host, by NVMe over TCP and over RDMA, as a segment of the transfer engine."""

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
    ended = guest(f"nvme_over_fabrics {FILE} 64 && python {PROGRAM} {FILE} tcp")
    assert "all bytes went by NVMe over tcp" in ended.output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_block_device_over_rdma_is_a_segment(guest: Callable[..., Ended]) -> None:
    ended = guest(f"rails 1 && nvme_over_fabrics {FILE} 64 rdma && python {PROGRAM} {FILE} rdma")
    assert "all bytes went by NVMe over rdma" in ended.output
