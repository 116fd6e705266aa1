"""The short name: translated where it comes in, through hooks that do nothing to anyone else. Stand-ins for
SGLang's plugins and arguments here; real_short_name.py holds the real ones beside."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.sglang import short_name
from moonpool.core.errors import ConfigError
from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.server import HERE, SOURCE, environment, run

CLASS = {"module_path": "moonpool.connectors.sglang", "class_name": "MoonpoolHiCache", "interface_v1": 1}


class ServerArgs:
    def resolve_once(self) -> None: ...

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None: ...


class Scheduler:
    def attach_hicache_storage_wrapped(self, request: object) -> None: ...


class Registry:
    """SGLang's HookRegistry, as far as registering goes."""

    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Callable[..., None], str]] = {}

    def register(self, target: str, hook: Callable[..., None], kind: str) -> None:
        self.hooks[target] = (hook, kind)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    registry = Registry()
    hooks: Any = ModuleType("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry, hooks.HookType = registry, SimpleNamespace(BEFORE="before", AFTER="after")
    args: Any = ModuleType("sglang.srt.server_args")
    args.ServerArgs = ServerArgs
    monkeypatch.setattr(ServerArgs, "__module__", "sglang.srt.server_args")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    monkeypatch.setitem(sys.modules, args.__name__, args)
    return registry


def test_what_is_hooked(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    short_name.register()
    arguments = "sglang.srt.server_args.ServerArgs"
    assert {target: kind for target, (_, kind) in registry.hooks.items()} == {
        f"{arguments}.add_cli_args": "after",
        f"{arguments}.resolve_once": "before",
    }
    scheduler: Any = ModuleType("sglang.srt.managers.scheduler")
    scheduler.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, scheduler.__name__, scheduler)
    short_name.register()
    assert "sglang.srt.managers.scheduler.Scheduler.attach_hicache_storage_wrapped" in registry.hooks


def test_an_sglang_that_moved_is_left_alone(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(ServerArgs, "resolve_once")
    short_name.register()
    assert registry.hooks == {}
    assert "does not take the short name moonpool (AttributeError: ServerArgs has no" in caplog.text
    dataclasses.dataclass(ServerArgs)  # as in 0.5.18
    short_name.register()
    assert "sglang.srt.server_args.ServerArgs.__post_init__" in registry.hooks


def test_without_sglang(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.WARNING):
        short_name.register()
    assert "use the backend dynamic" in caplog.text


def test_the_name_becomes_the_class(registry: Registry, tmp_path: Path) -> None:
    assert short_name.translate("file", "{") == ("file", "{")
    assert short_name.translate(None, None) == (None, None)
    backend, extra = short_name.translate("moonpool", '{"node": "n", "prefetch_threshold": 16}')
    assert backend == "dynamic"
    assert json.loads(extra or "") == {
        **CLASS,
        "backend_name": "moonpool",
        "hicache_storage_pass_prefix_keys": True,
        "node": "n",
        "prefetch_threshold": 16,
    }
    for name, text in (("a.json", '{"node": "n"}'), ("a.toml", 'node = "n"')):
        (tmp_path / name).write_text(text)
        assert json.loads(short_name.translate("moonpool", f"@{tmp_path / name}")[1] or "")["node"] == "n"
    assert "node" not in json.loads(short_name.translate("moonpool", None)[1] or "")


@pytest.mark.parametrize("extra", ["{", "[]", "@/no/such/file.json", '{"class_name": "Other"}'])
def test_an_extra_config_that_cannot_be_read(registry: Registry, extra: str) -> None:
    arguments = SimpleNamespace(
        hicache_storage_backend="moonpool", hicache_storage_backend_extra_config=extra
    )
    with pytest.raises(ConfigError, match="--hicache-storage-backend-extra-config"):
        short_name._translate_arguments(arguments)
    request = SimpleNamespace(
        hicache_storage_backend="moonpool", hicache_storage_backend_extra_config_json=extra
    )
    short_name._translate_request(None, request)  # an exception would end the scheduler
    assert request.hicache_storage_backend == "moonpool"  # which SGLang answers with its own error


def test_the_parser_takes_the_name() -> None:
    parser = argparse.ArgumentParser()
    choices = ["file", "dynamic"]
    parser.add_argument("--hicache-storage-backend", choices=choices)
    for _ in range(2):
        short_name._add_choice(None, parser)
    assert parser.parse_args(["--hicache-storage-backend=moonpool"]).hicache_storage_backend == "moonpool"
    assert choices == ["file", "dynamic"], "SGLang's own list is not ours"


def test_attached_at_runtime() -> None:
    request = SimpleNamespace(
        hicache_storage_backend="moonpool", hicache_storage_backend_extra_config_json=None
    )
    short_name._translate_request(None, request)
    assert request.hicache_storage_backend == "dynamic"
    assert json.loads(request.hicache_storage_backend_extra_config_json)["interface_v1"] == 1


def test_the_package_loads_neither_torch_nor_the_native_half() -> None:
    """Every process of SGLang's loads the plugin of this package."""
    code = (
        "import sys, moonpool.connectors.sglang.short_name;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'moonpool._native', 'numpy')))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_real_sglang(tmp_path: Path) -> None:
    """Parser, ServerArgs and the scheduler's handler of the real package, hooked by its own registry."""
    sglang_cpu.install(tmp_path / "plugin")
    env = environment(tmp_path, tmp_path / "plugin")
    said = run([str(HERE / "real_short_name.py")], env, tmp_path / "log", 280)
    assert "the short name is understood" in said
