"""Engines of several tensor-parallel ranks in one process: a HandoverWorker for each rank, over rank_memory's
arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from moonpool.connectors.vllm.pd.bootstrap import Bootstrap
from moonpool.connectors.vllm.pd.consumer_worker import Ended
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker, KvMemory
from moonpool.connectors.vllm.pd.kv_transfer_params import Meeting, Offer
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.pd.step_plan import Grown, HandoverStep, Hold, Open, Pull
from moonpool.core.service.addresses import Address
from tests.connectors.vllm.fakes import FINGERPRINT, LOG
from tests.connectors.vllm.pd.rank_memory import (
    SMALL,
    Array,
    RankMemory,
    Shape,
    layers_of_stage,
    model_kv,
    rank_memory,
)
from tests.connectors.vllm.pd.worlds import PROMPT, eventually

LEASE, SLOT = 77, 5


@dataclass
class RankedEngine:
    """whole: the KV of its model, where its memory has that."""

    name: str
    workers: list[HandoverWorker]
    memories: list[RankMemory]
    whole: Array
    tp_size: int

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(worker.address for worker in self.workers)

    # Prefill

    def offer(self, blocks: Sequence[int], *, lease: int = LEASE, slot: int = SLOT) -> Offer:
        """What a two-step answer says of these blocks; opens the lease on all ranks."""
        self.begin(HandoverStep(opens=(Open(lease, slot, "", PROMPT),)))
        ids = (tuple(blocks),)
        tokens = 4 * len(blocks)
        return Offer(self.name, self.addresses, lease, slot, ids, tokens, FINGERPRINT, PROMPT, self.tp_size)

    def opens(self, transfer: str, *, lease: int = LEASE, slot: int = SLOT) -> None:
        self.begin(HandoverStep(opens=(Open(lease, slot, transfer, PROMPT),)))

    def computes(
        self,
        first: int,
        blocks: Sequence[int],
        *,
        final: bool,
        lease: int = LEASE,
        ranks: slice = slice(None),
    ) -> None:
        """A step of a request in the concurrent form. ranks: which of them it has reached."""
        for worker in self.workers[ranks]:
            worker.computed(HandoverStep(grown=(Grown(lease, first, (tuple(blocks),), final),)))

    @contextmanager
    def page(self) -> Iterator[str]:
        """Its bootstrap page."""
        size = self.tp_size
        workers = {(rank % size, rank // size): place for rank, place in enumerate(self.addresses)}
        page = Bootstrap(Address("127.0.0.1", 0), dp_rank=0, engine_id=self.name, workers=workers)
        try:
            yield f"http://{page.address}"
        finally:
            page.close()

    def wait_handed(self, lease: int = LEASE) -> None:
        """Returns when each rank was told that decode needs nothing more."""
        for worker in self.workers:
            eventually(lambda each=worker: lease in each.take_heartbeats()[1])  # type: ignore[misc]

    def is_valid(self, slot: int = SLOT) -> list[bool]:
        """On which ranks a lease is valid there."""
        return [bool(worker._lease_table.slot(slot)) for worker in self.workers]

    # Decode

    def begin(self, step: HandoverStep) -> None:
        for worker in self.workers:
            worker.begin(step)

    def hold(self, source: Offer | Meeting, blocks: int, *, name: str = "r") -> None:
        self.begin(HandoverStep(holds=(Hold(name, source, PROMPT, blocks, self.addresses[0]),)))

    def pull(
        self, blocks: Sequence[int], *, first: int = 0, name: str = "r", ranks: slice = slice(None)
    ) -> None:
        for worker in self.workers[ranks]:
            worker.pull(HandoverStep(pulls=(Pull(name, first, (tuple(blocks),)),)))

    def take(self, source: Offer | Meeting, blocks: Sequence[int], *, first: int = 0) -> None:
        """A request comes and is given these blocks."""
        self.hold(source, first + len(blocks))
        self.pull(blocks, first=first)

    def ended(self, ranks: slice = slice(None)) -> list[Ended]:
        """The next pull that ends on each of these ranks."""
        found: list[Ended] = []
        for worker in self.workers[ranks]:
            mine: list[Ended] = []
            eventually(lambda each=worker, seen=mine: bool(seen.extend(each.take_ended()) or seen))  # type: ignore[misc]
            found += mine
        return found

    def drop(self, *, name: str = "r") -> None:
        self.begin(HandoverStep(drops=(name,)))

    def assert_has(self, here: Sequence[int], prefill: RankedEngine, there: Sequence[int]) -> None:
        """These blocks are those of the prefill engine, on all ranks."""
        for memory in self.memories:
            expected = prefill.whole[list(memory.layers)][:, list(there)][:, :, list(memory.heads)]
            np.testing.assert_array_equal(memory.kv[:, list(here)], expected)


@contextmanager
def engine(
    name: str,
    tp_size: int,
    *,
    pp_size: int = 1,
    heads: int = 2,
    layout: str = "HND",
    computed: bool = False,
    transports: list[str] | None = None,
    silence_s: float = 10.0,
    shape: Shape = SMALL,
    has_windows: bool = False,
) -> Iterator[RankedEngine]:
    """computed: whether its memory has the KV of one model on all ranks, as a prefill engine's.
    has_windows: as KvMemory's."""
    whole = model_kv(heads, seed=1, shape=shape)
    with ExitStack() as stack:
        made = RankedEngine(name, [], [], whole, tp_size)
        for rank in range(tp_size * pp_size):
            pp_rank, tp_rank = divmod(rank, tp_size)
            content = whole if computed else None
            layers = layers_of_stage(pp_rank, pp_size, shape)
            memory = rank_memory(heads, tp_size, tp_rank, layout, layers=layers, content=content, shape=shape)
            worker = HandoverWorker(
                KvMemory(
                    engine_id=name,
                    fingerprint=FINGERPRINT,
                    spans=memory.spans,
                    held=memory.held,
                    sizes=Sizes(heads, tp_size, pp_size),
                    rank=rank,
                    tp_rank=tp_rank,
                    pp_rank=pp_rank,
                    has_windows=has_windows,
                ),
                listen="127.0.0.1:0",
                transports=transports,
                tenant="default",
                silence_s=silence_s,
                log=LOG,
            )
            stack.callback(worker.close)
            made.workers.append(worker)
            made.memories.append(memory)
        yield made
