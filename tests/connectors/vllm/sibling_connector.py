"""A connector that stands beside ours behind vLLM's MultiConnector: vLLM's own example, which stores on disk,
with a handshake of its own, as connectors that talk to other engines have. Imported by a real vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


@dataclass
class Address(KVConnectorHandshakeMetadata):
    port: int


class Sibling(ExampleConnector):  # type: ignore[misc]
    def get_handshake_metadata(self) -> Address:
        return Address(1)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        assert all(isinstance(one, Address) for one in metadata.values()), metadata
