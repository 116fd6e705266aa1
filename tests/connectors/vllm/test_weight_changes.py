"""Weights that are replaced while an engine serves: which calls count, what the halves do, and in which order
they are told. The real engine is in test_replaced.py."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors import weights
from moonpool.connectors.node_connection import NodeConnection
from moonpool.connectors.vllm import compat
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Report, Step
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.weight_changes import Change, change_by, sleep_change
from moonpool.core.errors import ConfigError
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    FINGERPRINT,
    FakeBlockPool,
    FakeOutput,
    FakePool,
    FakeRequest,
    Loaded,
    admit,
    first_step,
    node_at,
    request,
    scheduler_half,
)
from tests.connectors.vllm.worker_bed import load, memory, real_node, save, serving, worker_half

NEW = bytes(reversed(FINGERPRINT))
RELOAD = Change("reload_weights", from_files=True)
UPDATE, SLEEP = Change("update_weights"), Change("sleep level 2")


# Which calls count


@pytest.mark.parametrize(
    ("method", "args", "kwargs", "expected"),
    [
        ("reload_weights", (), {}, RELOAD),
        ("reload_weights", (), {"weights_path": "/m"}, Change("reload_weights", True, "/m")),
        ("reload_weights", (None, "/m"), {}, Change("reload_weights", True, "/m")),
        ("reload_weights", ([("w", 1)],), {}, Change("reload_weights")),
        ("reload_weights", (), {"is_checkpoint_format": False}, Change("reload_weights")),
        ("update_weights", (), {"update_info": {}}, UPDATE),
        ("start_weight_update", (), {}, Change("start_weight_update")),
        ("a_method_of_an_extension", (), {}, Change("a_method_of_an_extension")),
        ("reset_weights", (), {}, Change("reset_weights")),
        (sleep_change, (), {}, Change("sleep_change")),
        ("sleep", (2,), {}, Change("sleep level 2")),
        ("sleep", (), {"level": 1}, None),
        ("sleep", (), {}, None),
        ("wake_up", (), {"tags": ["weights"]}, None),
        ("add_lora", (), {}, None),
        ("get_model_inspection", (), {}, None),
    ],
)
def test_a_call_that_is_not_known_counts(
    method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Change | None
) -> None:
    assert change_by(method, args, kwargs) == expected


# Which halves are told, in which order


class Executor:
    def __init__(self, said: list[object]) -> None:
        self.said = said

    def collective_rpc(self, method: Any, timeout: float | None, args: tuple[Any, ...]) -> list[None]:
        self.said.append((getattr(method, "__name__", method), *args))
        return [None]


def core_class() -> type:
    class Core:
        """EngineCore."""

        def __init__(self, connector: Any) -> None:
            self.scheduler = SimpleNamespace(connector=connector)
            self.model_executor = Executor(connector.said)

        def collective_rpc(
            self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None
        ) -> str:
            self.model_executor.said.append(method)
            if method == "reload_weights" and args:
                raise ValueError("no such path")
            return "answer"

        def sleep(self, level: int = 1, mode: str = "abort") -> None:
            self.model_executor.said.append(("sleep", level, mode))

    return Core


class Watcher:
    def __init__(self) -> None:
        self.said: list[object] = []

    def weights_changing(self, change: Change) -> None:
        self.said.append(change)

    def workers_left(self) -> None:
        self.said.append("left")


def test_who_is_told_before_and_after_a_change() -> None:
    core_of = core_class()
    assert compat.watch_weights(core_of)
    assert compat.watch_weights(core_of)  # once is enough
    watcher = Watcher()
    core = core_of(watcher)
    assert core.collective_rpc("update_weights", None, (), {}) == "answer"
    assert watcher.said == [UPDATE, ("tell_of_change", UPDATE), "left", "update_weights"]

    watcher.said.clear()
    assert core.collective_rpc("reload_weights") == "answer"
    assert watcher.said == [
        *(RELOAD, ("tell_of_change", RELOAD), "left", "reload_weights"),
        ("tell_of_files", ""),
    ]

    watcher.said.clear()
    with pytest.raises(ValueError, match="no such path"):
        core.collective_rpc("reload_weights", args=(None, "/m"))
    assert watcher.said[-3] == Change("reload_weights, which failed")

    watcher.said.clear()
    core.sleep(1, mode="wait")
    core.collective_rpc("get_model")
    assert watcher.said == [("sleep", 1, "wait"), "get_model"]
    core.sleep(level=2)
    assert watcher.said[2:] == [
        *(
            Change("sleep level 2"),
            ("tell_of_change", Change("sleep level 2")),
            "left",
            ("sleep", 2, "abort"),
        ),
    ]
    assert not compat.watch_weights(Watcher)


def test_a_model_that_is_given_weights_directly() -> None:
    said: list[object] = []

    class Model:
        def named_parameters(self) -> list[tuple[str, None]]:
            return [("a", None), ("b", None)]

        def load_weights(self, names: list[str]) -> set[str]:
            said.append("load")
            return set(names)

    class Told:
        def model_loading(self) -> None:
            said.append("loading")

        def model_loaded(self, *, whole: bool) -> None:
            said.append(whole)

    told: Any = Told()
    compat.watch_model(None, told, Model)
    compat.watch_model(None, told, Model)
    Model().load_weights(["a", "b", "c"])
    Model().load_weights(["a"])
    assert said == ["loading", "load", True, "loading", "load", False]


# The scheduler's half


class CachingPool(FakeBlockPool):
    """BlockPool, as far as compat.holds_prefixes looks."""

    enable_caching = True
    num_gpu_blocks = 400

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.block_hash = None  # type: ignore[attr-defined]

    def get_num_free_blocks(self) -> int:
        return self.num_gpu_blocks - 1 - len(self.held())


def half_with(pools: dict[bytes, FakePool]) -> tuple[SchedulerHalf, CachingPool]:
    half, _ = scheduler_half(None, meet=False)

    def open_node(fingerprint: bytes) -> NodeConnection[Pool]:
        return node_at(pools[fingerprint])(fingerprint)

    half._open_node = open_node
    blocks = CachingPool()
    half.bind_block_pool(blocks)
    half.meet_workers([Handshake(FINGERPRINT, COLUMNS)])
    return half, blocks


def test_the_scheduler_forgets_and_joins_again_under_the_new_fingerprint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = FakePool(), FakePool()
    half, blocks = half_with({FINGERPRINT: old, NEW: new})
    looking, loading, saving = request(name="looking"), request(name="loading"), request(name="saving")
    for one in (saving, loading):
        half.arrived(one)
        old.answer_prefix(2 if one is loading else 0)
        admit(half, one)
    step = half.build_step(first_step(saving, 0, 18))
    assert len(step.saves) == 1
    assert [load.request_id for load in step.loads] == ["loading"]
    half.arrived(looking)
    assert half.lookups.under_way == 1
    held = blocks.held()
    assert held

    with caplog.at_level(logging.INFO):
        half.weights_changing(RELOAD)
    assert old.closed
    assert half.pool() is None
    assert not half.lookups.under_way
    assert half.matched_tokens(looking, 0) == (0, False)
    assert blocks.held() == held  # until the workers have left
    half.workers_left()
    assert blocks.held() == []
    assert not half.has_pending_work()
    assert half.build_step(first_step(looking, 0, 18)) is NOTHING
    # The load ends as failed, and its pin went with the connection.
    half.step_ended(FakeOutput({"loading"}, Report(loaded={"loading": 0})))
    assert old.released == []
    assert half.lookups.pins == 0

    # The engine's own cache has KV of the old weights: until it is reset there is no pool.
    blocks.touch(blocks.blocks[:1])
    half.weights_changing(RELOAD)
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(NEW, COLUMNS)])))
    assert half.pool() is None
    assert "is reset" in caplog.text
    late = request(name="late")
    half.arrived(late)
    half.cache_was_reset()
    assert half.pool() is new
    admit(half, late)
    assert half.build_step(first_step(late, 0, 18)) is NOTHING  # it came before the reset
    after = request(name="after")
    half.arrived(after)
    new.answer_prefix(0)
    admit(half, after)
    assert len(half.build_step(first_step(after, 0, 18)).saves) == 1


def test_an_empty_cache_need_not_be_reset() -> None:
    new = FakePool()
    half, blocks = half_with({FINGERPRINT: FakePool(), NEW: new})
    half.weights_changing(RELOAD)
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(NEW, COLUMNS)])))
    assert half.pool() is new
    blocks.blocks[3].block_hash = b"hash"  # type: ignore[attr-defined]
    half.weights_changing(RELOAD)
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(FINGERPRINT, COLUMNS)])))
    assert half.pool() is None


@pytest.mark.parametrize("how", ["announced", "by the model alone"])
def test_weights_without_a_name_are_one_sentence(how: str, caplog: pytest.LogCaptureFixture) -> None:
    half, _ = half_with({FINGERPRINT: FakePool()})
    for _ in range(3):  # a trainer sends its weights in pieces
        if how == "announced":
            half.weights_changing(UPDATE)
        else:
            half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(refusal=UPDATE.sentence)])))
    assert half.pool() is None
    assert [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()] == [
        f"moonpool: this engine runs without the pool: {UPDATE.sentence}"
    ]


def test_an_engine_that_never_had_the_pool_stays_without() -> None:
    half, _ = scheduler_half(FakePool(), meet=False)
    half.refuse("no")
    half.weights_changing(RELOAD)
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(NEW, COLUMNS)])))
    assert half.pool() is None


def test_prefill_hands_nothing_over_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    new = FakePool()
    half, _ = half_with({FINGERPRINT: FakePool(), NEW: new})
    half.weights_changing(RELOAD)
    half.step_ended(FakeOutput(None, Report(handshakes=[Handshake(NEW, COLUMNS)])))
    wanted = FakeRequest("w", list(range(BLOCK_TOKENS * 3)), kv_transfer_params={"do_remote_decode": True})
    half.arrived(wanted)
    assert "takes part in no hand-over" in caplog.text


# The worker's half


def test_a_worker_leaves_and_comes_back_under_its_new_fingerprint(tmp_path: Path) -> None:
    kv, marks = memory(), [FINGERPRINT]
    opened: list[bytes] = []
    with serving(tmp_path):

        def open_node(fingerprint: bytes) -> NodeConnection[Pool]:
            opened.append(fingerprint)
            return real_node(tmp_path)(fingerprint)

        half = worker_half(kv, open_node)
        half._fingerprint = lambda layout, tensor: marks[-1]
        known = half.handshake()
        job, wanted = save(half, 1, 2), load(half, 3, 4)
        half.start_saves(Step((), (job,)))
        half.start_loads(Step((wanted,)))

        half.leave(RELOAD)
        assert half.take_finished() == ({"r"}, set())
        assert half.take_failed_blocks() == {3, 4}
        report = half.take_report()
        assert report is not None
        assert report.saved == {1: 1}
        # A step that was planned before, and computed after: nothing of it is stored or loaded.
        half.start_saves(Step((), (job,)))
        half.start_loads(Step((wanted,)))
        assert half.take_finished() == ({"r"}, set())
        report = half.take_report()
        assert report is not None
        assert (report.saved, report.handshakes) == ({1: 1}, [])

        half.leave_unannounced()  # the model's load_weights, within the reload
        half.come_back(known=True)
        report = half.take_report()
        assert report is not None
        assert "whether all of them" in report.handshakes[0].refusal
        half.whole, marks[:] = True, [NEW]
        half.come_back(known=True)
        report = half.take_report()
        assert report is not None
        (hand,) = report.handshakes
        assert (hand.fingerprint, hand.columns, hand.refusal) == (NEW, known.columns, "")
        assert opened == [FINGERPRINT, NEW]
        half.start_saves(Step((), (save(half, 1, job_id=2),)))
        deadline_s = time.monotonic() + 10
        report = None
        while report is None and time.monotonic() < deadline_s:
            half.poll()
            report = half.take_report()
        assert report is not None
        assert report.saved == {2: 1}
        half.close()


def test_a_worker_whose_model_was_given_weights_says_so() -> None:
    pool = FakePool()
    half = worker_half(memory(), node_at(pool))
    half.start_loads(Step((load(half, 1),)))
    half.leave_unannounced()
    half.leave_unannounced()
    assert pool.closed
    report = half.take_report()
    assert report is not None
    assert ["weights were given to its model" in hand.refusal for hand in report.handshakes] == [True]
    pool.answer(1, Loaded(b"\1\1"))  # comes too late
    half.poll()
    assert half.take_finished() == ({"r"}, set())
    assert half.take_failed_blocks() == {1}
    half.come_back(known=False)
    report = half.take_report()
    assert report is not None
    assert report.handshakes[0].refusal


def test_in_a_sleep_the_worker_waits_for_its_memory() -> None:
    kv = memory()
    half = worker_half(kv, node_at(FakePool()))
    half.leave(Change("sleep level 2"))
    half.sleep()
    half.whole = True
    half.come_back(known=True)
    assert half.take_report() is None
    half.wake_up()
    report = half.take_report()
    assert report is not None
    assert report.handshakes[0].fingerprint == FINGERPRINT


# The files


def test_files_that_were_loaded_later_have_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began_ns = time.time_ns() - 3_600_000_000_000
    monkeypatch.setattr(weights, "started_ns", lambda: began_ns)
    (tmp_path / "model.safetensors").write_bytes(b"w" * 1000)
    with pytest.raises(ConfigError, match="was changed after"):
        weights.weights_digest(tmp_path)
    files = weights.settled_files(tmp_path)
    weights.loaded(tmp_path, files)
    assert weights.weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"v" * 1000)
    with pytest.raises(ConfigError, match="was changed after"):
        weights.weights_digest(tmp_path)
