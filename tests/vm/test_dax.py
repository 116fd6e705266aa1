"""Memory behind a DAX device, and of a NUMA node without CPUs, as a real kernel gives it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.machine import Ended

PROGRAM = Path(__file__).with_name("share_dax.py")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_share_a_device_and_a_node(guest: Callable[..., Ended]) -> None:
    ended = guest(f"dax_device && python {PROGRAM}", pmem_mib=64, far_mib=128)
    assert "memory of the device and of the node was shared" in ended.output
