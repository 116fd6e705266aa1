"""Two engines' memories in one process: numpy arrays that stand for KV caches, with a HandoverWorker each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.layout import all_rows, layers_of_columns, object_ranges, read_layout, spans
from moonpool.connectors.vllm.pd.consumer_worker import Ended
from moonpool.connectors.vllm.pd.copy_ranges import Held
from moonpool.connectors.vllm.pd.handover_worker import HandoverWorker, KvMemory
from moonpool.connectors.vllm.pd.kv_transfer_params import BlockIds, Meeting, Offer
from moonpool.connectors.vllm.pd.rank_pairs import Sizes
from moonpool.connectors.vllm.pd.step_plan import HandoverStep, Hold, Open, Pull
from tests.connectors.vllm.card_bed import CardTensor
from tests.connectors.vllm.fakes import FINGERPRINT, LOG, FakeTensor
from tests.soft_card import CardArray, SoftCard

BLOCKS, HEADS, TOKENS, CONTENT = 40, 2, 4, 8
LAYERS = ("layers.0", "layers.1", "layers.2")
PROMPT = bytes(range(100, 132))
DEADLINE_S = 20.0


def eventually(what: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
    """Returns when it is so."""
    give_up_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < give_up_s, "it did not come to that"
        time.sleep(0.002)


@dataclass
class World:
    """One worker. kv: [layer, block, head, token, content] as the model sees it, whatever the order of the
    bytes."""

    kv: npt.NDArray[np.float32]
    handover_worker: HandoverWorker
    engine_id: str
    device: DeviceMemory | None = None

    def offer(self, blocks: list[int], *, lease: int = 77, slot: int = 5, tokens: int = 0) -> Offer:
        """What a two-step answer says of these blocks; opens the lease."""
        self.handover_worker.begin(HandoverStep(opens=(Open(lease, slot, "", PROMPT),)))
        ids: BlockIds = (tuple(blocks),)
        place = (self.handover_worker.address,)
        return Offer(self.engine_id, place, lease, slot, ids, tokens or 4 * len(blocks), FINGERPRINT, PROMPT)

    def take(self, source: Offer | Meeting, blocks: list[int], *, first: int = 0, name: str = "r") -> None:
        """A request comes and is given these blocks."""
        self.hold(source, first + len(blocks), name=name)
        self.handover_worker.pull(HandoverStep(pulls=(Pull(name, first, (tuple(blocks),)),)))

    def hold(self, source: Offer | Meeting, blocks: int, *, name: str = "r") -> None:
        self.handover_worker.begin(HandoverStep(holds=(Hold(name, source, PROMPT, blocks),)))

    def ended(self) -> Ended:
        """The next pull that ends."""
        found: list[Ended] = []

        def look() -> bool:
            found.extend(self.handover_worker.take_ended())
            return bool(found)

        eventually(look)
        (one,) = found
        return one

    def wait_handed(self, lease: int) -> None:
        """Returns when a decode engine has said that it needs nothing more of it."""
        eventually(lambda: lease in self.handover_worker.take_heartbeats()[1])


def heads_first(rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(memory, the model's view): LBHNC."""
    memory = rng.random((len(LAYERS), BLOCKS, HEADS, TOKENS, CONTENT), np.float32)
    return memory, memory


def tokens_first(rng: np.random.Generator) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(memory, the model's view): LBNHC."""
    memory = rng.random((len(LAYERS), BLOCKS, TOKENS, HEADS, CONTENT), np.float32)
    return memory, memory.transpose(0, 1, 3, 2, 4)


@contextmanager
def world(
    name: str,
    *,
    seed: int,
    make: Callable[
        [np.random.Generator], tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]
    ] = heads_first,
    transports: list[str] | None = None,
    fingerprint: bytes = FINGERPRINT,
    silence_s: float = 10.0,
    listen: str = "127.0.0.1:0",
    rank: int = 0,
    heads: int = HEADS,
    card: SoftCard | None = None,
) -> Iterator[World]:
    """rank: tensor-parallel; heads: that this worker holds, of HEADS; card: on which the memory lies."""
    memory, kv = make(np.random.default_rng(seed))
    if card is None:
        caches = {layer: FakeTensor(kv[number, :, :heads], memory) for number, layer in enumerate(LAYERS)}
    else:
        array = card.array(memory.shape)
        array.view[:] = memory
        kv = np.lib.stride_tricks.as_strided(array.view, kv.shape, kv.strides)
        array = CardArray(array.address, kv)
        caches = {layer: CardTensor(array, number) for number, layer in enumerate(LAYERS)}
    layout = read_layout(caches, (LAYERS,), TOKENS)
    columns = object_ranges(layout, kv_heads=[HEADS], first_heads=[0])
    rows = all_rows(layout, columns, first_heads=[0])
    device = None
    if card is not None:
        device = DeviceMemory(
            layout,
            rows,
            current_stream=lambda ordinal: card.stream,
            ring_bytes=8 << 20,
            copy_threads=1,
            log=LOG,
        )
        device.step_begins()
    handover_worker = HandoverWorker(
        KvMemory(
            engine_id=name,
            fingerprint=fingerprint,
            spans=spans(caches),
            held=Held(columns, rows, layers_of_columns(layout, columns)),
            sizes=Sizes(HEADS, 1),
            rank=rank,
            tp_rank=rank,
            pp_rank=0,
        ),
        listen=listen,
        transports=transports,
        tenant="default",
        silence_s=silence_s,
        log=LOG,
        device=device,
    )
    try:
        yield World(kv, handover_worker, name, device)
    finally:
        handover_worker.close()
        if device is not None:
            device.close()
