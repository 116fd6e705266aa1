"""Drain jobs of a master: what a segment holds of this API's objects is moved to others, before it goes away.

Any process may ask; the jobs run one after the other on a thread of the master's process, which is a guest of
its own pool meanwhile. Nothing keeps new objects from the segment: its own process goes on putting there.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moonpool.core.errors import Error
from moonpool.core.service.master import NodeRow
from moonpool.core.store.store import ROWS_MAX
from moonpool.core.store.types import ObjectStat

from ._codes import Code
from ._segment_names import members_by_segment
from ._values import TaskStatus
from .store import MooncakeDistributedStore

JOBS_MAX = 1000  # that are remembered
KEYS_A_LOOK = 1000
REPORT_S = 0.5  # within which the directory learns of a put; 20 ms on an idle host
PASSES_MAX = 100  # over a segment that others put into meanwhile


class Status(IntEnum):
    """The state of a drain job."""

    CREATED = 0
    RUNNING = 2
    SUCCEEDED = 3
    FAILED = 4


class SegmentStatus(IntEnum):
    """Whether a segment takes objects, is being drained, or is drained."""

    OK = 1
    DRAINING = 2
    DRAINED = 3


class Refused(Exception):
    """A job that is not possible, with its code and HTTP status."""

    def __init__(self, code: Code, status: int, message: str = "") -> None:
        super().__init__(message or code.name)
        self.code, self.status = code, status


@dataclass
class Job:
    """One request to move all objects of some segments to others."""

    id: str
    segments: list[str]
    sources: list[str]  # the addresses of their nodes
    targets: list[str]  # none: any
    created_ms: int
    status: Status = Status.CREATED
    message: str = "Drain job created"
    updated_ms: int = 0
    succeeded: int = 0
    failed: int = 0
    left: int = 0
    moved_bytes: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    def say(self, status: Status, message: str) -> None:
        """Sets the status with a sentence, and the time of the change."""
        self.status, self.message, self.updated_ms = status, message, _now_ms()

    def page(self) -> dict[str, Any]:
        """The JSON of the job."""
        return {
            "success": True,
            "job_id": self.id,
            "type": 0,
            "type_name": "DRAIN",
            "status": int(self.status),
            "status_name": self.status.name,
            "created_at_ms_epoch": self.created_ms,
            "last_updated_at_ms_epoch": self.updated_ms,
            "segments": self.segments,
            "succeeded_units": self.succeeded,
            "failed_units": self.failed,
            "blocked_units": 0,
            "active_units": self.left,
            "migrated_bytes": self.moved_bytes,
            "message": self.message,
            "error_code": 0,
            "error_message": "",
        }


class DrainJobs:
    """The drain jobs of one master.

    rows: returns the living nodes.
    setup: makes a store a guest of the pool; returns a code.
    """

    def __init__(
        self, rows: Callable[[], list[NodeRow]], setup: Callable[[MooncakeDistributedStore], int]
    ) -> None:
        self._rows, self._setup = rows, setup
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._states: dict[str, SegmentStatus] = {}  # by incarnation of the node
        self._thread = ThreadPoolExecutor(1, "mooncake-drain")
        self._stop = threading.Event()

    def close(self) -> None:
        """Ends the job that runs after the object that it moves."""
        self._stop.set()
        self._thread.shutdown(cancel_futures=True)

    def state_of(self, row: NodeRow) -> SegmentStatus:
        """Whether the node is drained or being drained."""
        return self._states.get(row.incarnation, SegmentStatus.OK)

    def create(self, body: Any) -> Job:
        """Of {"segments": [names], "target_segments": [names]}. Raises Refused."""
        if not isinstance(body, dict):
            raise Refused(Code.INVALID_PARAMS, 400, "Invalid JSON body: expected an object")
        names, targets = body.get("segments", []), body.get("target_segments") or []
        for given in (names, targets):
            if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
                raise Refused(Code.INVALID_PARAMS, 400, "Invalid JSON body: expected lists of segment names")
        if not names or set(names) & set(targets):
            raise Refused(Code.INVALID_PARAMS, 400)
        known = members_by_segment(self._rows())
        if any(name not in known for name in (*names, *targets)):
            raise Refused(Code.SEGMENT_NOT_FOUND, 404)
        sources = {known[name].incarnation: known[name].address for name in names}
        with self._lock:
            if any(self._states.get(one) is SegmentStatus.DRAINING for one in sources):
                raise Refused(Code.UNAVAILABLE_IN_CURRENT_STATUS, 409)
            self._states |= dict.fromkeys(sources, SegmentStatus.DRAINING)
            now = _now_ms()
            job = Job(
                f"{secrets.randbits(63)}-{secrets.randbits(63)}",
                names,
                list(sources.values()),
                [known[name].address for name in targets],
                now,
                updated_ms=now,
            )
            self._jobs[job.id] = job
            while len(self._jobs) > JOBS_MAX:
                self._jobs.popitem(last=False)
        self._thread.submit(self._run, job, list(sources))
        return job

    def query(self, job_id: str) -> Job:
        """Raises Refused."""
        high, mark, low = job_id.partition("-")
        if not mark or not (high + low).isascii() or not (high + low).isdigit():
            raise Refused(Code.INVALID_PARAMS, 400, "Missing or invalid job_id")
        job = self._jobs.get(job_id)
        if job is None:
            raise Refused(Code.JOB_NOT_FOUND, 404)
        return job

    # ---- on the thread

    def _run(self, job: Job, incarnations: Sequence[str]) -> None:
        job.say(Status.RUNNING, "Drain job running")
        end = Status.FAILED, "the job broke"
        store = MooncakeDistributedStore()
        try:
            if code := self._setup(store):
                raise Refused(Code(code), 503, "the master's own pool is not to be reached")
            for source in job.sources:
                self._empty(store, job, source)
            if job.failed:
                end = Status.FAILED, f"{job.failed} objects were not moved: no room elsewhere, or striped"
            else:
                end = Status.SUCCEEDED, "Drain job finished successfully"
        except (Error, Refused) as error:
            end = Status.FAILED, str(error)
        finally:
            store.close()
            state = SegmentStatus.DRAINED if end[0] is Status.SUCCEEDED else SegmentStatus.OK
            with self._lock:
                self._states |= dict.fromkeys(incarnations, state)
            job.say(*end)  # last: where a job is over, its segments are in their states
            job.ended.set()

    def _empty(self, store: MooncakeDistributedStore, job: Job, source: str) -> None:
        """Until nothing is there, or nothing of it can be moved."""
        was_empty = False
        for _ in range(PASSES_MAX):
            units = self._held_at(store, source)
            job.left = len(units)
            moved = 0
            for name, stat in units.items():
                if self._stop.is_set():
                    raise Refused(Code.INTERNAL_ERROR, 503, "the master ended meanwhile")
                moved += self._move(store, job, source, name, stat)
                job.left -= 1
                job.updated_ms = _now_ms()
            if moved < len(units) and not moved:
                job.failed += len(units)
                return
            # The directory learns a moment later of an object that a node has just taken, so look once more.
            if not units and (was_empty or self._stop.wait(REPORT_S)):
                return
            was_empty = not units

    def _held_at(self, store: MooncakeDistributedStore, source: str) -> dict[bytes, ObjectStat]:
        names = [row.key for row in store._ask(lambda at: at.list(limit=ROWS_MAX))]
        held: dict[bytes, ObjectStat] = {}
        for start in range(0, len(names), KEYS_A_LOOK):
            some = names[start : start + KEYS_A_LOOK]
            found = store._ask(lambda at, some=some: at.stat(some))  # type: ignore[misc]
            for name, one in zip(some, found, strict=True):
                if one is not None and any(copy.address == source for copy in one.copies):
                    held[name] = one
        return held

    def _move(
        self, store: MooncakeDistributedStore, job: Job, source: str, name: bytes, stat: ObjectStat
    ) -> bool:
        """To the target with the most room that has no copy. Whether it is at the source no longer."""
        there = {copy.address for copy in stat.copies}
        rows = [
            row
            for row in self._rows()
            if row.address not in there
            and self.state_of(row) is SegmentStatus.OK
            and (not job.targets or row.address in job.targets)
        ]
        for row in sorted(rows, key=lambda row: row.dram_free_bytes, reverse=True):
            task, code = store.create_move_task(name, source, row.address)  # type: ignore[arg-type]
            if code == Code.OBJECT_NOT_FOUND:
                return True  # removed meanwhile
            answer = store.query_task(task)[0]
            if code == Code.OK and answer is not None and answer.status is TaskStatus.SUCCESS:
                job.succeeded += 1
                job.moved_bytes += stat.size
                return True
        return False


def failure(error: Refused) -> dict[str, Any]:
    """The JSON of a refused request."""
    return {"success": False, "error_code": int(error.code), "error_message": str(error)}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
