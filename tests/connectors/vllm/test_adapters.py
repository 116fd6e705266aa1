"""LoRA adapters are what their bytes are, whatever they are called, and have no name where it cannot be told
which bytes the engine loaded."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.connectors import adapters as files
from moonpool.connectors.files import Kept
from moonpool.connectors.vllm import adapters as adapters_module
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.adapters import Adapters
from moonpool.core.store.keys import chain_seed
from tests.connectors.vllm.fakes import (
    HANDSHAKE,
    LOG,
    FakeBlocks,
    FakeLora,
    FakePool,
    FakeRequest,
    FakeStep,
    New,
    Status,
    digest,
    node_at,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import memory, worker_half

IDS = list(range(18))
NUMBERS = itertools.count()  # of requests


def write(folder: Path, weights: bytes) -> Path:
    """An adapter, or another one in its place."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    draft = folder / "draft"
    draft.write_bytes(weights)
    draft.replace(folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(autouse=True)
def _files_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of low priority read them, and a busy machine may let those wait for more than a moment."""
    monkeypatch.setattr(adapters_module, "READ_WAIT_S", 60.0)


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return write(tmp_path / "one", b"a" * 1000)


Make = Callable[..., Adapters]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(**changes: Any) -> Adapters:
        options = {"form": "float32", "refusal": "", "cached_by_path": True} | changes
        return Adapters(**options, log=LOG, kept=Kept(tmp_path / "kept"))

    return made


def request(path: Path, number: int = 1, name: str = "ad", **changes: Any) -> FakeRequest:
    return FakeRequest(f"r{next(NUMBERS)}", IDS, lora_request=FakeLora(name, number, str(path)), **changes)


def load(adapters: Adapters, path: Path, number: int = 1, name: str = "ad", *, inplace: bool = False) -> bool:
    """What compat.watch_adapters says of an engine's add_lora. Whether it replaces another one."""
    lora = FakeLora(name, number, str(path), inplace)
    replaced = adapters.loading(lora)
    adapters.loaded(lora, well=True)
    return replaced


def name(adapters: Adapters, path: Path, number: int = 1) -> str | None:
    """What the pool calls it once its bytes were read."""
    adapter = adapters._adapters.get(number)
    if adapter is not None and adapter.reading is not None:
        assert adapter.reading.over.wait(60)
    return adapters.name(request(path, number))


def test_a_name_is_the_bytes(make: Make, one: Path, tmp_path: Path) -> None:
    same = shutil.copytree(one, tmp_path / "same")
    (same / "README.md").write_text("no engine reads this")
    other = write(tmp_path / "other", b"a" * 999 + b"b")
    here, there = make(), make()
    load(here, one, 1, "x")
    load(there, same, 7, "y")
    load(there, other, 8, "x")
    called = name(here, one)
    assert called == f"{files.adapter_digest(one)} float32"
    assert name(there, same, 7) == called
    assert name(there, other, 8) not in (None, called)


def test_the_settings_count(one: Path, tmp_path: Path) -> None:
    other = shutil.copytree(one, tmp_path / "other")
    (other / "adapter_config.json").write_text('{"r": 9}')
    assert files.adapter_digest(one) != files.adapter_digest(other)


def test_how_the_engine_applies_it_counts(make: Make, one: Path) -> None:
    names = set()
    for form in ("float32", "bfloat16", "float32 modules=o_proj"):
        adapters = make(form=form)
        load(adapters, one)
        names.add(name(adapters, one))
    assert len(names) == 3
    assert None not in names


def test_one_that_comes_with_a_request_has_a_name_once_it_was_used(make: Make, one: Path) -> None:
    adapters, first = make(), request(one)
    assert adapters.name(first) is None  # the engine has yet to load it
    assert name(adapters, one) is None
    first.answer.append(5)
    assert name(adapters, one)


def test_a_request_that_ends_without_an_answer_proves_nothing(make: Make, one: Path) -> None:
    adapters, first, second = make(), request(one), request(one)
    assert adapters.name(first) is None
    first.status = Status("FINISHED_ABORTED")
    assert adapters.name(second) is None
    second.answer.append(5)
    assert name(adapters, one)


def test_replaced_after_it_was_loaded(make: Make, one: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine computes with the old bytes, or, when it had dropped them meanwhile, with the new ones."""
    adapters = make()
    load(adapters, one)
    assert name(adapters, one)
    kept = os.stat(one / "adapter_model.safetensors")
    write(one, b"b" * 1000)
    os.utime(one / "adapter_model.safetensors", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    with caplog.at_level(logging.WARNING):
        assert name(adapters, one) is None
        assert name(adapters, one) is None
    assert [record.getMessage() for record in caplog.records] == [
        "moonpool: requests with the LoRA adapter 'ad' are computed without the pool: its files were changed "
        "after they were loaded"
    ]


def test_replaced_between_the_load_and_the_first_answer(make: Make, one: Path) -> None:
    adapters, first = make(), request(one)
    assert adapters.name(first) is None
    write(one, b"b" * 1000)
    first.answer.append(5)
    assert name(adapters, one) is None


def test_replaced_while_it_is_loaded(make: Make, one: Path) -> None:
    adapters, lora = make(), FakeLora("ad", 1, str(one))
    adapters.loading(lora)
    write(one, b"b" * 1000)
    adapters.loaded(lora, well=True)
    assert name(adapters, one) is None


def test_repointed_under_one_name(make: Make, one: Path, tmp_path: Path) -> None:
    """The usual life of an adapter: unloaded, and loaded again from another path, with another number."""
    two = write(tmp_path / "two", b"b" * 1000)
    adapters = make()
    load(adapters, one, 1)
    before = name(adapters, one, 1)
    adapters.removed(1)
    load(adapters, two, 2)
    assert name(adapters, two, 2) not in (None, before)


def test_loaded_in_place_from_another_path(make: Make, one: Path, tmp_path: Path) -> None:
    two = write(tmp_path / "two", b"b" * 1000)
    adapters = make()
    assert not load(adapters, one)
    before = name(adapters, one)
    assert load(adapters, two, inplace=True)
    assert name(adapters, two) not in (None, before)
    assert name(adapters, one) is None  # a request of before, whose number is another adapter's now


def test_loaded_in_place_from_the_same_path(make: Make, one: Path) -> None:
    """vLLM's prefix cache cannot tell the two apart, so what it has may be KV of the old bytes."""
    adapters = make()
    load(adapters, one)
    before = name(adapters, one)
    write(one, b"b" * 1000)
    load(adapters, one, inplace=True)
    assert name(adapters, one) is None
    adapters.cache_was_reset()
    assert name(adapters, one) not in (None, before)


def test_an_older_vllm_caches_adapters_by_name(make: Make, one: Path, tmp_path: Path) -> None:
    two = write(tmp_path / "two", b"b" * 1000)
    adapters = make(cached_by_path=False)
    load(adapters, one, 1)
    adapters.removed(1)
    load(adapters, two, 2)
    assert name(adapters, two, 2) is None
    adapters.cache_was_reset()
    assert name(adapters, two, 2) is not None


def test_told_again_to_load_what_it_has(make: Make, one: Path) -> None:
    adapters = make()
    load(adapters, one)
    before = name(adapters, one)
    assert not load(adapters, one)
    assert name(adapters, one) == before
    write(one, b"b" * 1000)
    assert not load(adapters, one)  # vLLM keeps the old bytes
    assert name(adapters, one) is None


@pytest.mark.parametrize("lacking", ["folder", "adapter_config.json", "adapter_model.safetensors"])
def test_what_cannot_be_read(make: Make, one: Path, lacking: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Path("someone/on-the-hub") if lacking == "folder" else one
    if lacking != "folder":
        (one / lacking).unlink()
    adapters = make()
    load(adapters, path)
    assert name(adapters, path) is None
    assert "cannot tell which bytes the adapter" in caplog.text


def test_tensors_that_come_with_the_request(make: Make, one: Path) -> None:
    adapters, lora = make(), SimpleNamespace(**vars(FakeLora("ad", 1, str(one))), lora_tensors={"a": 1})
    adapters.loading(lora)
    adapters.loaded(lora, well=True)
    assert name(adapters, one) is None


def test_an_engine_of_several_hosts(make: Make, one: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = make(refusal="its workers are far apart")
    for number in range(3):
        load(adapters, one, number)
        assert name(adapters, one, number) is None
    assert caplog.text.count("far apart") == 1


# The scheduler's half


def test_the_chain_begins_with_the_bytes(make: Make, one: Path) -> None:
    pool, adapters = FakePool(), make()
    half, _ = scheduler_half(pool, adapters=adapters)
    load(adapters, one)
    asked = request(one, cache_salt="s")
    half.arrived(asked)
    seed = chain_seed(f"{files.adapter_digest(one)} float32", "s")
    assert pool.prefixes[0][1][:32] == digest(np.array(IDS, np.uint32), 4, seed, b"")[:32]


def test_what_has_no_name_is_computed(make: Make, one: Path) -> None:
    pool = FakePool()
    for adapters in (make(), None):
        half, _ = scheduler_half(pool, adapters=adapters)
        asked = request(one)
        half.arrived(asked)
        assert half.matched_tokens(asked, 0) == (0, False)
        assert half.finished(asked) is None
    assert pool.prefixes == []


def test_requests_of_an_adapter_that_is_replaced_lose_the_pool(make: Make, one: Path, tmp_path: Path) -> None:
    two = write(tmp_path / "two", b"b" * 1000)
    pool, adapters = FakePool(), make()
    half, _ = scheduler_half(pool, adapters=adapters)
    load(adapters, one)
    load(adapters, two, 2)
    asked, other = request(one), request(two, 2)
    half.arrived(asked)
    half.arrived(other)
    half.adapter_loading(FakeLora("ad", 1, str(two), load_inplace=True))
    half.adapter_loaded(FakeLora("ad", 1, str(two), load_inplace=True), well=True)
    assert half.finished(asked) is None
    assert half.finished(other) is not None


def test_an_adapter_of_before_the_pool(make: Make, one: Path) -> None:
    """Its load was seen, so what was replaced since is noticed."""
    pool = FakePool()
    half, _ = scheduler_half(pool, adapters=make(), meet=False)
    first = request(one)
    half.arrived(first)
    first.answer.append(5)
    write(one, b"b" * 1000)
    half.meet_workers([HANDSHAKE])
    half.arrived(request(one))
    assert pool.prefixes == []


def test_what_a_changed_adapter_computed_is_not_saved(make: Make, one: Path) -> None:
    """vLLM may read its files again in the very step that computes the blocks."""
    pool, adapters = FakePool(), make()
    half, _ = scheduler_half(pool, adapters=adapters)
    load(adapters, one)
    assert name(adapters, one)
    for changes in (False, True):
        asked = request(one)
        half.arrived(asked)
        pool.answer_prefix(0)
        assert half.matched_tokens(asked, 0) == (0, False)
        half.admitted(asked, FakeBlocks(([1, 2, 3, 4, 5],)), 0)
        new = New(asked.request_id, ([1, 2, 3, 4, 5],), 0)
        step = half.build_step(FakeStep([new], num_scheduled_tokens={asked.request_id: len(IDS)}))
        (save,) = step.saves
        if changes:
            write(one, b"b" * 1000)
        worker = worker_half(memory(), node_at(target := FakePool()))
        worker.start_saves(step)
        assert len(target.saves) == (not changes)
        report = worker.take_report()
        assert (report is not None) == changes
        assert pickle.loads(pickle.dumps(save)) == save


# What vLLM says to its engine


class Core:
    """EngineCore."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(connector=connector)

    def add_lora(self, lora_request: Any) -> bool:
        self.scheduler.connector.said.append("add")
        if lora_request is None:
            raise ValueError("no adapter")
        return True

    def remove_lora(self, lora_id: int) -> bool:
        self.scheduler.connector.said.append("remove")
        return True


class Watcher:
    def __init__(self) -> None:
        self.said: list[object] = []

    def adapter_loading(self, lora: Any) -> None:
        self.said.append("loading")

    def adapter_loaded(self, lora: Any, *, well: bool) -> None:
        self.said.append(("loaded", well))

    def adapter_removed(self, number: int) -> None:
        self.said.append(("removed", number))


def test_loads_are_watched() -> None:
    class Several(Watcher):
        def __init__(self) -> None:
            super().__init__()
            self._connectors = [watcher]

    watcher = Watcher()
    assert compat.watch_adapters(Core)
    assert compat.watch_adapters(Core)  # once is enough
    core = Core(watcher)
    assert core.add_lora(FakeLora("ad"))
    with pytest.raises(ValueError, match="no adapter"):
        core.add_lora(None)
    core.remove_lora(3)
    assert watcher.said == [
        *("loading", "add", ("loaded", True), "loading", "add", ("loaded", False)),
        *("remove", ("removed", 3)),
    ]
    behind = Several()
    assert Core(behind).add_lora(FakeLora("ad"))
    assert watcher.said[-2:] == ["loading", ("loaded", True)]
    assert not compat.watch_adapters(Watcher)
