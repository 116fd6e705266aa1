"""TensorRT-LLM as a connector sees it, without TensorRT-LLM: the modules that a connector imports, in both
layouts, and an executor that calls it in the recorded order of one loop.

    get_num_new_matched_tokens -> update_state_after_alloc -> [parked requests leave the batch] ->
    build_connector_meta -> bind_connector_meta -> start_load_kv -> each layer: wait_for_layer_load, forward,
    save_kv_layer -> wait_for_save -> get_finished; request_finished when a request ends

Its model "computes": the bytes of a token in a layer and head are a function of all tokens up to it, and
their sum is the answer, so that a wrong byte anywhere changes it.
"""

from __future__ import annotations

import abc
import hashlib
import json
import pickle
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

NO_PAGE = -1
ABSTRACT = {  # what an implementation must have, in every version
    "KvCacheConnectorWorker": (
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
    ),
    "KvCacheConnectorScheduler": (
        "build_connector_meta",
        "get_num_new_matched_tokens",
        "request_finished",
        "update_state_after_alloc",
    ),
}


def install(*, layout: str) -> None:
    """Puts stand-ins of the package into sys.modules. layout: "new" (connectors/), "old" (up to 1.2)."""

    class Base:
        def __init__(self, llm_args: Any) -> None:
            self._llm_args = llm_args
            self._metadata: Any = None

        def bind_connector_meta(self, metadata: object) -> None:
            self._metadata = metadata

        def get_connector_meta(self) -> object:
            return self._metadata

    names = {
        "tensorrt_llm": {},
        "tensorrt_llm._utils": {"mpi_rank": lambda: RANK[0], "mpi_allgather": lambda value: [value]},
        "tensorrt_llm._torch": {},
        "tensorrt_llm._torch.pyexecutor": {},
    }
    connector = {
        name: abc.ABCMeta(name, (Base,), {verb: abc.abstractmethod(lambda self: None) for verb in verbs})
        for name, verbs in ABSTRACT.items()
    }
    if layout == "new":
        names["tensorrt_llm._torch.pyexecutor.connectors"] = {}
        names["tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"] = connector
    else:
        names["tensorrt_llm._torch.pyexecutor.kv_cache_connector"] = connector
    for name, members in names.items():
        module = types.ModuleType(name)
        module.__dict__.update(members)
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


RANK = [0]


class Tensor:
    """What a connector uses of the pool tensor [block, layer, (K, V), numbers], over memory of the host, or
    of a card that ``array`` mirrors. address: of the memory."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str, device: Any, address: int) -> None:
        self.array, self.device, self.address = array, device, address
        self.shape = array.shape
        self.dtype = f"torch.{dtype}"

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(size // self.array.itemsize for size in self.array.strides)

    def data_ptr(self) -> int:
        return self.address


@dataclass
class Region:
    """A KvCacheRegion over an array [slot, bytes]."""

    array: np.ndarray[Any, Any]
    buffers: tuple[Any, ...]
    device: Any
    base: int

    @property
    def size(self) -> int:
        return int(self.array.shape[1])

    @property
    def stride(self) -> int:
        return int(self.array.strides[0])

    @property
    def num_slots(self) -> int:
        return int(self.array.shape[0])

    def as_tensor(self) -> Tensor:
        return Tensor(self.array, "uint8", self.device, self.base)


@dataclass
class Request:
    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    py_multimodal_data: Any = None
    is_generation_only_request: bool = False
    sampling_config: Any = field(default_factory=lambda: SimpleNamespace(beam_width=1))
    pages: list[list[int]] = field(default_factory=list)
    computed: int = 0
    matched: int = 0  # tokens that came from the pool
    told: int = 0  # tokens and pages that a SchedulerOutput has had
    told_pages: int = 0
    prompt: int = 0

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class GroupedRequestData(RequestData):
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[Any] = field(default_factory=list)
    cached_requests: list[Any] = field(default_factory=list)


def llm_args(
    model: Path,
    *,
    tokens: int = 4,
    dtype: str = "auto",
    tp_size: int = 1,
    backend: str = "TRTLLM",
    more: dict[str, Any] | None = None,
) -> Any:
    """more: further arguments, those of kv_cache_config under "kv_cache"."""
    args = SimpleNamespace(
        model=str(model),
        dtype="auto",
        load_format="auto",
        attn_backend=backend,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=1,
        kv_cache_config=SimpleNamespace(tokens_per_block=tokens, dtype=dtype),
        kv_connector_config=SimpleNamespace(server_url=None),
    )
    further = dict(more or {})
    vars(args.kv_cache_config).update(further.pop("kv_cache", {}))
    vars(args).update(further)
    return args


def write_model(
    folder: Path,
    *,
    heads: int = 8,
    layers: int = 3,
    head_dim: int = 4,
    weights: int = 1,
    more: dict[str, Any] | None = None,
) -> Path:
    """more: further fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "torch_dtype": "bfloat16",
        **(more or {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(bytes([weights]) * 4096)
    return folder


class Engine:
    """One engine of ``tp_size`` ranks in one process. groups: 1 for one pool tensor, more for layer groups of
    several regions, the last of them with a window of ``window`` blocks. blocks: how many pages each group
    has, or all of them."""

    device: Any = SimpleNamespace(type="cpu")
    stream: Any = None  # of its forward passes

    def __init__(
        self,
        connector: Any,
        args: Any,
        *,
        heads: int = 8,
        layers: int = 3,
        head_dim: int = 4,
        blocks: int | tuple[int, ...] = 64,
        groups: int = 1,
        window: int = 10**6,
        chunk: int = 10**6,
        dtype: str = "bfloat16",
    ) -> None:
        self.args, self.groups, self.layers, self.window, self.chunk = args, groups, layers, window, chunk
        self.tokens = args.kv_cache_config.tokens_per_block
        self.heads, self.head_dim = heads, head_dim
        self.local = max(1, heads // args.tensor_parallel_size)
        pages = (blocks,) * groups if isinstance(blocks, int) else blocks
        self.free = [list(range(count - 1, -1, -1)) for count in pages]
        self.next_id = 1
        self.finished: list[int] = []  # for the next get_finished
        self.kept: dict[int, Request] = {}  # whose pages the connector still uses
        self.done: dict[int, int] = {}  # loads, by how many ranks have named them
        self.released: dict[int, int] = {}
        self.ranks = []
        self.scheduler: Any = None
        for rank in range(args.tensor_parallel_size):
            RANK[0] = rank
            arguments = args if rank == 0 else SimpleNamespace(**vars(args))
            if rank == 0:
                self.scheduler = connector.MoonpoolScheduler(arguments)
            worker = connector.MoonpoolWorker(arguments)
            memory: list[np.ndarray[Any, Any]] = []
            numbers = self.local * self.tokens * head_dim
            if groups == 1:
                array, address = self.allocate((*pages, layers, 2, numbers))
                memory.append(array)
                worker.register_kv_caches(Tensor(array, dtype, self.device, address))
            else:
                worker.register_kv_cache_layout(self._layout(pages, layers * numbers))
            self.ranks.append((worker, memory))

    def allocate(self, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], int]:
        """Zeros of 16 bits, and their address."""
        array = np.zeros(shape, np.uint16)
        return array, int(array.ctypes.data)

    def _layout(self, pages: tuple[int, ...], numbers: int) -> Any:
        def region(count: int, plane: int) -> Region:
            array, address = self.allocate((count, numbers))
            buffer = SimpleNamespace(layer_id=0, role=("key", "value")[plane], expansion=1)
            return Region(array.view(np.uint8), (buffer,), self.device, address)

        # Keys and values of a group lie in regions of their own.
        self.regions = getattr(self, "regions", [])
        mine = [[region(count, plane) for plane in (0, 1)] for count in pages]
        self.regions.append(mine)
        return SimpleNamespace(
            tokens_per_block=self.tokens,
            groups=tuple(
                SimpleNamespace(layer_group_id=group, regions=tuple(regions), replicated_regions=())
                for group, regions in enumerate(mine)
            ),
        )

    # The model

    def numbers(self, tokens: list[int], position: int, layer: int, head: int, plane: int) -> Any:
        text = repr((tokens[: position + 1], layer, head, plane)).encode()
        raw = hashlib.sha256(text).digest() * (self.head_dim // 16 + 1)
        return np.frombuffer(raw, np.uint16)[: self.head_dim]

    def cell(self, rank: int, group: int, page: int, layer: int, plane: int) -> Any:
        """[head, token, number]: how the TRTLLM backend orders a layer of a block."""
        if self.groups == 1:
            flat = self.ranks[rank][1][0][page, layer, plane]
        else:
            region = self.regions[rank][group][plane].array.view(np.uint16)
            flat = region[page].reshape(self.layers, -1)[layer]
        return flat.reshape(self.local, self.tokens, self.head_dim)

    def compute(self, request: Request, first: int, last: int) -> None:
        for position in range(first, last):
            block, token = divmod(position, self.tokens)
            for rank in range(len(self.ranks)):
                for group in range(self.groups):
                    page = request.pages[group][block]
                    if page < 0:
                        continue
                    for layer in range(self.layers):
                        for head in range(self.local):
                            whole = rank * self.heads // len(self.ranks) + head
                            for plane in (0, 1):
                                self.cell(rank, group, page, layer, plane)[head, token] = self.numbers(
                                    request.tokens, position, layer, whole, plane
                                )

    def answer(self, request: Request) -> str:
        """A digest over all bytes that attention would read for the last token."""
        digest = hashlib.sha256()
        for position in range(request.prompt):
            block, token = divmod(position, self.tokens)
            for group in range(self.groups):
                if request.pages[group][block] < 0:
                    continue
                for layer in range(self.layers):
                    for plane in (0, 1):
                        heads: dict[int, bytes] = {}
                        for rank in range(len(self.ranks)):
                            cell = self.cell(rank, group, request.pages[group][block], layer, plane)
                            for head in range(self.local):
                                raw = cell[head, token].tobytes()
                                assert (
                                    heads.setdefault(rank * self.heads // len(self.ranks) + head, raw) == raw
                                )
                        digest.update(b"".join(heads[head] for head in range(self.heads)))
        return digest.hexdigest()

    def expected(self, tokens: list[int]) -> str:
        digest = hashlib.sha256()
        for position in range(len(tokens)):
            for _ in range(self.groups):
                for layer in range(self.layers):
                    for plane in (0, 1):
                        for head in range(self.heads):
                            digest.update(self.numbers(tokens, position, layer, head, plane).tobytes())
        return digest.hexdigest()

    # The executor

    def start(self, tokens: list[int], *, on_device: int = 0, **fields: Any) -> Request:
        """A new request gets its pages. on_device: tokens that the engine's own cache has (it computes them
        here, which comes to the same). Returns it parked or ready."""
        request = Request(self.next_id, list(tokens), prompt=len(tokens), **fields)
        self.next_id += 1
        matched, later = self.scheduler.get_num_new_matched_tokens(request, on_device)
        assert isinstance(matched, int)
        assert not (later and matched == 0), "TensorRT-LLM raises here"
        assert on_device + matched < len(tokens)
        count = -(-len(tokens) // self.tokens)
        request.pages = [[self.free[group].pop() for _ in range(count)] for group in range(self.groups)]
        self.compute(request, 0, on_device)
        if self.groups == 1:
            self.scheduler.update_state_after_alloc(request, list(request.pages[0]))
        else:
            self.scheduler.update_state_after_alloc_by_layer_group(request, [list(p) for p in request.pages])
        self.matched = request.matched = matched
        self.parked = {request.request_id} if later else set()
        request.computed = on_device + matched
        return request

    def step(self, batch: list[Request], parked: list[Request] = []) -> list[int]:  # noqa: B006
        """One loop of the executor. Returns the requests that are loaded."""
        output = SchedulerOutput()
        for request in batch:
            end = min(request.computed + self.chunk, len(request.tokens))
            scheduled = end - request.computed
            tokens, pages = (
                request.tokens[request.told :],
                [ids[request.told_pages :] for ids in request.pages],
            )
            data: Any
            if self.groups == 1:
                data = RequestData(request.request_id, tokens, pages[0], request.computed, scheduled)
            else:
                data = GroupedRequestData(
                    request.request_id,
                    tokens,
                    [],
                    request.computed,
                    scheduled,
                    new_block_ids_by_layer_group=pages,
                )
            (output.cached_requests if request.told else output.new_requests).append(data)
            request.told, request.told_pages = len(request.tokens), len(request.pages[0])
        meta = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker, _ in self.ranks:
            worker.bind_connector_meta(pickle.loads(meta))
            worker.start_load_kv(self.stream)
        if batch:
            for worker, _ in self.ranks:
                for layer in range(self.layers):
                    worker.wait_for_layer_load(layer, self.stream)
            for request in batch:
                end = min(request.computed + self.chunk, len(request.tokens))
                self.compute(request, request.computed, end)
                request.computed = end
            for worker, _ in self.ranks:
                for layer in range(self.layers):
                    worker.save_kv_layer(layer, self.stream)
                worker.wait_for_save(self.stream)
        return self.poll([request.request_id for request in parked])

    def poll(self, started: list[int]) -> list[int]:
        """get_finished of all ranks; what all have returned. Frees the pages that were kept."""
        finished, self.finished = self.finished, []
        for worker, _ in self.ranks:
            for done, ids in zip(
                (self.released, self.done), worker.get_finished(list(finished), started), strict=True
            ):
                for request_id in ids:
                    done[request_id] = done.get(request_id, 0) + 1
        for request_id in self._by_all(self.released):
            self._free(self.kept.pop(request_id))
        return self._by_all(self.done)

    def _by_all(self, done: dict[int, int]) -> list[int]:
        ended = [request_id for request_id, ranks in done.items() if ranks == len(self.ranks)]
        for request_id in ended:
            del done[request_id]
        return ended

    def finish(self, request: Request) -> None:
        if self.groups == 1:
            asynchronous = self.scheduler.request_finished(request, list(request.pages[0]))
        else:
            asynchronous = self.scheduler.request_finished_by_layer_group(request, request.pages)
        if asynchronous:
            self.kept[request.request_id] = request
            self.finished.append(request.request_id)
        else:
            self._free(request)

    def _free(self, request: Request) -> None:
        for group, ids in enumerate(request.pages):
            for page in ids:
                if page >= 0:
                    self.scribble(group, page)  # the next owner of the page
                    self.free[group].append(page)

    def scribble(self, group: int, page: int) -> None:
        for rank in range(len(self.ranks)):
            for layer in range(self.layers):
                for plane in (0, 1):
                    self.cell(rank, group, page, layer, plane)[:] = 0xDEAD

    def run(self, tokens: list[int], until: Any, **fields: Any) -> tuple[int, str]:
        """A prompt from its beginning to its end: (tokens that came from the pool, the answer)."""
        request = self.start(tokens, **fields)
        matched = self.matched
        if self.parked:
            loaded = self.step([], [request])
            done = loaded or until(lambda: self.poll([]))
            assert done == [request.request_id]
        while request.computed < len(tokens):
            self.step([request])
        answer = self.answer(request)
        self.finish(request)
        return matched, answer

    def flush(self) -> None:
        for worker, _ in self.ranks:
            worker.flush()

    def close(self) -> None:
        for worker, _ in self.ranks:
            worker.close()
