"""docs/stable.md lists what the package exports: a name that comes or goes is a decision, not an accident."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

import moonpool
from moonpool.cli.entry import make_app

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "stable.md").read_text()


def listed(heading: str) -> str:
    """The first block behind a heading."""
    (body,) = re.findall(rf"^## {heading}\n.*?^```\n(.*?)^```", PAGE, re.M | re.S)
    return str(body)


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Those that --help shows, without their groups."""
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(words)
        return
    for name, each in below.items():
        if not each.hidden:
            yield from commands(each, (*words, name))


def test_the_names_of_python() -> None:
    assert listed("Python names").split() == sorted(moonpool.__all__)


def test_the_commands() -> None:
    assert listed("Commands").splitlines() == sorted(commands(typer.main.get_command(make_app())))
