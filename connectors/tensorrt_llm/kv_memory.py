"""A rank's KV cache as native threads copy it: memory of the host, or of a CUDA device, and the points in the
engine's stream that copies on a device wait for.

TensorRT-LLM says that a step has ended when it is queued. So a save waits on the card for a mark behind the
step; a load, for one behind what was queued on its pages before. Nothing is queued on the engine's stream.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.objects import Refused
from moonpool.connectors.pinned_arena import pin_arena
from moonpool.connectors.tensorrt_llm import compat
from moonpool.connectors.tensorrt_llm.layout import Memory, Shape, pages_of, rows_of
from moonpool.connectors.tensorrt_llm.messages import Pages
from moonpool.connectors.tensorrt_llm.settings import VARIABLE, Settings
from moonpool.core.errors import Error, Unavailable

CLOSE_TIMEOUT_S = 3.0  # for the copies under way; a card that hangs keeps the memory that they use
_HELD_SHARE = 4  # at most a quarter of a layer group's pages wait to be saved
_GROUP_SHIFT = 32  # of a page's key: below it the page, above it the layer group

Rows = npt.NDArray[np.intp]
Indices = npt.NDArray[np.uint32]
Columns = npt.NDArray[np.uint16]


class KvMemory:
    """The KV cache of one rank.

    kv: as the native threads take it: an index is a page, a column is an object of a block.
    """

    def __init__(
        self,
        kv: _native.PartTable | _native.DeviceKv,
        shape: Shape,
        *,
        pages: Sequence[int],
        pin_bytes: int = 0,
        log: compat.Log,
    ) -> None:
        """pages: for each column how many its layer group has.
        pin_bytes: of the node's memory, for ``pin``."""
        self.kv = kv
        groups = [column.ranges.group for column in shape.columns]
        self._groups = np.array(groups, np.intp)
        self._held_max = {
            group: max(1, count // _HELD_SHARE) for group, count in zip(groups, pages, strict=True)
        }
        self._pin_bytes = pin_bytes
        self._log = log

    def pin(self, client: _native.Client | None) -> None:
        """Pins what a device shall read by itself of the memory of the client's node. Before the engine
        serves: CUDA calls wait meanwhile; see gpu.md."""
        if isinstance(self.kv, _native.DeviceKv):
            info, warning = (functools.partial(say, "%s") for say in (self._log.info, self._log.warning))
            pin_arena(self.kv, client, self._pin_bytes, info=info, warning=warning)

    def mark(self, stream: Any) -> _native.Mark | None:
        """The point behind all that the engine has queued on ``stream`` so far; None on the host, where
        nothing is queued. Raises Error when the device is lost."""
        if isinstance(self.kv, _native.DeviceKv):
            return self.kv.mark(compat.stream_address(stream))
        return None

    def check(self) -> None:
        """Raises Unavailable when no copy can succeed any more."""
        if isinstance(self.kv, _native.DeviceKv) and self.kv.lost:
            raise Unavailable(self.kv.lost, operation="copy")

    def savable(self, pages: Pages, blocks: int, held: Mapping[int, int]) -> int:
        """How many of the first ``blocks`` blocks may be saved now.

        held: by layer group, the pages that wait to be saved.
        """
        for group, ids in enumerate(pages):
            if group not in self._held_max:
                continue  # its layers are another rank's
            left = self._held_max[group] - held.get(group, 0)
            for block, page in enumerate(ids[:blocks]):
                left -= page >= 0
                if left < 0:
                    blocks = block
                    break
        return blocks

    def places(self, pages: Pages, blocks: int) -> tuple[Rows, Indices, Columns]:
        """Of the objects of ``blocks`` blocks, block by block, those that have a page: their numbers, and the
        page and the column of each."""
        table = np.full((max(len(pages), 1), blocks), compat.NO_PAGE, np.int64)
        for group, ids in enumerate(pages):
            table[group, : len(ids)] = ids[:blocks]
        each = table[self._groups].T.reshape(-1)
        rows = np.flatnonzero(each >= 0)
        return rows, each[rows].astype(np.uint32), (rows % len(self._groups)).astype(np.uint16)

    def close(self) -> None:
        """Copies on a device that have not begun fail; waits for the others, CLOSE_TIMEOUT_S at most."""
        if isinstance(self.kv, _native.DeviceKv):
            try:
                self.kv.close(CLOSE_TIMEOUT_S)
            except Error as error:
                with suppress(Exception):  # at exit the log may be closed
                    self._log.warning("%s", error)


def pages_by_group(keys: Iterable[int]) -> Counter[int]:
    """How many of page_keys each layer group has."""
    return Counter(key >> _GROUP_SHIFT for key in keys)


def page_keys(pages: Pages) -> set[int]:
    """One number for each page of these layer groups."""
    return {group << _GROUP_SHIFT | page for group, ids in enumerate(pages) for page in ids if page >= 0}


def open_kv_memory(args: Any, memory: Memory, shape: Shape, settings: Settings, log: compat.Log) -> KvMemory:
    """Prepares copies. Raises Refused or Error when this process cannot make them.

    args: TensorRT-LLM's arguments.
    """
    table = _native.PartTable(rows_of(memory, shape))
    pages = pages_of(memory, shape)
    if memory.device == "cpu":
        return KvMemory(table, shape, pages=pages, log=log)
    if memory.device != "cuda":
        raise Refused(f"the KV cache lies on the device {memory.device}; the pool knows CUDA's")
    if not settings.gpu:
        raise Refused(
            f"the KV cache lies on a CUDA device; the pool is used where {VARIABLE} has "
            f'"gpu": true (no TensorRT-LLM has run with it on a card yet)'
        )
    if compat.sleeps(args):
        raise Refused("the KV cache lies on a CUDA device, and the engine may unmap it under a copy (sleep)")
    kv = _native.DeviceKv(memory.ordinal, table, pages, settings.gpu_ring, settings.gpu_copy_threads)
    log.info("this rank pools the memory of %s", kv.device_name)
    return KvMemory(kv, shape, pages=pages, pin_bytes=settings.gpu_pin, log=log)
