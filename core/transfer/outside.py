"""Transports that are built outside of Moonpool: from what a caller names to the paths of libraries.

A name without a slash is that of an entry point in the group ``moonpool.transports``: an installed package
says there where its library is. No library is loaded that the caller did not name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from moonpool.core.errors import InvalidArgument

GROUP = "moonpool.transports"


def library_paths(given: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The absolute paths of the libraries. Raises InvalidArgument for a name that no package has."""
    if isinstance(given, str | os.PathLike):
        raise InvalidArgument("outside_transports is a list of libraries, not one", operation="engine")
    return [_path(os.fspath(each)) for each in given]


def _path(name: str) -> str:
    if "/" in name:
        return os.path.abspath(name)
    found = metadata.entry_points(group=GROUP, name=name)
    if not found:
        names = sorted({entry.name for entry in metadata.entry_points(group=GROUP)})
        there = f"there are {', '.join(names)}" if names else "none is installed"
        raise InvalidArgument(
            f'no installed package has an outside transport "{name}"; {there}, and a path has a slash',
            operation="engine",
        )
    entry = next(iter(found))
    try:
        path: Any = entry.load()
    except Exception as error:  # the package's own code
        raise InvalidArgument(
            f'the outside transport "{name}" cannot be found: {entry.value}: {error}', operation="engine"
        ) from error
    if not isinstance(path, str | os.PathLike):
        raise InvalidArgument(
            f'the outside transport "{name}" names no path: {entry.value} is a {type(path).__name__}',
            operation="engine",
        )
    return os.path.abspath(os.fspath(path))
