"""Stand-ins for unit tests: a pool that answers when it is told to, vLLM's objects, and tensors over numpy
memory."""

from __future__ import annotations

import logging
from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm.adapters import Adapters
from moonpool.connectors.vllm.engine_config import EngineConfig
from moonpool.connectors.vllm.messages import Handshake
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.settings import Settings
from moonpool.core.errors import Error, Unavailable
from moonpool.core.store.keys import Ranges, block_digests

BLOCK_TOKENS = 4
COLUMNS = (Ranges(0, 0, 1, 0, 2), Ranges(0, 1, 1, 0, 2))
FINGERPRINT = bytes(range(32))
LIFE = bytes(range(16))
LOG = logging.getLogger("moonpool-tests")


@dataclass(frozen=True)
class Found:
    blocks: int = 0
    pin_id: int = 0
    holders: bytes = LIFE
    descriptors: bytes = b""
    error: str = ""


@dataclass(frozen=True)
class Loaded:
    ok: bytes = b""
    bytes_loaded: int = 0
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    stored: int = 0
    existed: int = 0
    refused: int = 0
    bytes_stored: int = 0
    error: str = ""


@dataclass
class FakePool:
    """Remembers what was submitted and answers by ``answer``. ``broken``: raised by every submission."""

    broken: Error | None = None
    prefixes: list[tuple[int, bytes, int]] = field(default_factory=list)
    presences: list[tuple[int, list[bytes]]] = field(default_factory=list)
    loads: list[tuple[int, bytes, bytes, list[int], list[int]]] = field(default_factory=list)
    saves: list[tuple[int, bytes, bytes, list[int], list[int]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    closed: bool = False
    waits: list[float] = field(default_factory=list)
    on_wait: Callable[[], bool] = lambda: False
    _done: list[tuple[int, Any]] = field(default_factory=list)
    _tickets: int = 0

    def submit_prefix(self, names: bytes, name_size: int, width: int) -> int:
        self.prefixes.append((self._ticket(), names, width))
        return self._tickets

    def submit_presence(self, names: list[bytes]) -> int:
        self.presences.append((self._ticket(), names))
        return self._tickets

    def submit_load(
        self,
        holders: bytes,
        descriptors: bytes,
        parts: object,
        indices: Any,
        columns: Any,
        after: object = None,
    ) -> int:
        self.loads.append((self._ticket(), holders, descriptors, indices.tolist(), columns.tolist()))
        return self._tickets

    def submit_save(
        self,
        names: bytes,
        name_size: int,
        parents: bytes,
        parts: object,
        indices: Any,
        columns: Any,
        after: object = None,
        keep_s: float = 0.0,
    ) -> int:
        self.saves.append((self._ticket(), names, parents, indices.tolist(), columns.tolist()))
        return self._tickets

    def release(self, pin_id: int) -> None:
        self.released.append(pin_id)

    def poll(self) -> Sequence[tuple[int, Any]]:
        done, self._done = self._done, []
        return done

    def wait_for_read(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.on_wait()

    def close(self) -> None:
        self.closed = True

    def answer(self, ticket: int, answer: Found | Loaded | Saved | bytes | Error) -> None:
        self._done.append((ticket, answer))

    def answer_objects(self, count: int) -> None:
        """Answers the last query, of single objects: so many are pinned, each with another descriptor than
        that of nothing."""
        assert self.prefixes[-1][2] == 1
        self.answer_prefix(count, first=1)

    def answer_prefix(self, blocks: int, *, pin_id: int = 7, error: str = "", first: int = 0) -> None:
        """Answers the last query: so many blocks are pinned. first: of the descriptors' bytes."""
        ticket, _, width = self.prefixes[-1]
        descriptors = b"".join(bytes([(first + index) % 256] * 32) for index in range(blocks * width))
        pin_id = pin_id if blocks else 0
        self.answer(ticket, Found(blocks, pin_id, LIFE, descriptors, error))

    def _ticket(self) -> int:
        if self.broken is not None:
            raise self.broken
        self._tickets += 1
        return self._tickets


@dataclass
class FakeLora:
    """LoRARequest."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = "/nowhere"
    load_inplace: bool = False


@dataclass(frozen=True)
class Status:
    """RequestStatus."""

    name: str


@dataclass
class FakeRequest:
    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any = None
    mm_features: Sequence[Any] = ()
    lora_request: FakeLora | None = None
    cache_salt: str | None = None
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    resumable: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    max_tokens: int = 16
    abort_immediately: bool = False
    status: Status = Status("RUNNING")
    answer: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return len(self.answer)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())

    @property
    def all_token_ids(self) -> list[int]:
        return [*(self.prompt_token_ids or ()), *self.answer]

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class FakeBlockPool:
    def __init__(self, count: int = 400) -> None:
        self.blocks = [FakeBlock(number) for number in range(count)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Any) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def get_cached_block(self, block_hash: bytes, groups: list[int]) -> list[FakeBlock] | None:
        assert groups == [0]
        return next(([block] for block in self.blocks if block.block_hash == block_hash), None)

    def held(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


@dataclass
class FakeBlocks:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass
class FakeTables:
    """KVCacheManager: the blocks that requests have."""

    ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return self.ids[request_id]


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class FakeStep:
    """SchedulerOutput."""

    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass
class FakeOutput:
    """KVConnectorOutput."""

    finished_recving: set[str] | None = None
    kv_connector_worker_meta: Any = None


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def engine_config(**changes: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "block_tokens": BLOCK_TOKENS,
        "groups": (("layers.0", "layers.1"),),
        "kv_heads": 2,
    }
    return EngineConfig(**base | changes)


def node_at(pool: FakePool | None) -> Callable[[bytes], NodeConnection[Pool]]:
    """Opens a connection to ``pool``, or to nothing."""

    def dial() -> FakePool:
        if pool is None:
            raise Unavailable("no node")
        return pool

    def open_node(fingerprint: bytes) -> NodeConnection[Pool]:
        node: NodeConnection[Pool] = NodeConnection(dial, address="here", log=LOG, retry_s=3600)
        node.open(required=False)
        return node

    return open_node


def digest(ids: npt.NDArray[np.uint32], block_tokens: int, seed: bytes, previous: bytes) -> bytes:
    return b"".join(block_digests(ids.tolist(), block_tokens, seed=seed, previous=previous))


HANDSHAKE = Handshake(FINGERPRINT, COLUMNS)


def scheduler_half(
    pool: FakePool | None,
    *,
    clock: Clock | None = None,
    settings: Settings | None = None,
    adapters: Adapters | None = None,
    meet: bool = True,
    **changes: Any,
) -> tuple[SchedulerHalf, FakeBlockPool]:
    """A scheduler's half that has met its workers, or with ``meet`` false has yet to."""
    half = SchedulerHalf(
        engine_config(**changes),
        settings or Settings(),
        open_node=node_at(pool),
        digest=digest,
        log=LOG,
        adapters=adapters,
        clock=clock or Clock(),
    )
    if meet:
        half.meet_workers([HANDSHAKE])
    blocks = FakeBlockPool()
    half.bind_block_pool(blocks)
    return half, blocks


class FakeStorage:
    def __init__(self, memory: npt.NDArray[Any]) -> None:
        self._memory = memory

    def data_ptr(self) -> int:
        return int(self._memory.ctypes.data)

    def nbytes(self) -> int:
        return int(self._memory.nbytes)


@dataclass
class FakeDevice:
    type: str = "cpu"
    index: int | None = None


class FakeTensor:
    """A numpy view that answers like a torch tensor. memory: the array that owns the bytes."""

    def __init__(
        self, view: npt.NDArray[Any], memory: npt.NDArray[Any] | None = None, device: str = "cpu"
    ) -> None:
        self.view = view
        self.memory = view if memory is None else memory
        self.device = FakeDevice(device)
        self.shape = view.shape
        self.dtype = "torch.float32"

    def data_ptr(self) -> int:
        return int(self.view.ctypes.data)

    def stride(self) -> list[int]:
        return [stride // self.view.itemsize for stride in self.view.strides]

    def element_size(self) -> int:
        return int(self.view.itemsize)

    def untyped_storage(self) -> FakeStorage:
        return FakeStorage(self.memory)


def request(tokens: int = 18, name: str = "r", **fields: object) -> FakeRequest:
    return FakeRequest(name, list(range(tokens)), **fields)  # type: ignore[arg-type]


class FakeItem(UserDict[str, Any]):
    """MultiModalKwargsItem."""


def item_data(content: int, **more: Any) -> FakeItem:
    """The fields of an item of at most 16 embeddings: pixels that follow from ``content``, and its grid."""
    pixels = np.full((4, 4), content, np.float32)
    fields = {"pixel_values": pixels, "image_grid_thw": np.array([1, 4, 4]), **more}
    return FakeItem({name: SimpleNamespace(data=value) for name, value in fields.items()})


def feature(
    content: int, begin: int, length: int = 6, *, identifier: str | None = None, **changes: Any
) -> SimpleNamespace:
    """MultiModalFeatureSpec: an image of ``length`` tokens from ``begin`` on."""
    place = SimpleNamespace(offset=begin, length=length, is_embed=changes.pop("is_embed", None))
    made = {"data": item_data(content), "modality": "image", "mm_position": place} | changes
    return SimpleNamespace(identifier=identifier or f"hash of {content}", **made)


def admit(half: SchedulerHalf, one: FakeRequest, local: int = 0, blocks: int = 20) -> int:
    """Asks and admits as vLLM does. Returns the tokens to be loaded."""
    tokens, asynchronous = half.matched_tokens(one, local)
    assert tokens is not None
    assert asynchronous == (tokens > 0)
    half.admitted(one, FakeBlocks((list(range(100, 100 + blocks)),)), tokens)
    return tokens


def first_step(one: FakeRequest, computed: int, scheduled: int, blocks: int = 20) -> FakeStep:
    new = New(one.request_id, (list(range(100, 100 + blocks)),), computed)
    return FakeStep([new], num_scheduled_tokens={one.request_id: scheduled})


def next_step(one: FakeRequest, computed: int, scheduled: int, fresh: list[int] | None = None) -> FakeStep:
    cached = Cached([one.request_id], set(), [None if fresh is None else (fresh,)], [computed])
    return FakeStep([], cached, {one.request_id: scheduled})
