"""Which prefill workers a decode worker reads from, against what the workers hold: exhaustively over heads,
sizes and layouts, with the bytes copied between arrays."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter

import numpy as np
import pytest

from moonpool.connectors.objects import Refused
from moonpool.connectors.vllm.pd.copy_ranges import Held, pair_columns, ranges_of, tables_of
from moonpool.connectors.vllm.pd.incoming import PartSource
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.peers import PEERS_MAX, PeerFinder
from moonpool.connectors.vllm.pd.rank_pairs import ALL_HEADS, Share, Sizes, prefill_sizes, shares_of
from moonpool.core.store.keys import Ranges
from tests.connectors.vllm.pd.rank_memory import LAYOUTS, RankMemory, layers_of_stage, model_kv, rank_memory

HEADS = range(1, 9)
TP_SIZES = (1, 2, 4)
HERE, THERE = [3, 4, 5, 9, 0], [7, 8, 9, 1, 2]


def splits(kv_heads: int, tp_size: int) -> bool:
    return kv_heads % tp_size == 0 or tp_size % kv_heads == 0


PAIRS = [
    (heads, theirs, ours)
    for heads, theirs, ours in itertools.product(HEADS, TP_SIZES, TP_SIZES)
    if splits(heads, theirs) and splits(heads, ours)
]


@pytest.mark.parametrize(("heads", "theirs", "ours"), PAIRS)
@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
def test_every_byte_comes_from_a_worker_that_has_it(
    heads: int, theirs: int, ours: int, layouts: tuple[str, str]
) -> None:
    whole = model_kv(heads, seed=heads)
    prefill = [rank_memory(heads, theirs, rank, layouts[0], content=whole) for rank in range(theirs)]
    for rank in range(ours):
        decode = rank_memory(heads, ours, rank, layouts[1])
        before = decode.memory.copy()
        copied = sum(
            copy(prefill[share.tp_rank], decode, share) for share in shares_of(heads, theirs, ours, rank)
        )

        np.testing.assert_array_equal(decode.kv[:, HERE], whole[:, THERE][:, :, list(decode.heads)])
        assert copied == decode.kv[:, HERE].nbytes  # and no byte twice
        decode.kv[:, HERE] = np.nan
        untouched = ~np.isnan(decode.memory)
        np.testing.assert_array_equal(decode.memory[untouched], before[untouched])


def copy(prefill: RankMemory, decode: RankMemory, share: Share) -> int:
    """What a hand-over copies of one prefill worker; the bytes of it."""
    pairs = pair_columns(share, decode.held, prefill.held, cuts_layers=prefill.layers != decode.layers)
    if not pairs:
        return 0
    here, there, lengths = ranges_of(tables_of(pairs), [HERE], [THERE])
    for local, remote, length in zip(here.tolist(), there.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(local, remote, length)
    return int(lengths.sum())


@pytest.mark.parametrize(("heads", "theirs", "ours"), PAIRS)
def test_each_prefill_worker_knows_how_many_end_its_lease(heads: int, theirs: int, ours: int) -> None:
    everyone = [shares_of(heads, theirs, ours, rank) for rank in range(ours)]
    spoken_to = Counter(share.tp_rank for shares in everyone for share in shares)
    assert set(spoken_to) == set(range(theirs))
    for share in itertools.chain(*everyone):
        assert share.readers == spoken_to[share.tp_rank]


def test_equal_sizes_pair_by_rank() -> None:
    for heads, size in itertools.product(HEADS, TP_SIZES):
        for rank in range(size):
            assert shares_of(heads, size, size, rank) == (Share(rank, 0, ALL_HEADS.heads, 1),)


def test_copies_of_a_head_share_the_work() -> None:
    """Of one latent, as of MLA, and of two heads."""
    assert [shares_of(1, 4, 2, rank) for rank in (0, 1)] == [
        (Share(0, 0, 1, 1), Share(1, 0, 0, 1)),
        (Share(2, 0, 1, 1), Share(3, 0, 0, 1)),
    ]
    assert [shares_of(1, 2, 4, rank)[0].tp_rank for rank in range(4)] == [0, 0, 1, 1]
    assert shares_of(2, 4, 1, 0) == (
        Share(0, 0, 1, 1),
        Share(1, 0, 0, 1),
        Share(2, 1, 1, 1),
        Share(3, 1, 0, 1),
    )


@pytest.mark.parametrize(
    ("sizes", "workers", "why"),
    [
        (Sizes(8, 2), 3, "one of these to divide the other"),
        (Sizes(6, 3), 2, "one of these to divide the other"),
        (Sizes(3, 1), 2, "not split evenly"),
        (Sizes(8, 1, 2), 3, "needs equal pipeline-parallel sizes"),
        (Sizes(8, 3, 2), 5, "needs equal pipeline-parallel sizes"),
        (Sizes(16, 1), 16, "cut otherwise"),
    ],
)
def test_sizes_that_do_not_go_together(sizes: Sizes, workers: int, why: str) -> None:
    with pytest.raises(Refused, match=f"the prefill engine P .*{why}"):
        prefill_sizes(sizes, workers=workers, tp_size=0, engine="P")


def test_sizes_that_go_together() -> None:
    for ours, workers, told, theirs in (
        (Sizes(8, 2), 4, 0, Sizes(8, 4)),
        (Sizes(8, 2, 2), 8, 0, Sizes(8, 4, 2)),
        (Sizes(8, 2), 4, 2, Sizes(8, 2, 2)),
        (Sizes(8, 2, 4), 4, 4, Sizes(8, 4, 1)),
        (Sizes(8, 2), 4, 3, Sizes(8, 4)),  # a lie that cannot be
        (Sizes(3, 7), 7, 0, Sizes(3, 7)),  # equal ones need no reason
    ):
        assert prefill_sizes(ours, workers=workers, tp_size=told, engine="P") == theirs


def test_stages_that_are_cut_otherwise() -> None:
    for told in (1, 2):
        with pytest.raises(Refused, match="needs equal pipeline-parallel sizes, or one of them 1"):
            prefill_sizes(Sizes(8, 1, 2), workers=4 * told, tp_size=told, engine="P")


def columns_of(heads: int, tp_size: int, rank: int) -> tuple[Ranges, ...]:
    return tuple(rank_memory(heads, tp_size, rank, "HND").held.columns)


def offer(*ranks: str, tp_size: int = 0) -> Offer:
    return Offer("P", ranks, 7, 3, ((1,),), 4, bytes(32), bytes(32), tp_size)


class TestPeers:
    def finder(
        self,
        heads: int,
        tp_size: int,
        rank: int,
        stages: int = 1,
        stage: int = 0,
        has_windows: bool = False,
    ) -> PeerFinder:
        columns = columns_of(heads, tp_size, rank)
        sizes = Sizes(heads, tp_size, stages)
        return PeerFinder(sizes, tp_rank=rank, pp_rank=stage, columns=columns, has_windows=has_windows)

    def test_of_an_offer(self) -> None:
        """By pipeline stage, then by rank."""
        two = self.finder(4, 1, 0, stages=2, stage=1)
        assert two.of_offer(offer("a", "b", "c", "d")) == (
            PartSource(("P", "c"), "c", 1, Share(0, 0, 2, 1)),
            PartSource(("P", "d"), "d", 1, Share(1, 2, 2, 1)),
        )
        four = self.finder(4, 4, 3)
        assert four.of_offer(offer("a", "b")) == (PartSource(("P", "b"), "b", 2, Share(1, 3, 1, 2)),)

    def test_of_stages(self) -> None:
        """Of prefill, or of decode: each worker of prefill has as many readers as there are stages."""
        one = self.finder(4, 1, 0)
        found = one.of_offer(offer("a", "b", "c", "d", tp_size=2))
        assert [(source.address, source.readers) for source in found] == [(each, 1) for each in "abcd"]
        assert all(peer.cuts_layers for peer in one.of_offer(offer("a", "b", tp_size=1)))
        two = self.finder(4, 2, 1, stages=2, stage=1)
        assert two.of_offer(offer("a", tp_size=1)) == (
            PartSource(("P", "a"), "a", 4, Share(0, 2, 2, 2), cuts_layers=True),
        )
        windows = self.finder(4, 1, 0, has_windows=True)
        with pytest.raises(Refused, match="with sliding windows"):
            windows.of_offer(offer("a", "b", tp_size=1))

    def test_of_a_page(self) -> None:
        met = self.finder(4, 1, 0).of_page("P", {(0, 0): "a", (1, 0): "b"}, "key")
        assert [(peer.key, peer.address) for peer in met.peers] == [("key", "a"), (("P", "b"), "b")]
        assert (met.told, met.refusal) == (("a", "b"), "")

    @pytest.mark.parametrize(
        ("workers", "why"),
        [
            ({(0, 0): "a", (1, 0): "b", (2, 0): "c"}, "not split evenly"),
            ({(0, 0): "a", (7, 0): "b"}, "names some of its workers only"),
            ({(0, 0): "a", (1, 1): "b"}, "names some of its workers only"),
            ({(0, 0): "a", (1, 0): "a"}, "names one address for several of its workers"),
        ],
    )
    def test_pages_that_do_not_fit(self, workers: dict[tuple[int, int], str], why: str) -> None:
        """All workers are told, as each keeps a lease."""
        met = self.finder(4, 1, 0).of_page("P", workers, "key")
        assert why in met.refusal
        assert (met.peers, met.told) == ((), tuple(dict.fromkeys(workers.values())))

    def test_a_page_of_too_many_workers(self) -> None:
        """Of which a client may have told: one request must not take the connections of all others."""
        met = self.finder(4, 1, 0).of_page("P", {(rank, 0): f"a{rank}" for rank in range(64)}, "key")
        assert "would read from 64 workers of the prefill engine P; a hand-over needs 32 at" in met.refusal
        assert (met.peers, len(met.told)) == ((), PEERS_MAX)
        with pytest.raises(Refused, match="one address for several"):
            self.finder(4, 1, 0).of_offer(offer("a", "a"))

    def test_heads_that_are_not_split(self) -> None:
        """As where each rank holds all heads."""
        finder = PeerFinder(Sizes(4, 2), tp_rank=1, pp_rank=0, columns=columns_of(4, 1, 0))
        with pytest.raises(Refused, match="are not whole parts of those"):
            finder.of_offer(offer("a"))


def test_a_worker_that_holds_something_else() -> None:
    """As one of another pipeline stage."""
    decode, prefill = rank_memory(4, 1, 0, "HND"), rank_memory(4, 2, 0, "HND")
    with pytest.raises(Refused, match="holds other heads or layers"):
        pair_columns(Share(1, 2, 2, 1), decode.held, prefill.held)


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("heads", "theirs", "ours"), [(4, 2, 1), (2, 1, 4), (2, 2, 2)])
@pytest.mark.parametrize("is_prefill", [True, False])
def test_stages_of_one_engine(
    heads: int, theirs: int, ours: int, stages: int, layouts: tuple[str, str], is_prefill: bool
) -> None:
    """Prefill's, or decode's: every byte once."""
    whole = model_kv(heads, seed=heads)
    theirs_at, ours_at = (stages, 1) if is_prefill else (1, stages)
    for stage, rank in itertools.product(range(ours_at), range(ours)):
        decode = rank_memory(heads, ours, rank, layouts[1], layers=layers_of_stage(stage, ours_at))
        copied = 0
        for share in shares_of(heads, theirs, ours, rank):
            for other in range(theirs_at):
                layers = layers_of_stage(other, theirs_at)
                source = rank_memory(heads, theirs, share.tp_rank, layouts[0], layers=layers, content=whole)
                copied += copy(source, decode, share)
        expected = whole[list(decode.layers)][:, THERE][:, :, list(decode.heads)]
        np.testing.assert_array_equal(decode.kv[:, HERE], expected)
        assert copied == decode.kv[:, HERE].nbytes


def test_stages_that_hold_other_layers() -> None:
    """Neither has all layers of the other; or prefill does not tell its layers."""
    first, second = (rank_memory(2, 1, 0, "HND", layers=layers) for layers in (range(2), range(1, 3)))
    share = Share(0, 0, 2, 1)
    with pytest.raises(Refused, match="hold other layers"):
        pair_columns(share, first.held, second.held, cuts_layers=True)
    untold = Held(second.held.columns, second.held.rows)
    with pytest.raises(Refused, match="does not tell the layers"):
        pair_columns(share, first.held, untold, cuts_layers=True)
