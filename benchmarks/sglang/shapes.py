"""What one call moves: pages of host memory, as a rank of a model has them."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.store.workload import MIB

PAGE_TOKENS = 64
LAYERS = 16
ELEMENT_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Shape:
    """heads and dim: of the keys, and of the values; MLA has one latent instead of both."""

    name: str
    mla: bool
    heads: int
    dim: int
    pages: int

    @property
    def page_bytes(self) -> int:
        planes = 1 if self.mla else 2
        return planes * LAYERS * PAGE_TOKENS * self.heads * self.dim * ELEMENT_BYTES

    @property
    def described(self) -> str:
        tokens = self.pages * PAGE_TOKENS
        return f"{tokens:,} tokens, {self.pages} pages, {self.pages * self.page_bytes / MIB:.0f} MiB"


SHAPES = (
    Shape("8 heads of 128", False, 8, 128, 32),
    Shape("1 head of 128", False, 1, 128, 128),  # of 8, with tensor parallelism 8
    Shape("MLA, 576", True, 1, 576, 64),
)
