"""The hook's checks, with stand-ins for SGLang's module and arguments. test_contract.py has the real ones."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.sglang import plugin
from moonpool.connectors.sglang.transfer import hook, settings
from moonpool.connectors.sglang.transfer.engine import MoonpoolTransferEngine
from moonpool.core.errors import ConfigError

SOURCE = Path(__file__).parents[4] / "src"


def sglangs(methods: dict[str, tuple[str, ...]]) -> ModuleType:
    """A module as SGLang's, whose class has these methods."""
    module = ModuleType("device_communicators.mooncake_transfer_engine")
    body: dict[str, Any] = {}
    for name, parameters in methods.items():
        exec(f"def {name}(self, {', '.join(parameters)}): ...", body)
    names = {name: body[name] for name in methods}
    setattr(module, hook.CLASS, type(hook.CLASS, (), names))
    setattr(module, hook.INIT, lambda *, gpu_id: None)
    return module


def test_the_module_as_it_is_fits() -> None:
    assert hook.mismatch(sglangs(hook.METHODS)) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"send_probe": None}, "no method send_probe"),
        ({"register": ("ptr",)}, r"register takes \(ptr\) and not \(ptr, length\)"),
        ({"transfer_sync": ("session_id", "buffer", "length", "peer_buffer_address")}, "transfer_sync takes"),
        ({"transfer_async": ("session_id",)}, "methods that are new: transfer_async"),
    ],
)
def test_another_class_does_not(change: dict[str, Any], why: str) -> None:
    methods = {name: one for name, one in {**hook.METHODS, **change}.items() if one is not None}
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(hook.mismatch(sglangs(methods)))


@pytest.mark.parametrize("name", [hook.CLASS, hook.INIT])
def test_what_is_not_there(name: str) -> None:
    module = sglangs(hook.METHODS)
    delattr(module, name)
    assert name in hook.mismatch(module)


def test_ours_has_what_sglang_calls() -> None:
    """initialize() is called by SGLang's own constructor alone."""
    ours = sglangs({})
    setattr(ours, hook.CLASS, MoonpoolTransferEngine)
    missing = hook.METHODS.keys() - vars(MoonpoolTransferEngine).keys()
    assert missing == {"initialize"}
    for name, parameters in hook.METHODS.items():
        if name not in missing:
            code = getattr(MoonpoolTransferEngine, name).__code__
            assert code.co_varnames[1 : code.co_argcount] == parameters


def arguments(**changes: Any) -> SimpleNamespace:
    plain = {
        "disaggregation_mode": "null",
        "disaggregation_transfer_backend": "mooncake",
        "encoder_only": False,
        "language_only": False,
        "encoder_transfer_backend": "auto",
        "enable_mm_global_cache": False,
        "elastic_ep_backend": None,
        "enable_elastic_expert_backup": False,
        "device": "cpu",
        "dp_size": 1,
        "tp_size": 1,
    }
    return SimpleNamespace(**{**plain, **changes})


PD = {settings.PD: "1"}
CACHE = {settings.EMBEDDINGS: "1"}


@pytest.mark.parametrize(
    ("changes", "environment", "why"),
    [
        ({"disaggregation_mode": "prefill"}, PD, ""),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "mooncake_tcp"}, PD, ""),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl"}, PD, "is nixl"),
        ({"disaggregation_mode": "decode", "disaggregation_transfer_backend": "nixl"}, {}, ""),
        ({"disaggregation_mode": "prefill", "device": "npu"}, PD, "memory of npu"),
        ({"disaggregation_mode": "prefill", "device": "cuda"}, PD, ""),
        ({"disaggregation_mode": "prefill", "device": "npu"}, {}, ""),
        ({}, PD, ""),
        ({"elastic_ep_backend": "mooncake"}, PD, "elastic"),
        ({"elastic_ep_backend": "mooncake"}, {}, ""),
        ({"elastic_ep_backend": "nixl"}, PD, ""),
        ({"elastic_ep_backend": "nixl", "enable_elastic_expert_backup": True}, PD, "elastic"),
        ({"elastic_ep_backend": "none", "enable_elastic_expert_backup": True}, PD, ""),
        ({"encoder_only": True}, PD, "--encoder-transfer-backend is auto"),
        ({"encoder_only": True, "encoder_transfer_backend": "mooncake"}, PD, ""),
        ({"language_only": True, "encoder_transfer_backend": "zmq_to_scheduler"}, PD, "zmq_to_scheduler"),
        ({"language_only": True, "disaggregation_mode": "prefill"}, PD, ""),
        ({"encoder_only": True, "encoder_transfer_backend": "mooncake", "dp_size": 2}, PD, "data-parallel"),
        ({"encoder_only": True, "dp_size": 2}, CACHE, "data-parallel"),
        ({"encoder_only": True, "tp_size": 2, "enable_mm_global_cache": True}, CACHE, "tensor-parallel"),
        ({"encoder_only": True, "tp_size": 2}, CACHE, ""),
    ],
)
def test_arguments_that_fit(changes: dict[str, Any], environment: dict[str, str], why: str) -> None:
    found = hook.unfit(arguments(**changes), environment)
    assert why in found
    assert bool(found) == bool(why)


def test_a_server_that_hands_nothing_over_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert hook.unfit(arguments(), PD) == ""
    assert "hands nothing over" in caplog.text


@pytest.mark.parametrize(("value", "on"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_is_on(value: str, on: bool) -> None:
    assert settings.is_on(settings.PD, {settings.PD: value}) is on


def test_neither_on_nor_off_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        settings.is_on(settings.PD, {settings.PD: "prefill"})
    monkeypatch.setenv(settings.PD, "prefill")
    with pytest.raises(SystemExit, match="'prefill' is neither 1 nor 0"):
        hook.register()


NAMES_OF_HEAVY = """
import sys
from moonpool.connectors.sglang.transfer import hook

hook.register()
heavy = ("torch", "sglang", "numpy")
print([name for name in sys.modules if name.partition(".")[0] in heavy or name == "moonpool._native"])
"""
STOP_IN_A_THREAD = """
import threading
import time
from moonpool.connectors.sglang.transfer import hook

threading.Thread(target=hook.stop, args=("no more",)).start()
time.sleep(60)
"""


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_nothing_is_imported_for_a_server_that_does_not_ask() -> None:
    assert python(NAMES_OF_HEAVY).stdout.strip() == "[]"


def test_without_sglang_the_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setenv(settings.PD, "1")
    with pytest.raises(SystemExit, match="no place for it"):
        hook.register()


def test_stop_ends_the_process_from_any_thread() -> None:
    ended = python(STOP_IN_A_THREAD)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "moonpool: no more"
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(SystemExit, match="moonpool: no more"):
        hook.stop("no more")


def test_a_plugin_that_breaks_ends_a_server_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(hook, "register", breaks)
    with pytest.raises(RuntimeError):  # which SGLang logs, and goes on
        plugin.register()
    for name in plugin.ASKING:
        monkeypatch.setenv(name, "1")
        with pytest.raises(SystemExit, match="no such thing"):
            plugin.register()
    assert plugin.ASKING == (settings.PD, settings.EMBEDDINGS)
