"""The line to one worker of another engine: a thread of its own, because finding a peer, reading from it and
telling it something may each wait for it.

A line dies of its first error, and everything that was to go over it fails with that error. The next job or
message for the peer makes a new line, after a short rest.

Messages go before jobs, and between the pieces of one that lasts: leases over there live by them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeAlias

from moonpool.connectors.vllm.pd.page import SCRATCH, read_description
from moonpool.connectors.vllm.pd.wire import Description, Message, encode
from moonpool.core.errors import Error, Unavailable
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.segment import Segment

LINES_MAX = SCRATCH - 1
REST_S = 1.0
IDLE_S = 300.0

Job: TypeAlias = "Callable[[Line], None]"


class Line:
    """number: of its scratch word. Once it is open: segment; description where blocks are read; is_memory:
    whether reading them is a copy of memory, which waits for no peer."""

    def __init__(
        self,
        key: Hashable,
        number: int,
        engine: TransferEngine,
        resolve: Callable[[], str],
        *,
        reads: bool,
        ended: Callable[[Line, str], None],
    ) -> None:
        """resolve: finds the address; reads: whether blocks will be read over it; ended(line, why): called
        on the line's thread, at its end."""
        self.key = key
        self.number = number
        self.description: Description | None = None
        self.is_memory = False
        self._engine = engine
        self._resolve = resolve
        self._reads = reads
        self._ended = ended
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._texts: deque[bytes] = deque()
        self._segment: Segment | None = None
        self._thread = threading.Thread(target=self._run, name="moonpool-handover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def segment(self) -> Segment:
        assert self._segment is not None
        return self._segment

    def post(self, job: Job) -> None:
        """Has ``job`` done on this line's thread, in order. Never waits."""
        self._jobs.put(job)

    def send(self, message: Message) -> None:
        """Sends a message, after those before it and ahead of jobs. Never waits."""
        self._texts.append(encode(message))
        self.post(Line.speak)

    def speak(self) -> None:
        """Sends what waits to be sent. On this line's thread, which a long job lends for it now and then."""
        while self._texts:
            self._engine.notify(self.segment, self._texts.popleft())

    def stop(self) -> None:
        """Ends the thread after what was posted."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        why = ""
        try:
            self._segment = self._engine.open(self._resolve())
            if self._reads:
                self.description = read_description(self._engine, self._segment)
                paths = {region.transport for region in self._segment.regions}
                self.is_memory = paths <= {"shm", "loopback"}
            while (job := self._jobs.get(timeout=IDLE_S)) is not None:
                self.speak()
                job(self)
        except queue.Empty:
            pass  # no job came for IDLE_S
        except Error as error:
            why = str(error)
        except Exception as error:  # a thread's boundary: its takes fail, the engine goes on
            why = f"unexpected {type(error).__name__}: {error}"
        finally:
            self._ended(self, why)
            if self._segment is not None:
                self._segment.close()


class Lines:
    """The lines of one worker, by key. Not thread-safe: its owner's lock guards it."""

    def __init__(
        self,
        engine: TransferEngine,
        ended: Callable[[Line, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """ended: as of Line."""
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._lines: dict[Hashable, Line] = {}
        self._resting: dict[Hashable, tuple[float, str]] = {}
        self._numbers = list(range(LINES_MAX - 1, -1, -1))

    def get(self, key: Hashable, resolve: Callable[[], str], *, reads: bool) -> Line:
        """The line to a peer, made when there is none. Raises Unavailable while one rests after an error,
        when there are too many, and when this process can have no more threads."""
        line = self._lines.get(key)
        if line is not None:
            return line
        until_s, why = self._resting.pop(key, (0.0, ""))
        if self._clock() < until_s:
            self._resting[key] = (until_s, why)
            raise Unavailable(why)
        if not self._numbers:
            raise Unavailable(f"this worker hands over with {LINES_MAX} others already")
        line = Line(key, self._numbers[-1], self._engine, resolve, reads=reads, ended=self._ended)
        try:
            line.start()
        except RuntimeError as error:  # else jobs would go to a thread that there never was
            raise Unavailable(f"no thread to speak with another engine: {error}", cause=error) from error
        self._numbers.pop()
        self._lines[key] = line
        return line

    def find(self, key: Hashable) -> Line | None:
        return self._lines.get(key)

    def forget(self, line: Line, why: str) -> None:
        """The line has ended."""
        if self._lines.get(line.key) is line:
            del self._lines[line.key]
            self._numbers.append(line.number)
            if why:
                now_s = self._clock()
                self._resting = {key: rest for key, rest in self._resting.items() if rest[0] > now_s}
                self._resting[line.key] = (now_s + REST_S, why)

    def all(self) -> list[Line]:
        return list(self._lines.values())
