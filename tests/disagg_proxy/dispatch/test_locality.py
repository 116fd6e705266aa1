"""Where a prompt lies, by indexes of several block sizes at once."""

from __future__ import annotations

import array
import time

import msgspec

from moonpool.core.kv_events import Batch, BlockStored
from moonpool.disagg_proxy.dispatch.locality import Locality
from moonpool.disagg_proxy.events.indexes import MODEL_ANY, Indexes

IDS = list(range(256))


def told(indexes: Indexes, place: int, tokens: int, block_tokens: int, *, pool: bool = False) -> None:
    index = indexes.obtain(MODEL_ANY, block_tokens)
    assert index is not None
    if pool:
        keys = index.keys(array.array("I", IDS[:tokens]))
        index.apply(place, 1, keys)
        return
    names = list(range(tokens // block_tokens))
    event = BlockStored(names, None, IDS[:tokens], block_tokens, medium="GPU")
    index.ingest(place, msgspec.msgpack.encode(Batch(time.time(), [event])))


def test_of_several_indexes_the_longest_match_counts_for_each_engine() -> None:
    indexes = Indexes(blocks_max=1000)
    locality = Locality(indexes)
    for engine in range(4):
        locality.join(engine, told=True)
    ids = array.array("I", IDS).tobytes()
    assert list(locality.find(ids, b"").own) == []  # nobody has told anything yet
    told(indexes, 0, 64, 16)
    assert list(locality.find(ids, b"").own) == [64, 0, 0, 0]
    told(indexes, 1, 192, 64)
    told(indexes, 0, 128, 64)
    told(indexes, 2, 16, 16)
    told(indexes, 6, 224, 16, pool=True)  # a node's place is behind those of the engines
    place = locality.find(ids, b"")
    assert list(place.own) == [128, 192, 16, 0]
    assert place.pool == 224
    locality.sent(place, 3, now_s=0.0)
    assert list(locality.find(ids, b"").own) == [128, 192, 16, 256]
