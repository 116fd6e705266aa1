"""Text of other processes, made safe for a terminal and for a log: one line, nothing that moves a cursor."""

from __future__ import annotations

import re
from typing import Any

# str.isprintable() refuses control characters (C0, C1, DEL), line separators, surrogates, and the marks that
# turn the direction of writing.


def printable(text: str, *, characters_max: int = 0) -> str:
    """``text`` with escapes for what does not print; cut beyond ``characters_max`` characters (0: never)."""
    if characters_max and len(text) > characters_max:
        text = f"{text[:characters_max]}... ({len(text):,} characters)"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_all(value: Any) -> Any:
    """The same for every text in ``value``, which is made of lists and dicts."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_all(key): printable_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [printable_all(item) for item in value]
    return value


def without_password(url: str) -> str:
    """A URL for logs and errors: without what stands before its last @."""
    return re.sub("//.*@", "//***@", url)
