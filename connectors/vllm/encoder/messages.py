"""What the halves tell each other. vLLM pickles it where they are in different processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moonpool.connectors.vllm.encoder import compat
from moonpool.connectors.vllm.metrics import Data


@dataclass(frozen=True, slots=True)
class Output:
    """An encoder output that a step loads or computes.

    identifier: vLLM's name of the item, under which its own cache has the output.
    name: of the item in the pool, 32 bytes; b"": it has none.
    rows: embeddings.
    modality: what the item is, such as "image".
    """

    identifier: str
    name: bytes
    rows: int
    modality: str


@dataclass(frozen=True, slots=True)
class Load:
    """An output that vLLM does not compute, because the pool had it.

    request_id, index: whose item it is, and its place among the items of that request.
    """

    output: Output
    request_id: str
    index: int


class EncoderStep(compat.Metadata):
    """The plan of a step.

    loads: outputs that the worker loads, or else encodes.
    computed: outputs that vLLM computes in the step, by identifier. Those that cannot be loaded are added.
    encoded: vLLM's own list of what the encoder computes in the step, request -> places of its items. It is
        the object in vLLM's plan of the step and stays that when both are pickled together, as vLLM does.
        What cannot be loaded is added to it before vLLM reads it.
    preempted: requests of loads that are not in this step, so that it cannot compute their items.
    """

    def __init__(
        self,
        loads: tuple[Load, ...] = (),
        computed: dict[str, Output] | None = None,
        encoded: dict[str, list[int]] | None = None,
        preempted: frozenset[str] = frozenset(),
    ) -> None:
        self.loads = loads
        self.computed = computed or {}
        self.encoded = encoded
        self.preempted = preempted


NOTHING = EncoderStep()


@dataclass
class EncoderReport(compat.WorkerMetadata):  # type: ignore[misc]
    """What workers tell of a step; from vLLM 0.30 on.

    counts: what was counted since the last report, over the workers.
    fingerprints: of workers that joined the pool again after their weights were replaced.
    left: whether a worker has left the pool.
    stalled: whether a load had no answer in time.
    """

    counts: Data = field(default_factory=dict)
    fingerprints: list[bytes] = field(default_factory=list)
    left: bool = False
    stalled: bool = False

    def aggregate(self, other: Any) -> EncoderReport:
        """Of two workers as one."""
        counts: Any = dict(self.counts)
        for name, value in other.counts.items():
            counts[name] = counts[name] + value if name in counts else value
        return EncoderReport(
            counts,
            self.fingerprints + other.fingerprints,
            left=self.left or other.left,
            stalled=self.stalled or other.stalled,
        )
