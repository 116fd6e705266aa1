"""What the connector uses of vLLM's objects, as Protocols: the types that vLLM itself does not publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Status(Protocol):
    """RequestStatus, an enumeration."""

    @property
    def name(self) -> str: ...


class Request(Protocol):
    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[Any]
    lora_request: Any
    cache_salt: str | None
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    skip_reading_prefix_cache: bool
    resumable: bool
    kv_transfer_params: Mapping[str, Any] | None
    num_computed_tokens: int

    @property
    def status(self) -> Status: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


class Blocks(Protocol):
    """KVCacheBlocks."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class Block(Protocol):
    """KVCacheBlock."""

    ref_cnt: int


class BlockPool(Protocol):
    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...


class NewRequest(Protocol):
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]


class ConnectorOutput(Protocol):
    """KVConnectorOutput."""

    finished_recving: set[str] | None
    kv_connector_worker_meta: Any
