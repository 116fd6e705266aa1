"""Layouts of tensors over ranks: the valid ones, the names of their shards, and their manifests.

A layout has at most one axis of each kind: "dp" (replicas), "tp" (cuts along a split_dim), "ep" (experts,
with an expert_id), "pp" (stages, with a stage_id). A shard's name is KEY_tp_RANK for "tp" alone; else KEY and
one suffix for each axis in the order of KINDS, such as ``__dp_1of2__tp_0of2_sd1``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any

from moonpool.core.errors import InvalidArgument

from ._tensor_header import DIMENSIONS_MAX, KINDS, Cut, Tensor, check_tensor
from ._values import ParallelAxis, TensorParallelism

RANKS_MAX = 65_536  # ranks of an axis whose shards are written or read in one call, and writers
SIZE_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Layout:
    """One rank's place, axes in the order of KINDS."""

    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, given: TensorParallelism) -> Layout:
        """Raises InvalidArgument for axes that cannot be."""
        try:
            axes = list(given.axes)
            cuts = sorted(map(_cut_of, axes), key=lambda cut: KINDS.index(cut.kind))
        except (AttributeError, TypeError) as error:
            raise InvalidArgument(f"a parallelism has axes, each a ParallelAxis: {error}") from error
        if not cuts or len({cut.kind for cut in cuts}) != len(cuts):
            raise InvalidArgument(
                f"a parallelism has an axis, and one of each kind at most, not {[cut.kind for cut in cuts]}"
            )
        return cls(tuple(cuts))

    @property
    def tp(self) -> Cut | None:
        """The cut of the axis "tp", or None."""
        return next((cut for cut in self.cuts if cut.kind == "tp"), None)

    @property
    def split_dim(self) -> int:
        """The dimension that "tp" cuts; only with that axis."""
        tp = self.tp
        assert tp is not None
        assert tp.split_dim is not None
        return tp.split_dim

    @property
    def is_tp_alone(self) -> bool:
        """Whether "tp" is the only axis."""
        return len(self.cuts) == 1 and self.tp is not None

    @property
    def others(self) -> tuple[Cut, ...]:
        """The cuts of all axes but "tp"."""
        return tuple(cut for cut in self.cuts if cut.kind != "tp")

    def check_dimensions(self, shard: Tensor) -> None:
        """Raises InvalidArgument when ``shard`` has not the dimension that is cut."""
        check_tensor(shard)
        if self.split_dim >= shard.dim():
            raise InvalidArgument(f"a tensor of {tuple(shard.shape)} is not cut along {self.split_dim}")

    def key(self, key: str) -> str:
        """The key of this shard of ``key``."""
        if self.is_tp_alone:
            return f"{key}_tp_{self.cuts[0].rank}"
        return key + "".join(map(_suffix, self.cuts))

    def of_each_rank(self) -> list[Layout]:
        """The same place of each tensor-parallel rank. Raises InvalidArgument for more than RANKS_MAX."""
        tp = self.tp
        if tp is None:
            return [self]
        if tp.size > RANKS_MAX:
            raise InvalidArgument(f"a tensor of {tp.size} shards is not read or written as a whole")
        return [
            Layout(tuple(cut._replace(rank=rank) if cut.kind == "tp" else cut for cut in self.cuts))
            for rank in range(tp.size)
        ]


def _cut_of(axis: ParallelAxis) -> Cut:
    if axis.kind not in KINDS:
        raise InvalidArgument(f"an axis is one of {', '.join(KINDS)}, not {axis.kind!r:.80}")
    rank, size = index(axis.rank), index(axis.size)
    if not 0 <= rank < size <= SIZE_MAX:
        raise InvalidArgument(f"{axis}: a rank is below its size, which is at most {SIZE_MAX}")
    if axis.kind == "tp":
        if axis.split_dim is None or not 0 <= index(axis.split_dim) < DIMENSIONS_MAX:
            raise InvalidArgument(f"{axis}: tensor parallelism cuts along a split_dim")
        return Cut("tp", rank, size, index(axis.split_dim))
    if axis.split_dim is not None:
        raise InvalidArgument(f"{axis}: only tensor parallelism has a split_dim")
    if axis.kind == "ep":
        return Cut("ep", rank, size, None, _number(axis.expert_id, "an ep axis has an expert_id"))
    if axis.kind == "pp":
        return Cut("pp", rank, size, None, _number(axis.stage_id, "a pp axis has a stage_id"))
    return Cut("dp", rank, size)


def _number(given: int | None, sentence: str) -> int:
    if given is None or not -(1 << 31) <= index(given) < 1 << 31:
        raise InvalidArgument(f"{sentence}, a number of 32 bits, not {given!r:.40}")
    return index(given)


def _suffix(cut: Cut) -> str:
    more = {"tp": f"_sd{cut.split_dim}", "ep": f"_eid{cut.number}", "pp": f"_sid{cut.number}"}
    return f"__{cut.kind}_{cut.rank}of{cut.size}{more.get(cut.kind, '')}"


@dataclass(frozen=True)
class Writer:
    """One of ``size`` writers, which stores the part ``rank`` of each tensor along split_dim."""

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
        if not 0 <= found.rank < found.size <= RANKS_MAX:
            raise InvalidArgument(f"a writer's rank is below its size, which is at most {RANKS_MAX}: {found}")
        return found

    @property
    def cut(self) -> Cut:
        """The part of this writer as a cut."""
        return Cut("tp", self.rank, self.size, self.split_dim)

    def key(self, key: str) -> str:
        """The key of this writer's part of ``key``."""
        return f"{key}__writer_{self.rank}of{self.size}_sd{self.split_dim}"


@dataclass(frozen=True)
class Manifest:
    """The object beside the shards: the layout of the first writer (put) or the last one (upsert)."""

    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, layout: Layout) -> Manifest:
        """The manifest of all shards of a layout."""
        return cls(tuple(cut._replace(rank=0) if cut.kind == "tp" else cut for cut in layout.cuts))

    @classmethod
    def of_writers(cls, writer: Writer) -> Manifest:
        """The manifest of the parts of all writers."""
        return cls((writer.cut._replace(rank=0),))

    def pack(self) -> bytes:
        """The bytes that are stored."""
        return json.dumps(self.cuts).encode()

    @classmethod
    def parse(cls, data: memoryview, name: str) -> Manifest:
        """Raises InvalidArgument for what no writer of tensors has stored."""
        try:
            axes = [_axis_of(Cut(*row)) for row in json.loads(bytes(data))]
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{name!r:.80} is no list of parts: {error}") from error
        return cls(Layout.of(TensorParallelism(axes)).cuts)

    def hides(self, other: Manifest) -> bool:
        """Whether shards of both would have the same names, of different cuts."""
        return len(self.cuts) == len(other.cuts) == 1 and self != other

    def layouts(self, wanted: Layout | None) -> Iterable[Layout]:
        """The layout at the place that is wanted; none when the reader did not say which expert or stage."""
        given = {} if wanted is None else {cut.kind: cut for cut in wanted.others}
        if not given.keys() <= {cut.kind for cut in self.cuts}:
            return []
        if any(cut.kind in ("ep", "pp") and cut.kind not in given for cut in self.cuts):
            return []
        return [Layout(tuple(given.get(cut.kind, cut) for cut in self.cuts))]

    def writers(self) -> list[Writer]:
        """Raises InvalidArgument for a manifest of something else."""
        (cut, *more) = self.cuts
        if more or cut.split_dim is None or cut.size > RANKS_MAX:
            raise InvalidArgument("these are no parts of writers")
        return [Writer(rank, cut.size, cut.split_dim) for rank in range(cut.size)]


def _axis_of(cut: Cut) -> ParallelAxis:
    return ParallelAxis(cut.kind, cut.rank, cut.size, cut.split_dim, cut.number, cut.number)


def manifest_key(key: str) -> str:
    """The key of the manifest of shards."""
    return f"{key}__parallelism_manifest"


def writers_key(key: str) -> str:
    """The key of the manifest of writers."""
    return f"{key}__writer_manifest"
