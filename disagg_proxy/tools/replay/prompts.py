"""Token ids for a trace's hash ids: the same id is the same tokens wherever it comes, so prompts have in
common what the trace says, and nothing else.

A trace names blocks of 512 tokens. Smaller models take shorter prompts: each of these blocks then becomes
``block_tokens`` of them, and a prompt is cut where it would be longer than ``input_max``. Both keep which
prompts begin alike.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tools.simulator.trace import BLOCK_TOKENS, Arrival

_bad = partial(ConfigError, operation="replay")


class Prompt(NamedTuple):
    """reusable: leading tokens, in whole blocks, that earlier prompts had: the hits of caches without a
    limit. The last token of a prompt is never among them: engines always compute it."""

    ids: list[int]
    reusable: int


class Prompts:
    """first_id, last_id: the range of token ids; tokenizers have their special ones below or above it.
    input_max: tokens; 0: any length. seed: of the tokens; another one shares nothing with what was sent
    before, so that no cache is warm."""

    def __init__(
        self,
        *,
        block_tokens: int = BLOCK_TOKENS,
        first_id: int = 1000,
        last_id: int = 29_999,
        input_max: int = 0,
        seed: int = 0,
    ) -> None:
        if not 1 <= block_tokens <= BLOCK_TOKENS:
            raise _bad(f"a block of the trace becomes 1 to {BLOCK_TOKENS} tokens, not {block_tokens}")
        if not 0 <= first_id < last_id < 1 << 31:
            raise _bad(f"token ids are a range from the lower to the higher, not {first_id}:{last_id}")
        if input_max < 0:
            raise _bad(f"a prompt cannot have at most {input_max} tokens")
        self._block_tokens = block_tokens
        self._first_id, self._last_id = first_id, last_id
        self._input_max = input_max
        self._seed = seed
        self._seen: set[int] = set()

    def length(self, tokens: int) -> int:
        """The length here of a prompt that has ``tokens`` in the trace."""
        blocks, rest = divmod(tokens, BLOCK_TOKENS)
        scaled = blocks * self._block_tokens + -(-rest * self._block_tokens // BLOCK_TOKENS)
        return min(scaled, self._input_max) if self._input_max else scaled

    def make(self, arrival: Arrival) -> Prompt:
        """Call it in the order of arrival: ``reusable`` depends on the prompts before."""
        length = self.length(arrival.tokens)
        size = self._block_tokens
        blocks = arrival.blocks[: -(-length // size)]
        ids = np.concatenate([self._block(block) for block in blocks])[:length]
        whole = blocks[: (length - 1) // size]
        known = next((at for at, block in enumerate(whole) if block not in self._seen), len(whole))
        self._seen.update(blocks[: length // size])
        return Prompt(ids.tolist(), known * size)

    def _block(self, block: int) -> np.ndarray:
        chance = np.random.default_rng((self._seed, block))
        return chance.integers(self._first_id, self._last_id, self._block_tokens, endpoint=True)
