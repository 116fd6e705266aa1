"""What TensorRT-LLM's tests ask of an engine."""

from __future__ import annotations

from typing import Any

from tests.connectors.tensorrt_llm.stub_engine import Engine
from tests.core.store_bed import until

PROMPT = list(range(100, 123))  # 23 tokens: five blocks of 4 and a tail of 3
LARGE: dict[str, Any] = {"model": {"head_dim": 64}, "head_dim": 64}  # blocks of 24 KiB


def check(engine: Engine, tokens: list[int], hit: int, **fields: Any) -> None:
    """The prompt is answered right, with ``hit`` tokens from the pool."""
    matched, answer = engine.run(tokens, until, **fields)
    assert answer == engine.expected(tokens)
    assert matched == hit
    engine.flush()


def counts(engine: Engine) -> Any:
    return engine.scheduler._link.count


def asks(engine: Engine) -> bool:
    """Whether the node answers again: the native client tries at most every quarter of a second."""
    before = counts(engine)["unanswered"]
    engine.finish(engine.start([5] * 9))
    return bool(counts(engine)["unanswered"] == before)
