"""The token file of one host, for tests in which one secret replaces another."""

from __future__ import annotations

import os
from pathlib import Path

from moonpool.core.config.cluster_token import ClusterToken, read_token

OLD, NEW = b"the old secret of this cluster", b"the new secret of this cluster"
# What docs/security.md has an operator write, one step on all hosts before the next begins anywhere.
STEPS = (OLD + b"\n" + NEW, NEW + b"\n" + OLD, NEW)


class TokenFile:
    """A file that is replaced whole, as editors and Kubernetes do."""

    def __init__(self, path: Path, text: bytes = OLD) -> None:
        self.path = path
        self.replace(text)

    def replace(self, text: bytes, mode: int = 0o600) -> None:
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_bytes(text)
        draft.chmod(mode)
        os.replace(draft, self.path)

    def token(self) -> ClusterToken:
        """As a process on that host reads it at its start."""
        return read_token(self.path)
