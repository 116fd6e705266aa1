"""TensorRT-LLM's servers: how a context server and a generation server of theirs are told of each other, in
``disaggregated_params``.

Context first: the context server gets the first form below, and what it answers goes to the other.

Generation first: both are asked at once, and meet under a number of ours. The generation server calls the
context server, and must be told where. The context server's ``GET /server_info`` says it beforehand:

    {"disaggregated_params": {"ctx_info_endpoint": ["tcp://10.0.0.1:4711"], "ctx_dp_rank": 0}}
"""

from __future__ import annotations

import itertools
import secrets
from typing import Any

import msgspec

PAGE = "/server_info"
MEMBER = "disaggregated_params"
FIRST_NUMBERS = 1 << 62  # numbers below 2^42 are a server's own
_MEETS_BY = ("ctx_info_endpoint", "encoded_opaque_state")  # without both no engine can be met
_OURS = ("request_type", "ctx_request_id", "disagg_request_id", "schedule_style", "conversation_id")


class _Page(msgspec.Struct):
    disaggregated_params: dict[str, Any]


_page = msgspec.json.Decoder(_Page)


def read_server_info(body: bytes) -> bytes | None:
    """What a generation server is to be told of this context server: members of a JSON object, without its
    braces. None: this page does not say where it is met."""
    try:
        told = _page.decode(body).disaggregated_params
    except (msgspec.MsgspecError, ValueError, RecursionError):  # no JSON, no text, nested without end
        return None
    endpoint = told.get("ctx_info_endpoint")
    if isinstance(endpoint, list):  # one for each rank; the first knows the others
        told["ctx_info_endpoint"] = endpoint[0] if endpoint else None
    if not any(isinstance(told.get(name), str) and told[name] for name in _MEETS_BY):
        return None
    members = {name: value for name, value in told.items() if name not in _OURS and value is not None}
    return msgspec.json.encode(members)[1:-1]


class TransferIds:
    """What hand-overs are known by: no two of this proxy's are the same, nor, as good as certainly, two of
    several proxies'. On any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(FIRST_NUMBERS + secrets.randbelow(FIRST_NUMBERS >> 1))

    def take(self) -> int:
        """The next id."""
        return next(self._numbers)


def to_context(number: int, *, generation_first: bool) -> bytes:
    """disaggregated_params for a context server."""
    form = b'{"request_type":"context_only","disagg_request_id":%d,"schedule_style":%d}'
    return form % (number, generation_first)


def to_generation(number: int, context: bytes) -> bytes:
    """disaggregated_params for a generation server that is asked at once. context: see read_server_info."""
    form = (
        b'{"request_type":"generation_only","ctx_request_id":%d,"disagg_request_id":%d,"schedule_style":1,%b}'
    )
    return form % (number, number, context)
