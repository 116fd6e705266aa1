"""Checks that need torch, for an interpreter that has it: ``tensor_checks.py MASTER`` prints the name of each
check and "ok" or what went wrong, as JSON. test_tensors.py runs it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mooncake import store as names
from mooncake.engine import create_rpc_client, create_rpc_server
from mooncake.store import (
    MooncakeDistributedStore,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

import moonpool

Store = MooncakeDistributedStore
T = torch.arange(24, dtype=torch.float32).reshape(4, 6)
HEADER = names._tensor_metadata_size()
CHECKS: dict[str, Callable[[Store], None]] = {}
BAD, MISS = -600, -704


def check(act: Callable[[Store], None]) -> Callable[[Store], None]:
    CHECKS[act.__name__] = act
    return act


def same(one: Any, other: torch.Tensor) -> bool:
    return (
        one is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and bool((one == other).all())
    )


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except moonpool.InvalidArgument:
        return True
    return False


def memory(nbytes: int) -> tuple[Any, int]:
    array = np.zeros(nbytes, np.uint8)
    return array, array.ctypes.data


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
    assert store.put_tensor_from("bad", at, HEADER + 97) == BAD
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
    assert store.put_tensor_with_tp("bad", None, 0, 2, 0) == BAD
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


def axis(kind: str, rank: int, size: int, dim: int | None = None) -> ParallelAxis:
    made = ParallelAxis()
    made.kind, made.rank, made.size, made.split_dim = kind, rank, size, dim
    return made


def spread(*axes: ParallelAxis) -> TensorParallelism:
    made = TensorParallelism()
    made.axes = list(axes)
    return made


def target(mode: str, parallelism: TensorParallelism | None = None) -> ReadTarget:
    made = ReadTarget()
    assert (made.mode, made.parallelism) == ("as_stored", None)
    made.mode, made.parallelism = mode, parallelism
    return made


@check
def spread_tensors(store: Store) -> None:
    """Each rank writes its shard; others read theirs, cut as it was and cut anew, or the whole."""
    for rank, shard in enumerate(T.chunk(2, 0)):
        assert store.put_tensor_with_parallelism("par", shard, spread(axis("tp", rank, 2, 0))) == 0
    get = store.get_tensor_with_parallelism
    assert get("par") is None
    assert same(get("par", target("full")), T)
    assert same(get("par", target("as_stored", spread(axis("tp", 1, 2, 0)))), T[2:])
    assert same(get("par", target("shard", spread(axis("tp", 1, 2, 0)))), T[2:])
    assert same(get("par", target("shard", spread(axis("tp", 3, 4, 0)))), T[3:])
    assert same(get("par", target("shard", spread(axis("tp", 1, 3, 1)))), T.chunk(3, 1)[1])
    assert refused(lambda: get("par", target("shard", spread(axis("tp", 0, 5, 0)))))  # 4 rows make no 5
    assert refused(lambda: get("par", target("nonsense")))
    assert get("none", target("full")) is None
    assert store.put_tensor_with_parallelism("plain", T) == 0
    assert same(get("plain"), T)
    assert same(get("plain", target("shard", spread(axis("tp", 0, 2, 0)))), T[:2])
    # Two cuts and a stage.
    for row, rows in enumerate(T.chunk(2, 0)):
        for column, piece in enumerate(rows.chunk(3, 1)):
            axes = spread(axis("pp", 1, 2), axis("tp", row, 2, 0), axis("tp", column, 3, 1))
            assert store.upsert_tensor_with_parallelism("grid", piece.contiguous(), axes) == 0
    assert same(get("grid", target("full", spread(axis("pp", 1, 2)))), T)
    assert get("grid", target("full", spread(axis("pp", 0, 2)))) is None
    many = store.batch_get_tensor_with_parallelism(["par", "none"], [target("full"), target("full")])
    assert same(many[0], T)
    assert many[1] is None


@check
def spread_tensors_badly(store: Store) -> None:
    put = store.put_tensor_with_parallelism
    assert put("x", T, spread(axis("tp", 2, 2, 0))) == BAD
    assert put("x", T, spread(axis("", 0, 2, 0))) == BAD
    assert put("x", None, spread(axis("tp", 0, 2, 0))) == BAD
    assert put("x", T, None, ReplicateConfig(), "a partition") == BAD
    # A list of parts that somebody else wrote.
    for i, text in enumerate(
        (b"[", b"5", b'["2", 0]', b"[99999999999, 0]", b'[1, "x"]', b"[0, 0]", b"[[1]]")
    ):
        store.put(f"strange{i}__writer_manifest", text)
        store.put(f"odd{i}_parallelism", text)
        for name in (f"strange{i}", f"odd{i}") if text != b"[0, 0]" else (f"strange{i}",):
            try:
                store.get_tensor_with_parallelism(name, target("full"))
                raise AssertionError(f"{text!r} was taken")
            except moonpool.InvalidArgument:
                pass
    assert store.batch_put_tensor_with_parallelism(["x", "y"], [T]) == [BAD, BAD]
    assert store.batch_put_tensor_with_parallelism(["y1", "y2"], [T, 5]) == [0, BAD]
    assert store.batch_upsert_tensor_with_parallelism(["y1"], [T + 1], [spread()]) == [0]
    array, at = memory(4096)
    store.get_tensor_into("y1", at, 4096)
    size = HEADER + 96
    assert store.put_tensor_with_parallelism_from("z", at, size, spread(axis("tp", 0, 1, 0))) == 0
    assert same(store.get_tensor_with_parallelism("z", target("full")), T + 1)
    assert store.upsert_tensor_with_parallelism_from("z", at, size) == 0
    assert store.batch_put_tensor_with_parallelism_from(["w", "v"], [at, 0], [size, 5]) == [0, BAD]
    assert store.batch_upsert_tensor_with_parallelism_from(["w"], [at], [size]) == [0]
    into, place = memory(4096)
    got = store.get_tensor_with_parallelism_into("w", place, 4096)
    assert same(got, T + 1)
    assert got.data_ptr() == place + HEADER
    assert refused(lambda: store.get_tensor_with_parallelism_into("w", place, 100))
    assert store.batch_get_tensor_with_parallelism_into(["none"], [place], [4096]) == [None]
    del array, into


class Partition:
    """As callers make one: any object with these three."""

    def __init__(self, rank: int, size: int, split_dim: int) -> None:
        self.rank, self.size, self.split_dim = rank, size, split_dim


@check
def parts_of_writers(store: Store) -> None:
    """Each writer has the whole tensor and stores its part; nobody reads before all have."""
    put, get = store.put_tensor_with_parallelism, store.get_tensor_with_parallelism
    assert put("written", T, writer_partition=Partition(0, 3, 1)) == 0
    assert get("written", target("full")) is None
    assert store.is_exist("written__writer_0of3_sd1") == 1
    for rank in (1, 2):
        assert put("written", T, writer_partition=Partition(rank, 3, 1)) == 0
    assert same(get("written", target("full")), T)
    assert same(get("written", target("shard", spread(axis("tp", 1, 2, 0)))), T[2:])
    assert same(get("written"), T)  # by the name that others store it under
    assert put("written", T, writer_partition=Partition(0, 2, 1)) == BAD  # another cut: nobody would find it
    assert store.is_exist("written__writer_0of2_sd1") == 0
    # Each part is an object of its own: between two writers' upserts there are old and new ones (docs).
    assert store.upsert_tensor_with_parallelism("written", T + 1, writer_partition=Partition(0, 3, 1)) == 0
    assert same(get("written", target("full")), torch.cat([T[:, :2] + 1, T[:, 2:]], 1))
    both = [Partition(0, 1, 0)] * 2
    assert store.batch_put_tensor_with_parallelism(["w1", "w2"], [T, T], writer_partitions=both) == [0, 0]
    assert same(get("w2", target("full")), T)
    assert store.batch_put_tensor_with_parallelism(["w3"], [T], writer_partitions=both) == [BAD]
    array, at = memory(4096)
    store.put_tensor("as it is", T)
    store.get_tensor_into("as it is", at, 4096)
    for rank in (0, 1):
        put_from = store.put_tensor_with_parallelism_from
        assert put_from("from", at, HEADER + 96, writer_partition=Partition(rank, 2, 0)) == 0
    assert same(get("from", target("full")), T)
    bad = [
        Partition(2, 2, 0),
        Partition(-1, 2, 0),
        Partition(0, 0, 0),
        Partition(0, 2, 5),
        Partition(0, 5, 0),
    ]
    bad += [Partition(0, 3, 0), Partition("0", 2, 0), object(), 5, (0, 2, 0)]  # type: ignore[arg-type, list-item]
    assert [put("bad", T, writer_partition=one) for one in bad] == [BAD] * len(bad)
    assert put("bad", T, spread(axis("tp", 0, 2, 0)), ReplicateConfig(), Partition(0, 2, 0)) == BAD
    assert put("bad", None, writer_partition=Partition(0, 2, 0)) == BAD
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
    assert store.is_exist("k") == 0
    try:
        from safetensors.torch import load_file
    except ImportError:
        return
    assert same(load_file(f"{folder}/t1")["file-1"], T.bfloat16())


@check
def serialized_forms(_store: Store) -> None:
    header, address, size, held = names._serialize_tensor(T)
    assert (len(header), size, held.data_ptr()) == (HEADER, 96, address)
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
