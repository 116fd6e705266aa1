"""Blocks by their rolling hashes, told as engines tell them."""

from __future__ import annotations

import array
import random
from collections import Counter

import msgspec
import pytest

from moonpool import _native
from moonpool.core.kv_events import AllBlocksCleared, Batch, BlockRemoved, BlockStored
from moonpool.disagg_proxy.discovery.sequences import Sequences, Space

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


def test_blocks_are_found_in_the_tiers_where_they_are() -> None:
    made, chain = Sequences(), hashes(list(range(16)))
    made.take(3, batch(stored(0, 4)))
    assert made.leading(SPACE, chain, 3) == (4, 4, 4)
    assert made.leading(SPACE, [*chain, 1], 3) == (4, 4, 4)
    assert made.leading(SPACE, chain, 4) == (0, 0, 0)
    assert made.leading(Space(8), chain, 3) == (0, 0, 0)
    made.take(3, batch(stored(8, 2, 4, medium="CPU_PINNED")))
    made.take(3, batch(BlockRemoved([8, 12], medium="GPU")))
    assert made.leading(SPACE, chain, 3) == (2, 4, 4)
    made.take(3, batch(BlockRemoved([8], medium="CPU"), BlockRemoved([99], medium="GPU")))
    assert made.leading(SPACE, chain, 3) == (2, 2, 2)
    made.check_integrity()
    made.take(3, batch(AllBlocksCleared()))
    assert (made.leading(SPACE, chain, 3), len(made)) == ((0, 0, 0), 0)
    made.check_integrity()


def test_salt_and_lora_are_spaces_of_their_own_and_images_are_left_out() -> None:
    made, chain = Sequences(), hashes(list(range(8)))
    made.take(0, batch(stored(0, 1, extra_keys=[("s",)]), stored(4, 1, 0)))
    assert made.leading(Space(BLOCK, "", "s"), chain, 0) == (2, 2, 2)
    assert made.leading(SPACE, chain, 0) == (0, 0, 0)
    made.take(1, batch(stored(0, 2, lora_id=1, lora_name="l", extra_keys=[("l",), ("l",)])))
    assert made.leading(Space(BLOCK, "l"), chain, 1) == (2, 2, 2)
    made.take(2, batch(stored(0, 2, extra_keys=[(["image", 0],), None]), stored(0, 1, lora_id=1)))
    made.take(2, batch(stored(4, 1, 77)))  # a parent that was never told
    assert made.leading(SPACE, chain, 2) == (0, 0, 0)
    made.check_integrity()


def test_the_older_form_is_read_and_garbage_is_counted() -> None:
    made = Sequences()
    old = [0.0, [["BlockStored", [1, 2], None, list(range(8)), BLOCK], ["BlockRemoved", [2]]]]
    made.take(0, msgspec.msgpack.encode(old))
    assert made.leading(SPACE, hashes(list(range(8))), 0) == (1, 1, 1)
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
    made = Sequences()
    made.take(0, batch(event, stored(0, 1)))
    assert made.odd == 1
    assert made.leading(SPACE, hashes(list(range(BLOCK))), 0) == (1, 1, 1)
    made.check_integrity()


def test_it_is_bounded() -> None:
    made = Sequences(names_max=3)
    made.take(0, batch(stored(0, 2)))
    made.take(1, batch(stored(0, 4)))
    assert (len(made), made.dropped) == (3, 1)
    assert made.leading(SPACE, hashes(list(range(16))), 1) == (1, 1, 1)
    made.check_integrity()


def test_it_agrees_with_a_plain_count_whatever_is_told(rng: random.Random) -> None:
    made, chain = Sequences(), hashes(list(range(32)))
    plain: dict[int, Counter[tuple[int, int]]] = {holder: Counter() for holder in range(3)}
    media = ("GPU", "CPU", "DISK")
    for _ in range(3000):
        holder, tier, block = rng.randrange(3), rng.randrange(3), rng.randrange(8)
        known = plain[holder]
        there = any(known[block - 1, each] for each in range(3))
        if rng.random() < 0.02:
            made.forget(holder)
            known.clear()
        elif rng.random() < 0.5:
            parent = (block - 1) * BLOCK if block else None
            made.take(holder, batch(stored(block * BLOCK, 1, parent, medium=media[tier])))
            known[block, tier] += not block or there
        else:
            made.take(holder, batch(BlockRemoved([block * BLOCK], medium=media[tier])))
            known[block, tier] = max(0, known[block, tier] - 1)
        made.check_integrity()
        expected = []
        for tiers in (1, 2, 3):
            held = [any(known[each, low] for low in range(tiers)) for each in range(8)]
            expected.append(held.index(False) if False in held else 8)
        assert made.leading(SPACE, chain, holder) == tuple(expected)
