"""Where some programs look for the pool of buffers."""

from __future__ import annotations

from ._pool import BufferPool

RegisteredBufferPool = BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
