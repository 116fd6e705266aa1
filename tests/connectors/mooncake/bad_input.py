"""Calls every method of a store and of an engine with one argument that cannot be meant: ``bad_input.py
MASTER``. Each says so, by a code or an exception; none ends the process, none changes what is there.

Good arguments come from GOOD by the name of the parameter, bad ones from BAD.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from long_waits import wait_long
from mooncake.engine import TransferEngine, TransferOpcode
from mooncake.store import MooncakeDistributedStore, ReadTarget, ReplicateConfig

import moonpool

faulthandler.enable()
faulthandler.dump_traceback_later(90, exit=True)

ARRAY = np.zeros(4096, np.uint8)
AT = ARRAY.ctypes.data
THING = object()
# ---- of a parameter: what a call works with, and what it must refuse

NO_KEY = [5, None, THING, "", "k" * 70_000, "\ud800", 1.5, [], ["k"]]
NO_KEYS = [5, None, THING, "key", b"key", *([one] for one in NO_KEY)]
NO_PLACE = [None, "x", THING, -1, 0, 1, 1 << 62, 1 << 64, 1.5, True, [], [AT]]
NO_SIZE = [None, "8", THING, -1, 0, 1 << 62, 1 << 64, 1.5, []]
NO_BYTES = ["text", None, 5, THING, [], [b"x"], b""]
NO_OFFSET = [None, "0", THING, -1, 1 << 20, 1 << 64, 1.5]
NO_NUMBERS = [None, 5, THING, "x", []]


def lists(values: list[Any]) -> list[Any]:
    return [[one] for one in values]


BAD: dict[str, list[Any]] = {
    "key": NO_KEY,
    "keys": NO_KEYS,
    "base_keys": NO_KEYS,
    "value": NO_BYTES,
    "values": [5, None, *lists(NO_BYTES), [], [b"x", b"y"]],
    "buffer_ptr": NO_PLACE,
    "metadata_buffer_ptr": NO_PLACE,
    "size": NO_SIZE,
    "metadata_size": NO_SIZE,
    "buffer_ptrs": [*NO_NUMBERS, *lists(NO_PLACE), [AT, AT]],
    "sizes": [*NO_NUMBERS, *lists(NO_SIZE), [8, 8]],
    "all_buffer_ptrs": [*NO_NUMBERS, [5], [None], *lists(lists(NO_PLACE)), [[AT, AT]], [[AT], [AT]]],
    "all_sizes": [*NO_NUMBERS, [5], [None], *lists(lists(NO_SIZE)), [[8, 8]], [[8], [8]]],
    "all_src_offsets": [*NO_NUMBERS, [5], *lists(lists(NO_OFFSET)), [[0, 0]]],
    "all_dst_offsets": [*NO_NUMBERS, [5], *lists(lists(NO_OFFSET)), [[0, 0]]],
    "config": [None, 5, "x", {}, THING],
    "regex_pattern": ["(", "", None, 5, THING],
    "tensor": [None, 5, "x", THING, b"x"],
    "tensors_list": [5, None, [None], [5], [], [None, None]],
    "segment_ids": [["x"], ["1-2"], 5, None, [None], [5]],
    "target_hostname": ["", "x", "host:", ":1", "127.0.0.1:1", 5, None, THING],
    "peer_server_name": ["", "x", "host:", "127.0.0.1:1", 5, None, THING],
    "segment_name": ["", "x", "127.0.0.1:1", 5, None, THING],
    "buffer": [None, "x", THING, -1, 1, 1 << 62, 1 << 64, 1.5],
    "peer_buffer_address": [None, "x", THING, -1, 1, 1 << 62, 1 << 64, 1.5],
    "length": [None, "8", THING, -1, 1 << 62, 1 << 64, 1.5],
    "buffers": [None, 5, THING, *lists([None, "x", -1, 1, 1 << 62, 1 << 64]), [], [AT, AT]],
    "peer_buffer_addresses": [None, 5, THING, *lists([None, "x", -1, 1, 1 << 62, 1 << 64]), [], [AT, AT]],
    "lengths": [None, 5, THING, *lists([None, "8", -1, 1 << 62, 1 << 64]), [], [8, 8]],
    "opcode": [None, 5, "write", THING],
    "buffer_addr": NO_PLACE,
    "capacity": NO_SIZE,
    "buffer_addresses": [None, 5, *lists(NO_PLACE), [AT, AT]],
    "capacities": [None, 5, *lists(NO_SIZE), [8, 8]],
    "batch_id": [None, "x", THING, 1 << 40],
    "batch_ids": [None, 5, ["x"], [THING], [1 << 40]],
    "address": [None, "x", THING, -1, 1, 1 << 62, 1 << 64],
    "data": [None, 5, THING, ""],
    "notify": [5, "x", THING],
}
GOOD: dict[str, Any] = {
    "key": "new", "keys": ["new"], "base_keys": ["new"], "value": b"v", "values": [b"v"], "size": 8,
    "sizes": [8],
    "buffer_ptr": AT, "buffer_ptrs": [AT], "metadata_buffer_ptr": AT, "metadata_size": 8,
    "all_buffer_ptrs": [[AT]], "all_sizes": [[8]], "all_src_offsets": [[0]], "all_dst_offsets": [[0]],
    "tensor": None, "tensors_list": [None], "regex_pattern": "^none$", "segment_ids": ["1-2"],
    "targets": ["127.0.0.1:1"], "all_keys": [["held"]], "file_name": "/no/such/file", "target": ReadTarget(),
    "config": ReplicateConfig(), "opcode": TransferOpcode.Write, "buffer": AT, "peer_buffer_address": AT,
    "length": 8, "buffers": [AT], "peer_buffer_addresses": [AT], "lengths": [8], "buffer_addr": AT,
    "capacity": 8, "buffer_addresses": [AT], "capacities": [8], "batch_id": 1, "batch_ids": [1],
    "address": AT, "data": "12345678", "target_hostname": "127.0.0.1:1", "peer_server_name": "127.0.0.1:1",
    "segment_name": "127.0.0.1:1", "notify": None, "tp_rank": 0, "tp_size": 1, "split_dim": 0,
}  # fmt: skip
# What is made by something else than a call with arguments, or has a test of its own for them.
APART = {
    "setup", "setup_dummy", "init_all", "initialize", "initialize_ext", "close", "get_local_topology",
    "query_task", "mount_segment",
    "allocate_and_mount_segment", "alloc_from_mem_pool", "batch_get_tensor_with_parallelism",
    "batch_get_tensor_with_parallelism_into", "batch_replica_clear",
}  # fmt: skip


NO_PLACE_BEHIND = [None, "0", THING, -1, -16, 1 << 47, 1 << 64, 1.5]  # what is no registered buffer
NO_SEGMENT = [None, 5, THING, "", "x", "127.0.0.1:1", b"127.0.0.1:1"]
# Where a name means something else than elsewhere: the bad values and the good ones of these methods.
OTHERWISE: dict[str, tuple[dict[str, list[Any]], dict[str, Any]]] = {
    "get_into_ranges": (
        {
            "buffer_ptrs": BAD["buffer_ptrs"],
            "all_keys": [None, 5, THING, [5], [None], *lists(NO_KEYS), [["held", "held"]]],
            "all_dst_offsets": [None, 5, [None], [[5]], *([[[one]]] for one in NO_PLACE_BEHIND), [[[0, 0]]]],
            "all_src_offsets": [None, 5, [None], *lists(BAD["all_src_offsets"])],
            "all_sizes": [None, 5, [None], *lists(BAD["all_sizes"])],
        },
        {
            "buffer_ptrs": [AT],
            "all_keys": [["held"]],
            "all_dst_offsets": [[[0]]],
            "all_src_offsets": [[[0]]],
            "all_sizes": [[[8]]],
        },
    ),
    "create_copy_task": (
        {"key": NO_KEY, "targets": [*NO_NUMBERS, *lists(NO_SEGMENT), "127.0.0.1:1"]},
        {"key": "held", "targets": ["127.0.0.1:1"]},
    ),
    "create_move_task": (
        {"key": NO_KEY, "source": NO_SEGMENT, "target": NO_SEGMENT},
        {"key": "held", "source": "127.0.0.1:1", "target": "127.0.0.1:1"},
    ),
}


def refuses(answer: Any, method: str, thing: Any) -> bool:
    """A code below 0, or nothing: a read of a bad key is a miss, the number of no transfer is 0."""
    if method in ("is_exist", "batch_is_exist", "batch_get_session_end") and answer in (0, [0]):
        return True
    if isinstance(answer, bytes):
        return not answer
    if method.endswith("_task"):
        return answer[1] < 0
    if isinstance(answer, (list, tuple)):
        return all(refuses(one, method, thing) for one in answer)
    if isinstance(answer, dict):
        return not answer or refuses(answer["ret"], method, thing)
    if answer is None:
        return "get_" in method or "load_" in method
    if "async" in method or "submit" in method:
        return answer == 0 or thing.get_batch_transfer_status([answer]) < 0
    if method in ("get_first_buffer_address", "allocate_managed_buffer"):
        return answer == 0
    return isinstance(answer, int) and answer < 0


def calls(method: Any) -> Iterator[tuple[str, Any, dict[str, Any], list[Any]]]:
    """(parameter, its bad value, the arguments by keyword, those by position)"""
    parameters = list(inspect.signature(method).parameters.values())
    known_bad, known_good = OTHERWISE.get(method.__name__, (BAD, GOOD))
    for bad in parameters:
        for value in known_bad.get(bad.name, ()):
            names: dict[str, Any] = {}
            places: list[Any] = []
            for one in parameters:
                if one.kind is one.VAR_POSITIONAL or (
                    one.name not in known_good and one.default is not one.empty
                ):
                    continue
                given = value if one is bad else known_good[one.name]
                if one.kind is one.POSITIONAL_ONLY:
                    places.append(given)
                else:
                    names[one.name] = given
            yield bad.name, value, names, places


def try_all(thing: Any, when: str) -> list[str]:
    """What was taken, or ended in an exception that is no answer."""
    wrong = []
    for name, method in inspect.getmembers(thing, callable):
        if name.startswith("_") or name in APART or inspect.isclass(method):
            continue
        for parameter, value, names, places in calls(method):
            told = f"{type(thing).__name__}.{name}({parameter}={value!r:.40}) {when}"
            try:
                answer = method(*places, **names)
            except (TypeError, moonpool.Error):
                continue
            except Exception as error:
                wrong.append(f"{told} raised {error!r:.200}")
                continue
            if not refuses(answer, name, thing):
                wrong.append(f"{told} = {answer!r:.80}")
    return wrong


def main() -> None:
    wait_long()
    store = MooncakeDistributedStore()
    wrong = try_all(store, "before setup()")
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", sys.argv[1]) == 0
    assert store.put("held", b"12345678") == 0
    for segments in OTHERWISE["create_copy_task"][1], OTHERWISE["create_move_task"][1]:
        segments.update({name: store.get_hostname() for name in segments if name == "source"})
    wrong += try_all(store, "when set up")
    assert store.get("held") == b"12345678"
    assert store.is_exist("new") == 0
    assert store.register_buffer(AT, 4096) == 0
    wrong += try_all(store, "with a buffer")
    assert store.unregister_buffer(AT) == 0
    assert store.get("held") == b"12345678"
    store.close()
    wrong += try_all(store, "after close()")
    engine = TransferEngine()
    wrong += try_all(engine, "before initialize()")
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    GOOD["target_hostname"] = GOOD["peer_server_name"] = GOOD["segment_name"] = (
        f"127.0.0.1:{engine.get_rpc_port()}"
    )
    wrong += try_all(engine, "when initialized")
    assert engine.register_memory(AT, 4096) == 0
    wrong += try_all(engine, "with memory")
    assert not ARRAY.any()
    print("\n".join(wrong), flush=True)
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
