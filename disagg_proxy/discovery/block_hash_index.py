"""Maps rolling block hashes to our digests, for ``POST /query_by_hash`` only.

    a rolling hash --keys()--> our own digests --PrefixIndex.match()--> holders, and where

The prefix index names blocks by our digests, from which other hashes cannot be derived. So where engines
register over HTTP, their events are processed a second time: their tokens yield the hashes of Mooncake's
indexer API and the digests for them. A hash stays known after its engine has evicted the block, because the
pool may still have it. Blocks whose content is uncertain are left out: unknown parents, images, several cache
groups.

All methods are thread safe.
"""

from __future__ import annotations

import array
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from moonpool import _native
from moonpool.core.store.keys import DIGEST_BYTES, chain_seed

NAMES_MAX = 1 << 20  # blocks of all holders together; further ones are ignored
KNOWN_MAX = 1 << 20  # known hashes; beyond it the least recently reported ones go
MADE_AT_ONCE = 32  # blocks that are evicted at a time to make room
KEY_BYTES = 16  # leading bytes of a digest: the name of a block in the prefix index

Name = int | bytes


class Space(NamedTuple):
    """Equal tokens are the same block only in equal spaces. lora, salt: "" for none."""

    block_tokens: int
    lora: str = ""
    salt: str = ""

    @property
    def seed(self) -> bytes:
        """The digest before the first block of each chain."""
        return chain_seed(self.lora or None, self.salt or None)


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[Name]
    parent_block_hash: Name | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    locator: str | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[Name]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    sent_s: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)
_event = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)


class _Block(msgspec.Struct):
    """A block of one holder. copies: number of stored copies, one event for each tier."""

    space: Space
    sequence: int
    digest: bytes
    copies: int = 0


class BlockHashIndex:
    """names_max: maximum of blocks; beyond it those of the largest holder are dropped and counted in
    ``dropped``. known_max: maximum of hashes."""

    def __init__(self, names_max: int = NAMES_MAX, known_max: int = KNOWN_MAX) -> None:
        self.dropped = 0
        self.odd = 0  # batches and events that could not be read
        self._names_max = names_max
        self._known_max = known_max
        self._count = 0
        self._lock = threading.Lock()
        self._names: dict[int, dict[Name, _Block]] = {}  # by holder
        self._known: OrderedDict[tuple[Space, int], bytes] = OrderedDict()  # keys of the index

    def __len__(self) -> int:
        return self._count

    def take(self, holder: int, payload: bytes) -> None:
        """Processes one batch of events (MessagePack) of a holder."""
        try:
            events = _batch.decode(payload).events
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.odd += 1
            return
        for raw in events:
            try:
                event = _event.decode(_as_map(raw))
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
                self.odd += 1
                continue
            with self._lock:
                if isinstance(event, _Stored):
                    try:
                        self._stored(holder, event)
                    except (TypeError, ValueError, OverflowError, IndexError):
                        self.odd += 1  # malformed ids or block size; nothing of the event was used
                elif isinstance(event, _Removed):
                    for name in event.block_hashes:
                        self._removed(holder, name)
                else:
                    self._forget(holder)

    def forget(self, holder: int) -> None:
        """Drops the holder's blocks; the meaning of hashes stays."""
        with self._lock:
            self._forget(holder)

    def keys(self, space: Space, sequences: Sequence[int]) -> bytes:
        """The index keys of these blocks, 16 bytes each, up to the first unknown hash."""
        found = []
        with self._lock:
            for sequence in sequences:
                key = self._known.get((space, sequence))
                if key is None:
                    break
                found.append(key)
        return b"".join(found)

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        if self._count != sum(map(len, self._names.values())) or len(self._known) > self._known_max:
            raise AssertionError("there are more names or hashes than were counted")
        for names in self._names.values():
            for block in names.values():
                known = self._known.get((block.space, block.sequence), block.digest)
                if block.copies < 1 or not block.digest.startswith(known):
                    raise AssertionError("a block is named that is not there, or is another")

    def _stored(self, holder: int, event: _Stored) -> None:
        if (
            event.group_idx
            or event.locator == "REMOTE"
            or (event.lora_id is not None and not event.lora_name)
        ):
            return
        salt = _salt(event)
        names = self._names.setdefault(holder, {})
        parent = None if event.parent_block_hash is None else names.get(event.parent_block_hash)
        if salt is None or event.block_size <= 0 or (parent is None and event.parent_block_hash is not None):
            return
        tokens = array.array("I", (each[0] if isinstance(each, list) else each for each in event.token_ids))
        if parent is None:
            space = Space(event.block_size, event.lora_name or "", salt)
            sequences = _native.sequence_hashes(tokens, space.block_tokens)
            digests = _native.block_digests(tokens, space.block_tokens, space.seed)
        else:
            space = parent.space
            sequences = _native.sequence_hashes(tokens, space.block_tokens, parent.sequence)
            digests = _native.block_digests(tokens, space.block_tokens, b"", parent.digest)
        if len(sequences) != len(event.block_hashes):
            return
        for at, (name, sequence) in enumerate(zip(event.block_hashes, sequences, strict=True)):
            block = names.get(name)
            if block is None:
                if self._count >= self._names_max and not self._make_room(names):
                    self.dropped += 1
                    return
                digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
                block = names[name] = _Block(space, sequence, digest)
                self._count += 1
            block.copies += 1
            self._learn(block)

    def _make_room(self, names: dict[Name, _Block]) -> bool:
        """Evicts some blocks of the largest holder, so that one engine cannot displace the others. False:
        ``names`` is the largest holder itself."""
        most = max(self._names.values(), key=len)
        if len(names) >= len(most):
            return False
        for name in list(islice(most, min(MADE_AT_ONCE, len(most) - len(names)))):
            del most[name]
            self._count -= 1
        return True

    def _learn(self, block: _Block) -> None:
        """Stores the digest of a hash as the most recent one."""
        which = block.space, block.sequence
        self._known[which] = block.digest[:KEY_BYTES]
        self._known.move_to_end(which)
        if len(self._known) > self._known_max:
            self._known.popitem(last=False)

    def _removed(self, holder: int, name: Name) -> None:
        names = self._names.get(holder, {})
        block = names.get(name)
        if block is None:
            return
        block.copies -= 1
        if not block.copies:
            del names[name]
            self._count -= 1

    def _forget(self, holder: int) -> None:
        self._count -= len(self._names.pop(holder, ()))


def _salt(event: _Stored) -> str | None:
    """The salt of an event; None: the blocks have other extra keys, such as images."""
    texts: set[str] = set()
    for extras in event.extra_keys or ():
        for each in extras or ():
            if not isinstance(each, str):
                return None
            texts.add(each)
    texts.discard(event.lora_name or "")
    if event.cache_salt:
        texts.add(event.cache_salt)
    return None if len(texts) > 1 else next(iter(texts), "")


def _as_map(raw: msgspec.Raw) -> bytes:
    """Converts the older form of events, an array of type and fields, to a map."""
    content = bytes(raw)
    if content[:1] and (0x90 <= content[0] <= 0x9F or content[0] in (0xDC, 0xDD)):
        kind, *values = msgspec.msgpack.decode(content)
        fields = (_Stored if kind == "BlockStored" else _Removed).__struct_fields__
        return msgspec.msgpack.encode({"type": kind, **dict(zip(fields, values, strict=False))})
    return content
