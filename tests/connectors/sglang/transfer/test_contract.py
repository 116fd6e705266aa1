"""contract.py in a Python with SGLang, and servers that must not start."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.connectors.sglang.bed import Bed
from tests.connectors.sglang.server import HERE, environment
from tests.connectors.sglang.transfer.installed import install
from tests.connectors.vllm.processes import Node

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    Bed(folder, folder)
    install(folder / "moonpool")
    return folder


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:  # sockets have short paths only
        yield Path(path)


def run(
    place: Path, runtime: Path, *command: str, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [os.environ["MOONPOOL_SGLANG_PYTHON"], *command],
        cwd=runtime,
        env=environment(runtime, place / "plugin", place / "moonpool", HERE.parents[2]) | variables,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )


def server(place: Path) -> tuple[str, ...]:
    return ("-m", "sglang.launch_server", "--model-path", str(place / "model"), "--device", "cpu")


def test_sglangs_own_code(place: Path, runtime: Path) -> None:
    node = Node(runtime).start()
    try:
        found = run(
            place,
            runtime,
            *("-m", "tests.connectors.sglang.transfer.contract"),
            *(str(runtime / "node.sock"), str(place / "model")),
        )
    finally:
        node.stop()
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.split() == [
        "test_the_hook",
        "test_the_command_line",
        "test_embeddings_from_an_encoder",
        "test_the_embedding_cache",
    ]


def test_a_server_ends_with_one_sentence(place: Path, runtime: Path) -> None:
    """Before it has started anything."""
    flags = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "nixl")
    ended = run(place, runtime, *server(place), *flags, MOONPOOL_SGLANG_PD="1")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("moonpool: MOONPOOL_SGLANG_PD=1, but --disaggregation")


@pytest.mark.heavy
def test_a_setting_that_says_neither(place: Path, runtime: Path) -> None:
    ended = run(place, runtime, *server(place), MOONPOOL_SGLANG_PD="both")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "moonpool: MOONPOOL_SGLANG_PD: 'both' is neither 1 nor 0"


@pytest.mark.heavy
def test_other_hosts_need_a_token(place: Path, runtime: Path) -> None:
    """Said by a scheduler, whose end is the server's."""
    flags = (
        *("--device=cpu", "--attention-backend=torch_native", "--mem-fraction-static=0.1"),
        *("--max-total-tokens=4096", "--skip-tokenizer-init", "--cuda-graph-backend-decode=disabled"),
        *("--cuda-graph-backend-prefill=disabled", "--disaggregation-mode=prefill"),
        *(f"--model-path={place / 'model'}", "--disaggregation-transfer-backend=mooncake"),
    )
    ended = run(
        place,
        runtime,
        *("-m", "sglang.launch_server", *flags),
        MOONPOOL_SGLANG_PD="1",
        SGLANG_HOST_IP="10.255.255.1",
    )
    assert ended.returncode != 0
    said = [line for line in ended.stderr.splitlines() if line.startswith("moonpool: ")]
    assert len(said) == 1, ended.stderr[-4000:]
    assert "10.255.255.1:0 can be reached from other hosts, which needs a cluster token" in said[0]
