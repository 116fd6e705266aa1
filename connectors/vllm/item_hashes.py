"""The digests of what images, sounds and videos are: of the tensors that vLLM's processor made of them.
docs/keys.md has the format.

A thread of its own hashes large items, and many small ones of one request, each once as long as vLLM's
processor cache keeps its tensors. The connectors of one process share the digests; both run on the
scheduler's thread.

    data ----begin: large----> _hashing ----the thread----> _hashed ----vLLM drops the data----> gone
      +------digest: small---------------------------------^
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

AT_ONCE_BYTES_MAX = 1 << 20  # of the items of one request that are hashed without the thread, in 1 to 3 ms
# Types of pixels, sounds and embeddings. Sizes and grids, which do not identify an item, are wide integers.
_CONTENT_TYPES = ("float", "bfloat", "uint8", "int8")
INTEGERS = ("int", "uint")  # the wide ones, too

_Update = Callable[[Any], None]


class NoName(Exception):
    """The item cannot be named; the message says why."""


class ItemHashes:
    """The digests of contents; all methods run on one thread."""

    def __init__(self) -> None:
        # id of the data -> its digest, or why it has none
        self._hashed: dict[int, tuple[weakref.ref[Any], bytes | str]] = {}
        self._hashing: set[int] = set()  # ids of data that the thread has, which keeps it
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, items: Iterable[Any]) -> None:
        """Has the thread hash what is not hashed yet of the items of a request, when that is much altogether.

        items: the data of each; None: it has none.
        """
        fresh = {
            id(data): data
            for data in items
            if data is not None and id(data) not in self._hashing and self._known(data) is None
        }
        sizes = (_bytes([element.data for element in data.values()]) for data in fresh.values())
        if sum(sizes) > AT_ONCE_BYTES_MAX:
            self._thread = self._thread or ThreadPoolExecutor(1, "moonpool-items")
            for key, data in fresh.items():
                self._hashing.add(key)
                self._thread.submit(self._hash, data)

    def is_ready(self, items: Iterable[Any]) -> bool:
        """Whether ``digest`` has an answer for each of the items."""
        return not any(id(data) in self._hashing for data in items)

    def digest(self, data: Mapping[str, Any]) -> bytes | str:
        """The digest of an item, 32 bytes, or why it has none; "": the thread is not done with it. Hashes an
        item that the thread was not given."""
        if id(data) in self._hashing:
            return ""
        return self._known(data) or self._hash(data)

    def close(self) -> None:
        """Ends the thread; another one begins with the next large item."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False, cancel_futures=True)
            self._hashing.clear()

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


@functools.cache
def shared() -> ItemHashes:
    """Those of this process."""
    return ItemHashes()


def content_digest(fields: Mapping[str, Any]) -> bytes:
    """The digest of what the encoder is given, 32 bytes. Raises NoName for what has no fixed bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(fields.items()):
        add_text(digest.update, name)
        add(digest.update, value)
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


def add(update: _Update, value: Any) -> None:
    """Adds a field, so that different ones never give the same bytes. Raises NoName for what has no fixed
    bytes."""
    if _is_tensor(value):
        update(b"t")
        add_text(update, _type(value))
        update(len(value.shape).to_bytes(8, "little"))
        for size in value.shape:
            update(int(size).to_bytes(8, "little"))
        _add_bytes(update, value)
    elif isinstance(value, (list, tuple)):
        update(b"l" + len(value).to_bytes(8, "little"))
        for each in value:
            add(update, each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        update(b"j")
        add_text(update, json.dumps(value))
    else:
        raise NoName(f"its fields have a {type(value).__name__}, which has no fixed bytes")


def add_text(update: _Update, text: str) -> None:
    """Adds a text and its length."""
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


def numbers(value: Any, types: tuple[str, ...] = _CONTENT_TYPES) -> int:
    """How many numbers of these types there are in a field: by default pixels, samples or parts of
    embeddings."""
    if _is_tensor(value):
        return math.prod(value.shape) if _type(value).startswith(types) else 0
    return sum(numbers(one, types) for one in value) if isinstance(value, (list, tuple)) else 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "data_ptr")


def _type(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
