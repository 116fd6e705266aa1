"""Values with leases, by a clock of the test; and the page over them."""

from __future__ import annotations

import random

import pytest

from moonpool.core.transfer.metadata import leased_values
from moonpool.core.transfer.metadata.leased_values import Full, Held, LeasedValues, page_of


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def values(clock: Clock) -> LeasedValues:
    return LeasedValues(10_000, clock)


def test_a_lease_is_one_owner_s_until_it_ends(values: LeasedValues, clock: Clock) -> None:
    values.put("k", b"a", "A", 8.0)
    clock.now_s += 7.5
    with pytest.raises(Held) as held:
        values.put("k", b"b", "B", 8.0)
    assert (held.value.value, held.value.left_s) == (b"a", 0.5)
    with pytest.raises(Held):
        values.drop("k", "B")
    values.put("k", b"a2", "A", 8.0)  # renewed
    clock.now_s += 7.5
    assert values.get("k") == b"a2"
    clock.now_s += 0.5
    assert values.get("k") is None
    values.put("k", b"b", "B", 8.0)
    assert values.get("k") == b"b"
    values.put("k", b"c", "C", 8.0, dead="B")
    assert values.get("k") == b"c"
    assert values.drop("k", "C")
    assert not values.drop("k", "C")


def test_values_without_an_owner_are_as_they_were(values: LeasedValues, clock: Clock) -> None:
    values.put("k", b"a")
    clock.now_s += 1e9
    assert values.get("k") == b"a"
    values.put("k", b"b")
    values.put("k", b"c", "A", 8.0)  # over what no owner holds
    values.put("k", b"d")  # and back: such writers know no owners
    assert values.drop("k")


def test_the_room_of_dead_entries_is_given_back(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    monkeypatch.setattr(leased_values, "ENTRY_BYTES", 30)
    values = LeasedValues(1000, clock)
    living: dict[str, tuple[bytes, float]] = {}
    for _ in range(5000):
        key, size, lease_s = rng.choice("abcdefghijklmno"), rng.randrange(60), rng.choice([1.0, 8.0, 1e9])
        living = {name: row for name, row in living.items() if row[1] > clock.now_s}
        try:
            values.put(key, bytes(size), "A", lease_s)
            living[key] = bytes(size), clock.now_s + lease_s
        except Full:
            used = sum(31 + len(row[0]) for name, row in living.items() if name != key)
            assert used + 31 + size > 1000 - 15 * 91  # nothing is refused while there is much room
            for name in living:
                if rng.random() < 0.5:
                    assert values.drop(name, "A")
                    living.pop(name)
                    break
        clock.now_s += rng.random()
        for name in "abcdefghijklmno":
            expected = living.get(name, (None, 0.0))
            assert values.get(name) == (expected[0] if expected[1] > clock.now_s else None)
    clock.now_s += 2e9
    values.put("z", b"")
    assert len(values) == 1
    values.put("z", bytes(1000 - 31))  # all of it is free again


@pytest.mark.parametrize(
    ("method", "query", "status"),
    [
        ("POST", {"key": "k"}, 405),
        ("GET", {}, 400),
        ("GET", {"key": "k"}, 404),
        ("DELETE", {"key": "k", "owner": "A"}, 404),
        ("PUT", {"key": "k", "lease_s": "8"}, 400),
        ("PUT", {"key": "k", "owner": "A", "lease_s": "nan"}, 400),
        ("PUT", {"key": "k", "owner": "A", "lease_s": "1e9"}, 400),
        ("PUT", {"key": "k", "owner": "A", "lease_s": "eight"}, 400),
        ("PUT", {"key": "k", "owner": "A", "lease_s": "-1"}, 400),
        ("PUT", {"key": "k", "owner": "A", "lease_s": "8"}, 200),
        ("PUT", {"key": "k"}, 200),
    ],
)
def test_the_page(values: LeasedValues, method: str, query: dict[str, str], status: int) -> None:
    page = page_of(values, method, query, b"value")
    assert page.status == status
    assert ("Moonpool-Lease" in page.headers) == (status == 200 and "lease_s" in query)


def test_the_page_tells_of_the_holder_and_of_no_room(values: LeasedValues) -> None:
    asked = {"key": "k", "owner": "A", "lease_s": "8"}
    assert page_of(values, "PUT", asked, b"a").status == 200
    page = page_of(values, "PUT", asked | {"owner": "B"}, b"b")
    assert (page.status, page.body, page.headers["Moonpool-Lease-Left"]) == (409, b"a", "8.000")
    assert page_of(values, "DELETE", {"key": "k", "owner": "B"}, b"").status == 409
    assert page_of(values, "PUT", {"key": "l"}, bytes(10_000)).status == 507
    assert page_of(values, "DELETE", asked, b"").status == 200
