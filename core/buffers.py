"""What users hand us as memory, in the forms that the C++ core takes: buffers and (address, length) pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.core.errors import InvalidArgument

_NATIVE = (bytes, bytearray, memoryview, tuple)


def as_parts(objects: Sequence[Any]) -> Sequence[Any]:
    """Each object as the core takes it; the common case costs one type check an object."""
    if all(type(item) in _NATIVE for item in objects):
        return objects
    return [_as_object(item) for item in objects]


def _as_object(item: Any) -> Any:
    if isinstance(item, list):
        return [_as_part(part) for part in item]
    return _as_part(item)


def _as_part(item: Any) -> Any:
    if isinstance(item, _NATIVE):
        return item
    if hasattr(item, "data_ptr"):  # a torch tensor, without importing torch
        return _tensor_range(item)
    try:
        return _as_bytes(memoryview(item))
    except (TypeError, ValueError):
        pass
    if hasattr(item, "__dlpack__"):
        import numpy as np

        try:
            array: Any = np.from_dlpack(item)
            return _as_bytes(memoryview(array))
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise InvalidArgument(
                f"a {type(item).__name__} is not contiguous CPU memory", cause=error
            ) from error
    raise InvalidArgument(
        f"a {type(item).__name__} is no buffer; give bytes, a contiguous array or tensor in CPU memory, an "
        f"(address, length) pair, or a list of those"
    )


def _as_bytes(view: memoryview) -> memoryview | bytearray:
    return view.cast("B") if view.nbytes else bytearray()  # a shape with a zero in it cannot be cast


def _tensor_range(tensor: Any) -> tuple[int, int]:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"a tensor on {tensor.device} is not CPU memory; copy it to the CPU first")
    if not tensor.is_contiguous():
        raise InvalidArgument("a tensor must be contiguous; call .contiguous() first")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
