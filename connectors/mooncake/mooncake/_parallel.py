"""Tensors that are spread over ranks: each rank stores its shard, and others read a shard or the whole.

A writer with a ``TensorParallelism`` stores its shard under KEY and one suffix for each axis (``_tp_0``,
``_pp_1``), and under KEY_parallelism what axes there are. ``ReadTarget`` says what a reader wants:
"as_stored" (with its own axes, or the plain key without), "shard" (its part, cut anew where it was cut
otherwise), or "full".

A writer with a partition (an object with rank, size and split_dim) gives the whole tensor, and stores its
part under KEY__writer_RofN_sdD; readers put the parts together. The parts are objects of their own: a reader
between two writers' upserts gets some old and some new ones, so upsert under another key what is being read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from moonpool.core.errors import InvalidArgument

from ._codes import Code, code_of
from ._objects import check_config
from ._placement import for_each
from ._tensors import Tensor, Tensors, memory_at, parts_of, shards_of, tensor_over
from ._values import DEFAULT, ParallelAxis, ReadTarget, ReplicateConfig, TensorParallelism

MODES = ("as_stored", "shard", "full")
WRITERS_MAX = 65_536


class Parallel(Tensors):
    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        return self._put_parallel(
            "put_tensor_with_parallelism", key, tensor, parallelism, config, writer_partition
        )

    def batch_put_tensor_with_parallelism(
        self,
        keys: list[str],
        tensors_list: list[Tensor],
        parallelisms: list[TensorParallelism] | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        return self._put_parallels(keys, tensors_list, parallelisms, config, writer_partitions, replace=False)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        return self._put_parallel(
            "upsert_tensor_with_parallelism", key, tensor, parallelism, config, writer_partition, replace=True
        )

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: list[str],
        tensors_list: list[Tensor],
        parallelisms: list[TensorParallelism] | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        return self._put_parallels(keys, tensors_list, parallelisms, config, writer_partitions, replace=True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        return self.batch_put_tensor_with_parallelism_from(
            [key],
            [buffer_ptr],
            [size],
            None if parallelism is None else [parallelism],
            config,
            None if writer_partition is None else [writer_partition],
        )[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: list[TensorParallelism] | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        return self._put_from_memory(
            keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions, replace=False
        )

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        return self.batch_upsert_tensor_with_parallelism_from(
            [key],
            [buffer_ptr],
            [size],
            None if parallelism is None else [parallelism],
            config,
            None if writer_partition is None else [writer_partition],
        )[0]

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        parallelisms: list[TensorParallelism] | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partitions: Any = None,
    ) -> list[int]:
        return self._put_from_memory(
            keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions, replace=True
        )

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> Tensor | None:
        """None is a miss, also of one shard of those that are needed. All else is raised."""
        return self._get_parallel(key, target or ReadTarget())

    def batch_get_tensor_with_parallelism(
        self, keys: list[str], targets: list[ReadTarget] | None = None
    ) -> list[Tensor | None]:
        wanted = [None] * len(keys) if targets is None else targets
        if len(wanted) != len(keys):
            raise InvalidArgument(f"{len(keys)} keys and {len(wanted)} targets")
        return [self.get_tensor_with_parallelism(key, one) for key, one in zip(keys, wanted, strict=True)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> Tensor | None:
        """The tensor in the caller's memory, behind its header. Raises InvalidArgument without room."""
        tensor = self.get_tensor_with_parallelism(key, target)
        if tensor is None:
            return None
        (header, *_), held = parts_of(tensor)
        room = memory_at(*self._range(buffer_ptr, size, writable=True))
        data = memoryview(held.flatten().view(_byte()).numpy())
        if len(header) + data.nbytes > room.nbytes:
            raise InvalidArgument(f"{data.nbytes} bytes and a header do not fit into {room.nbytes}")
        room[: len(header)] = header
        room[len(header) : len(header) + data.nbytes] = data
        return tensor_over(room)

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: list[str],
        buffer_ptrs: list[int],
        sizes: list[int],
        targets: list[ReadTarget] | None = None,
    ) -> list[Tensor | None]:
        wanted = [None] * len(keys) if targets is None else targets
        return [
            self.get_tensor_with_parallelism_into(key, pointer, size, one)
            for key, pointer, size, one in zip(keys, buffer_ptrs, sizes, wanted, strict=True)
        ]

    # ---- writing

    def _put_parallel(
        self,
        operation: str,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None,
        config: ReplicateConfig,
        partition: Any,
        *,
        replace: bool = False,
    ) -> int:
        def act() -> int:
            axes = [] if parallelism is None else parallelism.axes
            if partition is not None:
                if axes:
                    raise InvalidArgument("give either a parallelism or a writer_partition")
                writer = Writer.of(partition)
                return self._put_with_manifest(
                    operation,
                    (writers_key(key), [writer.size, writer.split_dim]),
                    (writer.key(key), writer.part_of(tensor)),
                    config,
                    replace,
                )
            name = key + suffix(axes)
            if not axes:
                return self._put_tensors(operation, [name], [tensor], config, replace=replace)[0]
            kinds = [[axis.kind, axis.size, axis.split_dim] for axis in checked(axes)]
            return self._put_with_manifest(
                operation, (manifest_key(key), kinds), (name, tensor), config, replace
            )

        return self._code(operation, act)

    def _put_with_manifest(
        self,
        operation: str,
        manifest: tuple[str, Any],
        tensor: tuple[str, Tensor],
        config: ReplicateConfig,
        replace: bool,
    ) -> int:
        """Two (key, value): what parts there are is stored before a part is. Parts of another cut would never
        be found, so they are refused."""
        text = json.dumps(manifest[1]).encode()
        if code := self._put(operation, [manifest[0]], [text], config, replace=replace)[0]:
            return code
        there = None if replace else self._views([manifest[0]])[0]
        if there is not None and there != text:
            raise InvalidArgument(
                f"{tensor[0]!r:.80}: the tensor is stored in other parts ({bytes(there)!r:.80}); an upsert "
                f"replaces it, or a remove of {manifest[0]!r:.80}"
            )
        return self._put_tensors(operation, [tensor[0]], [tensor[1]], config, replace=replace)[0]

    def _put_parallels(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism] | None,
        config: ReplicateConfig,
        partitions: Any,
        *,
        replace: bool,
    ) -> list[int]:
        axes: Sequence[TensorParallelism | None] = (
            [None] * len(keys) if parallelisms is None else parallelisms
        )
        writers: Sequence[Any] = [None] * len(keys) if partitions is None else partitions
        if not len(keys) == len(tensors) == len(axes) == len(writers):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        name = "upsert_tensor_with_parallelism" if replace else "put_tensor_with_parallelism"
        check_config(name, config)
        try:
            configs = for_each(config, len(keys))
        except InvalidArgument as error:
            return [int(code_of(error, name))] * len(keys)
        return [
            self._put_parallel(name, *row, replace=replace)
            for row in zip(keys, tensors, axes, configs, writers, strict=True)
        ]

    def _put_from_memory(
        self,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism] | None,
        config: ReplicateConfig,
        partitions: Any,
        *,
        replace: bool,
    ) -> list[int]:
        if not len(keys) == len(pointers) == len(sizes):
            return [int(Code.INVALID_PARAMS)] * len(keys)
        tensors: list[Tensor] = []
        for pointer, size in zip(pointers, sizes, strict=True):
            try:
                tensors.append(tensor_over(memory_at(*self._range(pointer, size))))
            except InvalidArgument:
                tensors.append(None)  # refused as what is no tensor
        return self._put_parallels(keys, tensors, parallelisms, config, partitions, replace=replace)

    # ---- reading

    def _get_parallel(self, key: str, target: ReadTarget) -> Tensor | None:
        if target.mode not in MODES:
            raise InvalidArgument(f"a target's mode is one of {', '.join(MODES)}, not {target.mode!r:.80}")
        wanted = [] if target.parallelism is None else checked(target.parallelism.axes)
        if target.mode == "as_stored":
            found = self.get_tensor(key + suffix(wanted))
            return found if found is not None or wanted else self._written_in_parts(key)
        if target.mode == "shard" and wanted and (exact := self._exact(key, wanted)) is not None:
            return exact
        whole = self._whole(key, [axis for axis in wanted if axis.kind != "tp"])
        if target.mode == "full" or whole is None:
            return whole
        for axis in wanted:
            if axis.kind == "tp":
                whole = shards_of(whole, axis.size, axis.split_dim or 0)[axis.rank]
        return whole.contiguous()

    def _exact(self, key: str, wanted: Sequence[ParallelAxis]) -> Tensor | None:
        """The shard when it was cut just so."""
        if self._manifest(key) == [(axis.kind, axis.size, axis.split_dim) for axis in wanted]:
            return self.get_tensor(key + suffix(wanted))
        return None

    def _whole(self, key: str, elsewhere: Sequence[ParallelAxis]) -> Tensor | None:
        """All tensor-parallel shards of one place on the other axes, put together."""
        stored = self._manifest(key)
        if stored is None:
            plain = self.get_tensor(key)
            return self._written_in_parts(key) if plain is None else plain
        others = {axis.kind: axis.rank for axis in elsewhere}
        cuts = [(size, split_dim or 0) for kind, size, split_dim in stored if kind == "tp"]
        pieces = []
        for ranks in itertools.product(*[range(size) for size, _ in cuts]):
            left = iter(ranks)
            at = [
                ParallelAxis(kind, next(left) if kind == "tp" else others.get(kind, 0), size)
                for kind, size, _ in stored
            ]
            pieces.append(self.get_tensor(key + suffix(at)))
        if any(piece is None for piece in pieces):
            return None
        for size, dim in reversed(cuts):
            pieces = [joined(pieces[i : i + size], dim) for i in range(0, len(pieces), size)]
        return pieces[0]

    def _written_in_parts(self, key: str) -> Tensor | None:
        """What writers with a partition stored, once all have."""
        view = self._views([writers_key(key)])[0]
        if view is None:
            return None
        try:
            size, split_dim = json.loads(bytes(view))
            writers = [Writer.of(Writer(rank, size, split_dim)) for rank in range(min(size, WRITERS_MAX + 1))]
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{writers_key(key)!r:.80} is no list of parts: {error}") from error
        parts = [self.get_tensor(writer.key(key)) for writer in writers]
        return None if any(part is None for part in parts) else joined(parts, split_dim)

    def _manifest(self, key: str) -> list[tuple[str, int, int | None]] | None:
        view = self._views([manifest_key(key)])[0]
        if view is None:
            return None
        try:
            axes = [ParallelAxis(kind, 0, index(size), dim) for kind, size, dim in json.loads(bytes(view))]
            return [(axis.kind, axis.size, axis.split_dim) for axis in checked(axes)]
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{manifest_key(key)!r:.80} is no list of axes: {error}") from error


@dataclass(frozen=True)
class Writer:
    """One of ``size`` writers, who stores the part ``rank`` of each tensor along split_dim."""

    rank: int
    size: int
    split_dim: int

    @classmethod
    def of(cls, given: Any) -> Writer:
        """Of anything with these three. Raises InvalidArgument."""
        try:
            found = cls(*(index(getattr(given, name)) for name in ("rank", "size", "split_dim")))
        except (AttributeError, TypeError) as error:
            raise InvalidArgument(
                f"a writer_partition has a rank, a size and a split_dim: {error}"
            ) from error
        if not 0 <= found.rank < found.size <= WRITERS_MAX:
            raise InvalidArgument(
                f"a writer's rank is below its size, which is at most {WRITERS_MAX}: {found}"
            )
        return found

    def part_of(self, tensor: Tensor) -> Tensor:
        """Raises InvalidArgument for a tensor that cannot be cut into parts of one size."""
        parts = shards_of(tensor, self.size, self.split_dim)
        if tensor.shape[self.split_dim] % self.size:
            raise InvalidArgument(
                f"{tuple(tensor.shape)} along {self.split_dim} makes no {self.size} equal parts"
            )
        return parts[self.rank]

    def key(self, key: str) -> str:
        return f"{key}__writer_{self.rank}of{self.size}_sd{self.split_dim}"


def checked(axes: Sequence[ParallelAxis]) -> list[ParallelAxis]:
    """Raises InvalidArgument for an axis that cannot be."""
    for axis in axes:
        if not axis.kind or not 0 <= axis.rank < axis.size <= WRITERS_MAX:
            raise InvalidArgument(f"{axis} has no kind, a rank that is not below its size, or no such size")
    return list(axes)


def suffix(axes: Sequence[ParallelAxis]) -> str:
    return "".join(f"_{axis.kind}_{axis.rank}" for axis in axes)


def manifest_key(key: str) -> str:
    return f"{key}_parallelism"


def writers_key(key: str) -> str:
    return f"{key}__writer_manifest"


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Raises InvalidArgument for parts that are of different tensors."""
    import torch

    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError, ValueError) as error:
        raise InvalidArgument(f"these parts make no tensor along {dim}: {error}") from error


def _byte() -> Any:
    import torch

    return torch.uint8
