"""Ends with 0 when the container's process says that it lives: for the image's HEALTHCHECK.

LIVEZ_URL is the page to ask. Without it, the default port of what the container runs is asked: beside it on
the host's network there may be others, which live. Where the container's command names no such process, the
default ports of all are asked, and the first that answers at all decides.
"""

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

PORTS = {"node": 7711, "master": 7701, "proxy": 8080}
COMMAND = Path("/proc/1/cmdline")
TIMEOUT_S = 3.0


def lives(url: str) -> bool | None:
    """None where nothing listens."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, ConnectionRefusedError) else False
    except OSError:
        return False


def ports(command: Path) -> list[int]:
    """To ask. command: a file with words that end with a NUL each, such as python, moonpool, node."""
    try:
        words = os.fsdecode(command.read_bytes()).split("\0")
    except OSError:
        words = []
    named = next((word for word in words if word in PORTS), None)
    return [PORTS[named]] if named else list(PORTS.values())


def main(command: Path = COMMAND) -> int:
    """The exit code."""
    named = os.environ.get("LIVEZ_URL")
    for url in [named] if named else [f"http://127.0.0.1:{port}/livez" for port in ports(command)]:
        answer = lives(url)
        if answer is not None:
            return 0 if answer else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
