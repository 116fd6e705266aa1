"""Names the images, sounds and videos of requests by their content. docs/keys.md has the format.

vLLM's own name of an item (``identifier``) is a hash of its file and of options, or else the UUID that the
client gave it, and the scheduler cannot tell one from the other. So an item is named here by what the model's
encoder is given: the tensors that vLLM's processor made of it, whatever its options and versions were. That
holds for UUIDs and for embeddings that the client computed, too.

vLLM's own caches, of KV and of the encoder's outputs, do go by the identifier. An identifier that had two
contents may stand there for either, so from then on its items have no name here, and the requests with it
that are under way lose theirs. So the content of each item is recorded before vLLM may compute the item; one
that is not known counts as another one.

Runs on the scheduler's thread. A thread of its own hashes large items, and many small ones of one
request, each once as long as vLLM's processor
cache keeps its tensors:

    data ----begin: large----> _hashing ----the thread----> _hashed ----vLLM drops the data----> gone
      +------media: small----------------------------------^
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from moonpool.connectors.vllm.engine_types import MediaFeature, Request
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.requests.media import EVERY_TOKEN, TEXT_ALONE, Media
from moonpool.core.store.keys import Item

ITEM_PREFIX = b"moonpool-item-v1"
IDENTIFIERS_MAX = 1 << 16  # that are remembered with their contents; 13 MB
SIZES_ALONE = (
    "its content is not in the request, which has its sizes alone, for the outputs of an encoder elsewhere"
)
AT_ONCE_BYTES_MAX = 1 << 20  # of the items of one request that are hashed without the thread, in 1 to 3 ms
# Types of pixels, sounds and embeddings. Sizes and grids, which do not identify an item, are wide integers.
_CONTENT_TYPES = ("float", "bfloat", "uint8", "int8")

_Update = Callable[[Any], None]


class NoName(Exception):
    """The item cannot be named; the message says why."""


class ItemNames:
    """Names the items of requests."""

    def __init__(
        self,
        *,
        form: str,
        refusal: str,
        log: logging.Logger,
        clock: Callable[[], float],
        on_conflict: Callable[[str], None] = lambda identifier: None,
    ) -> None:
        """form: how this engine makes KV of an item, as far as its tensors do not say it.
        refusal: why no item of this engine can be named, or "".
        on_conflict: called with an identifier that stood for one content so far, and may stand for another.
        """
        self._form = form
        self._refusal = refusal
        self._log = log
        self._repeats = Repeats(clock)
        self._on_conflict = on_conflict
        # identifier -> digest of its content; b"": it had two, or one that is not known
        self._contents: dict[str, bytes] = {}
        # id of the data -> its digest, or why it has none
        self._hashed: dict[int, tuple[weakref.ref[Any], bytes | str]] = {}
        self._hashing: set[int] = set()  # ids of data that the thread has, which keeps it
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, request: Request) -> None:
        """Has the thread hash what is not hashed yet, when that is much altogether."""
        if self._refusal:
            return
        fresh = {
            id(data): data
            for data in (feature.data for feature in request.mm_features or ())
            if data is not None and id(data) not in self._hashing and self._known(data) is None
        }
        sizes = (_bytes([element.data for element in data.values()]) for data in fresh.values())
        if sum(sizes) > AT_ONCE_BYTES_MAX:
            self._thread = self._thread or ThreadPoolExecutor(1, "moonpool-items")
            for key, data in fresh.items():
                self._hashing.add(key)
                self._thread.submit(self._hash, data)

    def is_ready(self, request: Request) -> bool:
        """Whether ``media`` does not wait for the thread."""
        return not any(id(feature.data) in self._hashing for feature in request.mm_features or ())

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def record(self, request: Request) -> list[bytes | str]:
        """Remembers what the items of a request are, which vLLM may compute from here on. Returns the digest
        of each one's content, or why it has none."""
        features = request.mm_features or ()
        contents: list[bytes | str] = []
        if self._refusal:
            return [self._refusal] * len(features)
        try:
            for feature in features:
                contents.append(self._content(feature))
        finally:  # vLLM computes the request whatever was raised here
            for at, feature in enumerate(features):
                content = contents[at] if at < len(contents) else ""
                self._remember(feature.identifier, content if isinstance(content, bytes) else b"")
        return contents

    def distrust(self, features: Iterable[MediaFeature]) -> None:
        """vLLM may compute these items, and what they are is not looked at."""
        if not self._refusal:
            for feature in features:
                self._remember(feature.identifier, b"")

    def media(self, request: Request) -> Media:
        """Records the items of the request, and names them, but for those that are still being hashed. Logs
        why one has no name."""
        features = request.mm_features
        if not features:
            return TEXT_ALONE
        items: list[Item] = []
        until, refusal = EVERY_TOKEN, ""
        for feature, content in zip(features, self.record(request), strict=True):
            begin = int(feature.mm_position.offset)
            try:
                items.append(Item(begin, self._name(feature, content)))
            except NoName as why:
                if begin < until:
                    until, refusal = begin, str(why)
        if refusal and not self._refusal and (count := self._repeats.due(refusal)):
            self._log.warning(
                "moonpool: request %s is computed without the pool from token %d on: %s%s",
                *(request.request_id, until, refusal, times(count)),
            )
        return Media(tuple(sorted(items)), until, refusal)

    def names(self, request: Request) -> list[bytes | str]:
        """Records the items of the request. The name of each, 32 bytes, or why it has none."""
        found: list[bytes | str] = []
        for feature, content in zip(request.mm_features or (), self.record(request), strict=True):
            try:
                found.append(self._name(feature, content))
            except NoName as why:
                found.append(str(why))
        return found

    def _name(self, feature: MediaFeature, content: bytes | str) -> bytes:
        """The digest of one item. Raises NoName."""
        if isinstance(content, str):
            raise NoName(content)
        if self._contents.get(feature.identifier) != content:
            raise NoName(
                f"two {feature.modality}s came under one UUID, or one that was not hashed, and vLLM's own "
                f"caches go by the UUID; give each content a UUID of its own"
            )
        digest = hashlib.sha256(ITEM_PREFIX + content)
        for text in (self._form, feature.modality):
            _add_text(digest.update, text)
        digest.update(int(feature.mm_position.length).to_bytes(8, "little"))
        _add(digest.update, feature.mm_position.is_embed)
        return digest.digest()

    def _content(self, feature: MediaFeature) -> bytes | str:
        """The digest of what the encoder is given, or why it has none."""
        data = feature.data
        if data is None:
            return f"vLLM does not give its scheduler the content of the {feature.modality}"
        if not has_content(feature):
            return SIZES_ALONE
        if id(data) in self._hashing:
            return "its content was not hashed in time"
        return self._known(data) or self._hash(data)

    def _remember(self, identifier: str, content: bytes) -> None:
        """content: b"": not known."""
        before = self._contents.pop(identifier, content)
        self._contents[identifier] = content if before == content else b""
        if len(self._contents) > IDENTIFIERS_MAX:
            del self._contents[next(iter(self._contents))]
        if before and before != content:
            self._on_conflict(identifier)

    def _known(self, data: Any) -> bytes | str | None:
        known = self._hashed.get(id(data))
        return known[1] if known is not None and known[0]() is data else None

    def _hash(self, data: Mapping[str, Any]) -> bytes | str:
        """On either thread. What this raises on the other one, it raises again on the scheduler's."""
        key = id(data)
        try:
            content = _digest_or_reason({name: element.data for name, element in data.items()})
            self._hashed[key] = (weakref.ref(data, lambda _: self._hashed.pop(key, None)), content)
            return content
        finally:
            self._hashing.discard(key)


def has_content(feature: MediaFeature) -> bool:
    """Whether an encoder can compute the item: False when its data are sizes alone. True without data, which
    a worker may have."""
    data, place = feature.data, feature.mm_position
    if data is None:
        return True
    embeddings = place.length if place.is_embed is None else int(place.is_embed.sum())
    return _numbers([element.data for element in data.values()]) >= embeddings


def content_digest(fields: Mapping[str, Any]) -> bytes:
    """The digest of what the encoder is given, 32 bytes. Raises NoName for what has no fixed bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(fields.items()):
        _add_text(digest.update, name)
        _add(digest.update, value)
    return digest.digest()


def _digest_or_reason(fields: Mapping[str, Any]) -> bytes | str:
    try:
        return content_digest(fields)
    except NoName as why:
        return str(why)


def _bytes(value: Any) -> int:
    """Of the tensors in a field."""
    if _is_tensor(value):
        return int(value.nbytes)
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _numbers(value: Any) -> int:
    """How many pixels, samples or parts of embeddings there are in a field."""
    if _is_tensor(value):
        return math.prod(value.shape) if _type(value).startswith(_CONTENT_TYPES) else 0
    return sum(map(_numbers, value)) if isinstance(value, (list, tuple)) else 0


def _add(update: _Update, value: Any) -> None:
    """Adds a field, so that different ones never give the same bytes. Raises NoName for what has no fixed
    bytes."""
    if _is_tensor(value):
        update(b"t")
        _add_text(update, _type(value))
        update(len(value.shape).to_bytes(8, "little"))
        for size in value.shape:
            update(int(size).to_bytes(8, "little"))
        _add_bytes(update, value)
    elif isinstance(value, (list, tuple)):
        update(b"l" + len(value).to_bytes(8, "little"))
        for each in value:
            _add(update, each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        update(b"j")
        _add_text(update, json.dumps(value))
    else:
        raise NoName(f"its fields have a {type(value).__name__}, which has no fixed bytes")


def _add_text(update: _Update, text: str) -> None:
    encoded = text.encode()
    update(len(encoded).to_bytes(8, "little") + encoded)


def _add_bytes(update: _Update, tensor: Any) -> None:
    if isinstance(tensor, np.ndarray):
        update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        return
    if str(tensor.device) != "cpu" or "strided" not in str(tensor.layout):
        raise NoName("its tensors are not plain memory of the host")
    whole = tensor.detach().contiguous()
    size = whole.numel() * whole.element_size()
    if size:
        update((ctypes.c_char * size).from_address(whole.data_ptr()))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
