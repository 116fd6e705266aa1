"""An L2 adapter of LMCache's server, driven as its controllers do; in this process, or (as a program) in
another: ``l2.py FD`` reads calls from stdin and answers on the descriptor FD, a JSON each line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

SHAPE = torch.Size([2, 4, 16, 64])
NATIVE = {
    "type": "native_plugin",
    "module_path": "moonpool.connectors.lmcache.native",
    "class_name": "MoonpoolClient",
    "adapter_params": {"form": "bfloat16"},
}
BY_NAME = {"type": "moonpool"}
BY_PATH = {
    "type": "plugin",
    "module_path": "moonpool.connectors.lmcache.adapter",
    "class_name": "MoonpoolL2Adapter",
    "adapter_params": {},
}


def key(number: int, **other: Any) -> ObjectKey:
    """other: fields in the place of the usual ones."""
    usual: dict[str, Any] = {"model_name": "org/model", "kv_rank": 0x01000100}
    return ObjectKey(number.to_bytes(8, "little"), **{**usual, **other})


def memory(number: int | None, dtype: str = "bfloat16", shape: torch.Size = SHAPE) -> TensorMemoryObj:
    """Bytes that are this number's own; None: zeros."""
    raw = torch.zeros(shape.numel(), dtype=torch.int16)
    if number is not None:
        generator = torch.Generator().manual_seed(number)
        raw = torch.randint(0, 1 << 15, (shape.numel(),), dtype=torch.int16, generator=generator)
    kind = getattr(torch, dtype)
    raw = raw.view(torch.uint8)[: shape.numel() * kind.itemsize]
    meta = MemoryObjMetadata(
        shape, kind, raw.data_ptr(), raw.nbytes, 1, fmt=MemoryFormat.KV_2LTD, shapes=[shape], dtypes=[kind]
    )
    return TensorMemoryObj(raw, meta, parent_allocator=None)


class L2:
    """One adapter; every call has a deadline. ``chunk_tokens``: of its server; ``keys``: fields of its keys,
    in the place of the usual ones."""

    def __init__(
        self,
        spec: dict[str, Any],
        chunk_tokens: int = SHAPE[2],
        timeout_s: float = 30,
        keys: dict[str, Any] | None = None,
    ) -> None:
        config = get_l2_adapter_config_class(spec["type"]).from_dict(spec)
        self.adapter = create_l2_adapter(config)
        self.shape = torch.Size([*SHAPE[:2], chunk_tokens, SHAPE[3]])
        self.timeout_s = timeout_s
        self.fields = keys or {}

    def keys(self, numbers: Sequence[int]) -> list[ObjectKey]:
        return [key(number, **self.fields) for number in numbers]

    def _wait(self, fd: int) -> None:
        assert select.select([fd], [], [], self.timeout_s)[0], f"nothing ended within {self.timeout_s} s"
        os.eventfd_read(fd)

    def store(self, numbers: Sequence[int], dtype: str = "bfloat16") -> tuple[bool, int]:
        """Whether it went well, and the bytes that were new."""
        objects = [memory(number, dtype, self.shape) for number in numbers]
        task = self.adapter.submit_store_task(self.keys(numbers), objects)
        self._wait(self.adapter.get_store_event_fd())
        result = self.adapter.pop_completed_store_tasks()[task]
        return result.is_successful(), result.bytes_transferred()

    def lookup(self, numbers: Sequence[int], dtype: str | None = "bfloat16") -> list[bool]:
        """Locks what it finds."""
        group = self.fields.get("object_group_id", 0)
        layouts = {} if dtype is None else {group: MemoryLayoutDesc([self.shape], [getattr(torch, dtype)])}
        task = self.adapter.submit_lookup_and_lock_task(self.keys(numbers), layouts)
        self._wait(self.adapter.get_lookup_and_lock_event_fd())
        found = self.adapter.query_lookup_and_lock_result(task)
        assert self.adapter.query_lookup_and_lock_result(task) is None
        return [found.test(i) for i in range(len(numbers))]

    def give_up(self, numbers: Sequence[int]) -> None:
        """A lookup whose answer nobody takes."""
        layouts = {0: MemoryLayoutDesc([self.shape], [torch.bfloat16])}
        self.adapter.submit_lookup_and_lock_task(self.keys(numbers), layouts)
        self._wait(self.adapter.get_lookup_and_lock_event_fd())

    def load(self, numbers: Sequence[int], dtype: str = "bfloat16") -> list[bool]:
        """Looks at the bytes of what came."""
        objects = [memory(None, dtype, self.shape) for _ in numbers]
        task = self.adapter.submit_load_task(self.keys(numbers), objects)
        self._wait(self.adapter.get_load_event_fd())
        found = self.adapter.query_load_result(task)
        assert self.adapter.query_load_result(task) is None
        loaded = [found.test(i) for i in range(len(numbers))]
        for number, one, came in zip(numbers, objects, loaded, strict=True):
            if came:
                wanted = memory(number, dtype, self.shape)
                assert torch.equal(one.raw_data, wanted.raw_data), f"{number} has other bytes"
        return loaded

    def unlock(self, numbers: Sequence[int]) -> None:
        self.adapter.submit_unlock(self.keys(numbers))

    def delete(self, numbers: Sequence[int]) -> None:
        self.adapter.delete(self.keys(numbers))

    def close(self) -> None:
        self.adapter.close()


class L2Process:
    """Adapters in another process, one after the other; it is killed at the end."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(writer)],
            stdin=subprocess.PIPE,
            pass_fds=[writer],
            text=True,
        )
        os.close(writer)
        self.answers = os.fdopen(reader)

    def open(self, spec: dict[str, Any]) -> L2Process:
        """An adapter in the place of the one before, in this test's environment."""
        ours = {name: value for name, value in os.environ.items() if name.startswith("MOONPOOL_")}
        self.call("open", spec, ours)
        return self

    def tell(self, what: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def call(self, what: str, *arguments: Any) -> Any:
        self.tell(what, *arguments)
        assert select.select([self.answers], [], [], 60)[0], "no answer within 60 s"
        line = self.answers.readline()
        assert line, f"it ended with {self.process.wait(10)}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.answers.close()


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        adapter = None
        for line in sys.stdin:
            what, arguments = json.loads(line)
            if what == "open":
                spec, environment = arguments
                if adapter is not None:
                    adapter.close()
                os.environ.update(environment)
                adapter, answer = L2(spec), None
            else:
                answer = getattr(adapter, what)(*arguments)
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
