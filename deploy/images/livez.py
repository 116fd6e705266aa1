"""Ends with 0 when the container's process says that it lives: for the image's HEALTHCHECK.

LIVEZ_URL is the page to ask. Without it, the default ports of a node, a master and a proxy are asked, and the
first that answers at all decides.
"""

import os
import sys
import urllib.error
import urllib.request

PORTS = (7711, 7701, 8080)
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


def main() -> int:
    """The exit code."""
    named = os.environ.get("LIVEZ_URL")
    for url in [named] if named else [f"http://127.0.0.1:{port}/livez" for port in PORTS]:
        answer = lives(url)
        if answer is not None:
            return 0 if answer else 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
