"""GPUs: whether the driver's library and device nodes are there for the cards that the kernel shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from moonpool.core.doctor.finding import Finding, absent, broken, weak, works
from moonpool.core.doctor.host import Host

if TYPE_CHECKING:
    from moonpool import _native

LIBRARY = "libcuda.so.1"
VERBS, DMA_BUF = "libibverbs.so.1", "ibv_reg_dmabuf_mr"
NVIDIA = "0x10de"


def cards(host: Host) -> list[_native.MachineDevice]:
    """The CUDA cards that the kernel shows."""
    return [gpu for gpu in host.machine.devices if gpu.kind == "gpu" and _is_cuda(host, gpu)]


def check(host: Host) -> Iterator[Finding]:
    """All checks of this file."""
    for gpu in host.machine.devices:
        if gpu.kind == "gpu" and not _is_cuda(host, gpu):
            yield absent("GPUs", f"{gpu.name} at {gpu.pci} is no CUDA card: its memory is not moved")
    there = cards(host)
    if not there:
        yield absent("GPUs", "no CUDA card")
        return
    shown = f"{len(there)} CUDA card{'s' if len(there) > 1 else ''}"
    why = host.open_library(LIBRARY)
    if why:
        yield broken(
            "CUDA library",
            f"this machine has {shown}, and {LIBRARY} cannot be opened: {why}",
            "install NVIDIA's driver; run a container with --gpus all (nvidia-container-toolkit)",
        )
    else:
        yield works("CUDA library", f"{LIBRARY} opens, for {shown}")
    yield from _device_nodes(host, there)
    yield from _peer_memory(host)


def _is_cuda(host: Host, gpu: _native.MachineDevice) -> bool:
    return host.text(f"/sys/bus/pci/devices/{gpu.pci}/vendor") == NVIDIA


def _device_nodes(host: Host, there: list[_native.MachineDevice]) -> Iterator[Finding]:
    remedy = "run nvidia-modprobe -u -c 0; run a container with --gpus all"
    nodes = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
    minors = [name for name in host.names("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    missing = [node for node in nodes if not host.exists(node)]
    if missing or not minors:
        lacking = ", ".join([*missing, *([] if minors else ["/dev/nvidia0"])])
        yield broken("GPU device nodes", f"{lacking} is not there: no program opens a card", remedy)
        return
    closed = [node for node in (*nodes, *(f"/dev/{name}" for name in minors)) if not host.is_usable(node)]
    if closed:
        yield broken(
            "GPU device nodes",
            f"this user may not read and write {', '.join(closed)}",
            f"chmod 666 {' '.join(closed)}, or join the group that owns them",
        )
    elif len(minors) < len(there):
        yield weak(
            "GPU device nodes",
            f"this process sees {len(minors)} of {len(there)} cards",
            "run the container with --gpus all, if it is to see all of them",
        )
    else:
        yield works("GPU device nodes", f"{', '.join(minors)}")


def _peer_memory(host: Host) -> Iterator[Finding]:
    """Only where RDMA could read a card's memory."""
    if not any(device.ports for device in host.machine.devices):
        return
    if host.exists("/sys/module/nvidia_peermem") or host.exists("/sys/module/nv_peer_mem"):
        yield works("GPUDirect RDMA", "the module nvidia_peermem is loaded")
    elif not host.has_function(VERBS, DMA_BUF):
        yield broken(
            "GPUDirect RDMA",
            f"no NIC gets keys for memory of a card, which goes over TCP: {VERBS} lacks {DMA_BUF}, and the "
            "module nvidia_peermem is not loaded",
            "modprobe nvidia-peermem; or install libibverbs of rdma-core 34 or newer",
        )
    else:
        yield weak(
            "GPUDirect RDMA",
            "the module nvidia_peermem is not loaded: NICs reach cards by dma-buf only, which needs Linux "
            "5.12 and the open kernel modules of the driver",
            "modprobe nvidia-peermem",
        )
