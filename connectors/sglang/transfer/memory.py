"""Which memory is registered, and how often.

SGLang may register a range twice (an embedding that two requests send, a pool that is both KV and state). The
range stays registered until each registration is removed. A range inside a registered one needs none of its
own.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import moonpool
from moonpool.core.errors import InvalidArgument, Unavailable
from moonpool.core.transfer.region import Region


class NotRegistered(InvalidArgument):
    """Memory that the engine cannot move: it is none, or of a device that it does not reach."""


@dataclass(eq=False, slots=True)
class _Piece:
    region: Region
    users: int

    @property
    def start(self) -> int:
        return self.region.address

    @property
    def end(self) -> int:
        return self.region.address + self.region.length


_start = attrgetter("start")


class Registrations:
    """Those of one engine. Any thread."""

    def __init__(self, engine: moonpool.TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []  # by address; they never overlap
        self._by_address: dict[int, list[_Piece]] = {}  # what each registration of that address uses

    def add(self, address: int, length: int) -> None:
        """Raises NotRegistered, InvalidArgument for a range that overlaps a registered one in part, and what
        else the engine raises."""
        with self._lock:
            piece = self._holder(address, address + length)
            if piece is None:
                piece = _Piece(self._register(address, length), 0)
                insort(self._pieces, piece, key=_start)
            piece.users += 1
            self._by_address.setdefault(address, []).append(piece)

    def add_all(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        """All of them, or none and the error of the first that cannot be."""
        done: list[int] = []
        try:
            for address, length in zip(addresses, lengths, strict=True):
                self.add(address, length)
                done.append(address)
        except BaseException:
            for address in done:
                self.remove(address)
            raise

    def remove(self, address: int) -> None:
        """Takes the last registration of ``address`` back; with the last user, no transfer touches the memory
        any more when it returns. Raises InvalidArgument for what is not registered, Timeout when a peer
        stands still inside of it: then it stays registered."""
        with self._lock:
            pieces = self._by_address.get(address)
            if not pieces:
                raise InvalidArgument(f"nothing is registered at {address:#x}", operation="deregister")
            piece = pieces[-1]
            if piece.users == 1:
                piece.region.close()
                self._pieces.remove(piece)
            piece.users -= 1
            pieces.pop()
            if not pieces:
                del self._by_address[address]

    def __len__(self) -> int:
        """How many ranges the engine knows."""
        return len(self._pieces)

    def _register(self, address: int, length: int) -> Region:
        try:
            return self._engine.register((address, length))
        except (InvalidArgument, Unavailable) as error:
            raise NotRegistered(str(error), operation="register", cause=error) from error

    def _holder(self, start: int, end: int) -> _Piece | None:
        """What is registered around that range."""
        place = bisect_right(self._pieces, start, key=_start)
        for piece in self._pieces[max(place - 1, 0) : place + 1]:
            if piece.start <= start and end <= piece.end:
                return piece
            if piece.start < end and start < piece.end:
                raise InvalidArgument(
                    f"{end - start} bytes at {start:#x} overlap {piece.end - piece.start} registered ones at "
                    f"{piece.start:#x} in part",
                    operation="register",
                )
        return None
