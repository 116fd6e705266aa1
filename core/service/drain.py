"""Draining a node: objects that no other host has are copied to other nodes, so that the node can stop
without a cold cache.

A drain changes and removes no object, and counts as no use of what it reads. It runs in a thread of the node:
batches of objects of one space, the most recently used first, which the native server keeps in memory while
a client of this process copies them. What was copied stays, however the drain ends.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from moonpool.core.errors import Error, Unavailable
from moonpool.core.service import audit

if TYPE_CHECKING:
    from moonpool import _native

BATCH_BYTES = 16 << 20
BATCH_OBJECTS = 512
WINDOW_OBJECTS = 4096  # of one tenant, before it is the next one's turn
CLIENTS_MAX = 32  # a client serves one space
PASSES_MAX = 4  # the later ones are for objects that came meanwhile
LATER_PASSES_MAX = 20  # in which the node had yet to hear of removals that other nodes knew of
SLICE_S = 0.25  # with a rate, a batch has so much of it
REFUSALS_MAX = 3  # in a row, of single objects: then as large ones are not tried any more
FAULTS_MAX = 3  # in a row
AGAIN_S = 0.3  # the node hears of removals within a heartbeat
SETTLE_LOOK_S, SETTLE_S = 0.02, 30.0  # until the masters have compared what is copied
_ROW = struct.Struct("<IIQQQII")
_COPIED, _THERE, _NOWHERE, _LATER, _GONE, _DAMAGED = range(6)
_log = logging.getLogger("moonpool.node")


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is asked for.

    for_s: seconds at most, 0: until it is done. rate: bytes a second at most, 0: no limit. evict: also where
    another node evicts for it. leave: /readyz is 503 from now on.
    """

    for_s: float = 0.0
    rate: int = 0
    evict: bool = False
    leave: bool = False


class DrainProgress(msgspec.Struct):
    """How far a drain is. state: running, done (nothing is left) or incomplete. why: what kept it.

    objects, bytes: in the node's memory. there: another host had them. left: not looked at yet. nowhere: no
    other node took them. Objects that were removed or evicted meanwhile count among none of these.
    """

    node: str
    state: str = "running"
    why: str = ""
    seconds: float = 0.0
    objects: int = 0
    bytes: int = 0
    copied_objects: int = 0
    copied_bytes: int = 0
    there_objects: int = 0
    there_bytes: int = 0
    left_objects: int = 0
    left_bytes: int = 0
    nowhere_objects: int = 0
    nowhere_bytes: int = 0
    damaged_objects: int = 0


class Row(NamedTuple):
    """An object as the native server lists it; used: the tenant's count of uses at its last one."""

    pool: int
    slot: int
    generation: int
    bytes: int
    used: int
    space: int
    zero: int


MakeClient = Callable[[str, str, bytes], "_native.Client"]  # of tenant, namespace, fingerprint


class Drain:
    """One drain. start() raises Unavailable when there is nowhere to copy to; stop() ends it and waits."""

    def __init__(
        self,
        node: str,
        server: _native.Server,
        make_client: MakeClient,
        request: DrainRequest,
        *,
        peer: str = "",
    ) -> None:
        self.progress = DrainProgress(node)
        self._server = server
        self._make_client = make_client
        self._request = request
        self._peer = peer
        self._clients: OrderedDict[bytes, _native.Client] = OrderedDict()
        self._settled: set[tuple[int, int]] = set()  # pool and generation
        self._refused: dict[int, int] = {}  # by pool: as large an object was refused REFUSALS_MAX times
        self._refusals = 0
        self._faults = 0
        self._later = 0  # of this pass
        self._asked_to_stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonpool-drain", daemon=True)
        self._began_s = 0.0

    def start(self) -> None:
        """Begins. Raises a moonpool Error where the node is in no pool, or is alone in it."""
        try:
            self._client(b"default\0default\0").copy_out(self._server.hold(b""), False)
        except Error as error:
            self._close_clients()
            raise Unavailable(
                f"node {self.progress.node} cannot be drained, there is nowhere to copy to: {error}",
                operation="drain",
            ) from error
        asked = self._request
        audit.record(
            "drain",
            node=self.progress.node,
            peer=self._peer or None,
            for_s=asked.for_s or None,
            rate=asked.rate or None,
            evict=int(asked.evict),
            leave=int(asked.leave),
        )
        self._began_s = time.monotonic()
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it copies still."""
        return self._thread.is_alive()

    def ask_to_stop(self) -> None:
        """It ends after the batch that is under way."""
        self._asked_to_stop.set()

    def stop(self) -> None:
        """Ends it after the batch that is under way, and waits for that. Idempotent."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join()

    def now(self) -> DrainProgress:
        """The progress up to this moment."""
        if self.progress.state == "running":
            self.progress.seconds = time.monotonic() - self._began_s
        return self.progress

    def _run(self) -> None:
        why = ""
        try:
            why = self._copy_all()
        except Exception as error:  # whatever it is, what was copied stays, and the node serves on
            why = str(error)
            _log.exception("the drain ended early", extra={"event": "drain_failed"})
        finally:
            self._close_clients()
        done = self.progress
        done.seconds = time.monotonic() - self._began_s
        left = done.left_objects + done.nowhere_objects + done.damaged_objects
        done.why = why or (done.why if left else "")
        done.state = "incomplete" if left or done.why else "done"
        audit.record(
            "drain_ended",
            node=done.node,
            state=done.state,
            copied_objects=done.copied_objects,
            copied_bytes=done.copied_bytes,
            left_objects=left,
            why=done.why or None,
        )

    def _copy_all(self) -> str:
        """Returns why it ended before all objects were dealt with; "" when they are."""
        passes = later_passes = 0
        while passes < PASSES_MAX and later_passes < LATER_PASSES_MAX:
            rows = self._unsettled()
            self._expect(rows, first=passes + later_passes == 0)
            if not rows:
                return ""
            if why := self._settle_with_masters():
                return why
            self._later = 0
            for batch in self._batches(rows):
                if why := self._why_over():
                    return why
                self._copy(batch)
                if self._faults >= FAULTS_MAX:
                    return self.progress.why
            if self.progress.left_objects and self._asked_to_stop.wait(AGAIN_S):
                return "it was stopped"
            if self._later:
                later_passes += 1
            else:
                passes += 1
        self._expect(self._unsettled(), first=False)
        if not self.progress.left_objects:
            return ""
        if self._later:
            return "the node has yet to hear of removals that other nodes know of"
        return "objects came faster than they could be copied"

    def _settle_with_masters(self) -> str:
        """Waits until the masters know all objects that were listed, and the node has carried out what they
        answered: an object that was removed before its master knew that it is here has gone then. Returns why
        the drain is over before that; "".

        Two beats of each master: the first may have been sent before the listing.
        """
        before = {master: beats for master, _, _, beats in self._server.settled()}
        until_s = time.monotonic() + SETTLE_S
        while True:
            of_range: dict[int, list[bool]] = {}
            for master, range_, joined, beats in self._server.settled():
                settled = of_range.setdefault(range_, [])
                if joined:
                    settled.append(beats >= before.setdefault(master, beats) + 2)
            if all(settled and all(settled) for settled in of_range.values()):
                return ""
            if why := self._why_over():
                return why
            if time.monotonic() >= until_s:
                return "no master of a range of the keys answers: what is here may have been removed"
            self._asked_to_stop.wait(SETTLE_LOOK_S)

    def _unsettled(self) -> list[Row]:
        return [row for row in self._rows() if (row.pool, row.generation) not in self._settled]

    def _rows(self) -> Iterator[Row]:
        cursor = 0
        while True:
            cursor, rows = self._server.holdings(cursor)
            yield from map(Row._make, _ROW.iter_unpack(rows))
            if cursor == 0:
                return

    def _expect(self, rows: list[Row], *, first: bool) -> None:
        """What is left from now on; new objects count among all."""
        size = sum(row.bytes for row in rows)
        done = self.progress
        if not first:
            done.objects += max(len(rows) - done.left_objects, 0)
            done.bytes += max(size - done.left_bytes, 0)
        else:
            done.objects, done.bytes = len(rows), size
        done.left_objects, done.left_bytes = len(rows), size

    def _batches(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Of one space each, the most recently used first; the tenants in turn."""
        most = min(BATCH_BYTES, int(self._request.rate * SLICE_S)) if self._request.rate else BATCH_BYTES
        for window in self._windows(rows):
            window.sort(key=lambda row: row.space)  # stable: the order by use stays within each space
            for _, of_space in groupby(window, key=lambda row: row.space):
                batch: list[Row] = []
                size = 0
                for row in of_space:
                    if batch and (size + row.bytes > most or len(batch) == BATCH_OBJECTS):
                        yield batch
                        batch, size = [], 0
                    batch.append(row)
                    size += row.bytes
                yield batch

    def _windows(self, rows: list[Row]) -> Iterator[list[Row]]:
        by_pool: dict[int, list[Row]] = {}
        for row in rows:
            by_pool.setdefault(row.pool, []).append(row)
        for of_pool in by_pool.values():
            of_pool.sort(key=lambda row: row.used, reverse=True)
        at = 0
        while any(at < len(of_pool) for of_pool in by_pool.values()):
            for of_pool in by_pool.values():
                if window := of_pool[at : at + WINDOW_OBJECTS]:
                    yield window
            at += WINDOW_OBJECTS

    def _why_over(self) -> str:
        """Waits as the rate demands; why the drain is over, or ""."""
        request = self._request
        over_s = self._began_s + request.for_s if request.for_s else float("inf")
        due_s = self._began_s
        if request.rate:
            due_s += self.progress.copied_bytes / request.rate
        self._asked_to_stop.wait(max(min(due_s, over_s) - time.monotonic(), 0.0))
        if self._asked_to_stop.is_set():
            return "it was stopped"
        return "its time was over" if time.monotonic() >= over_s else ""

    def _copy(self, batch: list[Row]) -> None:
        """Deals with these objects of one space. No node may have had room for all of them together: then the
        halves are tried."""
        refused = self._refused.get(batch[0].pool)
        if refused is not None:
            small = [row for row in batch if row.bytes < refused]
            self._settle([row for row in batch if row.bytes >= refused], _NOWHERE)
            batch = small
        if not batch or self._asked_to_stop.is_set():
            return
        try:
            outcomes, why = self._ask(batch)
        except Error as error:  # in the next pass once more
            self._faults += 1
            self.progress.why = str(error)
            return
        self._faults = 0
        for outcome in (_COPIED, _THERE, _GONE, _DAMAGED):
            self._settle([row for row, code in zip(batch, outcomes, strict=True) if code == outcome], outcome)
        left = [row for row, code in zip(batch, outcomes, strict=True) if code == _NOWHERE]
        self._later += outcomes.count(_LATER)
        if _COPIED in outcomes:
            self._refusals = 0
        if left:
            self.progress.why = why
        if len(left) > 1:
            half = len(left) // 2
            self._copy(left[:half])
            self._copy(left[half:])
        elif left:
            self._refusals += 1
            if self._refusals >= REFUSALS_MAX:
                self._refused[left[0].pool] = left[0].bytes
            self._settle(left, _NOWHERE)

    def _ask(self, batch: list[Row]) -> tuple[bytes, str]:
        held = self._server.hold(b"".join(_ROW.pack(*row) for row in batch))
        if not held.space:
            return bytes([_GONE]) * len(batch), ""
        outcomes, why = self._client(held.space).copy_out(held, self._request.evict)
        return outcomes, why

    def _settle(self, rows: list[Row], outcome: int) -> None:
        size = sum(row.bytes for row in rows)
        done = self.progress
        done.left_objects -= len(rows)
        done.left_bytes -= size
        self._settled.update((row.pool, row.generation) for row in rows)
        if outcome == _COPIED:
            done.copied_objects += len(rows)
            done.copied_bytes += size
        elif outcome == _THERE:
            done.there_objects += len(rows)
            done.there_bytes += size
        elif outcome == _NOWHERE:
            done.nowhere_objects += len(rows)
            done.nowhere_bytes += size
        elif outcome == _DAMAGED:
            done.damaged_objects += len(rows)
            done.why = "bytes do not match their checksum" if rows else done.why

    def _client(self, identity: bytes) -> _native.Client:
        if (client := self._clients.get(identity)) is None:
            tenant, namespace, fingerprint = identity.split(b"\0", 2)
            client = self._make_client(tenant.decode(), namespace.decode(), fingerprint)
            self._clients[identity] = client
            if len(self._clients) > CLIENTS_MAX:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(identity)
        return client

    def _close_clients(self) -> None:
        while self._clients:
            with suppress(Error):
                self._clients.popitem()[1].close()
