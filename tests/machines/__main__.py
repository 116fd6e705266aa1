"""`python -m tests.machines`: prints what the topology reads of this machine, as a recording."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

FILES = (
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/meminfo",
    "/sys/devices/system/node/node*/distance",
    "/sys/devices/system/cpu/online",
    "/sys/class/infiniband/*/hca_type",
    "/sys/class/infiniband/*/ports/*/state",
    "/sys/class/infiniband/*/ports/*/phys_state",
    "/sys/class/infiniband/*/ports/*/link_layer",
    "/sys/class/infiniband/*/ports/*/rate",
    "/sys/class/infiniband/*/ports/*/lid",
    "/sys/class/infiniband/*/ports/*/gids/*",
    "/sys/class/infiniband/*/ports/*/gid_attrs/types/*",
    "/sys/class/infiniband/*/ports/*/gid_attrs/ndevs/*",
    "/sys/class/net/*/operstate",
    "/sys/class/net/*/mtu",
    "/sys/class/net/*/speed",
    "/sys/class/nvme/*/model",
    "/sys/class/nvme/*/state",
    "/sys/class/nvme/*/nvme*/size",
    "/sys/bus/dax/devices/*/size",
    "/sys/bus/dax/devices/*/target_node",
    "/sys/bus/dax/devices/*/numa_node",
    "/sys/bus/pci/devices/*/class",
    "/sys/bus/pci/devices/*/vendor",
    "/sys/bus/pci/devices/*/numa_node",
    "/proc/driver/nvidia/gpus/*/information",
)
LINKS = (
    "/sys/class/infiniband/*",
    "/sys/class/infiniband/*/device",
    "/sys/class/net/*",
    "/sys/class/net/*/device",
    "/sys/class/nvme/*",
    "/sys/bus/dax/devices/*",
    "/sys/bus/pci/devices/*",
)
EMPTY_GID = re.compile("[0:]*")


def lines() -> Iterator[str]:
    for pattern in LINKS:
        for path in sorted(Path("/").glob(pattern[1:])):
            if path.is_symlink():
                yield f"{real(path.parent)}/{path.name} -> {os.readlink(path)}"
    for pattern in FILES:
        for path in sorted(Path("/").glob(pattern[1:])):
            try:
                text = path.read_text().strip()
            except OSError:
                continue  # as of an empty entry of a table, or the speed of a device without a link
            if path.parent.name != "gids" or not EMPTY_GID.fullmatch(text):
                yield f"{real(path.parent)}/{path.name} = " + text.replace("\n", "\\n")
    status = Path("/proc/self/status").read_text()
    kept = re.findall(r"^(?:Cpus|Mems)_allowed_list:.*$", status, re.MULTILINE)
    yield "/proc/self/status = " + "\\n".join(kept)


def real(path: Path) -> str:
    """Files are recorded where links lead to."""
    return os.path.realpath(path)


if __name__ == "__main__":
    for line in dict.fromkeys(lines()):
        print(line)
