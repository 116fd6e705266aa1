"""What stands before the bytes of a tensor: HEADER_BYTES, as callers of the original measure and read them.

| offset | size | what |
|---|---|---|
| 0 | 4 | magic "NOOM" |
| 4 | 2 | version, 1 |
| 6 | 2 | bytes of the header, 304 |
| 8 | 4 | type, an index of TYPES; from OWN_TYPES on of those that the original has not |
| 12 | 4 | dimensions, at most 8 |
| 16 | 4 | 1: a shard of a tensor that is spread over ranks; 0: a whole one |
| 20 | 4 | zeros |
| 24 | 8 | where the data begins, 304 |
| 32 | 8 | bytes of data |
| 40 | 64 | size of each dimension of the whole tensor, -1 behind the last |
| 104 | 64 | the same of what is here |
| 168 | 4 | axes, at most 4 |
| 172 | 4 | zeros |
| 176 | 32 each | the axes |

An axis has, in 4 bytes each, its kind (index of KINDS), its place in this list, rank, size, split_dim or -1,
expert or stage id or 0; then in 8 bytes what is here of the dimension that is split. Little-endian. The
layout was found by looking at bytes that the original's functions give for known tensors.
torch is imported when a tensor comes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from moonpool.core.errors import InvalidArgument

Tensor = Any
MAGIC = b"NOOM"
VERSION = 1
DIMENSIONS_MAX = 8
HEADER_BYTES = 304
KINDS = ("dp", "tp", "ep", "pp")  # also the order in which names have them
AXES_MAX = len(KINDS)
TYPES = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool",
    "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
OWN_TYPES = 1024
MORE_TYPES = (
    "complex64", "complex128", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
_NUMBER_OF = {name: i for i, name in enumerate(TYPES)} | {
    name: OWN_TYPES + i for i, name in enumerate(MORE_TYPES)
}
_NAME_OF = {number: name for name, number in _NUMBER_OF.items()}
_HEADER = struct.Struct("<4sHHiiI4xQQ8q8qI4x128s")
_AXIS = struct.Struct("<IIIIiiQ")
assert _HEADER.size == HEADER_BYTES
assert _AXIS.size * AXES_MAX == 128


class Cut(NamedTuple):
    """One axis of a shard.

    split_dim: the dimension that "tp" cuts.
    number: of an expert or a stage.
    """

    kind: str
    rank: int
    size: int
    split_dim: int | None = None
    number: int = 0


class Header(NamedTuple):
    """What stands before a tensor's bytes.

    shape: of the shard; whole_shape has that of the whole tensor.
    cuts: the axes of the shard; none for a whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    data_bytes: int
    cuts: tuple[Cut, ...] = ()

    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, of which this is a shard."""
        sizes = list(self.shape)
        for cut in self.cuts:
            if cut.split_dim is not None:
                sizes[cut.split_dim] *= cut.size
        return tuple(sizes)

    def pack(self) -> bytes:
        """Raises InvalidArgument for more dimensions than there is room for, or a type that has no number."""
        if len(self.shape) > DIMENSIONS_MAX:
            raise InvalidArgument(f"a tensor has at most {DIMENSIONS_MAX} dimensions, not {len(self.shape)}")
        if self.dtype not in _NUMBER_OF:
            raise InvalidArgument(f"tensors of {self.dtype} are not stored; view it as another type")
        axes = b"".join(
            _AXIS.pack(
                KINDS.index(cut.kind),
                place,
                cut.rank,
                cut.size,
                -1 if cut.split_dim is None else cut.split_dim,
                cut.number,
                0 if cut.split_dim is None else self.shape[cut.split_dim],
            )
            for place, cut in enumerate(self.cuts)
        )
        return _HEADER.pack(
            MAGIC, VERSION, HEADER_BYTES, _NUMBER_OF[self.dtype], len(self.shape), bool(self.cuts),
            HEADER_BYTES, self.data_bytes, *_padded(self.whole_shape()), *_padded(self.shape),
            len(self.cuts), axes,
        )  # fmt: skip


def _padded(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *[-1] * (DIMENSIONS_MAX - len(shape)))


def header_of(data: memoryview) -> Header:
    """Raises InvalidArgument for what is no tensor."""
    if data.nbytes >= HEADER_BYTES and bytes(data[:4]) == MAGIC:
        _, version, length, number, dimensions, _, begin, size, *rest = _HEADER.unpack(data[:HEADER_BYTES])
        shape, count, axes = tuple(rest[8:16]), rest[16], rest[17]
        if (
            (version, length, begin) == (VERSION, HEADER_BYTES, HEADER_BYTES)
            and 0 <= dimensions <= DIMENSIONS_MAX
            and all(one >= 0 for one in shape[:dimensions])
            and size <= data.nbytes - HEADER_BYTES
            and count <= AXES_MAX
            and number in _NAME_OF
        ):
            cuts = tuple(_cut_of(*row) for row in _AXIS.iter_unpack(axes[: count * _AXIS.size]))
            if all(cut.split_dim is None or cut.split_dim < dimensions for cut in cuts):
                return Header(_NAME_OF[number], shape[:dimensions], size, cuts)
    raise InvalidArgument("these bytes are no tensor: put_tensor() writes a header before the data")


def _cut_of(kind: int, _place: int, rank: int, size: int, split_dim: int, number: int, _length: int) -> Cut:
    if kind >= len(KINDS) or split_dim < -1:
        raise InvalidArgument("these bytes are no tensor: its header has an axis of no known kind")
    return Cut(KINDS[kind], rank, size, None if split_dim < 0 else split_dim, number)


def tensor_over(data: memoryview) -> Tensor:
    """A tensor whose memory is ``data``. Raises InvalidArgument."""
    header = header_of(data)
    import torch

    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"this torch has no type {header.dtype!r}")
    count = 1
    for size in header.shape:
        count *= size
    if count * dtype.itemsize != header.data_bytes:
        raise InvalidArgument(
            f"a tensor of {header.shape} and {header.dtype} has not {header.data_bytes} bytes"
        )
    if not header.data_bytes:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, offset=HEADER_BYTES, count=count).reshape(header.shape)


def tensor_of(data: memoryview) -> Tensor:
    """A tensor of its own memory."""
    import torch

    own = bytearray(header_of(data).data_bytes + HEADER_BYTES)
    own[:] = data[: len(own)]
    tensor = tensor_over(memoryview(own))
    assert isinstance(tensor, torch.Tensor)
    return tensor


def bytes_of_tensor(tensor: Tensor) -> Any:
    """The numbers of a contiguous tensor of the CPU as an array of bytes, not copied."""
    import torch

    return tensor.flatten().view(torch.uint8).numpy()


def parts_of(tensor: Tensor, cuts: tuple[Cut, ...] = ()) -> tuple[list[Any], Tensor]:
    """What put() takes, and what must live until it has. Raises InvalidArgument for what is no tensor."""
    check_tensor(tensor)
    try:
        held = tensor.detach().to("cpu").contiguous()
    except (RuntimeError, NotImplementedError) as error:  # sparse, meta, a device that is gone
        raise InvalidArgument(f"a tensor on {tensor.device} gave no bytes: {error}") from error
    size = held.numel() * held.element_size()
    header = Header(str(held.dtype).removeprefix("torch."), tuple(held.shape), size, cuts).pack()
    return [header, *([(held.data_ptr(), size)] if size else [])], held


def check_tensor(tensor: Tensor) -> None:
    """Raises InvalidArgument for what is no torch.Tensor, without importing torch for it."""
    if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "untyped_storage"):
        raise InvalidArgument(f"a {type(tensor).__name__} is no torch.Tensor")


def equal_parts(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """``size`` parts of one shape along ``dim``. Raises InvalidArgument where there are none."""
    check_tensor(tensor)
    if not 0 <= dim < tensor.dim() or size < 1 or tensor.shape[dim] % size or tensor.shape[dim] < size:
        raise InvalidArgument(
            f"a tensor of {tuple(tensor.shape)} cannot be cut into {size} equal parts along {dim}"
        )
    return list(tensor.chunk(size, dim))


def _serialize_tensor(tensor: Tensor, /) -> tuple[bytes, int, int, Tensor]:
    """(header, address of the data, bytes of the data, what keeps them alive)."""
    (header, *_), held = parts_of(tensor)
    return header, held.data_ptr(), held.numel() * held.element_size(), held


def _deserialize_tensor(data: bytes, /) -> Tensor:
    """Header and data in one piece. ValueError for anything else."""
    view = memoryview(data)
    if len(view) != HEADER_BYTES + header_of(view).data_bytes:
        raise InvalidArgument(f"a header and its data have not {len(view)} bytes")
    return tensor_of(view)


def _tensor_metadata_size() -> int:
    """Bytes of the header before a tensor."""
    return HEADER_BYTES
