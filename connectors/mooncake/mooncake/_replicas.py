"""Where copies lie, and making more of them."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.core.errors import Error, InvalidArgument
from moonpool.core.store_types import Copy

from ._base import key_of, keys_of
from ._codes import Code, NoNode, code_of
from ._parts import Parts
from ._values import QueryTaskResponse, ReplicaDescriptor, TaskStatus, TaskType

if TYPE_CHECKING:
    from moonpool import _native

TASKS_MAX = 10_000
NO_TASK = (0, 0)


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
        segment = self._open().segment
        found = self._ask(lambda store: store.stat(names)) if names else []
        return {
            key: [
                ReplicaDescriptor(copy.address or segment, tier == "ssd", one.size)
                for copy in one.copies
                for tier in copy.tiers
            ]
            for key, one in zip(keys, found, strict=True)
            if one is not None
        }

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
            nodes = self._nodes_at(targets)
            if not targets:
                raise InvalidArgument("a copy needs a target")
            if (view := self._views([key])[0]) is None:
                return NO_TASK, int(Code.OBJECT_NOT_FOUND)
        except Error as error:
            return NO_TASK, int(code_of(error, "create_copy_task"))

        def act() -> None:
            for node in nodes:
                self._copy_to(name, view, node)

        return self._run(TaskType.REPLICA_COPY, "create_copy_task", act)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """A copy at ``target``, then none at ``source``; other copies stay. Done when this returns. An object
        that was replaced meanwhile stays where it is: the task has failed.
        """
        try:
            name = key_of(key)
            _, node = self._nodes_at([source, target])
            if source == target:
                raise InvalidArgument("a move needs two segments")
            before = self._copy_at(name, source)
            view = self._views([key])[0]
            if before is None or view is None:
                return NO_TASK, int(Code.OBJECT_NOT_FOUND)
        except Error as error:
            return NO_TASK, int(code_of(error, "create_move_task"))

        def act() -> None:
            self._copy_to(name, view, node)
            after = self._copy_at(name, source)
            if after is None:  # evicted
                return
            if after.crc32c != before.crc32c or after.size != before.size:
                raise NoNode(f"the object at {source} was replaced while it was moved")
            self._ask(lambda store: store.remove(name, node=source))

        return self._run(TaskType.REPLICA_MOVE, "create_move_task", act)

    def _nodes_at(self, segments: list[str]) -> list[_native.Member]:
        by_address = {member.address: member for member in self._open().members()}
        if unknown := [one for one in segments if one not in by_address]:
            raise InvalidArgument(f"no node of the pool is at {', '.join(unknown)}")
        return [by_address[one] for one in segments]

    def _copy_at(self, name: bytes, segment: str) -> Copy | None:
        one = self._ask(lambda store: store.stat(name))
        return next((copy for copy in one.copies if copy.address == segment), None) if one else None

    def _copy_to(self, name: bytes, view: memoryview, node: _native.Member) -> None:
        with self._open().open_at(node) as store:  # from here a put would find the copy that is here
            result = store.put(name, view, node=node.address)
        if not result or self._copy_at(name, node.address) is None:
            raise NoNode(f"the node at {node.address} took no copy: {result.reason or 'it is full'}")

    def _run(self, kind: TaskType, operation: str, act: Callable[[], None]) -> tuple[tuple[int, int], int]:
        task = self._new_task(kind)
        try:
            act()
            task.status = TaskStatus.SUCCESS
        except Error as error:
            code_of(error, operation)
            task.status, task.message = TaskStatus.FAILED, str(error)
        task.last_updated_at_ms_epoch = _now_ms()
        return task.id, int(Code.OK)

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
