"""A worker's half of the connector over a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.worker import WorkerHalf
from tests.connectors.vllm.fakes import (
    FINGERPRINT,
    LOG,
    FakeTensor,
    engine_config,
)

BLOCKS, TOKENS, CONTENT = 6, 4, 6
GROUP = ("layers.0", "layers.1")


def memory(heads: int = 2) -> npt.NDArray[np.float32]:
    """[layers, blocks, heads, tokens, content]"""
    return np.zeros((len(GROUP), BLOCKS, heads, TOKENS, CONTENT), np.float32)


def worker_half(
    kv: npt.NDArray[np.float32],
    open_node: Callable[[bytes], NodeConnection[Pool]],
    *,
    rank: int = 0,
    **changes: Any,
) -> WorkerHalf:
    half = WorkerHalf(
        engine_config(**changes),
        ranks=lambda: (rank, 0),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=open_node,
        log=LOG,
    )
    half.register({name: FakeTensor(kv[number], kv) for number, name in enumerate(GROUP)})
    return half
