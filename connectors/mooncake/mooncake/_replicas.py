"""Where copies lie, and making more of them."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from functools import cache, partial

from moonpool.core.errors import Error, InvalidArgument, Unavailable
from moonpool.core.store_types import Presence

from ._base import key_of, keys_of
from ._codes import Code, NoNode, Unsupported, code_of
from ._parts import Parts
from ._values import QueryTaskResponse, ReplicaDescriptor, TaskStatus, TaskType

TASKS_MAX = 10_000
NO_TASK = (0, 0)
MEMORY, SSD = 0, 1


class Replicas(Parts):
    def __init__(self) -> None:
        super().__init__()
        self._tasks: OrderedDict[tuple[int, int], QueryTaskResponse] = OrderedDict()

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Of each copy that the master knows; [] is a miss. Raises a moonpool Error when it is not known."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Only keys that have an object."""
        names = keys_of(keys)
        access = self._open()
        if not names:
            return {}
        found = self._ask(lambda store: store.exists(names))
        places = access.holders(names)
        described = {}
        for key, presence, at in zip(keys, found, places, strict=True):
            if presence is Presence.UNKNOWN and not at:
                raise Unavailable(f"no node says whether {key!r:.80} is there", operation="get_replica_desc")
            if presence is Presence.MISS:
                continue
            size = cache(partial(self._size, key))
            described[key] = [
                ReplicaDescriptor(endpoint, tier == SSD, size)
                for endpoint, tier in [(member.address, tier) for member, tier in at]
                or [(access.segment, MEMORY)]  # too new for the master to have heard of it
            ]
        return described

    def _size(self, key: str) -> int:
        if (view := self._views([key])[0]) is None:
            raise Unavailable(f"{key!r:.80} is gone since it was described", operation="get_replica_desc")
        return view.nbytes

    def batch_replica_clear(self, keys: list[str], segment_name: str = "") -> list[str]:
        """Removes every copy of the keys, with a segment ("host:port") only those there; those that were.
        Who reads such a copy goes on with its bytes.
        """
        names = keys_of(keys)
        if not segment_name:
            return [key for key, code in zip(keys, self.batch_remove(keys), strict=True) if code == Code.OK]
        try:
            flags = self._ask(lambda store: store.remove(names, node=segment_name)) if names else []
        except InvalidArgument as error:  # no such segment: no copies there
            code_of(error, "batch_replica_clear")
            return []
        return [key for key, was_there in zip(keys, flags, strict=True) if was_there]

    # ---- tasks

    def create_copy_task(self, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Copies an object to the nodes at ``targets`` ("host:port", as descriptors name them); the task's id
        and a code. It is done when this returns; query_task() tells how it ended.
        """
        try:
            name = key_of(key)
            by_address = {member.address: member for member in self._open().members()}
            if unknown := [target for target in targets if target not in by_address]:
                raise InvalidArgument(f"no node of the pool is at {', '.join(unknown)}")
            if not targets:
                raise InvalidArgument("a copy needs a target")
            if (view := self._views([key])[0]) is None:
                return NO_TASK, int(Code.OBJECT_NOT_FOUND)
        except Error as error:
            return NO_TASK, int(code_of(error, "create_copy_task"))
        task = self._new_task(TaskType.REPLICA_COPY)
        try:
            for target in targets:
                with self._open().open_at(by_address[target]) as store:
                    result = store.put(name, view)
                if not result:
                    raise NoNode(f"the node at {target} refused the copy: {result.reason}")
            task.status = TaskStatus.SUCCESS
        except Error as error:
            code_of(error, "create_copy_task")
            task.status, task.message = TaskStatus.FAILED, str(error)
        task.last_updated_at_ms_epoch = _now_ms()
        return task.id, int(Code.OK)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Refused with UNAVAILABLE_IN_CURRENT_MODE: no node gives up one copy of several."""
        error = Unsupported(
            f"{key!r:.80} was not moved from {source} to {target}: moonpool removes an object everywhere or "
            f"nowhere; create_copy_task() makes a second copy",
            operation="create_move_task",
        )
        return NO_TASK, int(code_of(error, "create_move_task"))

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """A task of this process, of its last TASKS_MAX."""
        task = self._tasks.get(tuple(task_id))  # type: ignore[arg-type]
        return (None, int(Code.TASK_NOT_FOUND)) if task is None else (task, int(Code.OK))

    def _new_task(self, kind: TaskType) -> QueryTaskResponse:
        now = _now_ms()
        task = QueryTaskResponse(
            (secrets.randbits(64), secrets.randbits(64)), kind, TaskStatus.PROCESSING, now, now
        )
        self._tasks[task.id] = task
        while len(self._tasks) > TASKS_MAX:
            self._tasks.popitem(last=False)
        return task


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
