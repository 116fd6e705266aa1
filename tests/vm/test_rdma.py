"""The transport rdma over the soft RoCE of a real kernel; native tests have a software libibverbs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vm.machine import Ended

FOLDER = Path(__file__).parent
PROGRAM, FAULTS = FOLDER / "transfer_by_rdma.py", "-m tests.vm.rails_and_faults"
DEVICES = FOLDER / "devices_by_pyverbs.py"
NATIVE = FOLDER.parent / "native"
SUITE = FOLDER.parents[1] / "build" / "native-tests" / "suite" / "program"
BATCHES = 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_engines_move_bytes_over_two_rails(guest: Callable[..., Ended]) -> None:
    """And a rail is lost in the middle of a transfer, the one fault of the short form."""
    ended = guest(f"rails 2 && ulimit -l unlimited && python {PROGRAM} && python {FAULTS} rail_cut")
    assert "all bytes came by RDMA" in ended.output
    assert "no RDMA device of this host is called" in ended.output
    assert "ok rail_cut" in ended.output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_suite_of_all_transports_and_its_batches(guest: Callable[..., Ended]) -> None:
    """What the native tests run over the software libibverbs: tests/native/transport/test_conformance.cpp and
    test_batches.cpp, which compares rdma with tcp. They print their seed. Without sanitizers, whose work an
    emulated processor would do, too."""
    subprocess.run(["make", "--no-print-directory", "-C", NATIVE, "suite"], check=True)
    variables = f"MOONPOOL_TEST_VERBS=real MOONPOOL_TRANSFER_BATCHES={BATCHES}"
    ended = guest(
        f"rails 2 && ulimit -l unlimited && {variables} {SUITE} --test-case='transport: *,batches: *'",
        timeout_s=2700,
        memory_mib=2048,
    )
    passed = re.search(r"test cases:.* (\d+) passed", ended.output)
    assert passed
    assert int(passed[1]) >= 20, "most of the suite was not there"
    assert "not tested: rdma" not in ended.output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_devices_ports_and_gids_are_those_of_pyverbs(guest: Callable[..., Ended]) -> None:
    """What the doctor reads from sysfs, and the engine by libibverbs, against a third reader."""
    packages = os.environ.get("GUEST_PYVERBS")
    if not packages:
        pytest.skip("needs Debian's python3-pyverbs in GUEST_PYVERBS; `make test` brings it")
    ended = guest(f"rails 2 && ip link set b1 down && PYTHONPATH={packages} python {DEVICES}")
    if "no pyverbs:" in ended.output:
        pytest.skip(ended.output.strip())
    assert "4 devices are as pyverbs has them" in ended.output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rails_that_are_slow_or_lost_and_peers_that_die(guest: Callable[..., Ended]) -> None:
    """One start of the machine for all scenarios, which takes most of the time."""
    ended = guest(f"rails 3 && ulimit -l unlimited && python {FAULTS}", timeout_s=580)
    assert "all scenarios passed" in ended.output


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_the_same_again_and_again(guest: Callable[..., Ended]) -> None:
    ended = guest(f"rails 3 && ulimit -l unlimited && python {FAULTS} --long", timeout_s=1900)
    assert "all scenarios passed" in ended.output
