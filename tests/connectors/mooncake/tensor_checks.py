"""Checks that need torch, for an interpreter that has it: ``tensor_checks.py MASTER`` prints the name of each
check and "ok" or what went wrong, as JSON. test_tensors.py runs it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any

import numpy as np
import parallel_checks
import torch
from long_waits import wait_long
from mooncake import store as names
from mooncake.engine import create_rpc_client, create_rpc_server
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from parallel_checks import axis
from tensor_kit import BAD, CHECKS, HEADER, MISS, Store, T, check, memory, refused, same


@check
def whole_tensors(store: Store) -> None:
    for i, tensor in enumerate(
        (
            T,
            T.bfloat16(),
            T.to(torch.int64),
            T > 3,
            T.t(),
            T[1:, ::2],
            torch.tensor(3.0),
            torch.zeros(0, 5),
            T.half(),
        )
    ):
        assert store.put_tensor(f"whole-{i}", tensor) == 0
        got = store.get_tensor(f"whole-{i}")
        assert same(got, tensor), (tensor, got)
        got.zero_()  # its own memory
        assert same(store.get_tensor(f"whole-{i}"), tensor)
    assert store.get_tensor("none") is None
    assert store.put_tensor("whole-0", T + 1) == 0
    assert same(store.get_tensor("whole-0"), T)
    assert store.upsert_tensor("whole-0", T + 1) == store.upsert_pub_tensor("whole-0", T + 2) == 0
    assert same(store.get_tensor("whole-0"), T + 2)
    assert store.pub_tensor("published", T, ReplicateConfig()) == 0
    assert same(store.get_tensor("published"), T)


@check
def bad_tensors(store: Store) -> None:
    for bad in (np.zeros(3), None, "text", [1.0], T.to("meta"), torch.zeros((1,) * 9)):
        assert store.put_tensor("bad", bad) < 0, bad
    assert store.is_exist("bad") == 0
    store.put("raw", b"no tensor at all" * 20)
    assert store.get_tensor("raw") is None
    store.put("short", names._serialize_tensor(T)[0][:50])
    assert store.get_tensor("short") is None
    store.put("cut", names._serialize_tensor(T)[0] + b"too little")
    assert store.get_tensor("cut") is None


@check
def batches(store: Store) -> None:
    assert store.batch_put_tensor(["b1", "b2"], [T, T * 2]) == [0, 0]
    first, none, second = store.batch_get_tensor(["b1", "none", "b2"])
    assert same(first, T)
    assert none is None
    assert same(second, T * 2)
    assert store.batch_put_tensor(["b3", "b4"], [T, 5]) == [0, BAD]
    assert store.batch_put_tensor(["b5", "b6"], [T]) == [BAD, BAD]
    assert store.batch_upsert_tensor(["b1"], [T + 1]) == store.batch_upsert_pub_tensor(["b2"], [T + 2]) == [0]
    assert store.batch_pub_tensor(["b7"], [T]) == [0]
    assert same(store.get_tensor("b1"), T + 1)
    assert store.batch_get_tensor([]) == []


@check
def in_the_callers_memory(store: Store) -> None:
    store.put_tensor("mine", T)
    array, at = memory(4096)
    assert store.register_buffer(at, 4096) == 0
    got = store.get_tensor_into("mine", at, 4096)
    assert same(got, T)
    assert got.data_ptr() == at + HEADER
    # There is one: None would say that there is not.
    assert refused(lambda: store.get_tensor_into("mine", at, HEADER + 95))
    assert refused(lambda: store.get_tensor_into("mine", 0, 4096))
    assert store.get_tensor_into("none", at, 4096) is None
    assert store.put_tensor_from("copy", at, HEADER + 96) == 0
    assert same(store.get_tensor("copy"), T)
    assert store.put_tensor_from("larger", at, 4000) == 0  # of which the header names the first part
    assert store.get_size("larger") == HEADER + 96
    assert store.put_tensor_from("bad", at + 1000, 500) == BAD
    assert store.put_tensor_from("bad", 0, 500) == BAD
    got += 1
    assert store.upsert_tensor_from("copy", at, HEADER + 96) == 0
    assert same(store.get_tensor("copy"), T + 1)
    assert store.batch_put_tensor_from(["c1", "c2"], [at, at], [HEADER + 96, 5]) == [0, BAD]
    assert store.batch_upsert_tensor_from(["c1"], [at], [HEADER + 96]) == [0]
    both = store.batch_get_tensor_into(["mine", "none"], [at, at + 2000], [1000, 1000])
    assert same(both[0], T)
    assert both[1] is None
    good, *bad = store.batch_get_tensor_into(["mine"] * 3, [at, at + 2000, 0], [1000, 100, 1000])
    assert same(good, T)
    assert bad == [None, None]
    assert store.unregister_buffer(at) == 0
    del array


@check
def shards_of_ranks(store: Store) -> None:
    assert store.put_tensor_with_tp("tp", T, tp_rank=0, tp_size=2, split_dim=1) == 0
    assert store.batch_is_exist(["tp", "tp_tp_0", "tp_tp_1"]) == [0, 1, 1]
    for rank in range(2):
        assert same(store.get_tensor_with_tp("tp", rank, 2, 1), T.chunk(2, 1)[rank])
    assert store.get_tensor_with_tp("tp") is None
    assert store.put_tensor_with_tp("one", T) == 0
    assert same(store.get_tensor_with_tp("one"), T)
    assert store.put_tensor_with_tp("bad", T, 0, 2, 5) == BAD
    assert store.put_tensor_with_tp("bad", T, 0, 4, 1) == BAD  # 6 columns make 3 chunks of 2
    assert store.put_tensor_with_tp("bad", T[:3], 0, 2, 0) == BAD
    assert store.put_tensor_with_tp("bad", T, 0, 2, -1) == BAD
    assert store.put_tensor_with_tp("bad", None, 0, 2, 0) == BAD
    assert store.is_exist("bad_tp_0") == 0
    assert store.batch_put_tensor_with_tp(["bt"], [T], 0, 2, 0) == [0]
    assert store.pub_tensor_with_tp("pt", T, ReplicateConfig(), 0, 2, 0) == 0
    assert store.batch_pub_tensor_with_tp(["bpt"], [T], ReplicateConfig(), 0, 2, 0) == [0]
    got, none = store.batch_get_tensor_with_tp(["bt", "none"], 1, 2)
    assert same(got, T[2:])
    assert none is None
    array, at = memory(4096)
    assert same(store.get_tensor_with_tp_into("bt", at, 4096, 0, 2), T[:2])
    assert same(store.batch_get_tensor_with_tp_into(["pt"], [at], [4096], 1, 2)[0], T[2:])
    store.put_tensor("whole", T)
    store.get_tensor_into("whole", at, 4096)
    assert store.put_tensor_with_tp_from("from", at, HEADER + 96, 0, 2) == 0
    assert same(store.get_tensor_with_tp("from", 1, 2), T[2:])
    assert store.batch_put_tensor_with_tp_from(["bad"], [at], [10], 0, 2) == [BAD]
    for long in ("ä" * 600, "k" * 895 + "ä" * 100):  # also by the name that a caller makes of it
        assert store.put_tensor_with_tp(long, T, 0, 2, 0) == 0
        assert same(store.get_tensor_with_tp(long, 1, 2), T[2:])
        assert same(store.get_tensor(f"{long}_tp_1"), T[2:])
    del array


@check
def straight_into_tensors(store: Store) -> None:
    """Of a GPU where there is one; here of the CPU, which takes the same way."""
    store.put_tensor("straight", T)
    into = torch.zeros(4, 6)
    assert store.get_tensor_into_cuda("straight", into) == 96
    assert same(into, T)
    wide = torch.zeros(6, 4)
    assert store.get_tensor_into_cuda("straight", wide.t()) == 96  # not contiguous
    assert same(wide.t().contiguous(), T)
    assert store.get_tensor_into_cuda("no such", into) == MISS
    for wrong in (torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.float64), None, 5):
        assert store.get_tensor_into_cuda("straight", wrong) == BAD
    assert store.batch_get_tensor_into_cuda(["straight", "no such"], [into, into]) == [96, MISS]
    assert store.batch_get_tensor_into_cuda(["straight"], []) == [BAD]
    store.put("no tensor", b"bytes")
    assert store.get_tensor_into_cuda("no tensor", into) == BAD
    # Tensors that take no bytes are a code of their own key.
    nowhere, one_row = torch.zeros(4, 6, device="meta"), torch.zeros(1, 6).expand(4, 6)
    asked = ["straight"] * 3
    assert store.batch_get_tensor_into_cuda(asked, [nowhere, one_row, into]) == [BAD, BAD, 96]


@check
def files(store: Store) -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    for i, tensor in enumerate((T, T.bfloat16(), T > 3)):
        store.put_tensor(f"file-{i}", tensor)
        assert store.save_tensor_to_safetensor(f"file-{i}", f"{folder}/t{i}") == 0
        store.remove(f"file-{i}")
        assert same(store.load_tensor_from_safetensor(f"file-{i}", f"{folder}/t{i}"), tensor)
        assert same(store.get_tensor(f"file-{i}"), tensor)
    assert store.save_tensor_to_safetensor("file-0") == 0
    assert os.path.exists(f"{folder}/file-0")
    assert same(store.load_tensor_from_safetensor(file_name=f"{folder}/t0"), T)
    assert same(store.load_tensor_from_safetensor("other", f"{folder}/t0"), T)
    assert same(store.get_tensor("other"), T)
    assert store.save_tensor_to_safetensor("none", f"{folder}/x") == -1100
    assert not os.path.exists(f"{folder}/x")
    assert store.load_tensor_from_safetensor("k", f"{folder}/none") is None
    for bad in (b"", b"garbage that is no file", b"\x02\0\0\0\0\0\0\0{}", (1 << 60).to_bytes(8, "little")):
        with open(f"{folder}/bad", "wb") as file:
            file.write(bad)
        assert store.load_tensor_from_safetensor("k", f"{folder}/bad") is None
    assert (store.is_exist("k"), store.is_exist("file-0")) == (0, 1)
    try:
        from safetensors.torch import load_file
    except ImportError:
        return
    assert same(load_file(f"{folder}/t1")["file-1"], T.bfloat16())


# Headers as the original makes them for known tensors; zeros behind.
HEADERS = {
    "f32 2x4": (
        "4e4f4f4d0100300100000000020000000000000000000000300100000000000020000000000000000200000000000000"
        "0400000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffff02000000000000000400000000000000ffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffffffffffffffffffff"
    ),
    "bf16 3": (
        "4e4f4f4d010030010c000000010000000000000000000000300100000000000006000000000000000300000000000000"
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffff0300000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffffffffffffffffffff"
    ),
    "bool 1x1x5": (
        "4e4f4f4d010030010a000000030000000000000000000000300100000000000005000000000000000100000000000000"
        "01000000000000000500000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffff010000000000000001000000000000000500000000000000ffffffffffffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffffffffffffffffffff"
    ),
    "shard 2x2 of 2x4": (
        "4e4f4f4d0100300100000000020000000100000000000000300100000000000010000000000000000200000000000000"
        "0400000000000000ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffff02000000000000000200000000000000ffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffffffffffffffffffff040000000000000000000000000000000100000003000000"
        "ffffffff0000000000000000000000000100000001000000010000000200000001000000000000000200000000000000"
        "02000000020000000200000005000000ffffffff4d000000000000000000000003000000030000000100000006000000"
        "ffffffff58000000"
    ),
}


@check
def headers_of_the_original(store: Store) -> None:
    def wanted(name: str) -> bytes:
        return bytes.fromhex(HEADERS[name]).ljust(304, b"\0")

    small = torch.arange(8.0).view(2, 4)
    assert names._serialize_tensor(small)[0] == wanted("f32 2x4")
    assert names._serialize_tensor(torch.zeros(3, dtype=torch.bfloat16))[0] == wanted("bf16 3")
    assert names._serialize_tensor(torch.zeros(1, 1, 5, dtype=torch.bool))[0] == wanted("bool 1x1x5")
    axes = parallel_checks.spread(
        axis("dp", 1, 3), axis("tp", 1, 2, 1), axis("ep", 2, 5, expert=77), axis("pp", 1, 6, stage=88)
    )
    assert store.put_tensor_with_parallelism("header", small, axes) == 0
    found = store.get("header__dp_1of3__tp_1of2_sd1__ep_2of5_eid77__pp_1of6_sid88")
    assert found == wanted("shard 2x2 of 2x4") + small[:, 2:].contiguous().numpy().tobytes()


@check
def serialized_forms(_store: Store) -> None:
    header, address, size, held = names._serialize_tensor(T)
    assert (len(header), size, held.data_ptr()) == (HEADER, 96, address)
    assert HEADER == 304
    assert same(names._deserialize_tensor(header + T.numpy().tobytes()), T)
    for bad in (b"abc", b"", header, header + b"x"):
        try:
            names._deserialize_tensor(bad)
        except ValueError:
            continue
        raise AssertionError(bad)


@check
def handles_and_tensors_as_buffers(store: Store) -> None:
    assert store.put("t", T) == 0
    assert (
        torch.frombuffer(bytearray(store.get_buffer("t")), dtype=torch.float32).tolist()
        == T.flatten().tolist()
    )


@check
def tensors_by_rpc(_store: Store) -> None:
    server, client = create_rpc_server(), create_rpc_client()
    assert server.initialize_server("127.0.0.1:0")
    assert client.initialize_client()
    got: list[Any] = []
    server.set_tensor_receive_callback(got.append)
    assert server.start_server()
    assert client.send_tensor(server.address, T.bfloat16()) == 0
    assert client.send_tensor(server.address, 5) == -1
    while not got:
        server._stop.wait(0.01)
    (one,) = got
    assert (one.dtype, one.shape, one.total_bytes) == ("bfloat16", [4, 6], 48)
    assert one.get_data_as_bytes() == T.bfloat16().view(torch.uint8).numpy().tobytes()
    server.stop_server()
    client.stop_server()


def main() -> None:
    wait_long()
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 0, "tcp", "", sys.argv[1]) == 0
    said = {}
    for name, act in CHECKS.items():
        try:
            act(store)
            said[name] = "ok"
        except Exception:
            said[name] = traceback.format_exc()
    print(json.dumps(said), flush=True)
    store.close()


if __name__ == "__main__":
    main()
