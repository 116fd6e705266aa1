"""Replicas of objects: where they are, copies and moves."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from moonpool import _native
from moonpool.core.errors import Error, InvalidArgument
from moonpool.core.store.store import Store
from moonpool.core.store.types import Copy, ObjectStat, PutStatus

from ._base import name_or_none
from ._codes import Code, NoNode, Unsupported, code_of
from ._objects import Objects
from ._segment_names import members_by_segment, segment_of
from ._values import QueryTaskResponse, ReplicaDescriptor, TaskStatus, TaskType

TASKS_MAX = 10_000
LOOKS_MAX = 8  # at a copy that goes to the SSD or comes back while it is removed
NO_TASK = (0, 0)


class Replicas(Objects):
    """Where replicas of objects are, and copies and moves of them."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: OrderedDict[tuple[int, int], QueryTaskResponse] = OrderedDict()

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """A descriptor of each replica that the master knows; [] is a miss. Raises Error if unknown."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: list[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Only keys that have an object."""
        own = self._open().segment
        found = self._ask_of_some(keys, None, lambda store, names: store.stat(names))
        return {
            key: [
                ReplicaDescriptor(
                    segment_of(copy.node, copy.address) if copy.address else own, tier == "ssd", one.size
                )
                for copy in one.copies
                for tier in copy.tiers
            ]
            for key, one in zip(keys, found, strict=True)
            if one is not None
        }

    def batch_replica_clear(self, keys: list[str], segment_name: str = "") -> list[str]:
        """Removes every replica of the keys, or with a segment ("host:port") only those there. Returns the
        keys that had one. Readers of such a replica keep its bytes."""
        if not isinstance(segment_name, str):
            raise TypeError(f"a segment's name is a str, not {segment_name!r:.80}")
        if not segment_name:
            return [key for key, code in zip(keys, self.batch_remove(keys), strict=True) if code == Code.OK]
        try:
            node = self._open().names.address_of(segment_name)
            flags = self._ask_of_some(keys, False, lambda store, names: store.remove(names, node=node))
        except InvalidArgument as error:  # no such segment: no copies there
            code_of(error, "batch_replica_clear")
            return []
        return [key for key, was_there in zip(keys, flags, strict=True) if was_there]

    # ---- tasks

    def create_copy_task(self, key: str, targets: list[str]) -> tuple[tuple[int, int], int]:
        """Copies an object to the nodes at ``targets`` ("host:port", as descriptors name them). Returns the
        task's id and a code. The copy has ended when this returns; query_task() has its outcome. A task whose
        object was removed or replaced meanwhile has failed and left no copy."""
        try:
            name = name_or_none(key)
            before = None if name is None else self._ask(lambda store: store.stat(name))
            if name is None or before is None or (view := self._views([key])[0]) is None:
                self._open()
                return NO_TASK, int(Code.OBJECT_NOT_FOUND)
            nodes = self._nodes_at(targets)
            if not targets:
                raise InvalidArgument("a copy needs a target")
            (source,) = self._nodes_at([before.copies[0].address])
            _in_one_piece(before)
        except Error as error:
            return NO_TASK, int(code_of(error, "create_copy_task"))
        return self._run(
            TaskType.REPLICA_COPY,
            "create_copy_task",
            lambda: self._copy(name, view, source, nodes, move=False),
        )

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """A copy at ``target``, then none at ``source``; other copies stay. Done when this returns. When the
        object at ``source`` was removed or replaced meanwhile, or ``target`` has other bytes under the key,
        the task has failed: what is there stays, and the copy that it made is gone.
        """
        try:
            name = name_or_none(key)
            before = None if name is None else self._ask(lambda store: store.stat(name))
            if name is None or before is None or (view := self._views([key])[0]) is None:
                self._open()
                return NO_TASK, int(Code.OBJECT_NOT_FOUND)
            origin, node = self._nodes_at([source, target])
            if origin.address == node.address:
                raise InvalidArgument("a move needs two segments")
            _in_one_piece(before)
            if origin.address not in [copy.address for copy in before.copies]:
                raise InvalidArgument(f"{source} has no copy of {key!r:.80}")
        except Error as error:
            return NO_TASK, int(code_of(error, "create_move_task"))
        return self._run(
            TaskType.REPLICA_MOVE,
            "create_move_task",
            lambda: self._copy(name, view, origin, [node], move=True),
        )

    def _nodes_at(self, segments: list[str]) -> list[_native.Member]:
        known = members_by_segment(self._open().members())
        if unknown := [one for one in segments if one not in known]:
            raise InvalidArgument(f"no segment of the pool is {', '.join(unknown)}")
        return [known[one] for one in segments]

    def _copy(
        self,
        name: bytes,
        view: memoryview,
        source: _native.Member,
        targets: list[_native.Member],
        *,
        move: bool,
    ) -> None:
        """Copies ``view`` to each target, and in a move removes the source. Raises after removing each copy
        that it made. It asks the nodes themselves: the directory learns of a change some milliseconds later.
        """
        bytes_are = view.nbytes, _native.crc32c(view)
        made: list[tuple[_native.Member, Copy]] = []
        try:
            for target in targets:
                if (copy := self._copy_to(name, view, bytes_are, target)) is not None:
                    made.append((target, copy))
            self._source_is_done(name, bytes_are, source, move=move)
        except BaseException:
            for target, copy in made:
                with self._open().open_at(target) as store:
                    store.remove(name, node=target.address, generation=copy.generation)
            raise

    def _copy_to(
        self, name: bytes, view: memoryview, bytes_are: tuple[int, int], target: _native.Member
    ) -> Copy | None:
        """The copy there that it made; None: the same bytes were there before. Raises for other bytes."""
        with self._open().open_at(target) as store:  # from here a put would find the copy that is here
            # The master is asked first: what it has ordered until then, this copy comes after.
            store.stat(name)
            result = store.put(name, view, node=target.address)
            copy = _own(store, name, target)
        if copy is None:
            raise NoNode(f"the node at {target.address} took no copy: {result.reason or 'it is full'}")
        if (copy.size, copy.crc32c) != bytes_are:
            raise NoNode(f"the node at {target.address} has other bytes under the key, which stay")
        return copy if result.status is PutStatus.STORED else None

    def _source_is_done(
        self, name: bytes, bytes_are: tuple[int, int], source: _native.Member, *, move: bool
    ) -> None:
        """The source still has what was copied; in a move it has it no longer. Raises when it was changed."""
        with self._open().open_at(source) as store:
            for _ in range(LOOKS_MAX):
                copy = _own(store, name, source)
                if copy is None or (copy.size, copy.crc32c) != bytes_are:
                    raise NoNode(f"the object at {source.address} was replaced or removed meanwhile")
                if not move or store.remove(name, node=source.address, generation=copy.generation):
                    return
        raise NoNode(f"the object at {source.address} changes all the time")

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
        high, low = task_id if isinstance(task_id, (tuple, list)) and len(task_id) == 2 else (None, None)
        if not isinstance(high, int) or not isinstance(low, int):
            raise TypeError(f"a task's id is two numbers, not {task_id!r:.80}")
        task = self._tasks.get((high, low))
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


def _own(store: Store, name: bytes, node: _native.Member) -> Copy | None:
    """The copy of the node that ``store`` is at."""
    one = store.stat(name, everywhere=False)
    return next((copy for copy in one.copies if copy.address == node.address), None) if one else None


def _in_one_piece(one: ObjectStat) -> None:
    """Raises Unsupported for a striped object: it is on all nodes, and no single node has a copy."""
    if one.size != one.copies[0].size:
        raise Unsupported("the object is larger than one node takes and lies on all of them")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
