"""What rolling hashes mean, told as engines tell it."""

from __future__ import annotations

import array
import random
from collections import Counter

import msgspec
import pytest

from moonpool import _native
from moonpool.core.service.kv_event_publisher import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from moonpool.core.store.keys import chain_seed
from moonpool.disagg_proxy.discovery.block_hash_index import BlockHashIndex, Space

BLOCK = 4
SPACE = Space(BLOCK)


def batch(*events: object) -> bytes:
    return msgspec.msgpack.encode(Batch(0.0, list(events), 0))  # type: ignore[arg-type]


def hashes(tokens: list[int], parent: int | None = None) -> list[int]:
    return _native.sequence_hashes(array.array("I", tokens), BLOCK, parent)


def stored(first: int, blocks: int, parent: int | None = None, **more: object) -> BlockStored:
    """Blocks that are called as their first token."""
    tokens = list(range(first, first + blocks * BLOCK))
    return BlockStored(tokens[::BLOCK], parent, tokens, BLOCK, **more)  # type: ignore[arg-type]


def test_the_hashes_are_those_of_the_api() -> None:
    """XXH3-64 of the tokens, then of parent and block; the numbers are those of the package xxhash 4.1."""
    one, two = hashes(list(range(8)))
    assert hashes([0, 1, 2, 3]) == [one]
    assert hashes([4, 5, 6, 7], one) == [two]
    assert hashes([0, 1, 2]) == []
    assert (one, two) == (11660027832386793900, 15795048925959984383)
    with pytest.raises(ValueError, match="at least one token"):
        _native.sequence_hashes(array.array("I", [1]), 0)


def keys(tokens: list[int], seed: bytes = b"") -> bytes:
    """As the prefix index calls the blocks."""
    return _native.PrefixIndex(BLOCK).keys(array.array("I", tokens), seed)


def known(made: BlockHashIndex, space: Space, chain: list[int]) -> int:
    return len(made.keys(space, chain)) // 16


def test_hashes_mean_the_blocks_of_the_index() -> None:
    made, tokens = BlockHashIndex(), list(range(16))
    chain = hashes(tokens)
    made.take(3, batch(stored(0, 2), stored(8, 2, 4, medium="CPU_PINNED")))
    assert made.keys(SPACE, chain) == keys(tokens)
    assert made.keys(SPACE, [*chain, 1]) == keys(tokens)
    assert made.keys(SPACE, [chain[0], 1, chain[1]]) == keys(tokens[:BLOCK])
    assert made.keys(Space(8), chain) == b""
    made.check_integrity()


def test_what_a_hash_means_stays_known_when_its_engine_has_dropped_the_block() -> None:
    """The name goes with the last copy, and with it what could be placed behind it."""
    made, tokens = BlockHashIndex(), list(range(12))
    made.take(3, batch(stored(0, 2), stored(0, 1, medium="CPU")))
    made.take(3, batch(BlockRemoved([0, 4], medium="GPU")))
    assert len(made) == 1
    made.take(3, batch(stored(8, 1, 4)))
    assert made.keys(SPACE, hashes(tokens)) == keys(tokens[:8])
    made.take(3, batch(BlockRemoved([0], medium="CPU"), BlockRemoved([99])))
    made.take(4, batch(stored(0, 3), AllBlocksCleared()))
    assert len(made) == 0
    assert made.keys(SPACE, hashes(tokens)) == keys(tokens)
    made.check_integrity()


def test_salt_and_lora_are_spaces_of_their_own_and_images_are_left_out() -> None:
    made, tokens = BlockHashIndex(), list(range(8))
    chain = hashes(tokens)
    made.take(0, batch(stored(0, 1, extra_keys=[("s",)]), stored(4, 1, 0)))
    assert made.keys(Space(BLOCK, "", "s"), chain) == keys(tokens, chain_seed(None, "s"))
    assert made.keys(SPACE, chain) == b""
    made.take(1, batch(stored(0, 2, lora_id=1, lora_name="l", extra_keys=[("l",), ("l",)])))
    assert made.keys(Space(BLOCK, "l"), chain) == keys(tokens, chain_seed("l", None))
    made.take(2, batch(stored(0, 2, extra_keys=[(["image", 0],), None]), stored(0, 1, lora_id=1)))
    made.take(2, batch(stored(4, 1, 77)))  # a parent that was never told
    assert made.keys(SPACE, chain) == b""
    made.check_integrity()


def test_the_older_form_is_read_and_garbage_is_counted() -> None:
    made = BlockHashIndex()
    old = [0.0, [["BlockStored", [1, 2], None, list(range(8)), BLOCK], ["BlockRemoved", [2]]]]
    made.take(0, msgspec.msgpack.encode(old))
    assert (len(made), known(made, SPACE, hashes(list(range(8))))) == (1, 2)
    for payload in (b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}, ["X"], 3, []]])):
        made.take(0, payload)
    assert made.odd == 6
    made.check_integrity()


@pytest.mark.parametrize(
    "event",
    [
        BlockStored([1], None, [-1] * BLOCK, BLOCK),
        BlockStored([1], None, [1 << 32] * BLOCK, BLOCK),
        BlockStored([1], None, [1] * BLOCK, 1 << 32),
        BlockStored([1], None, [1] * BLOCK, 1 << 63),
        *(BlockStored([1], None, [each] * BLOCK, BLOCK) for each in ("a", None, 0.5, [], [[]], {})),  # type: ignore[list-item]
    ],
)
def test_ids_that_are_none_cost_their_event_alone(event: BlockStored) -> None:
    made = BlockHashIndex()
    made.take(0, batch(event, stored(0, 1)))
    assert made.odd == 1
    assert known(made, SPACE, hashes(list(range(BLOCK)))) == 1
    made.check_integrity()


def test_one_that_tells_without_end_drives_nobody_out() -> None:
    made = BlockHashIndex(names_max=100, known_max=1000)
    made.take(0, batch(stored(0, 10)))
    made.take(1, batch(stored(1000, 500)))
    assert (len(made), made.dropped, len(made._names[0])) == (100, 1, 10)
    made.take(2, batch(stored(50_000, 20)))
    assert [len(made._names[holder]) for holder in (0, 2)] == [10, 20]
    assert len(made) <= 100
    made.check_integrity()
    made.take(0, batch(stored(70_000, 10)))
    assert len(made._names[0]) == 20
    made.check_integrity()


def test_it_is_bounded() -> None:
    made = BlockHashIndex(names_max=3, known_max=2)
    made.take(0, batch(stored(0, 2)))
    made.take(1, batch(stored(0, 4)))
    assert (len(made), made.dropped) == (3, 1)
    assert known(made, SPACE, hashes(list(range(16)))) == 2
    made.forget(1)
    made.take(1, batch(stored(100, 1)))
    assert known(made, SPACE, hashes(list(range(16)))) == 0  # the first was told longest ago
    assert known(made, SPACE, hashes(list(range(100, 104)))) == 1
    made.check_integrity()


def test_it_agrees_with_a_plain_count_whatever_is_told(rng: random.Random) -> None:
    made, tokens = BlockHashIndex(), list(range(32))
    names: dict[int, Counter[int]] = {holder: Counter() for holder in range(3)}
    told: set[int] = set()
    for _ in range(3000):
        holder, block = rng.randrange(3), rng.randrange(8)
        medium = rng.choice(("GPU", "CPU", "DISK"))
        there = names[holder]
        if rng.random() < 0.02:
            made.forget(holder)
            there.clear()
        elif rng.random() < 0.5:
            parent = (block - 1) * BLOCK if block else None
            made.take(holder, batch(stored(block * BLOCK, 1, parent, medium=medium)))
            if not block or there[block - 1]:
                there[block] += 1
                told.add(block)
        else:
            made.take(holder, batch(BlockRemoved([block * BLOCK], medium=medium)))
            there[block] = max(0, there[block] - 1)
        made.check_integrity()
        assert len(made) == sum(count > 0 for each in names.values() for count in each.values())
        leading = next((each for each in range(8) if each not in told), 8)
        assert made.keys(SPACE, hashes(tokens)) == keys(tokens[: leading * BLOCK])
