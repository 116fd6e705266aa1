"""SGLang's own PD disaggregation over the drop-in's engine, without any hook: what a prefill server computed
is pushed into a decode server, which answers as Hugging Face does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.connectors.mooncake.conftest import PACKAGE
from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.reference import MAX_TOKENS
from tests.connectors.sglang.server import Server, environment
from tests.connectors.sglang.test_engine import prompts, reference
from tests.ports import held_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = [
    "--device=cpu",
    "--attention-backend=torch_native",
    "--mem-fraction-static=0.1",
    "--max-total-tokens=4096",
    "--max-running-requests=16",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--skip-tokenizer-init",
    "--skip-server-warmup",
    "--page-size=16",
    "--hicache-io-backend=direct",  # of the decode server's copy of what it retracts
    "--hicache-mem-layout=page_first_direct",
    "--disaggregation-transfer-backend=mooncake_tcp",
]


class Half(Server):
    """A prefill or a decode server; its own ``__init__``, since it has no HiCache."""

    def __init__(self, role: str, port: int, bootstrap: int, place: Path, runtime: Path) -> None:
        self.port, self.log = port, place / f"{role}.log"
        command = [
            *(os.environ["MOONPOOL_SGLANG_PYTHON"], "-m", "sglang.launch_server", *FLAGS),
            *(f"--model-path={place / 'model'}", "--host=127.0.0.1", f"--port={port}"),
            *(f"--disaggregation-mode={role}", f"--disaggregation-bootstrap-port={bootstrap}"),
        ]
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=seen(place, runtime),
                start_new_session=True,
            )


def seen(place: Path, runtime: Path) -> dict[str, str]:
    """The environment of both: the drop-in in place of the original, and no hook of ours."""
    return environment(runtime, place / "plugin", PACKAGE) | {
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_FORCE_TCP": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "MOONPOOL_SGLANG_PD": "",
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not os.environ.get("MOONPOOL_SGLANG_PYTHON"):
        pytest.skip("MOONPOOL_SGLANG_PYTHON is not set: it names a Python with SGLang, see docs/sglang.md")
    folder = tmp_path_factory.mktemp("sglang-pd")
    sglang_cpu.install(folder / "plugin")
    return folder


@pytest.fixture
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as path:  # sockets have short paths only
        yield Path(path)


def test_a_pair_answers_as_hugging_face_does(place: Path, runtime: Path) -> None:
    where = [os.environ["MOONPOOL_SGLANG_PYTHON"], "-c", "import mooncake.engine as e; print(e.__file__)"]
    found = subprocess.run(where, env=seen(place, runtime), capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(PACKAGE)
    asked = prompts(5)
    expected = reference(place, runtime, asked)
    with ExitStack() as stack, ThreadPoolExecutor(10) as threads:
        prefill_port, decode_port, bootstrap = stack.enter_context(held_ports(3))
        prefill = Half("prefill", prefill_port, bootstrap, place, runtime)
        stack.callback(prefill.close)
        decode = Half("decode", decode_port, bootstrap, place, runtime)
        stack.callback(decode.close)

        def answer(room: int) -> list[int]:
            """Both servers are asked at once; they meet in the room."""
            body = {
                "input_ids": asked[room],
                "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS},
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": bootstrap,
                "bootstrap_room": room + 1,
            }
            calls = [threads.submit(half.call, "POST", "generate", body) for half in (prefill, decode)]
            first, whole = (json.loads(call.result())["output_ids"] for call in calls)
            assert first == expected[room][:1]
            tokens: list[int] = whole
            return tokens

        try:
            prefill.wait()
            decode.wait()
            assert answer(0) == expected[0]
            with ThreadPoolExecutor(4) as together:
                assert list(together.map(answer, range(1, 5))) == expected[1:]
        except BaseException:
            print(prefill.tail(), decode.tail(), sep="\n----\n")
            raise
