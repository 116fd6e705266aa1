"""Listing and removing by prefix and by pattern."""

from __future__ import annotations

import pytest

from moonpool import AsyncStore, Store
from moonpool.core.errors import InvalidArgument
from moonpool.core.store.key_patterns import literal_prefix, matcher


@pytest.mark.parametrize(
    ("pattern", "prefix", "yes", "no"),
    [
        (b"kv/*", b"kv/", [b"kv/", b"kv/a/b", b"kv/\n\xff"], [b"KV/a", b"kv", b"xkv/"]),
        (b"a?c", b"a", [b"abc", b"a\x00c"], [b"ac", b"abbc"]),
        (b"[ab]\xff*", b"", [b"a\xff", b"b\xffz"], [b"c\xff", b"a"]),
        (b"plain.txt", b"plain.txt", [b"plain.txt"], [b"plainxtxt"]),
    ],
)
def test_what_a_pattern_matches(pattern: bytes, prefix: bytes, yes: list[bytes], no: list[bytes]) -> None:
    assert literal_prefix(pattern) == prefix
    match = matcher(pattern).fullmatch
    assert [key for key in yes + no if match(key)] == yes


def test_list_and_remove_by_pattern() -> None:
    with Store(embedded="4MiB") as store:
        store.put([f"a{i}" for i in range(30)] + ["b1"], [b"x"] * 31)
        assert len(store.list(pattern="a?")) == 10
        assert len(store.list(pattern="a*", limit=7)) == 7
        assert store.list(pattern="c*") == []
        with pytest.raises(InvalidArgument, match="either"):
            store.list("a", pattern="a*")
        assert store.remove_all(pattern="a1*") == 11
        assert store.remove_all("a") == 19
        assert store.remove_all("a") == 0
        assert [entry.key for entry in store.list()] == [b"b1"]


async def _removed_async() -> tuple[int, int]:
    async with AsyncStore(embedded="4MiB") as store:
        await store.put(["a1", "a2", "b"], [b"x"] * 3)
        return await store.remove_all(pattern="a*"), len(await store.list(pattern="*"))


def test_the_same_for_asyncio() -> None:
    import asyncio

    assert asyncio.run(_removed_async()) == (2, 1)
