"""A worker's half of the connector over a node, with numpy memory or a card's in the place of KV caches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm.messages import Load, Report, Save
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.worker import WorkerHalf
from moonpool.core.config.native_settings import node_settings
from moonpool.core.store.keys import BLOCK_NAME_BYTES, block_name
from tests.connectors.vllm.fakes import (
    FINGERPRINT,
    LIFE,
    LOG,
    FakeTensor,
    engine_config,
)
from tests.descriptors import speaks

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


def load(half: WorkerHalf, *blocks: int, request_id: str = "r") -> Load:
    columns = half.handshake().columns
    first = b"".join(block_name(bytes(32), ranges) for ranges in columns)
    return Load(request_id, len(columns), first, LIFE, bytes(32 * len(columns) * len(blocks)), (blocks,))


def save(half: WorkerHalf, *blocks: int, job_id: int = 1) -> Save:
    columns = half.handshake().columns
    names = b"".join(block_name(bytes([b] * 32), ranges) for b in blocks for ranges in columns)
    return Save(job_id, len(columns), names, bytes(len(names)), (blocks,))


@contextmanager
def serving(tmp_path: Path) -> Iterator[_native.Server]:
    """A node at ``tmp_path``/node.sock."""
    server = _native.Server(str(tmp_path / "node.sock"), [("default", 64 << 20)], b"token", node_settings())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def real_node(
    tmp_path: Path, token: bytes = b"token", timeout_s: float = 2.0
) -> Callable[[bytes], NodeConnection[Pool]]:
    def dial() -> Pool:
        client = _native.Client(
            str(tmp_path / "node.sock"), token, fingerprint=FINGERPRINT, timeout_s=timeout_s
        )
        client.connect()
        return Pool(client)

    def open_node(fingerprint: bytes) -> NodeConnection[Pool]:
        node: NodeConnection[Pool] = NodeConnection(dial, address="here", log=LOG)
        node.open(required=True)
        return node

    return open_node


def wait_for(half: WorkerHalf) -> Report:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        half.poll()
        report = half.take_report()
        if report is not None:
            return report
        threading.Event().wait(0.001)
    raise AssertionError("no report within 10 s")


def lookup(tmp_path: Path, names: bytes, width: int, token: bytes = b"token") -> Any:
    client = _native.Client(str(tmp_path / "node.sock"), token, fingerprint=FINGERPRINT)
    worker = _native.Worker(client)
    worker.submit_prefix(names, BLOCK_NAME_BYTES, width)
    assert speaks(worker.eventfd, 10)
    ((_, answer),) = worker.poll()
    assert answer.error == ""
    return worker, answer
