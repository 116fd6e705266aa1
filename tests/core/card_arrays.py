"""Memory of a card of the software device in the forms in which Python's libraries hand it in."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from tests.soft_card import CardArray


class Tensor:
    """What is asked of a tensor of torch."""

    def __init__(self, array: CardArray, *, contiguous: bool = True, device: str = "cuda") -> None:
        self.device = SimpleNamespace(type=device, index=0)
        self._array = array
        self._contiguous = contiguous

    def data_ptr(self) -> int:
        return self._array.address

    def numel(self) -> int:
        return int(self._array.view.size)

    def element_size(self) -> int:
        return 4

    def is_contiguous(self) -> bool:
        return self._contiguous


class CupyArray:
    """What is asked of an array of CuPy."""

    def __init__(self, array: CardArray, strides: tuple[int, ...] | None = None) -> None:
        self.__cuda_array_interface__ = {
            "shape": array.view.shape,
            "typestr": "<f4",
            "data": (array.address, False),
            "strides": strides,
            "version": 3,
        }


class DlpackArray:
    """An array that only DLPack describes, ``skip`` elements behind the start of its data."""

    def __init__(self, array: CardArray, skip: int = 0) -> None:
        from moonpool.core.store.device_memory import _Tensor

        count = array.view.size - skip
        self._shape = (ctypes.c_int64 * 1)(count)
        self._tensor = _Tensor(array.address, 2, 0, 1, 2, 32, 1, self._shape, None, 4 * skip)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: object = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._tensor), b"dltensor", None)
