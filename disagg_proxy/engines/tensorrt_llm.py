"""TensorRT-LLM's servers: the field ``disaggregated_params``, by which a context server and a generation
server learn of each other.

Context first: the context server gets the first form below; its answer goes to the generation server.

Generation first: both get the request at once, with a transfer id of ours. The generation server calls the
context server at the address that its ``GET /server_info`` gave before:

    {"disaggregated_params": {"ctx_info_endpoint": ["tcp://10.0.0.1:4711"], "ctx_dp_rank": 0}}
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec

PAGE = "/server_info"
FIRST_NUMBERS = 1 << 62  # smaller ids than 2^42 are a server's own
_MEETS_BY = ("ctx_info_endpoint", "encoded_opaque_state")  # one of them is needed to reach the server
_OURS = ("request_type", "ctx_request_id", "disagg_request_id", "schedule_style", "conversation_id")


class _Page(msgspec.Struct):
    disaggregated_params: dict[str, Any]


_page = msgspec.json.Decoder(_Page)


def read_server_info(body: bytes) -> bytes | None:
    """The members of a JSON object, without braces, that tell a generation server how to reach this context
    server. None: the page does not have them."""
    try:
        told = _page.decode(body).disaggregated_params
    except (msgspec.MsgspecError, ValueError, RecursionError):  # no JSON, no text, nested without end
        return None
    endpoint = told.get("ctx_info_endpoint")
    if isinstance(endpoint, list):  # one for each rank; the first rank knows the others
        told["ctx_info_endpoint"] = endpoint[0] if endpoint else None
    if not any(isinstance(told.get(name), str) and told[name] for name in _MEETS_BY):
        return None
    members = {name: value for name, value in told.items() if name not in _OURS and value is not None}
    return msgspec.json.encode(members)[1:-1]


def transfer_ids() -> Iterator[int]:
    """Unique ids of hand-overs: consecutive numbers from a random start, so that they practically never
    collide with another proxy's. Thread safe."""
    return itertools.count(FIRST_NUMBERS + secrets.randbelow(FIRST_NUMBERS >> 1))


def to_context(number: int, *, generation_first: bool) -> bytes:
    """disaggregated_params for a context server."""
    form = b'{"request_type":"context_only","disagg_request_id":%d,"schedule_style":%d}'
    return form % (number, generation_first)


def to_generation(number: int, context: bytes) -> bytes:
    """disaggregated_params for a generation server in the form generation first. context: from
    read_server_info."""
    form = (
        b'{"request_type":"generation_only","ctx_request_id":%d,"disagg_request_id":%d,"schedule_style":1,%b}'
    )
    return form % (number, number, context)
