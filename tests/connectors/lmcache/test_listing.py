"""Pages of what the pool holds."""

from __future__ import annotations

from moonpool.connectors.lmcache.listing import WALK_S, Listing, Row


class Pool:
    def __init__(self, count: int) -> None:
        self.rows = [(f"m@{i:04}", i) for i in reversed(range(count))]
        self.reads: list[str] = []
        self.now_s = 0.0
        self.listing = Listing(self.read, lambda: self.now_s)

    def read(self, about: str) -> list[Row]:
        self.reads.append(about)
        return [row for row in self.rows if row[0].startswith(about)]

    def walk(self, size: int) -> list[Row]:
        rows, more = self.listing.page("m", size, None)
        while more is not None:
            page, more = self.listing.page("m", size, more)
            assert page
            rows += page
        return rows


def test_a_walk_reads_once_whatever_its_pages() -> None:
    pool = Pool(100)
    for size in (1, 3, 7, 100, 500):
        assert pool.walk(size) == sorted(pool.rows)
    assert pool.reads == ["m"] * 5


def test_a_walk_sees_what_was_there_when_it_began_and_the_next_what_is() -> None:
    pool = Pool(10)
    first, more = pool.listing.page("m", 5, None)
    gone = pool.rows.pop(0)  # the last by name
    rest, _ = pool.listing.page("m", 10, more)
    assert [*first, *rest] == sorted([*pool.rows, gone])
    assert pool.walk(5) == sorted(pool.rows)


def test_another_walk_meanwhile_a_long_pause_or_a_restart_read_anew() -> None:
    pool = Pool(10)
    _, more = pool.listing.page("m", 4, None)
    _, other = pool.listing.page("m@000", 4, None)  # now this one is remembered
    assert pool.listing.page("m", 4, more) == (sorted(pool.rows)[4:8], "m@0007")
    assert pool.listing.page("m@000", 4, other)[0] == sorted(pool.rows)[4:8]
    pool.now_s += WALK_S + 1
    before = len(pool.reads)
    pool.rows.append(("m@0008x", 1))
    assert pool.listing.page("m@000", 100, "m@0007")[0] == [("m@0008", 8), ("m@0008x", 1), ("m@0009", 9)]
    assert len(pool.reads) == before + 1
    assert Pool(10).listing.page("m", 4, "m@0005")[0] == sorted(Pool(10).rows)[6:]


def test_nothing_there() -> None:
    pool = Pool(0)
    assert pool.listing.page("m", 5, None) == ([], None)
    assert pool.listing.page("m", 5, "m@5") == ([], None)
