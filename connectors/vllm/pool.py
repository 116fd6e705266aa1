"""The pool as the two halves see it: operations that are handed over and polled for, and do not block."""

from __future__ import annotations

import logging
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.options import PoolOptions

TIMEOUT_S = 2.0
RETRY_S = 0.5
QUEUE_MAX = 4096

Indices = npt.NDArray[np.uint32]
Columns = npt.NDArray[np.uint16]
Rows = list[list[tuple[int, int, int]]]
# The KV memory as native threads take it: of the host, or of a card.
KvTable = _native.PartTable | _native.DeviceKv
# The kind of an operation, whose thread runs it, and its number among those of this kind.
Ticket = tuple[str, int]


class Pool:
    """One client of the node, and a native thread for each kind of operation that must not wait for another:
    a load never stands behind saves.

    A submission returns a ticket at once; ``poll`` returns the answers. Every ticket is answered once, with
    an error when the node is gone or silent.
    """

    def __init__(self, client: _native.Client) -> None:
        """client: a connected client, which this owns from now on."""
        self._client = client
        self._reads = _native.Worker(client, threads=1, queue_max=QUEUE_MAX)
        self._writes = _native.Worker(client, threads=1, queue_max=QUEUE_MAX)
        self._ended = select.poll()
        self._ended.register(self._reads.eventfd, select.POLLIN)

    @classmethod
    def dial(cls, settings: PoolOptions, fingerprint: bytes) -> Pool:
        """Connects. Raises Unavailable without a node, AuthError when the token does not fit."""
        return cls(settings.dial(fingerprint, TIMEOUT_S))

    @property
    def client(self) -> _native.Client:
        """For calls that may wait."""
        return self._client

    def submit_prefix(self, names: bytes, name_size: int, width: int) -> Ticket:
        """Asks for the longest prefix of blocks that are all there; the answer is a PrefixAnswer.

        names: of the objects, ``name_size`` bytes each, ``width`` per block.
        """
        return "read", self._reads.submit_prefix(names, name_size, width)

    def submit_presence(self, names: list[bytes]) -> Ticket:
        """Asks which objects are there; the answer is a byte for each name, 1 for one that is, or an
        Error."""
        return "read", self._reads.submit_names("exists", names)

    def submit_view(self, name: bytes) -> Ticket:
        """Asks for an object, checked against its checksum; the answer is a list of one: a memoryview, which
        pins it while there is a reference, or None. Or it is an Error."""
        return "read", self._reads.submit_names("views", [name], verify=True)

    def submit_put(self, name: bytes, parts: list[Any]) -> Ticket:
        """Stores an object; the answer is what the client's put returns, or an Error.

        parts: bytes-like, or (address, length), which the caller keeps until the answer.
        """
        return "write", self._writes.submit_put([name], [parts])

    def submit_load(
        self,
        holders: bytes,
        descriptors: bytes,
        parts: KvTable,
        indices: Indices,
        columns: Columns,
        after: _native.Mark | None = None,
    ) -> Ticket:
        """Copies pinned objects into memory; the answer is a LoadAnswer.

        holders, descriptors: of a PrefixAnswer.
        parts: the memory: object (index i, column c) is the concatenation, over the rows of column c, of
            ``length`` bytes at ``address + i * stride``.
        indices, columns: where each object goes in ``parts``.
        after: on a card, the point in the engine's stream before which nothing is written.
        """
        ticket = self._reads.submit_load(holders, descriptors, parts, indices, columns, after=after)
        return "read", ticket

    def submit_save(
        self,
        names: bytes,
        name_size: int,
        parents: bytes,
        parts: KvTable,
        indices: Indices,
        columns: Columns,
        after: _native.Mark | None = None,
        keep_s: float = 0.0,
    ) -> Ticket:
        """Stores objects from memory; the answer is a SaveAnswer. From a card there is a SaveStaged before
        it: from then on the memory is not read any more.

        names: ``name_size`` bytes each.
        parents: for each object the name of the one before it, zeros for none.
        parts, indices, columns: where each object is, see submit_load.
        after: on a card, the point in the engine's stream after which the memory has the blocks.
        keep_s: soft pin, seconds; 0: none.
        """
        ticket = self._writes.submit_save(
            names, name_size, parents, parts, indices, columns, after=after, soft_pin_s=keep_s
        )
        return "write", ticket

    def release(self, pin_id: int) -> None:
        """Ends a pin; 0 is no pin."""
        self._reads.release(pin_id)

    def poll(self) -> Iterator[tuple[Ticket, Any]]:
        """(ticket, answer) of operations that have ended, each once. Never waits."""
        for kind, worker in (("read", self._reads), ("write", self._writes)):
            for number, answer in worker.poll():
                yield (kind, number), answer

    def wait_for_read(self, timeout_s: float) -> bool:
        """Waits until a query or a load has ended that ``poll`` has not returned. False: none has in that
        time. The system counts whole milliseconds: less than half of one is none."""
        return bool(self._ended.poll(round(timeout_s * 1e3)))

    def close(self) -> None:
        """Waits for the operations under way, then disconnects."""
        self._reads.close()
        self._writes.close()
        self._client.close()


def open_node(
    settings: PoolOptions, log: logging.Logger, fingerprint: bytes, *, required: bool, quiet: bool = False
) -> NodeConnection[Pool]:
    """Connects to the node under a fingerprint, now or when there is one. Raises Unavailable without a node
    that is required.

    quiet: whether connecting is logged for debugging only.
    """
    node: NodeConnection[Pool] = NodeConnection(
        lambda: Pool.dial(settings, fingerprint),
        address=str(settings.socket()),
        log=log,
        retry_s=RETRY_S,
        log_retry=log.debug,
    )
    node.open(required=required, quiet=quiet)
    return node


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer to a load or a save that could not even be handed over."""

    error: str
    objects: int = 0
    bytes_loaded: int = 0
    seconds: float = 0.0
    stored: int = 0
    existed: int = 0
    bytes_stored: int = 0

    @property
    def ok(self) -> bytes:
        """A zero for each object."""
        return bytes(self.objects)

    @property
    def refused(self) -> int:
        """All objects."""
        return self.objects
