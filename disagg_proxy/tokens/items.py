"""Images, sounds and videos in prompts whose ids an engine gives.

Their ids are placeholders, the same for every image, so prompts of equal text with other images would look
alike to the prefix index. Of a rendered prompt vLLM tells where its items are and their hashes, and words of
these stand here for the placeholders: the prompt keeps its length and the text before its first item, and
behind it resembles only prompts with the same items. Engines and the pool name such blocks in their own
ways, so of these the index finds the text before the first item.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import numpy.typing as npt


class _Place(msgspec.Struct):
    offset: int
    length: int


class Items(msgspec.Struct):
    """What vLLM tells of the items of a rendered prompt: of each kind the hashes and the places."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Place]] = {}


class _Message(msgspec.Struct):
    content: object = None


_messages = msgspec.json.Decoder(list[_Message])


def tell_apart(ids: npt.NDArray[np.uint32], items: Items) -> None:
    """Puts words of each item's hash in the place of its placeholders. Raises ValueError for places that are
    not in the prompt, or items without a hash."""
    for kind, places in items.mm_placeholders.items():
        for place, name in zip(places, items.mm_hashes.get(kind, ()), strict=True):
            if not 0 <= place.offset <= place.offset + place.length <= len(ids):
                raise ValueError(f"an item at {place.offset} of {len(ids)} tokens")
            words = np.frombuffer(hashlib.sha256(f"{kind} {name}".encode()).digest(), "<u4")
            ids[place.offset : place.offset + place.length] = np.resize(words, place.length)


def has_items(messages: bytes) -> bool:
    """Whether a message has a part that is not text. Raises a MsgspecError for what are no messages."""
    if b'"type"' not in messages:
        return False
    contents = (message.content for message in _messages.decode(messages))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") != "text" for part in parts)
