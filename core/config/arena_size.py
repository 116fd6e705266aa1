"""The size of an arena as people give it: "64GiB", or "80%" of the memory that arenas may take now.

A share is of what is available at that moment: of the machine, or of the control group that leaves the
least, less what is kept free for the process itself and its neighbours (core/csrc/memory/room.hpp). It is
turned into bytes once, where the setting is read.
"""

from __future__ import annotations

import re

from moonpool.core.config.units import parse_size

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_ROUND_TO = 1 << 20


def parse_arena_size(text: str, *, root: str = "") -> int:
    """Bytes of ``text``. root: a prefix of /proc and /sys, for tests. Raises ValueError."""
    match = _SHARE.fullmatch(text)
    if match is None:
        return parse_size(text)
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{text!r} is no share of the memory; write 1% to 100%, for example 80%")
    from moonpool import _native

    room = _native.room_for_arenas(root)
    if room is None:
        raise ValueError(f"{text!r}: this machine does not say how much memory it has; write a size instead")
    return int(room * share) // _ROUND_TO * _ROUND_TO
