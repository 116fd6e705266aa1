"""Chunks in the arena as LMCache's memory objects: nothing is copied, and the pool pins an object until
LMCache frees it.

For engines whose KV cache is in host memory; for a GPU, whose kernels read LMCache's memory by themselves,
only what lies in parts of the arena that are pinned for it (pinned_chunks). The bytes are read-only.
"""

from __future__ import annotations

import threading
import warnings

import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from moonpool.connectors.lmcache.chunk_format import ChunkFormat

# They are not written to; where LMCache would, it is given a copy (see remote).
warnings.filterwarnings("ignore", message="The given buffer is not writable", module=__name__)


class ZeroCopy:
    """The memory objects that LMCache has now, ``bytes_max`` bytes at most: their pins must not fill the
    pool."""

    def __init__(self, bytes_max: int) -> None:
        self._guard = threading.Lock()
        self.bytes_max = bytes_max
        self.nbytes = 0

    def room_for(self, size: int) -> int:
        """How many chunks of that size may be lent now."""
        with self._guard:
            return max(self.bytes_max - self.nbytes, 0) // max(size, 1)

    def lend(self, view: memoryview, form: ChunkFormat, memory_format: MemoryFormat) -> TensorMemoryObj:
        """A memory object over the bytes of ``view``, of one or more groups of types."""
        raw = torch.frombuffer(view, dtype=torch.uint8)
        shapes = [torch.Size(shape) for _, shape in form.groups]
        dtypes = [getattr(torch, name) for name, _ in form.groups]
        meta = MemoryObjMetadata(
            shapes[0],
            dtypes[0],
            raw.data_ptr(),
            form.size,
            1,
            fmt=memory_format,
            shapes=shapes,
            dtypes=dtypes,
        )
        memory = TensorMemoryObj(raw, meta, parent_allocator=self)
        with self._guard:
            self.nbytes += form.size
        return memory

    def free(self, memory: TensorMemoryObj) -> None:
        """LMCache calls it when the object's last reference ends; its view, and so its pin, ends then."""
        if not memory.is_valid():
            return
        memory.invalidate()
        memory.raw_data = torch.empty(0, dtype=torch.uint8)
        with self._guard:
            self.nbytes -= memory.meta.phy_size
