"""Structured objects: metadata that JSON has, and named arrays, tensors and bytes, in one bundle.

The metadata holds the spec of each member (_bundle_members), so that one member, or some of its rows, can be
read without the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ._bundle_members import (
    Plan,
    Selection,
    StructuredMemberSlice,
    TensorObjectBuffer,
    bytes_view,
    is_tensor,
    names_of,
    plan_member,
    source_of,
)
from ._bundle_store import (
    DEFAULT_BUNDLE_CHUNK_BYTES,
    Bundles,
    BundleStore,
    BundleTransferPolicy,
    RemoteBundleRef,
    Source,
    check_segment,
    checked_policy,
    json_bytes,
)

STRUCTURED_FIELD_SPECS_KEY = "__mooncake_structured_fields__"
SINGLE = "value"  # the name of the one member of an object that is no mapping
WRAPPED = "__mooncake_wrapped_object__"
BundleRefLike = RemoteBundleRef | Mapping[str, Any]
K = TypeVar("K")


@dataclass(frozen=True, init=False)
class StructuredObjectPayload:
    """An object of several buffers.

    metadata: values that JSON has.
    buffers: named arrays, tensors and bytes.
    """

    metadata: Mapping[str, Any]
    buffers: Mapping[str, Any]

    def __init__(
        self, metadata: Mapping[str, Any] | None = None, buffers: Mapping[str, Any] | None = None
    ) -> None:
        if buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        object.__setattr__(self, "metadata", {} if metadata is None else metadata)
        object.__setattr__(self, "buffers", buffers)


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What is to be read of an object: member_names None is all. Nothing is read before materialize()."""

    ref: BundleRefLike
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """The same with these members only; None: all."""
        return replace(self, member_names=None if names is None else tuple(names_of(names)))

    def slice_member(
        self, name: str, axis: int, start: int, end: int, step: int = 1
    ) -> StructuredObjectReadSpec:
        """Instead of an earlier slice of that member."""
        others = tuple(row for row in self.member_slices if row[0] != name)
        return replace(self, member_slices=(*others, (name, StructuredMemberSlice(axis, start, end, step))))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """The slice of a member, or None."""
        return dict(self.member_slices).get(name)


@dataclass
class StructuredObjectResult:
    """What materialize() read."""

    metadata: dict[str, Any]
    objects: dict[str, Any]


class StructuredObjects:
    """Stores structured objects and DataProtos in ``store``, and reads them.

    key_prefix: of all keys. default_chunk_bytes: larger buffers become several objects; tensors are one.
    config: a ReplicateConfig with one group at most. policy: how the objects of one put are written.
    partition: a part of the keys.
    """

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        self._bundles = Bundles(store, key_prefix, default_chunk_bytes)
        self.store = store
        self.key_prefix = self._bundles.prefix
        self.default_chunk_bytes = self._bundles.chunk_bytes

    # ---- bundles of bytes

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Raw metadata, and buffers of bytes."""
        return self._bundles.put(
            Source([bytes_view(meta, "meta")]),
            {name: _bytes_source(name, value) for name, value in buffers.items()},
            partition,
            chunk_bytes=chunk_bytes,
            policy=checked_policy(policy, max_inflight_put),
            config=config,
        )

    def remove_bundle(self, ref: BundleRefLike) -> None:
        """All objects of a bundle; harmless when it is gone."""
        self._bundles.remove(ref)

    # ---- structured objects

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Metadata that JSON has, and arrays, tensors or bytes by name."""
        if STRUCTURED_FIELD_SPECS_KEY in payload.metadata:
            raise ValueError(f"structured metadata key {STRUCTURED_FIELD_SPECS_KEY!r} is reserved")
        return self._put(
            {"layout": "structured", **payload.metadata},
            payload.buffers,
            partition,
            chunk_bytes,
            checked_policy(policy, max_inflight_put),
            config,
        )

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """A mapping of arrays, tensors or bytes; or one of these."""
        single = not isinstance(obj, Mapping)
        return self._put(
            ({WRAPPED: True} if single else {}) | {"layout": "structured"},
            {SINGLE: obj} if single else obj,
            partition,
            chunk_bytes,
            checked_policy(policy, max_inflight_put),
            config,
        )

    def get_object(self, ref: BundleRefLike) -> Any:
        """What put_object() was given: arrays, tensors, and bytes as arrays of uint8 (as bytes, over a store
        that has no batch_get_buffer).
        """
        result = self.materialize(self.read_spec(ref))
        return result.objects[SINGLE] if result.metadata.get(WRAPPED) else result.objects

    def read_spec(self, ref: BundleRefLike) -> StructuredObjectReadSpec:
        """A specification that reads all of an object."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads into new memory; see materialize_into."""
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """destinations: for some members, an array of the same type and shape, a raw_destination(), or for a
        tensor a tensor_object_buffer().
        """
        bundle = self._bundles.resolve(spec.ref)
        (metadata,) = self._metadata([bundle])
        specs = metadata.get(STRUCTURED_FIELD_SPECS_KEY, {})
        names = list(specs) if spec.member_names is None else list(spec.member_names)
        if spec.member_names == ():
            raise ValueError("structured read spec selected no members")
        unknown = [name for name in names if name not in specs]
        if unknown:
            raise KeyError(f"unknown bundle buffers: {unknown}")
        given = destinations or {}
        plans = {
            name: self._plan(
                bundle, name, specs[name], Selection(slice=spec.member_slice(name)), given.get(name)
            )
            for name in names
        }
        return StructuredObjectResult(metadata, self._read(plans))

    def _put(
        self,
        metadata: dict[str, Any],
        members: Mapping[str, Any],
        partition: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy,
        config: Any,
        inherited: Mapping[str, Any] | None = None,
    ) -> RemoteBundleRef:
        """inherited: what Bundles.put() says, and the "specs" of its buffers."""
        for name in members:
            check_segment(name, "buffer name")
        rows = {name: source_of(name, value) for name, value in members.items()}
        specs = (inherited["specs"] if inherited else {}) | {name: spec for name, (spec, _) in rows.items()}
        text = json_bytes(
            metadata | ({STRUCTURED_FIELD_SPECS_KEY: specs} if specs else {}), "structured metadata"
        )
        return self._bundles.put(
            Source([memoryview(text)]),
            {name: source for name, (_, source) in rows.items()},
            partition,
            chunk_bytes=chunk_bytes,
            policy=policy,
            config=config,
            inherited=inherited,
        )

    def _metadata(self, bundles: Sequence[RemoteBundleRef]) -> list[dict[str, Any]]:
        """ValueError for a bundle whose metadata is no JSON object."""
        found = [
            json.loads(data.tobytes())
            for data in self._bundles.read_all([bundle.manifest["meta"] for bundle in bundles])
        ]
        if not all(isinstance(one, dict) for one in found):
            raise ValueError("the metadata of the bundle is no structured object's")
        return found

    def _plan(
        self,
        bundle: RemoteBundleRef,
        name: str,
        spec: Mapping[str, Any],
        selection: Selection,
        destination: Any,
    ) -> Plan:
        entry = bundle.manifest["buffers"][name]
        return plan_member(name, spec, entry, selection, destination, as_array=self._bundles.has_views)

    def _read(self, plans: Mapping[K, Plan]) -> dict[K, Any]:
        """All members with one read."""
        self._bundles.read(piece for plan in plans.values() for piece in plan.pieces)
        return {name: plan.finish() for name, plan in plans.items()}


def _bytes_source(name: str, value: Any) -> Source:
    if isinstance(value, np.ndarray):
        return source_of(name, value)[1]
    if is_tensor(value) or isinstance(value, TensorObjectBuffer):
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}")
    return Source([bytes_view(value, name)], keep=value)
