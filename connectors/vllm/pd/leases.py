"""The blocks that a prefill engine keeps for a decode engine, and until when. Pure: time and heartbeats go
in, leases that ended come out.

    open ----its request has ended----> offered ----decode has it all, on every rank------------> over
      |                                    |
      |                                    +----no heartbeat for silence_s----------------------> over
      +----aborted, preempted; or decode has it all already-------------------------------------> over

A lease does not expire while its request runs. Afterwards every heartbeat of the decode engine extends it by
``silence_s``, up to LIFE times that in all: otherwise two engines that hand over to each other might both
wait for blocks that the other's leases keep. Ending a lease while decode reads is safe, see
``pd/__init__.py``.

Invariants: a block is in ``blocks`` once for each reference that is held for it; a slot belongs to one lease.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from moonpool.connectors.vllm.engine_types import Block
from moonpool.connectors.vllm.pd.kv_transfer_params import LEASE_BITS

SLOTS = 4096
LIFE = 12


@dataclass(slots=True)
class Lease:
    """Blocks that are kept for a decode engine.

    id: never 0, and known to peers that were told it only.
    slot: where the workers' lease tables have it.
    ranks: workers that have not handed all of it over.
    blocks: one entry per reference that is held.
    deadline_s: when it expires; None while its request runs.
    last_s: when it expires whatever the decode engine sends.
    heard: whether the decode engine ever sent a heartbeat.
    is_cached: whether it keeps blocks of the engine's own cache for a neighbour, not those of a prefill.
    """

    id: int
    slot: int
    ranks: int
    blocks: list[Block] = field(default_factory=list)
    deadline_s: float | None = None
    last_s: float = 0.0
    heard: bool = False
    is_cached: bool = False


def random_id() -> int:
    """Never 0; only a peer that was told it knows it."""
    return 1 + secrets.randbelow((1 << LEASE_BITS) - 1)


class Leases:
    """The leases of one prefill engine. All methods run on the scheduler's thread."""

    def __init__(
        self, *, silence_s: float, ranks: int, slots: int = SLOTS, new_id: Callable[[], int] = random_id
    ) -> None:
        self._silence_s = silence_s
        self._ranks = ranks
        self._slots = slots
        self._free = deque(range(slots))  # the one that was given back longest ago is next
        self._new_id = new_id
        self._live: dict[int, Lease] = {}
        self._offered: dict[int, Lease] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def offered(self) -> int:
        """Leases that outlived their request."""
        return len(self._offered)

    @property
    def is_full(self) -> bool:
        """Whether all slots are taken."""
        return not self._free

    @property
    def frees_soon(self) -> bool:
        """Whether a live decode engine keeps blocks that only its lease holds."""
        return any(
            lease.heard and any(block.ref_cnt == 1 for block in lease.blocks)
            for lease in self._offered.values()
        )

    def is_live(self, lease_id: int) -> bool:
        """Whether the lease is not over."""
        return lease_id in self._live

    def open(self) -> Lease | None:
        """A new lease without blocks; None when all slots are taken."""
        if not self._free:
            return None
        lease = Lease(self._new_id(), self._free.popleft(), self._ranks)
        self._live[lease.id] = lease
        return lease

    def offer(self, lease: Lease, now_s: float) -> bool:
        """Its request has ended; from now on it expires. False when it is over already."""
        if lease.id not in self._live:
            return False
        lease.deadline_s = now_s + self._silence_s
        lease.last_s = now_s + LIFE * self._silence_s
        self._offered[lease.id] = lease
        return True

    def heard(self, lease_id: int, now_s: float) -> None:
        """Decode gave a heartbeat."""
        lease = self._live.get(lease_id)
        if lease is not None:
            lease.heard = True
            if lease.deadline_s is not None:
                lease.deadline_s = min(now_s + self._silence_s, lease.last_s)

    def handed(self, lease_id: int, ranks: int) -> Lease | None:
        """Decode needs nothing more of ``ranks`` more ranks. Returns the lease when that ends it."""
        lease = self._live.get(lease_id)
        if lease is None:
            return None
        lease.ranks -= ranks
        return self.end(lease_id) if lease.ranks <= 0 else None

    def expired(self, now_s: float) -> list[Lease]:
        """Ends those whose decode engine was silent for too long."""
        late = [lease for lease in self._offered.values() if (lease.deadline_s or now_s) <= now_s]
        for lease in late:
            self.end(lease.id)
        return late

    def end(self, lease_id: int) -> Lease | None:
        """The lease is over: its blocks are the caller's to free. None when it was already."""
        lease = self._live.pop(lease_id, None)
        if lease is not None:
            self._offered.pop(lease_id, None)
            self._free.append(lease.slot)
        return lease

    def end_all(self) -> list[Lease]:
        """All leases are over, as with ``end``."""
        live = list(self._live.values())
        for lease in live:
            self.end(lease.id)
        return live

    def check_integrity(self) -> bool:
        """Whether every slot is free or belongs to one lease, and every offered lease lives."""
        taken = [lease.slot for lease in self._live.values()]
        return (
            sorted([*taken, *self._free]) == list(range(self._slots))
            and self._offered.keys() <= self._live.keys()
            and all((lease.deadline_s is not None) == (i in self._offered) for i, lease in self._live.items())
        )
