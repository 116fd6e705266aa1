"""`make_corpus.py FOLDER`: the first inputs of each fuzzer, into a folder of its name.

fuzz_ports: from the hexadecimal examples of the documents. An input is a byte that chooses the port and
purpose, and what is sent there. Each example stands alone, and all of a purpose stand one behind the other,
as a conversation. One choice is for decoders alone: a byte that chooses one, and a body.
fuzz_parsers: a byte that chooses the parser, and one message of each kind.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("wire.md", "wire_master.md", "wire_engine.md")
STORE, MEMBER, DIRECTORY, STANDBY, NODE_STRANGER, MASTER_STRANGER = range(6)
ENGINE, ENGINE_GREETED, ENGINE_STRANGER, ENGINE_UNIX_SOCKET, DECODER = range(6, 11)
ENGINE_ASK, SHM_MAP, CUDA_REGIONS = 56, 54, 55
REGION = 0x400000  # where fuzz_ports.cpp has the engine's memory, and the page its examples


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
        return [NODE_STRANGER, MASTER_STRANGER, ENGINE_STRANGER]
    if kind < 32:
        return [STORE]
    if kind < 48:
        return [MEMBER] if kind < 35 else [STANDBY] if kind >= 42 else [DIRECTORY]
    if kind in (SHM_MAP, CUDA_REGIONS):
        return [ENGINE_UNIX_SOCKET]
    return [ENGINE, ENGINE_GREETED] if kind != 49 else [ENGINE, ENGINE_GREETED, ENGINE_UNIX_SOCKET]


def text16(text: bytes) -> bytes:
    return struct.pack("<H", len(text)) + text


def frame_of(kind: int, body: bytes) -> bytes:
    return struct.pack("<4sBBHIIQ", b"MPL1", 1, kind, 0, len(body), 0, 9) + body


# 10.8.0.1 as RoCE v2, the first port of the software libibverbs; a queue pair of it; an address of IPv4
PORT = struct.pack("<BBH", 0, 5, 0) + bytes(10) + b"\xff\xff\x0a\x08\x00\x01"
PAIR = PORT + struct.pack("<IIB", 77, 1, 16)
EFA_END = b"\1" + text16(struct.pack("<H", 2) + b"\0\x09\x7f\0\0\1" + bytes(8))


def engine_frames() -> list[bytes]:
    """Questions of which the page has no example."""
    ranges = struct.pack("<HQQQQ", 2, REGION, 4096, REGION + 60_000, 100_000)
    questions = [
        text16(name) + question
        for name, end in ((b"rdma", PAIR), (b"efa", EFA_END))
        for question in (b"\0" + ranges, struct.pack("<BIB", 1, 3, 0) + end, struct.pack("<BI", 2, 3))
    ]
    return [frame_of(ENGINE_ASK, body) for body in questions] + [
        frame_of(SHM_MAP, struct.pack("<Q", 1)),
        frame_of(CUDA_REGIONS, b""),
    ]


def decoder_bodies() -> list[tuple[int, bytes]]:
    """(the decoder of fuzz_ports.cpp, a body for it)"""
    offer = b"\1\0" + PORT + text16(b"soft0:1 10.8.0.1")
    nics = text16(b"tcp") + b"\2" + text16(b"lo") + text16(b"eth0")
    welcome = struct.pack("<H", 3) + bytes(16) + text16(b"a") + text16(b"host") + text16(b"boot")
    welcome += (text16(b"socket") + bytes(32)) * 2
    welcome += b"\2" + text16(b"efa") + text16(nics) + text16(b"rdma") + text16(offer)
    region = struct.pack("<QQQB", 7, REGION, 8192, 0)
    rows = struct.pack("<I", 1) + region + text16(b"cpu:0")
    changes = rows + struct.pack("<QBIQQ", 5, 0, 1, 6, 4096)
    keys = [
        struct.pack("<H", 1) + region + text16(b"") + struct.pack("<QI", 4096, 2) + key * 4
        for key in (b"\1" + bytes(4), b"\1" + bytes(8))
    ]
    card = struct.pack("<QQQB", 8, REGION + 8192, 4096, 3) + text16(b"")
    card += struct.pack("<QQ", REGION + 8192, 4096) + bytes(16 + 64)
    cards = struct.pack("<I", 2) + region + card
    hello = struct.pack("<H", 3) + bytes(32) + struct.pack("<I", 1) + text16(b"a")
    bodies = [welcome, rows, changes, *keys, offer, PAIR, nics, EFA_END, cards, hello]
    return list(enumerate(bodies))


def inputs() -> list[bytes]:
    found = []
    conversations: dict[int, bytes] = {}
    for frame in frames() + engine_frames():
        for choice in choices(frame[5]):
            found.append(bytes([choice]) + frame)
            conversations[choice] = conversations.get(choice, b"") + frame
    found += [bytes([choice]) + sent for choice, sent in conversations.items()]
    return found + [bytes([DECODER, decoder]) + body for decoder, body in decoder_bodies()]


REQUESTS = (
    b"\r\nPOST http://h/v1/x?a#b HTTP/1.1\r\nHost: h\r\nConnection: close, X-A\r\nX-A: 1\r\n"
    b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n0\r\nT: u\r\n\r\n",
    b"GET /a HTTP/1.0\r\nX-Request-Id: i\r\nContent-Length: 2\r\nUpgrade: h2c\r\n\r\n{}",
)
ANSWERS = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\nhello",
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}",
)
TEXTS = (
    b'{"model":"m","prompt":[1, 22,333 ,128000],"stream":true,"max_tokens":5,"min_tokens":1,'
    b'"stream_options":{"a":[]}}',
    b' { "\\u0073tream" : "\\ud83d\\ude00\\n", "a" : [[ -1.5e+3, null, false, {"b":{}} ]] ,'
    b' "max_completion_tokens":1}\n',
)


def parser_inputs() -> list[bytes]:
    kinds = (REQUESTS, ANSWERS, TEXTS)
    return [bytes([kind + cut]) + data for kind, all_ in enumerate(kinds) for data in all_ for cut in (0, 30)]


def main(folder: str) -> None:
    for program, first in (("fuzz_ports", inputs()), ("fuzz_parsers", parser_inputs())):
        Path(folder, program).mkdir(parents=True, exist_ok=True)
        for data in first:
            Path(folder, program, hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1])
