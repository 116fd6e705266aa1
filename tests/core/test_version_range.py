"""How two releases take a version."""

from __future__ import annotations

from itertools import product

from moonpool.core.version_range import VersionRange

RANGES = [VersionRange(low, high) for low, high in product(range(1, 5), repeat=2) if low <= high]


def test_both_take_the_highest_in_common() -> None:
    for one, other in product(RANGES, RANGES):
        both = [version for version in range(1, 5) if version in one and version in other]
        assert one.common(other) == other.common(one) == max(both, default=None)


def test_what_a_peer_says() -> None:
    assert VersionRange.said(1, 0, 0) == VersionRange(1, 1)
    assert VersionRange.said(1, 1, 2) == VersionRange(1, 2)
    assert VersionRange(1, 2).common(VersionRange(0, 0)) is None
    assert VersionRange(1, 2).common(VersionRange(3, 2)) is None


def test_a_range_without_a_version_has_its_own_sentence() -> None:
    own = VersionRange(1, 2)
    for none in (VersionRange(3, 1), VersionRange(2, 0)):
        assert not none.valid
        assert own.common(none) is none.common(own) is None
        assert own.none_in_common("here", none, "there", "it") == (
            "there says a range of versions of it that is none"
        )


def test_the_sentence_names_both_and_the_older_one() -> None:
    one, later = VersionRange(1, 1), VersionRange(2, 3)
    expected = "here speaks version 1 of it, there versions 2 to 3, none in common; upgrade here, since only"
    assert one.none_in_common("here", later, "there", "it").startswith(expected)
    expected = "there speaks versions 2 to 3 of it, here version 1, none in common; upgrade here, since only"
    assert later.none_in_common("there", one, "here", "it").startswith(expected)
