"""Objects of other hosts that a lookup finds. The scheduler promises only those that lie on this host: a host
that dies later would otherwise end this engine, since TensorRT-LLM cannot be told of a failed load. So they
are copied to the own node first, where the next engine of this host finds them, too. That is bounded in time,
because the executor waits, and in bytes. The engine computes the rest and saves it on this host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import numpy as np
import numpy.typing as npt

from moonpool.connectors.tensorrt_llm.pool import Held
from moonpool.core.errors import Error

FETCH_S = 0.05  # so long a question waits for other hosts
PIECE_BYTES = 4 << 20


class Offer:
    """Blocks that were promised to a request, and the pins that all ranks rely on.

    first: the number of the first block.
    """

    def __init__(
        self,
        first: int,
        blocks: int,
        held: Held,
        objects: npt.NDArray[np.intp],
        others: Held | None = None,
    ) -> None:
        """held: pins this rank's objects of these blocks, and where there is no ``others`` those of all.
        objects: the places, in ``held``, of this rank's objects, block by block in its own order.
        others: pins what the other ranks load.
        """
        self.first, self.blocks, self.held = first, blocks, held
        self._objects, self._others = objects, others

    def objects(self, blocks: int) -> npt.NDArray[np.intp]:
        """The places, in ``held``, of this rank's objects of the first ``blocks`` blocks."""
        return self._objects[: blocks * (len(self._objects) // self.blocks)]


class Fetch:
    """Copies what other hosts have to the own node, before the scheduler promises it.

    limit: bytes that one lookup may bring.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._thread = ThreadPoolExecutor(1, "moonpool-fetch")
        self._running: Future[None] | None = None

    def bring(self, held: Held, wanted: Sequence[int], parents: Sequence[bytes | None]) -> bool:
        """Copies the objects ``wanted``, from the first on, to the own node. Returns False at once when there
        is nothing to hope for: the limit allows none of them, or a piece that was late is still on its way.
        Otherwise some may be there now. Raises Error when the own node does not answer.

        parents: of each of them the name of the object before it.
        """
        if self._running is not None and not self._running.done():
            return False
        pieces: list[list[int]] = []
        left, piece_bytes = self._limit, 0
        for at, which in enumerate(wanted):
            size = held.sizes[which]
            if size > left:
                break
            left -= size
            if not pieces or piece_bytes + size > PIECE_BYTES:
                pieces.append([])
                piece_bytes = 0
            pieces[-1].append(at)
            piece_bytes += size
        if not pieces:
            return False
        late = threading.Event()

        def copy() -> None:
            for piece in pieces:
                try:
                    held.copy([wanted[at] for at in piece], [parents[at] for at in piece])
                except Error:  # that host is away: a miss
                    return
                if late.is_set():
                    return

        self._running = self._thread.submit(copy)
        ended, _ = wait_for([self._running], FETCH_S)
        late.set()
        for job in ended:
            job.result()
        return True

    def close(self) -> None:
        """Waits for the copies under way."""
        self._thread.shutdown()
