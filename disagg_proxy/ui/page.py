"""The page itself and its Content-Security-Policy: a browser may run the page's own script and style (named
by their digests) and fetch from this proxy; no other origin, and no frames."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from moonpool.disagg_proxy.conductor.plan import Answer

_PARTS = ("script", "style")


def page_answer() -> Answer:
    """The answer to GET /ui, which never changes."""
    text = files(__package__).joinpath("page.html").read_bytes()
    digests = {name: _digests(name, text) for name in _PARTS}
    policy = (
        f"default-src 'none'; script-src {digests['script']}; style-src {digests['style']}; connect-src "
        f"'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Answer(
        200,
        text,
        b"text/html; charset=utf-8",
        (
            (b"Content-Security-Policy", policy.encode()),
            (b"X-Content-Type-Options", b"nosniff"),
            (b"Referrer-Policy", b"no-referrer"),
            (b"Cache-Control", b"no-cache"),
        ),
    )


def data_answer(body: bytes) -> Answer:
    """The answer to GET /ui/data."""
    return Answer(200, body, headers=((b"Cache-Control", b"no-store"),))


def _digests(name: str, text: bytes) -> str:
    """The digests of all elements ``name``, in the form of the header."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (name.encode(), name.encode()), text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in found)
