"""The limit of a process's address space (`ulimit -v`). Arenas are mapped whole, so they have to fit below
it.
"""

from __future__ import annotations

import resource
from pathlib import Path

from moonpool.core.config.units import format_size
from moonpool.core.errors import InvalidArgument

_BESIDES_BYTES = 1 << 30  # for the index, the stacks of threads and their heaps
_MIB = 1 << 20


def check_address_space(arena_bytes: int, option: str) -> None:
    """Raises InvalidArgument where arenas of so many bytes in all cannot be mapped, with a size that can be.
    option: how the user gives it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    left = max(limit - pages * resource.getpagesize(), 0)
    if arena_bytes <= left:
        return
    fits = (left - _BESIDES_BYTES) // _MIB
    smaller = f", or {option}{fits}MiB would fit" if fits > 0 else ""
    raise InvalidArgument(
        f"arenas of {format_size(arena_bytes)} in all do not fit into the address space, of which the limit "
        f"(ulimit -v) leaves {format_size(left)}; raise the limit{smaller}",
        operation="node",
    )
