"""Public classes, methods and functions of the drop-in have a docstring, also in modules with private names,
whose methods are public in its classes. ruff (D101 to D103) checks the other modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import moonpool.connectors

FOLDER = Path(next(iter(moonpool.connectors.__path__)))
FILES = sorted((FOLDER / "mooncake" / "mooncake").glob("_[a-z]*.py"))
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_drop_in_has_docstrings(file: Path) -> None:
    found = public(ast.parse(file.read_text()))
    assert [each.name for each in found if ast.get_docstring(each) is None] == []


def test_the_files_are_found() -> None:
    assert len(FILES) > 20
