"""Calls every method of a store before setup() and after close(): codes or moonpool.Closed, and no crash."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReadTarget

import moonpool

BUFFER = np.zeros(4096, np.uint8)
POINTER = BUFFER.ctypes.data
# What answers without a store. The others return a code below 0 (or nothing but such codes), or raise Closed.
FREE = {
    "alloc_from_mem_pool", "close", "get_hostname", "health_check", "query_task", "get_tensor_into_cuda",
    "batch_get_tensor_into_cuda", "mount_segment", "create_move_task", "setup", "setup_dummy", "init_all",
}  # fmt: skip
VALUES: dict[str, Any] = {
    "key": "k", "keys": ["k"], "base_keys": ["k"], "value": b"v", "values": [b"v"], "size": 8, "sizes": [8],
    "buffer_ptr": POINTER, "buffer_ptrs": [POINTER], "metadata_buffer_ptr": POINTER, "metadata_size": 8,
    "all_buffer_ptrs": [[POINTER]], "all_sizes": [[8]], "all_src_offsets": [[0]], "all_dst_offsets": [[0]],
    "tensor": None, "tensors_list": [None], "regex_pattern": "k", "segment_ids": ["1-2"],
    "targets": ["127.0.0.1:1"], "all_keys": [["k"]], "file_name": "/tmp/no/such/file", "target": ReadTarget(),
}  # fmt: skip
RANGES = {"all_dst_offsets": [[[0]]], "all_src_offsets": [[[0]]], "all_sizes": [[[8]]]}


def says_so(answer: Any) -> bool:
    if isinstance(answer, dict):
        return says_so(answer["ret"])
    if isinstance(answer, tuple):
        return says_so(answer[-1])
    if isinstance(answer, list):
        return all(map(says_so, answer))
    return isinstance(answer, int) and answer < 0


def call_all(store: MooncakeDistributedStore, when: str) -> None:
    for name, method in inspect.getmembers(store, callable):
        if name.startswith("_") or name in FREE:
            continue
        values = VALUES | (RANGES if name == "get_into_ranges" else {})
        arguments = [
            values[p.name] for p in inspect.signature(method).parameters.values()
            if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        ]  # fmt: skip
        if "parts" in name:
            arguments.append(b"v")
        try:
            answer = method(*arguments)
        except moonpool.Closed:
            continue
        assert says_so(answer), f"{name} {when}: {answer!r}"


made = MooncakeDistributedStore()
call_all(made, "before setup()")
assert made.health_check() == 1
assert made.get_hostname() == ""
assert made.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", sys.argv[1]) == 0
assert made.put("k", b"v") == 0
assert made.close() == 0
assert made.close() == 0
call_all(made, "after close()")
assert made.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", sys.argv[1]) == 0
assert made.get("k") == b""
made.close()
