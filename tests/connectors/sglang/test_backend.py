"""The backend against a real node, with host pools of every layout in place of SGLang's own."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from moonpool import Store
from moonpool.connectors.sglang import MoonpoolHiCache
from moonpool.connectors.sglang import pool as pools
from moonpool.core.errors import ConfigError, Unavailable
from tests.connectors.own_node import Node
from tests.connectors.sglang.conftest import Make
from tests.connectors.sglang.fakes import (
    SHAPES,
    Engine,
    HostPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    page_keys,
)

LAYOUTS = sorted(SHAPES)
MLA_LAYOUTS = [layout for layout in LAYOUTS if layout != "page_head"]


class AsymmetricPool(MHATokenToKVPoolHost):
    """A kind that is not known."""


def fill(pool: HostPool, seed: int) -> None:
    print(f"seed {seed}")
    pool.memory[:] = np.random.default_rng(seed).integers(0, 1 << 16, pool.memory.shape, np.uint16)


def assert_page(to: HostPool, to_page: int, source: HostPool, page: int, heads: Sequence[int] = ()) -> None:
    """heads: which of the source's are the destination's."""
    expected = source.view()[page]
    np.testing.assert_array_equal(to.view()[to_page], expected[:, list(heads)] if heads else expected)


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_layouts_share(make: Make, node: Node, source_layout: str, target_layout: str) -> None:
    node.start()
    source, target = MHATokenToKVPoolHost(source_layout), MHATokenToKVPoolHost(target_layout)
    fill(source, 1)
    first, second = make(source), make(target)
    keys = page_keys(3)
    assert first.batch_exists(keys) == 0
    assert first.batch_set_v1(keys, source.slots(7, 2, 5)) == [True] * 3
    assert second.batch_exists([*keys, *page_keys(1, seed=9)]) == 3
    assert second.batch_get_v1(keys, target.slots(0, 11, 4)) == [True] * 3
    for page, to in zip((7, 2, 5), (0, 11, 4), strict=True):
        assert_page(target, to, source, page)
    untouched = [page for page in range(12) if page not in (0, 11, 4)]
    assert not target.view()[untouched].any()


@pytest.mark.parametrize("source_layout", MLA_LAYOUTS)
@pytest.mark.parametrize("target_layout", MLA_LAYOUTS)
def test_latents(make: Make, node: Node, source_layout: str, target_layout: str) -> None:
    node.start()
    source = MLATokenToKVPoolHost(source_layout, heads=1)
    target = MLATokenToKVPoolHost(target_layout, heads=1)
    fill(source, 2)
    keys = page_keys(2)
    # Every rank holds the same latents: what rank 0 of two saved, the one rank of another engine loads.
    assert make(source, tp_rank=0, tp_size=2).batch_set_v1(keys, source.slots(1, 2)) == [True] * 2
    assert make(target).batch_get_v1(keys, target.slots(3, 4)) == [True] * 2
    assert_page(target, 3, source, 1)
    assert_page(target, 4, source, 2)


def test_what_four_ranks_wrote_two_ranks_read(make: Make, node: Node, engine: Engine) -> None:
    node.start()
    engine.kv_heads = 8
    whole = MHATokenToKVPoolHost("layer_first", heads=8)
    fill(whole, 3)
    keys = page_keys(2)
    for rank in range(4):
        part = MHATokenToKVPoolHost("page_first", heads=2)
        part.view()[:] = whole.view()[:, :, 2 * rank : 2 * rank + 2]
        assert make(part, tp_rank=rank, tp_size=4).batch_set_v1(keys, part.slots(4, 9)) == [True] * 2
    for rank in range(2):
        half = MHATokenToKVPoolHost("page_head", heads=4)
        backend = make(half, tp_rank=rank, tp_size=2)
        assert backend.batch_exists(keys) == 2
        assert backend.batch_get_v1(keys, half.slots(0, 1)) == [True] * 2
        assert_page(half, 0, whole, 4, range(4 * rank, 4 * rank + 4))
        assert_page(half, 1, whole, 9, range(4 * rank, 4 * rank + 4))


def test_a_page_counts_only_when_all_its_heads_are_there(make: Make, node: Node, engine: Engine) -> None:
    node.start()
    engine.kv_heads = 4
    part, whole = MHATokenToKVPoolHost(heads=2), MHATokenToKVPoolHost(heads=4)
    fill(part, 4)
    keys = page_keys(2)
    assert make(part, tp_rank=1, tp_size=2).batch_set_v1(keys, part.slots(0, 1)) == [True] * 2
    backend = make(whole)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, whole.slots(0, 1)) == [False] * 2
    assert not whole.memory.any()


def test_ranks_with_the_same_heads_save_them_once(make: Make, node: Node, engine: Engine) -> None:
    node.start()
    engine.kv_heads = 1
    pool = MHATokenToKVPoolHost(heads=1)
    keys = page_keys(1)
    second = make(pool, tp_rank=1, tp_size=2)
    assert second.batch_set_v1(keys, pool.slots(0)) == [True]
    assert second.batch_exists(keys) == 0
    assert make(pool, tp_rank=0, tp_size=2).batch_set_v1(keys, pool.slots(0)) == [True]
    assert second.batch_exists(keys) == 1


def test_pipeline_stages_hold_their_own_layers(make: Make, node: Node) -> None:
    node.start()
    early, late = MHATokenToKVPoolHost(layers=2), MHATokenToKVPoolHost(layers=2, start_layer=2)
    fill(early, 5)
    keys = page_keys(1)
    assert make(early).batch_set_v1(keys, early.slots(0)) == [True]
    second = make(late, pp_rank=1, pp_size=2)
    assert second.batch_exists(keys) == 0
    fill(late, 6)
    assert second.batch_set_v1(keys, late.slots(0)) == [True]
    for source, start in ((early, 0), (late, 2)):
        target = MHATokenToKVPoolHost("page_head", layers=2, start_layer=start)
        assert make(target, pp_rank=start // 2, pp_size=2).batch_get_v1(keys, target.slots(1)) == [True]
        assert_page(target, 1, source, 0)


def test_long_pages_are_cut_by_layers(make: Make, node: Node) -> None:
    """More rows than an object may have parts: 5 layers x 2 planes x 512 tokens, of which 4 layers fit."""
    node.start(64 << 20)
    source = MHATokenToKVPoolHost("page_first", layers=5, tokens=512, heads=2, pages=3)
    target = MHATokenToKVPoolHost("page_first_direct", layers=5, tokens=512, heads=2, pages=3)
    fill(source, 6)
    keys = page_keys(2)
    assert make(source).batch_set_v1(keys, source.slots(0, 2)) == [True] * 2
    assert make(target).batch_get_v1(keys, target.slots(1, 0)) == [True] * 2
    assert_page(target, 1, source, 0)
    assert_page(target, 0, source, 2)


@pytest.mark.parametrize("seed", range(3))
def test_a_gap_ends_the_prefix(make: Make, node: Node, seed: int) -> None:
    """Random pages of a chain are gone: exactly the leading ones are found, and loaded."""
    print(f"seed {seed}")
    node.start()
    pool = MHATokenToKVPoolHost()
    backend = make(pool)
    fill(pool, seed)
    saved = pool.view().copy()
    keys = page_keys(10, seed)
    there = [random.Random(seed + page).random() < 0.8 for page in range(10)]
    for page in range(10):
        if there[page]:
            assert backend.batch_set_v1([keys[page]], pool.slots(page)) == [True]
    leading = there.index(False) if False in there else 10
    pool.memory[:] = 0
    assert backend.batch_exists(keys) == leading
    got = backend.batch_get_v1(keys, pool.slots(*range(10)))
    assert got == [True] * leading + [False] * (10 - leading)
    np.testing.assert_array_equal(pool.view()[:leading], saved[:leading])
    assert not pool.view()[leading:].any()


def test_other_models_share_nothing(make: Make, node: Node, engine: Engine) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    assert make(pool).batch_set_v1(keys, pool.slots(0)) == [True]
    assert make(pool).batch_exists(keys) == 1
    for name, value in (("kv_cache_dtype", "fp8_e4m3"), ("dtype", "torch.float16"), ("quantization", "awq")):
        usual = getattr(engine, name)
        setattr(engine, name, value)
        assert make(pool).batch_exists(keys) == 0, name
        setattr(engine, name, usual)
    engine.hf_config._commit_hash = "f" * 40
    assert make(pool).batch_exists(keys) == 0


def test_tenants_and_namespaces_share_nothing(make: Make, node: Node) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    assert make(pool, {"namespace": "one"}).batch_set_v1(keys, pool.slots(0)) == [True]
    assert make(pool, {"namespace": "one"}).batch_exists(keys) == 1
    assert make(pool).batch_exists(keys) == 0


def test_parents_are_known_across_calls(make: Make, node: Node, engine: Engine) -> None:
    """A leaf is evicted before what it hangs on, also when they came with two calls."""
    engine.kv_heads = 1
    pool = MHATokenToKVPoolHost(layers=1, tokens=64, heads=1, dim=512, pages=64)  # 128 KiB a page
    node.start(4 << 20)
    backend = make(pool)
    keys = page_keys(4)
    assert backend.batch_set_v1(keys[:2], pool.slots(0, 1)) == [True] * 2
    info = SimpleNamespace(prefix_keys=keys[:2])
    assert backend.batch_set_v1(keys[2:], pool.slots(2, 3), info) == [True] * 2
    with Store(str(node.socket), fingerprint=backend._mark) as store:
        for page in range(60):
            assert backend.batch_set_v1(page_keys(1, seed=100 + page), pool.slots(4)) == [True]
            left = [bool(store.list(bytes.fromhex(key))) for key in keys]  # a look that refreshes nothing
            assert left == sorted(left, reverse=True), left
    assert not all(left)


def test_no_node_at_start_and_later(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "RETRY_S", 0.0)
    pool, keys = MHATokenToKVPoolHost(), page_keys(2)
    fill(pool, 7)
    with caplog.at_level(logging.INFO):
        backend = make(pool)
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [False] * 2
        assert backend.batch_get_v1(keys, pool.slots(0, 1)) == [False] * 2
        node.start()
        assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [True] * 2
        assert backend.batch_exists(keys) == 2
        node.stop()
        assert backend.batch_exists(keys) == 0
        assert backend.batch_get_v1(keys, pool.slots(2, 3)) == [False] * 2
        assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [False] * 2
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 3
    assert "no pool at" in said[0]
    assert "joins when a node appears" in said[0]
    assert "does not answer" in said[1]
    assert "not all of 2 pages were saved" in said[2]
    assert any("joined the pool" in record.getMessage() for record in caplog.records)


def test_a_node_that_was_restarted(make: Make, node: Node) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0)) == [True]
    node.stop()
    assert backend.batch_exists(keys) == 0
    node.start()
    deadline_s = time.monotonic() + 20  # the client tries again every 0.25 to 2 s
    while backend.batch_set_v1(keys, pool.slots(0)) != [True]:
        assert time.monotonic() < deadline_s
    assert backend.batch_exists(keys) == 1


def test_required(make: Make, node: Node, engine: Engine) -> None:
    with pytest.raises(Unavailable):
        make(MHATokenToKVPoolHost(), {"require_pool": True})
    node.start()
    engine.hf_config._commit_hash = None
    with pytest.raises(ConfigError, match="which weights"):
        make(MHATokenToKVPoolHost(), {"require_pool": True})


def test_wrong_token(make: Make, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.start()
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN", "another")
    pool = MHATokenToKVPoolHost()
    assert make(pool).batch_exists(page_keys(1)) == 0


@pytest.mark.parametrize(
    ("pool", "change", "reason"),
    [
        (AsymmetricPool(), {}, "plain MHA and MLA caches, and this model's is a AsymmetricPool"),
        (MHATokenToKVPoolHost(), {"layout": "page_unified"}, "--hicache-mem-layout page_unified"),
        (MHATokenToKVPoolHost(heads=3), {}, "3 KV heads on each of 1 ranks do not make the model's 2"),
        (MHATokenToKVPoolHost(tokens=2500, layers=1, pages=2), {}, "use --page-size 2048"),
    ],
)
def test_what_it_does_not_know_it_says(
    make: Make,
    node: Node,
    caplog: pytest.LogCaptureFixture,
    pool: HostPool,
    change: dict[str, object],
    reason: str,
) -> None:
    node.start()
    for name, value in change.items():
        setattr(pool, name, value)
    backend = make(pool)
    assert "this engine serves without the pool" in caplog.text
    assert reason in caplog.text
    keys = page_keys(1)
    assert backend.batch_set_v1(keys, pool.slots(0)) == [False]
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, pool.slots(0)) == [False]


@pytest.mark.parametrize("slots", [[0, 1, 2], [1, 2, 3, 4], [48, 49, 50, 51], [-4, -3, -2, -1]])
def test_slots_that_are_no_page(make: Make, node: Node, slots: list[int]) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0)) == [True]
    assert backend.batch_get_v1(keys, slots) == [False]
    assert backend.batch_set_v1(page_keys(1, seed=1), slots) == [False]
    assert backend._tally.values["survived_errors"] == 2
    assert not pool.memory.any()


def test_keys_that_are_no_digest(make: Make, node: Node) -> None:
    node.start()
    backend = make(MHATokenToKVPoolHost())
    assert backend.batch_exists(["not hexadecimal"]) == 0
    assert backend.batch_exists(["abcd", page_keys(1)[0] + "f" * 60]) == 0
    assert backend._tally.values["survived_errors"] == 2


def test_nothing_is_asked_for(make: Make, node: Node) -> None:
    node.start()
    backend = make(MHATokenToKVPoolHost())
    assert backend.batch_exists([]) == 0
    assert backend.batch_get_v1([], []) == []
    assert backend.batch_set_v1([], []) == []


def test_a_full_pool_refuses(make: Make, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node.start(1 << 20)
    pool = MHATokenToKVPoolHost(tokens=256, layers=4, heads=2, dim=128, pages=2)  # 512 KiB an object
    backend = make(pool)
    assert backend.batch_set_v1(page_keys(1), pool.slots(0)) == [False]
    assert backend.batch_set_v1(page_keys(1), pool.slots(0)) == [False]
    assert backend._tally.values["refused_pages"] == 2
    assert caplog.text.count("not all of 1 pages were saved") == 1
    assert "does not answer" not in caplog.text
    assert backend.batch_exists(page_keys(1)) == 0


def test_no_pin_is_kept(make: Make, node: Node) -> None:
    """Else what was asked for once could never be evicted."""
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(2)
    backend = make(pool)
    assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [True] * 2
    assert backend.batch_exists(keys) == 2
    assert backend.batch_get_v1([*keys, *page_keys(1, seed=1)], pool.slots(2, 3, 4)) == [True, True, False]
    with Store(str(node.socket), fingerprint=backend._mark) as store:
        assert len(store.list()) == 4
        deadline_s = time.monotonic() + 10  # releases are sent, not answered
        while any(entry.pins for entry in store.list()):
            assert time.monotonic() < deadline_s, store.list()


def test_a_page_is_loaded_when_all_its_objects_are(make: Make, node: Node) -> None:
    node.start()
    memory = make(MHATokenToKVPoolHost())._memory
    assert memory is not None
    assert memory.whole(b"\1\1\1\0\0\1", 3) == [True, False, False]
    assert memory.whole(b"", 2) == memory.whole(b"\1\1\1", 2) == [False] * 2


def test_clear_detach_and_attach(make: Make, node: Node) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(2)
    first, other = make(pool), make(pool, {"namespace": "other"})
    for backend in (first, other):
        assert backend.batch_set_v1(keys, pool.slots(0, 1)) == [True] * 2
    assert first.clear()
    assert first.batch_exists(keys) == 0
    assert other.batch_exists(keys) == 2
    other.close()
    assert other.batch_exists(keys) == 0
    assert other.batch_set_v1(keys, pool.slots(0, 1)) == [False] * 2
    other.close()
    assert make(pool, {"namespace": "other"}).batch_exists(keys) == 2


def test_statistics(make: Make, node: Node) -> None:
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(3)
    backend = make(pool)
    backend.batch_set_v1(keys, pool.slots(0, 1, 2))
    backend.batch_get_v1(page_keys(4), pool.slots(0, 1, 2, 3))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert backend.get_stats().backup_pgs == []
    size = 3 * 3 * 2 * 4 * 2 * 5 * 2  # pages x layers x planes x tokens x heads x numbers x bytes
    values = backend._tally.values
    assert values["saved_bytes"] == values["loaded_bytes"] == size
    assert (values["saved_pages"], values["loaded_pages"], values["lost_pages"]) == (3, 3, 1)


def test_names_are_those_of_docs_keys(make: Make, node: Node) -> None:
    """Any process can name the objects: digest, group, first head, heads, first layer, layers."""
    node.start()
    pool, keys = MHATokenToKVPoolHost(), page_keys(1)
    fill(pool, 8)
    backend = make(pool)
    backend.batch_set_v1(keys, pool.slots(6))
    with Store(str(node.socket), fingerprint=backend._mark) as store:
        for head in range(2):
            name = bytes.fromhex(keys[0]) + bytes.fromhex(f"0000 0{head}00 0100 0000 0300")
            view = store.get(name)
            assert view is not None
            assert bytes(view) == pool.view()[6, :, head].tobytes()


def test_the_older_interface_is_refused(make: Make, node: Node) -> None:
    with pytest.raises(ConfigError, match="interface_v1 must be 1"):
        make(MHATokenToKVPoolHost(), {"interface_v1": 0})
    backend = make(MHATokenToKVPoolHost())
    for call in (backend.get, backend.batch_get, backend.set, backend.batch_set):
        with pytest.raises(ConfigError, match="interface_v1"):
            call(page_keys(1)[0])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"node": 7}, "node must be a non-empty text, not 7"),
        ({"namespace": ""}, "namespace must be a non-empty text"),
        ({"nodes": "x"}, "did you mean 'node'"),
        ({"require_pool": "yes"}, "require_pool must be true or false"),
        ({"token": "secret"}, "a secret has no place on a command line"),
    ],
)
def test_wrong_settings(make: Make, extra: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(MHATokenToKVPoolHost(), extra)


def test_sglangs_own_keys_are_let_through(make: Make, node: Node) -> None:
    node.start()
    extra = {"module_path": "m", "class_name": "c", "prefetch_threshold": 16, "a_key_of_tomorrow": 1}
    assert isinstance(make(MHATokenToKVPoolHost(), extra), MoonpoolHiCache)


def test_an_address_of_another_host(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(MHATokenToKVPoolHost(), {"node": "10.0.0.7:7710"})
    assert "a node of its own host" in caplog.text
