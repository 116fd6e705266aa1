"""The JSON scanner in C++ against Python's json, at random.

What scans is JSON to Python with the same members in the same order, and the other way round, but for what
the scanner refuses and Python takes: NaN and Infinity, nesting beyond 512; a byte order mark and other
encodings are not made here. Bytes that are no UTF-8 scan (Python refuses them): texts here are UTF-8.
"""

from __future__ import annotations

import json
import random
from typing import Any

from moonpool import _native

WORDS = (
    "",
    "a",
    "stream",
    'q"uote',
    "back\\slash",
    "line\nfeed",
    "caf\u00e9",
    "\U0001f600",
    "\u0000\u001f",
    "x" * 70,
)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 4 else 7)
    if kind == 7:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if kind == 8:
        return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(5))}
    choices = (
        None,
        True,
        False,
        rng.randrange(-(10**9), 10 ** rng.randint(1, 20)),
        rng.uniform(-1e9, 1e9),
        1e300,
    )
    return choices[kind] if kind < 6 else "".join(rng.choices(WORDS, k=rng.randrange(6)))


def text_of(rng: random.Random, members: list[tuple[str, Any]]) -> bytes:
    """One object with these members (a dict would lose those that stand twice), in one of several ways."""
    ascii_only = rng.random() < 0.5
    comma, colon = rng.choice(((",", ":"), (", ", ": "), (" ,\n\t", " :\r\n ")))

    def write(item: Any) -> str:
        return json.dumps(item, ensure_ascii=ascii_only, separators=(comma, colon))

    return ("{" + comma.join(write(key) + colon + write(item) for key, item in members) + "}").encode()


def pairs_of(text: bytes) -> list[tuple[str, Any]] | None:
    """The outermost members by Python, or None when it is no object or uses what only Python takes."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    found: list[tuple[str, Any]] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found[:] = items  # the outermost object ends last
        return dict(items)

    try:
        whole = json.loads(text.decode(), object_pairs_hook=pairs, parse_constant=refuse)
    except ValueError:
        return None
    return found if isinstance(whole, dict) else None


def same(text: bytes) -> bool:
    """Asserts that both judge alike; whether it is an object."""
    mine, theirs = _native.json_members(text), pairs_of(text)
    if theirs is None:
        assert mine is None, text
        return False
    assert mine is not None, text
    assert [key.decode("utf-8", "surrogatepass") for key, _ in mine] == [key for key, _ in theirs], text
    assert [json.loads(item) for _, item in mine] == [item for _, item in theirs], text
    return True


def test_objects_at_random(rng: random.Random) -> None:
    for _ in range(1500):
        members = [(rng.choice(WORDS), value(rng)) for _ in range(rng.randrange(6))]
        text = text_of(rng, members)
        assert same(text)
        for key, item in dict(members).items():  # of those that stand twice the last
            got = _native.json_value(text, key)
            if isinstance(item, str):
                assert got == item.encode()
            elif isinstance(item, bool) or (isinstance(item, int) and abs(item) < 1 << 63):
                assert got is item or got == item


def test_mutations_at_random(rng: random.Random) -> None:
    sound = 0
    for _ in range(6000):
        text = text_of(rng, [(rng.choice(WORDS), value(rng)) for _ in range(rng.randint(1, 4))]).decode()
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(text))
            piece = rng.choice(
                [*'{}[],:"\\ \n\t\x000123456789.-+eEtrufalsn\u00e9', "\\u12", "NaN", "\\ud800"]
            )
            text = text[:at] + rng.choice((piece, "")) + text[at + rng.randrange(2) :]
        sound += same(text.encode())
    assert sound > 500


def test_edits_at_random(rng: random.Random) -> None:
    for _ in range(1500):
        members = [(rng.choice(WORDS), value(rng)) for _ in range(rng.randrange(8))]
        plain = [word for word in WORDS if word.isalnum() and word.isascii()]
        changes = {
            key: rng.choice((None, 1, [2], {"a": "b"})) for key in rng.sample(plain, rng.randint(1, 3))
        }
        edits = [(key, None if item is None else json.dumps(item)) for key, item in changes.items()]
        edited = _native.json_edited(text_of(rng, members), edits)
        assert edited is not None
        expected = [(key, item) for key, item in members if key not in changes]
        expected += [(key, item) for key, item in changes.items() if item is not None]
        assert pairs_of(edited) == expected


def test_token_ids_at_random(rng: random.Random) -> None:
    for _ in range(500):
        ids = [rng.randrange(10 ** rng.randint(1, 9)) for _ in range(rng.randint(1, 50))]
        assert _native.json_value(text_of(rng, [("prompt", ids)]), "prompt") == ids
        assert _native.json_value(text_of(rng, [("prompt", [ids])]), "prompt") == ids
        spoiled: list[Any] = list(ids)
        spoiled[rng.randrange(len(ids))] = rng.choice((-1, 1.5, None, True, "1", 1 << 32, [1, 2], {}))
        assert _native.json_value(text_of(rng, [("prompt", spoiled)]), "prompt") is None or spoiled == [
            [1, 2]
        ]
