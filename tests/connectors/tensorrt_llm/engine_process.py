"""One stub engine in a process of its own: ``engine_process.py old|new MODEL PROMPTS``. It imports the
connector as TensorRT-LLM does, by its module's name, over the stub package in the old or the new layout, runs
the prompts and prints for each what came from the pool, its answer and the right one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.connectors.tensorrt_llm import stub_engine
from tests.core.store_bed import until


def main() -> None:
    layout, model, prompts = sys.argv[1:]
    stub_engine.install(layout=layout)
    connector = importlib.import_module("moonpool.connectors.tensorrt_llm")
    for half in (connector.MoonpoolScheduler, connector.MoonpoolWorker):
        assert half.__mro__[1].__name__ in stub_engine.ABSTRACT, half.__mro__
        assert half.__mro__[1].__abstractmethods__, half.__mro__  # the stub's, not the stand-in's
    engine = stub_engine.Engine(connector, stub_engine.llm_args(Path(model)))
    answers = []
    for prompt in json.loads(prompts):
        matched, answer = engine.run(prompt, until)
        engine.flush()
        answers.append((matched, answer, engine.expected(prompt)))
    print(json.dumps(answers), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
