"""Tensors as objects: a header of HEADER_BYTES, then the tensor's bytes.

| offset | size | what |
|---|---|---|
| 0 | 8 | magic "MPTENSOR" |
| 8 | 4 | version, 1 |
| 12 | 4 | dimensions, at most 8 |
| 16 | 8 | bytes of data |
| 24 | 24 | torch's name of the type, such as "bfloat16", filled with zeros |
| 48 | 64 | size of each dimension |
| 112 | 16 | zeros |

Little-endian. torch is imported when a tensor comes.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moonpool.core.errors import InvalidArgument

from ._base import key_of, keys_of, same_length
from ._codes import Code, code_of, say
from ._segments import Segments
from ._values import DEFAULT, ReplicateConfig

Tensor = Any
MAGIC = b"MPTENSOR"
VERSION = 1
DIMENSIONS_MAX = 8
HEADER_BYTES = 128
_HEADER = struct.Struct("<8sIIQ24s8Q16x")
assert _HEADER.size == HEADER_BYTES


class Header(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data_bytes: int

    def pack(self) -> bytes:
        """Raises InvalidArgument for more dimensions than there is room for."""
        if len(self.shape) > DIMENSIONS_MAX:
            raise InvalidArgument(f"a tensor has at most {DIMENSIONS_MAX} dimensions, not {len(self.shape)}")
        padded = (*self.shape, *[0] * (DIMENSIONS_MAX - len(self.shape)))
        return _HEADER.pack(MAGIC, VERSION, len(self.shape), self.data_bytes, self.dtype.encode(), *padded)


def header_of(data: memoryview) -> Header:
    """Raises InvalidArgument for what is no tensor of ours."""
    if data.nbytes >= HEADER_BYTES and bytes(data[:8]) == MAGIC:
        _, version, dimensions, size, name, *shape = _HEADER.unpack(data[:HEADER_BYTES])
        if version == VERSION and dimensions <= DIMENSIONS_MAX and size <= data.nbytes - HEADER_BYTES:
            return Header(name.rstrip(b"\0").decode("ascii", "replace"), tuple(shape[:dimensions]), size)
    raise InvalidArgument("these bytes are no tensor: put_tensor() writes a header before the data")


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


def parts_of(tensor: Tensor) -> tuple[list[Any], Tensor]:
    """What put() takes, and what must live until it has. Raises InvalidArgument for what is no tensor."""
    check_tensor(tensor)
    try:
        held = tensor.detach().to("cpu").contiguous()
    except (RuntimeError, NotImplementedError) as error:  # sparse, meta, a device that is gone
        raise InvalidArgument(f"a tensor on {tensor.device} gave no bytes: {error}") from error
    size = held.numel() * held.element_size()
    header = Header(str(held.dtype).removeprefix("torch."), tuple(held.shape), size).pack()
    return [header, *([(held.data_ptr(), size)] if size else [])], held


def check_tensor(tensor: Tensor) -> None:
    """Raises InvalidArgument for what is no torch.Tensor, without importing torch for it."""
    if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "untyped_storage"):
        raise InvalidArgument(f"a {type(tensor).__name__} is no torch.Tensor")


def memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Tensors(Segments):
    # ---- whole tensors

    def put_tensor(self, key: str, tensor: Tensor) -> int:
        return self._put_tensors("put_tensor", [key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig = DEFAULT) -> int:
        return self._put_tensors("pub_tensor", [key], [tensor], config)[0]

    def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        return self._put_tensors("upsert_tensor", [key], [tensor], replace=True)[0]

    def upsert_pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig = DEFAULT) -> int:
        return self._put_tensors("upsert_pub_tensor", [key], [tensor], config, replace=True)[0]

    def batch_put_tensor(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    def batch_pub_tensor(
        self, keys: list[str], tensors_list: list[Tensor], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    def batch_upsert_tensor(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    def batch_upsert_pub_tensor(
        self, keys: list[str], tensors_list: list[Tensor], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        return self._put_tensors("batch_upsert_pub_tensor", keys, tensors_list, config, replace=True)

    def get_tensor(self, key: str) -> Tensor | None:
        """None is a miss, or an object that is no tensor (the log says so)."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: list[str]) -> list[Tensor | None]:
        return [self._tensor("get_tensor", view, tensor_of) for view in self._views(keys)]

    def _put_tensors(
        self,
        operation: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig = DEFAULT,
        *,
        replace: bool = False,
    ) -> list[int]:
        if len(keys) != len(tensors):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        parts: list[Any] = []
        held = []
        for tensor in tensors:
            try:
                part, keep = parts_of(tensor)
            except InvalidArgument as error:
                code_of(error, operation)
                part, keep = [], None
            parts.append(part)
            held.append(keep)
        return self._put(operation, keys, parts, config, replace=replace)

    def _tensor(
        self, operation: str, data: memoryview | None, make: Callable[[memoryview], Tensor]
    ) -> Tensor | None:
        if data is None:
            return None
        try:
            return make(data)
        except InvalidArgument as error:
            say(operation, "no tensor", f"{operation}: {error}")
            return None

    # ---- tensors in the caller's memory, with their header before them

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        return self._put_tensors_from("put_tensor_from", keys, buffer_ptrs, sizes, replace=False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]:
        return self._put_tensors_from("upsert_tensor_from", keys, buffer_ptrs, sizes, replace=True)

    def _put_tensors_from(
        self,
        operation: str,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        *,
        replace: bool,
    ) -> list[int]:
        def one(key: str, pointer: int, size: int) -> int:
            address, room = self._range(pointer, size)
            header = header_of(memory_at(address, room))
            if room != HEADER_BYTES + header.data_bytes:
                raise InvalidArgument(
                    f"a tensor of {header.data_bytes} bytes with its header has not {room} bytes"
                )
            return self._put(operation, [key], [(address, room)], DEFAULT, replace=replace)[0]

        if not len(keys) == len(pointers) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        return self._each(operation, one, keys, pointers, sizes)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """A tensor over the caller's memory, behind the header there. None is a miss, or an object that is no
        tensor (the log says so); what goes wrong is raised as a moonpool Error."""
        return self.batch_get_tensor_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[Tensor | None]:
        names = keys_of(keys)
        self._open()
        same_length(names, buffer_ptrs, sizes)
        targets = self._buffers.check_all(buffer_ptrs, sizes, writable=True)
        found = self._ask(lambda store: store.get(names, targets)) if names else []
        return [
            None if n is None else self._tensor("get_tensor_into", memory_at(pointer, n), tensor_over)
            for n, (pointer, _) in zip(found, targets, strict=True)
        ]

    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Into a tensor of any device, of the same shape and type, straight from the pool: the number
        of bytes, or a code."""

        def act() -> int:
            check_tensor(tensor)
            view = self._views([key])[0]
            if view is None:
                return int(Code.OBJECT_NOT_FOUND)
            source = tensor_over(view)
            if (source.dtype, source.shape) != (tensor.dtype, tensor.shape):
                raise InvalidArgument(
                    f"{key!r:.80} is {source.dtype} of {tuple(source.shape)}, not {tensor.dtype} of "
                    f"{tuple(tensor.shape)}"
                )
            if tensor.device.type == "meta":
                raise InvalidArgument("a tensor on meta has no memory")
            try:
                tensor.detach().copy_(source)  # returns when the bytes are there: pageable memory is staged
            except RuntimeError as error:  # expanded, sparse, a device without memory
                raise InvalidArgument(f"the tensor on {tensor.device} took no bytes: {error}") from error
            return int(source.nbytes)

        return self._code("get_tensor_into_cuda", act)

    def batch_get_tensor_into_cuda(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        if len(keys) != len(tensors_list):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        return [self.get_tensor_into_cuda(*pair) for pair in zip(keys, tensors_list, strict=True)]

    # ---- tensor-parallel shards: KEY_tp_RANK has the part of each rank

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cuts the whole tensor and stores the shards of all ranks, whichever rank says so."""
        return self._put_shards("put_tensor_with_tp", [key], [tensor], tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: list[str],
        tensors_list: list[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self._put_shards("batch_put_tensor_with_tp", base_keys, tensors_list, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Tensor,
        config: ReplicateConfig = DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        return self._put_shards("pub_tensor_with_tp", [key], [tensor], tp_size, split_dim, config)[0]

    def batch_pub_tensor_with_tp(
        self,
        base_keys: list[str],
        tensors_list: list[Tensor],
        config: ReplicateConfig = DEFAULT,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self._put_shards(
            "batch_pub_tensor_with_tp", base_keys, tensors_list, tp_size, split_dim, config
        )

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        if not len(base_keys) == len(buffer_ptrs) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(base_keys)

        def one(key: str, pointer: int, size: int) -> int:
            tensor = tensor_over(memory_at(*self._range(pointer, size)))
            return self._put_shards("put_tensor_with_tp_from", [key], [tensor], tp_size, split_dim)[0]

        return self._each("put_tensor_with_tp_from", one, base_keys, buffer_ptrs, sizes)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """The shard of a rank; with one rank the whole tensor."""
        return self.get_tensor(shard_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(
        self, base_keys: list[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[Tensor | None]:
        return self.batch_get_tensor([shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        return self.get_tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        keys = [shard_key(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    def _put_shards(
        self,
        operation: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        tp_size: int,
        split_dim: int,
        config: ReplicateConfig = DEFAULT,
    ) -> list[int]:
        if tp_size == 1:
            return self._put_tensors(operation, keys, tensors, config)
        if len(keys) != len(tensors):
            return [int(Code.INVALID_PARAMS)] * len(keys)

        def one(key: str, tensor: Tensor) -> int:
            names = [shard_key(key, rank, tp_size) for rank in range(tp_size)]
            codes = self._put_tensors(operation, names, shards_of(tensor, tp_size, split_dim), config)
            return next((code for code in codes if code), int(Code.OK))

        return self._each(operation, one, keys, tensors)

    # ---- files

    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Writes a tensor to a safetensors file (None: one called as the key), under its key."""

        def act() -> int:
            if (view := self._views([key])[0]) is None:
                raise FileNotFoundError(f"no tensor has the key {key!r:.80}")
            header = header_of(view)
            kind = _SAFE_OF.get(header.dtype)
            if kind is None:
                raise InvalidArgument(f"safetensors has no type {header.dtype}")
            entry = {"dtype": kind, "shape": list(header.shape), "data_offsets": [0, header.data_bytes]}
            text = json.dumps({key: entry}, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            with open(file_name or key, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.write(view[HEADER_BYTES : HEADER_BYTES + header.data_bytes])
            return int(Code.OK)

        return self._code("save_tensor_to_safetensor", act)

    def load_tensor_from_safetensor(self, key: str | None = None, file_name: str = "") -> Tensor | None:
        """The one tensor of a file, or the one called ``key``, which is stored under that key; else None."""
        self._open()
        try:
            name, header, data = read_safetensor(Path(file_name), key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            code_of(error, "load_tensor_from_safetensor")
            return None
        packed = header.pack() + data
        self._put("load_tensor_from_safetensor", [key or name], [packed], DEFAULT)
        return tensor_of(memoryview(packed))


_SAFE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_SAFE_OF = {ours: theirs for theirs, ours in _SAFE.items()}
_SAFE_HEADER_MAX = 100 << 20


def read_safetensor(path: Path, wanted: str | None) -> tuple[str, Header, bytes]:
    """One tensor of a file. Raises OSError, or ValueError, KeyError, TypeError for a file that is none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= _SAFE_HEADER_MAX:
            raise ValueError(f"{path} is no safetensors file")
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        name = wanted if wanted in entries else next(iter(entries), "")
        if not name or (wanted not in entries and len(entries) > 1):
            raise ValueError(f"{path} has the tensors {', '.join(entries)[:200]}: name one of them")
        entry = entries[name]
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end:
            raise ValueError(f"{path} is no safetensors file")
        file.seek(8 + length + begin)
        data = file.read(end - begin)
    if len(data) != end - begin:
        raise ValueError(f"{path} ends too early")
    return name, Header(_SAFE[entry["dtype"]], tuple(entry["shape"]), len(data)), data


def shard_key(key: str, rank: int, size: int) -> str:
    key_of(key)  # a TypeError for what is none
    return key if size == 1 else f"{key if isinstance(key, str) else bytes(key).decode()}_tp_{rank}"


def shards_of(tensor: Tensor, size: int, dim: int) -> list[Tensor]:
    """Raises InvalidArgument when there are not as many pieces."""
    check_tensor(tensor)
    if not -tensor.dim() <= dim < tensor.dim() or size < 1:
        raise InvalidArgument(f"a tensor of {tuple(tensor.shape)} cannot be cut into {size} along {dim}")
    pieces = list(tensor.chunk(size, dim))
    if len(pieces) != size:
        raise InvalidArgument(f"{tensor.shape[dim]} rows of a tensor make no {size} shards")
    return pieces


def _tensor_metadata_size() -> int:
    """Bytes of the header before a tensor."""
    return HEADER_BYTES


def _serialize_tensor(tensor: Tensor, /) -> tuple[bytes, int, int, Tensor]:
    """(header, address of the data, bytes of the data, what keeps them alive)."""
    (header, *_), held = parts_of(tensor)
    return header, held.data_ptr(), held.numel() * held.element_size(), held


def _deserialize_tensor(data: bytes, /) -> Tensor:
    """Header and data in one piece. ValueError for anything else."""
    return tensor_of(memoryview(data))
