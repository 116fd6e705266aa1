"""The expected layout of this engine's chunks.

LMCache describes it twice. At its start it gives one tensor of the KV's type and shape, which is in the
fingerprint; a process that only looks up knows no more. At its first transfer it gives the groups of its
layers, each with a type and a shape of its own. So each batch asks for the present answer.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.memory_management import MemoryFormat, TensorMemoryObj

from moonpool.connectors.lmcache.chunk_format import ChunkFormat, chunk_format_of

# Engines keep KV of several 8-bit types under these names; bytes of one are garbage as another.
AMBIGUOUS = ("uint8", "int8")
_BYTES = (MemoryFormat.BINARY.value, MemoryFormat.BINARY_BUFFER.value)


def ambiguous(dtypes: Any) -> bool:
    """Whether one of these types stands for several formats of 8 bits."""
    return any(str(dtype).removeprefix("torch.") in AMBIGUOUS for dtype in dtypes)


def bytes_of(memory: Any) -> Any:
    """Where the bytes of one of LMCache's memory objects are: an address and a length, or a buffer."""
    if isinstance(memory, TensorMemoryObj):
        return memory.data_ptr, memory.get_size()
    return memory.byte_array


class LayoutCheck:
    """Compares chunks with the layout of this engine.

    told: a full chunk as the fingerprint has it.
    """

    def __init__(self, config: Any, metadata: Any) -> None:
        self._metadata = metadata
        self.memory_format = MemoryFormat.KV_MLA_FMT if metadata.use_mla else MemoryFormat.KV_2LTD
        layers, two, _, heads, head_size = (int(n) for n in metadata.kv_shape)
        shape = (two, layers, int(config.chunk_size), heads * head_size)
        size = two * layers * shape[2] * shape[3] * int(metadata.kv_dtype.itemsize)
        self.told = chunk_format_of(self.memory_format.value, [shape], [metadata.kv_dtype], size)

    @property
    def shapes(self) -> Any:
        """The shape of each group's tensor in a full chunk, as LMCache knows it now."""
        return self._metadata.get_shapes()

    @property
    def dtypes(self) -> Any:
        """The type of each group, as LMCache knows it now."""
        return self._metadata.get_dtypes()

    def full(self) -> ChunkFormat:
        """A full chunk, as it is now known."""
        shapes, dtypes = self.shapes, self.dtypes
        size = sum(shape.numel() * int(dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True))
        return chunk_format_of(self.memory_format.value, shapes, dtypes, size)

    def could_be(self, form: ChunkFormat) -> bool:
        """Plain bytes are a serde's, which is in the fingerprint. Tensors must have our types, and our shapes
        but for the number of tokens."""
        if form.memory_format in _BYTES:
            return True
        ours = self.full()
        if form.memory_format != ours.memory_format or len(form.groups) != len(ours.groups):
            return False
        return all(
            name == our_name
            and len(shape) == 4
            and (*shape[:2], shape[3]) == (*our_shape[:2], our_shape[3])
            and shape[2] <= our_shape[2]
            for (name, shape), (our_name, our_shape) in zip(form.groups, ours.groups, strict=True)
        )
