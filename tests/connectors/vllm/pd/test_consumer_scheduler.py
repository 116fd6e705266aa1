"""Decode's half in the scheduler's process, and both halves behind their door in the scheduler's half."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from moonpool.connectors.files import File
from moonpool.connectors.vllm import item_hashes
from moonpool.connectors.vllm.adapters import Adapters
from moonpool.connectors.vllm.item_names import ItemNames
from moonpool.connectors.vllm.messages import NOTHING, Handshake, Report, Step
from moonpool.connectors.vllm.pd.kv_transfer_params import Meeting, Offer, answer_of, parse_decode
from moonpool.connectors.vllm.pd.step_plan import Hold, Pull
from moonpool.connectors.vllm.reach import FULL, Reach
from moonpool.connectors.vllm.scheduler import SchedulerHalf
from moonpool.connectors.vllm.settings import Settings
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.config import paths
from moonpool.core.store.keys import Item, block_digests, chain_seed
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    FINGERPRINT,
    LOG,
    Clock,
    FakeBlockPool,
    FakeBlocks,
    FakeLora,
    FakeOutput,
    FakePool,
    FakeRequest,
    FakeStep,
    New,
    Status,
    digest,
    engine_config,
    feature,
    node_at,
)

IDS = list(range(100, 120))


def half(pool: FakePool | None = None, adapters: Adapters | None = None, **changes: Any) -> SchedulerHalf:
    one = SchedulerHalf(
        engine_config(engine_id="D", **changes),
        Settings(bootstrap_port=0),
        open_node=node_at(pool),
        digest=digest,
        log=LOG,
        adapters=adapters,
        clock=Clock(),
    )
    one.meet_workers([Handshake(FINGERPRINT, COLUMNS, handover_address="127.0.0.1:5000")])
    one.bind_block_pool(FakeBlockPool())
    return one


def prompt_digest(tokens: list[int], salt: str | None = None, items: Sequence[Item] = ()) -> bytes:
    (whole,) = block_digests(tokens, len(tokens), seed=chain_seed(None, salt), items=items)
    return whole


def offer(tokens: int = 18, **changes: Any) -> Offer:
    one = Offer(
        engine_id="P",
        ranks=("127.0.0.1:4000",),
        lease=7,
        slot=3,
        blocks=(tuple(range(50, 70)),),
        tokens=tokens,
        fingerprint=FINGERPRINT,
        prompt=prompt_digest(list(range(tokens))),
        tp_size=1,
    )
    return dataclasses.replace(one, **changes)


def request(source: Offer | Meeting, tokens: int = 18, name: str = "r") -> FakeRequest:
    one = FakeRequest(name, list(range(tokens)))
    if isinstance(source, Offer):
        one.kv_transfer_params = answer_of(source, paths.read_or_create_token(), request_id="p")
    else:
        one.kv_transfer_params = {
            "do_remote_prefill": True,
            "remote_engine_id": source.engine_id,
            "remote_bootstrap_addr": source.bootstrap,
            "transfer_id": source.transfer,
        }
    return one


def refused(one: SchedulerHalf) -> bool:
    stats = one.tally.take()
    return stats is not None and stats.data.get("handover_refused") == 1


@pytest.mark.parametrize("source", [offer(), Meeting("P", "http://x:1", "t")])
def test_what_is_lacking_is_pulled(source: Offer | Meeting) -> None:
    one, asked = half(), request(source)
    one.arrived(asked)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.holds == (Hold("r", source, prompt_digest(list(range(18))), 5, "127.0.0.1:5000"),)

    assert one.matched_tokens(asked, 8) == (9, True)  # all but the last token
    one.admitted(asked, FakeBlocks((IDS,)), 9)

    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.pulls == (Pull("r", 2, ((102, 103, 104),)),)
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 3})))
    one.admitted(asked, FakeBlocks((IDS,)), 0)
    assert one.finished(asked) == {
        "moonpool": {"handed_over_tokens": 9, "pool_tokens": 0, "local_tokens": 8, "load_errors": 0}
    }
    step = one.build_step(FakeStep())  # one more, in which the workers tell prefill that it is over
    assert step.handover is not None
    assert step.handover.drops == ("r",)
    assert one.build_step(FakeStep()) is NOTHING


def test_of_blocks_with_parts_those_are_pulled_that_there_is_room_for() -> None:
    """A window's own blocks have half of the tokens of a block, and of 17 tokens there are nine."""
    one = half(
        groups=(("layers.0",), ("layers.1",)), reaches=(FULL, Reach(window=4)), splits=(1, 2), kv_heads=2
    )
    asked = request(offer(blocks=(tuple(range(50, 55)),) * 3))
    one.arrived(asked)
    assert one.matched_tokens(asked, 8) == (9, True)
    one.admitted(asked, FakeBlocks((IDS[:5], [0] * 7 + [27, 28])), 9)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.pulls == (Pull("r", 2, ((102, 103, 104), (0, 0, 28), (0, 27, 0))),)


def test_the_worst_rank_counts() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == (17, True)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.step_ended(FakeOutput(None, Report(loaded={"r": 2})))
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 5})))
    answer = one.finished(asked)
    assert answer is not None
    assert answer["moonpool"]["handed_over_tokens"] == 8


@pytest.mark.parametrize("local", [16, 17])
def test_nothing_is_needed(local: int) -> None:
    one, asked = half(), request(offer(tokens=17), tokens=17)
    one.arrived(asked)
    one.build_step(FakeStep())
    assert one.matched_tokens(asked, local) == (0, False)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.drops == ("r",)


@pytest.mark.parametrize(
    "bad",
    [
        offer(fingerprint=bytes(32)),
        offer(
            ranks=("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"), tp_size=3
        ),  # three workers, and two KV heads
        offer(prompt=bytes(32)),
        offer(tokens=17),
        offer(blocks=((1, 2, 3, 4),)),
    ],
)
def test_what_is_not_ours_is_computed(bad: Offer) -> None:
    one, asked = half(), request(bad)
    one.arrived(asked)
    assert refused(one)
    assert one.matched_tokens(asked, 0) == (0, False)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    (refuse,) = step.handover.refuses  # prefill hears of it
    assert refuse.source == bad
    assert "the prefill engine P" in refuse.why
    assert one.build_step(FakeStep()) is NOTHING


def test_a_forged_offer_is_computed(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's own lease, and another's blocks."""
    one, asked = half(), request(offer())
    assert asked.kv_transfer_params is not None
    asked.kv_transfer_params["remote_block_ids"] = [list(range(60, 65))]
    one.arrived(asked)
    assert refused(one)
    assert one.matched_tokens(asked, 0) == (0, False)
    assert one.build_step(FakeStep()) is NOTHING
    assert "signature does not fit" in caplog.text


def test_a_token_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(offer())
    monkeypatch.setenv("MOONPOOL_CLUSTER_TOKEN_FILE", "/nowhere")
    one = half()
    one.arrived(asked)
    assert refused(one)
    assert "takes part in no hand-over" in caplog.text


class Named:
    """Adapters, of which two names stand for the same bytes."""

    def name(self, request: FakeRequest) -> str | None:
        assert request.lora_request is not None
        return {"sql": "bytes", "also sql": "bytes", "other": "other bytes"}.get(
            request.lora_request.lora_name
        )

    def files(self, request: FakeRequest) -> tuple[File, ...]:
        return ()


@pytest.mark.parametrize(
    ("name", "taken"), [("sql", True), ("also sql", True), ("other", False), ("new", False), (None, False)]
)
def test_an_adapters_bytes_are_part_of_the_prompt(name: str | None, taken: bool) -> None:
    """A prefill engine has computed it with what it calls sql."""
    one = half(adapters=cast("Adapters", Named()))
    (whole,) = block_digests(list(range(18)), 18, seed=chain_seed("bytes"))
    asked = request(offer(prompt=whole))
    asked.lora_request = None if name is None else FakeLora(name)
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == ((17, True) if taken else (0, False))
    assert refused(one) == (not taken)


def test_the_salt_is_part_of_the_prompt() -> None:
    one, asked = half(), request(offer())
    asked.cache_salt = "s"
    one.arrived(asked)
    assert refused(one)
    asked = request(offer(prompt=prompt_digest(list(range(18)), "s")), name="s")
    asked.cache_salt = "s"
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == (17, True)


def test_what_was_taken_is_handed_on() -> None:
    """As of a conversation that moves on to a third engine: the answer says both."""
    one, asked = half(), request(offer())
    assert asked.kv_transfer_params is not None
    asked.kv_transfer_params["do_remote_decode"] = True
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == (17, True)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 5})))
    one.admitted(asked, FakeBlocks((IDS,)), 0)
    one.build_step(FakeStep([New("r", (list(IDS),), 17)], num_scheduled_tokens={"r": 1}))
    asked.status, asked.num_computed_tokens = Status("FINISHED_LENGTH_CAPPED"), 18
    answer = one.finished(asked)
    assert answer is not None
    assert answer["moonpool"]["handed_over_tokens"] == 17
    onward = parse_decode(answer, paths.read_or_create_token())
    assert isinstance(onward, Offer)
    assert onward.blocks == (tuple(IDS[:5]),)


def test_roles() -> None:
    takes_nothing, gives_nothing = half(may_load=False), half(may_save=False)
    takes_nothing.arrived(request(offer()))
    assert refused(takes_nothing)
    asked = FakeRequest("r", list(range(18)))
    asked.kv_transfer_params = {"do_remote_decode": True}
    gives_nothing.arrived(asked)
    assert refused(gives_nothing)


@pytest.mark.parametrize("source", [offer(), Meeting("P", "http://x:1", "t")])
def test_a_request_that_vllm_does_not_serve(
    source: Offer | Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells of it with a request of its own, which has the fields and another prompt, and is aborted at
    once: prefill has its blocks back, and nothing is logged or counted here."""
    pool = FakePool()
    one, told = half(pool), request(source)
    told.prompt_token_ids, told.abort_immediately = [0], True
    caplog.clear()
    one.arrived(told)
    one.finished(told)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    (refuse,) = step.handover.refuses
    assert refuse.source == source
    assert bool(refuse.why) == isinstance(source, Meeting)
    assert not one.has_pending_work()
    assert pool.prefixes == []
    assert one.tally.take() is None
    assert caplog.text == ""


def test_an_engine_that_zeroes_blocks_gives_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It does before its workers are told that a lease is over: decode would take the zeroes for KV."""
    one, asked = half(zeroes_blocks=True), FakeRequest("r", list(range(18)))
    asked.kv_transfer_params = {"do_remote_decode": True}
    assert "this engine hands nothing over" in caplog.text
    one.arrived(asked)
    assert one.build_step(FakeStep()) is NOTHING
    assert refused(one)
    taken = request(offer(), name="t")
    one.arrived(taken)
    assert one.matched_tokens(taken, 0) == (17, True)


def test_images_are_handed_over_by_their_content() -> None:
    names = ItemNames(form="", refusal="", log=LOG, clock=Clock())
    image = names.media(FakeRequest("x", [], mm_features=[feature(1, 9)])).items
    given = offer(prompt=prompt_digest(list(range(18)), items=image))
    one, asked = half(), request(given)
    asked.mm_features = [feature(1, 9, identifier="of another engine")]
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == (17, True)
    for features in ([], [feature(2, 9)], [feature(1, 8)], [feature(1, 9), feature(1, 9)]):
        other, wrong = half(), request(given)
        wrong.mm_features = features
        other.arrived(wrong)
        assert refused(other)
        assert other.matched_tokens(wrong, 0) == (0, False)


def test_another_image_under_its_uuid_ends_a_hand_over() -> None:
    """On the engine that computes it, too: its encoder cache may hold the other one's outputs."""
    names = ItemNames(form="", refusal="", log=LOG, clock=Clock())
    image = names.media(FakeRequest("x", [], mm_features=[feature(1, 9)])).items
    one, taken = half(), request(offer(prompt=prompt_digest(list(range(18)), items=image)))
    given = FakeRequest("given", list(range(18)), kv_transfer_params={"do_remote_decode": True})
    for each in (taken, given):
        each.mm_features = [feature(1, 9, identifier="mine")]
        one.arrived(each)
    assert one.handover.gives(given)
    one.arrived(FakeRequest("second", list(range(20)), mm_features=[feature(2, 3, identifier="mine")]))
    assert not one.handover.gives(given)
    assert one.matched_tokens(taken, 0) == (0, False)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.drops == ("r",)


class TestLargeImages:
    """A thread hashes them. vLLM asks for no request while as many run as may."""

    @pytest.fixture
    def may_end(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """Set: hashing may end."""
        may_end, digest_now = threading.Event(), item_hashes.content_digest

        def slow(fields: Any) -> bytes:
            assert may_end.wait(20)
            return digest_now(fields)

        monkeypatch.setattr(item_hashes, "content_digest", slow)
        return may_end

    def test_the_prefill_engine_hears_of_decode_before_vllm_asks(
        self, may_end: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        may_end.set()
        names = ItemNames(form="", refusal="", log=LOG, clock=Clock())
        image = names.media(FakeRequest("x", [], mm_features=[feature(1, 9)])).items
        may_end.clear()
        monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
        one, asked = half(), request(offer(prompt=prompt_digest(list(range(18)), items=image)))
        asked.mm_features = [feature(1, 9)]
        one.arrived(asked)
        assert one.build_step(FakeStep()) is NOTHING
        may_end.set()
        assert one._item_names.hashes._thread is not None
        one._item_names.hashes._thread.submit(int).result(20)  # runs after what was submitted earlier
        step = one.build_step(FakeStep())
        assert step.handover is not None
        assert [hold.request_id for hold in step.handover.holds] == ["r"]
        assert one.matched_tokens(asked, 0) == (17, True)
        one.close()

    @pytest.mark.parametrize("how", ["finished", "forgotten", "the weights change"])
    def test_the_prefill_engine_need_not_keep_what_is_not_taken(
        self, how: str, may_end: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
        one, asked = half(), request(offer())
        asked.mm_features = [feature(1, 9)]
        one.arrived(asked)
        assert one.build_step(FakeStep()) is NOTHING
        if how == "finished":
            assert one.finished(asked) is None
        elif how == "forgotten":
            one.forget("r")
        else:
            one.weights_changing(Change("update_weights"))
        step = one.build_step(FakeStep())
        assert step.handover is not None
        assert [refuse.source for refuse in step.handover.refuses] == [offer()]
        may_end.set()
        one.close()


def test_images_without_a_name_are_not_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    one, asked = half(media_refusal="it does not see them"), request(offer())
    asked.mm_features = [feature(1, 9)]
    one.arrived(asked)
    assert refused(one)
    assert "request r is not handed over: it does not see them" in caplog.text
    assert one.matched_tokens(asked, 0) == (0, False)


def test_lost_before_there_was_room_the_pool_is_asked() -> None:
    pool = FakePool()
    one, asked = half(pool), request(offer())
    one.arrived(asked)
    pool.answer_prefix(4)
    one.step_ended(FakeOutput(None, Report(lost={"r"})))
    assert one.matched_tokens(asked, 0) == (16, True)


def test_nothing_came_the_pool_is_asked() -> None:
    """vLLM gives up the blocks of a hand-over that failed as a whole and asks again."""
    pool = FakePool()
    one, asked = half(pool), request(offer())
    one.arrived(asked)
    pool.answer_prefix(4)
    assert one.matched_tokens(asked, 0) == (17, True)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 0})))
    assert pool.released == []
    assert one.matched_tokens(asked, 0) == (16, True)
    one.admitted(asked, FakeBlocks((IDS,)), 16)
    step = one.build_step(FakeStep())
    assert len(step.loads) == 1


def test_an_abort_while_it_is_pulled() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    one.matched_tokens(asked, 0)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.build_step(FakeStep())
    one.finished(asked)
    assert one.has_pending_work()
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.drops == ("r",)
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 0})))
    assert not one.has_pending_work()
    one.arrived(request(offer()))  # the name is free again
    assert one.matched_tokens(request(offer()), 0) == (17, True)


def test_an_abort_when_it_is_here_and_not_yet_scheduled() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    one.matched_tokens(asked, 0)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.build_step(FakeStep())
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 5})))
    answer = one.finished(asked)
    assert answer is not None
    assert answer["moonpool"]["handed_over_tokens"] == 17
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.drops == ("r",)  # the workers tell prefill in it
    assert one.build_step(FakeStep()) is NOTHING
    assert not one.has_pending_work()


def test_a_name_that_comes_again_while_the_first_is_pulled() -> None:
    """As when a client that left tries again under its own X-Request-Id: one pull, one end, and the second is
    computed."""
    one, asked, again = half(), request(offer()), request(offer())
    one.arrived(asked)
    one.matched_tokens(asked, 0)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.build_step(FakeStep())
    one.finished(asked)
    one.arrived(again)
    assert one.matched_tokens(again, 0) == (0, False)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert (step.handover.holds, step.handover.pulls) == ((), ())
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 0})))
    one.admitted(again, FakeBlocks((IDS,)), 0)
    one.finished(again)
    assert not one.has_pending_work()
    third = request(offer())
    one.arrived(third)
    assert one.matched_tokens(third, 0) == (17, True)


def test_nothing_of_old_weights_is_taken() -> None:
    one, waits, pulled = half(), request(offer(), name="w"), request(offer(), name="p")
    for each in (waits, pulled):
        one.arrived(each)
    one.matched_tokens(pulled, 0)
    one.admitted(pulled, FakeBlocks((IDS,)), 17)
    one.build_step(FakeStep())
    one.handover.forget_all()
    assert one.matched_tokens(waits, 0) == (0, False)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert sorted(step.handover.drops) == ["p", "w"]
    assert step.handover.voids == ("p",)
    one.step_ended(FakeOutput({"p"}, Report(loaded={"p": 0})))
    answers = [one.finished(each) for each in (waits, pulled)]
    assert [answer and answer["moonpool"]["handed_over_tokens"] for answer in answers] == [0, 0]
    step = one.build_step(FakeStep())  # in which the workers tell prefill
    assert step.handover is not None
    assert step.handover.voids == ()
    assert not one.has_pending_work()


def test_an_abort_before_there_was_room() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    one.finished(asked)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert (len(step.handover.holds), step.handover.drops) == (1, ("r",))


def test_vllm_wants_it_computed() -> None:
    """As with prompt_logprobs: what was offered is not used, and prefill has its blocks back at once."""
    one, asked = half(), request(offer())
    one.arrived(asked)
    assert one.matched_tokens(asked, 0) == (17, True)
    one.admitted(asked, FakeBlocks((IDS,)), 0)
    step = one.build_step(FakeStep())
    assert step.handover is not None
    assert step.handover.drops == ("r",)


def test_a_preempted_request_is_computed() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    asked.num_preemptions = 1
    assert one.matched_tokens(asked, 0) == (0, False)


def test_an_answer_is_stored_for_the_next_turn() -> None:
    """Whatever the role and save_decode say: nobody else has its blocks."""
    pool = FakePool()
    one, asked = half(pool, may_save=False), request(offer())
    one.arrived(asked)
    pool.answer_prefix(4)  # prefill has stored the prompt
    one.build_step(FakeStep())
    one.matched_tokens(asked, 0)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.step_ended(FakeOutput({"r"}, Report(loaded={"r": 5})))
    one.admitted(asked, FakeBlocks((IDS,)), 0)
    assert pool.released == [7]
    asked.answer = [1, 2, 3]
    new = New("r", (list(IDS),), 17)
    step = one.build_step(FakeStep([new], num_scheduled_tokens={"r": 4}))
    (save,) = step.saves
    assert save.block_ids == ((104,),)


def test_prefill_may_load_though_it_only_produces() -> None:
    pool = FakePool()
    one = half(pool, may_load=False)
    plain, handed = FakeRequest("a", list(range(18))), FakeRequest("b", list(range(18)))
    handed.kv_transfer_params = {"do_remote_decode": True}
    for each in (plain, handed):
        one.arrived(each)
    assert len(pool.prefixes) == 1
    pool.answer_prefix(4)
    assert one.matched_tokens(plain, 0) == (0, False)
    assert one.matched_tokens(handed, 0) == (16, True)


def test_a_failed_plan_covers_every_block() -> None:
    one, asked = half(), request(offer())
    one.arrived(asked)
    one.fail_load("r", FakeBlocks((IDS[:5],)), 17)
    step: Step = one.build_step(FakeStep())
    assert step.loads[0].blocks == 5
    assert BLOCK_TOKENS * 5 >= 17


def test_a_failed_plan_ends_once() -> None:
    """What was to be pulled is not pulled besides."""
    one, asked = half(), request(offer())
    one.arrived(asked)
    one.matched_tokens(asked, 0)
    one.admitted(asked, FakeBlocks((IDS,)), 17)
    one.fail_load("r", FakeBlocks((IDS[:5],)), 17)
    step = one.build_step(FakeStep())
    assert len(step.loads) == 1
    assert step.handover is not None
    assert step.handover.pulls == ()
