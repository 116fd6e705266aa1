"""Where a prompt lies, by indexes of several block sizes at once."""

from __future__ import annotations

import array
import time

import msgspec

from moonpool.core.service.kv_event_publisher import Batch, BlockStored
from moonpool.disagg_proxy.dispatch.prefix_locator import PrefixLocator
from moonpool.disagg_proxy.events.prefix_indexes import PrefixIndexes

IDS = list(range(256))


def told(indexes: PrefixIndexes, place: int, tokens: int, block_tokens: int, *, pool: bool = False) -> None:
    index = indexes.obtain(block_tokens)
    assert index is not None
    if pool:
        keys = index.keys(array.array("I", IDS[:tokens]))
        index.apply(place, 1, keys)
        return
    names = list(range(tokens // block_tokens))
    event = BlockStored(names, None, IDS[:tokens], block_tokens, medium="GPU")
    index.ingest(place, msgspec.msgpack.encode(Batch(time.time(), [event])))


def test_of_several_indexes_the_longest_match_counts_for_each_engine() -> None:
    indexes = PrefixIndexes(blocks_max=1000)
    locator = PrefixLocator(indexes)
    for engine in range(4):
        locator.join(engine)
    ids = array.array("I", IDS).tobytes()
    assert list(locator.find(ids, b"").own) == [0, 0, 0, 0]  # nobody has told anything yet
    told(indexes, 0, 64, 16)
    assert list(locator.find(ids, b"").own) == [64, 0, 0, 0]
    told(indexes, 1, 192, 64)
    told(indexes, 0, 128, 64)
    told(indexes, 2, 16, 16)
    told(indexes, 6, 224, 16, pool=True)  # a node's place is behind those of the engines
    place = locator.find(ids, b"")
    assert list(place.own) == [128, 192, 16, 0]
    assert place.pool == 224
    locator.sent(place, 3, now_s=0.0)
    assert list(locator.find(ids, b"").own) == [128, 192, 16, 256]


def test_an_engine_is_known_by_its_events_while_they_are_heard_and_by_what_was_sent_else() -> None:
    """Newcomer 4: a stream that said nothing was worse than none."""
    indexes = PrefixIndexes(blocks_max=1000)
    locator = PrefixLocator(indexes)
    for engine in range(2):
        locator.join(engine)
    ids = array.array("I", IDS).tobytes()

    def sent(engine: int) -> list[int]:
        locator.sent(locator.find(ids, b""), engine, now_s=5.0)
        return list(locator.find(ids, b"").own)

    assert sent(0) == [256, 0]
    assert locator.unheard_since(0) is None  # short prompts make no blocks, and so no events
    long = array.array("I", range(1000)).tobytes()
    locator.sent(locator.find(long, b""), 0, now_s=5.0)
    assert (locator.unheard_since(0), locator.unheard_since(1)) == (5.0, None)
    told(indexes, 0, 64, 16)
    of_16 = indexes.obtain(16)
    assert of_16 is not None
    locator.hears(0, of_16)
    assert list(locator.find(ids, b"").own) == [64, 0]  # what was guessed counts no more
    assert locator.unheard_since(0) is None
    told(indexes, 1, 32, 16)
    locator.hears(1, of_16)
    assert [index.block_tokens for index in indexes.all] == [16]  # no block size is guessed
    of_16.forget(0)
    locator.hears(0, None)
    assert list(locator.find(ids, b"").own) == [0, 32]
    assert sent(0) == [256, 32]
    locator.leave(0)
    assert [index.block_tokens for index in indexes.all] == [16]


def test_an_index_of_guesses_that_a_stream_comes_to_follow_stays() -> None:
    indexes = PrefixIndexes(blocks_max=1000)
    locator = PrefixLocator(indexes)
    locator.join(0)
    wanting = indexes.wanting
    of_64 = indexes.obtain(64)
    locator.hears(0, of_64)
    assert list(indexes.all) == [of_64]
    locator.hears(0, None)
    assert list(indexes.all) == [of_64]
    assert indexes.wanting == wanting
    indexes.obtain(32, guessed=True)
    assert indexes.wanting == wanting
    indexes.obtain(32)
    assert indexes.wanting == wanting + 1
