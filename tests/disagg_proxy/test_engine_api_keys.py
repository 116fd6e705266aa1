"""Which key an engine is shown, and files that cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.engine_api_keys import read_engine_keys
from moonpool.disagg_proxy.settings import EngineSpec

A, B = EngineSpec("a", "http://10.0.0.1:8000"), EngineSpec("b", "http://10.0.0.2:8000")


def file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "keys"
    path.write_text(text)
    return str(path)


def test_the_line_that_says_most_counts(tmp_path: Path) -> None:
    keys = read_engine_keys(file(tmp_path, "# of us\n\ngiven\n* any\nb of-b\n10.0.0.1:8000 at-a\n"))
    assert [keys.of(A, given=True), keys.of(B, given=True)] == ["at-a", "of-b"]
    c = EngineSpec("c", "http://10.0.0.3:8000")
    assert [keys.of(c, given=True), keys.of(c, given=False)] == ["given", "any"]


def test_an_engine_that_registered_is_shown_nothing_that_was_not_meant_for_it(tmp_path: Path) -> None:
    keys = read_engine_keys(file(tmp_path, "given\n"))
    assert keys.of(A, given=False) == ""
    assert read_engine_keys("").of(A, given=True) == ""


@pytest.mark.parametrize("text", ["", "# none\n", "a b c\n", "x\ny\n", "a x\na y\n", "kéy\n"])
def test_a_file_that_cannot_be_meant_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="proxy: "):
        read_engine_keys(file(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_engine_keys(str(tmp_path / "none"))
