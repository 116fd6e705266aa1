"""The search for the longest prefix that every group can continue, against a plain definition of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moonpool.connectors.vllm.group_blocks import objects_of
from moonpool.connectors.vllm.reach import FULL, Reach
from moonpool.connectors.vllm.requests import Chain, Needs, PrefixSearch, Want
from moonpool.connectors.vllm.requests import prefix_search as searches
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, Ranges, block_digests, block_name
from tests.connectors.vllm.fakes import BLOCK_TOKENS, digest

MIXED = (FULL, Reach(window=9), Reach(chunk=20))  # of blocks of 4 tokens: all, the last 2, those of a chunk
WINDOWS = (Reach(window=10), Reach(window=4))  # the last 3, the last 1
BLOCKS = 24


def columns_of(groups: int) -> list[Ranges]:
    """Two of each group."""
    return [Ranges(group, head, 1, 0, 2) for group in range(groups) for head in (0, 1)]


def needs(reaches: tuple[Reach, ...], splits: tuple[int, ...] = ()) -> Needs:
    return Needs(columns_of(len(reaches)), reaches, BLOCK_TOKENS, splits)


def chain(groups: int, splits: tuple[int, ...] = ()) -> Chain:
    columns = columns_of(groups)
    objects = objects_of(columns, splits)
    suffixes = b"".join(columns[place].suffix() for place, _, _ in objects)
    made = Chain(BLOCK_TOKENS, suffixes, b"", digest, parts=[(part, count) for _, part, count in objects])
    made.extend(list(range(BLOCKS * BLOCK_TOKENS)))
    return made


def first_needed(reach: Reach, tokens: int, block_tokens: int) -> int:
    """As vLLM's managers say it: tokens that are skipped, in whole blocks."""
    if reach.window:
        return max(0, tokens - reach.window + 1) // block_tokens
    if reach.chunk:
        return tokens // reach.chunk * reach.chunk // block_tokens
    return 0


def needed(reaches: tuple[Reach, ...], blocks: int, splits: tuple[int, ...] = ()) -> set[tuple[int, int]]:
    """(block, place of the object in it) of what a prefix of so many blocks needs."""
    result = set()
    for place, (column, part, count) in enumerate(objects_of(columns_of(len(reaches)), splits)):
        first = first_needed(reaches[column // 2], blocks * BLOCK_TOKENS, BLOCK_TOKENS // count)
        result |= {(block, place) for block in range(blocks) if block * count + part >= first}
    return result


def split(names: bytes) -> list[bytes]:
    return [names[at : at + BLOCK_NAME_BYTES] for at in range(0, len(names), BLOCK_NAME_BYTES)]


class Store:
    """What a pool has of a chain, and how it answers."""

    def __init__(self, one: Chain, has: set[tuple[int, int]]) -> None:
        self.names = {
            one.names_at(np.array([block]), np.array([column])): (block, column)
            for block in range(BLOCKS)
            for column in range(one.width)
        }
        self.has = has
        self.queries = 0

    def answer(self, search: PrefixSearch) -> set[tuple[int, int]]:
        """Answers until the search is over. What the hit pinned."""
        while search.want is not Want.NOTHING:
            self.queries += 1
            if search.want is Want.PRESENCE:
                search.present(bytes(self.names[name] in self.has for name in search.presence_names()))
                continue
            asked = [self.names[name] for name in split(search.names())]
            found = next((at for at, each in enumerate(asked) if each not in self.has), len(asked))
            if search.found(found):
                return set(asked)
        return set()


@pytest.mark.parametrize(
    ("reaches", "splits"),
    [
        *((MIXED, ()), (WINDOWS, ()), ((Reach(window=9),), ()), ((FULL, Reach(window=1000)), ())),
        *((MIXED, (1, 2, 4)), (MIXED, (4, 1, 2)), (WINDOWS, (4, 1)), ((FULL, FULL), (2, 1))),
    ],
)
def test_the_longest_length_that_all_groups_can_continue(
    reaches: tuple[Reach, ...], splits: tuple[int, ...]
) -> None:
    source = random.Random(5)
    one, hits = chain(len(reaches), splits), 0
    objects = objects_of(columns_of(len(reaches)), splits)
    width = one.width
    for _ in range(300):
        has = {(block, column) for block in range(BLOCKS) for column in range(width)}
        whole = source.random() < 0.8  # a block of a group is there or not; else its objects apart
        for _ in range(source.randrange(6)):
            block, group = source.randrange(BLOCKS), source.randrange(len(reaches))
            part = source.randrange(splits[group] if splits else 1)
            heads = (0, 1) if whole else (source.randrange(2),)
            has -= {(block, objects.index((2 * group + head, part, _count(splits, group)))) for head in heads}
        limit = source.randrange(1, BLOCKS + 1)
        longest = max(blocks for blocks in range(limit + 1) if needed(reaches, blocks, splits) <= has)
        store, search = Store(one, has), PrefixSearch(needs(reaches, splits), one, limit)

        pinned = store.answer(search)

        if not needed(reaches, longest, splits):  # a chunk begins there: nothing is to be loaded
            continue
        assert search.blocks == longest
        assert pinned == needed(reaches, longest, splits)
        hits += longest > 0
    assert hits > 100


def _count(splits: tuple[int, ...], group: int) -> int:
    return splits[group] if splits else 1


def test_one_query_where_all_is_there_and_two_where_nothing_is() -> None:
    one = chain(2)
    everything = {(block, column) for block in range(BLOCKS) for column in range(4)}
    store = Store(one, everything)
    store.answer(PrefixSearch(needs(MIXED[:2]), one, BLOCKS))
    assert store.queries == 1
    store = Store(one, set())
    store.answer(PrefixSearch(needs(MIXED[:2]), one, BLOCKS))
    assert store.queries == 1
    store = Store(one, set())
    store.answer(PrefixSearch(needs(WINDOWS), one, BLOCKS))
    assert store.queries == 2


def test_a_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object stands for its block, and each time another object of the block is not there."""
    one = chain(2)
    has = {(block, column) for block in range(BLOCKS) for column in (0, 1, 2)}
    store, search = Store(one, has), PrefixSearch(needs(MIXED[:2]), one, BLOCKS)
    assert store.answer(search) == set()
    assert search.blocks == 0
    assert store.queries == searches.QUERIES_MAX + 1
    monkeypatch.setattr(searches, "PRESENCE_OBJECTS_MAX", 8)  # what is farther back counts as not there
    has = {(block, column) for block in range(BLOCKS) for column in range(4) if block < 12 or column < 2}
    search = PrefixSearch(needs(MIXED[:2]), one, BLOCKS)
    Store(one, has).answer(search)
    assert search.blocks == 0


def test_descriptors_stand_where_their_blocks_do() -> None:
    one = chain(2)
    search = PrefixSearch(needs(MIXED[:2]), one, 6)
    count = len(split(search.names()))
    assert search.found(count)
    table = np.frombuffer(
        search.descriptors(b"".join(bytes([at + 1] * 32) for at in range(count))), np.uint8
    ).reshape(6, 4, 32)
    assert table[:, :2, 0].reshape(-1).tolist() == list(range(1, 13))
    assert table[:, 2:, 0].reshape(-1).tolist() == [0] * 8 + [15, 16, 13, 14]


def test_roots_have_no_parents() -> None:
    suffixes = b"".join(Ranges(group, 0, 1, 0, 2).suffix() for group in (0, 1))
    one = Chain(BLOCK_TOKENS, suffixes, b"", digest, [1])
    one.extend(list(range(3 * BLOCK_TOKENS)))
    nothing = bytes(BLOCK_NAME_BYTES)
    first, second, third = (one.names(block, block + 1)[:BLOCK_NAME_BYTES] for block in range(3))
    assert one.parents(0, 2) == nothing + nothing + first + nothing
    assert one.parents(1, 3) == first + nothing + second + nothing
    assert third[:DIGEST_BYTES] == one.names(2, 3)[BLOCK_NAME_BYTES:][:DIGEST_BYTES]


def test_the_object_of_a_part_is_named_by_the_tokens_up_to_its_end() -> None:
    """Of groups with blocks of 4, 2 and 1 tokens."""
    one, splits = chain(3, (1, 2, 4)), (1, 2, 4)
    digests = block_digests(list(range(BLOCKS * BLOCK_TOKENS)), 1)
    columns = columns_of(3)
    expected, parents = [], []
    for block in (1, 2):
        for place, part, count in objects_of(columns, splits):
            size = BLOCK_TOKENS // count
            end = block * BLOCK_TOKENS + (part + 1) * size
            expected.append(block_name(digests[end - 1], columns[place]))
            parents.append(block_name(digests[end - size - 1], columns[place]))
    assert split(one.names(1, 3)) == expected
    assert split(one.parents(1, 3)) == parents
    first = split(one.parents(0, 1))
    assert [parent == bytes(BLOCK_NAME_BYTES) for parent in first] == [
        part == 0 for _, part, _ in objects_of(columns, splits)
    ]
