"""What the checks of tensors share: the registry of checks, a tensor, and helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mooncake import store as names
from mooncake.store import MooncakeDistributedStore

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
