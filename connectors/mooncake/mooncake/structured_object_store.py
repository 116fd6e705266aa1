"""``mooncake.structured_object_store``: objects of many arrays, and DataProtos, over a store.

    transfer = MooncakeBundleTransfer(store)
    ref = transfer.put({"input_ids": tensor, "prompt": ["a", "b"], "step": 3}, type="dict")
    handle = export_ref(ref)                             # plain JSON, for another process
    transfer.get(handle, type="dict", fields=["prompt"], rows=[1])
    transfer.cleanup_dataproto(handle)

Keys, handles, errors and what comes back are as the original's, which was observed and not read; what is
inside of the buffers of Python values is ours (_row_codecs). What differs, or could not be observed:

* Arrays have memory of their own, so release_result() has nothing to do and ``buffer_pool`` is not used.
* raw_destination() raises a TypeError there; here it does what its parameters say.
* A put copies once in each copy_mode, so "zero_copy" takes arrays, too.
* Rows may be chosen with a step, and by an array of indices; a mask of booleans is a TypeError.
* A bundle that is not there is a RuntimeError, also when its manifest is missing.

Calls of one transfer may come from several threads, as those of its store.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ._bundle_members import (
    ALL,
    Plan,
    RawDestination,
    Selection,
    StructuredMemberSlice,
    TensorObjectBuffer,
    names_of,
    plan_ranges,
)
from ._bundle_store import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    DEFAULT_BUNDLE_CHUNK_BYTES,
    BundleStore,
    BundleTransferPolicy,
    RemoteBundleRef,
    checked_policy,
    keys_of_bundle,
)
from ._codes import Code
from ._dataproto_fields import (
    Fields,
    Schemas,
    built,
    chosen_fields,
    column_array,
    column_of,
    fields_of,
    rows_of,
)
from ._dataproto_ref import (
    DATAPROTO_REF_HANDLE_TYPE,
    DATAPROTO_REF_HANDLE_VERSION,
    STORAGE_GROUP_ID,
    DataProtoRefLike,
    MooncakeDataProtoRef,
    StructuredFieldLocation,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
    resolved,
)
from ._infer import MISSING, infer_structure
from ._row_codecs import FieldSchema, decode_rows, encoded_of
from ._structured_objects import (
    STRUCTURED_FIELD_SPECS_KEY,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    StructuredObjects,
)
from ._values import ReplicateConfig

MISSING_OBJECT_ERROR = int(Code.OBJECT_NOT_FOUND)
STAGE_VERSION = 1

export_ref = export_dataproto_ref
import_ref = import_dataproto_ref


def raw_destination(
    ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False
) -> RawDestination:
    """Memory of the caller to read a member into, ``size`` bytes or fewer; a tensor with its header.

    owner: kept as long as the destination. pre_registered: taken and not needed.
    """
    return RawDestination(ptr, size, owner, pre_registered)


def tensor_object_buffer(
    ptr: int, size: int, owner: Any = None, batch_size: int | None = None
) -> TensorObjectBuffer:
    """A tensor in memory of the caller, with the header of ``put_tensor`` before its data: to put, or to read
    into. batch_size: its rows, when it is a field of a DataProto.
    """
    return TensorObjectBuffer(ptr, size, owner, batch_size)


class MooncakeBundleTransfer(StructuredObjects):
    """Stores structured objects and DataProtos in ``store``, and reads them."""

    def put(
        self,
        data: Any,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Schemas | None = None,
    ) -> MooncakeDataProtoRef:
        """Stores the fields of a DataProto, or of a flat dict: arrays and tensors with a row for each sample,
        and columns of Python values (object arrays; lists in a dict, or with a schema). meta_info stays in
        the handle.
        """
        fields = fields_of(data, type, field_schemas)
        group = (getattr(config, "group_ids", None) or [f"structured-{uuid.uuid4().hex}"])[0]
        ref = MooncakeDataProtoRef(
            fields.batch_size(), {}, {}, dict(fields.meta_info), namespace, partition, None, {}, group
        )
        return self._with_stage(ref, fields, stage, chunk_bytes, policy, field_schemas, config, None)

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Schemas | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """As ``put``, under the name that DataProto callers use."""
        return self.put(
            data,
            namespace=namespace,
            partition=partition,
            stage=stage,
            chunk_bytes=chunk_bytes,
            policy=policy,
            config=config,
            field_schemas=field_schemas,
        )

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Schemas | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """A new handle with more fields; ``ref`` stays as it is. meta_info is merged.

        stage: of a stage that is there, the old fields stay and the new ones are stored beside them.
        overwrite: fields may be there already; a stage is overwritten as a whole, and its old objects are
        removed, so that ``ref`` cannot be read any more.
        """
        old = resolved(ref)
        fields = fields_of(data, "dataproto", field_schemas)
        size = fields.batch_size()
        if size != old.batch_size:
            raise ValueError(
                f"DataProto append batch size {size} does not match ref batch size {old.batch_size}"
            )
        there = [name for name in fields.names if name in old.field_index]
        if there and not overwrite:
            raise ValueError(f"DataProto fields already exist: {there}")
        missing = [
            name
            for name, place in old.field_index.items()
            if place.stage == stage and name not in fields.names
        ]
        if overwrite and stage in old.stage_refs and missing:
            raise ValueError(
                f"DataProto overwrite for stage {stage!r} must include existing fields: {missing}"
            )
        new = replace(
            old,
            stage_refs=dict(old.stage_refs),
            field_index=dict(old.field_index),
            meta_info=old.meta_info | fields.meta_info,
            encoded_non_tensor={k: v for k, v in old.encoded_non_tensor.items() if k not in fields.names},
        )
        before = old.stage_refs.get(stage)
        inherited = None if before is None or overwrite else self._inherited(before)
        new = self._with_stage(new, fields, stage, chunk_bytes, policy, field_schemas, config, inherited)
        if before is not None and overwrite:
            self._bundles.remove(before)
        return new

    def _inherited(self, before: RemoteBundleRef) -> dict[str, Any]:
        """What a new bundle of the same stage takes over: buffers, and the keys that are needless then."""
        bundle = self._bundles.resolve(before)
        (metadata,) = self._metadata([bundle])
        own = [bundle.manifest_key, *(chunk["key"] for chunk in bundle.manifest["meta"]["chunks"])]
        return {
            "buffers": bundle.manifest["buffers"],
            "cleanup_keys": [*bundle.manifest.get("cleanup_keys", ()), *own],
            "specs": metadata.get(STRUCTURED_FIELD_SPECS_KEY, {}),
        }

    def _with_stage(
        self,
        ref: MooncakeDataProtoRef,
        fields: Fields,
        stage: str,
        chunk_bytes: int | None,
        policy: BundleTransferPolicy | None,
        schemas: Schemas | None,
        config: Any,
        inherited: Mapping[str, Any] | None,
    ) -> MooncakeDataProtoRef:
        """Stores ``fields``; the handle with them in it."""
        members: dict[str, Any] = {}
        for name, value in fields.batch.items():
            members[f"batch.{name}"] = value
            ref.field_index[name] = StructuredFieldLocation(stage, f"batch.{name}", "batch")
        for name, value in fields.non_tensor_batch.items():
            member = f"non_tensor_batch.{name}"
            column = column_of(name, value, (schemas or {}).get(name))
            if column is None:
                members[member] = value
            else:
                members |= {f"{member}.{part}": one for part, one in column.payload.items()}
                ref.encoded_non_tensor[name] = encoded_of(column, member)
            ref.field_index[name] = StructuredFieldLocation(stage, member, "non_tensor_batch")
        about = {
            "version": STAGE_VERSION,
            "namespace": ref.namespace,
            "partition": ref.partition,
            "stage": stage,
            "batch_size": ref.batch_size,
        }
        ref.stage_refs[stage] = self._put(
            {"layout": "dataproto_stage", "dataproto": about},
            members,
            ref.partition,
            chunk_bytes,
            checked_policy(policy, None),
            _in_group(config, ref._storage_group_id),
            inherited,
        )
        return ref

    def get(
        self,
        ref: DataProtoRefLike,
        *,
        type: Literal["dataproto", "dict"] = "dataproto",
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: slice | StructuredMemberSlice | Sequence[int] | None = None,
    ) -> Any:
        """Three mappings, or ``data_cls`` of them; with type="dict" one flat dict.

        fields: names of the fields; None: batch_fields and non_tensor_fields, or all.
        rows: a slice, or indices; only their bytes are read.
        destinations: memory for arrays and tensors, see materialize_into().
        """
        if type not in ("dataproto", "dict"):
            raise ValueError(f"unsupported Mooncake payload type: {type!r}")
        found = resolved(ref)
        names = chosen_fields(found, fields, batch_fields, non_tensor_fields)
        chosen = rows_of(rows, found.batch_size)
        values = self._values(found, names, chosen, destinations or {})
        wanted = None if meta_info_keys is None else names_of(meta_info_keys)
        meta = {key: one for key, one in found.meta_info.items() if wanted is None or key in wanted}
        if type == "dict":
            lists = {k: v.tolist() if _is_column(v) else v for k, v in values.items()}
            return meta | lists
        parts = Fields({}, {}, meta)
        for name in names:
            getattr(parts, found.field_index[name].section)[name] = values[name]
        return built(parts, data_cls)

    def get_dataproto(
        self,
        ref: DataProtoRefLike,
        *,
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: slice | StructuredMemberSlice | Sequence[int] | None = None,
    ) -> Any:
        """As ``get``, under the name that DataProto callers use."""
        return self.get(
            ref,
            fields=fields,
            batch_fields=batch_fields,
            non_tensor_fields=non_tensor_fields,
            meta_info_keys=meta_info_keys,
            data_cls=data_cls,
            destinations=destinations,
            rows=rows,
        )

    def _values(
        self,
        ref: MooncakeDataProtoRef,
        names: Sequence[str],
        rows: Sequence[int] | None,
        destinations: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The fields, with one read for all; one more for the chosen rows of columns of Python values."""
        stages, specs = self._stages(ref, names)
        plans: dict[tuple[str, str], Plan] = {}
        for name in names:
            place, encoded = ref.field_index[name], ref.encoded_non_tensor.get(name)
            bundle = stages[place.stage]
            members = {"": place.member} if encoded is None else dict(encoded["payload_members"])
            if rows is not None and "offsets" in members:
                del members["data"]  # the offsets select its bytes
            for part, member in members.items():
                is_field = encoded is None or (encoded["codec"] == "ndarray" and part == "data")
                selection = Selection(rows) if is_field and rows is not None else ALL
                given = destinations.get(name) if encoded is None else None
                plans[name, part] = self._plan(bundle, member, specs[place.stage][member], selection, given)
        found = self._read(plans)
        columns = [name for name in names if name in ref.encoded_non_tensor]
        read = {name: found[name, ""] for name in names if name not in ref.encoded_non_tensor}
        parts = self._parts(ref, columns, rows, found, stages)
        for name in columns:
            nulls = found[name, "nulls"]
            nulls = nulls if rows is None else nulls[list(rows)]
            read[name] = column_array(decode_rows(ref.encoded_non_tensor[name]["codec"], parts[name], nulls))
        return {name: read[name] for name in names}

    def _parts(
        self,
        ref: MooncakeDataProtoRef,
        columns: Sequence[str],
        rows: Sequence[int] | None,
        found: Mapping[tuple[str, str], Any],
        stages: Mapping[str, RemoteBundleRef],
    ) -> dict[str, Sequence[Any]]:
        """The bytes, or the number, of each chosen row."""
        parts: dict[str, Sequence[Any]] = {}
        plans: dict[str, Plan] = {}
        wanted: dict[str, np.ndarray[Any, Any]] = {}
        for name in columns:
            offsets = found.get((name, "offsets"))
            if offsets is None:
                parts[name] = found[name, "data"]
            elif rows is None:
                parts[name] = _cut(found[name, "data"], offsets)
            else:
                place, member = ref.field_index[name], ref.encoded_non_tensor[name]["payload_members"]["data"]
                entry = stages[place.stage].manifest["buffers"][member]
                plans[name], wanted[name] = plan_ranges(entry, offsets, rows)
        for name, data in self._read(plans).items():
            parts[name] = _cut(data, wanted[name])
        return parts

    def _stages(
        self, ref: MooncakeDataProtoRef, names: Sequence[str]
    ) -> tuple[dict[str, RemoteBundleRef], dict[str, Mapping[str, Any]]]:
        """Of the stages of these fields: bundles with their manifests, and what their members are."""
        used = list(dict.fromkeys(ref.field_index[name].stage for name in names))
        stages = {stage: self._bundles.resolve(ref.stage_refs[stage]) for stage in used}
        metadata = self._metadata(list(stages.values()))
        found = {
            stage: one.get(STRUCTURED_FIELD_SPECS_KEY, {}) for stage, one in zip(used, metadata, strict=True)
        }
        return stages, found

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """What is stored, by field: its section, stage, member and spec. Reads metadata alone."""
        found = resolved(ref)
        stages = {name: self._bundles.resolve(one) for name, one in found.stage_refs.items()}
        metadata = dict(zip(stages, self._metadata(list(stages.values())), strict=True))
        view: dict[str, Any] = {
            "namespace": found.namespace,
            "partition": found.partition,
            "batch_size": found.batch_size,
            "batch_fields": {},
            "non_tensor_fields": {},
            "meta_info_keys": list(found.meta_info),
            "stages": {
                name: {"manifest_key": one.manifest_key, "dataproto": metadata[name].get("dataproto")}
                for name, one in stages.items()
            },
        }
        for name, place in found.field_index.items():
            specs = metadata[place.stage].get(STRUCTURED_FIELD_SPECS_KEY, {})
            encoded = found.encoded_non_tensor.get(name)
            spec = specs.get(place.member) if encoded is None else _spec_of_column(encoded, specs)
            row = {"section": place.section, "stage": place.stage, "member": place.member, "spec": spec}
            view["batch_fields" if place.section == "batch" else "non_tensor_fields"][name] = row
        return view

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Removes all that the handle names; harmless when it is gone."""
        for bundle in resolved(ref).stage_refs.values():
            self._bundles.remove(bundle)

    def cleanup_dataproto_append(self, previous: DataProtoRefLike, appended: DataProtoRefLike) -> None:
        """Removes what append_dataproto_fields() made of ``previous``, which can be read as before."""
        before = {one.manifest_key: one for one in resolved(previous).stage_refs.values()}
        kept = [key for one in before.values() for key in self._keys(one)]
        for bundle in resolved(appended).stage_refs.values():
            if bundle.manifest_key not in before:
                self._bundles.remove(bundle, keep=kept)

    def _keys(self, ref: RemoteBundleRef) -> list[str]:
        """Of all objects of a bundle; none when it is gone."""
        if not ref.manifest and self.store.is_exist(ref.manifest_key) == 0:
            return []
        bundle = self._bundles.resolve(ref)
        return [bundle.manifest_key, *keys_of_bundle(bundle)]

    @staticmethod
    def release_result(result: Any) -> None:
        """Does nothing: what get() gives has memory of its own, which goes with it."""


def _in_group(config: Any, group: str | None) -> Any:
    """A copy of ``config`` in which all objects are of one group, so that they are evicted together."""
    if group is None:
        return config
    own = ReplicateConfig() if config is None else copy.copy(config)
    if not getattr(own, "group_ids", None):
        own.group_ids = [group]
    return own


def _is_column(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.hasobject


def _cut(data: Any, offsets: np.ndarray[Any, Any]) -> list[memoryview]:
    view = memoryview(data)
    bounds = offsets.tolist()
    return [view[low:high] for low, high in pairwise(bounds)]


def _spec_of_column(encoded: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    members = encoded["payload_members"]
    return {
        "encoding": "structured_non_tensor",
        "codec": encoded["codec"],
        "metadata": encoded["metadata"],
        "payload_members": members,
        "payload_specs": {name: specs.get(member) for name, member in members.items()},
    }


__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "MISSING",
    "MISSING_OBJECT_ERROR",
    "STORAGE_GROUP_ID",
    "STRUCTURED_FIELD_SPECS_KEY",
    "BundleStore",
    "BundleTransferPolicy",
    "DataProtoRefLike",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "RemoteBundleRef",
    "StructuredFieldLocation",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "infer_structure",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]
