"""Prefill's half of the hand-over in the scheduler's process: which requests another engine will take, the
leases on their blocks, and what the workers are told about it each step. Runs on the scheduler's thread.

Blocks of a lease have one more reference in the engine's block pool: in the two-step form from the end of the
request on, in the concurrent form from the step that completes them. The step that frees the blocks of a
lease also tells the workers that it ended, so no later step can write to the blocks before every worker has
invalidated the lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.connectors.vllm.engine_types import Block, BlockPool, BlockTables, Request, SchedulerOutput
from moonpool.connectors.vllm.group_blocks import by_part
from moonpool.connectors.vllm.metrics import Tally
from moonpool.connectors.vllm.pd import kv_transfer_params
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, blocks_for, slice_blocks
from moonpool.connectors.vllm.pd.leases import Lease, Leases
from moonpool.connectors.vllm.pd.step_plan import End, Grown, HandoverStep, Open
from moonpool.connectors.vllm.reach import NULL_BLOCK, Reach
from moonpool.connectors.vllm.step_progress import step_progress

if TYPE_CHECKING:
    from moonpool.connectors.vllm.pd.neighbour_offers import NeighbourOffers

LOST_TRACK = "the prefill engine lost track of its blocks"
ENDED_WELL = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"})


@dataclass(frozen=True, slots=True)
class Identity:
    """What names this engine to others.

    engine_id: vLLM's name for it.
    fingerprint: of its KV, 32 bytes.
    ranks: addresses of its workers, ordered by pipeline rank, then tensor rank.
    tp_size: tensor-parallel ranks.
    block_tokens: tokens per block.
    token: the cluster token, which signs offers.
    """

    engine_id: str
    fingerprint: bytes
    ranks: tuple[str, ...]
    tp_size: int
    block_tokens: int
    token: bytes = field(repr=False)


@dataclass(slots=True)
class ProducedRequest:
    """A request whose KV another engine will take.

    transfer: its id in the concurrent form, else "".
    prompt: digest of its prompt, 32 bytes.
    preemptions: as of the lease.
    block_ids: one list per KV cache group.
    told: leading blocks that the workers know to be complete.
    kept: with sliding windows in the two-step form, the blocks of the whole prompt, once it is computed.
    final: whether the workers were told of the last block, or it is kept.
    """

    request: Request
    transfer: str
    prompt: bytes
    lease: Lease
    preemptions: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    told: int = 0
    kept: kv_transfer_params.BlockIds = ()
    final: bool = False


class ProducerScheduler:
    """Prefill's half; all methods run on the scheduler's thread."""

    def __init__(
        self,
        identity: Identity,
        *,
        reaches: Sequence[Reach] = (),
        splits: Sequence[int] = (),
        silence_s: float,
        tally: Tally,
        log: logging.Logger,
        clock: Callable[[], float],
    ) -> None:
        """reaches: how far back each KV cache group looks; (): all of them at everything.
        splits: of each the parts of a block (group_blocks.py); (): one.
        """
        self._identity = identity
        self._reaches = reaches
        self._splits = splits
        self._has_windows = bool(splits) or not all(reach.is_full for reach in reaches)
        self._tables: BlockTables | None = None
        self._tally = tally
        self._log = log
        self._clock = clock
        self._blocks: BlockPool | None = None
        self.leases = Leases(silence_s=silence_s, ranks=len(identity.ranks))
        self.requests: dict[str, ProducedRequest] = {}
        self._transfers: dict[str, str] = {}
        self._opens: list[Open] = []
        self._ends: list[End] = []
        self._ended: list[Lease] = []
        self.neighbours: NeighbourOffers | None = None  # None: nothing of its cache is offered

    def bind(self, blocks: BlockPool) -> None:
        """The engine's blocks."""
        self._blocks = blocks
        if self.neighbours is not None:
            self.neighbours.bind(blocks)

    def bind_tables(self, tables: BlockTables) -> None:
        """The blocks that each request has now."""
        self._tables = tables

    @property
    def has_work(self) -> bool:
        """Whether only a step can bring a hand-over on, or end it."""
        return bool(self.leases.offered or self._opens or self._ends) or self._is_asked

    @property
    def is_idle(self) -> bool:
        """Whether a step has nothing to do here."""
        return not (self.requests or self.leases or self._ends) and not self._is_asked

    @property
    def _is_asked(self) -> bool:
        return self.neighbours is not None and self.neighbours.is_busy

    def is_wanted(self, request: Request) -> bool:
        """Whether another engine will take this request's KV."""
        return request.request_id in self.requests

    def arrived(self, request: Request, prompt: bytes) -> None:
        """A request came. Raises Unusable when the hand-over that it asks for is impossible."""
        asked = kv_transfer_params.parse_prefill(request.kv_transfer_params)
        if asked is None or self._blocks is None:
            return
        self.forget(request.request_id)  # an earlier request of that name, whose end vLLM did not report
        if asked.transfer in self._transfers:
            raise kv_transfer_params.Unusable(
                f"another request with the transfer_id {asked.transfer!r} is under way"
            )
        lease = self._open(asked.transfer, prompt)
        if lease is None:
            raise kv_transfer_params.Unusable("too many hand-overs are under way")
        self.requests[request.request_id] = ProducedRequest(
            request, asked.transfer, prompt, lease, request.num_preemptions
        )
        if asked.transfer:
            self._transfers[asked.transfer] = request.request_id

    def plan(self, output: SchedulerOutput) -> HandoverStep:
        """The plan for the workers of the step that ``output`` describes; ends leases that expired."""
        now_s = self._clock()
        for lease in self.leases.expired(now_s):
            if lease.is_cached:
                self._over(lease, "the lease expired")
                continue
            self._tally.add("leases_expired")
            self._log.warning(
                "moonpool: no decode engine took a finished prefill in time; its %d blocks are free again",
                len(lease.blocks),
            )
            self._over(lease, "the lease expired")
        grown = self._plan_growth(output) if self.requests else []
        if self.neighbours is not None:
            self.neighbours.plan()
        while self._ended:
            self._free(self._ended.pop())
        step = HandoverStep(opens=tuple(self._opens), grown=tuple(grown), ends=tuple(self._ends))
        self._opens, self._ends = [], []
        return step

    def heartbeats(self, heard: set[int], handed: Mapping[int, int]) -> bool:
        """What the workers received from decode engines. Returns whether blocks are free because of it.

        heard: leases whose decode engine sent a heartbeat.
        handed: lease -> ranks that need it no more.
        """
        now_s = self._clock()
        freed = False
        for lease_id in heard:
            self.leases.heard(lease_id, now_s)
        for lease_id, ranks in handed.items():
            lease = self.leases.handed(lease_id, ranks)
            if lease is not None:
                freed |= self._free(lease)  # the workers made it invalid themselves
        if self.neighbours is not None:
            self.neighbours.confirmed(heard)
        return freed

    def finished(self, request: Request) -> dict[str, Any] | None:
        """The request is over: what its answer must carry for decode, or None."""
        produced = self.requests.pop(request.request_id, None)
        if produced is None:
            return None
        if produced.transfer:
            del self._transfers[produced.transfer]
        tokens = request.num_prompt_tokens
        if request.status.name not in ENDED_WELL or request.num_computed_tokens < tokens:
            self._end(produced.lease, "the prefill was aborted")
            return None
        last = blocks_for(tokens, self._identity.block_tokens)
        if produced.transfer and produced.final:
            self.leases.offer(produced.lease, self._clock())
            return None
        held = produced.kept if self._has_windows else slice_blocks(produced.block_ids, 0, last)
        if produced.transfer or any(len(ids) < last for ids in held) or not held:
            self._end(produced.lease, LOST_TRACK)
            return None
        if not self.leases.offer(produced.lease, self._clock()):
            return None
        if not self._has_windows:
            self._hold(produced.lease, held)
        self._tally.add("leases")
        offer = Offer(
            engine_id=self._identity.engine_id,
            ranks=self._identity.ranks,
            lease=produced.lease.id,
            slot=produced.lease.slot,
            blocks=held,
            tokens=tokens,
            fingerprint=self._identity.fingerprint,
            prompt=produced.prompt,
            tp_size=self._identity.tp_size,
        )
        return kv_transfer_params.answer_of(offer, self._identity.token, request_id=request.request_id)

    def forget(self, request_id: str) -> None:
        """Something unexpected happened to the request: no decode engine takes it."""
        produced = self.requests.pop(request_id, None)
        if produced is not None:
            self._transfers.pop(produced.transfer, None)
            self._end(produced.lease, "the prefill engine gave up")

    def forget_all(self) -> None:
        """Hands over nothing that was computed so far. The blocks are free at once: the workers invalidate
        the leases before a step can write to them."""
        self.requests.clear()
        self._transfers.clear()
        if self.neighbours is not None:
            self.neighbours.drop_asks()
        for lease in self.leases.end_all():
            self._over(lease, "the prefill engine forgot what it had computed")
        while self._ended:
            self._free(self._ended.pop())

    # Blocks of the engine's own cache, for neighbours

    def open_cached(self, blocks: Sequence[Block]) -> Lease | None:
        """A lease on cached blocks, which the workers confirm; None: too many hand-overs are under way."""
        assert self._blocks is not None
        lease = self.leases.open()
        if lease is None:
            return None
        lease.is_cached = True
        self._opens.append(Open(lease.id, lease.slot, "", bytes(32), confirms=True))
        self.leases.offer(lease, self._clock())
        self._blocks.touch(blocks)
        lease.blocks += blocks
        return lease

    def end_cached(self, lease: Lease, why: str) -> None:
        """The lease ends with the next step, if it is not over yet."""
        self._end(lease, why)

    # The parts

    def _open(self, transfer: str, prompt: bytes) -> Lease | None:
        lease = self.leases.open()
        if lease is not None:
            self._opens.append(Open(lease.id, lease.slot, transfer, prompt))
        return lease

    def _end(self, lease: Lease, why: str) -> None:
        if self.leases.end(lease.id) is not None:
            self._over(lease, why)

    def _over(self, lease: Lease, why: str) -> None:
        """The lease has ended; the step that reports it frees its blocks."""
        self._ends.append(End(lease.id, why))
        self._ended.append(lease)

    def _hold(self, lease: Lease, block_ids: kv_transfer_params.BlockIds) -> None:
        assert self._blocks is not None
        null = NULL_BLOCK if self._has_windows else None
        blocks = [self._blocks.blocks[block_id] for ids in block_ids for block_id in ids if block_id != null]
        self._blocks.touch(blocks)
        lease.blocks += blocks

    def _free(self, lease: Lease) -> bool:
        """Lets go of the lease's blocks. Whether any of them is free now."""
        assert self._blocks is not None
        blocks, lease.blocks = lease.blocks, []
        if blocks:
            self._blocks.free_blocks(reversed(blocks))
        return any(block.ref_cnt == 0 for block in blocks)

    def _plan_growth(self, output: SchedulerOutput) -> list[Grown]:
        for each in self.requests.values():
            if each.request.num_preemptions != each.preemptions:
                self._restart(each)  # at once: it may wait for the very blocks that its lease keeps
        grown: list[Grown] = []
        for request_id, computed in step_progress(output, self.requests.get):
            self._grow(self.requests[request_id], computed, grown)
        return grown

    def _grow(self, produced: ProducedRequest, computed: int, grown: list[Grown]) -> None:
        """When this step ends, ``computed`` tokens are computed."""
        if produced.final or produced.lease.ranks <= 0:  # 0: decode needs no more
            return
        tokens = produced.request.num_prompt_tokens
        size = self._identity.block_tokens
        if not produced.transfer:
            if self._has_windows and computed >= tokens:
                self._keep(produced, blocks_for(tokens, size))
            return
        produced.final = computed >= tokens
        last = blocks_for(tokens, size) if produced.final else computed // size
        if last <= produced.told and not produced.final:
            return
        fresh = self._blocks_of(produced, produced.told, last)
        if not fresh:
            produced.final = True  # no more blocks are reported, and finished() finds no lease to offer
            self._end(produced.lease, LOST_TRACK)
            return
        self._hold(produced.lease, fresh)
        grown.append(Grown(produced.lease.id, produced.told, fresh, produced.final))
        produced.told = last
        if produced.final:
            self._tally.add("leases")

    def _keep(self, produced: ProducedRequest, last: int) -> None:
        """The prompt is computed with this step: keeps its blocks, of which the end of the request, one token
        later, may find one passed by a window that decode still needs."""
        produced.final = True
        produced.kept = self._blocks_of(produced, 0, last)
        self._hold(produced.lease, produced.kept)

    def _blocks_of(self, produced: ProducedRequest, first: int, last: int) -> kv_transfer_params.BlockIds:
        """The ids of blocks [first, last) by their parts; NULL_BLOCK for those that decode does not need, as
        it computes the last token only. (): one that it needs is gone."""
        if not self._has_windows:
            return slice_blocks(produced.block_ids, first, last)
        if self._tables is None:
            return ()
        computed = np.array(produced.request.num_prompt_tokens - 1)
        groups = []
        tables = self._tables.get_block_ids(produced.request.request_id)
        splits = self._splits or (1,) * len(self._reaches)
        for reach, ids, split in zip(self._reaches, tables, splits, strict=True):
            size = self._identity.block_tokens // split
            start = max(int(reach.first_token(computed)) // size, first * split)
            needed = range(start, min(-(-int(computed) // size), last * split))
            if needed and (needed.stop > len(ids) or NULL_BLOCK in ids[needed.start : needed.stop]):
                return ()
            behind = last * split - needed.stop
            own = ids[needed.start : needed.stop] if needed else []
            groups.append(
                [NULL_BLOCK] * (last * split - behind - len(own)) + list(own) + [NULL_BLOCK] * behind
            )
        return by_part(groups, splits, first, last)

    def _restart(self, produced: ProducedRequest) -> None:
        """Opens a new lease under the same transfer: after a preemption the blocks are others."""
        produced.preemptions = produced.request.num_preemptions
        if produced.kept:
            produced.kept = ()
            self._end(produced.lease, "preempted")
        if not produced.told or produced.lease.ranks <= 0:
            return
        lease = self._open(produced.transfer, produced.prompt)
        self._end(produced.lease, "preempted")
        if lease is None:
            produced.final = True  # no more blocks are reported, and finished() finds no lease to offer
            return
        produced.lease, produced.told, produced.final = lease, 0, False
