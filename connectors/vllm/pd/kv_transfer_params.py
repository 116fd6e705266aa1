"""``kv_transfer_params``: what prefill and decode engines tell each other through the proxy.

    two-step     prefill is asked with {"do_remote_decode": true, ...}; its answer's kv_transfer_params is put
                 into decode's request unchanged. The names are those of vLLM's NixlConnector, which existing
                 proxies speak; what only we need stands under "moonpool".
    concurrent   prefill is asked with {"do_remote_decode": true, "transfer_id": X}, decode at the same time
                 with {"do_remote_prefill": true, "transfer_id": X, "remote_engine_id": E,
                 "remote_bootstrap_addr": "http://host:port"}, as vLLM's MooncakeConnector has it.

The parameters pass through clients, so every field is checked. An offer is signed with the cluster token,
because it names memory: without a signature, a client that can send a request could make decode read other
requests' blocks and store them as those of its own prompt.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec

from moonpool.core.config.cluster_token import secrets_of
from moonpool.core.version_range import VersionRange

# An offer goes one way, so prefill writes a version that decode engines of the release before read, too. What
# is new within it is a field with a default, as tp_size, which they pass over.
READS = VersionRange(1, 1)
WRITES = 1
LEASE_BITS = 53  # an integer that every JSON reader keeps
TRANSFER_ID_MAX = 256
LEFT = "its request is gone"  # why a prompt is not taken: as a rule its client left

BlockIds: TypeAlias = "tuple[tuple[int, ...], ...]"  # one tuple per KV cache group

_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Lease = Annotated[int, msgspec.Meta(gt=0, lt=1 << LEASE_BITS)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=TRANSFER_ID_MAX)]
_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Origin = Annotated[str, msgspec.Meta(pattern=r"^http://[^/?#@\s]+/?\Z", max_length=1024)]


_PURPOSE = b"moonpool hand-over offer 1\0"  # no other text that is signed with the token begins with it
_SIZE_PURPOSE = b"moonpool hand-over tp_size 1\0"
_encode = msgspec.msgpack.Encoder().encode


class Unusable(Exception):
    """The parameters ask for an impossible hand-over; the message is one sentence with the reason."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A request to a prefill engine whose KV another engine will take.

    transfer: its id in the concurrent form; "" in the two-step form.
    """

    transfer: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Two-step form: what the prefill engine holds.

    engine_id: vLLM's name for the prefill engine.
    ranks: addresses of its workers.
    lease, slot: under which it keeps the blocks.
    blocks: block ids, per KV cache group.
    tokens: of the prompt.
    fingerprint: of its KV, 32 bytes.
    prompt: digest of the prompt, 32 bytes.
    tp_size: its tensor-parallel ranks; 0: not told, by the release before. It has a signature of its own,
        which that release does not read.
    """

    engine_id: str
    ranks: tuple[str, ...]
    lease: int
    slot: int
    blocks: BlockIds
    tokens: int
    fingerprint: bytes
    prompt: bytes
    tp_size: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Concurrent form: where to find the prefill engine that computes ``transfer`` now.

    engine_id: vLLM's name for the prefill engine.
    bootstrap: URL of its bootstrap page.
    transfer: id that the proxy gave both engines.
    """

    engine_id: str
    bootstrap: str
    transfer: str


Source: TypeAlias = "Offer | Meeting"


class _Handover(msgspec.Struct):
    version: int
    ranks: Annotated[list[_Text], msgspec.Meta(min_length=1, max_length=1024)]
    lease: _Lease
    slot: _U32
    fingerprint: _Hex
    prompt: _Hex
    signature: _Hex = ""
    tp_size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)] = 0
    size_signature: _Hex = ""


class _Ours(msgspec.Struct):
    handover: _Handover


class _TwoStep(msgspec.Struct):
    remote_engine_id: _Text
    remote_block_ids: Annotated[list[list[_U32]], msgspec.Meta(min_length=1)]
    remote_num_tokens: Annotated[int, msgspec.Meta(gt=0)]
    moonpool: _Ours


class _Concurrent(msgspec.Struct):
    remote_engine_id: _Text
    remote_bootstrap_addr: _Origin
    transfer_id: _Text


def parse_prefill(params: Mapping[str, Any] | None) -> Prefill | None:
    """The hand-over that a request asks of a prefill engine; None: none. Raises Unusable."""
    if not params or not params.get("do_remote_decode"):
        return None
    transfer = params.get("transfer_id")
    if transfer is not None and not (isinstance(transfer, str) and 0 < len(transfer) <= TRANSFER_ID_MAX):
        raise Unusable(f"transfer_id must be a text of 1 to {TRANSFER_ID_MAX} characters")
    return Prefill(transfer or "")


def parse_decode(params: Mapping[str, Any] | None, token: bytes) -> Source | None:
    """The source of a request's KV; None: none.

    token: the cluster token, with which an offer must be signed.

    Raises Unusable.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    ours = params.get("moonpool")  # every answer of an engine has it, for example with the hits in the pool
    offered = isinstance(ours, Mapping) and "handover" in ours
    try:
        if not offered and params.get("transfer_id") is not None:
            met = msgspec.convert(dict(params), _Concurrent)
            return Meeting(met.remote_engine_id, met.remote_bootstrap_addr, met.transfer_id)
        if not offered:
            raise Unusable(
                "kv_transfer_params were not made by this connector: the prefill engine must run it, too"
            )
        two = msgspec.convert(dict(params), _TwoStep)
    except msgspec.ValidationError as error:
        raise Unusable(f"kv_transfer_params cannot be read: {error}") from error
    hand = two.moonpool.handover
    if hand.version not in READS:
        written = VersionRange(hand.version, hand.version)
        raise Unusable(
            READS.none_in_common("this decode engine", written, "the prefill engine", "hand-over offers")
        )
    offer = Offer(
        engine_id=two.remote_engine_id,
        ranks=tuple(hand.ranks),
        lease=hand.lease,
        slot=hand.slot,
        blocks=tuple(map(tuple, two.remote_block_ids)),
        tokens=two.remote_num_tokens,
        fingerprint=bytes.fromhex(hand.fingerprint),
        prompt=bytes.fromhex(hand.prompt),
        tp_size=hand.tp_size,
    )
    if not any(_is_signed(offer, hand, secret) for secret in secrets_of(token)):
        raise Unusable(
            "the prefill engine's signature does not fit: kv_transfer_params were changed on their way, or "
            "that engine has another cluster token"
        )
    return offer


def signature(offer: Offer, secret: bytes) -> str:
    """Over all that decode believes of an offer but tp_size: HMAC-SHA-256, 64 hex digits."""
    whole = (
        offer.engine_id,
        offer.ranks,
        offer.lease,
        offer.slot,
        offer.blocks,
        offer.tokens,
        offer.fingerprint,
        offer.prompt,
    )
    return hmac.new(secret, _PURPOSE + _encode(whole), hashlib.sha256).hexdigest()


def size_signature(offer: Offer, secret: bytes) -> str:
    """Over the tp_size of this offer, as ``signature``."""
    whole = _encode((signature(offer, secret), offer.tp_size))
    return hmac.new(secret, _SIZE_PURPOSE + whole, hashlib.sha256).hexdigest()


def answer_of(offer: Offer, token: bytes, *, request_id: str) -> dict[str, Any]:
    """The kv_transfer_params of a prefill engine's answer, which ``parse_decode`` reads."""
    host, _, port = offer.ranks[0].rpartition(":")
    secret = secrets_of(token)[0]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_request_id": request_id,
        "remote_host": host.strip("[]"),
        "remote_port": int(port),
        "remote_block_ids": [list(ids) for ids in offer.blocks],
        "remote_num_tokens": offer.tokens,
        "tp_size": offer.tp_size,
        "moonpool": {
            "handover": {
                "version": WRITES,
                "ranks": list(offer.ranks),
                "lease": offer.lease,
                "slot": offer.slot,
                "fingerprint": offer.fingerprint.hex(),
                "prompt": offer.prompt.hex(),
                "signature": signature(offer, secret),
                "tp_size": offer.tp_size,
                "size_signature": size_signature(offer, secret),
            }
        },
    }


def _is_signed(offer: Offer, hand: _Handover, secret: bytes) -> bool:
    return hmac.compare_digest(hand.signature, signature(offer, secret)) and (
        not offer.tp_size or hmac.compare_digest(hand.size_signature, size_signature(offer, secret))
    )


def blocks_for(tokens: int, block_tokens: int) -> int:
    """The blocks of a prompt of ``tokens`` tokens that decode needs: it computes the last token itself."""
    return -(-(tokens - 1) // block_tokens)


def slice_blocks(blocks: Sequence[Sequence[int]], first: int, last: int) -> BlockIds:
    """The ids of blocks [first, last) of each group."""
    return tuple(tuple(ids[first:last]) for ids in blocks)
