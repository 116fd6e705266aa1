"""Every difference between the TensorRT-LLM versions that this connector is written for (1.0 to the
connectors/ folder of 2026), and nothing else.

Without TensorRT-LLM (type checks, tests of this folder) the base classes are stand-ins.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moonpool.core.keys import chain_seed

NO_PAGE = -1  # BAD_PAGE_INDEX: the block has no page in that layer group

if TYPE_CHECKING:

    class Worker:
        _metadata: object

        def __init__(self, llm_args: Any) -> None:
            self._llm_args = llm_args

        def get_connector_meta(self) -> object: ...

    class Scheduler:
        def __init__(self, llm_args: Any) -> None: ...

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
    """What the pool must know of a request; seed: what stands before its first block, see docs/keys.md."""

    request_id: int
    tokens: Sequence[int]
    seed: bytes


def prompt_of(request: Any) -> Prompt | None:
    """None for a request whose KV its tokens do not name: with LoRA (a number here, which is another adapter
    elsewhere), images, prompt tables or several beams, and for the engine's own dummies."""
    if getattr(request, "is_dummy_request", False):
        return None
    for name in ("lora_task_id", "multimodal_hashes", "multimodal_embedding", "prompt_embedding_table"):
        if getattr(request, name, None) is not None:
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


def rank() -> int:
    """Of this process in its engine."""
    try:
        from tensorrt_llm._utils import mpi_rank
    except ModuleNotFoundError:
        return 0
    return int(mpi_rank())


class Log:
    """Speaks through TensorRT-LLM's logger, which takes finished texts, or else through Python's."""

    def __init__(self) -> None:
        try:
            from tensorrt_llm.logger import logger
        except ModuleNotFoundError:
            logger = logging.getLogger("moonpool.tensorrt_llm")
        self._logger: Any = logger

    def info(self, text: str, *values: object) -> None:
        self._logger.info("moonpool: " + text % values)

    def warning(self, text: str, *values: object) -> None:
        self._logger.warning("moonpool: " + text % values)

    def error(self, text: str, *values: object) -> None:
        self._logger.error("moonpool: " + text % values)
