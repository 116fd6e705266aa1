"""The memory of a bench: of the host, or of a CUDA card, which Python cannot look at."""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING, Any

from moonpool import _native
from moonpool.core.bench import control
from moonpool.core.errors import Error, InvalidArgument
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.region import Region

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.uint8]

OWN, FOREIGN = "own", "foreign"  # of the host: allocated by the engine, or not
COPY_TIMEOUT_S = 60.0  # of a card's copies for --verify
_PIECE = 1 << 24
_CARD = re.compile(r"cuda:([0-9]{1,4})")


def is_of_card(kind: str) -> bool:
    """Whether the kind of memory is "cuda:" and the number of a card."""
    return _CARD.fullmatch(kind) is not None


class Memory:
    """Memory registered with an engine under the label DATA.

    kind: OWN, FOREIGN, or "cuda:0" for memory of that card of this process. Raises InvalidArgument where this
    host has no such card.
    """

    def __init__(self, engine: TransferEngine, nbytes: int, kind: str = OWN) -> None:
        self._copies: Any = None  # of a card
        if card := _CARD.fullmatch(kind):
            try:
                memory = _native.CardMemory(int(card[1]), nbytes)
            except Error as error:
                raise InvalidArgument(f"no memory of {kind}: {error}", operation="bench") from error
            self._copies = _native.CardCopies()
            self.region: Region = engine.register(memory, control.DATA)
        elif kind == FOREIGN:
            self.region = engine.register(mmap.mmap(-1, nbytes), control.DATA)
        else:
            self.region = engine.allocate(nbytes, control.DATA)

    def put(self, data: Array, at: int = 0) -> None:
        """Writes the bytes there."""
        if self._copies is None:
            self.region.view[at : at + len(data)] = data.data
        else:
            self._copies.copy([self._range(at, len(data))], [data], COPY_TIMEOUT_S)

    def take(self, at: int, nbytes: int) -> Array:
        """What lies there; of the host no copy."""
        import numpy as np

        if self._copies is None:
            return np.frombuffer(self.region.view, np.uint8, nbytes, at)
        found = np.empty(nbytes, np.uint8)
        self._copies.copy([found], [self._range(at, nbytes)], COPY_TIMEOUT_S)
        return found

    def clear(self, at: int, nbytes: int) -> None:
        """Zeros there."""
        import numpy as np

        for begin in range(at, at + nbytes, _PIECE):
            self.put(np.zeros(min(_PIECE, at + nbytes - begin), np.uint8), begin)

    def fill(self) -> None:
        """Puts pattern(0) into all of it, a piece at a time."""
        for at in range(0, self.region.length, _PIECE):
            self.put(control.pattern(at // 8, min(_PIECE, self.region.length - at)), at)

    def _range(self, at: int, nbytes: int) -> tuple[int, int]:
        return self.region.address + at, nbytes
