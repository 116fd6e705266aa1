"""What every group of the store's methods stands on: the access, the registered memory, errors as codes.

Before setup() and after close() a method that returns codes returns INTERNAL_ERROR, and one that returns
values raises moonpool.Closed: an empty value would say that there is no data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from moonpool.core.errors import Closed, Error, InvalidArgument, Unavailable
from moonpool.core.store import Store

from ._codes import Code, code_of
from ._memory import Buffers, number
from ._pins import HardPins

if TYPE_CHECKING:
    from ._access import Access

T = TypeVar("T")
JOIN_AGAIN_S = 1.0


class Base:
    def __init__(self) -> None:
        self._access: Access | None = None
        self._waiting: Access | None = None  # for a master
        self._again_s = 0.0
        self._joining = threading.Lock()
        self._buffers = Buffers()
        self._hard_pins = HardPins()
        self._closed = False

    def _open(self) -> Access:
        access = self._access
        return self._open_late() if access is None else access

    def _open_late(self) -> Access:
        """When setup() found no master: whether there is one by now. Raises Unavailable, or Closed."""
        waiting, closed = self._waiting, self._closed
        if waiting is None:
            raise Closed("this store is closed" if closed else "call setup() before", operation="mooncake")
        if time.monotonic() < self._again_s or not self._joining.acquire(blocking=False):
            raise Unavailable("no master took this process in so far", operation="mooncake")
        try:
            waiting.join(0)
            if self._waiting is waiting:  # else another thread was faster, or close() was
                self._access, self._waiting = waiting, None
        finally:
            self._again_s = time.monotonic() + JOIN_AGAIN_S
            self._joining.release()
        return waiting

    def _ask(self, verb: Callable[[Store], T]) -> T:
        """What ``verb`` says of the store; asked again where a guest finds another node. Raises."""
        access = self._open()
        try:
            return verb(access.store())
        except Unavailable:
            if not access.renew():
                raise
            return verb(access.store())

    def _code(self, operation: str, act: Callable[[], int]) -> int:
        """What ``act`` returns, or the code of what it raises. What is no such error, such as the TypeError
        of a caller's mistake, goes through."""
        try:
            return int(act())
        except (Error, OSError, MemoryError) as error:
            return int(code_of(error, operation))

    def _codes(self, operation: str, n: int, act: Callable[[], list[int]]) -> list[int]:
        """The same for lists; an error is the error of each."""
        try:
            return act()
        except (Error, OSError, MemoryError) as error:
            return [int(code_of(error, operation))] * n

    def _range(self, address: int, size: int, *, writable: bool = False) -> tuple[int, int]:
        return self._buffers.check(number(address), number(size), writable=writable)


def key_of(key: Any) -> bytes:
    """str is UTF-8. TypeError for anything but str and bytes, InvalidArgument for an empty one."""
    if isinstance(key, str):
        key = key.encode()
    elif not isinstance(key, bytes):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    if not key:
        raise InvalidArgument("a key has at least 1 byte")
    return bytes(key)


def checked_keys(keys: Any) -> Any:
    """The keys as moonpool takes them, nearly for nothing where all are str. Raises as key_of, but leaves it
    to the core to find an empty one.
    """
    if set(map(type, keys)) == {str} and type(keys) is list:
        return keys
    return keys_of(keys)


def keys_of(keys: Any) -> list[bytes]:
    if isinstance(keys, (str, bytes)):
        raise TypeError("expected a list of keys, got one key")
    return [key_of(key) for key in keys]


def same_length(*columns: Sequence[Any]) -> None:
    """Raises InvalidArgument for columns of different lengths."""
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise InvalidArgument(f"lists of different lengths: {lengths}")


__all__ = ["Base", "checked_keys", "first_error", "key_of", "keys_of", "number", "same_length"]


def first_error(codes: Sequence[int]) -> int:
    return next((code for code in codes if code < 0), int(Code.OK))
