"""SGLang's own PD disaggregation over the drop-in's engine, without any hook: what a prefill server computed
is pushed into a decode server, which answers as Hugging Face does.
"""

from __future__ import annotations

import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.connectors.mooncake.conftest import PACKAGE
from tests.connectors.sglang.bed import Bed, HuggingFace, make_bed, prompts
from tests.connectors.sglang.reference import MAX_TOKENS
from tests.connectors.sglang.server import Server, environment, forked
from tests.ports import held_ports

pytestmark = [pytest.mark.sglang, pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]

FLAGS = [
    "--device=cpu",
    "--dtype=float32",
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

    def __init__(self, role: str, port: int, bootstrap: int, bed: Bed) -> None:
        self.port, self.log = port, bed.folder / f"{role}.log"
        command = [
            *("-m", "sglang.launch_server", *FLAGS),
            *(f"--model-path={bed.model}", "--host=127.0.0.1", f"--port={port}"),
            *(f"--disaggregation-mode={role}", f"--disaggregation-bootstrap-port={bootstrap}"),
        ]
        self._process = forked(command, seen(bed), self.log)


def seen(bed: Bed) -> dict[str, str]:
    """The environment of both: the drop-in in place of the original, and no hook of ours."""
    return environment(bed.runtime, bed.plugin, PACKAGE) | {
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_FORCE_TCP": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
        "MOONPOOL_SGLANG_PD": "",
    }


def test_a_pair_answers_as_hugging_face_does(tmp_path: Path, rng: random.Random, sglang_python: str) -> None:
    with make_bed(tmp_path) as bed:
        pair_answers(bed, prompts(rng, 5), sglang_python)


def pair_answers(bed: Bed, asked: list[list[int]], python: str) -> None:
    where = [python, "-c", "import mooncake.engine as e; print(e.__file__)"]
    found = subprocess.run(where, env=seen(bed), capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(PACKAGE)
    with ExitStack() as stack, ThreadPoolExecutor(10) as threads:
        prefill_port, decode_port, bootstrap = stack.enter_context(held_ports(3))
        prefill = Half("prefill", prefill_port, bootstrap, bed)
        stack.callback(prefill.close)
        decode = Half("decode", decode_port, bootstrap, bed)
        stack.callback(decode.close)

        def answer(room: int) -> list[int]:
            """Both servers are asked at once; they meet in the room."""
            body = {
                "input_ids": asked[room],
                "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True},
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
            reference = HuggingFace(bed, asked)
            prefill.wait()
            decode.wait()
            expected = reference.answers()
            assert answer(0) == expected[0]
            with ThreadPoolExecutor(4) as together:
                assert list(together.map(answer, range(1, 5))) == expected[1:]
        except BaseException:
            print(prefill.tail(), decode.tail(), sep="\n----\n")
            raise
