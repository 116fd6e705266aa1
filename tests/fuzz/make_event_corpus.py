"""`make_event_corpus.py FOLDER`: the first inputs of fuzz_events, from the hexadecimal batches of
docs/events.md, each for an engine and for a node of the pool."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"


def batches() -> list[bytes]:
    found = re.findall(r"```hex\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [bytes.fromhex("".join(block.split())) for block in found]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches()):
        (folder / f"engine-{number}").write_bytes(b"\x20" + batch)
        (folder / f"pool-{number}").write_bytes(b"\x11" + batch)


if __name__ == "__main__":
    main()
