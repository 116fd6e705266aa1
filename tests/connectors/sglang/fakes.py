"""SGLang's host pools and configurations as the backend sees them, with numpy in place of torch. The names,
shapes and meanings are those of SGLang 0.5.18 to 0.5.23; test_real_pools.py holds the real classes beside."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# The tensor behind (K, V), by layout, as (axes, ...) of L layers, P pages, T tokens, H heads.
SHAPES: dict[str, Callable[[int, int, int, int], tuple[int, ...]]] = {
    "layer_first": lambda L, P, T, H: (L, P * T, H),  # noqa: N803
    "page_first": lambda L, P, T, H: (P * T, L, H),  # noqa: N803
    "page_first_direct": lambda L, P, T, H: (P, L, T, H),  # noqa: N803
    "page_head": lambda L, P, T, H: (P, H, T, L),  # noqa: N803
}


class Tensor:
    """What is asked of a torch tensor."""

    def __init__(self, array: Array, device: str = "cpu") -> None:
        self.array = array
        self.shape = array.shape
        self.device = SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(each // self.array.itemsize for each in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


class HostPool:
    planes: int
    dtype = "torch.uint16"

    def __init__(
        self,
        layout: str = "page_first_direct",
        *,
        layers: int = 3,
        pages: int = 12,
        tokens: int = 4,
        heads: int = 2,
        dim: int = 5,
        start_layer: int = 0,
    ) -> None:
        self.layout = layout
        self.layer_num = self.target_layer_num = layers
        self.page_num, self.page_size, self.size = pages, tokens, pages * tokens
        self.head_num, self.dim, self.start_layer = heads, dim, start_layer
        self.memory = np.zeros((self.planes, *SHAPES[layout](layers, pages, tokens, heads), dim), np.uint16)

    def view(self) -> Array:
        """The memory as [page, layer, head, plane, token, dim], whatever the layout."""
        shape = (self.planes, self.layer_num, self.page_num, self.page_size, self.head_num, self.dim)
        planes, layers, pages, tokens, heads, dim = shape
        if self.layout == "layer_first":
            split, order = (planes, layers, pages, tokens, heads, dim), (2, 1, 4, 0, 3, 5)
        elif self.layout == "page_first":
            split, order = (planes, pages, tokens, layers, heads, dim), (1, 3, 4, 0, 2, 5)
        elif self.layout == "page_first_direct":
            split, order = (planes, pages, layers, tokens, heads, dim), (1, 2, 4, 0, 3, 5)
        else:
            split, order = (planes, pages, heads, tokens, layers, dim), (1, 4, 2, 0, 3, 5)
        return self.memory.reshape(split).transpose(order)

    def slots(self, *pages: int) -> npt.NDArray[np.int64]:
        """The slots of these pages, as SGLang's host_indices."""
        start = np.array(pages, np.int64) * self.page_size
        return (start[:, None] + np.arange(self.page_size)).reshape(-1)


class MHATokenToKVPoolHost(HostPool):
    planes = 2

    @property
    def k_buffer(self) -> Tensor:
        return Tensor(self.memory[0])

    @property
    def v_buffer(self) -> Tensor:
        return Tensor(self.memory[1])


class MLATokenToKVPoolHost(HostPool):
    planes = 1

    @property
    def kv_buffer(self) -> Tensor:
        return Tensor(self.memory[0])


class MambaPoolHost:
    """One state a page, in two tensors; not to be addressed without ``layout`` page_first."""

    page_size = 1
    dtype = "torch.float32"

    def __init__(self, pages: int = 12, layout: str = "page_first") -> None:
        self.layout = layout
        self.temporal = np.zeros((pages, 40), np.float32)
        self.conv = np.zeros((pages, 6), np.float32)

    def get_page_buffer_meta(self, indices: Iterable[int]) -> tuple[list[int], list[int]]:
        if self.layout != "page_first":
            raise ValueError("it requires page_first layout")
        tensors = (self.temporal, self.conv)
        rows = [tensor[index] for index in indices for tensor in tensors]
        return [row.ctypes.data for row in rows], [row.nbytes for row in rows]


@dataclass
class Transfer:
    """SGLang's PoolTransfer."""

    name: str
    keys: list[str] | None
    host_indices: Any = None
    hit_policy: str = "all_pages"


@dataclass
class StorageConfig:
    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    dcp_size: int = 1


@dataclass
class Engine:
    """What compat says of the server around the backend."""

    model_path: str = "/no/such/model"
    load_format: str = "auto"
    kv_cache_dtype: str = "auto"
    tp_size: int = 1
    pp_size: int = 1
    dtype: str = "torch.bfloat16"
    quantization: str | None = None
    quantization_param_path: str | None = None
    torchao_config: str = ""
    enable_lora: bool | None = None
    lora_paths: Any = None
    kv_heads: int = 2
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_draft_load_format: str | None = None
    hf_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            to_dict=lambda: {"hidden_size": 8, "_name_or_path": "anywhere"},
            rope_theta=10000.0,
            _commit_hash="0123456789abcdef0123456789abcdef01234567",
        )
    )

    def get_total_num_kv_heads(self) -> int:
        return self.kv_heads


class WeightUpdater:
    """SGLang's, which a model runner has one of; each method of those that replace weights."""

    def init_weights_update_group(self) -> None: ...

    def update_weights_from_disk(self, model_path: str, **options: Any) -> str:
        return model_path

    def receive_weights_from_distributed(self) -> None: ...

    def begin_weight_update(self) -> None: ...


def page_keys(count: int, seed: int = 0) -> list[str]:
    """A chain of SGLang's page keys."""
    return list(_chain(count, seed))


def _chain(count: int, seed: int) -> Iterator[str]:
    before = b""
    for page in range(count):
        before = hashlib.sha256(before + bytes([seed, page])).digest()
        yield before.hex()
