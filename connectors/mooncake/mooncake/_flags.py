"""Flags as the commands' callers write them: ``--name=value``, ``-name value``, ``--name``, ``--noname``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ._codes import logger


def parse(arguments: Sequence[str], known: Mapping[str, str], program: str) -> dict[str, str]:
    """The values of ``known`` flags (name -> help). Others are for machinery that moonpool does not have: a
    warning names them. ``--help`` prints and ends the program.
    """
    values: dict[str, str] = {}
    ignored = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not name:
            raise SystemExit(f"{program}: {word!r} is no flag; write --name=value")
        if name in ("help", "h"):
            _help(known, program)
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        if name in known:
            values[name] = value
        else:
            ignored.append(name)
    if ignored:
        logger.warning("%s: moonpool has nothing that these flags set: %s", program, ", ".join(ignored))
    return values


def _help(known: Mapping[str, str], program: str) -> None:
    width = max(map(len, known))
    print(f"{program} runs a part of a Moonpool; flags are written --name=value:\n")
    for name, text in known.items():
        print(f"    --{name:{width}}  {text}")
    sys.exit(0)
