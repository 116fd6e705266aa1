"""The names in the pool: spaces, fingerprints, block digests and the names of block objects.

Pure functions over bytes; docs/keys.md states the formats byte by byte with test vectors, and this module is
their reference. Engines compute the digests of whole prompts with ``moonpool._native.block_digests``, which
gives the same bytes.

    key  = space + name
    space = (tenant, namespace, fingerprint)      its owner, its use, the model and form of its bytes
    name = digest(32) | u16 group | u16 first head | u16 heads | u16 first layer | u16 layers      for KV
    blocks
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from moonpool.core.errors import InvalidArgument

DIGEST_BYTES = 32
BLOCK_NAME_BYTES = 42
NAMESPACE_SEED_PREFIX = b"sglang-cache-namespace-v1"
ITEMS_PREFIX = b"moonpool-items-v1"
FINGERPRINT_FIELDS = (
    "model",
    "revision",
    "kv_dtype",
    "quantisation",
    "block_tokens",
    "positions",
    "form",
)

_RANGES = struct.Struct("<5H")
_ITEM = struct.Struct(f"<I{DIGEST_BYTES}s")
_INTEGER_FLOAT_MAX = 2.0**53

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Space:
    """The space of a name: objects of two spaces are different, even under the same name.

    fingerprint: 32 bytes for KV blocks (see ``fingerprint``), b"" for plain objects.
    """

    tenant: str = "default"
    namespace: str = "default"
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Which part of a block an object holds: heads [first_head, +heads) of layers [first_layer, +layers) of a
    KV cache group. Each number fits in 16 bits."""

    group: int
    first_head: int
    heads: int
    first_layer: int
    layers: int

    def suffix(self) -> bytes:
        """The last 10 bytes of the object's name. Raises InvalidArgument for a number outside 16 bits."""
        try:
            return _RANGES.pack(self.group, self.first_head, self.heads, self.first_layer, self.layers)
        except struct.error as error:
            raise InvalidArgument(
                f"every number of {self} must be between 0 and 65535", operation="name", cause=error
            ) from error


class Item(NamedTuple):
    """An image, a sound or a video among the tokens of a prompt.

    begin: the first of its tokens.
    digest: of its content, 32 bytes.
    """

    begin: int
    digest: bytes


def block_name(digest: bytes, ranges: Ranges) -> bytes:
    """The name of one block object, 42 bytes. Raises InvalidArgument when the digest has not 32 bytes."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidArgument(f"a block digest has {DIGEST_BYTES} bytes, not {len(digest)}", operation="name")
    return digest + ranges.suffix()


def parse_block_name(name: bytes) -> tuple[bytes, Ranges]:
    """The inverse of ``block_name``. Raises InvalidArgument when the name has not 42 bytes."""
    if len(name) != BLOCK_NAME_BYTES:
        raise InvalidArgument(
            f"the name of a block object has {BLOCK_NAME_BYTES} bytes, not {len(name)}", operation="name"
        )
    return name[:DIGEST_BYTES], Ranges(*_RANGES.unpack(name[DIGEST_BYTES:]))


def chain_seed(adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    """What the first digest of a chain continues: b"" for a plain request, else 32 bytes. adapter: the name
    of a LoRA: in the pool a digest of its bytes (docs/keys.md), in the proxy's index its name.

    SHA-256("sglang-cache-namespace-v1" + part(adapter) + part(cache_salt)), where an absent part is the byte
    0 and a present one is the byte 1, its length in 8 bytes little-endian, and its UTF-8.
    """
    if adapter is None and cache_salt is None:
        return b""
    digest = hashlib.sha256(NAMESPACE_SEED_PREFIX)
    for part in (adapter, cache_salt):
        if part is None:
            digest.update(b"\x00")
        else:
            text = part.encode()
            digest.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def with_items(previous: bytes, items: Iterable[Item]) -> bytes:
    """What stands before the ids of a block in which ``items`` begin, in the place of ``previous``, 32 bytes.
    begin: of each item, counted from the first token of the block.

    SHA-256("moonpool-items-v1" + size of previous as u64 + previous + for each item, by begin and digest: its
    begin as u32 + its digest). Behind the block the chain goes on as always, so that every later digest
    depends on the items, too. Raises InvalidArgument for a digest that has not 32 bytes.
    """
    digest = hashlib.sha256(ITEMS_PREFIX + len(previous).to_bytes(8, "little") + previous)
    for item in sorted(items):
        if len(item.digest) != DIGEST_BYTES:
            raise InvalidArgument(
                f"the digest of an item has {DIGEST_BYTES} bytes, not {len(item.digest)}", operation="digest"
            )
        digest.update(_ITEM.pack(item.begin, item.digest))
    return digest.digest()


def block_digests(
    token_ids: Sequence[int],
    block_tokens: int,
    *,
    seed: bytes = b"",
    previous: bytes = b"",
    items: Sequence[Item] = (),
) -> list[bytes]:
    """The digests of the full blocks of ``token_ids``: digest(i) = SHA-256(digest(i - 1) + ids as u32
    little-endian).

    Before the first block stands ``previous`` (the digest of the block before ``token_ids``) or else
    ``seed``. A tail shorter than ``block_tokens`` has no digest. items: that begin among these tokens; see
    ``with_items``. Raises InvalidArgument for ids outside u32.
    """
    if block_tokens < 1:
        raise InvalidArgument(f"block_tokens must be at least 1, not {block_tokens}", operation="digest")
    digests: list[bytes] = []
    before = previous or seed
    block = struct.Struct(f"<{block_tokens}I")
    for start in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        try:
            ids = block.pack(*token_ids[start : start + block_tokens])
        except struct.error as error:
            raise InvalidArgument("token ids must fit in 32 bits", operation="digest", cause=error) from error
        begun = [item for item in items if start <= item.begin < start + block_tokens]
        if begun:
            before = with_items(before, [Item(item.begin - start, item.digest) for item in begun])
        before = hashlib.sha256(before + ids).digest()
        digests.append(before)
    return digests


def canonical_json(value: Json) -> bytes:
    """UTF-8 JSON that has one spelling: keys sorted by code point, no spaces, no escapes that JSON does not
    demand.

    A float without a fraction below 2**53 is written as an integer (10000.0 and 10000 mean the same); any
    other in the shortest form that reads back equal. Raises InvalidArgument for NaN, infinities and keys that
    are not strings.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(value: Json) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def fingerprint(fields: Mapping[str, Json]) -> bytes:
    """What makes two engines' KV bytes interchangeable, 32 bytes: SHA-256 of the canonical JSON of exactly
    FINGERPRINT_FIELDS. Raises InvalidArgument for a missing or an unknown field.

    model: digest of the model's config; revision: which weights (a hub commit, or a digest over the files);
    kv_dtype: type of the stored numbers; quantisation: of the weights, or None; block_tokens: tokens of a
    block; positions: rope and its scaling; form: how the bytes of one (layer, head, block) are ordered.
    """
    if set(fields) != set(FINGERPRINT_FIELDS):
        missing = sorted(set(FINGERPRINT_FIELDS) - set(fields))
        unknown = sorted(set(fields) - set(FINGERPRINT_FIELDS))
        raise InvalidArgument(
            f"a fingerprint has exactly the fields {', '.join(FINGERPRINT_FIELDS)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(unknown)}" if unknown else ""),
            operation="fingerprint",
        )
    return hashlib.sha256(canonical_json(fields)).digest()


def _plain(value: Json) -> Json:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidArgument(f"{value} has no canonical JSON", operation="fingerprint")
        return int(value) if value.is_integer() and abs(value) < _INTEGER_FLOAT_MAX else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidArgument(f"the JSON key {key!r} must be a string", operation="fingerprint")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
