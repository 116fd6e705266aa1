"""Every difference between the TensorRT-LLM versions that this connector is written for (from 1.1, the first
whose connector interface was read, to the connectors/ folder of 2026), and nothing else.

Without TensorRT-LLM (type checks, tests of this folder) the base classes are stand-ins.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonpool.core.store.keys import chain_seed

# A request with any of these is more than its tokens.
_MORE_THAN_TOKENS = (
    "lora_task_id",
    "multimodal_hashes",
    "multimodal_embedding",
    "multimodal_positions",
    "py_multimodal_data",
    "prompt_embedding_table",
    "mrope_rotary_cos_sin",
    "encoder_tokens",
    "encoder_input_features",
    "cross_attention_mask",
    "skip_cross_attn_blocks",
)

NO_PAGE = -1  # BAD_PAGE_INDEX: the block has no page in that layer group

if TYPE_CHECKING:
    from moonpool.connectors.tensorrt_llm import standins as kv_cache_connector
else:
    try:
        from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tensorrt_llm"):
            raise
        try:
            from tensorrt_llm._torch.pyexecutor import kv_cache_connector  # up to 1.2
        except ModuleNotFoundError as older:
            if older.name != "tensorrt_llm":
                raise
            from moonpool.connectors.tensorrt_llm import standins as kv_cache_connector

Scheduler = kv_cache_connector.KvCacheConnectorScheduler
Worker = kv_cache_connector.KvCacheConnectorWorker


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the connector must know of a request.

    seed: what precedes its first block in the chain, see docs/keys.md.
    """

    request_id: int
    tokens: Sequence[int]
    seed: bytes


def prompt_of(request: Any) -> Prompt | None:
    """None for a request whose KV its tokens do not name: with LoRA (a number here, which is another adapter
    elsewhere), images, prompt tables, encoder inputs or several beams, and for the engine's own dummies."""
    if getattr(request, "is_dummy_request", False):
        return None
    for name in _MORE_THAN_TOKENS:
        value = getattr(request, name, None)
        if value is not None and not (isinstance(value, dict | list | tuple) and not value):
            return None
    if getattr(getattr(request, "sampling_config", None), "beam_width", 1) != 1:
        return None
    return Prompt(int(request.request_id), request.get_tokens(0), chain_seed(None, _salt(request)))


def _salt(request: Any) -> str | None:
    salt = getattr(request, "cache_salt", None)
    if salt is not None:
        return str(salt)
    number = getattr(request, "cache_salt_id", None)  # 1.1 and 1.2 have its hash alone
    return None if number is None else f"id {number}"


def new_pages(data: Any) -> list[list[int]]:
    """The new pages of a RequestData, by layer group."""
    grouped = getattr(data, "new_block_ids_by_layer_group", None)
    return [list(ids) for ids in grouped] if grouped else [list(data.new_block_ids)]


def stream_address(stream: Any) -> int:
    """A torch.cuda.Stream as the CUDA driver names it (cudaStream_t as a number)."""
    return int(stream.cuda_stream)


def sleeps(args: Any) -> bool:
    """Whether the engine may take the memory of its KV cache away while it lives."""
    return any(getattr(args, name, None) for name in ("enable_sleep", "sleep_config"))


def rank() -> int:
    """The rank of this process in its engine."""
    try:
        from tensorrt_llm._utils import mpi_rank
    except ModuleNotFoundError:
        return 0
    return int(mpi_rank())


def gather(value: object) -> list[Any]:
    """The values of all ranks. All ranks call this at the same point, as they call TensorRT-LLM's own."""
    try:
        from tensorrt_llm._utils import mpi_allgather
    except ImportError:
        return [value]
    return list(mpi_allgather(value))


def end_all_ranks() -> None:
    """An exception on one rank would leave the others waiting for it. Does not return."""
    mpi = sys.modules.get("mpi4py.MPI")  # there where the engine's ranks are MPI's
    if mpi is not None:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


class Log:
    """Speaks through TensorRT-LLM's logger, which takes finished texts, or else through Python's."""

    def __init__(self) -> None:
        try:
            from tensorrt_llm.logger import logger
        except ModuleNotFoundError:
            logger = logging.getLogger("moonpool.tensorrt_llm")
        self._logger: Any = logger

    def info(self, text: str, *values: object) -> None:
        """Logs ``text % values``."""
        self._logger.info("moonpool: " + text % values)

    def warning(self, text: str, *values: object) -> None:
        """Logs ``text % values``."""
        self._logger.warning("moonpool: " + text % values)

    def error(self, text: str, *values: object) -> None:
        """Logs ``text % values``."""
        self._logger.error("moonpool: " + text % values)
