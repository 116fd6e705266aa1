"""Ids that are made here are those of the tokenizer itself, and repeated text costs little."""

from __future__ import annotations

import json
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.tokens import local_source
from moonpool.disagg_proxy.tokens.local_source import LocalSource, LocalTokenizer
from moonpool.disagg_proxy.tokens.source import IdCache, TextPrompt

SEED = 7


def chat(messages: list[object], **more: object) -> TextPrompt:
    return TextPrompt("chat", "tiny", json.dumps({"messages": messages, **more}).encode())


def numbers(ids: bytes | None) -> list[int]:
    assert ids is not None
    return np.frombuffer(ids, "<u4").tolist()


@pytest.fixture
def tokenizer(model_folder: Path) -> LocalTokenizer:
    return LocalTokenizer(model_folder)


def whole(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_a_chat_has_the_ids_of_its_rendered_template(tokenizer: LocalTokenizer, model_folder: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\n world"}]
    rendered = "<s><|system|>\nbe brief<|end|>\n<|user|>\nhello\n world<|end|>\n<|assistant|>\n"
    assert numbers(tokenizer.ids(chat(messages))) == whole(model_folder, rendered)


def test_other_threads_have_their_turns_while_a_long_text_is_tokenised(tokenizer: LocalTokenizer) -> None:
    """The proxy's data plane is one of them."""
    text = "".join(random.Random(SEED).choices("abcdefghij ", k=1 << 20))
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        ids = pool.submit(tokenizer.of_text, text)
        while not ids.done():
            time.sleep(0.001)
            turns += 1
    assert ids.result()
    print(turns, "turns")
    assert turns > 20  # with the GIL held there are two or three


def test_piece_by_piece_equals_the_whole_for_random_conversations(
    tokenizer: LocalTokenizer, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_source, "CHECKED_EVERY", 10**9)  # only the first is checked by itself
    rng = random.Random(SEED)
    print("seed", SEED)
    alphabet = "ab \n\tß漢<|>s/\\'\"{}"
    for _ in range(200):
        text = "<s>" + "".join(
            f"<|user|>\n{''.join(rng.choices(alphabet, k=rng.randrange(40)))}<|end|>\n" for _ in range(4)
        )
        assert numbers(tokenizer.of_text(text)) == whole(model_folder, text)
    tokenizer.pieces.check_integrity()


def test_a_turn_more_costs_only_the_new_pieces(tokenizer: LocalTokenizer) -> None:
    messages: list[object] = [{"role": "user", "content": f"message {i}"} for i in range(30)]
    tokenizer.ids(chat(messages))
    before = tokenizer.pieces.misses
    tokenizer.ids(chat([*messages, {"role": "user", "content": "one more"}]))
    assert tokenizer.pieces.misses - before <= 2


def test_the_first_difference_ends_the_shortcut(
    tokenizer: LocalTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenizer, "_behind_special", lambda piece: b"\0\0\0\0")
    text = "<s>hello<|end|>"
    with caplog.at_level(logging.WARNING):
        first = tokenizer.of_text(text)
    assert "whole" in caplog.text
    assert (
        numbers(first) == numbers(tokenizer.of_text(text)) == numbers(tokenizer._whole(text, special=False))
    )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"messages": 3}',
        b'{"messages": [3]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": [3]}]}',
        b'{"messages": [], "chat_template_kwargs": {"messages": 1}}',
    ],
)
def test_what_it_cannot_know_is_none(tokenizer: LocalTokenizer, body: bytes) -> None:
    ids = tokenizer.ids(TextPrompt("chat", "tiny", body))
    assert ids is None or body == b'{"messages": []}'


def test_completions_take_one_text(tokenizer: LocalTokenizer, model_folder: Path) -> None:
    def ask(prompt: object) -> bytes | None:
        return tokenizer.ids(TextPrompt("completions", "tiny", json.dumps({"prompt": prompt}).encode()))

    assert numbers(ask("hello")) == numbers(ask(["hello"])) == whole(model_folder, "hello")
    assert ask(["a", "b"]) is None
    assert ask([1, 2]) is None


def test_pieces_are_bounded() -> None:
    pieces: IdCache[str] = IdCache(bytes_max=100)
    for number in range(50):
        pieces.keep(f"key {number}", b"x" * 10)
        pieces.check_integrity()
    assert pieces.find("key 49") == b"x" * 10
    assert pieces.find("key 0") is None


def test_many_threads_may_ask_and_other_models_have_no_ids(model_folder: Path) -> None:
    source = LocalSource({"tiny": model_folder})
    prompts = [chat([{"role": "user", "content": f"number {i}"}]) for i in range(50)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(source.ids, prompts))
    assert all(answers)
    assert len(set(answers)) == 50
    assert source.ids(TextPrompt("chat", "other", prompts[0].body)) is None
    assert source.failures == 0


def test_what_the_library_raises_is_counted(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(tokenizer: LocalTokenizer, prompt: TextPrompt) -> bytes:
        raise RuntimeError("no")

    monkeypatch.setattr(LocalTokenizer, "ids", broken)
    source = LocalSource({"tiny": model_folder})
    assert source.ids(chat([])) is None
    assert source.failures == 1


def test_a_folder_without_a_tokenizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LocalTokenizer(tmp_path)
