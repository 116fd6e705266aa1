"""Tensors that are spread over ranks: each rank stores its shard, and others read a shard or the whole.

The rules of layouts and the names of shards are in _layout.py. A layout that is one "tp" axis takes the
shard; with other axes beside "tp" the whole tensor is given, and what is stored is this rank's part of it.
The ``_from`` forms are given the whole tensor (or, by its header, the shard of that rank) and store the parts
of all tensor-parallel ranks. KEY__parallelism_manifest, beside the shards, lets readers of the whole
or of another cut find them. ``ReadTarget`` selects what is read: "as_stored" (with its own axes, or the
plain key without), "shard" (its part, cut anew where it was cut otherwise), or "full".

A writer with a partition (an object with rank, size and split_dim) gives the whole tensor, and stores its
part under KEY__writer_RofN_sdD; readers put the parts together. The parts are objects of their own: a reader
between two writers' upserts gets some old and some new ones, so upsert under another key what is being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.core.errors import InvalidArgument

from ._base import first_error
from ._codes import Code, code_of
from ._layout import Layout, Manifest, Writer, manifest_key, writers_key
from ._objects import check_config
from ._placement import for_each
from ._tensor_header import (
    Cut,
    Tensor,
    bytes_of_tensor,
    equal_parts,
    header_of,
    parts_of,
    tensor_of,
    tensor_over,
)
from ._tensors import Tensors, memory_at
from ._values import DEFAULT, ReadTarget, ReplicateConfig, TensorParallelism

MODES = ("as_stored", "shard", "full")
Shard = tuple[str, Tensor, tuple[Cut, ...]]  # its key and what it is of the whole


class Parallel(Tensors):
    """Tensors that are cut along several axes; a manifest under the key describes the cuts to readers."""

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """Stores a shard, or with several axes the part of the whole tensor that this rank has. Returns a
        code.

        parallelism: the axes and the rank on each.
        writer_partition: (rank, size, split_dim) of a writer that gives the whole tensor and stores its part.
        """
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
        """As put_tensor_with_parallelism, for many keys. One code per key."""
        return self._put_parallels(keys, tensors_list, parallelisms, config, writer_partitions, replace=False)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Tensor,
        parallelism: TensorParallelism | None = None,
        config: ReplicateConfig = DEFAULT,
        writer_partition: Any = None,
    ) -> int:
        """As put_tensor_with_parallelism; replaces an object."""
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
        """As batch_put_tensor_with_parallelism; replaces objects."""
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
        """As put_tensor_with_parallelism, from a tensor with its header in registered memory."""
        return self._put_from_memory(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition], replace=False
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
        """As put_tensor_with_parallelism_from, for many keys. One code per key."""
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
        """As put_tensor_with_parallelism_from; replaces an object."""
        return self._put_from_memory(
            [key], [buffer_ptr], [size], [parallelism], config, [writer_partition], replace=True
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
        """As batch_put_tensor_with_parallelism_from; replaces objects."""
        return self._put_from_memory(
            keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions, replace=True
        )

    def get_tensor_with_parallelism(self, key: str, target: ReadTarget | None = None) -> Tensor | None:
        """None is a miss, also of one shard of those that are needed. All else is raised."""
        return self._get_parallel(key, target or ReadTarget())[0]

    def batch_get_tensor_with_parallelism(
        self, keys: list[str], targets: list[ReadTarget] | None = None
    ) -> list[Tensor | None]:
        """As get_tensor_with_parallelism, for many keys; None also for an error, which the log has."""
        wanted = [None] * len(keys) if targets is None else targets
        if not isinstance(wanted, Sequence) or len(wanted) != len(keys):
            return [None] * len(keys)
        return self._each_or_none(
            "batch_get_tensor_with_parallelism", self.get_tensor_with_parallelism, keys, wanted
        )

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: ReadTarget | None = None
    ) -> Tensor | None:
        """The tensor in the caller's memory, behind its header. Raises InvalidArgument without room."""
        tensor, cuts = self._get_parallel(key, target or ReadTarget())
        if tensor is None:
            return None
        (header, *_), held = parts_of(tensor, cuts)
        room = memory_at(*self._range_on_host(buffer_ptr, size, writable=True))
        data = memoryview(bytes_of_tensor(held))
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
        """As get_tensor_with_parallelism_into, for many keys; None also for an error, which the log has."""
        wanted = [None] * len(keys) if targets is None else targets
        if not isinstance(wanted, Sequence) or not (
            len(keys) == len(buffer_ptrs) == len(sizes) == len(wanted)
        ):
            return [None] * len(keys)
        return self._each_or_none(
            "batch_get_tensor_with_parallelism_into",
            self.get_tensor_with_parallelism_into,
            keys,
            buffer_ptrs,
            sizes,
            wanted,
        )

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
            if partition is not None:
                if parallelism is not None:
                    raise InvalidArgument("give either a parallelism or a writer_partition")
                writer = Writer.of(partition)
                part = equal_parts(tensor, writer.size, writer.split_dim)[writer.rank]
                manifest = writers_key(key), Manifest.of_writers(writer)
                one: Shard = writer.key(key), part, (writer.cut,)
                return self._put_shards_of(operation, manifest, [one], config, replace)
            if parallelism is None:
                return self._put_tensors(operation, [key], [tensor], config, replace=replace)[0]
            layout = Layout.of(parallelism)
            if layout.tp is None:
                one = layout.key(key), tensor, layout.cuts
                return self._put_shards_of(operation, None, [one], config, replace)
            if layout.is_tp_alone:
                layout.check_dimensions(tensor)
                shard = tensor
            else:
                shard = equal_parts(tensor, layout.tp.size, layout.split_dim)[layout.tp.rank]
            manifest = manifest_key(key), Manifest.of(layout)
            one = layout.key(key), shard, layout.cuts
            return self._put_shards_of(operation, manifest, [one], config, replace)

        return self._code(operation, act)

    def _put_shards_of(
        self,
        operation: str,
        manifest: tuple[str, Manifest] | None,
        shards: Sequence[Shard],
        config: ReplicateConfig,
        replace: bool,
    ) -> int:
        """What parts there are is stored before a part is. Parts of
        another cut under the same names would never be found, so they are refused."""
        if manifest is not None:
            name, parts = manifest
            text = parts.pack()
            if code := self._put(operation, [name], [text], config, replace=replace)[0]:
                return code
            there = None if replace else self._views([name])[0]
            if there is not None and there != text and Manifest.parse(there, name).hides(parts):
                raise InvalidArgument(
                    f"{shards[0][0]!r:.80}: the tensor is stored in other parts ({bytes(there)!r:.80}); an "
                    f"upsert replaces it, or a remove of {name!r:.80}"
                )
        names, tensors, cuts = zip(*shards, strict=True)
        return first_error(self._put_tensors(operation, names, tensors, config, replace=replace, cuts=cuts))

    def _put_parallels(
        self,
        keys: Sequence[str],
        tensors: Sequence[Tensor],
        parallelisms: Sequence[TensorParallelism | None] | None,
        config: ReplicateConfig,
        partitions: Any,
        *,
        replace: bool,
    ) -> list[int]:
        operation = "upsert_tensor_with_parallelism" if replace else "put_tensor_with_parallelism"
        return self._each_with_layout(
            operation, self._put_parallel, [keys, tensors], parallelisms, config, partitions, replace=replace
        )

    def _put_from_memory(
        self,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Sequence[TensorParallelism | None] | None,
        config: ReplicateConfig,
        partitions: Any,
        *,
        replace: bool,
    ) -> list[int]:
        operation = "upsert_tensor_with_parallelism_from" if replace else "put_tensor_with_parallelism_from"
        columns = [keys, pointers, sizes]
        return self._each_with_layout(
            operation, self._put_one_from, columns, parallelisms, config, partitions, replace=replace
        )

    def _each_with_layout(
        self,
        operation: str,
        put: Any,
        columns: list[Sequence[Any]],
        parallelisms: Sequence[TensorParallelism | None] | None,
        config: ReplicateConfig,
        partitions: Any,
        *,
        replace: bool,
    ) -> list[int]:
        """What ``put`` says of each row: ``columns``, a parallelism, a config, a partition."""
        n = len(columns[0])
        layouts: Sequence[Any] = [None] * n if parallelisms is None else parallelisms
        writers: Sequence[Any] = [None] * n if partitions is None else partitions
        if not all(isinstance(one, Sequence) for one in (layouts, writers)) or any(
            len(column) != n for column in (*columns, layouts, writers)
        ):
            return [int(Code.INVALID_PARAMS)] * n
        check_config(operation, config)
        try:
            configs = for_each(config, n)
        except InvalidArgument as error:
            return [int(code_of(error, operation))] * n
        rows = zip(*columns, layouts, configs, writers, strict=True)
        return [put(operation, *row, replace=replace) for row in rows]

    def _put_one_from(
        self,
        operation: str,
        key: str,
        pointer: int,
        size: int,
        parallelism: TensorParallelism | None,
        config: ReplicateConfig,
        partition: Any,
        *,
        replace: bool,
    ) -> int:
        def act() -> int:
            place = memory_at(*self._range_on_host(pointer, size))
            tensor, cuts = tensor_over(place), header_of(place).cuts
            layout = None if parallelism is None else Layout.of(parallelism)
            if partition is not None or layout is None or layout.tp is None:
                return self._put_parallel(
                    operation, key, tensor, parallelism, config, partition, replace=replace
                )
            if cuts:  # the header in the caller's memory is of a shard, not of the whole
                if cuts != layout.cuts:
                    raise InvalidArgument(f"{key!r:.80}: the memory has the shard {cuts}, not {layout.cuts}")
                shards = [(layout.key(key), tensor, cuts)]
            else:
                pieces = equal_parts(tensor, layout.tp.size, layout.split_dim)
                shards = [
                    (one.key(key), piece, one.cuts)
                    for one, piece in zip(layout.of_each_rank(), pieces, strict=True)
                ]
            manifest = manifest_key(key), Manifest.of(layout)
            return self._put_shards_of(operation, manifest, shards, config, replace)

        return self._code(operation, act)

    # ---- reading

    def _get_parallel(self, key: str, target: ReadTarget) -> tuple[Tensor | None, tuple[Cut, ...]]:
        """The tensor, and which part of the whole it is."""
        if not isinstance(target, ReadTarget):
            raise InvalidArgument(f"a target is a ReadTarget, not {target!r:.80}")
        if target.mode not in MODES:
            raise InvalidArgument(f"a target's mode is one of {', '.join(MODES)}, not {target.mode!r:.80}")
        wanted = None if target.parallelism is None else Layout.of(target.parallelism)
        if wanted is None:
            found = self.get_tensor(key)
            if target.mode != "as_stored" and found is None:
                found = self._whole(key, None)
            return self._written_in_parts(key) if found is None else found, ()
        if target.mode != "full" and (exact := self._shards([wanted], key)) is not None:
            return exact[0], wanted.cuts
        if target.mode == "as_stored":
            return None, ()
        whole = self._whole(key, wanted)
        if target.mode == "full" or whole is None:
            return whole, ()
        if wanted.tp is not None:
            whole = equal_parts(whole, wanted.tp.size, wanted.split_dim)[wanted.tp.rank].contiguous()
        return whole, wanted.cuts

    def _shards(self, layouts: Sequence[Layout], key: str) -> list[Tensor] | None:
        """The shards that are stored just so; None when one is not there."""
        views = self._views([one.key(key) for one in layouts])
        found = []
        for view, layout in zip(views, layouts, strict=True):
            tensor = self._tensor("get_tensor_with_parallelism", view, tensor_of)
            if tensor is None or view is None or header_of(view).cuts != layout.cuts:
                return None
            found.append(tensor)
        return found

    def _whole(self, key: str, wanted: Layout | None) -> Tensor | None:
        """All tensor-parallel shards of one place on the other axes, put together."""
        for layout in self._layouts(key, wanted):
            shards = self._shards(layout.of_each_rank(), key)
            if shards is not None:
                return shards[0] if layout.tp is None else joined(shards, layout.split_dim)
        plain = self.get_tensor(key)
        return self._written_in_parts(key) if plain is None else plain

    def _layouts(self, key: str, wanted: Layout | None) -> list[Layout]:
        """In which the tensor may be stored: what is wanted, what its manifest and its first shard say."""
        made = [] if wanted is None else [wanted]
        (view,) = self._views([manifest_key(key)])
        if view is not None:
            made += Manifest.parse(view, manifest_key(key)).layouts(wanted)
        if wanted is None or wanted.is_tp_alone:  # put_tensor_with_tp() writes no manifest
            (first,) = self._views([f"{key}_tp_0"])
            if first is not None and (cuts := _cuts_of(first)):
                made += [Layout(cuts)]
        return list(dict.fromkeys(made))

    def _written_in_parts(self, key: str) -> Tensor | None:
        """What writers with a partition stored, once all have."""
        view = self._views([writers_key(key)])[0]
        if view is None:
            return None
        writers = Manifest.parse(view, writers_key(key)).writers()
        parts = self.batch_get_tensor([writer.key(key) for writer in writers])
        return None if any(part is None for part in parts) else joined(parts, writers[0].split_dim)


def _cuts_of(view: memoryview) -> tuple[Cut, ...]:
    try:
        cuts = header_of(view).cuts
    except InvalidArgument:
        return ()
    is_first = len(cuts) == 1 and cuts[0].kind == "tp" and cuts[0].split_dim is not None
    return cuts if is_first else ()


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Raises InvalidArgument for parts that are of different tensors."""
    import torch

    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError, ValueError) as error:
        raise InvalidArgument(f"these parts make no tensor along {dim}: {error}") from error
