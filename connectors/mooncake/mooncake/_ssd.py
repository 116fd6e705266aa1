"""The SSD of a segment, by ``enable_ssd_offload``: the folder of its log and its size."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from moonpool.core.config.units import parse_size
from moonpool.core.errors import InvalidArgument

PATH = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
LOG = "moonpool.ssd"
SIZE = "MOONPOOL_SSD_SIZE"
BYTES = "64GiB"  # without that variable
SHARE = 0.2  # maximum part of the free space without that variable: other processes have segments, too
SHARE_MOST = 0.8  # maximum part of the free space with that variable


def ssd_path_of(enabled: bool, path: str) -> str:
    """The folder of the segment's SSD, "" for none. Raises InvalidArgument for one that is not named."""
    if not enabled:
        return ""
    if found := path or os.environ.get(PATH, ""):
        return found
    raise InvalidArgument(f"enable_ssd_offload: give ssd_offload_path, or set {PATH}", key="ssd_offload_path")


def ssd_bytes(folder: Path) -> int:
    """The size of the log in ``folder``: what the environment sets, within the space of the disk.

    A log that exists has its blocks already, and forgets its objects when it is opened with a smaller size.
    So its blocks count as free, and it keeps its size when other files fill the disk.
    """
    asked = os.environ.get(SIZE)
    share = SHARE_MOST if asked else SHARE
    free = shutil.disk_usage(folder).free
    most = int(free * share)
    try:
        log = (folder / LOG).stat()
    except FileNotFoundError:
        pass
    else:
        has = log.st_blocks * 512
        most = int((free + has) * share)
        if log.st_size - has <= free:
            most = max(most, log.st_size)
    return min(parse_size(asked or BYTES), most)
