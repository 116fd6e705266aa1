"""Prefill's half of the hand-over beside the memory: which leases are valid, and the messages to decode.
Pure: steps and messages go in, messages come out, as (address, message). The owner's lock guards it.

    the request of a transfer (concurrent form) may come before its decode engine asks, or after:

    Open ----> HeldLease <----attached---- Want        then each Grown is told as a Progress

Several workers of one decode engine may read from this one, when that engine has more tensor-parallel ranks.
They are one taker, and a lease ends when each of them is done with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.connectors.vllm.pd.step_plan import End, Grown, Open
from moonpool.connectors.vllm.pd.wire import Done, Gone, Heartbeat, Known, Message, Progress, Want

WAITING_MAX = 4096
GONE_MAX = 4096
Outbox = list[tuple[str, Message]]


@dataclass(slots=True)
class HeldLease:
    """One lease of this worker.

    open: what the scheduler's half said of it.
    blocks: ids of complete blocks, per KV cache group (concurrent form).
    final: whether no more blocks come.
    done: decode workers that need nothing more of it, by taker, where none waits for a transfer.
    """

    open: Open
    blocks: list[list[int]] = field(default_factory=list)
    final: bool = False
    done: dict[str, set[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Waiting:
    """A decode engine that takes a transfer.

    taker: what its workers have in common.
    readers: workers of it that read from this one.
    heard_s: when one of them last sent a heartbeat, in seconds of the clock.
    replies: addresses of those that asked.
    left: addresses of those that need the transfer no more, whatever lease it has.
    """

    taker: str
    readers: int
    heard_s: float
    replies: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    @property
    def has_left(self) -> bool:
        """Whether none of its workers needs the transfer."""
        return len(self.left) >= self.readers

    @property
    def listeners(self) -> list[str]:
        """Addresses of those that are told what is computed."""
        return sorted(self.replies - self.left)


class ProducerWorker:
    """The leases of this worker, and the decode engines that wait for their blocks."""

    def __init__(self, set_slot: Callable[[int, int], None], *, silence_s: float, address: str = "") -> None:
        """set_slot(slot, lease): makes a lease valid, or, with 0, none.
        address: of this worker, by which decode tells it from others of this engine.
        """
        self._set_slot = set_slot
        self._address = address
        self._silence_s = silence_s
        self._leases: dict[int, HeldLease] = {}
        self._by_transfer: dict[str, HeldLease] = {}
        self._waiting: dict[str, Waiting] = {}
        self._gone: dict[str, str] = {}  # transfers that ended without having been handed over -> why
        self._heartbeats: set[int] = set()
        self._handed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    # Events of the scheduler's half

    def begin(self, opens: tuple[Open, ...], ends: tuple[End, ...]) -> Outbox:
        """Opens and ends leases, before the step uses any memory. A slot whose lease ends may open again in
        the same step, and a lease may end in the step that opens it."""
        outbox: Outbox = []
        whys = {end.lease: end.why for end in ends}
        gone: dict[str, str] = {}
        for lease, why in whys.items():
            held = self._leases.pop(lease, None)
            if held is not None:
                self._set_slot(held.open.slot, 0)
                if self._by_transfer.get(held.open.transfer) is held:
                    del self._by_transfer[held.open.transfer]
                    gone[held.open.transfer] = why
        for one in opens:
            if one.lease in whys:
                gone[one.transfer] = whys[one.lease]
            else:
                self._open(one, outbox)
        for transfer, why in gone.items():
            if transfer and transfer not in self._by_transfer:  # otherwise it began again
                self._say_gone(transfer, why, outbox)
        return outbox

    def grown(self, grown: tuple[Grown, ...]) -> Outbox:
        """Records the blocks that are complete after the forward of a step."""
        outbox: Outbox = []
        for more in grown:
            held = self._leases.get(more.lease)
            if held is None:
                continue  # decode does not need it any more
            if not held.blocks:
                held.blocks = [[] for _ in more.block_ids]
            if [len(known) for known in held.blocks] != [more.first] * len(more.block_ids):
                self._give_up(held, "the prefill engine lost track of its blocks", outbox)
                continue
            for known, fresh in zip(held.blocks, more.block_ids, strict=True):
                known.extend(fresh)
            held.final = more.final
            waiting = self._waiting.get(held.open.transfer)
            if waiting is not None:
                self._say_progress(held, more.first, waiting.listeners, outbox)
        return outbox

    def revoke(self) -> Outbox:
        """Ends all leases, as if no decode engine needed anything of them any more."""
        outbox: Outbox = []
        for held in list(self._leases.values()):
            self._give_up(held, "the prefill engine gave up", outbox)
        return outbox

    def take_heartbeats(self) -> tuple[set[int], dict[int, int]]:
        """(leases whose decode engine sent a heartbeat, lease -> 1 where this rank has handed all of it
        over), since the last call."""
        heartbeats, self._heartbeats = self._heartbeats, set()
        handed, self._handed = self._handed, {}
        return heartbeats, handed

    @property
    def has_heartbeats(self) -> bool:
        """Whether take_heartbeats has something. Read without the lock."""
        return bool(self._heartbeats or self._handed)

    # Messages of decode engines

    def want(self, want: Want, now_s: float) -> Outbox:
        """A decode engine takes a transfer, or asks again for all of it. The first one to ask has it, until
        it leaves."""
        taker, transfer = want.taker or want.reply, want.transfer
        if transfer in self._gone:
            return [(want.reply, Gone(transfer, self._gone[transfer], self._address))]
        waiting = self._waiting.get(transfer)
        if waiting is not None and waiting.taker != taker:
            if not waiting.has_left:
                why = "another engine takes this transfer"
                return [(want.reply, Gone(transfer, why, self._address))]
            waiting = None
        elif waiting is None and not self._has_room_for(transfer):
            why = "too many transfers are waited for"
            return [(want.reply, Gone(transfer, why, self._address))]
        held = self._by_transfer.get(transfer)
        if waiting is None:
            # Others of its workers may have left before this one came.
            left = set() if held is None else set(held.done.get(taker, ()))
            waiting = self._waiting[transfer] = Waiting(taker, want.readers, now_s, left=left)
        waiting.heard_s, waiting.readers = now_s, want.readers
        waiting.replies.add(want.reply)
        waiting.left.discard(want.reply)
        outbox: Outbox = []
        if held is not None:
            self._attached(held, [want.reply], outbox)
        return outbox

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> Outbox:
        """A decode worker still waits for these. It may have missed that one is gone."""
        self._heartbeats.update(lease for lease in heartbeat.leases if lease in self._leases)
        known = []
        outbox: Outbox = []
        for transfer in heartbeat.transfers:
            waiting = self._waiting.get(transfer)
            if waiting is not None and heartbeat.reply in waiting.replies:
                waiting.heard_s = now_s
            held = self._by_transfer.get(transfer)
            if held is not None:
                self._heartbeats.add(held.open.lease)
                known.append((transfer, held.open.lease, min(map(len, held.blocks), default=0)))
            elif transfer in self._gone:
                outbox.append((heartbeat.reply, Gone(transfer, self._gone[transfer], self._address)))
        if heartbeat.transfers:
            outbox.append((heartbeat.reply, Known(known, self._address)))
        return outbox

    def done(self, done: Done, now_s: float) -> None:
        """A decode worker needs nothing more of a lease, or of a transfer whose lease it does not know. It
        may refuse a transfer before this worker knows either. Only the decode engine that takes a transfer
        ends it, and each of its workers that read from this one has to say so."""
        held = self._leases.get(done.lease)
        transfer = done.transfer if held is None else held.open.transfer
        waiting = self._waiting.get(transfer) if transfer else None
        taker = done.taker or done.reply
        if waiting is not None and waiting.taker != taker:
            return
        if held is None and (waiting is not None or not done.lease):
            held = self._by_transfer.get(transfer)  # under a lease that it does not know yet
        if waiting is not None:
            waiting.left.add(done.reply)
            if held is not None and waiting.has_left:
                self._hand(held)
        elif held is not None:
            left = held.done.setdefault(taker, set())
            left.add(done.reply)
            if len(left) >= done.readers:
                self._hand(held)
        elif not done.lease and done.why and self._has_room_for(transfer):
            self._waiting[transfer] = Waiting(taker, done.readers, now_s, left={done.reply})

    def tick(self, now_s: float) -> None:
        """Forgets decode engines that were silent for too long."""
        for transfer, waiting in list(self._waiting.items()):
            if now_s - waiting.heard_s > self._silence_s:
                del self._waiting[transfer]

    # The parts

    def _has_room_for(self, transfer: str) -> bool:
        return transfer not in self._gone and len(self._waiting) < WAITING_MAX

    def _open(self, one: Open, outbox: Outbox) -> None:
        held = self._leases[one.lease] = HeldLease(one)
        self._set_slot(one.slot, one.lease)
        if one.confirms:
            self._heartbeats.add(one.lease)
        if one.transfer:
            self._by_transfer[one.transfer] = held
            self._gone.pop(one.transfer, None)
            waiting = self._waiting.get(one.transfer)
            if waiting is not None:
                self._attached(held, waiting.listeners, outbox)

    def _say_gone(self, transfer: str, why: str, outbox: Outbox) -> None:
        """Tells the decode engine that takes the transfer, or one that asks later."""
        while len(self._gone) >= GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._gone[transfer] = why
        waiting = self._waiting.pop(transfer, None)
        if waiting is not None:
            outbox += [(reply, Gone(transfer, why, self._address)) for reply in waiting.listeners]

    def _attached(self, held: HeldLease, replies: list[str], outbox: Outbox) -> None:
        """Both the request and its decode engine are known; ``replies`` are to hear all that is computed."""
        if self._waiting[held.open.transfer].has_left:
            self._hand(held)
            return
        self._heartbeats.add(held.open.lease)
        if any(held.blocks) or held.final:
            self._say_progress(held, 0, replies, outbox)

    def _give_up(self, held: HeldLease, why: str, outbox: Outbox) -> None:
        transfer = held.open.transfer
        if self._by_transfer.get(transfer) is held:
            self._say_gone(transfer, why, outbox)
        self._hand(held)

    def _hand(self, held: HeldLease) -> None:
        self._set_slot(held.open.slot, 0)
        del self._leases[held.open.lease]
        self._handed[held.open.lease] = 1
        transfer = held.open.transfer
        if self._by_transfer.get(transfer) is held:
            del self._by_transfer[transfer]
            self._waiting.pop(transfer, None)

    def _say_progress(self, held: HeldLease, first: int, replies: list[str], outbox: Outbox) -> None:
        progress = Progress(
            transfer=held.open.transfer,
            lease=held.open.lease,
            slot=held.open.slot,
            prompt=held.open.prompt,
            first=first,
            blocks=[ids[first:] for ids in held.blocks],
            final=held.final,
            worker=self._address,
        )
        outbox += [(reply, progress) for reply in replies]
