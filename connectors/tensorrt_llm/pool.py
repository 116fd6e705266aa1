"""TensorRT-LLM's way to the node: one client, and objects that stay pinned while the engine reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.blocking_worker import BlockingWorker
from moonpool.connectors.node_connection import Messages, NodeConnection
from moonpool.connectors.tensorrt_llm.compat import Log
from moonpool.connectors.tensorrt_llm.settings import Settings
from moonpool.core.errors import Unavailable
from moonpool.core.store.keys import BLOCK_NAME_BYTES

TIMEOUT_S = 1.0
LONG_WAIT_S = 0.2 * TIMEOUT_S  # a lookup that took longer has waited for a silent peer
_SILENT = "the pool at %s does not answer (%s); prompts are computed until it does"
_ANSWERS = "the pool at %s answers"
_MESSAGES = Messages(absent=_SILENT, silent=_SILENT, joined=_ANSWERS, answers=_ANSWERS)


class Held:
    """Objects that are pinned in place: while this exists, no node evicts them, and those of this host can be
    loaded whatever happens to the node.

    names: of the objects.
    sizes: bytes of each object.
    far: for each object, whether it is on another host.
    """

    def __init__(self, client: _native.Client, pin: _native.Pin, objects: int) -> None:
        self._client, self._pin = client, pin
        self.names = pin.names[:objects]
        rows = pin.objects[:objects]
        self.sizes: list[int] = [size for size, _ in rows]
        self.far: list[bool] = [far for _, far in rows]
        holders, descriptors = pin.hand_over()
        self._holders: bytes = holders
        self._descriptors = np.frombuffer(descriptors, np.uint8).reshape(len(pin.names), -1)

    def __len__(self) -> int:
        return len(self.names)

    def copy(self, which: Sequence[int], parents: Sequence[bytes | None]) -> None:
        """Stores copies of the objects ``which`` at the own node; those that are gone are left out. Raises
        Error when a node does not answer.

        parents: of each of them the name of the object before it.
        """
        names = [self.names[at] for at in which]
        views: list[memoryview | None] = self._client.pinned_views(self._pin, names)
        there = [at for at, view in enumerate(views) if view is not None]
        self._client.put(
            [names[at] for at in there],
            [[views[at]] for at in there],
            parents=[parents[at] for at in there],
        )

    def descriptors(self, which: npt.NDArray[np.intp]) -> tuple[bytes, bytes]:
        """(holders, descriptors) of the objects ``which``, as submit_load takes them."""
        return self._holders, self._descriptors[which].tobytes()


class PoolClient:
    """One client of a node, and native threads' work.

    client: whose calls raise Error when the pool does not answer.
    loads: runs loads on the calling thread, one after the other.
    saves: runs saves on a thread of its own; each waits at most TIMEOUT_S after its last progress.
    """

    def __init__(self, client: _native.Client) -> None:
        """client: a connected client, which this owns from now on."""
        self.client = client
        self.loads = BlockingWorker(client)
        self.saves = _native.Worker(client, threads=1)

    @classmethod
    def dial(cls, settings: Settings, fingerprint: bytes) -> PoolClient:
        """Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    def hold(self, names: Sequence[bytes], width: int) -> Held | None:
        """Pins the objects of the longest prefix of blocks that are all there.

        names: of the objects, ``width`` per block.

        Returns None when there are none. Raises Error when the pool does not answer: its node is away, or the
        call waited in vain. An error that came at once (a node of another host is away, pins hold their share
        of the memory) is a miss: the next lookup may be a hit.
        """
        began_s = time.monotonic()
        blocks, pin, _, why = self.client.longest_prefix(list(names), width, True)
        waited = time.monotonic() - began_s > LONG_WAIT_S or not self.client.connected
        if pin is None and why and not blocks and waited:
            raise Unavailable(why, operation="longest_prefix")
        return None if pin is None else Held(self.client, pin, blocks * width)

    def ask(self) -> None:
        """Raises Error when the pool does not answer."""
        self.hold([bytes(BLOCK_NAME_BYTES)], 1)

    def close(self) -> None:
        """Waits for the load and the save under way, then disconnects."""
        self.loads.close()
        self.saves.close()
        self.client.close()


def open_pool(
    dial: Callable[[], PoolClient], *, address: str, log: Log, required: bool
) -> NodeConnection[PoolClient]:
    """A connection whose first attempt has been made; a thread makes the others, so the executor never waits
    for a node that does not answer.

    dial: connects; raises Error without a node.
    address: of the node, for the log.
    required: whether the first attempt's error is raised.
    """
    node = NodeConnection(
        dial, address=address, log=log, probe=lambda client: client.ask(), messages=_MESSAGES
    )
    node.open(required=required)
    return node
