"""A sound machine for the doctor, in which tests plant faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moonpool.core.doctor import Finding, Host, State, gpu_checks, rdma_checks, system_checks

from .. import machines

DEV, SYS_RDMA = "/dev/infiniband", "/sys/class/infiniband"
NETS = {"mlx5_0": "ens1f0np0", "mlx5_1": "ens2f0np0"}
GPU = "/sys/devices/pci0000:30/0000:30:03.0/0000:33:00.0"


def sound(root: Path, *, gpu: bool = False) -> Host:
    """Two sockets, a NIC with RoCE at each, and a card; nothing is wrong with it."""
    machines.build("two_sockets", root)
    for path, text in {
        "/proc/meminfo": "MemTotal: 536870912 kB\nMemFree: 268435456 kB\nMemAvailable: 400000000 kB",
        "/proc/self/status": "CapEff:\t0000000000000000\nCpus_allowed_list:\t0-127\nMems_allowed_list:\t0-1",
        "/proc/sys/kernel/osrelease": "6.8.0-45-generic",
        "/proc/sys/kernel/yama/ptrace_scope": "0",
        "/proc/sys/kernel/io_uring_disabled": "0",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force",
        "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc",
        "/etc/libibverbs.d/mlx5.driver": "driver mlx5",
        "/sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0",
        "/sys/class/infiniband_verbs/uverbs1/ibdev": "mlx5_1",
        f"{DEV}/uverbs0": "",
        f"{DEV}/uverbs1": "",
    }.items():
        machines.write(root, path, text)
    if gpu:
        machines.link(root, "/sys/bus/pci/devices/0000:33:00.0", f"../../..{GPU[4:]}")
        for path, text in {
            f"{GPU}/class": "0x030200",
            f"{GPU}/vendor": "0x10de",
            f"{GPU}/numa_node": "0",
            "/sys/module/nvidia_peermem/refcnt": "0",
            "/dev/nvidiactl": "",
            "/dev/nvidia-uvm": "",
            "/dev/nvidia0": "",
        }.items():
            machines.write(root, path, text)
    return Host(
        root=str(root),
        soft_limit=lambda which: -1,
        open_library=lambda name: "",
        has_function=lambda library, name: True,
        probe_io_uring=lambda: 0,
        probe_process_vm=lambda: 0,
        filesystem_bytes=lambda path: 1 << 40,
        now_s=lambda: 1.8e9,
    )


def look(host: Host) -> list[Finding]:
    """What is weak or broken."""
    checked: Iterable[Callable[[Host], Iterable[Finding]]]
    checked = (system_checks.check, rdma_checks.check, gpu_checks.check)
    found = [finding for check in checked for finding in check(host)]
    for finding in found:
        assert finding.what
        assert bool(finding.remedy) == (finding.state in (State.WEAK, State.BROKEN)), finding
    return [finding for finding in found if finding.state in (State.WEAK, State.BROKEN)]


def changed(host: Host, **fields: Any) -> Host:
    """The same host with other limits or probes, or read anew."""
    return dataclasses.replace(host, **fields)


def port(root: Path, nic: str, name: str, text: str) -> None:
    """Writes one file of a port."""
    machines.write(root, f"{SYS_RDMA}/{nic}/ports/1/{name}", text)


def net(root: Path, nic: str, name: str, text: str) -> None:
    """Writes one file of a NIC's network device."""
    machines.write(root, f"/sys/class/net/{NETS[nic]}/{name}", text)
