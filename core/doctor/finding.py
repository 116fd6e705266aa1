"""``Finding``: one answer of one check."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class State(StrEnum):
    """What a check found.

    WORKS:  nothing to do.
    ABSENT: this machine does not have it, and nothing suggests that it should.
    WEAK:   it works, slower or with less than it could.
    BROKEN: something that this machine has, or that was configured, does not work.
    """

    WORKS = "works"
    ABSENT = "absent"
    WEAK = "weak"
    BROKEN = "broken"


class Finding(msgspec.Struct, frozen=True):
    """check: its name, the same for all that it may find. what: one sentence. remedy: what to do, "" where
    nothing has to be done."""

    check: str
    state: State
    what: str
    remedy: str = ""


def works(check: str, what: str) -> Finding:
    """A finding without a remedy."""
    return Finding(check, State.WORKS, what)


def absent(check: str, what: str) -> Finding:
    """A finding without a remedy."""
    return Finding(check, State.ABSENT, what)


def weak(check: str, what: str, remedy: str) -> Finding:
    """Works, but not as well as it could."""
    return Finding(check, State.WEAK, what, remedy)


def broken(check: str, what: str, remedy: str) -> Finding:
    """Does not work."""
    return Finding(check, State.BROKEN, what, remedy)
