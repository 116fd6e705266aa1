"""The option gpu_pin: chunks of the node that LMCache's kernels on a GPU read where they lie.

LMCache's in-process connectors for vLLM (LMCache 0.5.6, lmcache/v1/gpu_connector/gpu_connectors.py,
VLLMPagedMemGPUConnectorV2 and V3) hand a chunk's memory to a kernel that asks the driver for its address on
the device: registered memory has one, other memory is an error. They wait for the stream before they return,
and LMCache frees the chunks after that. Its connectors for SGLang and TensorRT-LLM return while the kernel
may still read, so there nothing is lent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from moonpool import _native
from moonpool.connectors.pinned_arena import grow_pins
from moonpool.core.errors import Error

# A chunk in two parts is copied, and a chunk of an 8B model has 32 MiB. One call for such a part keeps other
# CUDA calls waiting longer than one for the 64 MiB of engines that pin at their wake-up, too (see gpu.md).
PART_BYTES = 1 << 30
_REST = "chunks in the rest are copied into LMCache's memory"


def refusal(config: Any, metadata: Any, engine: Any, platform: str) -> str:
    """Why nothing is lent to this engine's GPU; empty: chunks are.

    config, metadata: LMCache's.
    engine: vLLM's configuration, or None outside of its workers.
    platform: LMCache's, as torch names it.
    """
    if platform == "cpu":
        return "LMCache's platform is the CPU, where chunks are lent without it"
    if platform != "cuda":
        return f"LMCache's platform is {platform}; only CUDA's driver is asked to pin"
    if engine is None or getattr(metadata, "role", None) == "scheduler":
        return (
            "this is no worker of vLLM, and only there LMCache waits for its kernels before it frees chunks"
        )
    if config.local_cpu:
        return "LMCache keeps what it retrieves (local_cpu)"
    if config.remote_serde != "naive" or config.enable_blending or config.enable_pd:
        return "with a serde, blending or disaggregation LMCache needs chunks in its own memory"
    return ""


class PinnedChunks:
    """The pinned part of the node that is there when the engine starts. Any thread.

    device: ordinal of the GPU.
    wanted: bytes to pin.
    """

    def __init__(self, device: int, wanted: int, log: logging.Logger) -> None:
        self._device, self._wanted, self._log = device, wanted, log
        self._arena: _native.PinnedArena | None = None

    def pin(self, client: _native.Client | None) -> bool:
        """Pins; whether anything is. Before the engine serves: CUDA calls wait meanwhile.

        client: None: there is no node.
        """
        warning = functools.partial(self._log.warning, "moonpool: %s")
        if client is None:
            warning(f"there is no pool yet, so no memory of a node is pinned (gpu_pin); {_REST}")
            return False
        try:
            arena = _native.PinnedArena(self._device, client, PART_BYTES)
        except Error as error:
            warning(f"no memory of the node is pinned (gpu_pin); {_REST} ({error})")
            return False
        info = functools.partial(self._log.info, "moonpool: %s")
        if not grow_pins(arena.grow, self._wanted, rest=_REST, info=info, warning=warning):
            return False
        self._arena = arena
        return True

    def views(self, names: Sequence[str]) -> list[memoryview | None]:
        """For each object its bytes where they lie, pinned for the GPU, and at the node while the view lives;
        None for all that is to be copied. Raises Error when the node does not answer."""
        arena = self._arena
        if arena is None:
            return [None] * len(names)
        if not arena.alive:  # the memory of a node that has ended is not kept from its successor
            self._log.warning("moonpool: the node has ended, or takes no connection (gpu_pin); %s", _REST)
            self.close()
            return [None] * len(names)
        return arena.views(names)

    def close(self) -> None:
        """Nothing is lent any more. The pins end with the last chunk that LMCache has."""
        self._arena = None
