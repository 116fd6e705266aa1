"""The life of one request in the connector, without clocks, threads or sockets: events in, effects out. The
names of its objects are a chain; prefix_search finds what of it can be loaded with sliding windows."""

from moonpool.connectors.vllm.requests.chain import Chain
from moonpool.connectors.vllm.requests.prefix_search import Needs, PrefixSearch, Want
from moonpool.connectors.vllm.requests.state import Hit, Phase, RequestState

__all__ = ["Chain", "Hit", "Needs", "Phase", "PrefixSearch", "RequestState", "Want"]
