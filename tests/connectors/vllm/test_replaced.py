"""A real vLLM whose weights are replaced while it serves: it never reads blocks of the old ones again, and
nothing that it computes is found by an engine of other weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.connectors.vllm.conftest import (
    BLOCK_TOKENS,
    KV_CONFIG,
    Line,
    make_prompt,
    tokens_of,
    wait_joined,
)
from tests.connectors.vllm.processes import Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS = 300
LOADABLE = (TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
NOTHING_USED = {"used_blocks": 0, "requests": 0, "pins": 0, "saves": 0, "lookups": 0, "leases": 0}


@pytest.fixture(scope="module")
def engine(line: Line, vllm_python: str, models: list[Path], tmp_path_factory: Any) -> Iterator[Engine]:
    """Of the weights of seed 0, on the pool of the others."""
    log = tmp_path_factory.mktemp("replaced") / "engine.log"
    made = Engine(vllm_python, models[0], line.node.runtime, log, kv_transfer_config=KV_CONFIG)
    wait_joined(made)
    yield made
    made.close()


def ask(engine: Engine, prompt: list[int]) -> tuple[list[int], int | None]:
    """(tokens of the answer, how many of the prompt's came from the pool; None: it did not use the pool)."""
    answer = engine.call("generate", prompts=[prompt])
    pool = answer["outputs"][0]["pool"]
    assert engine.call("drain") == NOTHING_USED
    return tokens_of(answer)[0], pool["pool_tokens"] if pool else None


def ask_anew(engine: Engine, prompt: list[int]) -> tuple[list[int], int | None]:
    """The same with an empty prefix cache."""
    assert engine.call("reset_prefix_cache")
    return ask(engine, prompt)


def test_weights_that_are_replaced(line: Line, engine: Engine, models: list[Path]) -> None:
    before, after = make_prompt(9_100, TOKENS), make_prompt(9_101, TOKENS)
    (of_0, later_0), (of_1, later_1) = (
        tokens_of(one.call("generate", prompts=[before, after], salt="plain"))
        for one in (line.first, line.other)
    )
    assert (of_0, later_0) != (of_1, later_1)
    assert ask(engine, before) == (of_0, 0)
    assert ask_anew(engine, before) == (of_0, LOADABLE)

    # From the files of the other model.
    engine.call("call_workers", method="reload_weights", weights_path=str(models[1]))
    assert not engine.call("joined")
    assert ask_anew(engine, before) == (of_1, None)
    assert engine.call("joined")
    assert ask_anew(engine, after) == (later_1, 0)
    assert ask_anew(engine, after) == (later_1, LOADABLE)  # its own, under the new fingerprint
    for one, expected in ((line.first, later_0), (line.other, later_1)):
        assert ask_anew(one, after) == (expected, 0)

    # By a trainer in the process, without a call of the engine: no name, and no pool.
    engine.call("give_model", path=str(models[0]))
    assert ask_anew(engine, after)[0] == later_0
    assert ask_anew(engine, before) == (of_0, None)
    assert not engine.call("joined")
    assert engine.logged().count("weights were given to its model") == 1

    # A sleep that loses the weights changes nothing; files give them a name again.
    engine.call("sleep_and_wake", level=2)
    assert ask_anew(engine, before)[1] is None
    engine.call("call_workers", method="reload_weights", weights_path=str(models[1]))
    assert ask_anew(engine, before) == (of_1, None)
    assert ask_anew(engine, after) == (later_1, LOADABLE)
