"""Request switches: whether the connector of a vLLM engine may look up, load and save the blocks of one
request.

They come from the row of the client's key (``clients.py``), and from headers where the operator takes them
(``proxy.switch_headers``); a header switches off, and cannot switch on what the row has switched off.
Clients' own ``kv_transfer_params`` reach no engine. The data plane puts the switches into each body that it
makes of the request, also where a policy or an engine fails: what is not to be stored is stored nowhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from moonpool._native import ProxyRequest
from moonpool.core.config.proxy_section import SWITCHES
from moonpool.disagg_proxy.clients import Client
from moonpool.disagg_proxy.conductor.plan import Answer, refused
from moonpool.disagg_proxy.dispatch.request_hints import BadHeader

# Of vLLM: those that hand kv_transfer_params to its connector.
_TOLD = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/messages"))
_BEAM_SEARCH = frozenset((b"/v1/chat/completions", b"/v1/completions"))  # of those
_NO_KV = frozenset(
    (b"/v1/messages/count_tokens", b"/v1/tokenize", b"/v1/detokenize", b"/tokenize", b"/detokenize")
)
_VALUES = {b"on": True, b"off": False}


class _Body(msgspec.Struct):
    use_beam_search: object = False


_body = msgspec.json.Decoder(_Body)


class Switches(NamedTuple):
    """load: whether the engine asks the pool for blocks. store: whether it saves what it computes. keep_s:
    the soft pin of that, seconds; 0: none."""

    load: bool = True
    store: bool = True
    keep_s: int = 0

    @property
    def members(self) -> list[tuple[str, str]]:
        """Names and JSON values of what an engine is told, as ``ProxyRequest.switches`` takes them."""
        off = [(name, "false") for name in SWITCHES if not getattr(self, name)]
        return [*off, ("keep_s", str(self.keep_s))] if self.keep_s and self.store else off


NO_SWITCH = Switches()


def read(
    fields: Mapping[str, bytes] | None, taken: Collection[str] = (), client: Client | None = None
) -> Switches:
    """fields: ``ProxyRequest.moonpool_headers``. taken: the switches that clients may say by a header.
    client: whose key the request came with. Raises BadHeader."""
    row = NO_SWITCH if client is None else Switches(client.load, client.store, client.keep_s)
    own = {name: fields[name] for name in SWITCHES if name in fields} if fields else {}
    for name, value in own.items():
        header = f"X-Moonpool-{name.capitalize()}"
        if name not in taken:
            raise BadHeader(f"{header} is not taken here; its operator would set proxy.switch_headers")
        if value not in _VALUES:
            raise BadHeader(f"{header} is on or off")
    off = {name: False for name, value in own.items() if not _VALUES[value]}
    return row._replace(**off) if off else row


def loads(request: ProxyRequest) -> bool:
    """Whether the engine asks the pool for the request's blocks."""
    return ("load", "false") not in request.switches


def hindrance(request: ProxyRequest, switches: Switches) -> str | None:
    """Why no engine's connector can be told, the beginning of a sentence; None: vLLM's can. The body is only
    read where something is switched off."""
    if request.path not in _TOLD:
        return "on this path no engine can be told to"
    if switches.load and switches.store:
        return None
    try:
        body = _body.decode(request.body or b"{}")
    except msgspec.DecodeError:  # of what the data plane takes as JSON; engines may read it
        return "since the body has half a surrogate pair no engine can be told to"
    if body.use_beam_search and request.path in _BEAM_SEARCH:  # its beams lose kv_transfer_params
        return "with use_beam_search no engine can be told to"
    return None


def can_tell(request: ProxyRequest) -> bool:
    """Whether vLLM hands what is told on this path to its connector."""
    return request.path in _TOLD


def uses_no_pool(request: ProxyRequest) -> bool:
    """Whether an engine computes no KV for it."""
    return request.path in _NO_KV or request.method != b"POST"


def untold(request: ProxyRequest, why: str) -> Answer | None:
    """The engine cannot be told: 400 for a request that is to be kept out of the pool; None: it goes on
    without its switches. why: the beginning of a sentence."""
    off = any(value == "false" for _, value in request.switches)
    request.switches = []
    if not off:
        return None
    how = "this key, or a header X-Moonpool-Load or X-Moonpool-Store, keeps the request out of the pool"
    return refused(400, f"{how}, and {why} do so", "switches")
