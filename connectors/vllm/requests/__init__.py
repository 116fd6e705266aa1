"""The life of one request in the connector, without clocks, threads or sockets: events in, effects out."""

from moonpool.connectors.vllm.requests.chain import Chain
from moonpool.connectors.vllm.requests.state import Hit, Phase, RequestState

__all__ = ["Chain", "Hit", "Phase", "RequestState"]
