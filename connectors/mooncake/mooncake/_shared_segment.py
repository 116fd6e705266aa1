"""``SharedSegment``: one piece of memory that the processes of a group on one host map."""

from __future__ import annotations

import ctypes
import mmap as mapping
import os
from collections.abc import Sequence

import msgspec

from moonpool.core.errors import InvalidArgument


class _Blob(msgspec.Struct, frozen=True):
    """What one rank tells the others; ``fd`` is the owner's."""

    name: str
    rank: int
    size: int
    pid: int
    fd: int


class SharedSegment:
    """Made by every rank, complete when it has heard from all of them. It lives as long as its mappings."""

    def __init__(self, name: str, size: int, world_size: int, rank_id: int, owner_rank: int) -> None:
        self._name, self._size = name, size
        self._world, self._rank, self._owner = world_size, rank_id, owner_rank
        self._fd = -1
        self._memory: mapping.mmap | None = None
        if rank_id == owner_rank:
            self._fd = os.memfd_create(f"moonpool-{name}", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size)

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Memory of the host, not registered with a device."""
        return mmap and not host_register

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """This rank's part, and what to hand to complete() of every rank. Raises InvalidArgument."""
        if not SharedSegment.supported(mmap, host_register):
            raise InvalidArgument(
                "a shared segment is memory of the host; there is no device to register it with"
            )
        if size <= 0 or not 0 <= rank_id < world_size or not 0 <= owner_rank < world_size:
            raise InvalidArgument(
                f"no segment of {size} bytes for rank {rank_id} of {world_size}, owner {owner_rank}"
            )
        segment = SharedSegment(name, size, world_size, rank_id, owner_rank)
        return segment, msgspec.json.encode(_Blob(name, rank_id, size, os.getpid(), segment._fd))

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Maps the memory. Raises InvalidArgument unless there is one blob of this segment of each rank."""
        try:
            told = {blob.rank: blob for blob in (msgspec.json.decode(text, type=_Blob) for text in blobs)}
        except msgspec.MsgspecError as error:
            raise InvalidArgument(f"these are no blobs of create(): {error}") from error
        if sorted(told) != list(range(self._world)) or {(b.name, b.size) for b in told.values()} != {
            (self._name, self._size)
        }:
            raise InvalidArgument(f"{self._name} needs one blob of each of its {self._world} ranks")
        owner = told[self._owner]
        try:
            fd = os.dup(self._fd) if self._fd >= 0 else os.open(f"/proc/{owner.pid}/fd/{owner.fd}", os.O_RDWR)
        except OSError as error:
            raise InvalidArgument(f"the owner of {self._name} is gone: {error}") from error
        try:
            self._memory = mapping.mmap(fd, self._size)
        finally:
            os.close(fd)

    def ready(self) -> bool:
        """Whether the memory is mapped."""
        return self._memory is not None

    def size(self) -> int:
        """Bytes of the memory."""
        return self._size

    def base_addr(self) -> int:
        """0 before complete()."""
        return 0 if self._memory is None else ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def device_addr(self) -> int:
        """0: no device has it."""
        return 0

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
