"""The workers of a prefill engine that a decode worker connects to, from an offer or from the bootstrap
page, and what it takes of each (``rank_pairs``)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd.incoming import PartSource
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.rank_pairs import Sizes, prefill_sizes, shares_of, stages_of
from moonpool.core.store.keys import Ranges

# One decode worker has so many connections for one request, and some CONNECTIONS_MAX for all.
PEERS_MAX = 32


@dataclass(frozen=True, slots=True)
class Met:
    """The workers of a prefill engine, as its bootstrap page has them.

    peers: those that this worker connects to.
    addresses: of all of them, PEERS_MAX at most.
    refusal: why this worker takes nothing from them, or "".
    """

    peers: tuple[PartSource, ...]
    addresses: tuple[str, ...]
    refusal: str = ""

    @property
    def told(self) -> tuple[str, ...]:
        """Addresses of those that this worker tells that a prompt is not taken."""
        return tuple(peer.address for peer in self.peers) or self.addresses


class PeerFinder:
    """Finds the peers of one decode worker."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        tp_rank: int,
        pp_rank: int,
        columns: Sequence[Ranges],
        has_windows: bool = False,
    ) -> None:
        """sizes: of the decode engine.
        tp_rank, pp_rank: of this worker.
        columns: the objects of a block that it holds.
        has_windows: whether some layers need some blocks only.
        """
        self._sizes = sizes
        self._tp_rank = tp_rank
        self._pp_rank = pp_rank
        self._columns = columns
        self._has_windows = has_windows

    def of_offer(self, offer: Offer) -> tuple[PartSource, ...]:
        """Raises Refused for an engine whose sizes do not go together with this one's."""
        workers, engine = len(offer.ranks), offer.engine_id
        theirs = prefill_sizes(self._sizes, workers=workers, tp_size=offer.tp_size, engine=engine)
        ranks = enumerate(offer.ranks)
        places = {(rank % theirs.tp_size, rank // theirs.tp_size): place for rank, place in ranks}
        return self._peers(theirs, places, engine)

    def of_page(self, engine: str, workers: Mapping[tuple[int, int], str], key: Hashable) -> Met:
        """engine: its name.
        workers: (tensor rank, pipeline rank) -> address; not empty.
        key: of the connection that asked for the page, which becomes that to the first peer.
        """
        addresses = tuple(dict.fromkeys(workers.values()))[:PEERS_MAX]
        tp_size = len({tp_rank for tp_rank, _ in workers})
        try:
            theirs = prefill_sizes(self._sizes, workers=len(workers), tp_size=tp_size, engine=engine)
            first, *rest = self._peers(theirs, workers, engine)
        except Refused as refusal:
            return Met((), addresses, str(refusal))
        return Met((replace(first, key=key), *rest), addresses)

    def _peers(
        self, theirs: Sizes, places: Mapping[tuple[int, int], str], engine: str
    ) -> tuple[PartSource, ...]:
        """places: (tensor rank, pipeline rank) -> address."""
        shares = shares_of(theirs.kv_heads, theirs.tp_size, self._sizes.tp_size, self._tp_rank)
        stages, readers = stages_of(theirs, self._sizes, self._pp_rank)
        cuts_layers = theirs.pp_size != self._sizes.pp_size
        if sum(len(share.columns_of(self._columns)) for share in shares) != len(self._columns):
            raise Refused(
                f"the heads of this engine's workers are not whole parts of those of the prefill engine "
                f"{engine}, which has {theirs.tp_size} tensor-parallel ranks"
            )
        if cuts_layers and self._has_windows:
            raise Refused(
                f"the prefill engine {engine} has {theirs.pp_size} pipeline stages and this one "
                f"{self._sizes.pp_size}; with sliding windows a hand-over needs equal pipeline-parallel sizes"
            )
        if any((share.tp_rank, stage) not in places for share in shares for stage in stages):
            raise Refused(f"the prefill engine {engine} names some of its workers only")
        peers = tuple(
            PartSource((engine, place), place, share.readers * readers, share, cuts_layers)
            for stage in stages
            for share in shares
            for place in [places[share.tp_rank, stage]]
        )
        if len(peers) > PEERS_MAX:
            raise Refused(
                f"one worker of this engine would read from {len(peers)} workers of the prefill engine "
                f"{engine}; a hand-over needs {PEERS_MAX} at most"
            )
        if len({peer.address for peer in peers}) < len(peers):
            raise Refused(f"the prefill engine {engine} names one address for several of its workers")
        return peers
