"""The committed _native.pyi says what the built module offers; `make stub` writes it anew."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_stub_is_what_the_module_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pybind11_stubgen")
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.stub import STUB, generate

    committed = STUB.read_text().splitlines()
    generated = generate(sys.executable).splitlines()
    assert not list(difflib.unified_diff(committed, generated, "committed", "generated", lineterm="")), (
        "run `make stub` and commit src/moonpool/_native.pyi"
    )
