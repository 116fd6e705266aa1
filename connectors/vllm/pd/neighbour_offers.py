"""Blocks of this engine's own prefix cache, offered to other engines: which of those asked for are still
there, the leases on them, and when the answer may go out.

    asked (a thread of the bootstrap page) --plan--> opened --the workers' word--> answered

A block is offered by what vLLM's block pool has under its hash in this very step, so one that was evicted is
not offered. From then on it carries one more reference, under a lease as of a hand-over: the taker copies,
then looks whether the lease is still valid.

The answer waits until the workers have reported that the lease is valid. With that report all steps that were
planned before have ended, too: vLLM names a block when it plans the step that computes it.

An engine that lacks blocks of its own ends these leases at once (``revoke``): its own requests come first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.engine_types import Block, BlockPool
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd import kv_transfer_params
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.leases import Lease
from moonpool.connectors.vllm.pd.neighbour_asks import Ask, decode_ask, digest_of
from moonpool.connectors.vllm.pd.producer_scheduler import Identity, ProducerScheduler

LENT_BLOCKS_SHARE = 8  # at most an eighth of the engine's blocks is kept for other engines' asks
LENT_LEASES_MAX = 64  # at a time; hand-overs need most of the slots that they share with these
WAITING_MAX = 32  # asks at a time
ANSWER_S_MAX = 60.0
NOTHING = b"{}"
REVOKED = "the engine needs its blocks itself"


class Question:
    """An ask between the thread that brings it and the scheduler's."""

    def __init__(self, ask: Ask, digest: bytes) -> None:
        self.ask = ask
        self.digest = digest
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._answer: bytes | None = None
        self._has_left = False

    def answer(self, body: bytes) -> bool:
        """Whether its caller still waits, and gets this answer."""
        with self._lock:
            if self._has_left:
                return False
            self._answer = body
        self._answered.set()
        return True

    def wait(self, timeout_s: float) -> bytes | None:
        """The answer; None: it did not come in time, and will not be used any more."""
        self._answered.wait(timeout_s)
        with self._lock:
            self._has_left = self._answer is None
            return self._answer


class NeighbourOffers:
    """``ask`` is called on the threads of the bootstrap page, all else on the scheduler's."""

    def __init__(
        self,
        producer: ProducerScheduler,
        identity: Identity,
        *,
        algorithm: str,
        wake: Callable[[], None],
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        """producer: keeps the leases.
        algorithm: vLLM's of its block hashes; "": this engine's blocks cannot be offered.
        wake: lets an idle engine begin a step; called on any thread.
        """
        self._producer = producer
        self._identity = identity
        self._algorithm = algorithm
        self._wake = wake
        self._tally = tally
        self._clock = clock
        self.answered = 0  # asks
        self._blocks: BlockPool | None = None
        self._is_stopped = False
        self._asked: deque[Question] = deque()
        self._opened: dict[int, tuple[Question, Lease, tuple[int, ...]]] = {}
        self._lent: dict[int, Lease] = {}  # leases of asks, among them some that have ended
        self._waiting = threading.BoundedSemaphore(WAITING_MAX)

    def bind(self, blocks: BlockPool) -> None:
        """The engine's blocks."""
        self._blocks = blocks

    @property
    def is_busy(self) -> bool:
        """Whether an ask waits for a step."""
        return bool(self._asked or self._opened)

    def ask(self, body: bytes) -> bytes:
        """Answers one ask. Waits for the scheduler's thread as long as the taker does. Raises Malformed."""
        question = Question(decode_ask(body, self._identity.token), digest_of(body))
        if self._is_stopped or not self._waiting.acquire(blocking=False):
            return NOTHING
        try:
            self._asked.append(question)
            self._wake()
            return question.wait(min(question.ask.wait_s, ANSWER_S_MAX)) or NOTHING
        finally:
            self._waiting.release()

    def plan(self) -> None:
        """Opens leases for the asks that came since the last step."""
        while self._asked:
            question = self._asked.popleft()
            found = self._found(question.ask) if self._has_room() else []
            lease = self._producer.open_cached(found) if found else None
            if lease is None:
                self.answered += 1
                self._tally.add("neighbour_refused")
                question.answer(NOTHING)
                continue
            self._lent[lease.id] = lease
            self._opened[lease.id] = (question, lease, tuple(int(block.block_id) for block in found))

    def confirmed(self, lease_ids: set[int]) -> None:
        """The workers have these leases, and all steps that were planned before them have ended."""
        for lease_id in self._opened.keys() & lease_ids:
            question, lease, block_ids = self._opened.pop(lease_id)
            self.answered += 1
            if not question.answer(msgspec.json.encode(self._answer(question, lease, block_ids))):
                self._producer.end_cached(lease, "its taker did not wait for it")
                continue
            self._tally.add("neighbour_offers")
            self._tally.add("neighbour_offered_tokens", len(block_ids) * self._identity.block_tokens)

    def revoke(self) -> bool:
        """Ends the leases of all asks; the next step frees their blocks. Returns whether there were any."""
        lent = self._live()
        for lease in lent:
            self._producer.end_cached(lease, REVOKED)
        self.drop_asks()
        self._lent.clear()
        return bool(lent)

    def stop(self) -> None:
        """Offers nothing from here on: hashes do not tell the KV of these weights from that of others."""
        self._is_stopped = True
        self.revoke()

    def drop_asks(self) -> None:
        """Answers all that wait with nothing."""
        for question, _, _ in self._opened.values():
            question.answer(NOTHING)
        self._opened.clear()
        while self._asked:
            self._asked.popleft().answer(NOTHING)

    def _live(self) -> list[Lease]:
        self._lent = {id: lease for id, lease in self._lent.items() if self._producer.leases.is_live(id)}
        return list(self._lent.values())

    def _has_room(self) -> bool:
        """Whether one more lease may be opened; looked at first, as an ask may name many blocks."""
        return len(self._live()) < LENT_LEASES_MAX and not self._producer.leases.is_full

    def _found(self, ask: Ask) -> list[Block]:
        """The leading blocks of those asked for that may be offered."""
        identity = self._identity
        fits = (ask.engine_id, ask.fingerprint) == (identity.engine_id, identity.fingerprint)
        if (
            self._blocks is None
            or self._is_stopped
            or not fits
            or not self._algorithm
            or ask.algorithm != self._algorithm
        ):
            return []
        lent = sum(len(lease.blocks) for lease in self._live())
        room = len(self._blocks.blocks) // LENT_BLOCKS_SHARE - lent
        found: list[Block] = []
        for block_hash in ask.hashes[: max(room, 0)]:
            block = compat.cached_block(self._blocks, block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def _answer(self, question: Question, lease: Lease, block_ids: tuple[int, ...]) -> dict[str, Any]:
        identity = self._identity
        offer = Offer(
            engine_id=identity.engine_id,
            ranks=identity.ranks,
            lease=lease.id,
            slot=lease.slot,
            blocks=(block_ids,),
            tokens=len(block_ids) * identity.block_tokens,
            fingerprint=identity.fingerprint,
            prompt=question.digest,
            tp_size=identity.tp_size,
        )
        return kv_transfer_params.answer_of(offer, identity.token, request_id="")
