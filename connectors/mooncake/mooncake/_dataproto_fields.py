"""What is put as a DataProto: fields with a row for each sample, and meta_info beside them.

A DataProto is an object with ``batch``, ``non_tensor_batch`` and ``meta_info``, or a mapping with these keys,
or (type="dict") one flat mapping, whose fields are sorted by what they are. This module knows no store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._bundle_members import StructuredMemberSlice, TensorObjectBuffer, is_tensor, names_of
from ._dataproto_ref import SECTIONS, MooncakeDataProtoRef
from ._row_codecs import Column, FieldSchema, encode_column

Schemas = Mapping[str, FieldSchema]


class Fields(NamedTuple):
    """The fields of a DataProto.

    batch: arrays and tensors.
    non_tensor_batch: arrays, tensors and columns of Python values.
    """

    batch: dict[Any, Any]
    non_tensor_batch: dict[Any, Any]
    meta_info: dict[Any, Any]

    @property
    def names(self) -> list[Any]:
        """The names of all fields, tensors first."""
        return [*self.batch, *self.non_tensor_batch]

    def batch_size(self) -> int:
        """Of all fields. ValueError when they differ, or a name is in both."""
        both = sorted(map(str, self.batch.keys() & self.non_tensor_batch.keys()))
        if both:
            raise ValueError(f"DataProto batch and non_tensor_batch fields overlap: {both}")
        sizes = sorted({len(value) for value in [*self.batch.values(), *self.non_tensor_batch.values()]})
        if len(sizes) > 1:
            raise ValueError(f"DataProto fields have inconsistent batch sizes: {sizes}")
        return sizes[0] if sizes else 0


def fields_of(data: Any, kind: str, schemas: Schemas | None) -> Fields:
    """kind: "dataproto" or "dict"."""
    if kind not in ("dataproto", "dict"):
        raise ValueError(f"unsupported Mooncake payload type: {kind!r}")
    if kind == "dict":
        fields = _of_flat(data, schemas or {})
    elif isinstance(data, Mapping) and not any(name in data for name in SECTIONS):
        fields = Fields(dict(data), {}, {})
    else:
        fields = Fields(*(_mapping_of(data, name) for name in ("batch", "non_tensor_batch", "meta_info")))
    _check_sections(fields, schemas or {})
    return fields


def _mapping_of(data: Any, section: str) -> dict[Any, Any]:
    """None is none, and a TensorDict is a mapping, too: it has items()."""
    found = data.get(section) if isinstance(data, Mapping) else getattr(data, section, None)
    return {} if found is None else dict(found.items())


def _of_flat(data: Any, schemas: Schemas) -> Fields:
    """Arrays and tensors with a row for each sample, then lists of that length, then all the rest."""
    if not isinstance(data, Mapping):
        raise TypeError("flat dict payload must be a mapping")
    sections = {name: _section_of(name, schemas[name]) for name in data if name in schemas}
    free = {name: value for name, value in data.items() if sections.get(name) is None}
    dense = [name for name, value in free.items() if _is_dense(value)]
    lists = [name for name, value in free.items() if isinstance(value, (list, tuple))]
    pinned = [data[name] for name, section in sections.items() if section in ("batch", "non_tensor_batch")]
    rows = _one_size(
        [free[name] for name in dense] + [one for one in pinned if _is_dense(one)], "dense fields", ""
    )
    if rows is None:
        text = "; pass FieldSchema metadata['section'] for list-valued metadata fields"
        rows = _one_size([free[name] for name in lists] + pinned, "fields", text)
    fields = Fields({}, {}, {})
    for name, value in data.items():
        section = sections.get(name)
        if section is None:
            listed = name in lists and len(value) == rows
            section = "batch" if name in dense else "non_tensor_batch" if listed else "meta_info"
        if section == "non_tensor_batch" and isinstance(value, (list, tuple)) and name not in schemas:
            value = column_array(value)
        getattr(fields, section)[name] = value
    return fields


def _one_size(values: Sequence[Any], what: str, more: str) -> int | None:
    sizes = sorted({len(value) for value in values})
    if len(sizes) > 1:
        raise ValueError(f"flat dict {what} have ambiguous batch sizes: {sizes}{more}")
    return sizes[0] if sizes else None


def _is_dense(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not value.dtype.hasobject
    return isinstance(value, TensorObjectBuffer) or (is_tensor(value) and value.dim() > 0)


def _section_of(name: Any, schema: FieldSchema) -> str | None:
    section = schema.metadata.get("section")
    if section is not None and section not in SECTIONS:
        raise ValueError(f"FieldSchema for {name!r} metadata['section'] must be one of {list(SECTIONS)}")
    return section


def _check_sections(fields: Fields, schemas: Schemas) -> None:
    for name, schema in schemas.items():
        wanted = _section_of(name, schema)
        there = next((each for each in fields._fields if name in getattr(fields, each)), None)
        if wanted is not None and there is not None and there != wanted:
            raise ValueError(
                f"FieldSchema for {name!r} declares section {wanted!r}, but data contains it in {there!r}"
            )


def column_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """One object a row, whatever the rows are."""
    array = np.empty(len(values), object)
    for i, value in enumerate(values):
        array[i] = value
    return array


def column_of(name: Any, value: Any, schema: FieldSchema | None) -> Column | None:
    """A field of non_tensor_batch as buffers; None for an array of numbers or a tensor, stored as it is."""
    is_objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    if schema is None or schema.codec == "auto":
        if not is_objects:
            return None
        if value.ndim != 1:
            raise ValueError("unsupported structured non-tensor field: object ndarray rows")
        return encode_column(value.tolist())
    try:
        if isinstance(value, np.ndarray):
            rows = list(value) if value.ndim > 1 else value.tolist()
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
            rows = list(value)
        else:
            raise TypeError(
                f"non_tensor_batch field {name!r} with FieldSchema must be an ndarray or non-string sequence"
            )
        if not schema.nullable and any(row is None for row in rows):
            raise ValueError(f"FieldSchema for 'non_tensor_batch.{name}' is not nullable")
        return encode_column(rows, schema)
    except (TypeError, ValueError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        text = f"failed to encode non_tensor_batch field {name!r} with FieldSchema codec {schema.codec!r}"
        raise kind(f"{text}: {error}") from error


def rows_of(rows: Any, total: int) -> Sequence[int] | None:
    """Indices of rows, none negative; None for all. TypeError, ValueError or IndexError for others."""
    if rows is None:
        return None
    if isinstance(rows, StructuredMemberSlice):
        return rows.rows_of(total, "DataProto row")
    if isinstance(rows, slice):
        if rows.step is not None and rows.step < 1:
            raise ValueError("DataProto row slicing step must be positive")
        return range(*rows.indices(total))
    if isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu":
        rows = rows.tolist()
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes, bytearray)):
        raise TypeError("DataProto rows must be a slice, StructuredMemberSlice, or row index sequence")
    return [_row(row, total) for row in rows]


def _row(row: Any, total: int) -> int:
    if isinstance(row, (bool, np.bool_)) or not isinstance(row, (int, np.integer)):
        raise TypeError("DataProto row indices must be integers")
    if not -total <= row < total:
        raise IndexError(f"DataProto row index {row} out of range for {total} rows")
    return int(row) % total


def chosen_fields(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    non_tensor_fields: Sequence[str] | None,
) -> list[str]:
    """Names of fields to read: all, or those that are named in any of the lists. KeyError for others."""
    if fields is not None and (batch_fields is not None or non_tensor_fields is not None):
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    if fields is None and batch_fields is None and non_tensor_fields is None:
        return list(ref.field_index)
    names = [name for some in (fields, batch_fields, non_tensor_fields) for name in names_of(some)]
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return list(dict.fromkeys(names))


def built(fields: Fields, data_cls: Any) -> Any:
    """Three mappings, or what ``data_cls`` makes of them: its from_dict(), or it itself."""
    if data_cls is None:
        return fields._asdict()
    make: Callable[..., Any] | None = getattr(data_cls, "from_dict", None)
    if make is not None:
        return make(fields.batch, fields.non_tensor_batch, meta_info=fields.meta_info)
    if not callable(data_cls):
        raise TypeError(f"{data_cls!r} cannot be constructed from batch, non_tensor_batch, and meta_info")
    return data_cls(**fields._asdict())
