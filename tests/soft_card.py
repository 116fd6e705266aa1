"""A card of the software device (tests/native/device/soft) for tests in Python: a CUDA driver on host memory.
The CPU dies when it touches the card's addresses; tests look at its memory by ``CardArray.view``."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool import _native
from moonpool.core.transfer.engine import TransferEngine

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "tests" / "native" / "device" / "soft"
COMPILER = shutil.which(os.environ.get("CXX", "g++").split()[-1])
POLICIES = ("late", "early", "at once", "shuffled")  # in the order of soft.hpp


@functools.cache
def _compiled() -> bytes:
    """Some seconds, once a run."""
    assert COMPILER is not None
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-I{ROOT / 'core' / 'csrc'}",
        "-iquote",
        ROOT,
    ]
    sources = sorted(SOURCES.glob("*.cpp"))
    with tempfile.TemporaryDirectory(prefix="moonpool-") as folder:
        library = Path(folder) / "libsoftcuda.so"
        subprocess.run([COMPILER, *flags, *sources, "-o", library], check=True, timeout=300)
        return library.read_bytes()


def compile_library(folder: Path) -> Path:
    """A file of its own: to the loader each is another library, so that no file's tests see the card of
    another's."""
    library = folder / "libsoftcuda.so"
    library.write_bytes(_compiled())
    return library


class CardArray:
    """Memory of a card. address: its own; view: how a test sees it."""

    def __init__(self, address: int, view: npt.NDArray[Any]) -> None:
        self.address = address
        self.view = view


def watch_questions(engine: TransferEngine) -> threading.Semaphore:
    """Released each time that the engine is asked for abandoned copies, which is what waits for them do."""
    asked = threading.Semaphore(0)
    ask = engine.has_abandoned_copies

    def seen() -> bool:
        asked.release()
        return ask()

    engine.has_abandoned_copies = seen  # type: ignore[method-assign]
    return asked


class SoftCard:
    """The software device as a test's program sees it, with an engine's stream."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library))
        self._lib.soft_at.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p()
        self._pinned: list[npt.NDArray[np.uint8]] = []  # registered memory is not given back
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)
        self._call("cuCtxPushCurrent_v2", self._context)
        stream = ctypes.c_void_p()
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
        self.stream = stream.value or 0

    def array(self, shape: tuple[int, ...]) -> CardArray:
        """Zeros on the card, float32."""
        address, count = ctypes.c_uint64(), int(np.prod(shape))
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
        hidden = self._lib.soft_at(address, ctypes.c_uint64(4 * count))
        view = np.ctypeslib.as_array((ctypes.c_float * count).from_address(hidden)).reshape(shape)
        view[:] = 0
        return CardArray(address.value, view)

    def free(self, array: CardArray) -> None:
        """Its address is no memory from now on."""
        self._call("cuMemFree_v2", ctypes.c_uint64(array.address))

    def adopt(self, address: int, size: int) -> int:
        """Memory of the host becomes the card's, too: the address that it has there."""
        self._lib.soft_adopt.restype = ctypes.c_uint64
        return int(self._lib.soft_adopt(ctypes.c_void_p(address), ctypes.c_size_t(size)))

    def pinned(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A copy in pinned memory of the host."""
        memory = np.empty(values.nbytes + 4096, np.uint8)
        start = -memory.ctypes.data % 4096
        copy = memory[start : start + values.nbytes].view(np.float32).reshape(values.shape)
        copy[:] = values
        self._pinned.append(memory)
        size = ctypes.c_size_t(copy.nbytes)
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(copy.ctypes.data), size, 1)
        return copy

    def forward(self, target: CardArray, values: npt.NDArray[np.float32]) -> None:
        """The engine's step: queues that ``values``, in pinned memory, are written to ``target``."""
        size, source = ctypes.c_size_t(values.nbytes), ctypes.c_uint64(values.ctypes.data)
        self._call(
            "cuMemcpyAsync", ctypes.c_uint64(target.address), source, size, ctypes.c_void_p(self.stream)
        )

    def offload(self, target: npt.NDArray[np.float32], source: CardArray) -> None:
        """The engine's own copy to the host: queues that ``source`` is written to ``target``, in pinned
        memory."""
        size, address = ctypes.c_size_t(target.nbytes), ctypes.c_uint64(target.ctypes.data)
        self._call(
            "cuMemcpyAsync", address, ctypes.c_uint64(source.address), size, ctypes.c_void_p(self.stream)
        )

    def calls(self, *names: str) -> int:
        """Of these functions of the driver."""
        return sum(int(self._lib.soft_calls(name.encode())) for name in names)

    def settle(self) -> None:
        """All that is queued runs."""
        self._lib.soft_settle()

    def hang(self, nth: int) -> None:
        """The nth operation from now on never ends."""
        self._lib.soft_hang(nth)

    def unhang(self) -> None:
        """What hung may end."""
        self._lib.soft_unhang()

    def die(self, nth: int, code: int) -> None:
        """The card dies with ``code`` in place of its nth operation from now on."""
        self._lib.soft_die(nth, code)

    def limit_pinned(self, size: int) -> None:
        """Bytes of pinned memory beyond which the driver refuses more."""
        self._lib.soft_limit(ctypes.c_uint64(2**64 - 1), ctypes.c_uint64(size))

    def violations(self) -> str:
        """What no program may do, and did; empty: nothing."""
        text = ctypes.create_string_buffer(200)
        return text.value.decode() if self._lib.soft_violations(text, ctypes.c_size_t(200)) else ""

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._lib, name)(*arguments)
        assert code == 0, f"{name}: {code}"


def choose(library: Path, policy: str, seed: int = 1) -> None:
    """As after the start of a process, with one card under a policy."""
    ctypes.CDLL(str(library)).soft_reset(POLICIES.index(policy), ctypes.c_uint64(seed))


@contextmanager
def soft_card(library: Path, policy: str = "late", seed: int = 1) -> Iterator[SoftCard]:
    """A card, which this process's driver has from now on."""
    gc.collect()  # what an earlier test left goes while the card still knows it
    choose(library, policy, seed)
    _native.use_driver_for_tests(str(library))
    try:
        card = SoftCard(library)
        yield card
        card.settle()
        assert card.violations() == ""
    finally:
        _native.use_driver_for_tests("")
