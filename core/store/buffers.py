"""Memory that callers hand in, in the forms that the C++ core takes: buffers and (address, length) pairs. Of
memory of cards those are the addresses; the core asks the CUDA driver what they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from moonpool.core.errors import InvalidArgument
from moonpool.core.store.device_memory import device_memory_of
from moonpool.core.store.types import BufferRange

_NATIVE = (bytes, bytearray, memoryview, tuple)
_NATIVE_SET = frozenset(_NATIVE)


def memory_of(item: Any) -> BufferRange:
    """The address and length of a bytes-like object, a contiguous CPU tensor or array, or an (address,
    length).

    Raises InvalidArgument for anything else, and for no bytes at all. An (address, length) is not checked.
    """
    part = _as_part(item)
    if isinstance(part, tuple):
        address, length = range_of(part)
        return BufferRange(address, length, True, item)
    view = memoryview(part)
    if not view.contiguous:
        raise InvalidArgument(f"a {type(item).__name__} that is not contiguous is no one range of memory")
    if view.nbytes == 0:
        raise InvalidArgument(f"a {type(item).__name__} of no bytes is no memory")
    return BufferRange(_address_of(view), view.nbytes, not view.readonly, view)


def range_of(pair: tuple[Any, ...]) -> tuple[int, int]:
    """(address, length), checked to be that. Raises InvalidArgument."""
    if len(pair) != 2 or not (isinstance(pair[0], int) and isinstance(pair[1], int)):
        raise InvalidArgument(f"a range of memory is (address, length), two integers, not {pair!r:.80}")
    address, length = pair
    if not (0 < address < 1 << 64 and 0 < length <= (1 << 64) - address):
        raise InvalidArgument(f"(address, length) = ({address:#x}, {length}) is no range of memory")
    return address, length


def _address_of(view: memoryview) -> int:
    if view.readonly:
        import numpy as np  # ctypes takes the address of writable memory only

        return int(np.frombuffer(view.cast("B") if view.ndim != 1 else view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def as_parts(objects: Sequence[Any]) -> Sequence[Any]:
    """Each object as the core takes it; the common case costs one type check an object."""
    if _NATIVE_SET.issuperset(map(type, objects)):
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
    if (on_card := device_memory_of(item)) is not None:
        return _card_range(item, on_card)
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
        f"a {type(item).__name__} is no buffer; give bytes, a contiguous array or tensor on the CPU or a "
        f"CUDA card, an (address, length) pair, or a list of those"
    )


def _as_bytes(view: memoryview) -> memoryview | bytearray:
    return view.cast("B") if view.nbytes else bytearray()  # a shape with a zero in it cannot be cast


def _tensor_range(tensor: Any) -> tuple[int, int]:
    if (on_card := device_memory_of(tensor)) is not None:
        return _card_range(tensor, on_card)
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"a tensor on {tensor.device} is not CPU memory; copy it to the CPU first")
    if not tensor.is_contiguous():
        raise InvalidArgument("a tensor must be contiguous; call .contiguous() first")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _card_range(item: Any, memory: BufferRange) -> tuple[int, int]:
    """Its address and length, when the CUDA driver knows them: the core touches what it does not know."""
    from moonpool import _native  # not needed for other memory

    if _native.card_of(memory.address, memory.length) is None:
        raise InvalidArgument(
            f"a {type(item).__name__} says that it lies on a GPU, and no CUDA driver of this process knows "
            f"it; copy it to the CPU first"
        )
    return memory.address, memory.length
