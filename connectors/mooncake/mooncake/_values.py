"""The values of the store's API: configurations, descriptors, states. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class ObjectDataType(IntEnum):
    """The kind of an object, as its writer declares it."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(IntEnum):
    """The state of a replica; readers see COMPLETE only."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(IntEnum):
    """The state of a copy or a move."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(IntEnum):
    """Whether a task copies or moves."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class SoftPinAction(IntEnum):
    """What a put does to the soft pin of its object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"expected a number that is not negative, got {value!r:.80}")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, (bool, int)):
        raise TypeError(f"expected a bool, got {value!r:.80}")
    return bool(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got {value!r:.80}")
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"expected a list of str, got {value!r:.80}")
    return [_text(item) for item in value]


# The default of each field, and what checks a value and makes it the field's.
_FIELDS: dict[str, tuple[Any, Any]] = {
    "replica_num": (1, _count),
    "nof_replica_num": (0, _count),
    "dfs_replica_num": (0, _count),
    "with_soft_pin": (False, _flag),
    "with_hard_pin": (False, _flag),
    "soft_pin_action": (SoftPinAction.PRESERVE, SoftPinAction),
    "soft_pin_ttl_ms": (None, lambda value: None if value is None else _count(value)),
    "preferred_segment": ("", _text),
    "preferred_segments": ((), _texts),
    "preferred_nof_segments": ((), _texts),
    "prefer_alloc_in_same_node": (False, _flag),
    "data_type": (ObjectDataType.UNKNOWN, ObjectDataType),
    "group_ids": (None, lambda value: None if value is None else _texts(value)),
}


class ReplicateConfig:
    """How an object is stored. Any other attribute is an AttributeError, a value of a wrong type a TypeError.

    replica_num: copies, on other hosts first; fewer when there are fewer nodes. with_hard_pin: not evicted
    while this store is open. with_soft_pin is the old name of a wish that soft_pin_action says today. Those
    that moonpool decides by itself (media) are kept and not followed: docs/mooncake.md has the table.
    """

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    with_soft_pin: bool
    with_hard_pin: bool
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: int | None
    preferred_segment: str
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: list[str] | None
    __slots__ = tuple(_FIELDS)

    def __init__(self) -> None:
        for name, (default, _) in _FIELDS.items():
            object.__setattr__(self, name, list(default) if default == () else default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise AttributeError(f"ReplicateConfig has no attribute {name!r}")
        object.__setattr__(self, name, _FIELDS[name][1](value))

    def __repr__(self) -> str:
        return f"ReplicateConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in _FIELDS)})"


DEFAULT = ReplicateConfig()


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where a replica is. buffer_address is 0: an arena has no address that other processes could use."""

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor = field(default_factory=Descriptor)


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """file_path names the node, whose SSD log has no file for each object."""

    file_path: str = ""
    object_size: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaDescriptor:
    """One copy of an object, in a node's memory or on its SSD."""

    _endpoint: str
    _on_ssd: bool
    _size: int
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Whether the replica is in memory."""
        return not self._on_ssd

    def is_disk_replica(self) -> bool:
        """Never: there is no shared file system among the tiers."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether the replica is on an SSD of its node."""
        return self._on_ssd

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """The memory of the replica. Raises RuntimeError for one on an SSD."""
        if self._on_ssd:
            raise RuntimeError("Expected MemoryDescriptor")
        return MemoryDescriptor(Descriptor(self._size, 0, self._endpoint))

    def get_disk_descriptor(self) -> DiskDescriptor:
        """The SSD of the replica. Raises RuntimeError for one in memory."""
        if not self._on_ssd:
            raise RuntimeError("Expected DiskDescriptor")
        return DiskDescriptor(self._endpoint, self._size)


@dataclass(slots=True)
class QueryTaskResponse:
    """How a task that this process was asked for stands."""

    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""


@dataclass(slots=True)
class ParallelAxis:
    """One way in which a tensor is spread: kind "tp" cuts it along split_dim, the others name the rank that
    has it."""

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass(slots=True)
class TensorParallelism:
    """The axes along which a tensor is cut."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass(slots=True)
class ReadTarget:
    """mode: "as_stored", "shard" or "full"."""

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None
