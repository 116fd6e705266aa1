"""engine_driver.py with a KV cache that looks as if it lay on a card: the connector gets tensors of "cuda"
whose addresses are those of the software device, and the CPU computes on the same memory. ``soft_library``
and ``soft_policy`` of the configuration name the library and its policy.

The forward of a CPU engine has ended when it says so, so the order of copies after it is not tested here;
scheduler, life of blocks, aborts, preemption and resets are the real ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[3]))

from tests.connectors.vllm import engine_driver


class CardDevice:
    type = "cuda"
    index = 0


class CardStorage:
    def __init__(self, address: int, size: int) -> None:
        self._address, self._size = address, size

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._size


class CardTensor:
    """A tensor of the CPU at its address on the card."""

    device = CardDevice()

    def __init__(self, tensor: Any, storage: CardStorage) -> None:
        self._tensor, self._storage = tensor, storage
        self.shape: Sequence[int] = tensor.shape
        self.dtype = tensor.dtype

    def data_ptr(self) -> int:
        offset = self._tensor.data_ptr() - self._tensor.untyped_storage().data_ptr()
        return self._storage.data_ptr() + int(offset)

    def stride(self) -> Sequence[int]:
        return tuple(self._tensor.stride())

    def element_size(self) -> int:
        return int(self._tensor.element_size())

    def untyped_storage(self) -> CardStorage:
        return self._storage


def adopt(library: str, policy: str) -> None:
    """From now on each KV cache that vLLM registers with the connector is on the card."""
    from moonpool import _native
    from moonpool.connectors.vllm import compat, lookups
    from moonpool.connectors.vllm.connector import Mooncake
    from tests.soft_card import SoftCard, choose

    lookups.ANSWER_TIMEOUT_S = (
        30.0  # on a busy machine an answer may take longer than the second of a real engine
    )

    choose(Path(library), policy)
    _native.use_driver_for_tests(library)
    card = SoftCard(Path(library))
    register = Mooncake.register_kv_caches
    storages: dict[int, CardStorage] = {}

    def on_card(tensor: Any) -> CardTensor:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in storages:
            storages[address] = CardStorage(card.adopt(address, size), size)
        return CardTensor(tensor, storages[address])

    def registered(connector: Any, kv_caches: dict[str, Any]) -> None:
        register(connector, {name: on_card(tensor) for name, tensor in kv_caches.items()})

    Mooncake.register_kv_caches = registered  # type: ignore[method-assign]
    compat.current_stream = lambda device: card.stream


class Driver(engine_driver.Driver):
    def drain(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Until what was saved is stored, too: its blocks are free before."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        left = super().drain(timeout_s)
        deadline_s, half = time.monotonic() + timeout_s, get_kv_transfer_group()._worker
        while not half.is_idle and time.monotonic() < deadline_s:
            half.poll()
            time.sleep(0.001)
        return {**left, "copies": not half.is_idle}

    def handed_by(self) -> dict[str, int]:
        """Bytes of hand-overs that this engine has read, by transport."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        counters = get_kv_transfer_group()._worker._handover_worker.counters
        suffix = "_read_bytes_total"
        return {name.removesuffix(suffix): n for name, n in counters.items() if name.endswith(suffix) and n}


if __name__ == "__main__":
    engine_driver.Driver = Driver  # type: ignore[misc]
    config = json.loads(sys.argv[2])
    adopt(config.pop("soft_library"), config.pop("soft_policy"))
    sys.argv[2] = json.dumps(config)
    engine_driver.main()
