"""vLLM's own MooncakeStoreConnector, unchanged, over the drop-in: a second engine does not compute what the
first one stored, and answers the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.forks import ForkedProcess
from tests.connectors.vllm.processes import ENGINE_ENVIRONMENT, warm
from tests.core.master_bed import MasterProcess
from tests.core.store_bed import MIB, until
from tests.descriptors import speaks

HERE = Path(__file__).parent
MODEL_SCRIPT = HERE.parents[2] / "examples" / "demo" / "tiny_model.py"
START_TIMEOUT_S = 240.0
PROMPTS, BLOCKS, BLOCK_TOKENS = 3, 300 // 32, 32


class InTree:
    """An engine that starts."""

    def __init__(self, python: str, model: Path, config: Path, log: Path) -> None:
        environment = {**os.environ, **ENGINE_ENVIRONMENT, "MOONCAKE_CONFIG_PATH": str(config)}
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        self.log = log
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, "rb", buffering=0)
        with os.fdopen(writer, "wb") as stdout, log.open("wb") as stderr:
            self.process = ForkedProcess(
                warm(python),
                [str(HERE / "in_tree_store.py"), str(model)],
                environment,
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
            )

    def answers(self) -> Any:
        """When it has started it runs its prompts, and these are its answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert speaks(self._answers, START_TIMEOUT_S), "the engine says nothing"
        line = self._answers.readline()
        assert line, f"the engine ended with {self.process.wait()}"
        return json.loads(line)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._answers.close()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_engine_hits_what_the_first_stored(
    vllm_python: str, master: MasterProcess, make_store: Callable[..., Any], tmp_path: Path
) -> None:
    pool = make_store(64 * MIB)
    model = tmp_path / "model"
    subprocess.run([sys.executable, MODEL_SCRIPT, model], check=True)
    config = tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "mode": "standalone-store",
                "local_hostname": "127.0.0.1",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master.address,
                "protocol": "tcp",
                "global_segment_size": 0,  # the blocks are to outlive the engine
                "local_buffer_size": "16mb",
            }
        )
    )
    first, second = engines = [
        InTree(vllm_python, model, config, tmp_path / f"{number}.log") for number in range(2)
    ]
    try:
        cold = first.answers()
        assert until(lambda: pool._ask(lambda store: store.stat())["objects"] >= PROMPTS * BLOCKS, 60)
        assert cold["cached"] == [0] * PROMPTS
        first.end()
        warm = second.answers()
    finally:
        for engine in engines:
            engine.end()
            print(engine.log.read_text(errors="replace")[-4000:])
    assert warm["tokens"] == cold["tokens"]
    assert warm["cached"] == [BLOCKS * BLOCK_TOKENS] * PROMPTS
    assert pool.remove_all(force=True) >= PROMPTS * BLOCKS
