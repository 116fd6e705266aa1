"""Prefill's half of the hand-over beside the memory: which leases are valid, and the messages to decode.
Pure: steps and messages go in, messages come out, as (address, message). The owner's lock guards it.

    the request of a transfer (concurrent form) may come before its decode engine asks, or after:

    Open ----> HeldLease <----attached---- Want        then each Grown is told as a Progress
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
    """

    open: Open
    blocks: list[list[int]] = field(default_factory=list)
    final: bool = False


@dataclass(slots=True)
class Waiting:
    """A decode engine that takes a transfer.

    reply: the address of its worker.
    heard_s: when it last sent a heartbeat, in seconds of the clock.
    left: whether it needs the transfer no more.
    """

    reply: str
    heard_s: float
    left: bool = False


class ProducerWorker:
    """The leases of this worker, and the decode engines that wait for their blocks."""

    def __init__(self, set_slot: Callable[[int, int], None], *, silence_s: float) -> None:
        """set_slot(slot, lease): makes a lease valid, or, with 0, none."""
        self._set_slot = set_slot
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
                outbox.append((waiting.reply, _progress(held, more.first)))
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
        if want.transfer in self._gone:
            return [(want.reply, Gone(want.transfer, self._gone[want.transfer]))]
        waiting = self._waiting.get(want.transfer)
        if waiting is not None and waiting.reply != want.reply and not waiting.left:
            return [(want.reply, Gone(want.transfer, "another engine takes this transfer"))]
        if waiting is None and not self._has_room_for(want.transfer):
            return [(want.reply, Gone(want.transfer, "too many transfers are waited for"))]
        self._waiting[want.transfer] = Waiting(want.reply, now_s)
        held = self._by_transfer.get(want.transfer)
        outbox: Outbox = []
        if held is not None:
            self._attached(held, outbox)
        return outbox

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> Outbox:
        """A decode engine still waits for these. It may have missed that one is gone."""
        self._heartbeats.update(lease for lease in heartbeat.leases if lease in self._leases)
        known = []
        outbox: Outbox = []
        for transfer in heartbeat.transfers:
            waiting = self._waiting.get(transfer)
            if waiting is not None and waiting.reply == heartbeat.reply:
                waiting.heard_s = now_s
            held = self._by_transfer.get(transfer)
            if held is not None:
                self._heartbeats.add(held.open.lease)
                known.append((transfer, held.open.lease, min(map(len, held.blocks), default=0)))
            elif transfer in self._gone:
                outbox.append((heartbeat.reply, Gone(transfer, self._gone[transfer])))
        if heartbeat.transfers:
            outbox.append((heartbeat.reply, Known(known)))
        return outbox

    def done(self, done: Done, now_s: float) -> None:
        """A decode engine needs nothing more of a lease, or of a transfer whose lease it does not know. It
        may refuse a transfer before this worker knows either. Only the decode engine that takes a transfer
        ends it."""
        held = self._leases.get(done.lease)
        transfer = done.transfer if held is None else held.open.transfer
        waiting = self._waiting.get(transfer) if transfer else None
        if waiting is not None and waiting.reply != done.reply:
            return
        if held is None and (waiting is not None or not done.lease):
            held = self._by_transfer.get(transfer)  # under a lease that it does not know yet
        if held is not None:
            self._hand(held)
        elif waiting is not None:
            waiting.left = True
        elif not done.lease and done.why and self._has_room_for(transfer):
            self._waiting[transfer] = Waiting(done.reply, now_s, left=True)

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
        if one.transfer:
            self._by_transfer[one.transfer] = held
            self._gone.pop(one.transfer, None)
            self._attached(held, outbox)

    def _say_gone(self, transfer: str, why: str, outbox: Outbox) -> None:
        """Tells the decode engine that takes the transfer, or one that asks later."""
        while len(self._gone) >= GONE_MAX:
            del self._gone[next(iter(self._gone))]
        self._gone[transfer] = why
        waiting = self._waiting.pop(transfer, None)
        if waiting is not None and not waiting.left:
            outbox.append((waiting.reply, Gone(transfer, why)))

    def _attached(self, held: HeldLease, outbox: Outbox) -> None:
        """Both the request and its decode engine are known."""
        waiting = self._waiting.get(held.open.transfer)
        if waiting is None:
            return
        if waiting.left:
            self._hand(held)
            return
        self._heartbeats.add(held.open.lease)
        if any(held.blocks) or held.final:
            outbox.append((waiting.reply, _progress(held, 0)))

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


def _progress(held: HeldLease, first: int) -> Progress:
    return Progress(
        transfer=held.open.transfer,
        lease=held.open.lease,
        slot=held.open.slot,
        prompt=held.open.prompt,
        first=first,
        blocks=[ids[first:] for ids in held.blocks],
        final=held.final,
    )
