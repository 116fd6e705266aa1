"""What the lines of structured_answers.txt are evaluated with, beside a transfer over a store.

The same file gave the lines, run beside the wheel of 0.3.13.post1 and its own store.
"""

from __future__ import annotations

import re
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
from mooncake import structured_object_store as module

A = np.arange(12, dtype=np.float32).reshape(4, 3)
_HEX = re.compile(r"[0-9a-f]{32}")


class DataProto:
    """With the three attributes that are asked for, and nothing else."""

    def __init__(self, batch: Any = None, non_tensor_batch: Any = None, meta_info: Any = None) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info


class Named(DataProto):
    """Made by from_dict() alone."""

    def __init__(self) -> None:
        raise AssertionError("from_dict() makes these")

    @classmethod
    def from_dict(cls, tensors: Any, non_tensors: Any = None, meta_info: Any = None) -> DataProto:
        return DataProto(tensors, non_tensors, {"named": meta_info})


def column(*rows: Any) -> Any:
    array = np.empty(len(rows), dtype=object)
    for i, row in enumerate(rows):
        array[i] = row
    return array


def samples() -> DataProto:
    text = column("a", "b", None, "ü")
    lists = column([1], [2, 3], None, [4])
    fields = {"s": text, "l": lists, "n": np.arange(4)}
    return DataProto({"x": A, "y": np.arange(4)}, fields, {"step": 3, "name": "q"})


class Kit:
    """The names of the lines: `put(data)`, `get(...)` of samples(), `whole(members)` and so on."""

    def __init__(self, transfer: Any) -> None:
        self.t = transfer

    def names(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        given = {
            "np": np,
            "m": module,
            "A": A,
            "O": column,
            "DP": DataProto,
            "Named": Named,
            "samples": samples,
        }
        return given | own | {"F": module.FieldSchema, "S": module.StructuredMemberSlice}

    def put(self, data: Any, **more: Any) -> Any:
        """What the handle says of it, and what comes back."""
        ref = self.t.put(data, **more)
        places = {str(name): [place.member, place.section] for name, place in ref.field_index.items()}
        codecs = {name: row["codec"] for name, row in ref.encoded_non_tensor.items()}
        back = self.t.get(ref, type=more.get("type", "dataproto"))
        self.t.cleanup_dataproto(ref)
        return [ref.batch_size, places, codecs, ref.meta_info, back]

    def get(self, **more: Any) -> Any:
        ref = self.t.put(samples())
        try:
            return self.t.get(ref, **more)
        finally:
            self.t.cleanup_dataproto(ref)

    def append(self, data: Any, *, stage: str, **more: Any) -> Any:
        """To samples() in the stage "default"."""
        ref = self.t.put(samples())
        new = self.t.append_dataproto_fields(ref, data, stage=stage, **more)
        return [list(new.stage_refs), sorted(new.field_index), new.meta_info, self.t.get(new)]

    def whole(self, members: Any, **more: Any) -> Any:
        """put_object() and get_object()."""
        return self.t.get_object(self.t.put_object(members, **more))

    def part(self, members: Any, *slices: Any, names: Any = None, into: Any = None) -> Any:
        """Of what put_structured_object() stored."""
        payload = module.StructuredObjectPayload({"k": 1}, members)
        spec = self.t.read_spec(self.t.put_structured_object(payload)).select_members(names)
        for one in slices:
            spec = spec.slice_member(*one)
        return self.t.materialize_into(spec, into).objects

    def handle(self, **changes: Any) -> Any:
        """export_ref() of samples(), changed, and imported again."""
        exported = module.export_ref(self.t.put(samples()))
        given = {key: one for key, one in {**exported, **changes}.items() if one != "drop"}
        ref = module.import_ref(given)
        return [
            ref.batch_size,
            sorted(ref.stage_refs),
            sorted(ref.field_index),
            ref.meta_info,
            ref.global_indexes,
        ]


def plain(value: Any) -> Any:
    """What JSON has, with the types of arrays."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return {"column": [plain(one) for one in value]}
        return {"array": value.dtype.str, "shape": list(value.shape), "values": plain(value.tolist())}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, DataProto):
        return {"data": plain([value.batch, value.non_tensor_batch, value.meta_info])}
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in sorted(value.items(), key=lambda row: str(row[0]))}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return _HEX.sub("ID", str(value))


def answer(expression: str, names: dict[str, Any]) -> Any:
    try:
        return plain(eval(expression, dict(names)))
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        return {"raises": kinds[0]}
