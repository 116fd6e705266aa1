"""A KV cache on the software device, as vLLM's tensors describe it, and a worker's half over it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm.device_memory import DeviceMemory
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.worker import WorkerHalf
from tests.connectors.vllm.fakes import FINGERPRINT, LOG, FakeStorage, FakeTensor, engine_config
from tests.connectors.vllm.worker_bed import GROUP
from tests.soft_card import CardArray, SoftCard


class CardStorage(FakeStorage):
    def __init__(self, array: CardArray) -> None:
        super().__init__(array.view)
        self._address = array.address

    def data_ptr(self) -> int:
        return self._address


class CardTensor(FakeTensor):
    """One layer of a KV cache on a card."""

    def __init__(self, array: CardArray, layer: int) -> None:
        super().__init__(array.view[layer], device="cuda")
        self._array = array

    def data_ptr(self) -> int:
        return self._array.address + super().data_ptr() - int(self._array.view.ctypes.data)

    def untyped_storage(self) -> FakeStorage:
        return CardStorage(self._array)


def card_half(
    card: SoftCard,
    kv: CardArray,
    open_node: Callable[[bytes], NodeConnection[Pool]],
    ring_bytes: int = 8 << 20,
    pin_bytes: int = 0,
    **options: Any,
) -> WorkerHalf:
    """options: more of WorkerHalf's."""
    half = WorkerHalf(
        engine_config(),
        ranks=lambda: (0, 0),
        fingerprint=lambda layout, tensor: FINGERPRINT,
        open_node=open_node,
        open_device=functools.partial(
            DeviceMemory,
            current_stream=lambda device: card.stream,
            ring_bytes=ring_bytes,
            copy_threads=2,
            pin_bytes=pin_bytes,
            log=LOG,
        ),
        log=LOG,
        **options,
    )
    half.register({name: CardTensor(kv, number) for number, name in enumerate(GROUP)})
    assert half.handshake().refusal == ""
    return half
