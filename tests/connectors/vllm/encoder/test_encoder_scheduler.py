"""The scheduler's half of encoder outputs: what it asks for, how long it waits, and what steps load and
save."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moonpool.connectors.vllm import item_names
from moonpool.connectors.vllm.encoder.membership import Membership
from moonpool.connectors.vllm.encoder.messages import NOTHING, EncoderReport, EncoderStep, Output
from moonpool.connectors.vllm.encoder.scheduler import PAUSE_S, SchedulerHalf
from moonpool.connectors.vllm.encoder.settings import EncoderSettings
from moonpool.connectors.vllm.lookups import ANSWER_TIMEOUT_S, WAIT_S
from moonpool.connectors.vllm.scheduler import HASH_TIMEOUT_S
from moonpool.connectors.vllm.weight_changes import Change
from moonpool.core.errors import ConfigError, Unavailable
from tests.connectors.vllm.fakes import LOG, Clock, FakeItem, FakePool, FakeRequest, feature, request

PROMPT = 40  # tokens
ROWS = 6


class FakeMembership:
    """A half's place in a pool that is there or not."""

    def __init__(self, pool: FakePool | None) -> None:
        self.there: FakePool | None = pool
        self.refusal, self.fingerprint = "", b"f" * 32
        self.joined: list[bytes | None] = []
        self.left = 0

    def pool(self) -> FakePool | None:
        return self.there

    def join(self, fingerprint: bytes | None = None) -> None:
        self.joined.append(fingerprint)
        self.fingerprint = fingerprint or b""

    def leave(self) -> None:
        self.left += 1
        self.there, self.fingerprint = None, b""

    def refuse(self, why: str) -> None:
        self.refusal = why


@dataclass
class Half:
    pool: FakePool = field(default_factory=FakePool)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.membership = FakeMembership(self.pool)
        self.half = self.make()

    def make(self, **changes: Any) -> SchedulerHalf:
        given: dict[str, Any] = {"may_load": True, "can_fail_requests": True, **changes}
        membership = cast(Membership, self.membership)
        return SchedulerHalf(membership, form="", log=LOG, clock=self.clock, **given)

    def answer(self, *present: bool) -> None:
        self.pool.answer(self.pool.presences[-1][0], bytes(present))

    def answer_while_waited(self, *present: bool) -> None:
        def on_wait() -> bool:
            self.answer(*present)
            return True

        self.pool.on_wait = on_wait


def with_items(*features: Any, name: str = "r") -> FakeRequest:
    return request(PROMPT, name, mm_features=list(features))


def step(*requests: str, freed: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(requests, 8),
        free_encoder_mm_hashes=list(freed),
        scheduled_encoder_inputs={},
    )


def unnamed(plan: EncoderStep) -> bool:
    """Whether the step loads nothing, and computes outputs that are not stored."""
    return not plan.loads and [output.name for output in plan.computed.values()] == [b""]


def test_one_query_for_all_items_and_a_step_that_loads_or_computes() -> None:
    one = Half()
    one.answer_while_waited(True, False)
    asked = with_items(feature(1, 2), feature(2, 20))
    assert one.half.is_ready(asked, 0)
    ((_, names),) = one.pool.presences
    assert [len(name) for name in names] == [32, 32]
    assert one.half.has_item("hash of 1")
    assert not one.half.has_item("hash of 2")
    one.half.allocated(asked, 0, ROWS)
    one.half.allocated(asked, 1, ROWS)
    output = step("r")
    plan = one.half.plan(output)
    (load,) = plan.loads
    assert (load.output.identifier, load.output.name, load.output.rows) == ("hash of 1", names[0], ROWS)
    assert (load.request_id, load.index) == ("r", 0)
    assert plan.computed == {"hash of 2": Output("hash of 2", names[1], ROWS, "image")}
    assert plan.encoded is output.scheduled_encoder_inputs
    assert one.half.plan(step("r")) is NOTHING


def test_an_item_is_asked_for_by_content_not_by_place_or_uuid() -> None:
    one = Half()
    for number, begin in enumerate((2, 20)):
        one.half.is_ready(with_items(feature(1, begin, identifier=f"u{number}"), name=str(number)), 0)
    (_, first), (_, second) = one.pool.presences
    assert first == second


def test_requests_of_different_salts_do_not_find_each_others_items() -> None:
    one = Half()
    for salt in (None, "a", "b", "a"):
        asked = with_items(feature(1, 2), name=f"r{len(one.pool.presences)}")
        asked.cache_salt = salt
        one.half.is_ready(asked, 0)
    plain, a, b, again = [names for _, names in one.pool.presences]
    assert a == again
    assert len({plain[0], a[0], b[0]}) == 3


def test_the_name_of_a_salted_item_is_that_of_the_page() -> None:
    """docs/keys.md has it."""
    named = item_names.salted(bytes(range(32)), "tenant-7")
    assert named.hex() == "11698e073c1b4d5ac24a512038384056ece891bf743615451b0d4df2a868f00d"
    assert item_names.salted(bytes(range(32)), None) == bytes(range(32))


def test_what_the_prefix_cache_covers_is_not_asked_for() -> None:
    one = Half()
    asked = with_items(feature(1, 2, length=6))
    assert one.half.is_ready(asked, 8)
    assert one.pool.presences == []
    assert not one.half.is_ready(asked, 7)
    assert len(one.pool.presences) == 1


def test_a_late_answer_is_waited_for_once_and_at_most_a_second() -> None:
    one = Half()
    asked = with_items(feature(1, 2))
    assert not one.half.is_ready(asked, 0)
    assert one.pool.waits == [WAIT_S]
    one.half.plan(step())
    assert not one.half.is_ready(asked, 0)
    assert len(one.pool.waits) == 1
    one.clock.now_s += ANSWER_TIMEOUT_S
    assert one.half.is_ready(asked, 0)
    assert not one.half.has_item("hash of 1")
    one.answer(True)  # too late
    assert one.half.is_ready(asked, 0)
    assert not one.half.has_item("hash of 1")
    stats = one.half.tally.take()
    assert stats is not None
    assert stats.data == {"lookups_unknown": 1}


@pytest.mark.parametrize("answer", [Unavailable("gone"), None])
def test_no_answer_is_a_miss(answer: Unavailable | None) -> None:
    one = Half()
    if answer is None:
        one.pool.broken = Unavailable("gone")
    else:
        one.pool.on_wait = lambda: one.pool.answer(1, answer) or True  # type: ignore[func-returns-value]
    assert one.half.is_ready(with_items(feature(1, 2)), 0)
    assert not one.half.has_item("hash of 1")


def test_without_a_pool_nothing_is_named() -> None:
    one = Half()
    one.membership.there = None
    assert one.half.is_ready(with_items(feature(1, 2)), 0)
    assert not one.half.has_item("hash of 1")


def test_a_request_waits_for_its_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Half()
    monkeypatch.setattr(item_names.ItemNames, "is_ready", lambda names, asked: False)
    asked = with_items(feature(1, 2))
    assert not one.half.is_ready(asked, 0)
    assert one.pool.presences == []
    one.clock.now_s += HASH_TIMEOUT_S
    assert not one.half.is_ready(asked, 0)
    assert len(one.pool.presences) == 1


def test_a_hit_lasts_as_long_as_its_requests() -> None:
    one = Half()
    one.answer_while_waited(True)
    for name in "ab":
        assert one.half.is_ready(with_items(feature(1, 2), name=name), 0)
    one.half.finished("a")
    assert one.half.has_item("hash of 1")
    one.half.finished("b")
    assert not one.half.has_item("hash of 1")
    assert (one.half._asked, one.half._tickets, one.half._found) == ({}, {}, {})


def test_two_contents_under_one_uuid_are_neither_loaded_nor_saved() -> None:
    one = Half()
    one.answer_while_waited(True)
    assert one.half.is_ready(with_items(feature(1, 2, identifier="u"), name="a"), 0)
    assert one.half.has_item("u")
    other = with_items(feature(2, 2, identifier="u"), name="b")
    assert one.half.is_ready(other, 0)
    one.half.plan(step())
    assert not one.half.has_item("u")
    one.half.allocated(other, 0, ROWS)
    assert unnamed(one.half.plan(step("b")))


def test_a_load_is_planned_until_its_request_is_in_a_step() -> None:
    one = Half()
    one.answer_while_waited(True)
    asked = with_items(feature(1, 2))
    assert one.half.is_ready(asked, 0)
    assert one.half.has_item("hash of 1")
    one.half.allocated(asked, 0, ROWS)
    preempted = one.half.plan(step())
    assert preempted.preempted == {"r"}
    plan = one.half.plan(step("r"))
    assert plan.loads == preempted.loads
    assert plan.preempted == frozenset()
    assert one.half.plan(step("r")) is NOTHING


def test_a_load_is_not_planned_once_its_room_is_gone() -> None:
    """The worker would fill vLLM's cache with what vLLM does not count."""
    one = Half()
    one.answer_while_waited(True)
    asked = with_items(feature(1, 2))
    assert one.half.is_ready(asked, 0)
    one.half.has_item("hash of 1")
    one.half.allocated(asked, 0, ROWS)
    before = one.half.plan(step(freed=("hash of 1",)))
    assert len(before.loads) == 1, "the room was made after that"
    assert one.half.plan(step(freed=("another",))).loads == before.loads
    assert one.half.plan(step(freed=("hash of 1",))) is NOTHING
    assert one.half.plan(step("r")) is NOTHING
    one.half.has_item("hash of 1")
    one.half.allocated(asked, 0, ROWS)
    assert one.half.plan(step()).loads == before.loads
    one.half.finished("r")
    assert one.half.plan(step()) is NOTHING


@pytest.mark.parametrize("may_load", [True, False])
def test_a_producer_loads_nothing(may_load: bool) -> None:
    one = Half()
    one.answer_while_waited(True, False)
    asked = with_items(feature(1, 2), feature(2, 20))
    half = one.make(may_load=may_load)
    assert half.is_ready(asked, 0)
    assert half.has_item("hash of 1")  # neither encodes what the pool has
    half.allocated(asked, 0, ROWS)
    half.allocated(asked, 1, ROWS)
    plan = half.plan(step("r"))
    assert (len(plan.loads), list(plan.computed)) == (may_load, ["hash of 2"])


@pytest.mark.parametrize("can_fail", [True, False])
def test_a_request_without_content_ends(can_fail: bool, caplog: pytest.LogCaptureFixture) -> None:
    one = Half()
    half = one.make(can_fail_requests=can_fail)
    sizes = FakeItem({"image_grid_thw": SimpleNamespace(data=np.array([1, 4, 4]))})
    asked = with_items(feature(1, 2, data=sizes))
    assert half.is_ready(asked, 0) is not can_fail
    assert half.take_unavailable() == ({"r"} if can_fail else set())
    assert half.take_unavailable() == set()
    assert half.is_ready(asked, PROMPT)  # covered by the prefix cache
    assert ("ends with an error" in caplog.text) is can_fail


def test_an_item_of_integers_alone_is_encoded() -> None:
    """Codes of sounds, which are no sizes; what they are is not sure enough for a name."""
    one = Half()
    codes = FakeItem({"codes": SimpleNamespace(data=np.arange(20))})
    asked = with_items(feature(1, 2, data=codes))
    assert one.half.is_ready(asked, 0)
    assert one.half.take_unavailable() == set()
    assert one.pool.presences == []
    one.half.allocated(asked, 0, ROWS)
    assert unnamed(one.half.plan(step("r")))
    for name, less in (("grid", np.arange(4)), ("mask", np.ones(20, bool))):
        sizes = FakeItem({name: SimpleNamespace(data=less)})
        asked = with_items(feature(1, 2, length=3, data=sizes), name=name)
        assert not one.half.is_ready(asked, 0)


def test_a_producer_ends_no_request() -> None:
    """vLLM takes no sizes in the place of items from its clients."""
    one = Half()
    sizes = FakeItem({"image_grid_thw": SimpleNamespace(data=np.array([1, 4, 4]))})
    half = one.make(may_load=False)
    assert half.is_ready(with_items(feature(1, 2, data=sizes)), 0)
    assert half.take_unavailable() == set()


def test_weights_that_change() -> None:
    one = Half()
    one.answer_while_waited(True)
    assert one.half.is_ready(with_items(feature(1, 2)), 0)
    one.half.weights_changing(Change("a trainer"))
    assert one.membership.left == 1
    assert not one.half.has_item("hash of 1")
    one.half.reported(EncoderReport(counts={"loads": 2}, fingerprints=[b"n" * 32, b"n" * 32]))
    one.half.reported(EncoderReport(fingerprints=[b"n" * 32]))  # a worker that has read longer
    assert one.membership.joined == [b"n" * 32]
    one.half.reported(EncoderReport(fingerprints=[b"o" * 32]))
    assert "disagree" in one.membership.refusal
    one.membership.refusal = ""
    one.half.reported(EncoderReport(fingerprints=[b"n" * 32, b"o" * 32]))
    assert "disagree" in one.membership.refusal
    one.half.reported(EncoderReport(left=True))
    assert one.membership.left == 2


def test_after_a_stalled_load_nothing_is_loaded_for_a_while() -> None:
    one = Half()
    one.answer_while_waited(True)
    assert one.half.is_ready(with_items(feature(1, 2)), 0)
    assert one.half.has_item("hash of 1")
    one.half.reported(EncoderReport(stalled=True))
    assert not one.half.has_item("hash of 1")
    one.clock.now_s += PAUSE_S
    assert one.half.has_item("hash of 1")


def test_reports_of_ranks_are_one() -> None:
    merged = EncoderReport({"loads": 1, "load_seconds": [0.1]}, [b"a"]).aggregate(
        EncoderReport({"loads": 2, "load_seconds": [0.2], "saves": 1}, [b"b"], left=True)
    )
    assert merged.counts == {"loads": 3, "load_seconds": [0.1, 0.2], "saves": 1}
    assert merged.fingerprints == [b"a", b"b"]
    assert merged.left
    assert not merged.stalled
    assert EncoderReport(stalled=True).aggregate(EncoderReport()).stalled


def test_options() -> None:
    assert EncoderSettings.parse({}).save_bytes == 256 << 20
    assert EncoderSettings.parse({"save_bytes": "1GiB", "require_pool": "true"}).save_bytes == 1 << 30
    for extra, named in (
        ({"save_byte": 1}, "did you mean 'save_bytes'"),
        ({"save_bytes": "12"}, "from 1MiB to 64GiB"),
        ({"save_bytes": True}, "from 1MiB to 64GiB"),
        ({"tenant": ""}, "ec_connector_extra_config.tenant"),
        ({"token": "x"}, "a secret has no place"),
    ):
        with pytest.raises(ConfigError, match=named):
            EncoderSettings.parse(extra)
