"""The counts and latencies of encoder outputs, in the engine's own /metrics (vLLM 0.31 and newer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from moonpool.connectors.vllm.metrics import ConnectorProm


class EncoderProm(ConnectorProm):
    """moonpool_encoder_* in the engine's /metrics."""

    prefix: ClassVar[str] = "moonpool_encoder_"
    counters: ClassVar[Mapping[str, str]] = {
        "lookups": "Images, sounds and videos that the pool was asked for and answered.",
        "lookups_unknown": "Those without an answer in time; they count as a miss.",
        "hits": "Those whose encoder output the pool had.",
        "encoded": "Items that were scheduled for the encoder, because the pool did not have them.",
        "loads": "Encoder outputs that were loaded from the pool, over all ranks.",
        "loaded_bytes": "Their bytes, over all ranks.",
        "load_errors": "Items that the pool had and that were not loaded, over all ranks; they are encoded.",
        "saves": "Encoder outputs that were stored in the pool.",
        "saved_bytes": "Their bytes.",
        "existing": "Encoder outputs that were in the pool already when they were to be stored.",
        "refused": "Encoder outputs that the pool did not take, or that could not be sent to it.",
        "unsaved": "Encoder outputs that were not offered: too many bytes waited, or of unknown form.",
        "survived_errors": "Unexpected exceptions in the connector that the engine was kept safe from.",
    }
    labelled: ClassVar[Mapping[str, tuple[str, tuple[str, ...], str]]] = {}
    histograms: ClassVar[Mapping[str, str]] = {
        "lookup_seconds": "From a query until its answer is seen.",
        "load_seconds": "That a step waited for the loads of its encoder outputs.",
        "save_seconds": "From the start of a save until its end is seen.",
    }
