"""Images, sounds and videos in prompts: how their blocks are named, and what the scheduler's half makes of
them."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.connectors.vllm import item_hashes, item_names
from moonpool.connectors.vllm.item_names import ItemNames
from moonpool.connectors.vllm.media_options import media_form, media_refusal
from moonpool.connectors.vllm.requests import Chain
from moonpool.connectors.vllm.requests.media import EVERY_TOKEN, TEXT_ALONE, Media
from moonpool.connectors.vllm.scheduler import HASH_TIMEOUT_S
from moonpool.core.store.keys import Item, block_digests
from tests.connectors.vllm.fakes import (
    BLOCK_TOKENS,
    COLUMNS,
    HANDSHAKE,
    LOG,
    Clock,
    FakePool,
    FakeRequest,
    FakeStep,
    admit,
    digest,
    feature,
    first_step,
    item_data,
    request,
    scheduler_half,
)

SUFFIXES = b"".join(ranges.suffix() for ranges in COLUMNS)
NAME_BYTES = 42
PROMPT = 22  # tokens: five blocks


def names_of(features: list[Any], form: str = "", refusal: str = "", names: ItemNames | None = None) -> Media:
    names = names or ItemNames(form=form, refusal=refusal, log=LOG, clock=lambda: 0.0)
    return names.media(request(PROMPT, mm_features=features))


def digests_of(features: list[Any], **how: Any) -> list[bytes]:
    """Of the blocks of a prompt of equal tokens."""
    chain = Chain(BLOCK_TOKENS, SUFFIXES, b"", digest, media=names_of(features, **how))
    chain.extend(range(PROMPT))
    return [chain.names(block, block + 1)[:32] for block in range(chain.blocks)]


TEXT = digests_of([])


def shared(one: list[bytes], other: list[bytes]) -> int:
    """How many leading blocks are the same; behind the first other one none may be."""
    count = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True)))
    assert not set(one[count:]) & set(other)
    return count


def test_text_is_named_as_ever() -> None:
    assert block_digests(range(PROMPT), BLOCK_TOKENS) == TEXT
    assert names_of([]) is TEXT_ALONE


def test_the_text_before_an_item_is_that_of_text_alone() -> None:
    assert shared(digests_of([feature(1, 9)]), TEXT) == 2
    assert shared(digests_of([feature(1, 8)]), TEXT) == 2
    assert shared(digests_of([feature(1, 7)]), TEXT) == 1
    assert shared(digests_of([feature(1, 0)]), TEXT) == 0


def test_equal_text_with_other_items_is_shared_up_to_them() -> None:
    one = digests_of([feature(1, 9), feature(2, 16)])
    assert digests_of([feature(1, 9), feature(2, 16)]) == one
    assert shared(one, digests_of([feature(3, 9), feature(2, 16)])) == 2
    assert shared(one, digests_of([feature(1, 9), feature(3, 16)])) == 4
    assert shared(one, digests_of([feature(2, 9), feature(1, 16)])) == 2  # swapped
    assert shared(one, digests_of([feature(1, 9)])) == 4


def test_an_item_at_another_place_is_another() -> None:
    at = [digests_of([feature(1, begin, 3)]) for begin in range(PROMPT)]
    for (one, mine), (other, yours) in itertools.combinations(enumerate(at), 2):
        if one < 20:
            assert shared(mine, yours) == one // BLOCK_TOKENS, (one, other)


def test_every_part_of_an_item_tells_it_apart() -> None:
    mask = np.array([True, False, True, True, True, True])
    float64 = np.full((4, 4), 1, np.float64)
    variants = {
        "as it is": digests_of([feature(1, 5)]),
        "other content": digests_of([feature(2, 5)]),
        "another grid": digests_of([feature(1, 5, data=item_data(1, image_grid_thw=np.array([1, 2, 8])))]),
        "another shape": digests_of(
            [feature(1, 5, data=item_data(1, pixel_values=np.full((2, 8), 1.0, "f4")))]
        ),
        "another type": digests_of([feature(1, 5, data=item_data(1, pixel_values=float64))]),
        "another field": digests_of([feature(1, 5, data=item_data(1, fps=2.0))]),
        "another list": digests_of([feature(1, 5, data=item_data(1, fps=[2.0]))]),
        "another mask": digests_of([feature(1, 5, is_embed=mask)]),
        "longer": digests_of([feature(1, 5, 7)]),
        "another modality": digests_of([feature(1, 5, modality="video")]),
        "another engine": digests_of([feature(1, 5)], form="normalises on the device"),
    }
    for (one, mine), (other, yours) in itertools.combinations(variants.items(), 2):
        assert shared(mine, yours) == 1, (one, other)


def test_an_item_is_what_the_page_says() -> None:
    def text(value: str) -> bytes:
        return len(value).to_bytes(8, "little") + value.encode()

    def tensor(kind: str, value: Any) -> bytes:
        sizes = [len(value.shape), *value.shape]
        return b"t" + text(kind) + b"".join(size.to_bytes(8, "little") for size in sizes) + value.tobytes()

    mask = np.array([True, False, True, True, True, True])
    data = item_data(1, fps=[2.5, None])
    content = hashlib.sha256(
        text("fps")
        + b"l"
        + (2).to_bytes(8, "little")
        + b"j"
        + text("2.5")
        + b"j"
        + text("null")
        + text("image_grid_thw")
        + tensor("int64", data["image_grid_thw"].data)
        + text("pixel_values")
        + tensor("float32", data["pixel_values"].data)
    ).digest()
    raw = b"moonpool-item-v1" + content + text("form") + text("image") + (6).to_bytes(8, "little")
    named = names_of([feature(1, 9, data=data, is_embed=mask)], form="form")
    assert named.items == (Item(9, hashlib.sha256(raw + tensor("bool", mask)).digest()),)


def test_the_identifier_is_not_the_name() -> None:
    """It may be a client's UUID, which on another engine stands for another image."""
    assert digests_of([feature(1, 5, identifier="a")]) == digests_of([feature(1, 5, identifier="b")])
    assert (
        shared(digests_of([feature(1, 5, identifier="a")]), digests_of([feature(2, 5, identifier="a")])) == 1
    )


def test_chains_are_the_reference_however_they_grow(rng: random.Random) -> None:
    for _ in range(200):
        tokens = [rng.randrange(1 << 32) for _ in range(rng.randrange(1, 60))]
        begins = rng.sample(range(60), rng.randrange(5))
        items = tuple(sorted(Item(begin, rng.randbytes(32)) for begin in begins))
        seed = rng.choice([b"", rng.randbytes(32)])
        chain = Chain(BLOCK_TOKENS, SUFFIXES, seed, digest, media=Media(items))
        for end in (*sorted(rng.choices(range(len(tokens)), k=3)), len(tokens)):
            chain.extend(tokens[:end])
        expected = block_digests(tokens, BLOCK_TOKENS, seed=seed, items=items)
        assert [chain.names(block, block + 1)[:32] for block in range(chain.blocks)] == expected


def test_two_contents_under_one_uuid_have_no_name(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's prefix cache would take the KV of the first for that of the second."""
    names = ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0)
    assert names_of([feature(1, 5, identifier="mine")], names=names).refusal == ""
    assert names_of([feature(1, 5, identifier="mine")], names=names).refusal == ""
    for content in (2, 2, 1, 1):
        media = names_of([feature(9, 2), feature(content, 9, identifier="mine")], names=names)
        assert (len(media.items), media.named_tokens) == (1, 9)
        assert "two images came under one UUID" in media.refusal
    assert caplog.text.count("computed without the pool from token 9 on: two images") == 1


def test_a_second_content_stops_the_requests_of_the_first() -> None:
    """vLLM's encoder cache would give them the outputs for the second one, if that is scheduled first."""
    half, pool = half_and_pool()
    first = request(PROMPT, mm_features=[feature(1, 9, identifier="mine")])
    other = request(PROMPT, name="other", mm_features=[feature(3, 9, identifier="yours")])
    for each in (first, other):
        half.arrived(each)
        pool.answer_prefix(0)
    half.arrived(request(PROMPT, name="second", mm_features=[feature(2, 9, identifier="mine")]))
    for each in (first, other):
        assert admit(half, each) == 0
    step = first_step(first, 0, PROMPT)
    step.scheduled_new_reqs += first_step(other, 0, PROMPT).scheduled_new_reqs
    step.num_scheduled_tokens["other"] = PROMPT
    (save,) = half.build_step(step).saves
    assert digests_in(save.names, save.width) == digests_of([feature(3, 9)])
    assert half.finished(first) is None
    assert half.finished(other) is not None
    assert half._identifiers == {}


def has_lost_its_name(half: Any, pool: FakePool, identifier: str) -> bool:
    """Whether nothing is asked for from an item of this identifier on, which stood for another."""
    later = request(PROMPT, name=f"later {identifier}", mm_features=[feature(99, 9, identifier=identifier)])
    half.arrived(later)
    return asked(pool) == TEXT[:2]


def test_items_are_recorded_before_there_is_a_pool() -> None:
    """vLLM computes and caches them all the same."""
    pool = FakePool()
    half, _ = scheduler_half(pool, meet=False)
    half.greet_workers()
    early = request(PROMPT, name="early", mm_features=[feature(1, 9, identifier="mine")])
    half.arrived(early)
    assert half.matched_tokens(early, 0) == (0, False)
    half._meet_late([HANDSHAKE])
    half.arrived(request(PROMPT, mm_features=[feature(2, 9)]))
    assert asked(pool) == digests_of([feature(2, 9)])
    assert has_lost_its_name(half, pool, "mine")


@pytest.mark.parametrize("how", [{"resumable": True}, {"prompt_embeds": object()}])
def test_items_of_requests_that_do_not_use_the_pool_are_recorded(how: dict[str, Any]) -> None:
    half, pool = half_and_pool()
    half.arrived(request(PROMPT, mm_features=[feature(1, 9, identifier="mine")], **how))
    assert pool.prefixes == []
    assert has_lost_its_name(half, pool, "mine")


def test_items_that_a_session_is_given_later_are_recorded() -> None:
    """vLLM does not announce them: they are seen with the step that may compute them."""
    half, pool = half_and_pool()
    one = request(PROMPT, mm_features=[feature(1, 9, identifier="mine")])
    session = request(PROMPT, name="session", resumable=True, mm_features=[])
    for each in (one, session):
        half.arrived(each)
    pool.answer_prefix(0)
    assert admit(half, one) == 0
    session.mm_features += [feature(2, 22, identifier="mine")]  # type: ignore[operator]
    assert half.build_step(first_step(one, 0, PROMPT)).saves == ()
    assert has_lost_its_name(half, pool, "mine")
    assert half.finished(session) is None
    assert half._sessions == {}


def test_items_that_were_not_hashed_in_time_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr(item_hashes, "content_digest", lambda fields: bytes(32) if may_end.wait(20) else b"")
        slow.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
        clock, pool = Clock(), FakePool()
        half, _ = scheduler_half(pool, clock=clock)
        for name in ("late", "forgotten"):
            half.arrived(request(PROMPT, name=name, mm_features=[feature(1, 9, identifier=name)]))
        half.forget("forgotten")
        clock.now_s += HASH_TIMEOUT_S
        half.build_step(FakeStep())
        may_end.set()
        assert half._item_names.hashes._thread is not None
        half._item_names.hashes._thread.submit(int).result(20)
    assert has_lost_its_name(half, pool, "late")
    assert has_lost_its_name(half, pool, "forgotten")
    assert not has_lost_its_name(half, pool, "new")
    half.close()


def test_identifiers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_names, "IDENTIFIERS_MAX", 3)
    names = ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0)
    for content in range(10):
        names_of([feature(content, 5)], names=names)
    assert len(names._contents) == 3


def test_data_is_hashed_once_while_it_lives() -> None:
    names, kept = ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0), item_data(1)
    first = names_of([feature(1, 5, data=kept)], names=names)
    kept["pixel_values"].data[:] = 2  # nothing does that; it shows that the bytes are not read again
    assert names_of([feature(1, 5, data=kept)], names=names) == first
    del kept
    assert names.hashes._hashed == {}


def test_the_connectors_of_a_process_hash_an_item_once() -> None:
    """Each names what it is asked for; a digest is there for both."""
    hashes, kept = item_hashes.ItemHashes(), item_data(1)
    one, other = (ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0, hashes=hashes) for _ in range(2))
    first = names_of([feature(1, 5, data=kept)], names=one)
    kept["pixel_values"].data[:] = 2  # nothing does that; it shows that the bytes are not read again
    assert names_of([feature(1, 5, data=kept)], names=other) == first
    assert item_hashes.shared() is item_hashes.shared()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "vLLM does not give its scheduler the content"),
        (item_data(1, pixel_values=None), "its content is not in the request"),
        (item_data(1, pixel_values=3), "its content is not in the request"),
        (item_data(1, pixel_values=np.ones(64, np.int64)), "its content is not in the request"),
        (item_data(1, more=object()), "its fields have a object"),
    ],
    ids=["none", "sizes alone", "an address", "whole numbers", "an object"],
)
def test_items_without_content_have_no_name(data: Any, why: str) -> None:
    """As from an engine whose encoder is elsewhere, or with vLLM's cache in shared memory."""
    media = names_of([feature(1, 3), feature(1, 9, data=data, identifier="x"), feature(2, 15)])
    assert media.named_tokens == 9
    assert why in media.refusal
    named = digests_of([feature(1, 3), feature(1, 9, data=data, identifier="x"), feature(2, 15)])
    assert named == digests_of([feature(1, 3)])[:2]


def half_and_pool(**changes: Any) -> Any:
    pool = FakePool()
    return scheduler_half(pool, **changes)[0], pool


def asked(pool: FakePool) -> list[bytes]:
    """The digests of the blocks of the last query."""
    return digests_in(*pool.prefixes[-1][1:])


def digests_in(names: bytes, width: int) -> list[bytes]:
    """Of the blocks that these objects are of."""
    return [names[at : at + 32] for at in range(0, len(names), NAME_BYTES * width)]


def test_requests_with_items_ask_save_and_load() -> None:
    half, pool = half_and_pool()
    one = request(PROMPT, mm_features=[feature(1, 9)])
    half.arrived(one)
    assert asked(pool) == digests_of([feature(1, 9)])
    pool.answer_prefix(3)
    assert admit(half, one) == 12
    other = request(PROMPT, name="other", mm_features=[feature(2, 9)])
    half.arrived(other)
    assert asked(pool)[:2] == TEXT[:2]
    pool.answer_prefix(0)
    assert admit(half, other) == 0
    (save,) = half.build_step(first_step(other, 0, PROMPT)).saves
    assert digests_in(save.names, save.width) == digests_of([feature(2, 9)])


def await_hashes(names: ItemNames, one: FakeRequest) -> None:
    """What is submitted later runs later."""
    assert names.hashes._thread is not None
    names.hashes._thread.submit(int).result(20)
    assert names.is_ready(one)


def test_a_request_waits_until_its_large_items_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler does not: it asks again."""
    may_end, digest_now = threading.Event(), item_hashes.content_digest

    def slow(fields: Any) -> bytes:
        assert may_end.wait(20)
        return digest_now(fields)

    monkeypatch.setattr(item_hashes, "content_digest", slow)
    monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
    half, pool = half_and_pool()
    kept = item_data(1)
    one = request(PROMPT, mm_features=[feature(1, 9, data=kept)])
    gone = request(PROMPT, name="gone", mm_features=[feature(3, 9)])
    for each in (one, gone):
        half.arrived(each)
        assert half.matched_tokens(each, 0) == (None, False)
    assert half.finished(gone) is None
    text = request(PROMPT, name="text")
    half.arrived(text)
    assert asked(pool) == TEXT
    may_end.set()
    await_hashes(half._item_names, one)
    assert half._item_names.hashes._hashing == set()
    assert half.matched_tokens(one, 0) == (None, False)  # for the pool's answer now
    monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 1 << 20)
    assert asked(pool) == digests_of([feature(1, 9)])
    pool.answer_prefix(3)
    assert admit(half, one) == 12
    again = request(PROMPT, name="again", mm_features=[feature(1, 9, data=kept)])
    half.arrived(again)
    assert asked(pool) == digests_of([feature(1, 9)])
    half.close()


def test_many_small_items_are_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's own thread hashes a bounded number of bytes for each request."""
    names = ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0)
    kept = item_data(1)
    each = sum(element.data.nbytes for element in kept.values())
    monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 2 * each)
    names.begin(
        request(PROMPT, mm_features=[feature(1, 3, data=kept), feature(1, 9, data=kept), feature(2, 16)])
    )
    assert names.hashes._thread is None
    several = request(PROMPT, mm_features=[feature(1, 3, data=kept), feature(3, 9), feature(4, 16)])
    names.begin(several)
    await_hashes(names, several)
    assert len(names.hashes._hashed) == 3
    names.close()


def test_a_request_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(item_hashes, "content_digest", lambda fields: bytes(32) if may_end.wait(20) else b"")
    monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
    clock, pool = Clock(), FakePool()
    half, _ = scheduler_half(pool, clock=clock)
    one = request(PROMPT, mm_features=[feature(1, 9)])
    half.arrived(one)
    assert half.matched_tokens(one, 0) == (None, False)
    assert pool.prefixes == []
    clock.now_s += HASH_TIMEOUT_S
    assert half.matched_tokens(one, 0) == (None, False)  # for the pool's answer
    assert asked(pool) == TEXT[:2]
    may_end.set()
    half.close()


def test_what_the_thread_cannot_hash_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_hashes, "AT_ONCE_BYTES_MAX", 0)
    names = ItemNames(form="", refusal="", log=LOG, clock=lambda: 0.0)
    one = request(PROMPT, mm_features=[feature(1, 9, data=item_data(1, more=object()))])
    names.begin(one)
    await_hashes(names, one)
    assert "its fields have a object" in names.media(one).refusal
    one = request(PROMPT, mm_features=[feature(1, 9, data=item_data(1, more=Unreadable()))])
    names.begin(one)
    await_hashes(names, one)
    with pytest.raises(OSError, match="gone"):  # which the connector survives
        names.media(one)
    names.close()


class Unreadable:
    """A tensor whose memory is gone."""

    shape = (4, 4)
    dtype = "torch.float32"
    device = "cpu"
    layout = "torch.strided"
    nbytes = 64

    def data_ptr(self) -> int:
        raise OSError("gone")

    def detach(self) -> Unreadable:
        raise OSError("gone")


def test_an_engine_that_cannot_name_items_shares_the_text_before_them() -> None:
    half, pool = half_and_pool(media_refusal="it does not see them")
    one = request(PROMPT, mm_features=[feature(1, 9)], max_tokens=40)
    half.arrived(one)
    assert asked(pool) == TEXT[:2]
    pool.answer_prefix(0)
    admit(half, one)
    (save,) = half.build_step(first_step(one, 0, PROMPT)).saves
    assert len(save.names) == 2 * save.width * NAME_BYTES
    assert half.finished(one) is not None


def test_the_answer_behind_an_item_without_a_name_has_none() -> None:
    media = Media((), 9, "why")
    chain = Chain(BLOCK_TOKENS, SUFFIXES, b"", digest, media=media)
    chain.extend(range(PROMPT))
    chain.extend(range(PROMPT + 40))
    assert chain.blocks == 2
    assert media.named_tokens < EVERY_TOKEN


def engine(**options: Any) -> Any:
    """A configuration of vLLM as far as items go."""
    config = SimpleNamespace(language_model_only=False, mm_processor_cache_type="lru", **options)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=config, model="/nowhere", is_mm_prefix_lm=False),
        ec_transfer_config=None,
    )


def test_engines_whose_items_cannot_be_named() -> None:
    assert media_refusal(engine()) == ""
    shared_memory = engine()
    shared_memory.model_config.multimodal_config.mm_processor_cache_type = "shm"
    assert "mm_processor_cache_type shm" in media_refusal(shared_memory)
    ahead = engine()
    ahead.model_config.is_mm_prefix_lm = True
    assert "look at later ones" in media_refusal(ahead)
    apart = engine()
    apart.ec_transfer_config = object()
    assert "another engine encodes the items" in media_refusal(apart)
    apart.ec_transfer_config = SimpleNamespace(ec_connector="Mooncake", ec_connector_module_path=None)
    assert media_refusal(apart) == "", "ours goes by the content"
    adapted = engine()
    adapted.lora_config = SimpleNamespace(enable_tower_connector_lora=True)
    assert "enable_tower_connector_lora" in media_refusal(adapted)
    adapted.lora_config.enable_tower_connector_lora = False
    assert media_refusal(adapted) == ""
    assert "video_pruning_rate" in media_refusal(engine(video_pruning_rate=0.5))
    assert "FP8" in media_refusal(engine(mm_encoder_attn_dtype="fp8"))
    assert media_refusal(engine(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path="/x")) == ""


def test_what_comes_behind_the_tensors_is_in_the_name(tmp_path: Any) -> None:
    scales, folder = tmp_path / "scales", tmp_path / "model"
    scales.write_text("1")
    folder.mkdir()

    def form(**options: Any) -> str:
        model = engine(**options).model_config
        model.model = str(folder)
        return media_form(model)

    plain = form()
    forms = [
        plain,
        form(mm_processor_kwargs={"image_mean": [0.5]}),
        form(mm_device_do_normalize=True),
        form(mm_encoder_fp8_scale_path=str(scales)),
    ]
    scales.write_text("2")
    forms.append(form(mm_encoder_fp8_scale_path=str(scales)))
    (folder / "preprocessor_config.json").write_text('{"image_std": [1]}')
    forms.append(form())
    assert len(set(forms)) == len(forms)
    assert form(media_io_kwargs={"image": {"image_mode": "L"}}, mm_processor_cache_gb=1) == form()
    (folder / "preprocessor_config.json").unlink()
    assert form() == plain


def test_items_are_handed_over_by_their_content() -> None:
    """What is compared on both sides is made of tokens and items."""
    from moonpool.connectors.vllm.pd.handover import Handover

    half, _ = half_and_pool()
    handover: Handover = half.handover

    def prompt(*features: Any) -> bytes:
        one: FakeRequest = request(PROMPT, mm_features=list(features))
        return handover._prompt(one, b"", names_of(list(features)))

    prompts = [
        prompt(),
        prompt(feature(1, 9)),
        prompt(feature(2, 9)),
        prompt(feature(1, 10)),
        prompt(feature(1, 4), feature(2, 9)),
        prompt(feature(2, 4), feature(1, 9)),
    ]
    assert prompt(feature(1, 9, identifier="other")) == prompts[1]
    assert len(set(prompts)) == len(prompts)


def test_a_refusal_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """An engine's own was said at its start."""
    with caplog.at_level(logging.WARNING):
        names_of([feature(1, 9)], refusal="it does not see them")
    assert caplog.text == ""
