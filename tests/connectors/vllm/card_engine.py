"""As much of vLLM as decides which blocks are free, around both halves of the connector and a KV cache on a
card. A block without a holder is another request's at once, which fills it with ``ANOTHER``: the card must
write nothing to it from then on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker, KvMemory
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.settings import Settings
from tests.connectors.vllm.card_bed import card_half
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    LOG,
    FakeBlockPool,
    FakeBlocks,
    FakeOutput,
    FakeRequest,
    FakeStep,
    New,
    Status,
    digest,
    engine_config,
)
from tests.connectors.vllm.pd.worlds import eventually
from tests.connectors.vllm.worker_bed import CONTENT, GROUP
from tests.soft_card import SoftCard

BLOCKS, HEADS = 40, 2
ANOTHER = 9.0
QUEUED = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuLaunchKernel")  # what makes a card write


class OwnedBlocks(FakeBlockPool):
    """vLLM's block pool. given: blocks that other requests were given."""

    def __init__(self, kv: npt.NDArray[np.float32]) -> None:
        super().__init__(BLOCKS)
        self._kv = kv
        self.given: set[int] = set()

    def take(self, count: int) -> list[int]:
        blocks = [block for block in self.blocks if not block.ref_cnt][:count]
        self.touch(blocks)
        self.given -= {block.block_id for block in blocks}
        return [block.block_id for block in blocks]

    def free(self, ids: Sequence[int]) -> None:
        self.free_blocks(self.blocks[block_id] for block_id in ids)

    def free_blocks(self, ordered_blocks: Any) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        free = [block.block_id for block in blocks if not block.ref_cnt]
        self._kv[:, free] = ANOTHER
        self.given.update(free)

    def check(self) -> None:
        """Nothing was written to the blocks of others."""
        np.testing.assert_array_equal(self._kv[:, sorted(self.given)], ANOTHER)


@dataclasses.dataclass
class Served:
    """A request that has room. waits: for a load or a pull; gone: it was aborted meanwhile."""

    request: FakeRequest
    blocks: list[int]
    computed: int
    waits: bool
    gone: bool = False


class CardEngine:
    """One engine with one worker."""

    def __init__(
        self,
        name: str,
        card: SoftCard,
        open_node: Callable[[bytes], NodeConnection[Pool]],
    ) -> None:
        self._card = card
        self._array = card.array((len(GROUP), BLOCKS, HEADS, BLOCK_TOKENS, CONTENT))
        self.kv: npt.NDArray[np.float32] = self._array.view

        def open_handover_worker(memory: KvMemory, device: DeviceMemory | None) -> HandoverWorker:
            return HandoverWorker(
                dataclasses.replace(memory, engine_id=name),
                listen="127.0.0.1:0",
                transports=None,
                tenant="default",
                silence_s=10.0,
                log=LOG,
                device=device,
            )

        self.worker = card_half(card, self._array, open_node, open_handover_worker=open_handover_worker)
        self.scheduler = SchedulerHalf(
            engine_config(engine_id=name),
            Settings(compute_if_faster=False, bootstrap_port=0),
            open_node=open_node,
            digest=digest,
            log=LOG,
        )
        self.blocks = OwnedBlocks(self.kv)
        self.scheduler.bind_block_pool(self.blocks)
        self.scheduler.meet_workers([self.worker.handshake()])
        self.served: dict[str, Served] = {}

    def admit(self, request: FakeRequest) -> Served:
        """The request comes, and is given room once the connector has said what it brings."""
        self.scheduler.arrived(request)
        return self.give_room(request)

    def give_room(self, request: FakeRequest) -> Served:
        found: list[int] = []

        def ask() -> bool:
            tokens, _ = self.scheduler.matched_tokens(request, 0)
            if tokens is None:
                self.step()
                return False
            found.append(tokens)
            return True

        eventually(ask)
        (tokens,) = found
        blocks = self.blocks.take(-(-request.num_tokens // BLOCK_TOKENS))
        self.scheduler.admitted(request, FakeBlocks((blocks,)), tokens)
        served = Served(request, blocks, tokens, waits=tokens > 0)
        self.served[request.request_id] = served
        return served

    def step(self, computes: Served | None = None, values: npt.NDArray[np.float32] | None = None) -> None:
        """values: what the forward writes, of the whole KV cache; only blocks of ``computes`` are its."""
        output = FakeStep()
        if computes is not None:
            one = computes.request
            new = New(one.request_id, (computes.blocks,), computes.computed)
            scheduled = one.num_tokens - computes.computed
            output = FakeStep([new], num_scheduled_tokens={one.request_id: scheduled})
        step = self.scheduler.build_step(output)
        handover = step.handover
        if step.loads or (handover is not None and handover.pulls):
            self.worker.begin_loads()
        if handover is not None:
            self.worker.begin_handover(handover)
            if handover.pulls:
                self.worker.start_pulls(handover)
        self.worker.start_loads(step)
        if computes is not None:
            assert values is not None
            self._card.forward(self._array, self._card.pinned(values))
            self._card.settle()  # else it would write to blocks that have another owner later
            computes.request.num_computed_tokens = computes.request.num_tokens
        if handover is not None:
            self.worker.computed(handover)
        if step.saves:
            self.worker.start_saves(step)
        self.worker.poll()
        self._take_ends()

    def _take_ends(self) -> None:
        finished, _ = self.worker.take_finished()
        self.worker.take_failed_blocks()
        self.scheduler.step_ended(FakeOutput(finished, self.worker.take_report()))
        for request_id in finished:
            served = self.served[request_id]
            assert served.waits
            served.waits = False
            if served.gone:
                self._free(served)

    def abort(self, served: Served) -> None:
        """As vLLM does: blocks that are still loaded are kept until the worker has reported the request."""
        served.request.status, served.gone = Status("FINISHED_ABORTED"), True
        self.scheduler.finished(served.request)
        if not served.waits:
            self._free(served)

    def preempt(self, served: Served) -> None:
        """Of a request that runs; it waits for room again."""
        assert not served.waits
        served.request.num_preemptions += 1
        self._free(served)

    def reset(self) -> None:
        """vLLM's prefix cache and the connector's are emptied."""
        self.scheduler.handover.forget_all()
        self.scheduler.cache_was_reset()
        self.scheduler.forget_everything_stored()

    def finish(self, served: Served) -> dict[str, Any] | None:
        """Well. -> kv_transfer_params of the answer."""
        served.request.status, served.gone = Status("FINISHED_LENGTH_CAPPED"), True
        params = self.scheduler.finished(served.request)
        self._free(served)
        return params

    def _free(self, served: Served) -> None:
        self.blocks.free(served.blocks)
        del self.served[served.request.request_id]

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()
