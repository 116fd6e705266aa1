"""Limits, shared memory, huge pages, system calls, CPUs and the clock."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator

from moonpool.core.config.units import format_size
from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.doctor.host import Host

MEMLOCK_BYTES_MIN = 1 << 30
OPEN_FILES_MIN = 4096
SHM_BYTES_MIN = 1 << 30
MEMORY_BYTES_MIN = 1 << 30
COLLAPSE_SINCE = (6, 1)  # the kernel's version from which MADV_COLLAPSE takes shared memory
YEAR_2025_S = 1_735_689_600
CAP_IPC_LOCK, CAP_SYS_PTRACE = 14, 19
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def check(host: Host) -> Iterator[Finding]:
    """All checks of this file."""
    yield from _memlock(host)
    yield from _open_files(host)
    yield from _memory(host)
    yield from _shared_memory(host)
    yield from _huge_pages(host)
    yield from _io_uring(host)
    yield from _process_vm(host)
    yield from _cpus(host)
    yield from _clock(host)


def _memlock(host: Host) -> Iterator[Finding]:
    limit = host.soft_limit(resource.RLIMIT_MEMLOCK)
    if limit < 0 or host.has_capability(CAP_IPC_LOCK):
        yield works("memlock", "memory may be locked without a limit")
    elif limit >= MEMLOCK_BYTES_MIN:
        yield works("memlock", f"{format_size(limit)} may be locked")
    else:
        remedy = (
            "ulimit -l unlimited; for a service LimitMEMLOCK=infinity, for a container --ulimit memlock=-1"
        )
        what = f"{format_size(limit)} of memory may be locked"
        if any(nic.ports for nic in host.machine.devices):
            yield broken("memlock", f"{what}, and RDMA locks all memory that it registers", remedy)
        else:
            yield weak("memlock", f"{what}: RDMA and copies to GPUs need more", remedy)


def _open_files(host: Host) -> Iterator[Finding]:
    limit = host.soft_limit(resource.RLIMIT_NOFILE)
    if limit < 0 or limit >= OPEN_FILES_MIN:
        yield works("open files", f"{limit:,} may be open" if limit >= 0 else "no limit")
    else:
        yield weak(
            "open files",
            f"this process may have {limit} files open: each peer takes some connections",
            "ulimit -n 65536; for a service LimitNOFILE=65536, for a container --ulimit nofile=65536",
        )


def _memory(host: Host) -> Iterator[Finding]:
    from moonpool import _native

    found = _native.available_memory(host.root)
    if found is None:
        yield weak("memory", "/proc/meminfo cannot be read", "mount /proc in the container")
        return
    available, total, limited_by = found
    what = f"{format_size(available)} of {format_size(total)} are available in {limited_by}"
    if available < MEMORY_BYTES_MIN:
        yield weak("memory", what, f"end other processes, or give {limited_by} more memory")
    else:
        yield works("memory", what)


def _shared_memory(host: Host) -> Iterator[Finding]:
    try:
        size = host.filesystem_bytes(str(host.path("/dev/shm")))
    except OSError:
        yield weak(
            "/dev/shm",
            "/dev/shm is not there: engines whose workers share memory do not start",
            "mount -t tmpfs -o size=50% tmpfs /dev/shm",
        )
        return
    if size < SHM_BYTES_MIN:
        yield weak(
            "/dev/shm",
            f"/dev/shm has {format_size(size)}: engines with several workers, and NCCL, need more "
            f"(moonpool's own memory does not lie there)",
            "mount -o remount,size=50% /dev/shm; for a container --shm-size=8g, or --ipc=host",
        )
    else:
        yield works("/dev/shm", f"{format_size(size)}")


def _huge_pages(host: Host) -> Iterator[Finding]:
    folder = "/sys/kernel/mm/transparent_hugepage"
    if not host.exists(folder):
        yield weak(
            "huge pages",
            "this kernel has no transparent huge pages: first touches of memory and RDMA keys take longer",
            "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        )
        return
    version = re.match(r"(\d+)\.(\d+)", host.text("/proc/sys/kernel/osrelease"))
    is_old = version is not None and (int(version[1]), int(version[2])) < COLLAPSE_SINCE
    if is_old and "[never]" in host.text(f"{folder}/shmem_enabled"):
        yield weak(
            "huge pages",
            "shared memory gets no huge pages, and this kernel is older than Linux 6.1, which makes them "
            "on request",
            f"echo advise > {folder}/shmem_enabled",
        )
    else:
        yield works("huge pages", "memory is put into pages of 2 MiB")


def _io_uring(host: Host) -> Iterator[Finding]:
    refused = host.probe_io_uring()
    threads = "the SSD tier reads and writes with threads instead"
    if not refused:
        yield works("io_uring", "the kernel allows it")
    elif refused == errno.ENOSYS:
        yield weak("io_uring", f"the kernel has no io_uring; {threads}", "boot Linux 5.6 or newer")
    elif host.text("/proc/sys/kernel/io_uring_disabled") in ("1", "2"):
        yield weak(
            "io_uring",
            f"the setting kernel.io_uring_disabled forbids it; {threads}",
            "sysctl -w kernel.io_uring_disabled=0",
        )
    else:
        yield weak(
            "io_uring",
            f"a seccomp profile forbids it ({os.strerror(refused)}); {threads}",
            "run the container with a profile that allows io_uring_setup, io_uring_enter and "
            "io_uring_register",
        )


def _process_vm(host: Host) -> Iterator[Finding]:
    slow = "memory that the engine did not allocate goes to processes of this host over TCP"
    refused = host.probe_process_vm()
    scope = host.text("/proc/sys/kernel/yama/ptrace_scope")
    if refused:
        yield weak(
            "process_vm",
            f"process_vm_readv is forbidden ({os.strerror(refused)}): {slow}",
            "run the container with --cap-add SYS_PTRACE, or with a seccomp profile that allows "
            "process_vm_readv and process_vm_writev; or use engine.allocate()",
        )
    elif scope in ("1", "2", "3") and not (scope != "3" and host.has_capability(CAP_SYS_PTRACE)):
        yield weak(
            "process_vm",
            f"kernel.yama.ptrace_scope is {scope}: {slow}",
            "sysctl -w kernel.yama.ptrace_scope=0 (3 stays until the next boot), give the process "
            "CAP_SYS_PTRACE, or use engine.allocate()",
        )
    else:
        yield works("process_vm", "process_vm_readv and process_vm_writev are allowed")


def _cpus(host: Host) -> Iterator[Finding]:
    machine = host.machine
    used = {node.id for node in machine.nodes if set(node.cpus) & set(machine.allowed_cpus)}
    far = [
        f"{nic.name} (node {nic.node})"
        for nic in machine.devices
        if nic.kind == "nic" and nic.ports and nic.node >= 0 and used and nic.node not in used
    ]
    allowed = f"{len(machine.allowed_cpus)} CPUs of node {', '.join(map(str, sorted(used))) or '?'}"
    if len(machine.allowed_cpus) == 1:
        yield weak(
            "CPUs",
            "this process may use one CPU: its threads wait for each other",
            "taskset, the container's --cpuset-cpus, or cpuset.cpus of the control group",
        )
    elif far:
        yield weak(
            "CPUs",
            f"this process may use {allowed}, and is far from {', '.join(far)}",
            "start one process for each node (numactl --cpunodebind=N --membind=N), or allow it all CPUs",
        )
    elif machine.allowed_cpus:
        yield works("CPUs", f"this process may use {allowed}")
    else:
        yield absent("CPUs", "the kernel does not tell which CPUs this process may use")


def _clock(host: Host) -> Iterator[Finding]:
    source = host.text("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if host.now_s() < YEAR_2025_S:
        yield broken(
            "clock",
            "this machine's clock says a time before 2025: TLS certificates count as not yet valid",
            "set the clock, and run chronyd or systemd-timesyncd",
        )
    elif source in SLOW_CLOCKS:
        yield weak(
            "clock",
            f"the kernel reads time from {source}, a microsecond and more for each look",
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, or boot with "
            "tsc=reliable where the CPU's counter is sound",
        )
    else:
        yield works("clock", f"the kernel reads time from {source or 'a source that it does not tell'}")
