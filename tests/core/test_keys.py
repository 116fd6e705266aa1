"""The formats of docs/keys.md, byte by byte. The vectors here are the published ones."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from moonpool import _native
from moonpool.core.errors import InvalidArgument
from moonpool.core.store.keys import (
    BLOCK_NAME_BYTES,
    Item,
    Json,
    Ranges,
    block_digests,
    block_name,
    canonical_json,
    chain_seed,
    fingerprint,
    parse_block_name,
    with_items,
)

FIRST = "afbc67011b6f94a508935ad8edcbdd3c9b56c4db336f8d3847a8a1815183828f"
SECOND = "b4c73dd5107d2bcdfee5d93a843fabb558e266d33090dd8a0507afd6e6341453"
SEEDED = "18109c2abb63bd46913b37e1877a95eaddf44b07633c1858adc76d8832f550a2"
ITEM = bytes(range(32))
WITH_ITEM = "b54f5e809f548a423e63b71ee32c1d670613066efe0080828619f53df3fe8da9"
BEGUN_WITH_ITEM = "0811636e5c2de34af4f95dc59560aadd0b0f95fcc7bdce974c6e08b68881123a"
LORA_AND_SALT = "8b477ce804b162a53720a5c208266450e12f139345a5aadbaae06e4baba9124b"

IDENTITY: dict[str, Json] = {
    "model": "00" * 32,
    "revision": "0123456789abcdef0123456789abcdef01234567",
    "kv_dtype": "bfloat16",
    "quantisation": None,
    "block_tokens": 16,
    "positions": {"rope_theta": 10000.0, "rope_type": "default", "factor": 0.25},
    "form": "cpu_attn/vec/32",
}


def native(tokens: list[int], block_tokens: int, **before: bytes) -> list[bytes]:
    digests = _native.block_digests(np.array(tokens, np.uint32), block_tokens, **before)
    return [digests[start : start + 32] for start in range(0, len(digests), 32)]


def test_vectors_of_digests() -> None:
    assert [digest.hex() for digest in block_digests(range(70), 32)] == [FIRST, SECOND]
    seed = chain_seed("sql-lora", "tenant-7")
    assert [digest.hex() for digest in block_digests(range(32), 32, seed=seed)] == [SEEDED]
    assert block_digests(range(32, 64), 32, previous=bytes.fromhex(FIRST)) == [bytes.fromhex(SECOND)]


def test_vectors_of_items() -> None:
    assert [digest.hex() for digest in block_digests(range(64), 32, items=[Item(40, ITEM)])] == [
        FIRST,
        WITH_ITEM,
    ]
    assert block_digests(range(32), 32, items=[Item(0, ITEM)])[0].hex() == BEGUN_WITH_ITEM


def test_items_are_what_the_page_says() -> None:
    previous = bytes.fromhex(FIRST)
    two = [Item(8, b"z" * 32), Item(2, b"a" * 32)]
    raw = b"moonpool-items-v1" + (32).to_bytes(8, "little") + previous
    raw += (2).to_bytes(4, "little") + b"a" * 32 + (8).to_bytes(4, "little") + b"z" * 32
    before = hashlib.sha256(raw).digest()
    assert with_items(previous, two) == before
    ids = b"".join(number.to_bytes(4, "little") for number in range(32, 64))
    assert block_digests(range(32, 64), 32, previous=previous, items=two) == [
        hashlib.sha256(before + ids).digest()
    ]
    with pytest.raises(InvalidArgument, match="32 bytes, not 3"):
        with_items(previous, [Item(0, b"abc")])


def test_digest_is_what_the_page_says() -> None:
    ids = b"".join(number.to_bytes(4, "little") for number in range(32))
    assert hashlib.sha256(ids).hexdigest() == FIRST


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 32, 33, 1000])
@pytest.mark.parametrize("block_tokens", [1, 16, 32])
def test_native_digests_agree(count: int, block_tokens: int) -> None:
    tokens = [(7919 * position) % 2**32 for position in range(count)]
    seed = chain_seed(None, "salt")
    assert native(tokens, block_tokens) == block_digests(tokens, block_tokens)
    assert native(tokens, block_tokens, seed=seed) == block_digests(tokens, block_tokens, seed=seed)


def test_digests_in_two_parts_are_the_digests_in_one() -> None:
    tokens = list(range(160))
    whole = block_digests(tokens, 16)
    assert whole[:4] + block_digests(tokens[64:], 16, previous=whole[3]) == whole
    assert whole[:4] + native(tokens[64:], 16, previous=whole[3]) == whole


def test_vectors_of_seeds() -> None:
    assert chain_seed() == b""
    assert chain_seed("sql-lora", "tenant-7").hex() == LORA_AND_SALT
    seeds = [
        chain_seed("a"),
        chain_seed(None, "a"),
        chain_seed("a", "a"),
        chain_seed("aa"),
        chain_seed("", ""),
    ]
    assert len(set(seeds)) == len(seeds)


def test_vector_of_a_name() -> None:
    ranges = Ranges(group=0, first_head=1, heads=1, first_layer=0, layers=4)
    name = block_name(bytes.fromhex(FIRST), ranges)
    assert name.hex() == FIRST + "00000100010000000400"
    assert len(name) == BLOCK_NAME_BYTES
    assert parse_block_name(name) == (bytes.fromhex(FIRST), ranges)


def test_names_refuse_what_does_not_fit() -> None:
    with pytest.raises(InvalidArgument, match="32 bytes"):
        block_name(b"short", Ranges(0, 0, 1, 0, 1))
    with pytest.raises(InvalidArgument, match="65535"):
        block_name(bytes(32), Ranges(0, 65536, 1, 0, 1))
    with pytest.raises(InvalidArgument, match="42 bytes"):
        parse_block_name(bytes(41))
    with pytest.raises(InvalidArgument, match="32 bits"):
        block_digests([2**32], 1)
    with pytest.raises(InvalidArgument, match="at least 1"):
        block_digests([1], 0)


def test_vector_of_a_fingerprint() -> None:
    text = (
        '{"block_tokens":16,"form":"cpu_attn/vec/32","kv_dtype":"bfloat16","model":"' + "00" * 32 + '",'
        '"positions":{"factor":0.25,"rope_theta":10000,"rope_type":"default"},"quantisation":null,'
        '"revision":"0123456789abcdef0123456789abcdef01234567"}'
    )
    assert canonical_json(IDENTITY).decode() == text
    assert fingerprint(IDENTITY).hex() == "1cdefa67fc4adba662094108ecf7770a2df96c3b266de04ed83d3b5b34f163d4"
    assert fingerprint(IDENTITY) == hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize("field", sorted(IDENTITY))
def test_every_field_counts(field: str) -> None:
    assert fingerprint(IDENTITY | {field: "something else"}) != fingerprint(IDENTITY)


def test_fingerprint_has_exactly_its_fields() -> None:
    with pytest.raises(InvalidArgument, match="missing: form"):
        fingerprint({name: value for name, value in IDENTITY.items() if name != "form"})
    with pytest.raises(InvalidArgument, match="unknown: colour"):
        fingerprint(IDENTITY | {"colour": "blue"})


def test_canonical_json_has_one_spelling() -> None:
    assert canonical_json({"b": 1, "a": [1.0, True, None, "é"]}) == '{"a":[1,true,null,"é"],"b":1}'.encode()
    assert canonical_json({"x": 10000}) == canonical_json({"x": 10000.0})
    assert canonical_json({"x": 0.1}) != canonical_json({"x": 0.10000000000000002})
    for value in (float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="no canonical JSON"):
            canonical_json(value)
