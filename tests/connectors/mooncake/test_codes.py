"""One table makes codes of errors: each error that moonpool raises has a row that is its own."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from mooncake import _codes
from mooncake._codes import TABLE, Code, NoNode, code_of

from moonpool.core import errors


def test_every_error_has_a_code_below_0() -> None:
    kinds = [getattr(errors, name) for name in errors.__all__]
    for kind in kinds:
        code = code_of(kind("why"), "test")
        assert code < 0
        if kind not in (errors.Error, errors.TooLarge):
            assert any(row is kind for row, _ in TABLE), f"{kind.__name__} has no row"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoNode("x"), -200),
        (errors.Unavailable("x"), -900),
        (errors.Timeout("x"), -901),
        (errors.TooLarge("x"), -600),
        (errors.CorruptObject("x"), -801),
        (errors.Closed("x"), -1),
        (FileNotFoundError("x"), -1100),
        (MemoryError("x"), -1),
    ],
)
def test_codes_that_callers_know(error: BaseException, code: int) -> None:
    assert code_of(error, "test") == code
    assert Code(code)


def test_a_sentence_is_said_once_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(_codes, "time", clock)  # of this module alone: other threads wait by the real one
    with caplog.at_level(logging.WARNING, "mooncake"):
        for _ in range(3):
            code_of(errors.Timeout("the node says nothing"), "once")
        now[0] += 1.5
        code_of(errors.Timeout("the node says nothing"), "once")
    told = [record.getMessage() for record in caplog.records if record.name == "mooncake"]
    assert told == ["once: the node says nothing"] * 2
