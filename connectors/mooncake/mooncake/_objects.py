"""Objects as a whole: put, get, exists, remove, in each of their forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moonpool.core.errors import InvalidArgument, Unavailable
from moonpool.core.store.store import ROWS_MAX, Store
from moonpool.core.store.types import EXISTS, STORED, PutResult, Unsure

from ._base import (
    Base,
    as_named,
    first_error,
    keys_of,
    name_or_none,
    names_of,
)
from ._codes import Code, code_of, coded, say
from ._memory import number, same_length
from ._pins import pinned_one
from ._placement import for_one, wishes
from ._values import DEFAULT, ReplicateConfig

Part = Any  # what moonpool takes as the bytes of an object
_OK, _REFUSED = int(Code.OK), int(Code.NO_AVAILABLE_HANDLE)
_UNKNOWN = 2  # a flag of Store.exist_flags
_BYTE = np.dtype(np.uint8)


def put_once(store: Store, names: list[bytes], parts: Sequence[Part], **options: Any) -> list[PutResult]:
    """Stores what no node of the pool has. While the master is away this host's node alone decides."""
    try:
        return store.put(names, parts, unique=True, **options)
    except Unavailable:
        return store.put(names, parts, **options)


def removal_code(removed: bool | Unsure) -> int:
    """0, or why not."""
    if isinstance(removed, Unsure):
        say("remove", "unsure", f"remove: {removed.nodes} may still have it")
        return int(Code.RPC_FAIL)
    return int(Code.OK if removed else Code.OBJECT_NOT_FOUND)


class BufferHandle(np.ndarray):
    """An object's bytes in the pool's own memory, read-only, pinned for as long as this lives.

    A buffer for ``memoryview``, ``bytes``, numpy and torch.
    """

    def ptr(self) -> int:
        """The address of the bytes."""
        return int(self.ctypes.data)

    def size(self) -> int:  # type: ignore[override]
        """How many bytes."""
        return int(self.nbytes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"BufferHandle({self.nbytes} bytes)"


def handle_of(view: memoryview | None) -> BufferHandle | None:
    """A handle on a view; None for None."""
    return None if view is None else BufferHandle(view.nbytes, _BYTE, view)


class Objects(Base):
    """Objects as bytes: put, upsert, get, exists, remove; from and into registered buffers."""

    # ---- writing

    def put(self, key: str, value: Any, config: ReplicateConfig = DEFAULT) -> int:
        """0, also when the key has an object: that one stays."""
        return self._put("put", [key], [_bytes_like(value)], config)[0]

    def put_parts(self, key: str, *args: Any, config: ReplicateConfig = DEFAULT) -> int:
        """One object of several parts."""
        return self._put("put_parts", [key], [[_bytes_like(part) for part in args]], config)[0]

    def put_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig = DEFAULT) -> int:
        """0 when all are there, else the first code that is not."""
        parts = [_bytes_like(value) for value in values]
        if len(keys) != len(parts):
            return int(Code.INVALID_PARAMS)
        return first_error(self._put("put_batch", keys, parts, config))

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT) -> int:
        """As put, from ``size`` bytes at ``buffer_ptr``, which must be registered."""
        return self._put_from("put_from", [key], [buffer_ptr], [size], config)[0]

    def batch_put_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        """As put_from, for many keys. One code per key."""
        return self._put_from("batch_put_from", keys, buffer_ptrs, sizes, config)

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig = DEFAULT,
    ) -> int:
        """One object: the metadata, then the data."""
        name = "put_from_with_metadata"
        return self._code(
            name,
            lambda: self._put(
                name,
                [key],
                [[self._range(metadata_buffer_ptr, metadata_size), self._range(buffer_ptr, size)]],
                config,
            )[0],
        )

    def upsert(self, key: str, value: Any, config: ReplicateConfig = DEFAULT) -> int:
        """Replaces the object of the key; readers of the old bytes keep them."""
        return self._put("upsert", [key], [_bytes_like(value)], config, replace=True)[0]

    def upsert_parts(self, key: str, *args: Any, config: ReplicateConfig = DEFAULT) -> int:
        """As put_parts; replaces an object."""
        return self._put("upsert_parts", [key], [[_bytes_like(part) for part in args]], config, replace=True)[
            0
        ]

    def upsert_batch(self, keys: list[str], values: list[Any], config: ReplicateConfig = DEFAULT) -> int:
        """As put_batch; replaces objects."""
        parts = [_bytes_like(value) for value in values]
        if len(keys) != len(parts):
            return int(Code.INVALID_PARAMS)
        return first_error(self._put("upsert_batch", keys, parts, config, replace=True))

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig = DEFAULT) -> int:
        """As put_from; replaces an object."""
        return self._put_from("upsert_from", [key], [buffer_ptr], [size], config, replace=True)[0]

    def batch_upsert_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        """As batch_put_from; replaces objects."""
        return self._put_from("batch_upsert_from", keys, buffer_ptrs, sizes, config, replace=True)

    def _put_from(
        self,
        operation: str,
        keys: list[str],
        pointers: list[int],
        sizes: list[int],
        config: ReplicateConfig,
        replace: bool = False,
    ) -> list[int]:
        if not len(keys) == len(pointers) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        try:
            good = self._buffers.check_all(pointers, sizes)
        except InvalidArgument:
            parts = [self._range_or_nothing(operation, *pair) for pair in zip(pointers, sizes, strict=True)]
            return self._put(operation, keys, parts, config, replace=replace)
        return self._put(operation, keys, good, config, replace=replace, none_is_empty=True)

    def _range_or_nothing(self, operation: str, pointer: int, size: int) -> Part:
        """No bytes for what is no memory: put refuses those for their own key alone."""
        try:
            return self._range(pointer, size)
        except InvalidArgument as error:
            code_of(error, operation)
            return b""

    def _put(
        self,
        operation: str,
        keys: Sequence[str],
        parts: Sequence[Part],
        config: ReplicateConfig,
        *,
        replace: bool = False,
        none_is_empty: bool = False,
    ) -> list[int]:
        """A code for each key. One that cannot be meant does not keep the others from being stored.

        none_is_empty: of the parts, which was looked at already.
        """
        check_config(operation, config)

        def act() -> list[int]:
            self._open()
            same_length(keys, parts)
            if config.replica_num < 1:
                raise InvalidArgument("replica_num must be at least 1")
            if (none_is_empty or all(map(size_of_parts, parts))) and all(keys):
                return self._put_good(operation, keys, parts, config, replace)
            if len(keys) == 1:
                raise InvalidArgument("an object has a key and at least 1 byte, in memory of this process")
            return self._put_one_by_one(operation, keys, parts, config, replace)

        return self._codes(operation, len(keys), act)

    def _put_one_by_one(
        self,
        operation: str,
        keys: Sequence[str],
        parts: Sequence[Part],
        config: ReplicateConfig,
        replace: bool,
    ) -> list[int]:
        return [
            self._put(operation, [key], [part], for_one(config, i), replace=replace)[0]
            for i, (key, part) in enumerate(zip(keys, parts, strict=True))
        ]

    def _put_good(
        self,
        operation: str,
        keys: Sequence[str],
        parts: Sequence[Part],
        config: ReplicateConfig,
        replace: bool,
    ) -> list[int]:
        if not keys:
            return []
        asked = wishes(config, len(keys), self._open())
        try:
            results: list[PutResult] = self._ask_of(
                keys,
                lambda store, names: (
                    store.put(names, parts, replace=True, replicas=config.replica_num, **asked)
                    if replace
                    else put_once(store, names, parts, replicas=config.replica_num, **asked)
                ),
            )
        except InvalidArgument:  # moonpool takes all or none
            if len(keys) == 1:
                raise
            return self._put_one_by_one(operation, keys, parts, config, replace)
        codes = [_OK if one is STORED or one is EXISTS or one else _REFUSED for one in results]
        if _REFUSED in codes:
            if self._hard_pins.look_again(self._ask):
                return self._put_good(operation, keys, parts, config, replace)
            say(operation, "refused", f"{operation}: {results[codes.index(_REFUSED)].reason}")
        if config.replica_num > 1:
            short = next((one for one in results if one and one.replicas < config.replica_num), None)
            if short is not None:
                say(
                    operation,
                    "copies",
                    f"{operation}: {short.replicas} of {config.replica_num} copies: {short.reason}",
                )
        if config.with_hard_pin:
            return [code or self._pin_hard(name) for name, code in zip(keys_of(keys), codes, strict=True)]
        return codes

    @coded("hard_pin")
    def _pin_hard(self, name: bytes) -> int:
        """The code of its put: an object that cannot be pinned is not as safe as the caller wants it."""
        _, pin = self._ask(lambda store: pinned_one(store, name))
        if pin is None:  # evicted already
            return _REFUSED
        self._hard_pins.hold(name, pin, self)
        return _OK

    # ---- reading

    def get(self, key: str, /) -> bytes:
        """The bytes; b"" is a miss and nothing else: what goes wrong is raised as a moonpool Error."""
        view = self._views([key])[0]
        return b"" if view is None else bytes(view)

    def get_batch(self, keys: list[str], /) -> list[bytes]:
        """As get, for many keys."""
        return [b"" if view is None else bytes(view) for view in self._views(keys)]

    def get_buffer(self, key: str, /) -> BufferHandle | None:
        """None is a miss."""
        return handle_of(self._views([key])[0])

    def batch_get_buffer(self, keys: list[str], /) -> list[BufferHandle | None]:
        """As get_buffer, for many keys."""
        return [handle_of(view) for view in self._views(keys)]

    def _views(self, keys: Sequence[str]) -> list[memoryview | None]:
        found = self._ask_of_some(keys, None, lambda store, names: store.get(names))
        return found if isinstance(found, list) else list(found)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """The object's bytes, or a code: INVALID_PARAMS for a buffer that is too small and stays as it is."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """As get_into, for many keys. Sizes or codes, one per key."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)

        def into() -> list[Part]:
            return [*self._buffers.check_all(buffer_ptrs, sizes, writable=True)]

        def one(i: int) -> int:
            return self.batch_get_into([keys[i]], [buffer_ptrs[i]], [sizes[i]])[0]

        return self._get_into("get_into", keys, into, one)

    def _get_into(
        self, operation: str, keys: Sequence[str], into: Callable[[], list[Part]], one: Callable[[int], int]
    ) -> list[int]:
        """``into`` makes the targets of all; when one does not fit, ``one`` gets each key by itself."""

        def act() -> list[int]:
            self._open()
            try:
                targets = into()
                found = self._ask_of(keys, lambda store, names: store.get(names, targets)) if keys else []
            except InvalidArgument:
                if len(keys) == 1:
                    if name_or_none(keys[0]) is None:
                        return [int(Code.OBJECT_NOT_FOUND)]
                    raise
                return [one(i) for i in range(len(keys))]
            return [int(Code.OBJECT_NOT_FOUND) if n is None else n for n in found]

        return self._codes(operation, len(keys), act)

    # ---- what is there

    def is_exist(self, key: str, /) -> int:
        """1 there, 0 not, -1 not known."""
        return self.batch_is_exist([key])[0]

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """As is_exist, for many keys."""

        def ask() -> list[int]:
            flags = self._ask_of_some(keys, 0, Store.exist_flags)
            if _UNKNOWN in flags and self._open().renew():
                flags = self._ask_of_some(keys, 0, Store.exist_flags)
            return list(flags) if _UNKNOWN not in flags else [-1 if one == _UNKNOWN else one for one in flags]

        codes = self._codes("is_exist", len(keys), ask)
        return codes if not codes or codes[0] >= -1 else [-1] * len(codes)  # an error is of all

    @coded("get_size")
    def get_size(self, key: str, /) -> int:
        """Bytes, or OBJECT_NOT_FOUND; none of them is read."""
        (found,) = self._ask_of_some([key], None, lambda store, names: store.stat(names, everywhere=False))
        return int(Code.OBJECT_NOT_FOUND) if found is None else found.size

    # ---- removing

    def remove(self, key: str, force: bool = False) -> int:
        """Removes the object, also while it is read: readers keep its bytes. So ``force`` changes nothing."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        """0 or a code for each key; RPC_FAIL where a node may still have it, as it did not answer.

        force: removes leased objects, too, as always here (TorchSpec looks for this word).
        """

        def act() -> list[int]:
            flags = self._ask_of_some(keys, False, lambda store, names: store.remove(names))
            self._hard_pins.release(name for name in names_of(keys) if name is not None)
            return [removal_code(flag) for flag in flags]

        return self._codes("remove", len(keys), act)

    @coded("remove_all")
    def remove_all(self, force: bool = False) -> int:
        """How many there were, in the whole pool, of this tenant's objects of this API."""
        self._hard_pins.release_all()
        return self._ask(lambda store: store.remove_all())

    @coded("remove_by_regex")
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """How many keys the expression was found in and are removed now; of names above 1,024 bytes it is
        looked for in the first 896."""
        if not isinstance(regex_pattern, str):
            raise TypeError(f"an expression is a str, not {regex_pattern!r:.80}")

        try:
            found = re.compile(regex_pattern.encode()).search
        except re.error as error:
            raise InvalidArgument(f"{regex_pattern!r} is no regular expression: {error}") from error
        if not regex_pattern:
            raise InvalidArgument("an empty expression would remove everything; call remove_all()")
        rows = self._ask(lambda store: store.list(limit=ROWS_MAX))
        names = [row.key for row in rows if found(as_named(row.key))]
        self._hard_pins.release(names)
        return sum(map(bool, self._ask(lambda store: store.remove(names)))) if names else 0

    # ---- memory

    @coded("register_buffer")
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """So that its addresses need no look at the kernel. The store reads and writes any memory."""
        self._open()
        self._buffers.add(number(buffer_ptr), number(size))
        return int(Code.OK)

    @coded("unregister_buffer")
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """A code: INVALID_PARAMS when no buffer is registered there."""
        self._open()
        self._buffers.remove(number(buffer_ptr))
        return int(Code.OK)


def check_config(operation: str, config: Any) -> None:
    """Raises TypeError for what is no ReplicateConfig."""
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"{operation}: config is a ReplicateConfig, not {type(config).__name__}")


def _bytes_like(value: Any) -> Any:
    """The value; TypeError for what is no buffer, above all a str."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value
    if hasattr(value, "data_ptr"):
        return value
    return memoryview(value)  # a TypeError of its own for what is none


def size_of_parts(part: Part) -> int:
    """Bytes of an object as put() takes it."""
    if isinstance(part, tuple):
        return sum(part[1]) if isinstance(part[1], list) else int(part[1])
    if isinstance(part, list):
        return sum(map(size_of_parts, part))
    if hasattr(part, "data_ptr"):
        return int(part.numel() * part.element_size())
    return part.nbytes if isinstance(part, memoryview) else len(part)
