"""Which blocks are free while a card copies: abort, preemption and reset with loads, saves and pulls under
way. Both halves of the connector, a real node, and a card whose copies never end until the test says so."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moonpool import _native
from moonpool.connectors.vllm.pd import handover_worker
from moonpool.core.transfer.engine import TransferEngine
from tests.connectors.vllm.card_engine import QUEUED, CardEngine, Served
from tests.connectors.vllm.fakes import FakeRequest
from tests.connectors.vllm.pd.worlds import eventually
from tests.connectors.vllm.worker_bed import real_node, serving
from tests.soft_card import COMPILER, SoftCard, soft_card

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

PROMPT = list(range(13))  # three blocks, and a token of the fourth
STEPS = 20  # in which something that does not wait for the card would be told


@pytest.fixture
def card(library: Path) -> Iterator[SoftCard]:
    with soft_card(library, "late") as card:
        yield card


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.Server]:
    with serving(tmp_path) as server:
        yield server


@contextmanager
def engine(name: str, card: SoftCard, tmp_path: Path) -> Iterator[CardEngine]:
    one = CardEngine(name, card, real_node(tmp_path))
    try:
        yield one
        card.settle()
        one.blocks.check()
    finally:
        one.close()


def random_kv(one: CardEngine) -> npt.NDArray[np.float32]:
    return np.random.default_rng(5).random(one.kv.shape, np.float32)


def store_prompt(one: CardEngine, values: npt.NDArray[np.float32], name: str = "w") -> list[int]:
    """Computes and saves the prompt. Returns its blocks."""
    served = one.admit(FakeRequest(name, PROMPT))
    one.step(served, values)
    one.finish(served)
    wait_for_saves(one)
    return served.blocks


def wait_for_saves(one: CardEngine) -> None:
    eventually(lambda: _went_on(one) and one.worker.is_idle and not one.scheduler.saves.under_way)


def _went_on(one: CardEngine) -> bool:
    one.step()
    return True


def hang(card: SoftCard, act: Callable[[], None], *, computes: bool = False) -> None:
    """The card hangs at what the connector queues in ``act``: behind the mark in the engine's stream, and
    the forward where the step ``computes``. Returns when copies are queued."""
    before = card.calls(*QUEUED) + computes
    card.hang(2 + computes)
    act()
    eventually(lambda: card.calls(*QUEUED) > before)


def abort(one: CardEngine, served: Served) -> None:
    one.abort(served)


def reset(one: CardEngine, served: Served) -> None:
    one.reset()


def reset_and_abort(one: CardEngine, served: Served) -> None:
    one.reset()
    one.step()
    one.abort(served)


INTERRUPTIONS = pytest.mark.parametrize("interrupt", [abort, reset, reset_and_abort])


def wait_for_the_end(one: CardEngine, served: Served) -> None:
    """The request is told once: a second time fails in the bed."""
    eventually(lambda: _went_on(one) and not served.waits)
    for _ in range(STEPS):
        one.step()


@INTERRUPTIONS
@pytest.mark.usefixtures("server")
def test_blocks_of_a_load_are_kept_until_its_copies_have_ended(
    card: SoftCard, tmp_path: Path, interrupt: Callable[[CardEngine, Served], None]
) -> None:
    with engine("A", card, tmp_path) as writer, engine("B", card, tmp_path) as reader:
        values = random_kv(writer)
        wrote = store_prompt(writer, values)
        served = reader.admit(FakeRequest("r", PROMPT))
        assert served.computed == 12
        hang(card, reader.step)
        interrupt(reader, served)
        for _ in range(STEPS):
            reader.step()
        assert served.waits
        assert reader.blocks.given == set()
        card.unhang()
        wait_for_the_end(reader, served)
        if served.gone:
            assert reader.blocks.given == set(served.blocks)
        else:
            np.testing.assert_array_equal(reader.kv[:, served.blocks[:3]], values[:, wrote[:3]])


def preempt(one: CardEngine, served: Served) -> None:
    one.preempt(served)


def finish(one: CardEngine, served: Served) -> None:
    one.finish(served)


@pytest.mark.parametrize("interrupt", [abort, preempt, finish, reset_and_abort])
@pytest.mark.usefixtures("server")
def test_blocks_of_a_save_are_kept_until_they_have_been_copied(
    card: SoftCard, tmp_path: Path, interrupt: Callable[[CardEngine, Served], None]
) -> None:
    with engine("A", card, tmp_path) as writer, engine("B", card, tmp_path) as reader:
        values = random_kv(writer)
        served = writer.admit(FakeRequest("w", PROMPT))
        hang(card, lambda: writer.step(served, values), computes=True)
        interrupt(writer, served)
        for _ in range(STEPS):
            writer.step()
        assert writer.blocks.given == {served.blocks[3]}  # which is not full, and not saved
        card.unhang()
        wait_for_saves(writer)
        assert writer.blocks.given == set(served.blocks)
        # What was saved is what the forward had computed, not what another request has written since.
        loaded = reader.admit(FakeRequest("r", PROMPT))
        assert loaded.computed == 12
        wait_for_the_end(reader, loaded)
        np.testing.assert_array_equal(reader.kv[:, loaded.blocks[:3]], values[:, served.blocks[:3]])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers of hand-overs give up on a card that hangs after a second."""
    monkeypatch.setattr(handover_worker, "TransferEngine", functools.partial(TransferEngine, timeout_s=1.0))


@INTERRUPTIONS
@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.usefixtures("server", "impatient", "runtime_dir")
def test_blocks_of_a_pull_are_kept_until_its_copies_have_ended(
    card: SoftCard,
    tmp_path: Path,
    interrupt: Callable[[CardEngine, Served], None],
    gives_up: bool,
) -> None:
    with (
        engine("P", card, tmp_path) as prefill,
        engine("D", card, tmp_path) as decode,
    ):
        values = random_kv(prefill)
        wanted = FakeRequest("p", PROMPT, kv_transfer_params={"do_remote_decode": True})
        computed = prefill.admit(wanted)
        prefill.step(computed, values)
        wait_for_saves(prefill)
        params = prefill.finish(computed)
        assert params is not None
        served = decode.admit(
            FakeRequest("d", PROMPT, kv_transfer_params={**params, "do_remote_prefill": True})
        )
        assert served.waits
        hang(card, decode.step)
        worker = decode.worker._handover_worker
        assert worker is not None
        if gives_up:
            eventually(lambda: worker.counters["transfers_failed_total"] > 0)
        interrupt(decode, served)
        for _ in range(STEPS):
            decode.step()
        assert served.waits
        assert decode.blocks.given == set()
        card.unhang()
        wait_for_the_end(decode, served)
        assert decode.blocks.given == (set(served.blocks) if served.gone else set())
