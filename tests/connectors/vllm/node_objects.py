"""What engines with several KV cache groups left in a node, and answers beside those of an engine alone."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from moonpool import _native
from moonpool.core.config import paths
from moonpool.core.store.keys import block_digests, parse_block_name

CHANCE_DIFFERENCE_MAX = 1e-4  # of log-probabilities, in float32


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest of the log-probabilities of two answers."""
    return max(abs(mine - yours) for mine, yours in zip(one["chances"], other["chances"], strict=True))


def assert_equal(with_pool: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Tokens are the same, and log-probabilities as good as that."""
    for one, other in zip(with_pool, alone, strict=True):
        assert one["tokens"] == other["tokens"]
        assert difference(one, other) < CHANCE_DIFFERENCE_MAX


def arena(pid: int) -> mmap.mmap:
    """The node's arena, mapped through its descriptor: the largest memfd it holds."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:" in os.readlink(link):
            found.append((link.stat().st_size, str(link)))
    size, path = max(found)
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), size)


class NodeObjects:
    """What the node has of an engine's fingerprint, to take it away or damage it."""

    def __init__(self, runtime: Path, mark: str, block_tokens: int) -> None:
        token = paths.read_token(runtime / "token")
        self._client = _native.Client(str(runtime / "node.sock"), token, fingerprint=bytes.fromhex(mark))
        self._client.connect()
        self._block_tokens = block_tokens

    def of_block(self, prompt: list[int], block: int) -> dict[bytes, int]:
        """The objects of a block of the prompt, each with the first of its layers."""
        digest = block_digests(prompt, self._block_tokens)[block]
        names = [row[0] for row in self._client.list(digest, 100)]
        return {name: parse_block_name(name)[1].first_layer for name in names}

    def remove(self, name: bytes) -> None:
        self._client.remove([name])
        assert not any(self._client.exists([name]))

    def shorten(self, name: bytes) -> None:
        """Puts another content there, which is no block's."""
        self._client.put([name], [b"another"], replace=True)

    def give(self, name: bytes, of: bytes) -> None:
        """Puts the content of another object there."""
        (content,) = self._client.get_views([of])
        self._client.put([name], [bytes(content)], replace=True)

    def close(self) -> None:
        self._client.close()
