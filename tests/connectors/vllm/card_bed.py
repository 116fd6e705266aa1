"""A KV cache on the software device, as vLLM's tensors describe it."""

from __future__ import annotations

from tests.connectors.vllm.fakes import FakeStorage, FakeTensor
from tests.soft_card import CardArray


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
