"""Memory of CUDA cards that callers hand in: tensors and arrays of torch, CuPy and others."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from moonpool.core.errors import InvalidArgument
from moonpool.core.store.types import BufferRange

_CUDA = 2  # kDLCUDA of DLPack's DLDeviceType


class _Tensor(ctypes.Structure):  # the first members of DLTensor, which a DLManagedTensor begins with
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def device_memory_of(item: Any) -> BufferRange | None:
    """The range of a contiguous tensor or array in memory of a CUDA card; None: ``item`` is something else.

    Raises InvalidArgument for one that is not contiguous or has no bytes.
    """
    if hasattr(item, "data_ptr"):  # a torch tensor, without importing torch
        if item.device.type != "cuda":
            return None
        _require(item, item.is_contiguous())
        return _range(item, item.data_ptr(), item.numel() * item.element_size(), item)
    if hasattr(item, "__cuda_array_interface__"):
        return _from_array_interface(item, item.__cuda_array_interface__)
    if hasattr(item, "__dlpack_device__") and item.__dlpack_device__()[0] == _CUDA:
        return _from_dlpack(item)
    return None


def _from_array_interface(item: Any, array: dict[str, Any]) -> BufferRange:
    size = int(array["typestr"][2:])
    strides = array.get("strides")
    _require(item, strides is None or _contiguous(array["shape"], [n // size for n in strides]))
    address, read_only = array["data"]
    return _range(item, address, math.prod(array["shape"]) * size, item)._replace(writable=not read_only)


def _from_dlpack(item: Any) -> BufferRange:
    capsule = item.__dlpack__()
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _Tensor.from_address(pointer_of(capsule, b"dltensor"))
    shape = tensor.shape[: tensor.ndim]
    _require(item, not tensor.strides or _contiguous(shape, tensor.strides[: tensor.ndim]))
    address = (tensor.data or 0) + tensor.byte_offset
    # Held with the capsule, whose end tells the owner that the memory is not used any more.
    return _range(item, address, math.prod(shape) * tensor.bits * tensor.lanes // 8, (item, capsule))


def _contiguous(shape: Any, strides: Any) -> bool:
    """strides: in elements."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _require(item: Any, contiguous: bool) -> None:
    if not contiguous:
        raise InvalidArgument(
            f"a {type(item).__name__} that is not contiguous is no one range of memory; "
            f"call .contiguous() first"
        )


def _range(item: Any, address: int, length: int, held: object) -> BufferRange:
    if length == 0:
        raise InvalidArgument(f"a {type(item).__name__} of no bytes is no memory")
    return BufferRange(address, length, True, held)
