"""Objects in several buffers, and parts of objects: multi-buffer forms, ranges, sessions.

A read session pins its objects. A write session gathers the bytes in this process; no reader sees the object
before the session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moonpool.core.errors import InvalidArgument, TooLarge

from ._base import key_of, names_of
from ._codes import Code, code_of, coded
from ._memory import ADDRESSES, number, same_length
from ._objects import Objects, check_config, handle_of
from ._placement import for_each
from ._values import DEFAULT, ReplicateConfig

SESSIONS_MAX = 65_536


class Parts(Objects):
    """Objects from and into several buffers each, and in sessions that read or write them piece by piece."""

    def __init__(self) -> None:
        super().__init__()
        self._reading: dict[bytes, Any] = {}
        self._writing: dict[bytes, tuple[Any, ReplicateConfig]] = {}

    def batch_put_from_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        config: ReplicateConfig = DEFAULT,
    ) -> list[int]:
        """One object of each list of buffers."""
        operation = "batch_put_from_multi_buffers"
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        parts: list[Any]
        good = False
        try:
            parts = self._buffers.check_lists(all_buffer_ptrs, all_sizes)
            good = all(parts)  # each has a range, and a range that was checked has bytes
        except InvalidArgument:
            parts = [
                self._ranges_or_nothing(operation, *row)
                for row in zip(all_buffer_ptrs, all_sizes, strict=True)
            ]
        return self._put(operation, keys, parts, config, none_is_empty=good)

    def _ranges_or_nothing(self, operation: str, pointers: Sequence[int], sizes: Sequence[int]) -> Any:
        """No bytes for what is no list of memory: put refuses those for their own key alone."""
        try:
            same_length(pointers, sizes)
            return self._buffers.check_all(pointers, sizes)
        except InvalidArgument as error:
            code_of(error, operation)
            return b""

    def batch_get_into_multi_buffers(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each object into its buffers, one behind the other; bytes or a code."""
        operation = "batch_get_into_multi_buffers"
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)

        def into() -> list[Any]:
            return self._buffers.check_lists(all_buffer_ptrs, all_sizes, writable=True)

        def one(i: int) -> int:
            return self.batch_get_into_multi_buffers([keys[i]], [all_buffer_ptrs[i]], [all_sizes[i]])[0]

        return self._get_into(operation, keys, into, one)

    # ---- parts of objects that are there

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        """Holds the objects for batch_get_into_multi_buffer_ranges, whatever is removed meanwhile."""

        def act() -> list[int]:
            names = names_of(keys)
            if len(self._reading) + len(names) > SESSIONS_MAX:
                raise TooLarge(f"at most {SESSIONS_MAX} objects are read in sessions at a time")
            for name, view in zip(names, self._views(keys), strict=True):
                if view is not None and name is not None:
                    self._reading[name] = handle_of(view)
            return [int(Code.OK if name in self._reading else Code.OBJECT_NOT_FOUND) for name in names]

        return self._codes("batch_get_session_start", len(keys), act)

    @coded("batch_get_session_end")
    def batch_get_session_end(self, keys: list[str]) -> int:
        """Ends the sessions of these keys; 0, also for a key without one."""
        self._open()
        for name in names_of(keys):
            if name is not None:
                self._reading.pop(name, None)
        return int(Code.OK)

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_src_offsets: list[list[int]],
    ) -> list[int]:
        """Copies ranges of objects of a session: ``sizes`` bytes from each ``src_offset`` into each buffer.
        Returns the bytes of each key together. A range outside of its object copies nothing of that key."""
        operation = "batch_get_into_multi_buffer_ranges"
        return self._each(operation, self._read_ranges, keys, all_buffer_ptrs, all_sizes, all_src_offsets)

    def _read_ranges(self, key: str, pointers: list[int], sizes: list[int], offsets: list[int]) -> int:
        self._open()
        held = self._reading.get(key_of(key))
        if held is None:
            raise InvalidArgument(f"{key!r:.80} is in no session; call batch_get_session_start() before")
        targets = self._buffers.check_all(pointers, sizes, writable=True)
        return self._copy_out(held, targets, offsets)

    def _copy_out(self, held: Any, targets: list[tuple[int, int]], offsets: Sequence[int]) -> int:
        """The bytes from each offset into each (address, length), which was checked."""
        rows = ranges_inside(targets, offsets, held.size())
        start = held.ptr()
        self._buffers.copy(
            [(address, size) for address, size, _ in rows],
            [(start + offset, size) for _, size, offset in rows],
        )
        return sum(size for _, size, _ in rows)

    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        """The bytes that were copied, or a code, for each range of each key of each buffer. A range that
        begins in a registered buffer and leaves it is INVALID_PARAMS."""
        same_length(buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        answer = []
        for pointer, keys, targets, sources, sizes in zip(
            buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes, strict=True
        ):
            same_length(keys, targets, sources, sizes)
            views = self._views(keys)
            answer.append(
                [
                    self._ranges_of(view, number(pointer), *row)
                    for view, *row in zip(views, targets, sources, sizes, strict=True)
                ]
            )
        return answer

    def _ranges_of(
        self, view: memoryview | None, pointer: int, targets: list[int], sources: list[int], sizes: list[int]
    ) -> list[int]:
        same_length(targets, sources, sizes)
        held = handle_of(view)
        if held is None:
            return [int(Code.OBJECT_NOT_FOUND)] * len(sizes)

        def copy(target: int, source: int, size: int) -> int:
            place = self._buffers.check_part(pointer, number(target), number(size))
            return self._copy_out(held, [place], [source])

        return self._each("get_into_ranges", copy, targets, sources, sizes)

    # ---- objects that are made of parts

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        """Begins objects of these sizes; a key that is already being written is INVALID_PARAMS."""
        if len(keys) != len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        check_config("batch_put_session_start", config)

        def begin(key: str, size: int, one: ReplicateConfig) -> int:
            self._open()
            name = key_of(key)
            if name in self._writing or not 0 < number(size) < ADDRESSES:
                raise InvalidArgument(f"{key!r:.80} is being written already, or is given {size} bytes")
            if len(self._writing) >= SESSIONS_MAX:
                raise TooLarge(f"at most {SESSIONS_MAX} objects are written in sessions at a time")
            self._writing[name] = np.zeros(size, np.uint8), one
            return int(Code.OK)

        try:
            configs = for_each(config, len(keys))
        except InvalidArgument as error:
            return [int(code_of(error, "batch_put_session_start"))] * len(keys)
        return self._each("batch_put_session_start", begin, keys, sizes, configs)

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]:
        """Into objects of a session: bytes that were taken, or a code."""

        def gather(key: str, pointers: list[int], sizes: list[int], offsets: list[int]) -> int:
            self._open()
            staged, _ = self._written(key)
            rows = ranges_inside(self._buffers.check_all(pointers, sizes), offsets, staged.nbytes)
            start = staged.ctypes.data
            self._buffers.copy(
                [(start + offset, size) for _, size, offset in rows],
                [(address, size) for address, size, _ in rows],
            )
            return sum(size for _, size, _ in rows)

        return self._each(
            "batch_put_from_multi_buffer_ranges", gather, keys, all_buffer_ptrs, all_sizes, all_dst_offsets
        )

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        """Stores what was gathered; where that fails the session goes on, and its end may be tried again."""

        def end(key: str) -> int:
            self._open()
            staged, config = self._written(key)
            code = self._put("batch_put_session_end", [key], [memoryview(staged)], config)[0]
            if not code:
                self._writing.pop(key_of(key), None)
            return code

        return self._each("batch_put_session_end", end, keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        """Drops what was written in the sessions of these keys. One code per key."""

        def revoke(key: str) -> int:
            self._open()
            self._written(key)
            del self._writing[key_of(key)]
            return int(Code.OK)

        return self._each("batch_put_session_revoke", revoke, keys)

    def _written(self, key: str) -> tuple[Any, ReplicateConfig]:
        try:
            return self._writing[key_of(key)]
        except KeyError:
            raise InvalidArgument(
                f"{key!r:.80} is in no session; call batch_put_session_start() before"
            ) from None


def ranges_inside(
    places: Sequence[tuple[int, int]], offsets: Sequence[int], length: int
) -> list[tuple[int, int, int]]:
    """(address, size, offset) of each. Raises InvalidArgument for a range that leaves ``length`` bytes.

    Nothing of the caller's lists is looked at again: another thread may change them.
    """
    starts = [number(offset) for offset in offsets]
    same_length(places, starts)
    for (_, size), start in zip(places, starts, strict=True):
        if size == 0 or start + size > length:
            raise InvalidArgument(f"{size} bytes from {start} are not inside of {length} bytes")
    return [(address, size, start) for (address, size), start in zip(places, starts, strict=True)]
