"""Objects of other hosts that a lookup finds. The scheduler promises only those that were read to this host:
a host that dies later would otherwise end this engine, since TensorRT-LLM cannot be told of a failed load.
The read is bounded in time, because the executor waits, and in bytes, because this process holds them until
they are loaded. The engine computes the rest and saves it on this host."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from moonpool.connectors.tensorrt_llm.pool import Held, Views
from moonpool.core.errors import Error, Unavailable

FETCH_S = 0.05  # so long a question waits for other hosts
PIECE_BYTES = 4 << 20


class Offer:
    """Blocks that were promised to a request: the objects of this rank, block by block, and the pins that
    other ranks rely on.

    first: the number of the first block.
    """

    def __init__(self, first: int, blocks: int, views: Views, held: Held) -> None:
        self.first, self.blocks, self.views, self.held = first, blocks, views, held


class Fetch:
    """Reads what other hosts have before the scheduler promises it.

    limit: bytes that one lookup may bring from other hosts.
    room: bytes of all promises together.
    """

    def __init__(self, limit: int, room: int) -> None:
        self._limit = limit
        self._room = room
        self._lock = threading.Lock()  # of _room: a promise may end on any thread
        self._thread = ThreadPoolExecutor(1, "moonpool-fetch")
        self._running: Future[None] | None = None

    def offer(self, held: Held, first: int, blocks: int, width: int, own: Sequence[int]) -> Offer | None:
        """What can be promised of ``blocks`` blocks of ``width`` objects: those whose objects ``own`` are
        here now. Raises Error when the own node does not answer."""
        wanted = [block * width + column for block in range(blocks) for column in own]
        found: list[memoryview | None] = [None] * len(wanted)
        near = [at for at, which in enumerate(wanted) if not held.far[which]]
        for at, view in zip(near, held.views([wanted[at] for at in near]), strict=True):
            found[at] = view
        if len(near) < len(wanted):
            self._bring(held, wanted, found)
        here: Views = []
        for view in found:
            if view is None:
                break
            here.append(view)
        promised = len(here) // len(own)
        del here[promised * len(own) :]
        if not promised:
            return None
        offer = Offer(first, promised, here, held)
        far = sum(held.sizes[which] for which in wanted[: len(here)] if held.far[which])
        if far:
            self._give(-far)
            weakref.finalize(offer, self._give, far).atexit = False
        return offer

    def _bring(self, held: Held, wanted: Sequence[int], found: list[memoryview | None]) -> None:
        """Puts into ``found`` what comes in time. A late piece is dropped, and until it has come nothing else
        is read."""
        if self._running is not None and not self._running.done():
            return
        with self._lock:
            left = min(self._limit, self._room)
        pieces: list[list[int]] = []
        piece_bytes = 0
        for at, which in enumerate(wanted):
            size = held.sizes[which]
            if found[at] is not None or not held.far[which]:
                continue
            if size > left:
                break
            left -= size
            if not pieces or piece_bytes + size > PIECE_BYTES:
                pieces.append([])
                piece_bytes = 0
            pieces[-1].append(at)
            piece_bytes += size
        if not pieces:
            return
        late = threading.Event()

        def bring() -> None:
            for piece in pieces:
                try:
                    views = held.views([wanted[at] for at in piece])
                except Error:  # that host is away: a miss
                    return
                if late.is_set():
                    return
                for at, view in zip(piece, views, strict=True):
                    found[at] = view

        self._running = self._thread.submit(bring)
        ended, _ = wait_for([self._running], FETCH_S)
        late.set()
        for job in ended:
            job.result()

    def _give(self, size: int) -> None:
        with self._lock:
            self._room += size

    def close(self) -> None:
        """Waits for the fetches under way."""
        self._thread.shutdown()


class Kept:
    """Objects that the scheduler of another process promised and keeps in the pool. Those of this host are
    pinned from the first lookup on; one of another host is read when it is asked for, so memory for one
    answer suffices."""

    def __init__(self, hold: Callable[[], Held | None], objects: int) -> None:
        self._hold = hold
        self._objects = objects
        self._held: Held | None = None
        self._near: list[memoryview | None] = []

    def views(self, first: int, last: int) -> Views:
        """The objects [first, last). Raises Error when not all of them are there, and asks anew the next
        time."""
        try:
            held = self._held = self._held or self._ask()
            found = self._near[first:last]
            far = [at for at, view in enumerate(found) if view is None]
            for at, view in zip(far, held.views([first + at for at in far]) if far else (), strict=True):
                found[at] = view
            here = [view for view in found if view is not None]
            if len(here) < len(found):
                raise Unavailable("promised blocks are gone", operation="load")
            return here
        except Error:
            self._held = None
            raise

    def _ask(self) -> Held:
        held = self._hold()
        if held is None or len(held) < self._objects:
            raise Unavailable("the pool does not have promised blocks", operation="load")
        self._near = [None] * self._objects
        here = [at for at, far in enumerate(held.far) if not far]
        for at, view in zip(here, held.views(here), strict=True):
            self._near[at] = view
        return held
