"""Prompts that nobody has seen before, as ids and as text, and the tokenizer that a proxy reads text with."""

from __future__ import annotations

import json
import random
from pathlib import Path

MODEL = "m"
PROMPT_TOKENS = 512  # what 2 KiB of English come to
WORDS = 4_000
VOCABULARY = 50_000
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
)
SPECIAL = ("<s>", "<|user|>", "<|end|>")


def plain(prompt_bytes: int, *, stream: bool) -> bytes:
    """A chat request whose prompt says nothing."""
    flag = b'"stream":true,' if stream else b""
    body = b'{"model":"m",' + flag + b'"messages":[{"role":"user","content":"' + b"p" * prompt_bytes + b'"}]}'
    return _request(b"/v1/chat/completions", body)


class Ids:
    """Requests with token ids: half of each prompt all share."""

    def __init__(self, rng: random.Random, tokens: int = PROMPT_TOKENS) -> None:
        self._rng = rng
        self._shared = self._ids(tokens // 2)
        self._own = tokens - len(self._shared)

    def request(self, *, stream: bool = False) -> bytes:
        body: dict[str, object] = {"model": MODEL, **({"stream": True} if stream else {})}
        body["prompt"] = self._shared + self._ids(self._own)
        return _request(b"/v1/completions", json.dumps(body, separators=(",", ":")).encode())

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(count)]


class Texts:
    """Chat requests of 2 KiB of words, half of them shared, and a tokenizer whose tokens are these words."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._rng = rng
        letters = "etaoinshrdlu"
        self._words = ["".join(rng.choices(letters, k=rng.randrange(2, 8))) for _ in range(WORDS)]
        self._shared = self._text(1 << 10)
        self.folder = folder
        _train(folder, self._words)

    def request(self) -> bytes:
        message = {"role": "user", "content": self._shared + self._text(1 << 10)}
        body = json.dumps({"model": MODEL, "messages": [message]}, separators=(",", ":"))
        return _request(b"/v1/chat/completions", body.encode())

    def _text(self, size: int) -> str:
        text = ""
        while len(text) < size:
            text += " " + self._rng.choice(self._words)
        return text


def _request(path: bytes, body: bytes) -> bytes:
    """As a client library sends it."""
    return (
        b"POST %b HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\nUser-Agent: bench/1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (path, len(body))
    ) + body


def _train(folder: Path, words: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2 * WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" " + " ".join(words)] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": {"content": SPECIAL[0]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
