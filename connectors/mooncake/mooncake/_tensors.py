"""Tensors as objects: the header of _tensor_header.py, then the tensor's bytes."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moonpool.core.errors import InvalidArgument

from ._base import key_of, names_of
from ._codes import Code, code_of, coded, say
from ._memory import check_no_card
from ._objects import Objects
from ._tensor_header import (
    HEADER_BYTES,
    Cut,
    Header,
    Tensor,
    check_tensor,
    equal_parts,
    header_of,
    parts_of,
    tensor_of,
    tensor_over,
)
from ._values import DEFAULT, ReplicateConfig


def memory_at(address: int, size: int) -> memoryview:
    """``size`` bytes at ``address`` as a view; the caller has checked them."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class Tensors(Objects):
    """Whole tensors, and the shards of tensor parallelism."""

    # ---- whole tensors

    def put_tensor(self, key: str, tensor: Tensor) -> int:
        """Stores a tensor. Returns a code; 0 also when the key has an object: that one stays."""
        return self._put_tensors("put_tensor", [key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig = DEFAULT) -> int:
        """As put_tensor, with a config."""
        return self._put_tensors("pub_tensor", [key], [tensor], config)[0]

    def upsert_tensor(self, key: str, tensor: Tensor) -> int:
        """As put_tensor; replaces an object."""
        return self._put_tensors("upsert_tensor", [key], [tensor], replace=True)[0]

    def upsert_pub_tensor(self, key: str, tensor: Tensor, config: ReplicateConfig = DEFAULT) -> int:
        """As pub_tensor; replaces an object."""
        return self._put_tensors("upsert_pub_tensor", [key], [tensor], config, replace=True)[0]

    def batch_put_tensor(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        """As put_tensor, for many keys. One code per key."""
        return self._put_tensors("batch_put_tensor", keys, tensors_list)

    def batch_pub_tensor(
        self, keys: list[str], tensors_list: list[Tensor], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        """As pub_tensor, for many keys. One code per key."""
        return self._put_tensors("batch_pub_tensor", keys, tensors_list, config)

    def batch_upsert_tensor(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        """As upsert_tensor, for many keys. One code per key."""
        return self._put_tensors("batch_upsert_tensor", keys, tensors_list, replace=True)

    def batch_upsert_pub_tensor(
        self, keys: list[str], tensors_list: list[Tensor], config: ReplicateConfig = DEFAULT
    ) -> list[int]:
        """As upsert_pub_tensor, for many keys. One code per key."""
        return self._put_tensors("batch_upsert_pub_tensor", keys, tensors_list, config, replace=True)

    def get_tensor(self, key: str) -> Tensor | None:
        """None is a miss, or an object that is no tensor (the log says so)."""
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: list[str]) -> list[Tensor | None]:
        """As get_tensor, for many keys."""
        return [self._tensor("get_tensor", view, tensor_of) for view in self._views(keys)]

    def _put_tensors(
        self,
        operation: str,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        config: ReplicateConfig = DEFAULT,
        *,
        replace: bool = False,
        cuts: Sequence[tuple[Cut, ...]] | None = None,
    ) -> list[int]:
        """cuts: of each tensor that is a shard."""
        if len(keys) != len(tensors):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        parts: list[Any] = []
        held = []
        for i, tensor in enumerate(tensors):
            try:
                part, keep = parts_of(tensor, cuts[i] if cuts else ())
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
        """As put_tensor, from a tensor with its header in registered memory."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """As put_tensor_from, for many keys. One code per key."""
        return self._put_tensors_from("put_tensor_from", keys, buffer_ptrs, sizes, replace=False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """As put_tensor_from; replaces an object."""
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]:
        """As upsert_tensor_from, for many keys. One code per key."""
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
            address, room = self._range_on_host(pointer, size)
            used = (
                HEADER_BYTES + header_of(memory_at(address, room)).data_bytes
            )  # of a buffer that may be larger
            return self._put(operation, [key], [(address, used)], DEFAULT, replace=replace)[0]

        return self._each(operation, one, keys, pointers, sizes)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Tensor | None:
        """A tensor over the caller's memory, behind the header there. None is a miss, or an object that is no
        tensor (the log says so); what goes wrong is raised as a moonpool Error."""
        return self._tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[Tensor | None]:
        """The same for many; None also for a buffer that is too small or no memory (the log says so)."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        try:
            return self._tensors_into(keys, buffer_ptrs, sizes)
        except InvalidArgument:
            return self._each_or_none("batch_get_tensor_into", self.get_tensor_into, keys, buffer_ptrs, sizes)

    def _each_or_none(
        self, operation: str, act: Callable[..., Tensor | None], *columns: Sequence[Any]
    ) -> list[Tensor | None]:
        """What ``act`` makes of each row; None and a sentence in the log for a row that cannot be meant."""

        def one(*row: Any) -> Tensor | None:
            try:
                return act(*row)
            except InvalidArgument as error:
                code_of(error, operation)
                return None

        return [one(*row) for row in zip(*columns, strict=True)]

    def _tensors_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Tensor | None]:
        self._open()
        found_names = names_of(keys)
        names = [name for name in found_names if name is not None]
        if len(names) < len(found_names):
            if len(found_names) == 1:
                return [None]
            raise InvalidArgument("a key that no object can have")  # the others are read by themselves
        targets = self._buffers.check_all(buffer_ptrs, sizes, writable=True)
        for place in targets:
            check_no_card(*place)
        found = self._ask(lambda store: store.get(names, targets)) if names else []
        return [
            None if n is None else self._tensor("get_tensor_into", memory_at(pointer, n), tensor_over)
            for n, (pointer, _) in zip(found, targets, strict=True)
        ]

    @coded("get_tensor_into_cuda")
    def get_tensor_into_cuda(self, key: str, tensor: Tensor) -> int:
        """Into a tensor of any device, of the same shape and type, straight from the pool: the number
        of bytes, or a code."""
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

    def batch_get_tensor_into_cuda(self, keys: list[str], tensors_list: list[Tensor]) -> list[int]:
        """As get_tensor_into_cuda, for many keys. Sizes or codes, one per key."""
        if len(keys) != len(tensors_list):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        return [self.get_tensor_into_cuda(*pair) for pair in zip(keys, tensors_list, strict=True)]

    # ---- tensor-parallel shards: KEY_tp_RANK has the part of each rank

    def put_tensor_with_tp(
        self, key: str, tensor: Tensor, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cuts the whole tensor and stores the shards of all ranks, whichever rank calls."""
        return self._put_shards("put_tensor_with_tp", [key], [tensor], tp_size, split_dim)[0]

    def batch_put_tensor_with_tp(
        self,
        base_keys: list[str],
        tensors_list: list[Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As put_tensor_with_tp, for many keys. One code per key."""
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
        """As put_tensor_with_tp, with a config."""
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
        """As pub_tensor_with_tp, for many keys. One code per key."""
        return self._put_shards(
            "batch_pub_tensor_with_tp", base_keys, tensors_list, tp_size, split_dim, config
        )

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """As put_tensor_with_tp, from a tensor with its header in registered memory."""
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
        """As put_tensor_with_tp_from, for many keys. One code per key."""

        def one(key: str, pointer: int, size: int) -> int:
            tensor = tensor_over(memory_at(*self._range_on_host(pointer, size)))
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
        """As get_tensor_with_tp, for many keys."""
        return self.batch_get_tensor([shard_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Tensor | None:
        """As get_tensor_with_tp, in the caller's memory; see get_tensor_into."""
        return self.get_tensor_into(shard_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Tensor | None]:
        """As get_tensor_with_tp_into, for many keys."""
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

        def one(key: str, tensor: Tensor) -> int:
            shards = equal_parts(tensor, tp_size, split_dim)
            names = [shard_key(key, rank, tp_size) for rank in range(tp_size)]
            cuts = [(Cut("tp", rank, tp_size, split_dim),) for rank in range(tp_size)]
            codes = self._put_tensors(operation, names, shards, config, cuts=cuts)
            return next((code for code in codes if code), int(Code.OK))

        return self._each(operation, one, keys, tensors)

    # ---- files

    @coded("save_tensor_to_safetensor")
    def save_tensor_to_safetensor(self, key: str, file_name: str | None = None) -> int:
        """Writes a tensor to a safetensors file (None: one called as the key), under its key."""
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
    """The key of the shard of ``rank``; with one rank the key itself. Raises InvalidArgument for a key that
    cannot be a name."""
    key_of(key)  # a TypeError for what is none
    return key if size == 1 else f"{key if isinstance(key, str) else bytes(key).decode()}_tp_{rank}"
