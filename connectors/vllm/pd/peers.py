"""The workers of a prefill engine that a decode worker connects to, from an offer or from the bootstrap
page, and what it takes of each (``rank_pairs``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd.incoming import PartSource
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.rank_pairs import Share, Sizes, prefill_tp_size, shares_of
from moonpool.core.store.keys import Ranges


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker of a prefill engine, and what this one takes of it."""

    source: PartSource
    share: Share


@dataclass(frozen=True, slots=True)
class Met:
    """The workers of a prefill engine, as its bootstrap page has them.

    peers: those that this worker connects to.
    addresses: of all of them.
    refusal: why this worker takes nothing from them, or "".
    """

    peers: tuple[Peer, ...]
    addresses: tuple[str, ...]
    refusal: str = ""

    @property
    def told(self) -> tuple[str, ...]:
        """Addresses of those that this worker tells that a prompt is not taken."""
        return tuple(peer.source.address for peer in self.peers) or self.addresses


class PeerFinder:
    """Finds the peers of one decode worker."""

    def __init__(self, sizes: Sizes, *, tp_rank: int, pp_rank: int, columns: Sequence[Ranges]) -> None:
        """sizes: of the decode engine.
        tp_rank, pp_rank: of this worker.
        columns: the objects of a block that it holds.
        """
        self._sizes = sizes
        self._tp_rank = tp_rank
        self._pp_rank = pp_rank
        self._columns = columns

    def of_offer(self, offer: Offer) -> tuple[Peer, ...]:
        """Raises Refused for an engine whose sizes do not go together with this one's."""
        tp_size = prefill_tp_size(self._sizes, workers=len(offer.ranks), engine=offer.engine_id)
        shares = self._shares(tp_size, offer.engine_id)
        first = self._pp_rank * tp_size
        return self._peers(shares, lambda share: offer.ranks[first + share.tp_rank], offer.engine_id)

    def of_page(self, engine: str, workers: Mapping[tuple[int, int], str], key: Hashable) -> Met:
        """engine: its name.
        workers: (tensor rank, pipeline rank) -> address; not empty.
        key: of the connection that asked for the page, which becomes that to the first peer.
        """
        addresses = tuple(workers.values())
        try:
            stages = len({pp_rank for _, pp_rank in workers})
            if stages != self._sizes.pp_size:
                raise Refused(
                    f"the prefill engine {engine} has {stages} pipeline stages and this one "
                    f"{self._sizes.pp_size}; a hand-over needs equal pipeline-parallel sizes"
                )
            tp_size = prefill_tp_size(self._sizes, workers=len(workers), engine=engine)
            shares = self._shares(tp_size, engine)
            if any((share.tp_rank, self._pp_rank) not in workers for share in shares):
                raise Refused(f"the bootstrap page of the prefill engine {engine} lacks some of its workers")
        except Refused as refusal:
            return Met((), addresses, str(refusal))
        found = self._peers(shares, lambda share: workers[share.tp_rank, self._pp_rank], engine)
        first = PartSource(key, found[0].source.address, found[0].source.readers)
        return Met((Peer(first, found[0].share), *found[1:]), addresses)

    def _shares(self, tp_size: int, engine: str) -> tuple[Share, ...]:
        shares = shares_of(self._sizes.kv_heads, tp_size, self._sizes.tp_size, self._tp_rank)
        if sum(len(share.columns_of(self._columns)) for share in shares) != len(self._columns):
            raise Refused(
                f"the heads of this engine's workers are not whole parts of those of the prefill engine "
                f"{engine}, which has {tp_size} tensor-parallel ranks"
            )
        return shares

    def _peers(
        self, shares: Sequence[Share], place_of: Callable[[Share], str], engine: str
    ) -> tuple[Peer, ...]:
        places = [place_of(share) for share in shares]
        return tuple(
            Peer(PartSource((engine, place), place, share.readers), share)
            for place, share in zip(places, shares, strict=True)
        )
