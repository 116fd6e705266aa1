"""The connection to one worker of another engine. It has a thread of its own, because finding a peer, reading
from it and sending it a message may each wait for it.

The first error ends a connection, and everything that was to go over it fails with that error. After REST_S
the next job or message for the peer makes a new connection.

Messages go before jobs, and between the pieces of a long job: leases of the peer live by them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeAlias

from moonpool.connectors.vllm.pd.lease_table import SCRATCH, read_description
from moonpool.connectors.vllm.pd.wire import Description, Message, encode
from moonpool.core.errors import Error, Unavailable
from moonpool.core.transfer.engine import TransferEngine
from moonpool.core.transfer.segment import Segment

CONNECTIONS_MAX = SCRATCH - 1
REST_S = 1.0
IDLE_S = 300.0
NO_ROOM = f"this worker hands over with {CONNECTIONS_MAX} others already"

Job: TypeAlias = "Callable[[PeerConnection], None]"


class PeerConnection:
    """The connection to one worker of another engine, with its thread.

    number: of its scratch word.
    segment: the peer, once the connection is open.
    description: the peer's memory layout, where blocks are read.
    is_memory: whether reading blocks copies memory, and so waits for no peer.
    """

    def __init__(
        self,
        key: Hashable,
        number: int,
        engine: TransferEngine,
        resolve: Callable[[], str],
        *,
        reads: bool,
        ended: Callable[[PeerConnection, str], None],
    ) -> None:
        """key: of the peer, as its owner knows it.
        number: of this connection's scratch word, 0 to CONNECTIONS_MAX - 1.
        resolve: returns the peer's address; may wait, and raises Error.
        reads: whether blocks will be read over the connection.
        ended: called with the reason, or "", on the connection's thread at its end.
        """
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
        """Starts the thread. Raises RuntimeError when this process can have no more."""
        self._thread.start()

    @property
    def segment(self) -> Segment:
        """The peer, once the connection is open."""
        assert self._segment is not None
        return self._segment

    def post(self, job: Job) -> None:
        """Has ``job`` done on this connection's thread, in order. Never waits."""
        self._jobs.put(job)

    def send(self, message: Message) -> None:
        """Sends a message, after those before it and ahead of jobs. Never waits."""
        self._texts.append(encode(message))
        self.post(PeerConnection.speak)

    def speak(self) -> None:
        """Sends the messages that wait. Called on this connection's thread, between the pieces of a job."""
        while self._texts:
            self._engine.notify(self.segment, self._texts.popleft())

    def stop(self) -> None:
        """Ends the thread after what was posted."""
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread, ``timeout_s`` at most."""
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


class PeerConnections:
    """The connections of one worker, by key. Not thread-safe: its owner's lock guards it."""

    def __init__(
        self,
        engine: TransferEngine,
        ended: Callable[[PeerConnection, str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engine: opens the connections.
        ended: see PeerConnection.
        clock: seconds, monotonic.
        """
        self._engine = engine
        self._ended = ended
        self._clock = clock
        self._connections: dict[Hashable, PeerConnection] = {}
        self._resting: dict[Hashable, tuple[float, str]] = {}
        self._numbers = list(range(CONNECTIONS_MAX - 1, -1, -1))

    def get(self, key: Hashable, resolve: Callable[[], str], *, reads: bool) -> PeerConnection:
        """The connection to a peer, made when there is none; the arguments are PeerConnection's. Raises
        Unavailable within REST_S after an error, with too many connections, and without a thread for it."""
        connection = self._connections.get(key)
        if connection is not None:
            return connection
        until_s, why = self._resting.pop(key, (0.0, ""))
        if self._clock() < until_s:
            self._resting[key] = (until_s, why)
            raise Unavailable(why)
        if not self._numbers:
            raise Unavailable(NO_ROOM)
        connection = PeerConnection(
            key, self._numbers[-1], self._engine, resolve, reads=reads, ended=self._ended
        )
        try:
            connection.start()
        except RuntimeError as error:  # else jobs would wait for a thread that never ran
            raise Unavailable(f"no thread to speak with another engine: {error}", cause=error) from error
        self._numbers.pop()
        self._connections[key] = connection
        return connection

    def check_room(self, keys: Iterable[Hashable]) -> None:
        """Raises Unavailable unless there is room for connections to all of these peers."""
        if sum(key not in self._connections for key in keys) > len(self._numbers):
            raise Unavailable(NO_ROOM)

    def find(self, key: Hashable) -> PeerConnection | None:
        """The connection to a peer; None when there is none."""
        return self._connections.get(key)

    def send(self, key: Hashable, message: Message) -> None:
        """Sends a message to a peer, if there is a connection to it."""
        connection = self._connections.get(key)
        if connection is not None:
            connection.send(message)

    def forget(self, connection: PeerConnection, why: str) -> None:
        """The connection has ended."""
        if self._connections.get(connection.key) is connection:
            del self._connections[connection.key]
            self._numbers.append(connection.number)
            if why:
                now_s = self._clock()
                self._resting = {key: rest for key, rest in self._resting.items() if rest[0] > now_s}
                self._resting[connection.key] = (now_s + REST_S, why)

    def all(self) -> list[PeerConnection]:
        """All connections."""
        return list(self._connections.values())
