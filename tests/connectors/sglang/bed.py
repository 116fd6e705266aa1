"""What tests with real SGLang servers share: a model, prompts, and what Hugging Face answers to them."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.connectors.forks import ForkedProcess
from tests.connectors.sglang import sglang_cpu
from tests.connectors.sglang.server import HERE, PAGE_TOKENS, environment, warm

TINY_MODEL = HERE.parents[2] / "examples" / "demo" / "tiny_model.py"
PROMPT_TOKENS = 180
FULL_PAGES = PROMPT_TOKENS // PAGE_TOKENS


class Bed:
    """A folder with a model and with the plug-in that lets SGLang run on a CPU. ``runtime``: for sockets."""

    def __init__(self, folder: Path, runtime: Path) -> None:
        self.folder, self.runtime = folder, runtime
        self.plugin, self.model = folder / "plugin", folder / "model"
        sglang_cpu.install(self.plugin)
        subprocess.run([sys.executable, TINY_MODEL, self.model], check=True, stdout=sys.stderr)


@contextmanager
def make_bed(folder: Path) -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="moonpool-") as runtime:  # sockets have short paths only
        yield Bed(folder, Path(runtime))


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


class HuggingFace:
    """Answers some prompts in a process of its own, while a server starts."""

    def __init__(self, bed: Bed, asked: list[list[int]]) -> None:
        self._answers = bed.folder / "hugging_face.json"
        with self._answers.open("wb") as stdout, (bed.folder / "hugging_face.log").open("wb") as stderr:
            self._process = ForkedProcess(
                warm(),
                [str(HERE / "reference.py"), str(bed.model)],
                environment(bed.runtime, bed.plugin),
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode())  # fits into the pipe
        self._process.stdin.close()

    def answers(self) -> list[list[int]]:
        """Its tokens for each prompt."""
        answers: list[list[int]] = [said["tokens"] for said in self._said]
        assert len({tuple(answer) for answer in answers}) == len(answers)  # else they would prove nothing
        return answers

    def logprobs(self) -> list[list[float]]:
        """Of each prompt's own tokens but the first."""
        return [said["logprobs"] for said in self._said]

    @functools.cached_property
    def _said(self) -> list[dict[str, Any]]:
        try:
            code = self._process.wait(300)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert code == 0, (self._answers.with_suffix(".log")).read_text(errors="replace")[-4000:]
        said: list[dict[str, Any]] = json.loads(self._answers.read_bytes())
        return said


def eventually(true: Callable[[], bool], what: str) -> None:
    """SGLang stores in the background, and says nowhere when it has."""
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)
