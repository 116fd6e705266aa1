"""Columns of Python values as buffers: a row is a string, a list, a dict, an array or a tensor of any size.

A column becomes ``data`` (the rows one behind the other), ``offsets`` (where each begins, and the end) and
``nulls`` (the rows that are None). The codec "ndarray", for plain numbers, has ``data`` as an array and no
offsets. So one row, or some, can be read without the others.

| codec | a row |
|---|---|
| ndarray | a number; all have one type afterwards |
| utf8_ragged, bytes_ragged, json_ragged | text, bytes, the JSON of the row |
| msgpack_ragged | lists and dicts of plain values |
| typed_ragged | a list of numbers, or an array of any shape |
| ragged_tensor | a torch tensor of any shape |
| media_bytes, media_list_ragged | bytes or a PIL image; a list of them |
| structured_recursive, ragged_tensor_dict | lists and dicts with arrays, tensors, images in them |

From msgpack_ragged on a row is MessagePack, with extensions of our own: 1 an array, 2 a tensor, 3 an image.
The names are the original's; what is inside of the buffers is ours. A tuple comes back as a list, as there;
integers of a list stay integers beside empty lists, and dicts keep the keys that are integers.
torch and PIL are imported when rows of theirs are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]
DEPTH_MAX = 32
INFERRED = "inferred_from_runtime_values"
_ARRAY, _TENSOR, _IMAGE = 1, 2, 3
_SCALARS = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class FieldSchema:
    """How a field is stored: a codec of the table above, or "auto".

    nullable: rows may be None. metadata: "dtype" for numbers; "section" puts the field into "batch",
    "non_tensor_batch" or "meta_info".
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """Which codec a column gets, and why."""

    accepted: bool
    codec: str
    reason: str
    normalized_type: str
    metadata: dict[str, Any] = field(default_factory=dict)


# ---- what a row is


def is_text(value: Any) -> bool:
    """Whether a row is a str."""
    return isinstance(value, str)


def is_bytes(value: Any) -> bool:
    """Whether a row is bytes."""
    return isinstance(value, (bytes, bytearray, memoryview))


def is_number(value: Any) -> bool:
    """Whether a row is a real number or a bool."""
    return isinstance(value, (bool, int, float, np.number, np.bool_)) and not isinstance(
        value, np.complexfloating
    )


def is_numbers(value: Any) -> bool:
    """Whether a row is a list of numbers."""
    return isinstance(value, (list, tuple)) and all(map(is_number, value))


def is_array(value: Any) -> bool:
    """Whether a row is an array of numbers."""
    return isinstance(value, np.ndarray) and not value.dtype.hasobject and not value.dtype.names


def is_tensor(value: Any) -> bool:
    """Whether a row is a torch tensor that is not nested."""
    return hasattr(value, "data_ptr") and hasattr(value, "untyped_storage") and not value.is_nested


def is_image(value: Any) -> bool:
    """Whether a row is an image of PIL."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes")


def is_media(value: Any) -> bool:
    """Whether a row is an image, or the bytes of one."""
    return is_image(value) or is_bytes(value)


def is_media_list(value: Any) -> bool:
    """Whether a row is a list of images."""
    return isinstance(value, (list, tuple)) and all(map(is_media, value))


def is_plain(value: Any, depth: int = 0) -> bool:
    """Lists and dicts of what MessagePack has, no deeper than DEPTH_MAX."""
    return is_tree(value, depth, lambda other: False)


def is_packable(value: Any, depth: int = 0) -> bool:
    """Whether a row is a tree of plain values, arrays, tensors and images."""
    return is_tree(value, depth, lambda other: is_array(other) or is_tensor(other) or is_media(other))


def is_tree(value: Any, depth: int, is_leaf: Callable[[Any], bool]) -> bool:
    """Whether ``value`` is a tree of dicts, lists and plain values whose other leaves pass ``is_leaf``,
    DEPTH_MAX deep at most."""
    if depth > DEPTH_MAX:
        return False
    if isinstance(value, dict):
        keys = all(isinstance(key, (str, int)) for key in value)
        return keys and all(is_tree(one, depth + 1, is_leaf) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(type(one) in _SCALARS or is_tree(one, depth + 1, is_leaf) for one in value)
    return isinstance(value, _SCALARS) or is_number(value) or is_leaf(value)


def is_sequence(value: Any) -> bool:
    """Whether a row is numbers in a list or an array."""
    return is_numbers(value) or is_array(value)


def is_plain_container(value: Any) -> bool:
    """Whether a row is a list or dict of plain values."""
    return isinstance(value, (list, tuple, dict)) and is_plain(value)


def is_container(value: Any) -> bool:
    """Whether a row is a list or dict that is packable."""
    return isinstance(value, (list, tuple, dict)) and is_packable(value)


# ---- MessagePack with arrays, tensors and images


def _extension(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if is_array(value):
        row = (value.dtype.str, value.shape, np.asarray(value, order="C").tobytes())
        return msgspec.msgpack.Ext(_ARRAY, _PLAIN.encode(row))
    if is_tensor(value):
        held = value.detach().to("cpu").contiguous()
        data = held.reshape(-1).view(_torch().uint8).numpy().tobytes() if held.numel() else b""
        row = (str(held.dtype).removeprefix("torch."), tuple(held.shape), data)
        return msgspec.msgpack.Ext(_TENSOR, _PLAIN.encode(row))
    if is_image(value):
        return msgspec.msgpack.Ext(_IMAGE, _PLAIN.encode((value.mode, value.size, value.tobytes())))
    raise TypeError(f"a {type(value).__name__} is neither plain nor an array, a tensor or an image")


def _from_extension(code: int, data: memoryview) -> Any:
    kind, shape, raw = msgspec.msgpack.decode(data)
    if code == _ARRAY:
        dtype = np.dtype(kind)
        if dtype.hasobject:
            raise ValueError("an array of objects is not read")
        return np.frombuffer(bytearray(raw), dtype).reshape(shape)
    if code == _TENSOR:
        torch, dtype = _torch(), torch_dtype(kind)
        if not raw:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    if code == _IMAGE:
        from PIL import Image

        return Image.frombytes(kind, tuple(shape), raw)
    raise ValueError(f"packed rows have no extension {code}")


def _torch() -> Any:
    import torch

    return torch


def torch_dtype(name: str) -> Any:
    """ValueError for a type that this torch has not."""
    torch = _torch()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no type {name!r:.80}")
    return dtype


_PLAIN = msgspec.msgpack.Encoder()
_PACKER = msgspec.msgpack.Encoder(enc_hook=_extension)
_UNPACKER = msgspec.msgpack.Decoder(ext_hook=_from_extension)


def pack(value: Any) -> bytes:
    """TypeError, or an OverflowError for an integer of more than 64 bits."""
    return _PACKER.encode(value)


def unpack(data: Any) -> Any:
    """The value of the bytes that ``pack`` made."""
    return _UNPACKER.decode(data)


# ---- the codecs


def _text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected a str, got a {type(value).__name__}")
    return value.encode()


def _as_text(data: Any) -> str:
    return str(data, "utf8")


def _raw(value: Any) -> bytes:
    if not is_bytes(value):
        raise TypeError(f"expected bytes, got a {type(value).__name__}")
    return bytes(value)


def _packed(accepts: Callable[[Any], bool]) -> Callable[[Any], bytes]:
    def encode(value: Any) -> bytes:
        if not accepts(value):
            raise TypeError(f"a row of another kind: {type(value).__name__}")
        return pack(value)

    return encode


class Codec(NamedTuple):
    """accepts: what a column must have in each row for this codec to be chosen."""

    name: str
    accepts: Callable[[Any], bool]
    reason: str
    normalized_type: str
    encode: Callable[[Any], bytes]
    decode: Callable[[Any], Any] = unpack


_NUMBERS = "ndarray"
_SEQUENCE = "numeric sequence"
_media_list, _tree = _packed(is_media_list), _packed(is_packable)
# The first that accepts all rows is chosen.
INFERENCE = (
    Codec("utf8_ragged", is_text, "all rows are str", "str", _text, _as_text),
    Codec("bytes_ragged", is_bytes, "all rows are bytes-like", "bytes-like", _raw, bytes),
    Codec(_NUMBERS, is_number, "all rows are numeric scalar", "numeric scalar", pack),
    Codec("ragged_tensor", is_tensor, "all non-null rows are Tensor", "torch.Tensor", _packed(is_tensor)),
    Codec("typed_ragged", is_array, "all rows are numeric ndarray", _SEQUENCE, _packed(is_sequence)),
    Codec("typed_ragged", is_numbers, "all rows are numeric sequences", _SEQUENCE, _packed(is_sequence)),
    Codec("media_bytes", is_image, "all rows are media", "media", _packed(is_media)),
    Codec(
        "media_list_ragged", is_media_list, "all rows are media lists", "media list", _packed(is_media_list)
    ),
    Codec("msgpack_ragged", is_plain_container, "all rows are msgpack-like", "msgpack", _packed(is_plain)),
    Codec(
        "structured_recursive", is_container, "all rows are structured", "structured", _packed(is_packable)
    ),
)
_BY_NAME = {codec.name: codec for codec in INFERENCE} | {
    "json_ragged": Codec(
        "json_ragged", is_plain, "", "", lambda v: json.dumps(v).encode(), lambda d: json.loads(bytes(d))
    ),
    "ragged_tensor_dict": Codec("ragged_tensor_dict", is_container, "", "", _tree),
}
SCHEMA_CODECS = frozenset(_BY_NAME) - {"structured_recursive"}


def decide(values: Sequence[Any]) -> Decision:
    """The codec of a column of these rows."""
    there = [value for value in values if value is not None]
    if not there:
        return Decision(False, "msgpack_ragged", "all rows are null", "msgpack")
    for codec in INFERENCE:
        if all(map(codec.accepts, there)):
            return Decision(True, codec.name, codec.reason, codec.normalized_type)
    return Decision(False, "msgpack_ragged", "no codec matched", "python object")


class Column(NamedTuple):
    """A column as it is stored.

    metadata: which codec was chosen, and why.
    """

    codec: str
    rows: int
    metadata: dict[str, Any]
    payload: dict[str, Any]


def encode_column(values: Sequence[Any], schema: FieldSchema | None = None) -> Column:
    """ValueError, TypeError or OverflowError for rows that the schema's codec, or none, can store."""
    if schema is not None and schema.codec != "auto":
        if schema.codec not in SCHEMA_CODECS:
            raise ValueError(f"unsupported schema codec: {schema.codec!r}")
        return _encode(schema.codec, values, {}, schema.metadata.get("dtype"))
    decision = decide(values)
    if not decision.accepted:
        raise ValueError(f"unsupported structured non-tensor field: {decision.reason}")
    metadata = {
        "schema_source": INFERRED,
        "decision_reason": decision.reason,
        "normalized_type": decision.normalized_type,
    }
    return _encode(decision.codec, values, metadata, None)


def _encode(codec: str, values: Sequence[Any], metadata: dict[str, Any], dtype: Any) -> Column:
    nulls = np.fromiter((value is None for value in values), np.bool_, len(values))
    if codec == _NUMBERS:
        array = np.asarray([0 if value is None else value for value in values], dtype)
        if array.dtype.kind not in "biuf" or array.shape != nulls.shape:
            raise OverflowError("rows of numbers have 64 bits at most, and one number each")
        shape = {"dtype": str(array.dtype), "shape": list(array.shape)}
        return Column(codec, len(values), shape | metadata, {"data": array, "nulls": nulls})
    if dtype is not None:
        values = [None if value is None else _as_type(value, np.dtype(dtype)) for value in values]
    encode = _BY_NAME[codec].encode
    rows = [b"" if value is None else encode(value) for value in values]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Column(codec, len(values), metadata, {"data": b"".join(rows), "offsets": offsets, "nulls": nulls})


def _as_type(value: Any, dtype: np.dtype[Any]) -> Any:
    array = np.asarray(value, dtype)
    return array if isinstance(value, np.ndarray) else array.tolist()


def decode_rows(codec: str, parts: Sequence[Any], nulls: Sequence[bool]) -> list[Any]:
    """parts: the bytes of each row; of "ndarray", its number."""
    if codec not in _BY_NAME:
        raise ValueError(f"unsupported structured codec: {codec!r}")
    decode = _item if codec == _NUMBERS else _BY_NAME[codec].decode
    return [None if null else decode(part) for part, null in zip(parts, nulls, strict=True)]


def _item(number: Any) -> Any:
    return number.item()


def encoded_of(column: Column, member: str) -> dict[str, Any]:
    """The handle's description of a column whose buffers are ``member``.NAME."""
    names = {name: f"{member}.{name}" for name in column.payload}
    return {"codec": column.codec, "rows": column.rows, "metadata": column.metadata, "payload_members": names}
