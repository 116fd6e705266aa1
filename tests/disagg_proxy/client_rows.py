"""A file of clients: two tenants, a client that looks, and engines that register."""

from __future__ import annotations

ROWS = """
[[clients]]
name = "a"
key = "key-of-a"
tenant = "first"
max_priority = 5

[[clients]]
name = "b"
key = "key-of-b"

[[clients]]
name = "watcher"
key = "key-of-watcher"
may = ["look"]

[[clients]]
name = "engines"
key = "key-of-engines"
may = ["register"]
"""


def shown(name: str) -> str:
    """The head of a request with the key of a row."""
    return f"Authorization: Bearer key-of-{name}\r\n"
