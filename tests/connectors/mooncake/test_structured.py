"""`mooncake.structured_object_store`: the answers of the original to the same calls, and what is ours alone.

structured_answers.txt has JSON: an expression in the names of structured_kit.py, and what the wheel of
0.3.13.post1 answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mooncake import _bundle_store
from mooncake.store import ReplicateConfig
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    export_ref,
    import_ref,
    raw_destination,
)

from tests.connectors.mooncake.structured_kit import A, DataProto, Kit, answer, column, samples
from tests.core.master_bed import MasterProcess

SCRIPT = Path(__file__).with_name("structured_checks.py")
LINES = Path(__file__).with_name("structured_answers.txt").read_text().splitlines()
CALLS: list[tuple[str, Any]] = [(expression, given) for expression, given in map(json.loads, LINES)]
# Ours differs on purpose. What is refused there, and has an answer here:
ALLOWED = {
    "put(DP({}, {'f': O({1: 2}, {3: 4})}, {}))",  # stored there, and not to be read
    "get(rows=slice(3, 1))",  # no rows
    "get(rows=slice(0, 4, 2))",
    "get(rows=np.array([1, 2]))",
    "whole({'a': A}, policy=m.BundleTransferPolicy(copy_mode='zero_copy'))",
}
EMPTY = {"array": "|u1", "shape": [0], "values": []}
KEPT: dict[str, Any] = {
    "get(rows=[True, False])": {"raises": "TypeError"},  # a mask of rows; rows 1 and 0 there
    "whole({'e': np.zeros((0, 3)), 'n': b''})": {  # bytes are arrays; these are bytes there
        "e": {"array": "<f8", "shape": [0, 3], "values": []},
        "n": EMPTY,
    },
}


class Plain:
    """A store with the four methods that are needed. ``refuse``: the code of a put or a remove of a key."""

    def __init__(self, refuse: Callable[[str, str], int] = lambda verb, key: 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.written: list[str] = []
        self.read: list[str] = []
        self.configs: list[Any] = []
        self.refuse = refuse

    def put(self, key: str, value: Any, config: Any = None) -> int:
        code = self.refuse("put", key)
        if code == 0:
            self.objects[key] = bytes(value)
            self.written.append(key)
            self.configs.append(config)
        return code

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return self.objects.get(key, b"")

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def remove(self, key: str, force: bool = False) -> int:
        code = self.refuse("remove", key)
        if code == 0 and self.objects.pop(key, None) is None:
            return -704
        return code


@pytest.fixture(scope="module")
def transfer(store: Any) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(store)


def test_answers_of_the_original(transfer: MooncakeBundleTransfer) -> None:
    names = Kit(transfer).names()
    wrong = []
    for expression, wanted in CALLS:
        given = json.loads(json.dumps(answer(expression, names)))
        if expression in ALLOWED:
            good = "raises" in wanted and "raises" not in given
        else:
            good = given == KEPT.get(expression, wanted)
        if not good:
            wrong.append(f"{expression}:\n    {json.dumps(given)}\n    there {json.dumps(wanted)}")
    assert not wrong, "\n".join(wrong)
    assert KEPT.keys() | ALLOWED <= {expression for expression, _ in CALLS}


def test_chosen_rows_are_those_rows(transfer: MooncakeBundleTransfer) -> None:
    """Of every kind of column, in chunks or not."""
    rows = [[3], (4, 5), [], None, [6, 7, 8]]
    fields = {
        "text": column("a", "", None, "lang" * 9, "ü"),
        "bytes": column(b"a", b"", None, b"bb" * 9, b"c"),
        "number": column(1, None, 3, 4, 5),
        "lists": column(*rows),
        "arrays": column(*[None if row is None else np.array(row, np.int32) for row in rows]),
        "deep": column(*[{"a": row, "b": {"c": np.arange(i)}} for i, row in enumerate(rows)]),
        "dense": np.arange(5),
    }
    data = DataProto({"x": np.arange(15.0).reshape(5, 3)}, fields, {})
    for chunk_bytes in (None, 16):
        ref = transfer.put(data, chunk_bytes=chunk_bytes)
        whole = transfer.get(ref)
        for chosen in (slice(1, 4), slice(0, 5, 3), [4, 1, 1], [-1], np.array([2, 3]), slice(5, 9)):
            some = transfer.get(ref, rows=chosen)
            indices = list(range(5))[chosen] if isinstance(chosen, slice) else list(chosen)
            for section in ("batch", "non_tensor_batch"):
                for name, values in whole[section].items():
                    wanted = [values[i] for i in indices]
                    assert repr(list(some[section][name])) == repr(wanted), (name, chosen)
        transfer.cleanup_dataproto(ref)
    assert [type(one) for one in whole["non_tensor_batch"]["lists"][0]] == [int]  # beside an empty list


def test_another_process_reads_by_the_handle(
    transfer: MooncakeBundleTransfer, make_store: Callable[..., Any]
) -> None:
    handle = json.dumps(export_ref(transfer.put(samples(), namespace="n", partition="p")))
    other = MooncakeBundleTransfer(make_store(segment=0))
    ref = import_ref(json.loads(handle))
    assert (ref.namespace, ref.partition, ref.batch_size) == ("n", "p", 4)
    assert (other.get(ref)["batch"]["x"] == A).all()
    assert other.get(json.loads(handle), type="dict", fields=["s"], meta_info_keys=[], rows=[3]) == {
        "s": ["ü"]
    }
    assert set(other.dataproto_manifest_view(ref)["non_tensor_fields"]) == {"s", "l", "n"}
    other.cleanup_dataproto(ref)
    with pytest.raises(RuntimeError, match="no such object"):
        other.get(ref)
    with pytest.raises(RuntimeError, match="expected"):
        transfer.get(transfer.append_dataproto_fields(handle_of(transfer, handle), {"z": A}, stage="z"))
    other.cleanup_dataproto(ref)


def handle_of(transfer: MooncakeBundleTransfer, handle: str) -> Any:
    """With manifests, as the process that put it has it, of what is gone."""
    ref = transfer.put(samples())
    transfer.cleanup_dataproto(ref)
    return ref


def test_what_is_read_is_the_callers_own(transfer: MooncakeBundleTransfer) -> None:
    ref = transfer.put_object({"x": A, "y": b"abc"})
    first = transfer.get_object(ref)
    first["x"][:] = -1
    first["y"][:] = 0
    second = transfer.get_object(ref)
    assert (second["x"] == A).all()
    assert bytes(second["y"]) == b"abc"
    transfer.remove_bundle(ref)
    assert (first["x"] == -1).all()
    assert (second["x"] == A).all()


def test_large_members_come_to_their_place(transfer: MooncakeBundleTransfer, store: Any) -> None:
    """Whole objects of 1 MiB are read by address: also into memory of the caller, also in chunks."""
    large = np.random.default_rng(7).integers(0, 255, (3 << 20) + 5, np.uint8)
    for chunk_bytes in (None, 1 << 20):
        ref = transfer.put_object({"x": large}, chunk_bytes=chunk_bytes)
        assert (transfer.get_object(ref)["x"] == large).all()
        target = np.zeros(large.nbytes + 64, np.uint8)
        raw = raw_destination(target.ctypes.data, target.nbytes, target)
        (x,) = transfer.materialize_into(transfer.read_spec(ref), {"x": raw}).objects.values()
        assert x.ctypes.data == target.ctypes.data
        assert (target[: large.nbytes] == large).all()
        assert not target[large.nbytes :].any()
        part = transfer.read_spec(ref).slice_member("x", 0, (1 << 20) - 2, (2 << 20) + 3)
        (x,) = transfer.materialize(part).objects.values()
        assert (x == large[(1 << 20) - 2 : (2 << 20) + 3]).all()
        gone = ref.manifest["buffers"]["x"]["chunks"][-1]["key"]
        assert store.remove(gone) == 0
        with pytest.raises(RuntimeError, match=f"get failed for {gone}"):
            transfer.get_object(ref)
        transfer.remove_bundle(ref)


def test_a_destination_that_is_too_small_or_no_memory(transfer: MooncakeBundleTransfer) -> None:
    spec = transfer.read_spec(transfer.put_object({"x": A}))
    target = np.zeros(47, np.uint8)
    with pytest.raises(ValueError, match="47 bytes, expected at least 48"):
        transfer.materialize_into(spec, {"x": raw_destination(target.ctypes.data, 47, target)})
    for address in (0, 8, -1):
        with pytest.raises(ValueError, match="no memory of this process"):
            transfer.materialize_into(spec, {"x": raw_destination(address, 48)})
    fixed = np.zeros((4, 3), np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="must be writeable"):
        transfer.materialize_into(spec, {"x": fixed})


# ---- over a store that keeps account


def test_a_put_that_fails_leaves_nothing() -> None:
    for bad in ("buffer/b", "manifest"):
        plain = Plain(lambda verb, key, bad=bad: -200 if verb == "put" and key.endswith(bad) else 0)
        with pytest.raises(RuntimeError, match=rf"put failed for bundle/default/\w+/{bad}: -200"):
            MooncakeBundleTransfer(plain).put_object({"a": A, "b": b"x"})
        assert plain.written
        assert not plain.objects


def test_a_put_that_fails_leaves_nothing_in_a_pool(
    transfer: MooncakeBundleTransfer, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "put", lambda key, value, **more: -200)  # the manifest alone is put by itself
    written: list[str] = []
    put_batch = store.put_batch
    monkeypatch.setattr(
        store,
        "put_batch",
        lambda keys, *more, **config: written.extend(keys) or put_batch(keys, *more, **config),
    )
    with pytest.raises(RuntimeError, match="manifest: -200"):
        transfer.put_object({"a": A, "b": b"x"})
    assert len(written) == 3
    assert store.batch_is_exist(written) == [0, 0, 0]


def test_the_manifest_is_the_last_and_goes_last() -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_object({"a": A, "b": b"0123456789"}, chunk_bytes=4)
    assert plain.written[-1] == ref.manifest_key
    assert len(plain.written) == len(set(plain.written)) == 1 + 12 + 3 + 138 // 4 + 1
    assert transfer.get_object({"manifest_key": ref.manifest_key})["b"] == b"0123456789"
    plain.refuse = lambda verb, key: -900 if verb == "remove" and key.endswith("chunk/1") else 0
    with pytest.raises(RuntimeError, match=r"failed to remove 3 Mooncake keys.*-900"):
        transfer.remove_bundle(ref)
    assert plain.is_exist(ref.manifest_key)
    plain.refuse = lambda verb, key: 0
    transfer.remove_bundle({"manifest_key": ref.manifest_key})
    assert not plain.objects


def test_only_the_chunks_that_are_needed_are_read() -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    text = column(*[letter * 12 for letter in "abcd"])
    ref = transfer.put(DataProto({"x": A}, {"s": text}, {}), chunk_bytes=12)
    plain.read.clear()
    assert (transfer.get(ref, fields=["x"], rows=[2])["batch"]["x"] == A[2:3]).all()
    assert [key.rpartition("/buffer/")[2] for key in plain.read if "buffer" in key] == ["batch.x/chunk/2"]
    plain.read.clear()
    assert transfer.get(ref, type="dict", fields=["s"], rows=[2])["s"] == ["c" * 12]
    read = [key.rpartition("/buffer/")[2] for key in plain.read]
    assert [key for key in read if ".data" in key] == ["non_tensor_batch.s.data/chunk/2"]


def test_nothing_is_left_of_stages_that_grow() -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    first = transfer.put(samples())
    before = set(plain.objects)
    second = transfer.append_dataproto_fields(first, {"z": A}, stage="default")
    assert sorted(transfer.get(first)["batch"]) == ["x", "y"]
    transfer.cleanup_dataproto_append(export_ref(first), export_ref(second))
    assert set(plain.objects) == before
    assert sorted(transfer.get(first)["batch"]) == ["x", "y"]
    second = transfer.append_dataproto_fields(import_ref(export_ref(first)), {"z": A}, stage="default")
    third = transfer.append_dataproto_fields(second, {"w": A}, stage="default")
    fourth = transfer.append_dataproto_fields(third, {"v": A}, stage="other")
    assert sorted(transfer.get(fourth)["batch"]) == ["v", "w", "x", "y", "z"]
    transfer.cleanup_dataproto_append(third, fourth)
    assert sorted(transfer.get(third)["batch"]) == ["w", "x", "y", "z"]
    with pytest.raises(
        ValueError, match=r"must include existing fields: \['x', 'y', 's', 'l', 'n', 'z', 'w'\]"
    ):
        transfer.append_dataproto_fields(third, {"u": A}, stage="default", overwrite=True)
    again = transfer.append_dataproto_fields(
        third,
        DataProto({**dict.fromkeys("xyzwu", A)}, samples().non_tensor_batch, {}),
        stage="default",
        overwrite=True,
    )
    assert sorted(transfer.get(again)["batch"]) == ["u", "w", "x", "y", "z"]
    with pytest.raises(RuntimeError, match="get failed"):
        transfer.get(third)
    transfer.cleanup_dataproto(again)
    assert not plain.objects
    transfer.cleanup_dataproto(third)
    transfer.cleanup_dataproto_append(export_ref(first), export_ref(second))


def test_all_objects_of_a_put_are_in_one_group() -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put(samples())
    group = export_ref(ref)["storage_group_id"]
    transfer.append_dataproto_fields(export_ref(ref), {"z": A}, stage="two")
    assert {tuple(config.group_ids) for config in plain.configs} == {(group,)}
    config = ReplicateConfig()
    config.with_soft_pin, config.group_ids = True, ["mine"]
    plain.configs.clear()
    assert export_ref(transfer.put(samples(), config=config))["storage_group_id"] == "mine"
    assert {(each.with_soft_pin, *each.group_ids) for each in plain.configs} == {(True, "mine")}
    config.group_ids = ["mine", "other"]
    with pytest.raises(ValueError, match="one group"):
        transfer.put_object({"x": A}, config=config)
    config.group_ids = None
    transfer.put(samples(), config=config)
    assert config.group_ids is None


def test_a_parallel_put_has_several_at_once() -> None:
    """Each put waits for another one."""
    both = threading.Barrier(2, timeout=60)

    def meet(verb: str, key: str) -> int:
        if verb == "put" and "chunk" in key:
            both.wait()
        return 0

    plain = Plain(meet)
    transfer = MooncakeBundleTransfer(plain)
    for policy in (BundleTransferPolicy(2, "parallel"), BundleTransferPolicy(2)):
        ref = transfer.put_bundle(b"m", {"a": bytes(80)}, chunk_bytes=10, policy=policy)
        assert len(ref.manifest["buffers"]["a"]["chunks"]) == 8
    few = [("a", [memoryview(b"x")])]
    assert not _bundle_store.is_parallel(few, BundleTransferPolicy(2))
    assert not _bundle_store.is_parallel(few * 8, BundleTransferPolicy(1))


def test_reads_are_bounded() -> None:
    """No more of the pool's memory is held at once; one object is read however large it is."""
    large = _bundle_store.VIEWED_BYTES_MAX
    target = np.empty(1, np.uint8)
    pieces = [
        _bundle_store.Piece(key, size, 0, 1, target) for key, size in (("a", 5), ("b", large), ("b", large))
    ]
    pieces += [_bundle_store.Piece("c", 1, 0, 1, target), _bundle_store.Piece("d", large * 2, 0, 1, target)]
    runs = [[piece.key for piece in run] for run in _bundle_store.bounded(pieces)]
    assert runs == [["a"], ["b", "b"], ["c"], ["d"]]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"layout": "other"},
        {"meta": {"key": "k", "bytes": 5, "chunks": []}},
        {"meta": 5},
        {"buffers": {"x": {"key": "k", "bytes": -1, "chunks": [{"key": "k", "bytes": -1}]}}},
        {"buffers": {"x": {"key": "k", "bytes": 1, "chunks": [{"key": 5, "bytes": 1}]}}},
        {"buffers": []},
    ],
)
def test_a_manifest_that_is_none(change: dict[str, Any]) -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_object({"x": A})
    plain.objects[ref.manifest_key] = json.dumps(ref.manifest | change).encode()
    for act in (transfer.get_object, transfer.remove_bundle):
        with pytest.raises(ValueError, match="invalid bundle manifest"):
            act({"manifest_key": ref.manifest_key})
    plain.objects[ref.manifest_key] = b"\xff{"
    with pytest.raises(ValueError, match="invalid bundle manifest"):
        transfer.get_object({"manifest_key": ref.manifest_key})


def test_metadata_that_does_not_fit_its_bytes() -> None:
    plain = Plain()
    transfer = MooncakeBundleTransfer(plain)
    ref = transfer.put_object({"x": A})
    key = ref.manifest["meta"]["key"]
    good = plain.objects[key]
    for old, new in ((b'"<f4"', b'"|O"'), (b"[4,3]", b"[4,9]"), (b"ndarray", b"unknown")):
        data = good.replace(old, new)
        plain.objects[key] = data + b" " * (len(good) - len(data))
        with pytest.raises(ValueError, match="structured"):
            transfer.get_object(ref)
    plain.objects[key] = good[:-1]
    with pytest.raises(RuntimeError, match=f"expected {len(good)} bytes, got {len(good) - 1}"):
        transfer.get_object(ref)


def test_rows_that_no_codec_can_store() -> None:
    transfer = MooncakeBundleTransfer(Plain())
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, object(), {1, 2}, {(1, 2): 3}, np.array([None]), 1 << 70):
        with pytest.raises((ValueError, OverflowError)):
            transfer.put(DataProto({}, {"f": column(value)}, {}))
    assert transfer.store.objects == {}


def test_images(transfer: MooncakeBundleTransfer) -> None:
    image = pytest.importorskip("PIL.Image")
    one, two = image.new("RGB", (2, 3), (1, 2, 3)), image.new("L", (4, 1), 9)
    fields = {"one": column(one, two), "some": column([one, b"raw"], []), "deep": column({"i": two}, {})}
    ref = transfer.put(DataProto({}, fields, {}))
    codecs = {name: row["codec"] for name, row in ref.encoded_non_tensor.items()}
    assert codecs == {"one": "media_bytes", "some": "media_list_ragged", "deep": "structured_recursive"}
    back = transfer.get(ref)["non_tensor_batch"]
    for given, wanted in ((back["one"][1], two), (back["some"][0][0], one), (back["deep"][0]["i"], two)):
        assert (given.mode, given.size, given.tobytes()) == (wanted.mode, wanted.size, wanted.tobytes())
    assert back["some"][0][1] == b"raw"


def test_a_payload_needs_buffers() -> None:
    with pytest.raises(TypeError, match="requires buffers"):
        StructuredObjectPayload({"a": 1})


@pytest.mark.engine  # torch comes with the engine's environment
def test_tensors(vllm_python: str, master: MasterProcess) -> None:
    done = subprocess.run(
        [vllm_python, str(SCRIPT), master.address],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(done.stdout).values()) == {"ok"}, done.stdout
