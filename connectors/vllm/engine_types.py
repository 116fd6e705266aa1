"""What the connector uses of vLLM's objects, as Protocols: the types that vLLM itself does not publish."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol


class Status(Protocol):
    """RequestStatus, an enumeration."""

    @property
    def name(self) -> str:
        """For example "FINISHED_STOPPED"."""


class Place(Protocol):
    """PlaceholderRange: the tokens of an item.

    offset: the first of them.
    length: how many.
    is_embed: which of them stand for embeddings, as a tensor; None: all.
    """

    offset: int
    length: int
    is_embed: Any


class MediaFeature(Protocol):
    """MultiModalFeatureSpec: an image, a sound or a video.

    data: its fields, each with its tensors as ``data``; None: the scheduler is not given them.
    identifier: vLLM's name for it: a hash, or the UUID of the client.
    """

    data: Mapping[str, Any] | None
    modality: str
    identifier: str
    mm_position: Place


class Request(Protocol):
    """A request in the scheduler.

    mm_features: images, sounds and videos.
    cache_salt: of its block hashes.
    block_hashes: vLLM's names of its full blocks.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    mm_features: Sequence[MediaFeature]
    lora_request: Any
    cache_salt: str | None
    num_preemptions: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    skip_reading_prefix_cache: bool
    resumable: bool
    kv_transfer_params: Mapping[str, Any] | None
    num_computed_tokens: int
    block_hashes: Sequence[bytes]

    @property
    def status(self) -> Status:
        """Where the request stands."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Token ids of prompt and output so far."""


class Blocks(Protocol):
    """KVCacheBlocks."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids, one list per KV cache group."""


class Block(Protocol):
    """KVCacheBlock."""

    block_id: int
    ref_cnt: int


class BlockPool(Protocol):
    """The engine's blocks, by id."""

    blocks: Sequence[Block]

    def touch(self, blocks: Sequence[Block]) -> None:
        """Adds a reference to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Drops a reference of each block; blocks without one are reused in this order."""


class BlockTables(Protocol):
    """KVCacheManager: the blocks of each request."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The blocks that the request has now, one list per KV cache group."""


class NewRequest(Protocol):
    """A request in its first step.

    block_ids: one list per KV cache group.
    """

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """Requests that had a step before, as columns.

    new_block_ids: added blocks, or all blocks after a preemption.
    """

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    """One step.

    num_scheduled_tokens: tokens of each request.
    total_num_scheduled_tokens: their sum.
    scheduled_spec_decode_tokens: those of them that were speculated, of requests with any.
    """

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: Mapping[str, list[int]]


class ConnectorOutput(Protocol):
    """KVConnectorOutput."""

    finished_recving: set[str] | None
    kv_connector_worker_meta: Any
