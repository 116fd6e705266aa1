"""The drop-in `mooncake` of this checkout, which is not installed: the way to import it."""

from __future__ import annotations

import sys

from benchmarks.processes import ROOT

CALL_MORE_US = 5  # that its Python may cost over a call of moonpool's own API


def use() -> None:
    """Makes `mooncake` the drop-in in this process; where the original is installed its import refuses."""
    sys.path.insert(0, str(ROOT / "connectors" / "mooncake"))
