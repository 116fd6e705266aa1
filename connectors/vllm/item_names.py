"""Names the images, sounds and videos of requests by their content. docs/keys.md has the format.

vLLM's own name of an item (``identifier``) is a hash of its file and of options, or else the UUID that the
client gave it, and the scheduler cannot tell one from the other. So an item is named here by what the model's
encoder is given: the tensors that vLLM's processor made of it, whatever its options and versions were. That
holds for UUIDs and for embeddings that the client computed, too.

vLLM's own caches, of KV and of the encoder's outputs, do go by the identifier. An identifier that had two
contents may stand there for either, so from then on its items have no name here, and the requests with it
that are under way lose theirs. So the content of each item is recorded before vLLM may compute the item; one
that is not known counts as another one.

Runs on the scheduler's thread; item_hashes.py has the thread that hashes large items.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable

from moonpool.connectors.vllm.engine_types import MediaFeature, Request
from moonpool.connectors.vllm.item_hashes import INTEGERS, ItemHashes, NoName, add, add_text, numbers
from moonpool.connectors.vllm.repeats import Repeats, times
from moonpool.connectors.vllm.requests.media import EVERY_TOKEN, TEXT_ALONE, Media
from moonpool.core.store.keys import Item, chain_seed

ITEM_PREFIX = b"moonpool-item-v1"
SALTED_PREFIX = b"moonpool-salted-item-v1"
SIZES_MAX = 16  # numbers in one field of an item that may be its sizes
IDENTIFIERS_MAX = 1 << 16  # that are remembered with their contents; 13 MB
SIZES_ALONE = (
    "its content is not in the request, which has its sizes alone, for the outputs of an encoder elsewhere"
)


class ItemNames:
    """Names the items of requests."""

    def __init__(
        self,
        *,
        form: str,
        refusal: str,
        log: logging.Logger,
        clock: Callable[[], float],
        on_conflict: Callable[[str], None] = lambda identifier: None,
        hashes: ItemHashes | None = None,
    ) -> None:
        """form: how this engine makes KV of an item, as far as its tensors do not say it.
        refusal: why no item of this engine can be named, or "".
        on_conflict: called with an identifier that stood for one content so far, and may stand for another.
        hashes: of contents; None: its own.
        """
        self._form = form
        self._refusal = refusal
        self._log = log
        self._repeats = Repeats(clock)
        self._on_conflict = on_conflict
        # identifier -> digest of its content; b"": it had two, or one that is not known
        self._contents: dict[str, bytes] = {}
        self.hashes = hashes or ItemHashes()

    def begin(self, request: Request) -> None:
        """Has the thread hash what is not hashed yet, when that is much altogether."""
        if not self._refusal:
            self.hashes.begin([feature.data for feature in request.mm_features or ()])

    def is_ready(self, request: Request) -> bool:
        """Whether ``media`` does not wait for the thread."""
        return self.hashes.is_ready([feature.data for feature in request.mm_features or ()])

    def close(self) -> None:
        """Ends the thread."""
        self.hashes.close()

    def record(self, request: Request) -> list[bytes | str]:
        """Remembers what the items of a request are, which vLLM may compute from here on. Returns the digest
        of each one's content, or why it has none."""
        features = request.mm_features or ()
        contents: list[bytes | str] = []
        if self._refusal:
            return [self._refusal] * len(features)
        try:
            for feature in features:
                contents.append(self._content(feature))
        finally:  # vLLM computes the request whatever was raised here
            for at, feature in enumerate(features):
                content = contents[at] if at < len(contents) else ""
                self._remember(feature.identifier, content if isinstance(content, bytes) else b"")
        return contents

    def distrust(self, features: Iterable[MediaFeature]) -> None:
        """vLLM may compute these items, and what they are is not looked at."""
        if not self._refusal:
            for feature in features:
                self._remember(feature.identifier, b"")

    def media(self, request: Request) -> Media:
        """Records the items of the request, and names them, but for those that are still being hashed. Logs
        why one has no name."""
        features = request.mm_features
        if not features:
            return TEXT_ALONE
        items: list[Item] = []
        until, refusal = EVERY_TOKEN, ""
        for feature, content in zip(features, self.record(request), strict=True):
            begin = int(feature.mm_position.offset)
            try:
                items.append(Item(begin, self._name(feature, content)))
            except NoName as why:
                if begin < until:
                    until, refusal = begin, str(why)
        if refusal and not self._refusal and (count := self._repeats.due(refusal)):
            self._log.warning(
                "moonpool: request %s is computed without the pool from token %d on: %s%s",
                *(request.request_id, until, refusal, times(count)),
            )
        return Media(tuple(sorted(items)), until, refusal)

    def names(self, request: Request) -> list[bytes | str]:
        """Records the items of the request. The name of each in requests of its salt, 32 bytes, or why it
        has none."""
        found: list[bytes | str] = []
        for feature, content in zip(request.mm_features or (), self.record(request), strict=True):
            try:
                found.append(salted(self._name(feature, content), request.cache_salt))
            except NoName as why:
                found.append(str(why))
        return found

    def _name(self, feature: MediaFeature, content: bytes | str) -> bytes:
        """The digest of one item. Raises NoName."""
        if isinstance(content, str):
            raise NoName(content)
        if self._contents.get(feature.identifier) != content:
            raise NoName(
                f"two {feature.modality}s came under one UUID, or one that was not hashed, and vLLM's own "
                f"caches go by the UUID; give each content a UUID of its own"
            )
        digest = hashlib.sha256(ITEM_PREFIX + content)
        for text in (self._form, feature.modality):
            add_text(digest.update, text)
        digest.update(int(feature.mm_position.length).to_bytes(8, "little"))
        add(digest.update, feature.mm_position.is_embed)
        return digest.digest()

    def _content(self, feature: MediaFeature) -> bytes | str:
        """The digest of what the encoder is given, or why it has none."""
        data = feature.data
        if data is None:
            return f"vLLM does not give its scheduler the content of the {feature.modality}"
        if not has_content(feature):
            return SIZES_ALONE
        return self.hashes.digest(data) or "its content was not hashed in time"

    def _remember(self, identifier: str, content: bytes) -> None:
        """content: b"": not known."""
        before = self._contents.pop(identifier, content)
        self._contents[identifier] = content if before == content else b""
        if len(self._contents) > IDENTIFIERS_MAX:
            del self._contents[next(iter(self._contents))]
        if before and before != content:
            self._on_conflict(identifier)


def salted(digest: bytes, cache_salt: str | None) -> bytes:
    """The name, 32 bytes, of an item in requests of this salt.

    digest: of the item, 32 bytes.
    """
    if cache_salt is None:
        return digest
    return hashlib.sha256(SALTED_PREFIX + chain_seed(cache_salt=cache_salt) + digest).digest()


def has_content(feature: MediaFeature) -> bool:
    """Whether the item's data are more than sizes, as far as that is sure: an item of wide integers alone,
    such as codes of sounds, has no name. True without data, which a worker may have."""
    if feature.data is None:
        return True
    return numbers([element.data for element in feature.data.values()]) >= _embeddings(feature)


def is_sizes_alone(feature: MediaFeature) -> bool:
    """Whether no encoder can compute the item. Codes are as many as their embeddings, and more than sizes
    are."""
    if feature.data is None or has_content(feature):
        return False
    codes = max((numbers(element.data, INTEGERS) for element in feature.data.values()), default=0)
    return codes < max(_embeddings(feature), SIZES_MAX + 1)


def _embeddings(feature: MediaFeature) -> int:
    place = feature.mm_position
    return int(place.length if place.is_embed is None else place.is_embed.sum())
