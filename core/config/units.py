"""Sizes and durations as people write them: "2GiB", "512MB", "1.5s", "200ms". A plain number is bytes or
seconds.
"""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")
_DURATION_UNITS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str) -> int:
    """Bytes: "2GiB" and "2G" are 2 * 2**30, "2GB" is 2 * 10**9, "4096" is itself. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _SIZE_UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no size; write for example 2GiB, 512MB or 4096")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_duration(text: str) -> float:
    """Seconds: "1.5s", "200ms", "10min", "2h", "30". Raises ValueError."""
    match = _DURATION.fullmatch(text)
    unit = None if match is None else _DURATION_UNITS.get(match[2])
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no duration; write for example 1.5s, 200ms or 10min")
    return float(match[1]) * unit


def format_size(size: float) -> str:
    """ "2.0 GiB", "512 B"; for people, so at most four digits."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(seconds: float) -> str:
    """ "350 ms", "12.5 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"
