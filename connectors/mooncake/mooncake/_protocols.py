"""The arguments ``protocol`` and ``device_name`` of the original's API, as transports of moonpool.

A protocol names what moves bytes between hosts. Within a host bytes never touch a network, whatever it is,
and TCP is the last resort: a machine without the hardware works, and says so once.

Two protocols name memory rather than a network. "cxl": managed buffers lie on a DAX device, which processes
of a host share; "nvmeof": files and block devices, an NVMe-oF namespace among them, are segments.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import moonpool
from moonpool.core.errors import InvalidArgument
from moonpool.core.printable import printable
from moonpool.core.service.data_tls import EngineTls

from ._codes import logger

NEAR = ("loopback", "shm", "cuda_ipc")
LAST = "tcp"
HOST_MEMORY = "cpu:0"
DAX_VARIABLE = "MC_CXL_DEV_PATH"  # as the original has it
DAX_FOLDER = Path("/sys/bus/dax/devices")


class Protocol(NamedTuple):
    """transport: its name in moonpool; "": moonpool has none.
    devices: the keyword of TransferEngine that takes the devices; "": it takes none.
    beside: further transports, where they work here.
    """

    transport: str
    devices: str = ""
    beside: tuple[str, ...] = ()


# A transport that moonpool has is in its registry under this name; the others are not available.
PROTOCOLS = {
    "tcp": Protocol("tcp"),
    "rdma": Protocol("rdma", "rdma_devices"),
    "efa": Protocol("efa", "efa_devices"),
    "cxl": Protocol("shm"),
    "nvlink": Protocol("cuda_ipc"),
    "nvlink_intra": Protocol("cuda_ipc"),
    "rpc_only": Protocol("tcp"),  # for a store of no memory
    "nvmeof": Protocol("file", beside=("cufile",)),
    "ascend": Protocol(""),
    "barex": Protocol(""),
    "hip": Protocol(""),
    "musa": Protocol(""),
    "ub": Protocol(""),
}


def engine_options(protocol: str, devices: str) -> dict[str, Any]:
    """Keywords of TransferEngine for a protocol and its devices ("a,b"; "": all); no protocol is all of them.

    Logs a warning for what is not available here. Raises InvalidArgument for a protocol that is none.
    """
    row = _row(protocol)
    if row is None:
        return {}
    if row is PROTOCOLS["cxl"]:
        devices = ""  # of memory: see managed_memory()
    here = _transports_here()
    why = here.get(row.transport, "this moonpool has no such transport")
    if why:
        logger.warning("protocol = %s is not available here: %s; bytes take TCP", protocol, why)
    names = [one.strip() for one in devices.split(",") if one.strip()]
    if names and (why or not row.devices):
        logger.warning("device_name = %s is not used: %s", printable(devices), _why_no_devices(protocol, why))
        names = []
    wanted = dict.fromkeys((*NEAR, row.transport, *row.beside, LAST))
    return {"transports": [one for one in wanted if one in here]} | ({row.devices: names} if names else {})


def managed_memory(protocol: str, devices: str) -> str:
    """The ``location`` of managed buffers. With "cxl": of the DAX device that ``devices`` names, or
    MC_CXL_DEV_PATH where it names none; of the host's memory, with a warning, where neither does.

    Raises InvalidArgument for a DAX device that this host has not.
    """
    if _row(protocol) is not PROTOCOLS["cxl"]:
        return HOST_MEMORY
    given = {"device_name": devices.strip(), DAX_VARIABLE: os.environ.get(DAX_VARIABLE, "").strip()}
    named = next((each for each in given.values() if _dax_name(each)), "")
    if not named:
        others = [f"{option} = {printable(text)}" for option, text in given.items() if text]
        logger.warning(
            "protocol = cxl: managed buffers are memory of the host, for %s names no DAX device, as "
            "/dev/dax0.0; bytes take shared memory within the host and TCP between hosts",
            " and ".join(others) or f"device_name or {DAX_VARIABLE}",
        )
        return HOST_MEMORY
    device = _dax_name(named)
    there = sorted(path.name for path in DAX_FOLDER.iterdir()) if DAX_FOLDER.is_dir() else []
    if device not in there:
        raise InvalidArgument(
            f"protocol = cxl: this host has no DAX device {printable(named, characters_max=80)}; it has "
            f"{', '.join(there) or 'none (ndctl create-namespace -m devdax makes one)'}",
            operation="initialize",
            key="device_name",
        )
    return f"dax:/dev/{device}"


def _dax_name(device: str) -> str:
    """ "dax0.0" of "/dev/dax0.0" or "dax0.0"; "": it is no DAX device's name."""
    name = device.removeprefix("/dev/")
    return name if name.startswith("dax") else ""


def check_for_pool(protocol: str, devices: str) -> None:
    """What setup() is given: a pool's nodes reach each other over TCP, and by shared memory on one host. Logs
    a warning for anything else. Raises InvalidArgument for a protocol that is none."""
    row = _row(protocol)
    if row is not None and row.transport != LAST:
        logger.warning("protocol = %s: the pool's bytes take TCP between hosts", protocol)
    if devices.strip():
        logger.warning("rdma_devices = %s is not used: TCP goes as the system routes", printable(devices))


def _row(protocol: str) -> Protocol | None:
    name = protocol.strip().lower()
    if not name:
        return None
    if name not in PROTOCOLS:
        raise InvalidArgument(
            f"protocol = {printable(protocol, characters_max=80)} is none; there are {', '.join(PROTOCOLS)}",
            operation="initialize",
            key="protocol",
        )
    return PROTOCOLS[name]


def _why_no_devices(protocol: str, why: str) -> str:
    if why:
        return f"{protocol} is not available here"
    return f"{protocol} takes no devices; the address in local_hostname chooses the network card"


@functools.cache
def _transports_here() -> dict[str, str]:
    """Each transport of this moonpool -> "" when it works on this host, else the reason."""
    with moonpool.TransferEngine("transports", listen=None, metadata="", tls=EngineTls()) as probe:
        return probe.transports()
