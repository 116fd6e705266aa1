"""CudaMover over CPU tensors, with streams that note what is asked of them: ``device_mover.py``, with a
Python that has torch. No GPU is used; it shows that the right bytes are copied, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moonpool.connectors.tensorrt_llm.layout import read_layout, read_tensor
from moonpool.connectors.tensorrt_llm.staging import CudaMover

said: list[str] = []


class Stream:
    def __init__(self, name: str = "loads", device: Any = None) -> None:
        self.name = name

    def record_event(self) -> Any:
        said.append(f"{self.name} records")
        return SimpleNamespace(synchronize=lambda: said.append("waited"), of=self.name)

    def wait_event(self, event: Any) -> None:
        said.append(f"{self.name} waits for {event.of}")

    def synchronize(self) -> None:
        said.append(f"{self.name} ends")

    def __enter__(self) -> None:
        said.append(f"on {self.name}")

    def __exit__(self, *exc: object) -> None:
        pass


torch.cuda.Stream = Stream  # type: ignore[misc, assignment]
torch.cuda.stream = lambda stream: stream  # type: ignore[assignment]
empty = torch.empty
torch.empty = lambda *args, pin_memory=False, **more: empty(*args, **more)  # type: ignore[assignment]

forward = Stream("forward")


def round_trip(mover: Any, pages: list[tuple[int, ...]], read: Any, wipe: Any) -> None:
    before = [read(page) for page in pages]
    said.clear()
    wait = mover.save(list(enumerate(pages)), forward)
    assert said == ["on forward", "forward records"], said  # behind the forward pass, and not waited for
    wait()
    assert said.pop() == "waited"
    wipe()
    mark = mover.mark(forward)
    said.clear()
    mover.load(list(enumerate(pages)), mark)
    assert said == ["loads waits for forward", "on loads", "loads ends"], said
    assert [read(page) for page in pages] == before


# One pool tensor of bfloat16
pool = torch.arange(6 * 3 * 2 * 32, dtype=torch.float32).to(torch.bfloat16).reshape(6, 3, 2, 32)
raw = pool.view(torch.uint8)
round_trip(
    CudaMover(read_tensor(pool, 4), 3),
    [(4,), (0,), (5,)],
    lambda page: raw[page[0]].clone().numpy().tobytes(),
    lambda: pool.zero_(),
)

# Two layer groups, whose regions are strided views; a block without a page in the second
slots = [
    torch.arange(8 * 64, dtype=torch.int16).view(torch.uint8).reshape(8, 128) + group for group in (0, 1)
]


def region(tensor: Any) -> Any:
    return SimpleNamespace(
        base=tensor.data_ptr(), size=tensor.shape[1], stride=tensor.stride(0), num_slots=tensor.shape[0],
        buffers=(), as_tensor=lambda: tensor,
    )  # fmt: skip


layout = SimpleNamespace(
    tokens_per_block=4,
    groups=[SimpleNamespace(regions=(region(t[:, :48]), region(t[:, 96:]))) for t in slots],
)
round_trip(
    CudaMover(read_layout(layout), 2),
    [(3, 2), (7, -1)],
    lambda page: [t[p, at].clone().numpy().tobytes() for t, p in zip(slots, page, strict=True) if p >= 0
                  for at in (slice(48), slice(96, 128))],
    lambda: [t.zero_() for t in slots],
)  # fmt: skip
print("ok")
