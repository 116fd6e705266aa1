"""The worker's half of encoder outputs: what cannot be loaded is given back to vLLM's plan, whatever the
reason, and no more is kept for saves than may be."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.vllm.encoder.messages import EncoderReport, EncoderStep, Load, Output
from moonpool.connectors.vllm.encoder.objects import Shape, header
from moonpool.connectors.vllm.encoder.worker import LOAD_TIMEOUT_S, WorkerHalf
from moonpool.connectors.vllm.pool import TIMEOUT_S
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import CorruptObject, Unavailable
from tests.connectors.vllm.fakes import LOG, Clock

NAME = bytes(range(32))
ROWS = 3
SHAPE = Shape("float32", ROWS, 4, 4)
SAVE_BYTES = 100  # two outputs


class FakePool:
    """Answers what a test says, when it is waited for."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.puts: list[tuple[bytes, list[Any]]] = []
        self.viewed: list[bytes] = []
        self.done: list[tuple[tuple[str, int], Any]] = []
        self.waits: list[float] = []

    def submit_view(self, name: bytes) -> tuple[str, int]:
        self.viewed.append(name)
        return "read", len(self.viewed)

    def submit_put(self, name: bytes, parts: list[Any]) -> tuple[str, int]:
        self.puts.append((name, parts))
        return "write", len(self.puts)

    def wait_for_read(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        if not self.answers:
            return False
        ticket = len(self.viewed) - len(self.answers) + 1
        self.done.append((("read", ticket), self.answers.pop(0)))
        return True

    def poll(self) -> list[tuple[tuple[str, int], Any]]:
        done, self.done = self.done, []
        return done


class FakeMembership:
    def __init__(self, pool: FakePool | None) -> None:
        self.there, self.refusal, self.fingerprint = pool, "", b"f" * 32
        self.left = 0
        self.reads = False  # whether the weights of a return are not read yet

    def pool(self) -> FakePool | None:
        return self.there

    def leave(self) -> None:
        self.left += 1
        self.there, self.fingerprint = None, b""

    def come_back(self) -> None:
        self.fingerprint = b"" if self.reads else b"n" * 32


class FakeType(str):
    """torch.dtype."""

    itemsize = 4


class FakeTensor:
    """An output on the host, as far as saves look at it."""

    def __init__(self, rows: int = ROWS, dtype: str = "torch.float32", dims: int = 2) -> None:
        self.shape, self.dtype, self._dims = (rows, 4), dtype, dims

    def detach(self) -> FakeTensor:
        return self

    def to(self, device: str) -> FakeTensor:
        return self

    contiguous = detach

    def dim(self) -> int:
        return self._dims

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return 4096


def half(
    pool: FakePool | None, agreed: Any = list, clock: Clock | None = None, saves: bool = True
) -> tuple[WorkerHalf, FakeMembership]:
    membership = FakeMembership(pool)
    made = WorkerHalf(
        cast(Membership, membership),
        dtype=FakeType("torch.float32"),
        unit=4,
        save_bytes=SAVE_BYTES,
        is_saver=lambda: saves,
        agreed=agreed,
        device=lambda: "cpu",
        log=LOG,
        clock=clock or Clock(),
    )
    return made, membership


def load(identifier: str = "one", name: bytes = NAME, request_id: str = "r", index: int = 0) -> Load:
    return Load(Output(identifier, name, ROWS, "image"), request_id, index)


def counted(worker: WorkerHalf) -> dict[str, Any]:
    report = worker.take_report()
    assert report is not None
    counts: dict[str, Any] = {
        name: value for name, value in report.counts.items() if not name.endswith("seconds")
    }
    return counts


@pytest.mark.parametrize(
    "answers",
    [
        ([None],),
        (CorruptObject("damaged"),),
        (Unavailable("gone"),),
        ([memoryview(b"another")],),
        ([memoryview(header(bytes(32), SHAPE) + bytes(SHAPE.bytes))],),
        ([memoryview(header(NAME, SHAPE))],),
        (),
    ],
)
def test_what_cannot_be_loaded_is_encoded(answers: Any) -> None:
    pool = FakePool(*answers)
    worker, _ = half(pool)
    step, cache = EncoderStep((load(index=2),), encoded={"r": [1], "s": [0]}), dict[str, Any]()
    worker.fetch(step.loads, cache)
    worker.settle(step, cache)
    assert cache == {}
    assert step.encoded == {"r": [1, 2], "s": [0]}
    assert counted(worker) == {"load_errors": 1}
    assert sum(pool.waits) <= LOAD_TIMEOUT_S


def test_without_a_pool_or_a_name_everything_is_encoded() -> None:
    for pool, name in ((None, NAME), (FakePool(), b"")):
        worker, _ = half(pool)
        step = EncoderStep((load(name=name),), encoded={})
        worker.fetch(step.loads, {})
        worker.settle(step, {})
        assert step.encoded == {"r": [0]}


def test_a_stalled_holder_costs_one_wait() -> None:
    """Reads stand behind the one that stalls, so those of the next steps would be late, too."""
    pool, clock = FakePool(), Clock()
    worker, _ = half(pool, clock=clock)
    cache: dict[str, Any] = {}
    worker.fetch((load(),), cache)
    assert len(pool.waits) == 1
    report = worker.take_report()
    assert report is not None
    assert report.stalled
    worker.fetch((load("two"),), cache)
    assert (len(pool.waits), len(pool.viewed)) == (1, 1)
    pool.done.append((("read", 1), [memoryview(header(NAME, SHAPE) + bytes(SHAPE.bytes))]))
    pool.answers = [[None]]
    worker.fetch((load("two"),), cache)
    assert (len(pool.waits), len(pool.viewed)) == (2, 2)
    assert cache == {}, "an answer that comes too late is dropped"
    worker.fetch((load(),), cache)
    assert len(worker._late) == 1
    pool.done.append((("read", 3), [None]))
    worker.take_report()
    assert (worker._answers, worker._late, worker._loading) == ([], set(), {})


def test_loads_that_are_never_answered_are_forgotten() -> None:
    pool, clock = FakePool(), Clock()
    worker, _ = half(pool, clock=clock)
    worker.fetch((load("one"), load("two")), {})
    clock.now_s += TIMEOUT_S / 2
    pool.done.append((("read", 1), Unavailable("gone")))
    worker.fetch((load(),), {})
    clock.now_s += TIMEOUT_S / 2
    worker.fetch((load(),), {})
    assert len(pool.viewed) == 2, "the second one has TIMEOUT_S from the end of the first one on"
    clock.now_s += TIMEOUT_S / 2
    worker.fetch((load(),), {})
    assert len(pool.viewed) == 3


def test_ranks_agree() -> None:
    """Another rank has only the second of two: the first is encoded on both."""
    asked: list[list[bool]] = []

    def agreed(flags: Sequence[bool]) -> list[bool]:
        asked.append(list(flags))
        return [False, True]

    worker, _ = half(FakePool(), agreed)
    step = EncoderStep((load("one"), load("two", index=1)), encoded={})
    cache = {"one": "tensor", "two": "tensor"}
    worker.settle(step, cache)
    assert asked == [[True, True]]
    assert cache == {"two": "tensor"}
    assert step.encoded == {"r": [0]}


def test_a_preempted_request_computes_nothing() -> None:
    worker, _ = half(FakePool())
    step = EncoderStep((load(),), encoded={}, preempted=frozenset("r"))
    worker.settle(step, {})
    assert step.encoded == {}


def test_the_plan_stays_part_of_that_of_vllm() -> None:
    """When both are pickled together, as vLLM does."""
    encoded: dict[str, list[int]] = {}
    output = SimpleNamespace(
        scheduled_encoder_inputs=encoded, ec_connector_metadata=EncoderStep((load(),), {}, encoded)
    )
    there = pickle.loads(pickle.dumps(output))
    worker, _ = half(None)
    worker.settle(there.ec_connector_metadata, {})
    assert there.scheduled_encoder_inputs == {"r": [0]}


def step_that_saves() -> EncoderStep:
    return EncoderStep((), {name: Output(name, NAME, ROWS, "image") for name in ("one", "two", "three")})


def test_saves_are_bounded_in_bytes() -> None:
    pool = FakePool()
    worker, _ = half(pool)
    cache = {name: FakeTensor() for name in ("one", "two", "three")}
    for name in cache:
        worker.computed(step_that_saves(), cache, name)
    assert [put[0] for put in pool.puts] == [NAME, NAME]
    assert pool.puts[0][1] == [header(NAME, SHAPE), (4096, SHAPE.bytes)]
    pool.done += [(("write", 1), (b"\0", "")), (("write", 2), (b"\1", ""))]
    assert counted(worker) == {"unsaved": 1, "saves": 1, "saved_bytes": SHAPE.bytes, "existing": 1}
    worker.computed(step_that_saves(), cache, "three")
    assert len(pool.puts) == 3
    pool.done.append((("write", 3), Unavailable("gone")))
    assert counted(worker) == {"refused": 1}
    assert (worker._saving, worker._waiting_bytes) == ({}, 0)


@pytest.mark.parametrize(
    "tensor", [FakeTensor(rows=4), FakeTensor(dtype="torch.float16"), FakeTensor(dims=3)]
)
def test_an_output_of_another_form_is_not_stored(tensor: FakeTensor) -> None:
    pool = FakePool()
    worker, _ = half(pool)
    worker.computed(step_that_saves(), {"one": tensor}, "one")
    assert pool.puts == []
    assert counted(worker) == {"unsaved": 1}


def test_one_rank_saves() -> None:
    pool = FakePool()
    worker, _ = half(pool, saves=False)
    worker.computed(step_that_saves(), {"one": FakeTensor()}, "one")
    assert pool.puts == []


def test_an_output_without_a_name_is_not_stored() -> None:
    pool = FakePool()
    worker, _ = half(pool)
    worker.computed(EncoderStep((), {"one": Output("one", b"", ROWS, "image")}), {"one": FakeTensor()}, "one")
    assert pool.puts == []


def test_what_could_not_be_loaded_is_stored_when_it_is_computed() -> None:
    pool = FakePool([None])
    worker, _ = half(pool)
    step, cache = EncoderStep((load(),), encoded={}), dict[str, Any]()
    worker.fetch(step.loads, cache)
    worker.settle(step, cache)
    cache["one"] = FakeTensor()
    worker.computed(step, cache, "one")
    assert [name for name, _ in pool.puts] == [NAME]


def test_rows_have_the_width_of_what_the_encoder_gave() -> None:
    """Of that modality: Qwen3-Omni's images have wider rows than its sounds."""
    wide = Shape("float32", ROWS, 8, 4)
    worker, _ = half(FakePool([memoryview(header(NAME, wide) + bytes(wide.bytes))]))
    worker.computed(step_that_saves(), {"one": FakeTensor()}, "one")
    cache: dict[str, Any] = {}
    worker.fetch((load("other"),), cache)
    assert cache == {}
    assert worker._widths == {"image": 4}


def test_weights_that_are_replaced() -> None:
    worker, membership = half(FakePool())
    worker.leave_unannounced()  # the first weights
    assert membership.left == 0
    worker.armed = True
    worker.leave_unannounced()
    assert membership.left == 1
    assert worker.take_report() == EncoderReport(left=True)
    assert worker.take_report() is None
    for known, whole in ((False, True), (True, False)):
        worker.whole = whole
        worker.come_back(known=known)
        assert worker.take_report() is None
    worker.whole = True
    worker.come_back(known=True)
    assert worker.take_report() == EncoderReport(fingerprints=[b"n" * 32])


def test_new_weights_are_reported_once_they_are_read(caplog: pytest.LogCaptureFixture) -> None:
    worker, membership = half(FakePool())
    worker.leave(Change("reload_weights", from_files=True))
    worker.whole = membership.reads = True
    with caplog.at_level("INFO"):
        worker.come_back(known=True)
    assert "being read" in caplog.text
    assert worker.take_report() is None
    membership.fingerprint = b"n" * 32
    assert worker.take_report() == EncoderReport(fingerprints=[b"n" * 32])
    assert worker.take_report() is None
    worker.leave(Change("reload_weights", from_files=True))
    worker.armed = worker.whole = True
    worker.leave_unannounced()  # the same change, seen at the model
    worker.whole, membership.reads = True, False
    worker.come_back(known=True)
    assert worker.take_report() == EncoderReport(fingerprints=[b"n" * 32])
    worker.leave(Change("reload_weights", from_files=True))
    worker.whole = membership.reads = True
    worker.come_back(known=True)
    membership.refusal = "they changed"
    assert worker.take_report() is None
    assert caplog.text.count("not shared: they changed") == 1


def test_weights_that_have_no_name_are_said(caplog: pytest.LogCaptureFixture) -> None:
    worker, _ = half(FakePool())
    worker.leave(Change("reload_weights", from_files=True))
    worker.come_back(known=True)  # not all of them
    assert "does not tell from where, or whether all of them" in caplog.text
    assert worker.take_report() is None
