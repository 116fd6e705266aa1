"""Seeded mutations of valid frames: what a fuzzer without coverage can do, over any connection."""

from __future__ import annotations

import random
import re
from pathlib import Path

from ..core import wire_client as w
from .namespaces import ROOT

INTERESTING = (0, 1, 2, 7, 8, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
WIDE = (0, 1, (1 << 31), (1 << 32) - 1, (1 << 48), (1 << 63) - 1, (1 << 63), (1 << 64) - 1)


def documented_frames(*pages: str) -> list[bytes]:
    """The hexadecimal examples of these pages of docs/: whole frames."""
    frames = []
    for page in pages:
        text = Path(ROOT, "docs", page).read_text()
        for block in re.findall(r"```hex\n(.*?)```", text, re.DOTALL):
            frames.append(bytes.fromhex("".join(block.split())))
    return frames


def of_kinds(frames: list[bytes], kinds: range) -> list[bytes]:
    """Those of the frames that ask (an answer has flag 1) and are of these kinds."""
    return [frame for frame in frames if frame[5] in kinds and not frame[6] & w.ANSWER]


def mutated(rng: random.Random, corpus: list[bytes]) -> bytes:
    """One to four frames, each changed somewhere, most with a length that is right again."""
    return b"".join(_frame(rng, corpus) for _ in range(rng.choice((1, 1, 1, 2, 4))))


def _frame(rng: random.Random, corpus: list[bytes]) -> bytes:
    frame = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        _change(rng, frame, corpus)
    if len(frame) >= w.HEADER.size and rng.random() < 0.9:
        frame[0:5] = w.HEADER.pack(w.MAGIC, w.VERSION, 0, 0, 0, 0, 0)[0:5]
        if rng.random() < 0.95:
            frame[8:16] = (len(frame) - w.HEADER.size).to_bytes(4, "little") + bytes(4)
    return bytes(frame)


def _change(rng: random.Random, frame: bytearray, corpus: list[bytes]) -> None:
    at = rng.randrange(len(frame) + 1)
    kind = rng.randrange(8)
    if kind == 0 and at < len(frame):
        frame[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        frame[at : at + 1] = rng.choice(INTERESTING).to_bytes(4, "little")[: rng.choice((1, 2, 4))]
    elif kind == 2:
        frame[at : at + 4] = rng.choice(INTERESTING).to_bytes(4, "little")
    elif kind == 3:
        frame[at : at + 8] = rng.choice(WIDE).to_bytes(8, "little")
    elif kind == 4:
        del frame[at : at + rng.randrange(1, 32)]
    elif kind == 5:
        frame[at:at] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 6:
        other = rng.choice(corpus)
        begin = rng.randrange(len(other))
        frame[at:at] = other[begin : begin + rng.randrange(1, 200)]
    else:
        piece = bytes(frame[at : at + rng.randrange(1, 100)])
        frame[at:at] = piece * rng.randrange(1, 40)
