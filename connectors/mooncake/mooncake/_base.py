"""What every group of the store's methods uses: the access, the registered memory, errors as codes.

Before setup() and after close() a method that returns codes returns INTERNAL_ERROR, and one that returns
values raises moonpool.Closed: an empty value would mean that there is no data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from moonpool.core.errors import Closed, InvalidArgument, Unavailable
from moonpool.core.store.store import Store, as_bytes

from ._codes import CODED, Code, code_of, coded
from ._memory import Buffers, check_no_card, number
from ._pins import HardPins

if TYPE_CHECKING:
    from ._access import Access

T = TypeVar("T")
JOIN_AGAIN_S = 1.0
NAME_BYTES_MAX = 65_536  # UTF-8 bytes of a key of callers
KEY_BYTES_MAX = 1024  # bytes of a name in the pool
KEPT_BYTES = 896
DIGEST = b"#sha256:"


class Base:
    """What all methods of a store use: its access to the pool, codes instead of exceptions, and names of
    keys."""

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
        """The result of ``verb``, repeated where a guest finds another node. Raises Error."""
        access = self._open()
        try:
            return verb(access.store())
        except Unavailable:
            if not access.renew():
                raise
            return verb(access.store())

    def _ask_of(self, keys: Sequence[str], verb: Callable[[Store, Any], T]) -> T:
        """The same of ``keys``, which go to the core as they are: to look at each before costs as much as the
        call. TypeError for what is no key.
        """
        if type(keys) is list:
            try:
                return self._ask(lambda store: verb(store, keys))
            except (InvalidArgument, UnicodeEncodeError):
                names = keys_of(keys)
                if names == [as_bytes(key) for key in keys]:
                    raise
        else:
            names = keys_of(keys)
        return self._ask(lambda store: verb(store, names))

    def _ask_of_some(
        self, keys: Sequence[str], nothing: T, verb: Callable[[Store, Any], Sequence[T]]
    ) -> Sequence[T]:
        """The same for reads; ``nothing`` for keys that no object can have, such as "", beside good ones."""
        try:
            return self._ask_of(keys, verb) if keys else list(keys_of(keys))  # type: ignore[arg-type]
        except InvalidArgument:
            names = names_of(keys)
            good = [name for name in names if name is not None]
            if len(good) == len(names):
                raise
        self._open()
        found = iter(self._ask(lambda store: verb(store, good)) if good else ())
        return [nothing if name is None else next(found) for name in names]

    def _code(self, operation: str, act: Callable[[], int]) -> int:
        """What ``act`` returns, or the code of what it raises."""
        return coded(operation)(act)()

    def _codes(self, operation: str, n: int, act: Callable[[], list[int]]) -> list[int]:
        """The same for lists; an error is the error of each."""
        try:
            return act()
        except CODED as error:
            return [int(code_of(error, operation))] * n

    def _each(self, operation: str, act: Any, *columns: Sequence[Any]) -> list[int]:
        """The code of ``act`` for each row of the columns; INVALID_PARAMS for all of different lengths."""
        if len({len(column) for column in columns}) > 1:
            return [int(Code.INVALID_PARAMS)] * len(columns[0])
        return [self._code(operation, partial(act, *row)) for row in zip(*columns, strict=True)]

    def _range(self, address: int, size: int, *, writable: bool = False) -> tuple[int, int]:
        return self._buffers.check(number(address), number(size), writable=writable)

    def _range_on_host(self, address: int, size: int, *, writable: bool = False) -> tuple[int, int]:
        place = self._range(address, size, writable=writable)
        check_no_card(*place)
        return place


def key_of(key: Any) -> bytes:
    """The key as the pool has it: str is UTF-8, and a name longer than a pool's ends in its digest.

    TypeError for anything but str and bytes, InvalidArgument for an empty one and for one over all bounds.
    """
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise TypeError(f"a key is text that UTF-8 has: {error}") from error
    elif not isinstance(key, bytes):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    if not 1 <= len(key) <= NAME_BYTES_MAX:
        raise InvalidArgument(f"a key has 1 to {NAME_BYTES_MAX} bytes, not {len(key)}")
    return bytes(key) if len(key) <= KEY_BYTES_MAX else shortened(key)


def name_or_none(key: Any) -> bytes | None:
    """As key_of(); None for a key that no object can have, a miss for readers. Raises TypeError."""
    try:
        return key_of(key)
    except InvalidArgument:
        return None


def shortened(name: bytes) -> bytes:
    """The first KEPT_BYTES of the name, which regular expressions still find, and its digest."""
    return name[:KEPT_BYTES] + DIGEST + sha256(name).hexdigest().encode()


def as_named(name: bytes) -> bytes:
    """What is left of the caller's text in a key of the pool: all of it, or what shortened() keeps."""
    is_short = len(name) != KEPT_BYTES + len(DIGEST) + 64 or name[KEPT_BYTES:].find(DIGEST) != 0
    return name if is_short else name[:KEPT_BYTES]


def names_of(keys: Any) -> list[bytes | None]:
    """name_or_none() of each key."""
    if isinstance(keys, (str, bytes)):
        raise TypeError("expected a list of keys, got one key")
    return [name_or_none(key) for key in keys]


def keys_of(keys: Any) -> list[bytes]:
    """The names of ``keys``. Raises TypeError for one key in place of a list, InvalidArgument for a key that
    cannot be a name."""
    if isinstance(keys, (str, bytes)):
        raise TypeError("expected a list of keys, got one key")
    return [key_of(key) for key in keys]


def first_error(codes: Sequence[int]) -> int:
    """The first code below 0, or 0."""
    return next((code for code in codes if code < 0), int(Code.OK))
