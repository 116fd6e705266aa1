"""Pools beside the KV, against a real node."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moonpool import Store
from moonpool.connectors.objects import Refused
from moonpool.connectors.sglang import MoonpoolHiCache, compat
from moonpool.connectors.sglang.sidecars import pages_of, restorable
from moonpool.core.store.keys import DIGEST_BYTES
from tests.connectors.own_node import TOKEN, Node
from tests.connectors.sglang.conftest import Make
from tests.connectors.sglang.fakes import (
    Engine,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    Transfer,
    page_keys,
)


def hybrid(make: Make, states: MambaPoolHost, **config: int) -> MoonpoolHiCache:
    pool = MHATokenToKVPoolHost()
    backend = make(pool, **config)
    backend.register_mem_host_pool_v2(pool, "kv")
    backend.register_mem_host_pool_v2(states, "mamba")
    return backend


def test_states_come_back(make: Make, node: Node) -> None:
    node.start()
    source, target, keys = MambaPoolHost(), MambaPoolHost(), page_keys(2)
    source.temporal[:] = np.random.default_rng(1).random(source.temporal.shape)
    source.conv[:] = np.random.default_rng(2).random(source.conv.shape)
    first, second = hybrid(make, source), hybrid(make, target)
    assert first.batch_set_v2([Transfer("mamba", keys, [3, 8])]) == {"mamba": [True, True]}
    got = second.batch_get_v2([Transfer("mamba", [*keys, *page_keys(1, seed=5)], [1, 0, 2])])
    assert got == {"mamba": [True, True, False]}
    for to, page in ((1, 3), (0, 8)):
        np.testing.assert_array_equal(target.temporal[to], source.temporal[page])
        np.testing.assert_array_equal(target.conv[to], source.conv[page])
    assert not target.temporal[3:].any()


def test_a_prefix_is_as_long_as_every_pool_restores(make: Make, node: Node) -> None:
    node.start()
    states, pool, keys = MambaPoolHost(), MHATokenToKVPoolHost(), page_keys(6)
    backend = make(pool)
    backend.register_mem_host_pool_v2(states, "mamba")
    assert backend.batch_set_v1(keys[:5], pool.slots(*range(5))) == [True] * 5
    for page in (1, 3):
        backend.batch_set_v2([Transfer("mamba", [keys[page]], [page])])
    trailing = Transfer("mamba", [keys[4]], hit_policy="trailing_pages")
    found = backend.batch_exists_v2(keys, [trailing])
    assert found.kv_hit_pages == 4
    assert found.restorable_prefix_pages == [2, 4]
    assert found.extra_pool_hit_pages == {compat.PoolName.KV: 5, "mamba": 4}
    every = backend.batch_exists_v2(keys, [Transfer("mamba", None)])
    assert (every.kv_hit_pages, every.restorable_prefix_pages) == (0, [])
    groups = backend.batch_exists_v2(keys, [Transfer("mamba", None, hit_policy="block_groups")])
    assert groups.kv_hit_pages == 5
    assert backend.batch_exists_v2(keys, []).kv_hit_pages == 5
    assert backend.batch_exists_v2(page_keys(1, seed=9), [trailing]).extra_pool_hit_pages == {}


def test_ranks_and_shapes_do_not_mix(make: Make, node: Node) -> None:
    node.start()
    keys = page_keys(1)
    hybrid(make, MambaPoolHost()).batch_set_v2([Transfer("mamba", keys, [0])])
    assert hybrid(make, MambaPoolHost()).batch_get_v2([Transfer("mamba", keys, [0])]) == {"mamba": [True]}
    other = MambaPoolHost()
    other.conv = np.zeros((12, 7), np.float32)
    assert hybrid(make, other).batch_get_v2([Transfer("mamba", keys, [0])]) == {"mamba": [False]}
    for stage, found in ((0, True), (1, False)):
        backend = make(MHATokenToKVPoolHost(start_layer=3 * stage), pp_rank=stage, pp_size=2)
        backend.register_mem_host_pool_v2(MambaPoolHost(), "indexer")
        if stage == 0:
            backend.batch_set_v2([Transfer("indexer", keys, [0])])
        assert backend.batch_get_v2([Transfer("indexer", keys, [0])]) == {"indexer": [found]}


def test_what_is_the_same_on_every_rank(make: Make, node: Node) -> None:
    """MLA: rank 0 writes the indexer's pages for all; states of Mamba layers are each rank's own."""
    node.start()
    keys = page_keys(1)
    ranks = []
    for rank in range(2):
        backend = make(MLATokenToKVPoolHost(heads=1), tp_rank=rank, tp_size=2)
        backend.register_mem_host_pool_v2(MambaPoolHost(), "indexer")
        backend.register_mem_host_pool_v2(MambaPoolHost(), "mamba")
        ranks.append(backend)
    transfers = [Transfer("indexer", keys, [0]), Transfer("mamba", keys, [0])]
    assert ranks[0].batch_set_v2(transfers) == {"indexer": [True], "mamba": [True]}
    assert ranks[1].batch_get_v2(transfers) == {"indexer": [True], "mamba": [False]}


def test_a_pool_that_cannot_be_stored(make: Make, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """KV without the rest would be a model half restored: nothing is stored, and nothing found."""
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    plain = make(pool)
    assert plain.batch_set_v1(keys, pool.slots(0)) == [True]
    backend = hybrid(make, MambaPoolHost(layout="layer_first"))
    assert "the pages of the pool 'mamba' cannot be addressed (it requires page_first layout)" in caplog.text
    transfer = Transfer("mamba", keys, [0])
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 0
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v2([transfer]) == backend.batch_set_v2([transfer]) == {"mamba": [False]}
    required = make(pool, {"require_pool": True})
    with pytest.raises(Refused, match="cannot be addressed"):
        required.register_mem_host_pool_v2(MambaPoolHost(layout="layer_first"), "mamba")


@pytest.mark.parametrize("seed", range(3))
def test_a_page_is_evicted_as_a_whole(make: Make, node: Node, seed: int) -> None:
    """KV and states of two ranks, in a node with room for 16 pages: after every call each page has all of
    its four objects or none, and they are in one group, whichever of them was used last."""
    print(f"seed {seed}")
    node.start(4 << 20)
    source, ranks, pools = random.Random(seed), [], []
    for rank in range(2):
        pool = MHATokenToKVPoolHost(layers=1, tokens=64, heads=1, dim=256)  # 64 KiB a page
        states = MambaPoolHost()
        states.temporal = np.zeros((12, 16384), np.float32)  # the same
        ranks.append(make(pool, tp_rank=rank, tp_size=2))
        ranks[-1].register_mem_host_pool_v2(states, "mamba")
        pools.append(pool)
    pages = list(range(3))
    chains = [page_keys(len(pages), seed=100 * seed + chain) for chain in range(40)]
    evicted = False
    with Store(str(node.socket), token=TOKEN, fingerprint=ranks[0]._mark) as store:
        for chain, keys in enumerate(chains):
            for rank, pool in zip(ranks, pools, strict=True):
                assert all(rank.batch_set_v1(keys, pool.slots(*pages)))
            for rank in ranks:
                assert rank.batch_set_v2([Transfer("mamba", keys, pages)]) == {"mamba": [True] * len(pages)}
            used, one = source.choice(chains[max(0, chain - 4) : chain + 1]), source.randrange(2)
            if source.random() < 0.5:
                ranks[one].batch_get_v1(used, pools[one].slots(*pages))
            else:
                ranks[one].batch_get_v2([Transfer("mamba", used[-1:], [4])])
            objects = Counter(entry.key[:DIGEST_BYTES].hex() for entry in store.list())
            assert set(objects.values()) == {4}, objects
            evicted = evicted or len(objects) < len(pages) * (chain + 1)
        descriptions = store.stat([entry.key for entry in store.list()])
        assert all(each is not None and each.copies[0].grouped for each in descriptions)
    assert evicted


def test_plain_pages_are_in_no_group(make: Make, node: Node) -> None:
    """It would cost a node more than the objects of one page gain, which are used together."""
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0)) == [True]
    with Store(str(node.socket), token=TOKEN, fingerprint=backend._mark) as store:
        found = store.stat([entry.key for entry in store.list()])
    assert [each.copies[0].grouped for each in found if each is not None] == [False] * 2


def drafted(make: Make, states: MambaPoolHost) -> MoonpoolHiCache:
    backend = make(MHATokenToKVPoolHost())
    backend.register_mem_host_pool_v2(states, "draft")
    return backend


def weights(folder: Path, content: str) -> str:
    folder.mkdir()
    (folder / "model.safetensors").write_text(content)
    return str(folder)


def test_a_draft_models_pages(make: Make, node: Node, engine: Engine, tmp_path: Path) -> None:
    """They come back to engines with the same draft model, used in the same way, and to no others."""
    node.start()
    engine.speculative_algorithm = "EAGLE3"
    engine.speculative_draft_model_path = one = weights(tmp_path / "one", "1")
    source, target, keys = MambaPoolHost(), MambaPoolHost(), page_keys(2)
    source.temporal[:] = np.random.default_rng(3).random(source.temporal.shape)
    transfer = Transfer("draft", keys, [4, 5])
    assert drafted(make, source).batch_set_v2([transfer]) == {"draft": [True] * 2}
    assert drafted(make, target).batch_get_v2([transfer]) == {"draft": [True] * 2}
    np.testing.assert_array_equal(target.temporal[4:6], source.temporal[4:6])
    for path, algorithm in ((weights(tmp_path / "two", "2"), "EAGLE3"), (one, "STANDALONE")):
        engine.speculative_draft_model_path, engine.speculative_algorithm = path, algorithm
        assert drafted(make, MambaPoolHost()).batch_get_v2([transfer]) == {"draft": [False] * 2}


def test_a_draft_model_packed_behind_the_layers(
    make: Make, node: Node, engine: Engine, tmp_path: Path
) -> None:
    """Its layers are the last ones of the same pages; an engine with another draft, or none, shares none."""
    node.start()
    engine.speculative_algorithm = "NEXTN"
    keys = page_keys(1)

    def packed() -> MHATokenToKVPoolHost:
        pool = MHATokenToKVPoolHost(layers=3)
        pool.target_layer_num = 2
        return pool

    source, target = packed(), packed()
    source.memory[:] = np.random.default_rng(4).integers(0, 1 << 16, source.memory.shape, np.uint16)
    engine.model_path = weights(tmp_path / "target", "t")
    assert make(source).batch_set_v1(keys, source.slots(3)) == [True]
    assert make(target).batch_get_v1(keys, target.slots(5)) == [True]
    np.testing.assert_array_equal(target.view()[5], source.view()[3])
    assert make(MHATokenToKVPoolHost(layers=3)).batch_exists(keys) == 0
    engine.speculative_draft_model_path = weights(tmp_path / "other", "o")
    assert make(packed()).batch_exists(keys) == 0


def test_a_draft_model_that_cannot_be_stored(
    make: Make, node: Node, engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    engine.speculative_draft_model_path = "nobody/knows"
    monkeypatch.setattr(compat, "draft_model_config", lambda args: SimpleNamespace(hf_config=None))
    backend = drafted(make, MambaPoolHost())
    assert "cannot tell which weights 'nobody/knows' stands for" in caplog.text
    assert backend.batch_set_v2([Transfer("draft", page_keys(1), [0])]) == {"draft": [False]}
    engine.speculative_draft_load_format = "dummy"
    latents = make(MLATokenToKVPoolHost(heads=1), tp_size=2)
    latents.register_mem_host_pool_v2(MHATokenToKVPoolHost(), "draft")
    assert "SGLang saves only rank 0's part of the pool" in caplog.text


def test_wrong_questions_and_no_node(make: Make, node: Node) -> None:
    node.start()
    backend, keys = hybrid(make, MambaPoolHost()), page_keys(2)
    wrong = [Transfer("mamba", keys, [0]), Transfer("mamba", keys), Transfer("swa", keys, [0, 1])]
    for transfer in wrong:
        assert backend.batch_set_v2([transfer]) == {transfer.name: [False] * 2}
        assert backend.batch_get_v2([transfer]) == {transfer.name: [False] * 2}
    assert backend._tally.values["survived_errors"] == 6
    right = Transfer("mamba", keys, [0, 1])
    assert backend.batch_set_v2([right, Transfer("mamba", None)]) == {"mamba": []}
    assert backend.batch_set_v2([right]) == {"mamba": [True] * 2}
    node.stop()
    assert backend.batch_get_v2([right]) == backend.batch_set_v2([right]) == {"mamba": [False] * 2}
    assert backend._tally.values["survived_errors"] == 6


@pytest.mark.parametrize("seed", range(20))
def test_restorable_is_what_a_slow_search_says(seed: int) -> None:
    print(f"seed {seed}")
    present = [random.Random(seed * 100 + page).random() < 0.7 for page in range(12)]
    for trailing in (None, 1, 2, 5, 20):
        slow = {
            length for length in range(1, 13) if all(present[max(0, length - (trailing or length)) : length])
        }
        assert restorable(present, trailing) == slow


def test_metas_that_do_not_divide() -> None:
    assert pages_of(([1, 2, 3, 4], [8, 9, 8, 9]), 2) == [[(1, 8), (2, 9)], [(3, 8), (4, 9)]]
    for addresses, sizes in (([1, 2, 3], [8, 8, 8]), ([], []), ([1, 2], [8]), ([1, 2], [8, 0])):
        with pytest.raises(ValueError, match="for 2 pages"):
            pages_of((addresses, sizes), 2)
