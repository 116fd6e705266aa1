"""The walk over vLLM's plan of a step: whose blocks, and how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.connectors.vllm.step_progress import step_progress
from tests.connectors.vllm.fakes import Cached, FakeStep, New


@dataclass
class Blocks:
    block_ids: list[list[int]] = field(default_factory=list)


def test_blocks_and_tokens_of_each_request_that_is_known() -> None:
    known = {
        "new": Blocks(),
        "same": Blocks([[1], [2]]),
        "grown": Blocks([[3], [4]]),
        "back": Blocks([[5, 6], [7, 8]]),
        "idle": Blocks([[9], [10]]),
    }
    told = ([11, 12], [13, 14])
    step = FakeStep(
        [New("new", told, 4), New("other", told, 0)],
        Cached(
            ["same", "grown", "back", "other too"],
            {"back"},
            [None, ([21], [22]), ([31], [32]), ([41], [42])],
            [8, 9, 0, 7],
        ),
        {"new": 3, "other": 1, "same": 1, "grown": 2, "back": 5, "other too": 1},
    )
    assert list(step_progress(step, known.get)) == [("new", 7), ("same", 9), ("grown", 11), ("back", 5)]
    assert {name: blocks.block_ids for name, blocks in known.items()} == {
        "new": [[11, 12], [13, 14]],
        "same": [[1], [2]],
        "grown": [[3, 21], [4, 22]],
        "back": [[31], [32]],
        "idle": [[9], [10]],
    }
    known["new"].block_ids[0].append(99)
    assert told == ([11, 12], [13, 14])  # vLLM's own lists are left alone
