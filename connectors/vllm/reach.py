"""How far back the layers of a KV cache group look, and so which blocks a request needs to go on.

    full attention          every block before it
    sliding window          the blocks of the last window - 1 tokens: the next token is in the window, too
    chunked attention       the blocks of the chunk that the next token is in
    states                  the last block, which is a snapshot of that length (states.py)

vLLM frees the other blocks of a group, and gives the null block in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0  # the id that vLLM gives in the place of a block that its group does not need

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a group's layers look.

    window: of a sliding window, in tokens with the one that looks; 0: none.
    chunk: of chunked attention, in tokens; 0: none.
    state: whether they keep a state in the place of KV.
    """

    window: int = 0
    chunk: int = 0
    state: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the layers look at everything before them."""
        return not (self.window or self.chunk or self.state)

    def first_token(self, computed: Counts) -> Counts:
        """For each number of computed tokens the first of them that the next one needs."""
        if self.window:
            return np.maximum(computed - self.window + 1, 0)
        if self.state:
            return np.maximum(computed - 1, 0)
        if self.chunk:
            return computed // self.chunk * self.chunk
        return np.zeros_like(computed)

    def first_block(self, computed: Counts, block_tokens: int) -> Counts:
        """The same in blocks."""
        return self.first_token(computed * block_tokens) // block_tokens

    def __str__(self) -> str:
        if self.window:
            return f"window {self.window}"
        if self.chunk:
            return f"chunk {self.chunk}"
        return "state" if self.state else "full"


FULL = Reach()
