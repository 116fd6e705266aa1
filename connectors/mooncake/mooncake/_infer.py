"""A column of Python values, taken apart: which columns of one kind it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._row_codecs import DEPTH_MAX, Decision, decide


class _Missing:
    def __repr__(self) -> str:
        return "<MISSING>"


MISSING = _Missing()
LIST_LENGTH_MAX = 8
STRUCT_KEYS_MAX = 64


@dataclass
class InferredLeaf:
    """A column inside of a column, and the codec that it could have."""

    path: str
    values: list[Any]
    decision: Decision


@dataclass
class InferredNode:
    """Rows that are dicts or lists: their keys or places. row_mask: the rows that have one."""

    path: str
    node_type: str
    children: list[Any]
    lengths: list[int] | None = None
    row_mask: list[bool] | None = None


def infer_structure(
    path: str, values: list[Any], leaves: list[InferredLeaf], nodes: list[InferredNode], *, _depth: int = 0
) -> None:
    """Takes the column ``values`` apart: to ``nodes`` and ``leaves`` is added what it consists of.

    A key that a row has not is MISSING in its leaf, and None where the row itself is none.
    """
    there = [value for value in values if value is not None and value is not MISSING]
    keys = _dict_keys(there) if _depth < DEPTH_MAX else None
    if keys is not None:
        nodes.append(InferredNode(path, "dict", keys, None, [isinstance(one, dict) for one in values]))
        for key in keys:
            column = [one.get(key, MISSING) if isinstance(one, dict) else None for one in values]
            infer_structure(f"{path}.{key}", column, leaves, nodes, _depth=_depth + 1)
        return
    decision = decide([None if value is MISSING else value for value in values])
    longest = _list_length(there) if _depth < DEPTH_MAX else None
    inner = [one for value in there if _is_list(value) for one in value]
    nested = any(isinstance(one, (list, tuple, dict, np.ndarray)) for one in inner)
    if longest is None or not (nested or not decision.accepted):
        leaves.append(InferredLeaf(path, values, decision))
        return
    rows = [one if _is_list(one) else () for one in values]
    mask = [_is_list(one) for one in values]
    nodes.append(InferredNode(path, "list", list(range(longest)), [len(one) for one in rows], mask))
    for i in range(longest):
        column = [
            one[i] if i < len(one) else (MISSING if is_list else None)
            for one, is_list in zip(rows, mask, strict=True)
        ]
        infer_structure(f"{path}[{i}]", column, leaves, nodes, _depth=_depth + 1)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _dict_keys(there: Sequence[Any]) -> list[Any] | None:
    """Of rows that are all dicts with texts as keys."""
    if not there or not all(isinstance(one, dict) for one in there):
        return None
    keys = list(dict.fromkeys(key for one in there for key in one))
    return keys if len(keys) <= STRUCT_KEYS_MAX and all(isinstance(key, str) for key in keys) else None


def _list_length(there: Sequence[Any]) -> int | None:
    """Of the longest row, when all are short lists."""
    if not there or not all(map(_is_list, there)):
        return None
    longest = max(map(len, there))
    return longest if 0 < longest <= LIST_LENGTH_MAX else None
