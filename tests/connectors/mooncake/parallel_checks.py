"""Checks of tensors that are spread over ranks; tensor_checks.py runs them."""

from __future__ import annotations

import torch
from mooncake.store import ParallelAxis, ReadTarget, ReplicateConfig, TensorParallelism
from tensor_kit import BAD, HEADER, Store, T, check, memory, refused, same

import moonpool


def axis(
    kind: str,
    rank: int,
    size: int,
    dim: int | None = None,
    expert: int | None = None,
    stage: int | None = None,
) -> ParallelAxis:
    made = ParallelAxis()
    made.kind, made.rank, made.size, made.split_dim = kind, rank, size, dim
    made.expert_id, made.stage_id = expert, stage
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
        (b"[", b"5", b'["2", 0]', b"[99999999999, 0]", b'[1, "x"]', b"[0, 0]", b"[[1]]", b'[["tp", 0, 2]]')
    ):
        store.put(f"strange{i}__writer_manifest", text)
        store.put(f"odd{i}__parallelism_manifest", text)
        for name in (f"strange{i}", f"odd{i}"):
            try:
                store.get_tensor_with_parallelism(name, target("full"))
                raise AssertionError(f"{text!r} was taken")
            except moonpool.InvalidArgument:
                pass
    assert store.batch_put_tensor_with_parallelism(["x", "y"], [T]) == [BAD, BAD]
    assert store.batch_put_tensor_with_parallelism(["y1", "y2"], [T, 5]) == [0, BAD]
    assert store.batch_upsert_tensor_with_parallelism(["y1"], [T + 1], [spread()]) == [BAD]
    assert store.batch_upsert_tensor_with_parallelism(["y1"], [T + 1]) == [0]
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
    first, *bad = store.batch_get_tensor_with_parallelism_into(["w"] * 2, [place, place], [4096, 100])
    assert same(first, T + 1)
    assert bad == [None]
    (second, *bad) = store.batch_get_tensor_with_parallelism(["w", "w"], [target("full"), target("nonsense")])
    assert same(second, T + 1)
    assert bad == [None]
    del array, into


# What the original makes of put_tensor_with_parallelism with these axes: the name behind the key, or -600.
LAYOUTS: list[tuple[list[ParallelAxis], str | int]] = [
    ([axis("tp", 1, 2, 1)], "_tp_1"),
    ([axis("dp", 1, 2)], "__dp_1of2"),
    ([axis("pp", 0, 2, stage=7)], "__pp_0of2_sid7"),
    ([axis("ep", 1, 2, expert=-6)], "__ep_1of2_eid-6"),
    ([axis("dp", 1, 2), axis("tp", 0, 2, 1)], "__dp_1of2__tp_0of2_sd1"),
    ([axis("tp", 0, 2, 1), axis("dp", 1, 2)], "__dp_1of2__tp_0of2_sd1"),
    ([axis("ep", 1, 2, expert=3), axis("tp", 0, 2, 0)], "__tp_0of2_sd0__ep_1of2_eid3"),
    (
        [axis("pp", 0, 2, stage=0), axis("ep", 0, 2, expert=4), axis("dp", 0, 2), axis("tp", 1, 2, 1)],
        "__dp_0of2__tp_1of2_sd1__ep_0of2_eid4__pp_0of2_sid0",
    ),
    ([axis("dp", 0, 1 << 20)], f"__dp_0of{1 << 20}"),
    ([], BAD),
    ([axis("tp", 0, 2)], BAD),
    ([axis("dp", 0, 2), axis("tp", 0, 2)], BAD),
    ([axis("dp", 0, 2, 0)], BAD),
    ([axis("pp", 0, 2, 0, stage=0)], BAD),
    ([axis("ep", 0, 2, 0, expert=1)], BAD),
    ([axis("ep", 0, 2)], BAD),
    ([axis("pp", 0, 2)], BAD),
    ([axis("tp", 0, 2, 0), axis("tp", 0, 2, 1)], BAD),
    ([axis("dp", 0, 2), axis("dp", 1, 2)], BAD),
    ([axis("dp", 0, 2), axis("tp", 0, 5, 1)], BAD),  # 6 columns make no 5 parts
    *[([axis(kind, 0, 2)], BAD) for kind in ("", "xp", "TP", "cp", "sp", "etp")],
    *[([axis("tp", rank, size, 0)], BAD) for rank, size in ((2, 2), (-1, 2), (0, 0), (0, -1))],
    *[([axis("dp", rank, size)], BAD) for rank, size in ((2, 2), (-1, 2), (0, 0), (0, -1))],
    *[([axis("tp", 0, 2, dim)], BAD) for dim in (2, -1, -3, 9)],
    *[([axis("dp", 0, 2), axis("tp", 0, 2, dim)], BAD) for dim in (2, -1, -3, 9)],
]


@check
def layouts_of_the_original(store: Store) -> None:
    held, at = memory(4096)
    store.put_tensor("whole layout", T)
    store.get_tensor_into("whole layout", at, 4096)
    size = HEADER + 96
    calls = {
        "put": lambda key, made: store.put_tensor_with_parallelism(key, T, made),
        "upsert": lambda key, made: store.upsert_tensor_with_parallelism(key, T, made),
        "batch put": lambda key, made: store.batch_put_tensor_with_parallelism([key], [T], [made])[0],
        "batch upsert": lambda key, made: store.batch_upsert_tensor_with_parallelism([key], [T], [made])[0],
        "put from": lambda key, made: store.put_tensor_with_parallelism_from(key, at, size, made),
        "upsert from": lambda key, made: store.upsert_tensor_with_parallelism_from(key, at, size, made),
        "batch put from": lambda key, made: store.batch_put_tensor_with_parallelism_from(
            [key], [at], [size], [made]
        )[0],
        "batch upsert from": lambda key, made: store.batch_upsert_tensor_with_parallelism_from(
            [key], [at], [size], [made]
        )[0],
    }
    for form, put in calls.items():
        for i, (axes, wanted) in enumerate(LAYOUTS):
            key, made = f"layout {form} {i}", spread(*axes)
            code = put(key, made)
            told = f"{form} {axes}: {code}"
            if isinstance(wanted, int):
                assert code == wanted, told
                assert store.remove_by_regex(f"^{key}_") == 0, told
                continue
            assert code == 0, told
            cut = next((one for one in axes if one.kind == "tp"), None)
            is_shard_input = len(axes) == 1 and "from" not in form
            part = T if cut is None or is_shard_input else T.chunk(cut.size, cut.split_dim)[cut.rank]
            assert same(store.get_tensor(key + wanted), part), told
            assert same(store.get_tensor_with_parallelism(key, target("shard", made)), part), told
    del held


@check
def tensor_parallelism_among_several_axes(store: Store) -> None:
    """Each rank gives the whole tensor; the shard of its tensor-parallel rank is stored."""
    get = store.get_tensor_with_parallelism
    ranks = [spread(axis("dp", 1, 2), axis("tp", rank, 2, 1)) for rank in range(2)]
    for made in ranks:
        assert store.put_tensor_with_parallelism("several", T, made) == 0
    for rank, made in enumerate(ranks):
        assert same(get("several", target("shard", made)), T.chunk(2, 1)[rank])
        assert same(get("several", target("full", made)), T)
    assert same(get("several", target("full", spread(axis("dp", 1, 2)))), T)
    finer = spread(axis("dp", 1, 2), axis("tp", 5, 6, 1))
    assert same(get("several", target("shard", finer)), T[:, 5:])
    assert same(get("several", target("shard", spread(axis("dp", 1, 2), axis("tp", 0, 1, 1)))), T)
    assert get("several", target("full", spread(axis("dp", 0, 2)))) is None  # no such replica
    # Experts are different tensors.
    for expert in (3, 4):
        for rank in range(2):
            made = spread(axis("tp", rank, 2, 0), axis("ep", expert - 3, 2, expert=expert))
            assert store.upsert_tensor_with_parallelism("experts", T * expert, made) == 0
    for expert in (3, 4):
        one = spread(axis("ep", expert - 3, 2, expert=expert))
        assert same(get("experts", target("full", one)), T * expert)
    assert get("experts", target("full")) is None  # of which expert?
    # From memory: the shards of all ranks, of the whole tensor.
    array, at = memory(4096)
    store.put_tensor("source", T)
    store.get_tensor_into("source", at, 4096)
    assert store.put_tensor_with_parallelism_from("from several", at, 4096, ranks[0]) == 0
    assert same(get("from several", target("shard", ranks[1])), T.chunk(2, 1)[1])
    assert store.put_tensor_with_parallelism_from("from one", at, 4096, spread(axis("tp", 0, 2, 1))) == 0
    assert same(store.get_tensor("from one_tp_1"), T.chunk(2, 1)[1])
    # Memory that has a shard by its header is that shard, and no other.
    shard = store.get_tensor_into("from one_tp_1", at, 4096)
    assert same(shard, T.chunk(2, 1)[1])
    put_from = store.put_tensor_with_parallelism_from
    assert put_from("back", at, 4096, spread(axis("tp", 0, 2, 1))) == BAD
    assert put_from("back", at, 4096, spread(axis("tp", 1, 2, 1))) == 0
    assert same(store.get_tensor("back_tp_1"), T.chunk(2, 1)[1])
    # One bad row among good ones.
    bad = spread(axis("ep", 0, 2))
    rows = [ranks[0], bad, ranks[1]]
    for i, put in enumerate(
        (store.batch_put_tensor_with_parallelism, store.batch_upsert_tensor_with_parallelism)
    ):
        names = [f"row {i} {n}" for n in range(3)]
        assert put(names, [T] * 3, rows) == [0, BAD, 0]
        assert same(get(names[2], target("shard", ranks[1])), T.chunk(2, 1)[1])
        assert put([*names[:2], "row x"], [T, T, T[:, :5]], [ranks[0], bad, ranks[0]]) == [0, BAD, BAD]
    # put_tensor_with_tp() stores the same shards.
    assert store.put_tensor_with_tp("by tp", T, 0, 2, 1) == 0
    assert same(get("by tp", target("full")), T)
    assert same(get("by tp", target("shard", spread(axis("tp", 1, 2, 1)))), T.chunk(2, 1)[1])
    assert same(get("by tp", target("shard", spread(axis("tp", 2, 3, 1)))), T[:, 4:])
    del array


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
