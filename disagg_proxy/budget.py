"""A bound on the request bodies that all clients together make the proxy hold."""

from __future__ import annotations


class BodyBudget:
    """held: bytes promised now; never more than bytes_max."""

    __slots__ = ("bytes_max", "held")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def take(self, size: int) -> bool:
        """Whether size more bytes may be held; if so they are counted until ``give``."""
        if self.held + size > self.bytes_max:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        self.held -= size

    def check_integrity(self) -> None:
        """Raises AssertionError when more was given than taken, or more taken than there is."""
        if not 0 <= self.held <= self.bytes_max:
            raise AssertionError(f"{self.held} bytes held of {self.bytes_max}")
