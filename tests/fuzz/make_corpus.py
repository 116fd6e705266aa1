"""`make_corpus.py FOLDER`: the first inputs of fuzz_ports, from the hexadecimal examples of the documents.

An input is a byte that chooses the port and purpose, and what is sent there. Each example stands alone, and
all of a purpose stand one behind the other, as a conversation.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("wire.md", "wire_master.md")
STORE, MEMBER, DIRECTORY, NODE_STRANGER, MASTER_STRANGER = range(5)


def frames() -> list[bytes]:
    """Those of the documents that ask: an answer has flag 1."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```hex\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            frame = bytes.fromhex("".join(block.split()))
            if not frame[6] & 1:
                found.append(frame)
    return found


def choices(kind: int) -> list[int]:
    if kind < 16:
        return [NODE_STRANGER, MASTER_STRANGER]
    if kind < 32:
        return [STORE]
    return [MEMBER] if kind < 35 else [DIRECTORY]


def inputs() -> list[bytes]:
    found = []
    conversations: dict[int, bytes] = {}
    for frame in frames():
        for choice in choices(frame[5]):
            found.append(bytes([choice]) + frame)
            conversations[choice] = conversations.get(choice, b"") + frame
    return found + [bytes([choice]) + sent for choice, sent in conversations.items()]


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for data in inputs():
        Path(folder, hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
