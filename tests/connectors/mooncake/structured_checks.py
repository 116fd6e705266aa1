"""Structured objects with tensors: run by test_structured.py in an interpreter that has torch.

Prints JSON: of each check "ok" or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from functools import partial
from typing import Any

import numpy as np
import torch
from long_waits import wait_long
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    export_ref,
    raw_destination,
    tensor_object_buffer,
)
from structured_kit import DataProto, column

T = torch.arange(12.0).reshape(4, 3)
HEADER = 304


def same(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def objects(transfer: MooncakeBundleTransfer) -> None:
    members = {
        "f": T,
        "b": T.bfloat16(),
        "bool": T > 3,
        "cut": T.T,
        "zero": torch.tensor(5),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(T),
    }
    ref = transfer.put_object(members)
    entry = ref.manifest["buffers"]["f"]
    assert (entry["kind"], entry["bytes"], entry["shape"]) == ("tensor", HEADER + 48, [4, 3])
    assert same(transfer.store.get_tensor(entry["key"]), T)
    back = transfer.get_object(ref)
    assert all(same(back[name], tensor.detach()) for name, tensor in members.items())
    assert same(transfer.get_object(transfer.put_object(T)), T)


def slices(transfer: MooncakeBundleTransfer) -> None:
    spec = transfer.read_spec(
        transfer.put_structured_object(StructuredObjectPayload({}, {"t": T.bfloat16()}))
    )
    for start, end, step in ((1, 3, 1), (0, 4, 2), (3, 1, 1), (-2, 9, 1)):
        (one,) = transfer.materialize(spec.slice_member("t", 0, start, end, step)).objects.values()
        assert same(one, T.bfloat16()[start:end:step])


def fields(transfer: MooncakeBundleTransfer) -> None:
    ragged = column(T[0], None, T[:2], torch.zeros(0))
    data = DataProto(
        {"x": T, "b": T.half()}, {"r": ragged, "d": column(*[{"p": T[i]} for i in range(4)])}, {}
    )
    ref = transfer.put(data)
    codecs = {name: row["codec"] for name, row in ref.encoded_non_tensor.items()}
    assert codecs == {"r": "ragged_tensor", "d": "structured_recursive"}
    whole, some = transfer.get(ref), transfer.get(export_ref(ref), rows=[3, 0, 1])
    assert same(whole["batch"]["x"], T)
    assert same(some["batch"]["x"], T[[3, 0, 1]])
    assert same(some["batch"]["b"], T.half()[[3, 0, 1]])
    assert whole["non_tensor_batch"]["r"][1] is some["non_tensor_batch"]["r"][2] is None
    assert same(whole["non_tensor_batch"]["r"][2], T[:2])
    assert same(some["non_tensor_batch"]["r"][1], T[0])
    assert same(some["non_tensor_batch"]["d"][0]["p"], T[3])


def schemas(transfer: MooncakeBundleTransfer) -> None:
    tensors = column({"p": T[0]}, {"p": T[:2]})
    for codec, values in (("ragged_tensor", column(T[0], T)), ("ragged_tensor_dict", tensors)):
        ref = transfer.put(DataProto({}, {"f": values}, {}), field_schemas={"f": FieldSchema(codec)})
        assert ref.encoded_non_tensor["f"]["codec"] == codec
        back = transfer.get(ref)["non_tensor_batch"]["f"]
        for one, other in zip(back, values, strict=True):
            assert same(one, other) if codec == "ragged_tensor" else same(one["p"], other["p"])
    flat = transfer.put({"x": T, "l": [T[0], T[1], T, T]}, type="dict")
    assert flat.field_index["x"].section == "batch"
    assert same(transfer.get(flat, type="dict")["l"][2], T)


def jagged(transfer: MooncakeBundleTransfer) -> None:
    rows = [torch.zeros(2), torch.ones(3), torch.arange(4.0)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    ref = transfer.put(DataProto({"x": nested}, {}, {}))
    whole = transfer.get(ref)["batch"]["x"]
    assert whole.is_nested
    assert all(same(one, other) for one, other in zip(whole.unbind(), rows, strict=True))
    some = transfer.get(ref, rows=[2, 0])["batch"]["x"]
    assert all(same(one, other) for one, other in zip(some.unbind(), [rows[2], rows[0]], strict=True))


def memory(transfer: MooncakeBundleTransfer) -> None:
    """A tensor with its header, in memory of the caller: put from there, and read to there."""
    buffer = np.zeros(1024, np.uint8)
    assert transfer.store.put_tensor("in memory", T) == 0
    assert transfer.store.get_into("in memory", buffer.ctypes.data, 1024) == HEADER + 48
    held = tensor_object_buffer(buffer.ctypes.data, 1024, buffer, 4)
    ref = transfer.put(DataProto({"t": held}, {}, {}))
    assert ref.batch_size == 4
    assert same(transfer.get(ref)["batch"]["t"], T)
    assert same(transfer.get(ref, rows=[2, 1])["batch"]["t"], T[[2, 1]])
    for make in (raw_destination, tensor_object_buffer):
        target = np.zeros(HEADER + 48, np.uint8)
        given = make(target.ctypes.data, target.nbytes, target)
        one = transfer.get(ref, destinations={"t": given})["batch"]["t"]
        assert same(one, T)
        assert one.data_ptr() == target.ctypes.data + HEADER
        small = {"t": make(target.ctypes.data, 48)}
        assert refused(partial(transfer.get, ref, destinations=small))
    assert refused(lambda: transfer.get(ref, destinations={"t": torch.zeros(4, 3)}))
    assert refused(lambda: transfer.put_object(tensor_object_buffer(buffer.ctypes.data + 8, 400)))
    assert refused(lambda: transfer.put_object(tensor_object_buffer(8, 400)))
    assert refused(lambda: transfer.put_object(torch.eye(2).to_sparse()))


def refused(call: Any) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def main() -> None:
    wait_long()
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 32 << 20, 0, "tcp", "", sys.argv[1]) == 0
    said = {}
    for act in (objects, slices, fields, schemas, jagged, memory):
        try:
            act(MooncakeBundleTransfer(store))
            said[act.__name__] = "ok"
        except Exception:
            said[act.__name__] = traceback.format_exc()
    print(json.dumps(said), flush=True)
    store.close()


if __name__ == "__main__":
    main()
