"""One look of an election, where etcd fails in the middle; tests/cluster/test_election.py has real ones."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moonpool.core.service.election import LEASE_S, Ballot, Election, Read, Record, Seat

ME, OTHER = Seat("me", "10.0.0.1:7700"), Seat("other", "10.0.0.2:7700")


class Owner:
    """An owner whose standby is lost."""

    role = "owner"
    hears_owner = False

    def __init__(self) -> None:
        self.valid_s: float | None = None
        self.elected: list[str | None] = []
        self.alone = False

    def gives_to(self) -> str:
        return ""

    def standby(self) -> tuple[str, bool, bool, float]:
        return "", False, False, 0.0

    def set_elected_standby(self, name: str | None) -> bool:
        self.elected.append(name)
        return True

    def set_valid_for(self, seconds: float | None) -> None:
        self.valid_s = seconds

    def take_over(self) -> bool:
        self.alone = True
        return True


class LostAnswer(Ballot):
    """The key is written, and its writer hears nothing of it."""

    lease_s = LEASE_S
    me = ME

    def __init__(self) -> None:
        self.record = Record(3, ME, OTHER)

    def read(self) -> Read:
        return Read(self.record, 7)

    def write(self, read: Read, record: Record) -> bool:
        self.record = record
        raise OSError("no answer")


def test_an_owner_depends_on_its_lease_before_the_key_may_name_no_standby() -> None:
    owner, ballot = Owner(), LostAnswer()
    election = Election(ballot, cast("Any", owner))
    with pytest.raises(OSError, match="no answer"):
        election.look()
    assert ballot.record.standby is None
    assert owner.valid_s is not None
    assert owner.valid_s < LEASE_S
    assert owner.elected == [OTHER.name]
    assert not owner.alone
