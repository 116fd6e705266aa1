"""Repeats KV events to clients that ask: from a number on, a few messages at a time.

    question -> _Replay (what to send, in order) -> as many messages as the caller's queue takes -> the rest
    when there is room again

Callers that read nothing cost a bounded amount: few messages wait for each, few replays are under way at
once, and one that does not progress for STALL_S, or takes longer than REPLAY_S, is dropped. Such a caller can
ask again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import zmq

END_OF_REPLAY = b"\xff" * 8
CALLER_MESSAGES_MAX = 4  # queued for one caller
REPLAYS_MAX = 8  # replays at once
QUESTIONS_MAX = 256  # questions that wait
QUESTION_BYTES_MAX = 4096
STALL_S = 5.0
REPLAY_S = 60.0
RETRY_MS = 20  # pause before a full queue is tried again
_AT_ONCE = 64  # messages to one caller before the others get their turn

Message = tuple[int, bytes]  # number, batch


@dataclass(slots=True)
class _Replay:
    caller: bytes
    left: Iterator[Message]
    next: Message | None
    began_s: float
    moved_s: float


class ReplayServer:
    """Serves one ROUTER socket, on one thread. recall(start): what a caller gets from that number on."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        topic: bytes,
        recall: Callable[[int], Iterable[Message]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.answered = 0
        self.dropped = 0  # replays dropped: the caller did not read, or too many asked
        self._router = router
        self._topic = topic
        self._recall = recall
        self._clock = clock
        self._questions: deque[tuple[bytes, int]] = deque()
        self._running: dict[bytes, _Replay] = {}

    @staticmethod
    def prepare(router: zmq.Socket[bytes]) -> None:
        """Sets the socket up; call it before the bind."""
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error instead of a silent gap
        router.setsockopt(zmq.SNDHWM, CALLER_MESSAGES_MAX)
        router.setsockopt(zmq.RCVHWM, CALLER_MESSAGES_MAX)
        router.setsockopt(zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)

    def hear(self) -> bool:
        """Reads the questions that have arrived, and returns whether any waits. A caller's new question
        replaces its former one."""
        for _ in range(_AT_ONCE):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            caller, start = frames[0], int.from_bytes(frames[2], "big")
            self._running.pop(caller, None)
            self._questions = deque(each for each in self._questions if each[0] != caller)
            if len(self._questions) >= QUESTIONS_MAX:
                self._questions.popleft()
                self.dropped += 1
            self._questions.append((caller, start))
        return bool(self._questions)

    def serve(self) -> int | None:
        """Sends what can be sent now. Returns the milliseconds until the next try; None: nothing is due."""
        now = self._clock()
        while self._questions and len(self._running) < REPLAYS_MAX:
            caller, start = self._questions.popleft()
            left = iter(self._recall(start))
            self._running[caller] = _Replay(caller, left, next(left, None), now, now)
        busy = False
        for replay in list(self._running.values()):
            moved, over = self._send(replay)
            busy = busy or moved
            if moved:
                replay.moved_s = now
            late = now - replay.moved_s > STALL_S or now - replay.began_s > REPLAY_S
            if over or late:
                del self._running[replay.caller]
                self.dropped += not over
        if not self._running:
            return None if not self._questions else 0
        return 0 if busy else RETRY_MS

    def _send(self, replay: _Replay) -> tuple[bool, bool]:
        """Returns (whether any message was sent, whether the replay has ended)."""
        sent = 0
        try:
            while sent < _AT_ONCE:
                number, payload = replay.next or (-1, b"")
                head = END_OF_REPLAY if replay.next is None else number.to_bytes(8, "big")
                topic = b"" if replay.next is None else self._topic
                self._router.send_multipart((replay.caller, b"", topic, head, payload), zmq.NOBLOCK)
                sent += 1
                if replay.next is None:
                    self.answered += 1
                    return True, True
                replay.next = next(replay.left, None)
        except zmq.Again:
            return sent > 0, False
        except zmq.ZMQError:  # the caller has disconnected
            return False, True
        return True, False


class ReplayBuffer:
    """The last messages, up to a number and a total of bytes."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages: deque[Message] = deque()
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._bytes = 0

    def add(self, number: int, payload: bytes) -> None:
        """Appends a message, and drops the oldest ones beyond either maximum."""
        self._messages.append((number, payload))
        self._bytes += len(payload)
        while len(self._messages) > self._messages_max or self._bytes > self._bytes_max:
            self._bytes -= len(self._messages.popleft()[1])

    def oldest(self, otherwise: int) -> int:
        """The number of the oldest message; ``otherwise`` when the buffer is empty."""
        return self._messages[0][0] if self._messages else otherwise

    def since(self, start: int) -> Sequence[Message]:
        """The messages numbered ``start`` or higher, in order."""
        return [message for message in self._messages if message[0] >= start]
