"""What two engines tell each other about blocks of their own prefix caches, over HTTP at the bootstrap page
of the engine that has them: ``POST /cached``.

    taker -> neighbour    Ask: "which of these leading blocks do you have?", by vLLM's hashes of them
    neighbour -> taker    {}, or the kv_transfer_params of a two-step hand-over: a lease and its blocks

A block is named by vLLM's own hash of all tokens up to its end and of the cache salt, under the fingerprint
of the KV: another model, other weights or another tenant's salt never match. vLLM's hash has a LoRA adapter
by its name alone and an image by an identifier that clients choose, so prompts with these are not asked for;
nor with hashes that are no SHA-256.

Both ends prove the cluster token: the ask by its first 32 bytes, the answer as every offer of a hand-over
does. An answer has the digest of its ask in the place of its prompt's, so it fits no other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from moonpool.connectors.vllm.pd.kv_transfer_params import Offer, Unusable, parse_decode
from moonpool.connectors.vllm.pd.wire import Malformed
from moonpool.core.config.cluster_token import secrets_of

PATH = "/cached"
HASHES_MAX = 1 << 16
ASK_BYTES_MAX = 4 << 20
MAC_BYTES = 32
_PURPOSE = b"moonpool cached blocks ask 1\0"  # no other text that is signed with the token begins with it

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Origin = Annotated[str, msgspec.Meta(pattern=r"^http://[^/?#@\s]+/?\Z", max_length=1024)]


class Neighbour(msgspec.Struct, frozen=True):
    """``cached_at`` of "moonpool" in a request's kv_transfer_params: an engine whose own cache has more of
    the prompt, as the proxy knows from its KV events.

    remote_engine_id: vLLM's name for it.
    remote_bootstrap_addr: URL of its bootstrap page.
    """

    remote_engine_id: _Text
    remote_bootstrap_addr: _Origin


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """Asks an engine for blocks.

    engine_id: of the engine that is asked.
    fingerprint: of the taker's KV, 32 bytes.
    algorithm: how vLLM makes the hashes, as its prefix_caching_hash_algo has it.
    wait_s: how long the taker waits for the answer.
    hashes: of the blocks, in the order of the prompt; all before the first one that is lacking are given.
    """

    engine_id: _Text
    fingerprint: bytes
    algorithm: _Text
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    hashes: Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=HASHES_MAX)]


_encode = msgspec.msgpack.Encoder().encode
_asks = msgspec.msgpack.Decoder(Ask)


def read_neighbour(params: Mapping[str, Any] | None) -> Neighbour | None:
    """The engine that the proxy names in a request's ``kv_transfer_params``; None: none."""
    ours = params.get("moonpool") if params else None
    named = ours.get("cached_at") if isinstance(ours, Mapping) else None
    if named is None:
        return None
    try:
        return msgspec.convert(named, Neighbour)
    except msgspec.ValidationError:
        return None


def encode_ask(ask: Ask, token: bytes) -> bytes:
    """The body of the request. token: the cluster token."""
    text = _encode(ask)
    return _proof(text, secrets_of(token)[0]) + text


def decode_ask(body: bytes, token: bytes) -> Ask:
    """The ask. Raises Malformed for a body that is none, or of a process without the cluster token."""
    text = body[MAC_BYTES:]
    proofs = [_proof(text, secret) for secret in secrets_of(token)]
    if not any(hmac.compare_digest(body[:MAC_BYTES], proof) for proof in proofs):
        raise Malformed("it does not prove the cluster token")
    try:
        return _asks.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error


def digest_of(body: bytes) -> bytes:
    """What stands for an ask in its answer, 32 bytes."""
    return hashlib.sha256(body).digest()


def read_answer(answer: bytes, ask: Ask, body: bytes, token: bytes) -> Offer | None:
    """What the engine offers; None: it has none of the blocks. Raises Unusable.

    body: of the ask, as it was sent.
    """
    try:
        params = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unusable(f"its answer cannot be read: {error}") from error
    if not params:
        return None
    offer = parse_decode(params, token)
    if not isinstance(offer, Offer) or offer.prompt != digest_of(body):
        raise Unusable("its answer is not to this ask")
    if (offer.engine_id, offer.fingerprint) != (ask.engine_id, ask.fingerprint):
        raise Unusable("its answer is of another engine, or of KV of another form")
    if len(offer.blocks) != 1 or not 0 < len(offer.blocks[0]) <= len(ask.hashes):
        raise Unusable("its answer has other blocks than it was asked for")
    return offer


def _proof(text: bytes, secret: bytes) -> bytes:
    return hmac.new(secret, _PURPOSE + text, hashlib.sha256).digest()
