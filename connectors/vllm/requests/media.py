"""What stands among the tokens of one prompt beside text: images, sounds and videos, each with its place and
the digest of its content.

    tokens     0 ........ 40 ................ 90 ... 100 .............. 130 ...
               text       item a                     item without a name
               named ------------------------------->|
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from moonpool.core.store.keys import Item

EVERY_TOKEN = sys.maxsize


@dataclass(frozen=True, slots=True)
class Media:
    """The items of one prompt.

    items: those with a name, by their begin.
    named_tokens: where the first item without a name begins; EVERY_TOKEN: all have one.
    refusal: why that one has none, or "".
    """

    items: tuple[Item, ...] = ()
    named_tokens: int = EVERY_TOKEN
    refusal: str = ""

    def blocks_with_begins(self, block_tokens: int, first: int, last: int) -> set[int]:
        """Which of the blocks [first, last) an item begins in."""
        blocks = {item.begin // block_tokens for item in self.items}
        return {block for block in blocks if first <= block < last}

    def begun(self, first: int, last: int) -> list[Item]:
        """The items that begin in the tokens [first, last), counted from ``first``."""
        return [Item(item.begin - first, item.digest) for item in self.items if first <= item.begin < last]


TEXT_ALONE = Media()
