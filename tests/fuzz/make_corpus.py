"""`make_corpus.py FOLDER`: the first inputs of each fuzzer, into a folder of its name.

fuzz_ports: from the hexadecimal examples of the documents. An input is a byte that chooses the port and
purpose, and what is sent there. Each example stands alone, and all of a purpose stand one behind the other,
as a conversation. fuzz_parsers: a byte that chooses the parser, and one message of each kind.
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
