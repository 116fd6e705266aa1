"""What tests of several folders share: a seed that is printed, a runtime folder of their own, free ports.

Tests never touch the runtime folder of the user who runs them: MOONPOOL_RUNTIME_DIR points elsewhere for all
of them. Randomness comes from the fixture ``rng`` only; a failing run is repeated with MOONPOOL_TEST_SEED=N.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import held_ports

ROOT = Path(__file__).resolve().parent.parent
SEED_VARIABLE = "MOONPOOL_TEST_SEED"
ENGINES = ("MOONPOOL_VLLM_PYTHON", "MOONPOOL_SGLANG_PYTHON", "MOONPOOL_LMCACHE_PYTHON")
LOG_LEVEL = logging.root.level
SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 31))


def pytest_report_header() -> list[str]:
    vllm = os.environ.get("MOONPOOL_VLLM_PYTHON", "none: the tests marked engine are skipped")
    sglang = os.environ.get("MOONPOOL_SGLANG_PYTHON", "none: the tests marked sglang are skipped")
    lmcache = os.environ.get("MOONPOOL_LMCACHE_PYTHON", "none: the tests marked lmcache are skipped")
    return [
        f"seed: {SEED} (repeat with {SEED_VARIABLE}={SEED})",
        f"vLLM: {vllm}",
        f"SGLang: {sglang}",
        f"LMCache: {lmcache}",
    ]


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell has it for a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # children would inherit that they ignore it
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # child processes, engines above all, want their bytecode
    for name in [name for name in os.environ if name.startswith("MOONPOOL_")]:
        kept = name.endswith("_PYTHON") or name in (
            SEED_VARIABLE,
            *ENGINES,
            "MOONPOOL_CACHE",
            "MOONPOOL_WERROR",
        )
        if not kept:
            del os.environ[name]  # else a user's settings would change what is tested


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs an engine that is not there, or a long time that nobody asked for."""
    reasons = {"heavy": "takes minutes; `make test HEAVY=1` and `make matrix` run it"}
    if os.environ.get("HEAVY"):
        del reasons["heavy"]
    for mark, engine in (("engine", "vLLM"), ("sglang", "SGLang"), ("lmcache", "LMCache")):
        variable = f"MOONPOOL_{engine.upper()}_PYTHON"
        if not os.environ.get(variable):
            reasons[mark] = f"needs a Python with {engine} in {variable}; `make test` brings one"
    for item in items:
        for mark, reason in reasons.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: a garbage collector that looked through all of them each time would
    stop every loop and thread of this process for a tenth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="moonpool-test-", dir="/tmp")
    os.environ["MOONPOOL_RUNTIME_DIR"] = folder
    yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _logging_of_this_test_alone() -> Iterator[None]:
    """A program that a test runs in this process sets the root logger up: the next test would log more."""
    handlers = logging.root.handlers[:]
    yield
    for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(LOG_LEVEL)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers that depend on the printed seed and on the test's name, not on the order of tests."""
    return random.Random(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of this test alone, private and with a short path: a Unix socket's path holds 107
    bytes.
    """
    folder = Path(tempfile.mkdtemp(prefix="mp-", dir="/tmp"))
    monkeypatch.setenv("MOONPOOL_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def runtime(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, and no setting of ours in the environment."""
    for variable in list(os.environ):
        if variable.startswith("MOONPOOL_") and variable != "MOONPOOL_RUNTIME_DIR":
            monkeypatch.delenv(variable)
    return runtime_dir


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port of 127.0.0.1 where nobody listens, for the whole test."""
    with held_ports(1) as (port,):
        yield port


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM; only for tests marked engine."""
    return os.environ["MOONPOOL_VLLM_PYTHON"]


@pytest.fixture(scope="session")
def sglang_python() -> str:
    """The interpreter of an environment with SGLang; only for tests marked sglang."""
    return os.environ["MOONPOOL_SGLANG_PYTHON"]
