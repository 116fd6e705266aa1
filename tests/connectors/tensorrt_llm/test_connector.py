"""The connector in the recorded life cycle of TensorRT-LLM's executor, against a real node; every answer is
checked byte by byte (stub_engine.py)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from moonpool.connectors.tensorrt_llm import compat
from moonpool.core.errors import Unavailable
from tests.connectors.tensorrt_llm.checks import PROMPT, check, counts
from tests.connectors.tensorrt_llm.conftest import Make, Node
from tests.connectors.tensorrt_llm.stub_engine import NO_PAGE, Engine
from tests.core.store_bed import until


def test_a_second_engine_takes_what_the_first_computed(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    check(second, [*PROMPT[:9], 1, 2, 3, 4, 5], 8)  # a common beginning of two blocks
    check(second, PROMPT[:20], 16)  # one token is left to compute
    check(second, PROMPT[:3], 0)
    assert counts(second)["loaded_blocks"] == 5 + 2 + 4
    assert counts(first)["saved_objects"] == 5 * 8


def test_only_what_the_engine_lacks_is_loaded(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0)
    check(second, PROMPT, 12, on_device=8)
    check(second, PROMPT, 20 - 6, on_device=6)  # in the middle of a block
    check(second, PROMPT, 0, on_device=22)


def test_chunked_prefill_saves_as_blocks_become_full(make: Make, node: Node) -> None:
    node.start()
    first, second = make(chunk=6), make(chunk=6)
    request = first.start(PROMPT)
    first.step([request])
    first.flush()
    assert counts(first)["saved_objects"] == 8  # 6 of 23 tokens: one block
    first.step([request])
    first.flush()
    check(second, PROMPT, 12)
    while request.computed < len(PROMPT):
        first.step([request])
    first.finish(request)


def test_several_requests_in_a_step(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    other = [7] * 17
    both = [first.start(PROMPT), first.start(other)]
    first.step(both)
    for request in both:
        first.finish(request)
    first.flush()
    one, two = second.start(PROMPT), second.start(other)
    loaded = second.step([], [one, two])
    while len(loaded) < 2:
        loaded += until(lambda: second.poll([]))
    assert sorted(loaded) == [one.request_id, two.request_id]
    second.step([one, two])
    assert [second.answer(one), second.answer(two)] == [second.expected(PROMPT), second.expected(other)]


@pytest.mark.parametrize(("save_decode", "hit"), [(False, 4), (True, 8)])
def test_answers_are_saved_when_asked_to(make: Make, node: Node, save_decode: bool, hit: int) -> None:
    node.start()
    engine = make({"save_decode": save_decode})
    request = engine.start([1, 2, 3, 4, 5, 6, 7])
    engine.step([request])
    for token in (8, 9, 10):
        request.tokens.append(token)
        if len(request.tokens) > 4 * len(request.pages[0]):
            request.pages[0].append(engine.free[0].pop())
        engine.step([request])
    engine.finish(request)
    engine.flush()
    check(make(), list(range(1, 11)), hit)


def test_engines_of_different_tensor_parallel_sizes_share(make: Make, node: Node) -> None:
    node.start()
    four, two, one = make(args={"tp_size": 4}), make(args={"tp_size": 2}), make()
    check(four, PROMPT, 0)
    check(two, PROMPT, 20)
    check(one, PROMPT, 20)


def test_ranks_that_hold_one_head_save_it_once(make: Make, node: Node) -> None:
    node.start()
    shape = {"heads": 1}
    ranks = make(model=shape, heads=1, args={"tp_size": 2})
    check(ranks, PROMPT, 0)
    assert sum(counts_of["saved_objects"] for counts_of in all_counts(ranks)) == 5
    check(make(model=shape, heads=1), PROMPT, 20)


def all_counts(engine: Engine) -> list[Any]:
    return [worker._link.count for worker, _ in engine.ranks]


def test_layer_groups_of_several_regions(make: Make, node: Node) -> None:
    node.start()
    first, second = make(groups=2), make(groups=2)
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    assert counts(first)["saved_objects"] == 5 * 2  # raw: one object for a page of each group
    check(make(), PROMPT, 0)  # cut otherwise, so not shared


def test_layer_groups_with_unlike_numbers_of_pages(make: Make, node: Node) -> None:
    node.start()
    first, second = (make(groups=2, blocks=blocks) for blocks in ((64, 24), (24, 96)))
    for engine in (first, second):
        for free in engine.free:
            free.reverse()  # the last pages first
    check(first, PROMPT, 0)
    check(second, PROMPT, 20)
    check(second, list(range(60)), 0)  # 15 blocks: a quarter of the pages of the smaller group may be kept
    assert counts(second)["unsaved_blocks"] == 9


def test_blocks_without_a_page_are_neither_saved_nor_loaded(make: Make, node: Node) -> None:
    node.start()
    first, second = make(groups=2), make(groups=2)
    request = first.start(PROMPT)
    request.pages[1][3] = NO_PAGE  # the window has passed it before it was saved
    first.step([request])
    first.finish(request)
    first.flush()
    assert counts(first)["saved_objects"] == 5 + 4
    request = second.start(PROMPT)
    assert second.matched == 12
    second.finish(request)
    check(first, PROMPT, 12)  # and now the rest is there, too
    request = second.start(PROMPT)
    assert second.matched == 20
    second.finish(request)


def test_an_unknown_backend_stores_blocks_as_they_lie(make: Make, node: Node) -> None:
    node.start()
    first, second = make(args={"backend": "FLASHINFER"}), make(args={"backend": "FLASHINFER"})
    check(first, PROMPT, 0)
    assert counts(first)["saved_objects"] == 5
    check(second, PROMPT, 20)
    check(make(), PROMPT, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"args": {"dtype": "fp8"}},
        {"dtype": "float16"},
        {"model": {"weights": 2}},
        {"options": {"namespace": "other"}},
    ],
    ids=["kv dtype", "memory", "weights", "namespace"],
)
def test_who_differs_shares_nothing(make: Make, node: Node, other: dict[str, Any]) -> None:
    node.start()
    check(make(), PROMPT, 0)
    check(make(**other), PROMPT, 0)
    check(make(), PROMPT, 20)


def test_another_block_size_is_a_miss(make: Make, node: Node) -> None:
    node.start()
    check(make(), PROMPT, 0)
    eight = make(args={"tokens": 8})
    check(eight, PROMPT, 0)
    check(make(args={"tokens": 8}), PROMPT, 16)


def test_the_start_waits_until_the_weights_were_read(
    make: Make, node: Node, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks join together, and here only."""
    node.start()
    said: list[str] = []
    info = compat.Log.info

    def hear(log: compat.Log, text: str, *values: object) -> None:
        info(log, text, *values)
        said.append(text % values)
        if "the start waits for it" in said[-1]:
            held.set()

    monkeypatch.setattr(compat.Log, "info", hear)
    check(make(), PROMPT, 0)
    assert any("the start waits for it" in text for text in said)
    check(make(), PROMPT, 20)


def test_salts_are_apart_and_lora_is_left_out(make: Make, node: Node) -> None:
    node.start()
    first, second = make(), make()
    check(first, PROMPT, 0, cache_salt="one")
    check(second, PROMPT, 0)
    check(second, PROMPT, 20, cache_salt="one")
    check(second, PROMPT, 0, cache_salt="two")
    check(second, PROMPT, 0, lora_task_id=7)
    assert counts(second)["requests_left_out"] == 1
    check(first, PROMPT, 0, lora_task_id=7)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"model": "no/such-model"}, "cannot tell which weights"),
        ({"enable_attention_dp": True}, "enable_attention_dp"),
    ],
)
def test_engines_that_cannot_use_the_pool_say_why(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    args: dict[str, Any], sentence: str,
) -> None:  # fmt: skip
    node.start()
    engine = make(args={"more": args})
    check(engine, PROMPT, 0)
    assert sentence in caplog.text
    with pytest.raises(Exception, match=sentence):
        make({"require_pool": True}, args={"more": args})


def test_a_cache_that_cannot_be_copied(
    make: Make, node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*of: Any) -> Any:
        raise Unavailable("no pinned memory", operation="open")

    monkeypatch.setattr("moonpool.connectors.tensorrt_llm.link.open_kv_memory", refuse)
    node.start()
    check(make(), PROMPT, 0)
    assert "no pinned memory" in caplog.text


@pytest.mark.parametrize(
    "more",
    [
        {"model_kwargs": {"rope_theta": 1e6}},
        {"kv_cache": {"sink_token_length": 4}},
        {"kv_cache": {"max_attention_window": [4096]}, "max_seq_len": 2048},
    ],
    ids=["model_kwargs", "sink", "window"],
)
def test_arguments_that_change_the_numbers_tell_engines_apart(
    make: Make, node: Node, more: dict[str, Any]
) -> None:
    node.start()
    check(make(), PROMPT, 0)
    check(make(args={"more": more}), PROMPT, 0)
    check(make(args={"more": more}), PROMPT, 20)


def test_prompts_with_images_are_left_out(make: Make, node: Node) -> None:
    """By what they carry, and by the tokens that stand for images: not every version's requests carry it."""
    node.start()
    model = {"more": {"vision_config": {}, "image_token_id": 300, "vocab_size": 1000}}
    engine = make(model=model)
    check(engine, PROMPT, 0)
    for tokens, fields in (
        ([*PROMPT, 300, 1], {}),
        ([*PROMPT, 1000, 1], {}),
        (PROMPT, {"py_multimodal_data": {"image": 1}}),
    ):
        check(engine, tokens, 0, **fields)
    assert counts(engine)["requests_left_out"] == 3
    check(make(model=model), PROMPT, 20, py_multimodal_data={})
