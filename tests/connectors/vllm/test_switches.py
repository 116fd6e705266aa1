"""Switches of single requests in the scheduler's half: no question and no load, no save, and what is said of
switches that cannot be read."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import numpy as np
import pytest

from moonpool import Store, _native
from moonpool.connectors.vllm.messages import NOTHING
from moonpool.connectors.vllm.pool import Pool
from moonpool.connectors.vllm.repeats import EVERY_S
from moonpool.connectors.vllm.requests.switches import NO_SWITCH, OFF, Switches, read_switches
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    Clock,
    FakePool,
    FakeStep,
    admit,
    first_step,
    request,
    scheduler_half,
)

NO_BOOLEANS = (None, 0, 1, "off", "false", [], {}, 0.5)


def with_switches(name: str = "r", **switches: Any) -> Any:
    return request(name=name, kv_transfer_params={"moonpool": switches})


def test_a_request_that_does_not_load_is_asked_about_nowhere_and_saved() -> None:
    pool = FakePool()
    half, _ = scheduler_half(pool)
    one = with_switches(load=False)
    half.arrived(one)
    assert pool.prefixes == []
    assert admit(half, one) == 0
    (save,) = half.build_step(first_step(one, computed=0, scheduled=18)).saves
    assert len(save.block_ids[0]) == 18 // BLOCK_TOKENS
    one.num_preemptions = 1  # nor when it comes again
    assert half.matched_tokens(one, 0) == (0, False)
    assert pool.prefixes == []
    assert not half.lookups.under_way


def test_a_request_that_is_not_stored_is_loaded_and_not_saved() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = with_switches(store=False)
    half.arrived(one)
    pool.answer_prefix(2)
    assert admit(half, one) == 2 * BLOCK_TOKENS
    assert len(half.build_step(FakeStep()).loads) == 1
    half.lookups.release(7)
    other = with_switches("other", store=False)
    half.arrived(other)
    pool.answer_prefix(0)
    assert admit(half, other) == 0
    assert half.build_step(first_step(other, computed=0, scheduled=18)) is NOTHING
    other.num_preemptions = 1
    assert half.matched_tokens(other, 0) == (None, False)
    pool.answer_prefix(0)
    assert admit(half, other) == 0
    assert half.build_step(first_step(other, computed=0, scheduled=18)) is NOTHING
    assert blocks.held() == []


@pytest.mark.parametrize("keep_s", [0.001, 60, 49 * 86_400])
def test_what_is_saved_has_the_life_that_is_asked_for(keep_s: float) -> None:
    half, _ = scheduler_half(FakePool())
    one, other = with_switches(load=False, keep_s=keep_s), with_switches("other", load=False)
    for each, expected in ((one, keep_s), (other, 0.0)):
        half.arrived(each)
        admit(half, each)
        (save,) = half.build_step(first_step(each, computed=0, scheduled=18)).saves
        assert save.keep_s == expected


def test_neither_costs_no_question_and_no_save_and_is_counted() -> None:
    pool = FakePool()
    half, blocks = scheduler_half(pool)
    one = with_switches(load=False, store=False)
    half.arrived(one)
    assert admit(half, one) == 0
    assert half.build_step(first_step(one, computed=0, scheduled=18)) is NOTHING
    assert (pool.prefixes, blocks.held()) == ([], [])
    answer = half.finished(one)
    assert answer is not None
    assert answer["moonpool"]["pool_tokens"] == 0
    stats = half.tally.take()
    assert stats is not None
    assert (stats.data["switched_off_load"], stats.data["switched_off_store"]) == (1, 1)


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        *((name, value) for name in OFF for value in NO_BOOLEANS),
        *(("keep_s", value) for value in (None, True, "60", [], {}, 0, -1, 4233601.0, math.inf, math.nan)),
    ],
)
def test_a_switch_that_is_no_boolean_counts_for_nothing_and_is_said_once(
    switch: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pool, clock = FakePool(), Clock()
    half, _ = scheduler_half(pool, clock=clock)
    for number in range(3):
        one = with_switches(f"r{number}", **{switch: value})
        half.arrived(one)
        pool.answer_prefix(0)
        admit(half, one)
        assert len(half.build_step(first_step(one, computed=0, scheduled=18)).saves) == 1
    assert len(pool.prefixes) == 3
    (record,) = caplog.records
    assert f'"{switch}" of "moonpool" is ' in record.getMessage()
    assert "request r0 is served as without it" in record.getMessage()
    clock.now_s += EVERY_S
    half.arrived(with_switches("later", **{switch: value}))
    assert "(3 times since this was last said)" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("ours", ["off", 1, [], [{"store": False}], True])
def test_what_is_no_object_counts_for_nothing(ours: Any) -> None:
    switches, (complaint,) = read_switches({"moonpool": ours})
    assert switches == NO_SWITCH
    assert '"moonpool" is an object' in complaint


def test_a_switch_that_is_unknown_hides_no_other() -> None:
    switches, (complaint,) = read_switches({"moonpool": {"stor": False, "store": False, "priority": 3}})
    assert switches == Switches(store=False)
    assert "members that this connector does not know" in complaint
    assert read_switches({"moonpool": {"load": False, "store": 7}})[0] == Switches(load=False)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True},
        {"moonpool": None},
        {"moonpool": {"handover": {"lease": 7}, "pool_tokens": 1, "local_tokens": 2, "load_errors": 0}},
        {"moonpool": {"explain": True, "decision": {}, "handed_over_tokens": 3, "store": True}},
    ],
)
def test_what_else_stands_there_is_no_switch(params: dict[str, Any] | None) -> None:
    assert read_switches(params) == (NO_SWITCH, [])


def test_a_node_evicts_last_what_is_to_be_kept() -> None:
    content = np.arange(64, dtype=np.uint8)
    table = _native.PartTable([[(content.ctypes.data, 64, 64)]])
    first = np.zeros(1, np.uint32), np.zeros(1, np.uint16)
    with Store(embedded="16MiB") as store:
        pool = Pool(store._client)
        for name, keep_s in ((b"kept", 60.0), (b"else", 0.0)):
            pool.submit_save(name, 4, b"", table, *first, None, keep_s)
        answers: list[Any] = []
        deadline_s = time.monotonic() + 10
        while len(answers) < 2 and time.monotonic() < deadline_s:
            answers += [answer for _, answer in pool.poll()]
        assert [answer.stored for answer in answers] == [1, 1]
        kept, other = store.stat(["kept", "else"])
        assert kept is not None
        assert other is not None
        assert (kept.copies[0].soft_pinned, other.copies[0].soft_pinned) == (True, False)
        pool._reads.close()
        pool._writes.close()
