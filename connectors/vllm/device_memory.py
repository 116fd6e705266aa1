"""A worker's KV cache in the memory of a CUDA device: what native threads need to copy it, and the points in
the engine's stream that they wait for.

The forward of a step is only queued when vLLM says that it has ended. So a save waits on the card for a mark
behind the forward; a load, for one behind what was queued on its blocks before the step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress

from moonpool import _native
from moonpool.connectors.pinned_arena import pin_arena
from moonpool.connectors.vllm.layout import BlockLayout
from moonpool.connectors.vllm.pool import Pool, Rows
from moonpool.core.errors import Error, Unavailable

CLOSE_TIMEOUT_S = 3.0  # for the copies under way; a card that hangs keeps the memory that they use

CurrentStream = Callable[[int], int]


class DeviceMemory:
    """The KV cache of one worker on one device; all methods run on the worker's thread."""

    def __init__(
        self,
        layout: BlockLayout,
        rows: Rows,
        *,
        current_stream: CurrentStream,
        ring_bytes: int,
        copy_threads: int,
        pin_bytes: int = 0,
        log: logging.Logger,
    ) -> None:
        """layout: of the KV cache, all of it on a device.
        rows: of its columns.
        current_stream: the address of the stream on which the engine queues its work on a device.
        ring_bytes: of pinned host memory.
        copy_threads: that copy objects from the pool into it.
        pin_bytes: of the node's memory, for ``pin``.

        Raises Error: this process cannot copy memory of the device."""
        assert layout.device is not None
        self._ordinal = layout.device
        self._current_stream = current_stream
        self._pin_bytes = pin_bytes
        self._log = log
        table = _native.PartTable(rows)
        self.kv = _native.DeviceKv(layout.device, table, layout.blocks, ring_bytes, copy_threads)
        self._before: _native.Mark | Error = Unavailable("no step with loads began", operation="load")

    def pin(self, pool: Pool | None) -> None:
        """Pins what the card shall read by itself of the memory of the pool's node. Before the engine serves:
        CUDA calls wait meanwhile, 0.02 to 0.05 s for each GiB on an H200."""
        pin_arena(
            self.kv,
            None if pool is None else pool.client,
            self._pin_bytes,
            info=functools.partial(self._log.info, "moonpool: %s"),
            warning=functools.partial(self._log.warning, "moonpool: %s"),
        )

    def step_begins(self) -> None:
        """Nothing of the step is queued yet: loads of the step wait for what was queued so far."""
        self._before = Unavailable("the point before the step is not known", operation="load")
        try:
            self._before = self.mark()
        except Error as error:
            self._before = error

    @property
    def before_step(self) -> _native.Mark:
        """The point before the step; see ``step_begins``. Raises Error when there is none."""
        if isinstance(self._before, Error):
            raise self._before
        return self._before

    @property
    def before_pulls(self) -> _native.Mark | Error:
        """The same for hand-overs, which tell their request the error."""
        return self._before

    def mark(self) -> _native.Mark:
        """The point behind all that the engine has queued so far. Raises Error when the device is lost."""
        return self.kv.mark(self._current_stream(self._ordinal))

    def close(self) -> None:
        """Loads and saves that have not begun fail; waits for the others, CLOSE_TIMEOUT_S at most."""
        try:
            self.kv.close(CLOSE_TIMEOUT_S)
        except Error as error:
            with suppress(Exception):  # at exit the log may be closed
                self._log.warning("moonpool: %s", error)
