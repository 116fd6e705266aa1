"""The options that all connectors have: sentences that name the place, the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.connectors.options import PoolOptions, flag, optional_text, refuse_unknown, text
from moonpool.core.errors import ConfigError, Unavailable


def test_where_the_node_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(tmp_path))
    assert PoolOptions().socket() == tmp_path / "node.sock"
    assert PoolOptions(node="blue").socket() == tmp_path / "node-blue.sock"
    assert PoolOptions(node="/run/x.sock").socket() == Path("/run/x.sock")
    with pytest.raises(
        ConfigError, match=r"options\.node is '10.0.0.1:7710': an engine uses a node of its own"
    ):
        PoolOptions(node="10.0.0.1:7710").socket()


def test_nobody_is_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        PoolOptions(node=str(tmp_path / "no.sock")).dial(bytes(32), 1.0)


def test_values() -> None:
    assert text("p", "k", "v") == "v"
    assert optional_text("p", "k", None) is None
    assert [flag("p", "k", value) for value in (True, "true", "False")] == [True, True, False]
    for value in ("", None, 7):
        with pytest.raises(ConfigError, match=rf"p\.k must be a non-empty text, not {value!r}"):
            text("p", "k", value)
    for other in (1, "yes", None):
        with pytest.raises(ConfigError, match=rf"p\.k must be true or false, not {other!r}"):
            flag("p", "k", other)


def test_unknown_keys_and_secrets() -> None:
    refuse_unknown("p", ["node"], ["node", "tenant"])
    with pytest.raises(ConfigError, match="p has an unknown key 'tenent'; did you mean 'tenant'"):
        refuse_unknown("p", ["tenent"], ["node", "tenant"])
    with pytest.raises(ConfigError, match="p has an unknown key 'zzz'; the options are node, tenant"):
        refuse_unknown("p", ["zzz"], ["node", "tenant"])
    with pytest.raises(ConfigError, match="set MOONPOOL_CLUSTER_TOKEN_FILE in the environment"):
        refuse_unknown("p", ["token"], ["node"])
