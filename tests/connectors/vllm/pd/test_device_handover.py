"""Hand-overs between KV caches on cards: nothing is told of a forward that is only queued, and nothing is
written to blocks that earlier work of the card still uses. The card is the software device."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moonpool.connectors.vllm.pd import handover_worker
from moonpool.connectors.vllm.pd.consumer_worker import DEVICE_PIECE_BLOCKS
from moonpool.connectors.vllm.pd.kv_transfer_params import Offer
from moonpool.connectors.vllm.pd.queued_forwards import QueuedForwards
from moonpool.connectors.vllm.pd.step_plan import Grown, HandoverStep, Open, Pull
from moonpool.core.errors import Unavailable
from moonpool.core.transfer.engine import TransferEngine
from tests.connectors.vllm.fakes import LOG
from tests.connectors.vllm.pd import card_world_process
from tests.connectors.vllm.pd.worlds import (
    BLOCKS,
    DEADLINE_S,
    PROMPT,
    World,
    eventually,
    heads_first,
    tokens_first,
    world,
)
from tests.soft_card import COMPILER, ROOT, CardArray, SoftCard, soft_card, watch_questions

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(params=("late", "early", "shuffled"))
def card(request: pytest.FixtureRequest, library: Path) -> Iterator[SoftCard]:
    with soft_card(library, request.param, 11) as card:
        yield card


def pair(stack: ExitStack, card: SoftCard, *, transports: list[str] | None = None) -> tuple[World, World]:
    prefill = stack.enter_context(world("P", seed=1, card=card))
    decode = stack.enter_context(world("D", seed=2, card=card, transports=transports))
    return prefill, decode


@pytest.mark.parametrize("transports", [None, ["tcp"]])
def test_blocks_are_handed_from_card_to_card(card: SoftCard, transports: list[str] | None) -> None:
    rng = np.random.default_rng(3)
    with ExitStack() as stack:
        prefill, decode = pair(stack, card, transports=transports)
        there, here = rng.permutation(BLOCKS)[:20].tolist(), rng.permutation(BLOCKS)[:18].tolist()
        untouched = sorted(set(range(BLOCKS)) - set(here))
        before = decode.kv[:, untouched].copy()
        decode.take(prefill.offer(there), here, first=2)
        ended = decode.ended()
        assert (ended.good, ended.error) == (18, "")
        np.testing.assert_array_equal(decode.kv[:, here], prefill.kv[:, there[2:]])
        np.testing.assert_array_equal(decode.kv[:, untouched], before)
        prefill.wait_handed(77)


@pytest.mark.parametrize("transports", [None, ["cuda_ipc", "tcp"], ["tcp"]])
def test_unlike_layouts_are_moved_by_the_kernel(card: SoftCard, transports: list[str] | None) -> None:
    """In one list for many blocks: a launch for all of them, not a copy for each of 480 pieces."""
    with ExitStack() as stack:
        prefill = stack.enter_context(world("P", seed=1, card=card, make=tokens_first, transports=transports))
        decode = stack.enter_context(world("D", seed=2, card=card, transports=transports))
        there, here = list(range(20)), list(range(19, -1, -1))
        launches = card.calls("cuLaunchKernel")
        decode.take(prefill.offer(there), here)
        ended = decode.ended()
        assert (ended.good, ended.error) == (20, "")
        np.testing.assert_array_equal(decode.kv[:, here], prefill.kv[:, there])
        assert 1 <= card.calls("cuLaunchKernel") - launches <= 4


def test_pieces_of_a_device_are_larger(card: SoftCard) -> None:
    with world("D", seed=2, card=card) as decode:
        assert decode.handover_worker._consumer._piece_blocks == DEVICE_PIECE_BLOCKS


@pytest.mark.parametrize("sides", ["to the host", "from the host"])
def test_one_side_may_lie_on_the_host(card: SoftCard, sides: str) -> None:
    with ExitStack() as stack:
        prefill = stack.enter_context(world("P", seed=1, card=card if sides == "to the host" else None))
        decode = stack.enter_context(world("D", seed=2, card=card if sides == "from the host" else None))
        decode.take(prefill.offer([1, 2, 3]), [7, 5, 6])
        ended = decode.ended()
        assert (ended.good, ended.error) == (3, "")
        np.testing.assert_array_equal(decode.kv[:, [7, 5, 6]], prefill.kv[:, [1, 2, 3]])


def forward(card: SoftCard, side: World, values: npt.NDArray[np.float32]) -> None:
    """Queues a step of the engine that writes all of its KV cache."""
    address = side.handover_worker._memory.spans[0][0]
    card.forward(CardArray(address, side.kv), card.pinned(values))


def test_a_forward_that_is_only_queued_is_not_told(library: Path) -> None:
    """Under the late policy a forward runs when it is waited for."""
    with soft_card(library, "late") as card, ExitStack() as stack:
        prefill, _ = pair(stack, card)
        values, _ = heads_first(np.random.default_rng(9))
        told: list[bool] = []
        tell = prefill.handover_worker._grown

        def seen(grown: tuple[Grown, ...]) -> None:
            told.append(bool(np.array_equal(prefill.kv, values)))
            tell(grown)

        prefill.handover_worker._grown = seen  # type: ignore[method-assign]
        prefill.handover_worker.begin(HandoverStep(opens=(Open(77, 5, "t", PROMPT),)))
        forward(card, prefill, values)
        prefill.handover_worker.computed(HandoverStep(grown=(Grown(77, 0, ((1, 2, 3),), True),)))
        eventually(lambda: bool(told))
        assert told == [True]  # the forward had ended


def test_blocks_are_not_written_before_earlier_work_of_the_card(library: Path) -> None:
    """Under the late policy earlier work that was not waited for would overwrite what was handed over."""
    with soft_card(library, "late") as card, ExitStack() as stack:
        prefill, decode = pair(stack, card)
        forward(card, decode, np.full(decode.kv.shape, 7, np.float32))
        assert decode.device is not None
        decode.device.step_begins()
        decode.take(prefill.offer([1, 2, 3]), [4, 5, 6])
        ended = decode.ended()
        assert (ended.good, ended.error) == (3, "")
        card.settle()
        np.testing.assert_array_equal(decode.kv[:, [4, 5, 6]], prefill.kv[:, [1, 2, 3]])
        assert (decode.kv[:, [1, 2, 3]] == 7).all()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers soon give up on a card that hangs."""
    soon = functools.partial(TransferEngine, timeout_s=1.0)
    monkeypatch.setattr(handover_worker, "TransferEngine", soon)


def wait_until_the_pull_failed(decode: World) -> None:
    """Its transfer has given up, and the thread that read waits for the card."""
    eventually(lambda: decode.handover_worker.counters["transfers_failed_total"] > 0)
    asked = watch_questions(decode.handover_worker._engine)
    for _ in range(2):
        assert asked.acquire(timeout=DEADLINE_S)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("transports", [None, ["tcp"]])
def test_blocks_are_not_given_back_before_a_card_that_hangs_has_ended_its_copies(
    library: Path, transports: list[str] | None
) -> None:
    with soft_card(library, "late") as card, ExitStack() as stack:
        prefill = stack.enter_context(world("P", seed=1))
        decode = stack.enter_context(world("D", seed=2, card=card, transports=transports))
        card.hang(1)
        decode.take(prefill.offer([1, 2, 3]), [4, 5, 6])
        wait_until_the_pull_failed(decode)
        assert not decode.handover_worker.has_news
        card.unhang()
        ended = decode.ended()
        assert ended.good == 0
        assert "did not end its copies" in ended.error
        decode.kv[:] = 9  # another request's from now on
        card.settle()
        assert (decode.kv == 9).all()


@pytest.mark.usefixtures("impatient")
def test_a_card_that_hangs_does_not_keep_an_engine_from_closing(library: Path) -> None:
    with soft_card(library, "late") as card, ExitStack() as stack:
        prefill = stack.enter_context(world("P", seed=1))
        decode = stack.enter_context(world("D", seed=2, card=card))
        card.hang(1)
        decode.take(prefill.offer([1, 2, 3]), [4, 5, 6])
        wait_until_the_pull_failed(decode)
        decode.handover_worker.close()
        assert not any(thread.name == "moonpool-handover" for thread in threading.enumerate())


class LostMark:
    """A point in the stream of a card that is lost."""

    def wait(self, timeout_s: float) -> bool:
        raise Unavailable("the CUDA device is lost", operation="wait for a mark")


def test_a_card_that_is_lost_ends_all_leases_once() -> None:
    lost = threading.Semaphore(0)
    forwards = QueuedForwards(lost.release, LOG)
    for _ in range(3):
        forwards.then(LostMark(), pytest.fail)  # type: ignore[arg-type]
    assert lost.acquire(timeout=20)
    forwards.close(20)
    assert not lost.acquire(blocking=False)


class Prefill:
    """card_world_process.py, which offers three blocks."""

    def __init__(self, library: Path) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                card_world_process.__name__,
                str(library),
                "1",
                "2",
                "3",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        named = {name: bytes.fromhex(said[name]) for name in ("fingerprint", "prompt")}
        blocks = tuple(tuple(ids) for ids in said["blocks"])
        self.offer = Offer(**said | named | {"ranks": tuple(said["ranks"]), "blocks": blocks})

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # it stops a little later


@pytest.mark.usefixtures("impatient", "runtime_dir")
@pytest.mark.parametrize("transports", [["tcp"], ["cuda_ipc", "tcp"]])
@pytest.mark.parametrize("act", [Prefill.kill, Prefill.stop])
@pytest.mark.parametrize("during", [False, True])
def test_decode_lives_and_computes_when_prefill_is_killed_or_hangs(
    library: Path, transports: list[str], act: Callable[[Prefill], None], during: bool
) -> None:
    with soft_card(library, "late") as card, ExitStack() as stack:
        decode = stack.enter_context(world("D", seed=2, card=card, transports=transports))
        prefill, other = Prefill(library), Prefill(library)
        stack.callback(other.kill)
        stack.callback(prefill.kill)
        decode.hold(prefill.offer, 3)
        if not during:
            act(prefill)
        pull = HandoverStep(pulls=(Pull("r", 0, ((4, 5, 6),)),))
        copies = card.calls("cuMemcpyAsync", "cuMemcpyBatchAsync")
        if during:
            card.hang(1)
        decode.handover_worker.pull(pull)
        if during:
            eventually(lambda: card.calls("cuMemcpyAsync", "cuMemcpyBatchAsync") > copies)
            act(prefill)
            card.unhang()
        ended = decode.ended()
        assert ended.good == 0
        assert ended.error
        values, _ = heads_first(np.random.default_rng(9))
        forward(card, decode, values)
        card.settle()
        np.testing.assert_array_equal(decode.kv, values)
        decode.take(other.offer, [7, 8, 9], name="s")
        ended = decode.ended()
        assert (ended.good, ended.error) == (3, "")
        truth, _ = heads_first(np.random.default_rng(card_world_process.SEED))
        np.testing.assert_array_equal(decode.kv[:, [7, 8, 9]], truth[:, [1, 2, 3]])
        assert decode.handover_worker.counters[f"{transports[0]}_read_bytes_total"] >= ended.bytes
