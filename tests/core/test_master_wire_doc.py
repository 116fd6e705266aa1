"""docs/wire_master.md, byte by byte: its examples are what master_wire.py builds, which speaks to the real
master in test_master.py."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from . import master_wire as m
from . import wire_client as w
from .master_wire import Identity, Load

PAGE = Path(__file__).parents[2] / "docs" / "wire_master.md"

KEY = bytes(range(16, 32))
NODE = Identity(b"a", bytes(range(64, 80)), events=b"tcp://10.0.0.1:5559", replay=b"tcp://10.0.0.1:5560")


def answer(kind: int, body: bytes, request_id: int) -> bytes:
    return w.frame(kind, body, request_id=request_id, flags=w.ANSWER)


FIRST = 1700000000000 << 20  # of a master that started then

EXAMPLES = {
    "JOIN": w.frame(m.JOIN, m.join(NODE, Load()), request_id=1),
    "JOIN, answer": answer(
        m.JOIN,
        struct.pack("<HBBIIQ", 0, 0, 0, 200, 16384, 2)
        + m.drops(0, [])
        + m.versions(FIRST, [])
        + struct.pack("<Q", FIRST)
        + m.PACE,
        1,
    ),
    "REMOVALS": w.frame(m.REMOVALS, m.removals(0, [(KEY, FIRST - 1)]), flags=w.ONE_WAY),
    "DELTA": w.frame(
        m.DELTA, m.delta_applied([(KEY, m.DRAM)], FIRST, flags=m.BEGIN | m.END), flags=w.ONE_WAY
    ),
    "BEAT": w.frame(m.BEAT, m.beat(0, Load(), FIRST), request_id=2),
    "BEAT, answer": answer(
        m.BEAT, struct.pack("<Q", 2) + m.drops(0, [KEY]) + m.versions(FIRST + 1, [FIRST + 1]) + m.PACE, 2
    ),
    "LEAVE": w.frame(m.LEAVE, b"", flags=w.ONE_WAY),
    "MEMBERS": w.frame(m.MEMBERS, struct.pack("<QB", 0, m.TAKES_CHANGES), request_id=3),
    "MEMBERS, answer of changes": answer(
        m.MEMBERS,
        struct.pack("<QB", 4, m.CHANGED | m.SINCE)
        + struct.pack("<HH", 1, 3)
        + struct.pack("<HHBBQ", 1, 0, 1, 0, 50)
        + struct.pack("<IQ", 0, FIRST),
        3,
    ),
    "MEMBERS, answer": answer(
        m.MEMBERS,
        struct.pack("<QBI", 2, 1, 1)
        + m.member(0, 0, 50, NODE, Load())
        + NODE.endpoints()
        + struct.pack("<Q", FIRST),
        3,
    ),
    "LOCATE": w.frame(m.LOCATE, m.locate([KEY, bytes(16)]), request_id=4),
    "LOCATE, answer": answer(
        m.LOCATE,
        struct.pack("<QI", 2, 2) + struct.pack("<BHBB", 1, 0, m.DRAM, 0) + struct.pack("<Q", FIRST),
        4,
    ),
    "PLACE": w.frame(m.PLACE, m.place(4096, 2, [1], [b"host"]), request_id=5),
    "PLACE, answer": answer(m.PLACE, struct.pack("<HHQ", 1, 0, FIRST), 5),
    "ORDERED": w.frame(m.ORDERED, m.ordered(FIRST + 1, 2, [KEY], [0, 1], [0b11], [0b10]), request_id=6),
    "ORDERED, answer": answer(m.ORDERED, struct.pack("<IQ", 1, FIRST + 1), 6),
    "MASTERS": w.frame(
        m.MASTERS, m.masters(FIRST, [b"10.0.0.1:7700", b"10.0.0.3:7700"], own=1), flags=w.ONE_WAY
    ),
    "FORGET": w.frame(m.FORGET, m.forget([KEY], [1]), request_id=7),
    "FORGET, answer": answer(m.FORGET, struct.pack("<I", 1), 7),
}


def examples_of_the_page() -> dict[str, bytes]:
    found = re.findall(
        r"^Example, ([A-Z_]+(?:, answer(?: of changes)?)?)[^\n]*:\n\n```hex\n(.*?)^```",
        PAGE.read_text(),
        re.M | re.S,
    )
    return {name: bytes.fromhex(text) for name, text in found}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_the_page_is_what_is_sent(name: str) -> None:
    assert examples_of_the_page()[name].hex(" ") == EXAMPLES[name].hex(" ")


def test_the_page_has_no_other_examples() -> None:
    assert set(examples_of_the_page()) == set(EXAMPLES)
