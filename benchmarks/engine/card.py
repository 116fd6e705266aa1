"""The first CUDA card of this machine, by its driver and ctypes: the reporting process has no torch."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

DRIVER = "libcuda.so.1"
# Where container images have it when the loader does not know it.
PLACES = (
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/cuda/compat",
)


@dataclass(frozen=True)
class Card:
    """name, memory_bytes: as the driver has them. library_path: the folder that engines need in
    LD_LIBRARY_PATH to find the driver; "" where the loader knows it."""

    name: str
    memory_bytes: int
    library_path: str


def first_card() -> Card | str:
    """The card, or in one sentence why there is none."""
    driver, folder = _open_driver()
    if driver is None:
        return f"{DRIVER} was not found"
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    for call, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(device), 0)),
        ("cuDeviceGetName", (name, len(name), device)),
        ("cuDeviceTotalMem_v2", (ctypes.byref(memory), device)),
    ):
        if error := getattr(driver, call)(*arguments):
            return f"{call} of the driver answers {error}"
    return Card(name.value.decode(), memory.value, folder)


def _open_driver() -> tuple[ctypes.CDLL | None, str]:
    """The driver and the folder it had to be looked for in."""
    for folder in ("", *PLACES):
        try:
            return ctypes.CDLL(str(Path(folder) / DRIVER) if folder else DRIVER), folder
        except OSError:
            continue
    return None, ""


def with_library_path(card: Card) -> dict[str, str]:
    """What engines need in their environment to load the driver."""
    if not card.library_path:
        return {}
    known = os.environ.get("LD_LIBRARY_PATH", "")
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, [card.library_path, known]))}
