"""The stub of TensorRT-LLM with its KV cache on a card of the software device: what a step computes, and what
the next owner of a page writes, is queued on the engine's stream and runs late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from tests.connectors.tensorrt_llm.stub_engine import Engine, Request
from tests.soft_card import CardArray, SoftCard


class CardEngine(Engine):
    """Its arrays mirror the card's memory: a page is copied there when it is written, and back to be read."""

    device = SimpleNamespace(type="cuda", index=0)
    card: ClassVar[SoftCard]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.stream = SimpleNamespace(cuda_stream=self.card.stream)
        self._mirrored: dict[int, CardArray] = {}  # by the address of the mirror
        super().__init__(*arguments, **more)

    def allocate(self, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], int]:
        mirror, _ = super().allocate(shape)
        there = self.card.array((mirror.nbytes // 4,))
        self._mirrored[mirror.ctypes.data] = there
        return mirror, there.address

    def compute(self, request: Request, first: int, last: int) -> None:
        super().compute(request, first, last)
        for block in range(first // self.tokens, -(-last // self.tokens)):
            for group in range(self.groups):
                if request.pages[group][block] >= 0:
                    self._write(group, request.pages[group][block])

    def scribble(self, group: int, page: int) -> None:
        super().scribble(group, page)
        self._write(group, page)

    def answer(self, request: Request) -> str:
        self._read(request)
        loaded = self._blocks(request, request.matched // self.tokens)
        self.card.settle()
        self._read(request)
        assert self._blocks(request, request.matched // self.tokens) == loaded, "told before it was loaded"
        return super().answer(request)

    def _mirrors(self, group: int) -> list[np.ndarray[Any, Any]]:
        """The arrays of a group, of all ranks."""
        if self.groups == 1:
            return [memory[0] for _, memory in self.ranks]
        return [region.array.view(np.uint16) for groups in self.regions for region in groups[group]]

    def _place(self, mirror: np.ndarray[Any, Any], page: int) -> tuple[CardArray, int]:
        """The memory of a page on the card, and its first float there."""
        return self._mirrored[mirror.ctypes.data], mirror[page].nbytes // 4 * page

    def _write(self, group: int, page: int) -> None:
        for mirror in self._mirrors(group):
            there, at = self._place(mirror, page)
            values = mirror[page].reshape(-1).view(np.float32)
            target = CardArray(there.address + 4 * at, there.view)
            self.card.forward(target, self.card.pinned(values))

    def _read(self, request: Request) -> None:
        for group, pages in enumerate(request.pages):
            for mirror in self._mirrors(group):
                for page in pages:
                    if page >= 0:
                        there, at = self._place(mirror, page)
                        flat = mirror[page].reshape(-1).view(np.float32)
                        flat[:] = there.view[at : at + flat.size]

    def _blocks(self, request: Request, count: int) -> list[bytes]:
        return [
            mirror[page].tobytes()
            for group, pages in enumerate(request.pages)
            for mirror in self._mirrors(group)
            for page in pages[:count]
            if page >= 0
        ]
