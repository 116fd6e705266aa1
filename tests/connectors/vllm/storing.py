"""One engine stores what another one is to find."""

from __future__ import annotations

from tests.connectors.vllm.conftest import tokens_of
from tests.connectors.vllm.processes import Engine

STORES_MAX = 5


def counters(engine: Engine) -> dict[str, float]:
    return {
        name.removeprefix("moonpool_connector_"): value
        for name, value in engine.call("metrics").items()
        if name.startswith("moonpool_connector_")
    }


def store(writer: Engine, reader: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """One engine computes the prompts and saves them; the other's own cache is emptied. While a quarter of
    the engine's blocks is being saved others are left out, by how fast the machine computes and saves: then
    the prompts are computed again."""
    for _ in range(STORES_MAX):
        left_out = counters(writer)["unsaved_blocks_total"]
        answer = writer.call("generate", prompts=prompts)
        writer.call("drain")
        if counters(writer)["unsaved_blocks_total"] == left_out:
            break
        assert writer.call("reset_prefix_cache")
    reader.call("drain")  # blocks that are still being saved are in use
    assert reader.call("reset_prefix_cache")
    return tokens_of(answer)
