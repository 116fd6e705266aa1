"""The batches of docs/events.md, byte for byte."""

from __future__ import annotations

import array
import re
from pathlib import Path

from moonpool import _native
from tests.disagg_proxy.events.beds import BLOCK

PAGE = Path(__file__).resolve().parents[3] / "docs" / "events.md"


def batches() -> list[bytes]:
    found = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [bytes.fromhex("".join(block.split())) for block in found]


def device_blocks(index: _native.PrefixIndex, tokens: int) -> int:
    match = index.match(index.keys(array.array("I", range(tokens))))
    return memoryview(match.device).cast("I")[0] if match.device else 0


def test_an_engines_batch_in_both_forms() -> None:
    as_maps, as_arrays, _ = batches()
    index = _native.PrefixIndex(BLOCK)
    result = index.ingest(0, as_maps)
    assert (result.stored, result.removed, result.unknown, result.sent_s) == (2, 1, 0, 1.0)
    assert device_blocks(index, 8) == 1
    assert _native.kv_event_block_tokens(as_maps) == _native.kv_event_block_tokens(as_arrays) == BLOCK
    result = index.ingest(0, as_arrays)
    assert (result.stored, result.removed, result.cleared) == (2, 1, 1)
    assert device_blocks(index, 8) == 0


def test_a_nodes_batch() -> None:
    index = _native.PrefixIndex(32)
    assert index.ingest(0, batches()[2], pool=True).stored == 1
    assert index.match(index.keys(array.array("I", range(32)))).pool_host == 1
    assert device_blocks(index, 32) == 0
