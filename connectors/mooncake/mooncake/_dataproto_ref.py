"""The handle of stored DataProtos, and the plain mapping that carries it from one process to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ._bundle_store import RemoteBundleRef

DATAPROTO_REF_HANDLE_TYPE = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION = 1
STORAGE_GROUP_ID = "storage_group_id"
HANDLE_KIND = "bundle_stages"
SECTIONS = ("batch", "meta_info", "non_tensor_batch")
_NAME = "DataProto ref handle"


@dataclass(frozen=True)
class StructuredFieldLocation:
    """Where a field is: a member of the stage's structured object."""

    stage: str
    member: str
    section: Literal["batch", "non_tensor_batch"]


@dataclass
class MooncakeDataProtoRef:
    """Names stored fields; has none of their bytes, but all of meta_info.

    stage_refs: the bundle of each put or append. field_index: where each field is. encoded_non_tensor: of
    fields of Python values, the codec and its buffers. global_indexes: the caller's, carried along.
    """

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: list[int] | None = None
    encoded_non_tensor: dict[str, Any] = field(default_factory=dict)
    _storage_group_id: str | None = field(default=None, repr=False)


DataProtoRefLike = MooncakeDataProtoRef | Mapping[str, Any]


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """A mapping of what JSON has. TypeError for values in meta_info that JSON has not."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"expected MooncakeDataProtoRef, got {type(ref).__name__}")
    handle = {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": HANDLE_KIND,
        "batch_size": ref.batch_size,
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": None if ref.global_indexes is None else [int(i) for i in ref.global_indexes],
        "stage_refs": {name: {"manifest_key": one.manifest_key} for name, one in ref.stage_refs.items()},
        "field_index": {name: dict(vars(place)) for name, place in ref.field_index.items()},
        "meta_info": _plain(ref.meta_info),
        "encoded_non_tensor": _plain(ref.encoded_non_tensor),
    }
    if ref._storage_group_id is not None:
        handle[STORAGE_GROUP_ID] = ref._storage_group_id
    return handle


def is_dataproto_ref_handle(value: Any) -> bool:
    """Whether ``value`` is an exported reference."""
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """What export_dataproto_ref() was given; its manifests are read when they are needed. ValueError."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("not a Mooncake DataProto ref handle")
    for name, wanted in (("version", DATAPROTO_REF_HANDLE_VERSION), ("kind", HANDLE_KIND)):
        if handle.get(name) != wanted:
            raise ValueError(f"unsupported {_NAME} {name}: {handle.get(name)!r:.80}")
    stages = {}
    for name, one in _mapping(handle, "stage_refs").items():
        key = one.get("manifest_key") if isinstance(one, Mapping) else None
        if not (isinstance(name, str) and name and isinstance(key, str) and key):
            raise ValueError(
                f"{_NAME} stage refs must contain non-empty string names and manifest_key values"
            )
        stages[name] = RemoteBundleRef(key, {})
    places = {name: _place(name, row, stages) for name, row in _mapping(handle, "field_index").items()}
    if not isinstance(handle["batch_size"], int):
        raise ValueError(f"{_NAME} batch_size must be an int")
    indexes = handle.get("global_indexes")
    if indexes is not None and not isinstance(indexes, (list, tuple)):
        raise ValueError(f"{_NAME} global_indexes must be a list or null")
    return MooncakeDataProtoRef(
        handle["batch_size"],
        stages,
        places,
        dict(_mapping(handle, "meta_info", {})),
        str(handle.get("namespace", "default")),
        str(handle.get("partition", "default")),
        None if indexes is None else [int(i) for i in indexes],
        dict(_mapping(handle, "encoded_non_tensor", {})),
        handle.get(STORAGE_GROUP_ID),
    )


def _mapping(handle: Mapping[str, Any], name: str, default: Any = None) -> Mapping[str, Any]:
    found = handle.get(name, default)
    if not isinstance(found, Mapping):
        raise ValueError(f"{_NAME} {name} must be a mapping")
    return found


def _place(name: str, row: Any, stages: Mapping[str, Any]) -> StructuredFieldLocation:
    try:
        place = StructuredFieldLocation(row["stage"], row["member"], row["section"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{_NAME} field {name!r} needs stage, member and section") from error
    if place.section not in ("batch", "non_tensor_batch"):
        raise ValueError(f"invalid DataProto field section: {place.section!r}")
    if place.stage not in stages:
        raise ValueError(f"{_NAME} field {name!r} references unknown stage {place.stage!r}")
    return place


def resolved(ref: DataProtoRefLike) -> MooncakeDataProtoRef:
    """The reference, from itself or from an exported one. Raises TypeError for anything else."""
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if not is_dataproto_ref_handle(ref):
        raise TypeError(f"expected MooncakeDataProtoRef or DataProto handle, got {type(ref).__name__}")
    return import_dataproto_ref(ref)


def _plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as JSON has them; keys as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [_plain(one) for one in value]
    raise TypeError(f"DataProto ref handles support only JSON-safe values, got {type(value).__name__}")
