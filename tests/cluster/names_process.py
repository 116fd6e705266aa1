"""A transfer engine in a host, found by name: ``names_process.py gives URL NAME VALUE`` offers a page of
VALUE, ``names_process.py takes URL NAME`` opens the name and reads the page again and again."""

from __future__ import annotations

import sys
import time

from moonpool import Error, TransferEngine

LOOK_S = 0.05


def say(*words: object) -> None:
    print(f"{time.monotonic():.2f}", *words, flush=True)


def gives(url: str, name: str, value: str) -> None:
    engine = TransferEngine(name, listen="0.0.0.0:0", metadata=url)
    region = engine.allocate(4096)
    region.view[0] = int(value)
    said = None
    while True:
        problem = engine.publication_problem
        if problem != said:
            said = problem
            say(f"problem: {problem}" if problem else "published")
        time.sleep(LOOK_S)


def takes(url: str, name: str) -> None:
    engine = TransferEngine(metadata=url, listen=None, timeout_s=1.0)
    here = engine.allocate(4096)
    segment = None
    while True:
        try:
            if segment is None:
                segment = engine.open(name)
                say("opened", segment.address)
            else:
                segment.refresh()
            engine.read(segment, here, segment.at(0), 1)
            engine.open(name).close()
            say("read", here.view[0])
        except Error as error:
            say("failed:", error)
        time.sleep(LOOK_S)


if __name__ == "__main__":
    {"gives": gives, "takes": takes}[sys.argv[1]](*sys.argv[2:])
