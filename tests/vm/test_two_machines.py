"""Transfers between two virtual machines, whose kernels and clocks are their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vm import machine


@pytest.mark.heavy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bytes_go_between_them_and_faults_end_in_time(kernel: Path, tmp_path: Path) -> None:
    numbers = {"near": 1, "far": 2}
    ends = {name: tmp_path / name for name in numbers}

    def run(name: str, other: str) -> machine.Ended:
        job = tmp_path / f"job_{name}"
        job.mkdir()
        command = f"line {numbers[name]} && ulimit -l unlimited && python -m tests.vm.two_machines {name}"
        return machine.run(
            kernel, command, job, timeout_s=580, memory_mib=448, line=(ends[name], ends[other])
        )

    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(run, "far", "near"), pool.submit(run, "near", "far")]:
            ended = each.result()
            print(f"{ended.seconds:.1f} s\n{ended.output}")
            assert ended.code == 0, ended.output
    assert "two machines moved all bytes" in ended.output
