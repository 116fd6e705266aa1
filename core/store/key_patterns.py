"""Patterns of keys, as shells know them: ``*`` any bytes, ``?`` one, ``[abc]`` one of them. The nodes find
keys by prefix; this module matches the rest of the pattern."""

from __future__ import annotations

import fnmatch
import re

_SPECIAL = re.compile(rb"[*?\[]")


def literal_prefix(pattern: bytes) -> bytes:
    """The prefix of every key that matches."""
    first = _SPECIAL.search(pattern)
    return pattern if first is None else pattern[: first.start()]


def matcher(pattern: bytes) -> re.Pattern[bytes]:
    """Matches whole keys; upper and lower case differ on every system."""
    return re.compile(fnmatch.translate(pattern.decode("latin-1")).encode("latin-1"))
