"""Whether the original is here too. Needs nothing but the standard library: setup.py runs it as well."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import distributions

ORIGINAL = re.compile(r"mooncake[-_.]transfer[-_.]engine([-_.].*)?", re.IGNORECASE)


def conflict(places: Iterable[str] | None = None) -> str:
    """One sentence when a distribution of the original is in ``places`` (None: sys.path), else ""."""
    found = distributions() if places is None else distributions(path=list(dict.fromkeys(places)))
    for one in found:
        name = one.metadata["Name"] or ""
        if ORIGINAL.fullmatch(name):
            return (
                f"{name} {one.version} is installed, which is the package mooncake, as moonpool-mooncake is: "
                f"run `pip uninstall {name}` and install ./connectors/mooncake again, or keep the original "
                f"and run `pip uninstall moonpool-mooncake`"
            )
    return ""
