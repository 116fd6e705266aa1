"""The messages between the workers of two engines, and the description of a worker's memory: msgpack, carried
by ``TransferEngine.notify``, which arrive in the order in which one side sent them.

    decode -> prefill   Want      "I take this transfer: tell me what is computed, at ``reply``"
                        Heartbeat for these leases and transfers, every second
                        Done      "I need nothing more of it", and why not, when it was of no use
    prefill -> decode   Progress  these blocks are complete
                        Known     of the transfers in a Heartbeat: those that are under way
                        Gone      nothing (more) will come

Want, Progress, Known and Gone belong to the concurrent form. A lease of 0 is "not known to me". Messages and
descriptions are read strictly: what does not fit is dropped and counted.

A decode engine of another tensor-parallel size has several workers that read from one worker of prefill
(``readers``), or one that reads from several. Fields that the release before did not have stand last and have
defaults: that release neither sends nor reads them, and its engines hand over between equal sizes.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from moonpool.connectors.vllm.pd.kv_transfer_params import TRANSFER_ID_MAX
from moonpool.core.store.keys import Ranges

BLOCKS_MAX = 1 << 20
WHY_MAX = 1024
READERS_MAX = 1024

T = TypeVar("T")
_U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_U64 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=TRANSFER_ID_MAX)]
_Why = Annotated[str, msgspec.Meta(max_length=WHY_MAX)]
_Readers = Annotated[int, msgspec.Meta(ge=1, le=READERS_MAX)]
_Blocks = Annotated[list[_U32], msgspec.Meta(max_length=BLOCKS_MAX)]


class Malformed(Exception):
    """These bytes are not what they should be."""


class Want(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Decode takes ``transfer``.

    reply: the address of its worker.
    taker: what all workers of this decode engine have in common; "": ``reply``.
    readers: workers of this decode engine that take the transfer from the addressed worker.
    """

    transfer: _Text
    reply: _Text
    taker: _Text = ""
    readers: _Readers = 1


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Decode still needs these.

    reply: the address of its worker.
    """

    reply: _Text
    leases: list[_U64]
    transfers: list[_Text]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Decode needs nothing more of a lease or a transfer.

    why: one sentence about what went wrong, or "".
    reply, taker: the sender, as in its Want.
    readers: workers of this decode engine that say so before the addressed worker's lease ends.
    """

    lease: _U64
    transfer: _Text
    why: _Why = ""
    reply: _Text = ""
    taker: _Text = ""
    readers: _Readers = 1


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Blocks ``first`` and following of the prompt, per group; first is 0 when the lease is a new one.

    worker: the address of the sender; "" from the release before.
    """

    transfer: _Text
    lease: _U64
    slot: _U32
    prompt: bytes
    first: _U32
    blocks: list[_Blocks]
    final: bool
    worker: _Text = ""


class Known(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The transfers that are under way, as (transfer, lease, complete blocks); Progress has reported all of
    these blocks before this message.

    worker: as in Progress.
    """

    transfers: list[tuple[_Text, _U64, _U32]]
    worker: _Text = ""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Nothing (more) comes of ``transfer``, and why.

    worker: as in Progress.
    """

    transfer: _Text
    why: _Why
    worker: _Text = ""


Message: TypeAlias = "Want | Heartbeat | Done | Progress | Known | Gone"


class Description(msgspec.Struct, frozen=True):
    """How the KV memory of one worker is laid out.

    columns: the objects of a block, as the five numbers of Ranges each.
    rows: of each column, (address of block 0, bytes from block to block, bytes).
    slots: address of the lease table.
    slot_count: leases that it has room for.
    counts_readers: whether a lease ends only when all ``readers`` need no more; False in the release before.
    layers: of each column, the number and the bytes of a block of each layer; [] in the release before.
    """

    engine_id: _Text
    fingerprint: bytes
    columns: list[tuple[_U32, _U32, _U32, _U32, _U32]]
    rows: list[list[tuple[_U64, _U64, _U64]]]
    slots: _U64
    slot_count: _U32
    counts_readers: bool = False
    layers: list[list[tuple[_U32, _U64]]] = []

    @property
    def ranges(self) -> tuple[Ranges, ...]:
        """The columns as ranges of heads and layers."""
        return tuple(Ranges(*column) for column in self.columns)


_encode = msgspec.msgpack.Encoder().encode
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Want | Heartbeat | Done | Progress | Known | Gone
)
_descriptions = msgspec.msgpack.Decoder(Description)


def encode(value: Message | Description) -> bytes:
    """The bytes of a message or a description."""
    return _encode(value)


def decode(message: bytes) -> Message:
    """The message. Raises Malformed for other bytes."""
    return _decoded(_messages, message)


def decode_description(text: bytes) -> Description:
    """The description. Raises Malformed for other bytes."""
    return _decoded(_descriptions, text)


def _decoded(decoder: msgspec.msgpack.Decoder[T], text: bytes) -> T:
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error
