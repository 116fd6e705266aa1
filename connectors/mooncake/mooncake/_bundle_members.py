"""What the members of a structured object are: arrays, tensors, bytes; how each is stored and read.

| encoding | the bytes | the spec beside it |
|---|---|---|
| ndarray | the array's, in C order | dtype, shape |
| torch_tensor | the header of ``put_tensor`` and the data: get_tensor() of its key reads it | dtype, shape |
| torch_tensor, nested | the rows of a jagged tensor, packed (_row_codecs) | |
| bytes | themselves | |

torch is imported when a tensor comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ._bundle_store import Piece, Source, pieces_of
from ._memory import check_memory
from ._row_codecs import pack, torch_dtype, unpack
from ._tensor_header import HEADER_BYTES, header_of, parts_of, tensor_over
from ._tensors import memory_at

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows start to end of a member, each step-th. axis: 0."""

    axis: int
    start: int
    end: int
    step: int = 1

    def rows_of(self, total: int, what: str = "structured ndarray") -> range:
        """The rows of ``total`` that the slice selects. Raises ValueError for another axis than 0 or a step
        below 1."""
        if self.axis != 0:
            raise ValueError(f"{what} slicing currently supports axis=0 only")
        if self.step < 1:
            raise ValueError(f"{what} slicing step must be positive")
        return range(*slice(self.start, self.end, self.step).indices(total))


class RawDestination(NamedTuple):
    """Memory of the caller, at least as long as what is read. See raw_destination()."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False

    def memory(self, needed: int) -> Array:
        """The first ``needed`` bytes as an array of uint8. Raises ValueError when there are fewer."""
        if self.size < needed:
            raise ValueError(f"raw destination has {self.size} bytes, expected at least {needed}")
        check_memory(self.ptr, needed, writable=True)
        return np.frombuffer(memory_at(self.ptr, needed), np.uint8)


@dataclass(frozen=True)
class TensorObjectBuffer:
    """A tensor in memory with the header of ``put_tensor`` before it. See tensor_object_buffer()."""

    ptr: int
    size: int
    owner: Any
    batch_size: int | None = None

    def __len__(self) -> int:
        if self.batch_size is None:
            raise TypeError("tensor object buffer requires batch_size for DataProto use")
        return self.batch_size


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor."""
    return hasattr(value, "data_ptr") and hasattr(value, "untyped_storage")


def bytes_of(array: Array) -> Array:
    """The memory of a C-contiguous array. Assigning to it changes the array."""
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def bytes_view(value: Any, name: str) -> memoryview:
    """TypeError for what has no bytes in one piece."""
    try:
        view = memoryview(value)
    except TypeError as error:
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}") from error
    return view.cast("B") if view.nbytes and view.c_contiguous else memoryview(bytes(view))


def source_of(name: str, value: Any) -> tuple[dict[str, Any], Source]:
    """The spec of a member and where its bytes are. TypeError, or ValueError, for what has none."""
    if isinstance(value, TensorObjectBuffer):
        check_memory(value.ptr, value.size)
        memory = memory_at(value.ptr, value.size)
        view = memory[: HEADER_BYTES + header_of(memory).data_bytes]
        return {"encoding": "torch_tensor"}, Source([view], keep=value.owner)
    if is_tensor(value):
        return _tensor_source(value)
    if isinstance(value, np.ndarray):
        return _array_source(name, value)
    return {"encoding": "bytes"}, Source([bytes_view(value, name)], keep=value)


def _array_source(name: str, value: Array) -> tuple[dict[str, Any], Source]:
    if value.dtype.hasobject or value.dtype.names:
        raise TypeError(f"{name} must be bytes-like: an array of {value.dtype} has no plain numbers")
    array = np.asarray(value, order="C")
    spec = {"encoding": "ndarray", "dtype": array.dtype.str, "shape": list(array.shape)}
    return spec, Source([bytes_of(array).data], keep=array)


def _tensor_source(tensor: Any) -> tuple[dict[str, Any], Source]:
    dtype = str(tensor.dtype)
    if tensor.is_nested:
        rows = [row.detach().cpu() for row in tensor.unbind()]
        return {"encoding": "torch_tensor", "nested": True, "dtype": dtype}, Source([memoryview(pack(rows))])
    (header, *data), held = parts_of(tensor)
    shape = list(held.shape)
    parts = [memoryview(header), *(memory_at(*part) for part in data)]
    entry = {"kind": "tensor", "dtype": dtype, "shape": shape, "metadata_bytes": HEADER_BYTES}
    spec = {"encoding": "torch_tensor", "dtype": dtype, "shape": shape, "element_size": held.element_size()}
    return spec, Source(parts, entry, held)


class Plan(NamedTuple):
    """pieces: what is to be read. finish(): the value, once it was."""

    pieces: Sequence[Piece]
    finish: Callable[[], Any]


class Selection(NamedTuple):
    """Rows of a member: indices from 0 on, in the order wanted; slice: for a member of unknown length."""

    rows: Sequence[int] | None = None
    slice: StructuredMemberSlice | None = None

    def of(self, total: int, what: str) -> Sequence[int] | None:
        """Indices of the selected rows out of ``total``; None: all."""
        return self.slice.rows_of(total, what) if self.slice is not None else self.rows

    def __bool__(self) -> bool:
        return self.rows is not None or self.slice is not None


ALL = Selection()


def plan_member(
    name: str,
    spec: Mapping[str, Any],
    entry: Mapping[str, Any],
    selection: Selection,
    destination: Any,
    *,
    as_array: bool,
) -> Plan:
    """as_array: a member of bytes becomes an array of uint8, else bytes."""
    encoding = spec.get("encoding")
    if encoding == "ndarray":
        return _plan_array(name, spec, entry, selection, destination)
    if encoding == "torch_tensor":
        return _plan_tensor(name, spec, entry, selection, destination)
    if encoding != "bytes":
        raise ValueError(f"structured member {name} has the unknown encoding {encoding!r}")
    if selection:
        raise ValueError(f"structured bytes member {name} does not support slicing")
    if destination is not None:
        raise ValueError(f"structured bytes member {name} does not support materialize_into")
    target = np.empty(entry["bytes"], np.uint8)
    return Plan(list(pieces_of(entry, 0, target)), lambda: target if as_array else target.tobytes())


def _plan_array(
    name: str, spec: Mapping[str, Any], entry: Mapping[str, Any], selection: Selection, destination: Any
) -> Plan:
    dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != entry["bytes"]:
        raise ValueError(f"structured ndarray {name} has not the bytes of {shape} and {dtype}")
    rows = _rows(name, shape, selection, "structured ndarray")
    result_shape = shape if rows is None else (len(rows), *shape[1:])
    if destination is None:
        array = np.empty(result_shape, dtype)
    else:
        array = _array_destination(name, destination, dtype, result_shape)
    return Plan(list(_row_pieces(entry, shape, dtype.itemsize, rows, 0, bytes_of(array))), lambda: array)


def _rows(name: str, shape: Sequence[int], selection: Selection, what: str) -> Sequence[int] | None:
    if selection and not shape:
        raise ValueError(f"{what} {name} has no rows")
    return selection.of(shape[0], what) if selection else None


def _row_pieces(
    entry: Mapping[str, Any],
    shape: Sequence[int],
    itemsize: int,
    rows: Sequence[int] | None,
    offset: int,
    target: Array,
) -> Iterator[Piece]:
    """What fills ``target`` with those rows of an array that begins at ``offset`` of its buffer."""
    if rows is None:
        yield from pieces_of(entry, offset, target)
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    at = 0
    for first, count in runs(rows):
        size = count * row_bytes
        yield from pieces_of(entry, offset + first * row_bytes, target[at : at + size])
        at += size


def runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of rows that follow one another."""
    if isinstance(rows, range) and rows.step == 1:
        if rows:
            yield rows.start, len(rows)
        return
    first, count = -1, 0
    for row in rows:
        if count and row == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = row, 1
    if count:
        yield first, count


def _array_destination(name: str, destination: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if isinstance(destination, RawDestination):
        memory = destination.memory(math.prod(shape) * dtype.itemsize)
        return memory.view(dtype).reshape(shape) if memory.nbytes else np.empty(shape, dtype)
    text = f"structured ndarray field {name} destination"
    if not isinstance(destination, np.ndarray):
        raise TypeError(f"{text} must be a numpy.ndarray or raw_destination")
    if destination.dtype != dtype:
        raise ValueError(f"{text} dtype mismatch: expected {dtype.str}, got {destination.dtype.str}")
    if destination.shape != shape:
        raise ValueError(f"{text} shape mismatch: expected {shape}, got {destination.shape}")
    if not destination.flags.c_contiguous:
        raise ValueError(f"{text} must be C-contiguous")
    if not destination.flags.writeable:
        raise ValueError(f"{text} must be writeable")
    return destination


def _plan_tensor(
    name: str, spec: Mapping[str, Any], entry: Mapping[str, Any], selection: Selection, destination: Any
) -> Plan:
    if spec.get("nested"):
        return _plan_nested(name, entry, selection, destination)
    shape = spec.get("shape")
    if destination is not None:
        if not isinstance(destination, (RawDestination, TensorObjectBuffer)):
            raise ValueError(
                f"structured tensor member {name} only supports tensor_object_buffer or raw_destination"
                " destinations"
            )
        if selection:
            raise ValueError(f"structured tensor member {name} is read whole into a destination")
        target = RawDestination(destination.ptr, destination.size).memory(entry["bytes"])
    elif selection and shape is not None:
        return _plan_tensor_rows(name, spec, entry, selection)
    else:
        target = np.empty(entry["bytes"], np.uint8)

    def finish() -> Any:
        tensor = tensor_over(target.data)
        rows = _rows(name, tensor.shape, selection, "structured tensor")
        return tensor if rows is None else tensor[list(rows)]

    return Plan(list(pieces_of(entry, 0, target)), finish)


def _plan_tensor_rows(
    name: str, spec: Mapping[str, Any], entry: Mapping[str, Any], selection: Selection
) -> Plan:
    shape, itemsize = spec["shape"], spec["element_size"]
    rows = _rows(name, shape, selection, "structured tensor")
    assert rows is not None
    if HEADER_BYTES + math.prod(shape) * itemsize != entry["bytes"]:
        raise ValueError(f"structured tensor {name} has not the bytes of {shape}")
    target = np.empty(len(rows) * math.prod(shape[1:]) * itemsize, np.uint8)

    def finish() -> Any:
        import torch

        dtype = torch_dtype(str(spec["dtype"]).removeprefix("torch."))
        result_shape = (len(rows), *shape[1:])
        if not target.nbytes:
            return torch.empty(result_shape, dtype=dtype)
        return torch.from_numpy(target).view(dtype).reshape(result_shape)

    return Plan(list(_row_pieces(entry, shape, itemsize, rows, HEADER_BYTES, target)), finish)


def _plan_nested(name: str, entry: Mapping[str, Any], selection: Selection, destination: Any) -> Plan:
    if destination is not None:
        raise ValueError(f"structured nested tensor member {name} does not support materialize_into")
    target = np.empty(entry["bytes"], np.uint8)

    def finish() -> Any:
        import torch

        rows = unpack(target.data)
        chosen = selection.of(len(rows), "structured nested tensor")
        some = rows if chosen is None else [rows[i] for i in chosen]
        return torch.nested.nested_tensor(some, layout=torch.jagged)

    return Plan(list(pieces_of(entry, 0, target)), finish)


def plan_ranges(entry: Mapping[str, Any], offsets: Array, rows: Sequence[int]) -> tuple[Plan, Array]:
    """The ranges that read the chosen rows of a buffer in which row i begins at offsets[i], and where each
    row begins in what is read."""
    chosen = np.asarray(list(rows), np.int64)
    bounds = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(offsets[chosen + 1] - offsets[chosen], out=bounds[1:])
    target = np.empty(int(bounds[-1]), np.uint8)
    pieces: list[Piece] = []
    at = 0
    for first, count in runs(rows):
        low, high = int(offsets[first]), int(offsets[first + count])
        pieces += pieces_of(entry, low, target[at : at + high - low])
        at += high - low
    return Plan(pieces, lambda: target), bounds


def names_of(names: Sequence[str] | str | None) -> list[str]:
    """A name alone is one name."""
    return [names] if isinstance(names, str) else list(names or ())
