"""The search for the longest prefix that every group can continue, against a plain definition of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moonpool.connectors.vllm.reach import FULL, Reach
from moonpool.connectors.vllm.requests import Chain, Needs, PrefixSearch, Want
from moonpool.connectors.vllm.requests import prefix_search as searches
from moonpool.core.store.keys import BLOCK_NAME_BYTES, DIGEST_BYTES, Ranges
from tests.connectors.vllm.fakes import BLOCK_TOKENS, digest

MIXED = (FULL, Reach(window=9), Reach(chunk=20))  # of blocks of 4 tokens: all, the last 2, those of a chunk
WINDOWS = (Reach(window=10), Reach(window=4))  # the last 3, the last 1
BLOCKS = 24


def needs(reaches: tuple[Reach, ...]) -> Needs:
    """Two objects of each group."""
    columns = [Ranges(group, head, 1, 0, 2) for group in range(len(reaches)) for head in (0, 1)]
    return Needs(columns, reaches, BLOCK_TOKENS)


def chain(width: int) -> Chain:
    suffixes = b"".join(Ranges(column // 2, column % 2, 1, 0, 2).suffix() for column in range(width))
    made = Chain(BLOCK_TOKENS, suffixes, b"", digest)
    made.extend(list(range(BLOCKS * BLOCK_TOKENS)))
    return made


def first_needed(reach: Reach, blocks: int) -> int:
    """As vLLM's managers say it: tokens that are skipped, in whole blocks."""
    tokens = blocks * BLOCK_TOKENS
    if reach.window:
        return max(0, tokens - reach.window + 1) // BLOCK_TOKENS
    if reach.chunk:
        return tokens // reach.chunk * reach.chunk // BLOCK_TOKENS
    return 0


def needed(reaches: tuple[Reach, ...], blocks: int) -> set[tuple[int, int]]:
    return {
        (block, column)
        for group, reach in enumerate(reaches)
        for block in range(first_needed(reach, blocks), blocks)
        for column in (2 * group, 2 * group + 1)
    }


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


@pytest.mark.parametrize("reaches", [MIXED, WINDOWS, (Reach(window=9),), (FULL, Reach(window=1000))])
def test_the_longest_length_that_all_groups_can_continue(reaches: tuple[Reach, ...]) -> None:
    source, width = random.Random(5), 2 * len(reaches)
    one, hits = chain(width), 0
    for _ in range(300):
        has = {(block, column) for block in range(BLOCKS) for column in range(width)}
        whole = source.random() < 0.8  # a block of a group is there or not; else its objects apart
        for _ in range(source.randrange(6)):
            block, group = source.randrange(BLOCKS), source.randrange(len(reaches))
            has -= {(block, 2 * group), (block, 2 * group + (1 if whole else 0))}
        limit = source.randrange(1, BLOCKS + 1)
        longest = max(blocks for blocks in range(limit + 1) if needed(reaches, blocks) <= has)
        store, search = Store(one, has), PrefixSearch(needs(reaches), one, limit)

        pinned = store.answer(search)

        if not needed(reaches, longest):  # a chunk begins there: nothing is to be loaded
            continue
        assert search.blocks == longest
        assert pinned == needed(reaches, longest)
        hits += longest > 0
    assert hits > 100


def test_one_query_where_all_is_there_and_two_where_nothing_is() -> None:
    one = chain(4)
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
    one = chain(4)
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
    one = chain(4)
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
