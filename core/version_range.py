"""Versions of a format that a process speaks, and how two processes take one of them: the highest in common,
so that adjacent releases work together in any order. csrc/wire/version_range.hpp has the same for C++."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionRange:
    """lowest, highest: both included, at least 1."""

    lowest: int
    highest: int

    @property
    def valid(self) -> bool:
        """Whether there is a version in it. What a peer says may be none."""
        return self.lowest <= self.highest

    @classmethod
    def said(cls, version: int, lowest: int, highest: int) -> VersionRange:
        """What a peer says. lowest, highest: 0 of a release before ranges, which speaks ``version`` alone."""
        if lowest == highest == 0:
            return cls(version, version)
        return cls(lowest, highest)

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        if self.lowest == self.highest:
            return f"version {self.lowest}"
        return f"versions {self.lowest} to {self.highest}"

    def common(self, other: VersionRange) -> int | None:
        """The highest that both speak; None: there is none."""
        if not (self.valid and other.valid):
            return None
        highest = min(self.highest, other.highest)
        return highest if highest in self and highest in other else None

    def none_in_common(self, name: str, peer: VersionRange, peer_name: str, what: str) -> str:
        """The sentence for it, about ``what``; ``name`` speaks these versions. The older side is to be
        upgraded."""
        if not peer.valid:
            return f"{peer_name} says a range of versions of {what} that is none"
        older = name if self.highest < peer.highest else peer_name
        return (
            f"{name} speaks {self} of {what}, {peer_name} {peer}, none in common; upgrade {older}, since "
            f"only adjacent releases work together"
        )
