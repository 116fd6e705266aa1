"""Who holds which blocks by their rolling hashes, for ``POST /query_by_hash`` alone.

The prefix index knows blocks by our own digests, from which no hash of another kind can be had. So where
engines register over HTTP their events are looked at a second time: tokens make the hashes of Mooncake's
indexer API, and an engine's own name of a block is kept to know what is removed. What cannot be placed for
certain is left out: a parent that was never told, images, several cache groups. What was just sent to an
engine is not counted either.

Any thread may call anything.
"""

from __future__ import annotations

import array
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from moonpool import _native

NAMES_MAX = 1 << 20  # blocks of all holders together; beyond it further ones are not known

Name = int | bytes


class Space(NamedTuple):
    """What must be equal for equal tokens to be the same block. lora, salt: "" for none."""

    block_tokens: int
    lora: str = ""
    salt: str = ""


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
    locality: str | None = None
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
    """A block of a holder. copies: by tier, for an engine tells of each."""

    space: Space
    sequence: int
    copies: list[int]


class Sequences:
    """names_max: beyond it blocks are not taken, and ``dropped`` counts them."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self.dropped = 0
        self.odd = 0  # batches and events that could not be read
        self._names_max = names_max
        self._count = 0
        self._lock = threading.Lock()
        self._names: dict[int, dict[Name, _Block]] = {}  # by holder
        self._held: dict[tuple[Space, int], dict[int, list[int]]] = {}  # copies by tier, by holder

    def __len__(self) -> int:
        return self._count

    def take(self, holder: int, payload: bytes) -> None:
        """One batch of events of a holder."""
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
                        self.odd += 1  # ids that are none, or blocks of any size; nothing of it was taken
                elif isinstance(event, _Removed):
                    for name in event.block_hashes:
                        self._removed(holder, name, _tier(event.medium))
                else:
                    self._forget(holder)

    def forget(self, holder: int) -> None:
        """All that it told is void."""
        with self._lock:
            self._forget(holder)

    def leading(self, space: Space, sequences: Sequence[int], holder: int) -> tuple[int, int, int]:
        """Leading blocks of a holder: on the device, there or in the host's memory, anywhere."""
        with self._lock:
            rows: list[list[int]] = []
            for sequence in sequences:
                copies = self._held.get((space, sequence), {}).get(holder)
                if copies is None:
                    break
                rows.append(list(copies))
        device, host, anywhere = (
            next((at for at, copies in enumerate(rows) if not any(copies[:tiers])), len(rows))
            for tiers in (1, 2, 3)
        )
        return device, host, anywhere

    def check_integrity(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        held: dict[tuple[Space, int], dict[int, list[int]]] = {}
        for holder, names in self._names.items():
            for block in names.values():
                row = held.setdefault((block.space, block.sequence), {}).setdefault(holder, [0, 0, 0])
                for tier, count in enumerate(block.copies):
                    row[tier] += count
        if held != self._held or self._count != sum(map(len, self._names.values())):
            raise AssertionError("what is held is not what was told")

    def _stored(self, holder: int, event: _Stored) -> None:
        if (
            event.group_idx
            or event.locality == "REMOTE"
            or (event.lora_id is not None and not event.lora_name)
        ):
            return
        salt = _salt(event)
        names = self._names.setdefault(holder, {})
        parent = None if event.parent_block_hash is None else names.get(event.parent_block_hash)
        if salt is None or event.block_size <= 0 or (parent is None and event.parent_block_hash is not None):
            return
        space = Space(event.block_size, event.lora_name or "", salt)
        if parent is not None:
            space = parent.space
        tokens = array.array("I", (each[0] if isinstance(each, list) else each for each in event.token_ids))
        sequences = _native.sequence_hashes(
            tokens, event.block_size, None if parent is None else parent.sequence
        )
        if len(sequences) != len(event.block_hashes):
            return
        tier = _tier(event.medium)
        for name, sequence in zip(event.block_hashes, sequences, strict=True):
            block = names.get(name)
            if block is None:
                if self._count >= self._names_max:
                    self.dropped += 1
                    return
                block = names[name] = _Block(space, sequence, [0, 0, 0])
                self._count += 1
            self._count_copies(holder, block, tier, 1)

    def _removed(self, holder: int, name: Name, tier: int) -> None:
        names = self._names.get(holder, {})
        block = names.get(name)
        if block is None or not block.copies[tier]:
            return
        self._count_copies(holder, block, tier, -1)
        if not any(block.copies):
            del names[name]
            self._count -= 1

    def _count_copies(self, holder: int, block: _Block, tier: int, more: int) -> None:
        key = block.space, block.sequence
        row = self._held.setdefault(key, {})
        copies = row.setdefault(holder, [0, 0, 0])
        block.copies[tier] += more
        copies[tier] += more
        if not any(copies):
            del row[holder]
            if not row:
                del self._held[key]

    def _forget(self, holder: int) -> None:
        for block in self._names.pop(holder, {}).values():
            self._count -= 1
            for tier, count in enumerate(block.copies):
                if count:
                    self._count_copies(holder, block, tier, -count)


def _tier(medium: str | None) -> int:
    if medium is None or medium == "GPU":
        return 0
    return 1 if medium.startswith("CPU") else 2


def _salt(event: _Stored) -> str | None:
    """None: a block has something else in its name, too, such as an image."""
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
    """An event of an older form is an array: its type, and the fields in order."""
    content = bytes(raw)
    if content[:1] and (0x90 <= content[0] <= 0x9F or content[0] in (0xDC, 0xDD)):
        kind, *values = msgspec.msgpack.decode(content)
        fields = (_Stored if kind == "BlockStored" else _Removed).__struct_fields__
        return msgspec.msgpack.encode({"type": kind, **dict(zip(fields, values, strict=False))})
    return content
