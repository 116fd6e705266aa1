"""The entry point: idempotent, and silent or one sentence whatever it meets."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.vllm import compat, connector, plugin
from moonpool.connectors.vllm.encoder import connector as encoder_connector
from moonpool.connectors.vllm.encoder import names

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
ENCODER_FACTORY = "vllm.distributed.ec_transfer.ec_connector.factory"


class Factory:
    """KVConnectorFactory of vLLM 0.32, as far as plugins see it."""

    def __init__(self) -> None:
        self._registry: dict[str, Callable[[], str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self._registry:
            raise ValueError(f"Connector '{name}' is already registered.")

        def loader() -> str:
            return f"{module_path}.{class_name}"

        self._registry[name] = loader


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    made = put_factory(monkeypatch, FACTORY, "KVConnectorFactory")
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.0+cpu")
    return made


@pytest.fixture
def encoder_factory(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> Factory:
    return put_factory(monkeypatch, ENCODER_FACTORY, "ECConnectorFactory")


def put_factory(monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> Factory:
    factory = Factory()
    parts = path.split(".")
    for count in range(1, len(parts)):
        parent = ".".join(parts[:count])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parts[count - 1]))
    module: Any = ModuleType(path)
    setattr(module, name, factory)
    monkeypatch.setitem(sys.modules, path, module)
    return factory


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.INFO):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_registers_once_and_lazily(factory: Factory, said: Callable[[], list[str]]) -> None:
    for _ in range(3):
        plugin.register()
    for name in ("Mooncake", "Moonpool"):
        assert factory._registry[name]() == "moonpool.connectors.vllm.connector.Mooncake"
    assert said() == []
    assert connector.Moonpool is connector.Mooncake  # for a module path


def test_name_taken_by_another(factory: Factory, said: Callable[[], list[str]]) -> None:
    factory.register_connector("Mooncake", "someone.else", "Mooncake")
    plugin.register()
    assert factory._registry["Mooncake"]() == "someone.else.Mooncake"
    assert factory._registry["Moonpool"]() == "moonpool.connectors.vllm.connector.Mooncake"
    (sentence,) = said()
    assert "another plugin has taken the connector name Mooncake" in sentence


@pytest.mark.parametrize("version", ["0.25.1", "0.8.5"])
def test_too_old(
    factory: Factory, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    plugin.register()
    assert factory._registry == {}
    (sentence,) = said()
    assert f"vLLM {version} is too old" in sentence
    assert "0.26 or newer" in sentence


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33.0", "1.0.0", "0.0.0+dev", "", "nightly"])
def test_new_enough(version: str) -> None:
    assert not compat.is_too_old(version)


def test_without_connectors(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    (sentence,) = said()
    assert "no KV connectors" in sentence


def test_factory_of_the_future(factory: Factory, said: Callable[[], list[str]]) -> None:
    def register_connector(spec: object) -> None: ...

    factory.register_connector = register_connector  # type: ignore[method-assign, assignment]
    plugin.register()
    assert ["cannot register the connector Mooncake (TypeError" in one for one in said()] == [True, False]


def test_the_names_mean_the_connector_of_encoder_outputs_too(
    encoder_factory: Factory, said: Callable[[], list[str]]
) -> None:
    for _ in range(2):
        plugin.register()
    for name in ("Mooncake", "Moonpool"):
        assert encoder_factory._registry[name]() == "moonpool.connectors.vllm.encoder.connector.Mooncake"
        assert names.is_ours(SimpleNamespace(ec_connector=name))
    assert said() == []
    assert encoder_connector.Moonpool is encoder_connector.Mooncake  # for a module path
    assert not names.is_ours(SimpleNamespace(ec_connector="ECExampleConnector"))


def test_an_encoder_connector_of_another_plugin_is_not_ours(encoder_factory: Factory) -> None:
    encoder_factory.register_connector("Mooncake", "someone.else", "Mooncake")
    plugin.register()
    by_path = {"ec_connector_module_path": names.MODULE}
    assert not names.is_ours(SimpleNamespace(ec_connector="Mooncake", **by_path)), (
        "a name comes before a path"
    )
    assert names.is_ours(SimpleNamespace(ec_connector="Moonpool", **by_path))


def test_a_path_alone_says_whose_it_is() -> None:
    """In a process without vLLM's factory."""
    assert names.is_ours(SimpleNamespace(ec_connector="Moonpool", ec_connector_module_path=names.MODULE))
    assert not names.is_ours(SimpleNamespace(ec_connector="Moonpool", ec_connector_module_path="another"))
