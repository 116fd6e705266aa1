"""Tokenises in the proxy, with the model's ``tokenizer.json`` and chat template.

A conversation grows at its end, so most of a prompt was tokenised a turn ago. Special tokens split a text
into pieces that tokenise independently, and the ids of pieces are cached. This holds for the tokenizers in
use but is not specified: one prompt in CHECKED_EVERY is also tokenised whole, and the first difference
disables the cache.
"""

from __future__ import annotations

import json
import logging
import os
import re
from array import array
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from moonpool.core.errors import ConfigError
from moonpool.disagg_proxy.setting_error import bad
from moonpool.disagg_proxy.tokens.chat_template import ChatTemplate, TemplateRefused
from moonpool.disagg_proxy.tokens.source import IdCache, TextPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKED_EVERY = 64
PIECES_BYTES_MAX = 64 << 20

_log = logging.getLogger("moonpool.proxy")


class LocalTokenizer:
    """One model's tokenizer and template; thread safe, blocking. pieces: ids of pieces of text."""

    def __init__(self, folder: Path, *, pieces_bytes_max: int = PIECES_BYTES_MAX) -> None:
        """folder: with tokenizer.json and tokenizer_config.json, as engines take it. Raises ConfigError."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            why = "a local tokenizer needs tokenizers: pip install 'moonpool[tokenizer]'"
            raise bad("tokenizer", why) from error
        file = folder / "tokenizer.json"
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text at a time: no threads of its own
        try:
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
            self._template = ChatTemplate.of_model(folder)
        except ConfigError:
            raise
        except Exception as error:  # tokenizers raises bare exceptions
            raise bad("tokenizer", f"no tokenizer can be read from {file}: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token.content: _packed([number]) for number, token in added.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._cuts = bool(added)
        self.pieces: IdCache[str] = IdCache(pieces_bytes_max)
        self._lock = Lock()
        self._count = 0

    def ids(self, prompt: TextPrompt) -> bytes | None:
        """The ids of a prompt; None: several prompts, another mode, no template, or bad JSON."""
        try:
            request = json.loads(prompt.body)
            if prompt.kind == "chat":
                return None if self._template is None else self.of_text(self._template.render(request))
            text = request["text" if prompt.kind == "generate" else "prompt"]
        except (ValueError, KeyError, TypeError, AttributeError, TemplateRefused):
            return None
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        special = request.get("add_special_tokens", True) is not False
        return self._whole(text, special=special) if isinstance(text, str) else None

    def of_text(self, text: str) -> bytes:
        """The ids of a rendered template, which contains its special tokens."""
        if not self._cuts:
            return self._whole(text, special=False)
        ids = b"".join(
            self._piece(piece, first=place == 0) for place, piece in enumerate(self._cut.split(text))
        )
        with self._lock:
            self._count += 1
            checks = self._count % CHECKED_EVERY == 1
        if not checks:
            return ids
        whole = self._whole(text, special=False)
        if whole != ids:
            self._cuts = False
            _log.warning(
                "this tokenizer does not work piece by piece: prompts are tokenised whole from now on"
            )
        return whole

    def _piece(self, piece: str, *, first: bool) -> bytes:
        if not piece:
            return b""
        added = self._added.get(piece)
        if added is not None:
            return added
        key = ("^" if first else " ") + piece  # a first piece may get a prefix
        with self._lock:
            ids = self.pieces.find(key)
        if ids is None:
            ids = self._whole(piece, special=False) if first else self._behind_special(piece)
            with self._lock:
                self.pieces.keep(key, ids)
        return ids

    def _behind_special(self, piece: str) -> bytes:
        """The ids of a piece that does not begin the text."""
        token, head = next(iter(self._added.items()))
        return self._whole(token + piece, special=False).removeprefix(head)

    def _whole(self, text: str, *, special: bool) -> bytes:
        # Not encode(): that holds the GIL, and with it the whole proxy, for as long as the text takes.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return _packed(encoded.ids)


def _packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


class LocalSource:
    """Tokenizers of several models. models: name -> folder. Thread safe; ``ids`` blocks."""

    def __init__(self, models: dict[str, Path]) -> None:
        self._tokenizers = {model: LocalTokenizer(folder) for model, folder in models.items()}
        self.failures = 0

    def ids(self, prompt: TextPrompt) -> bytes | None:
        """The ids of the whole prompt, packed u32 little-endian; None: not available."""
        tokenizer = self._tokenizers.get(prompt.model)
        try:
            return None if tokenizer is None else tokenizer.ids(prompt)
        except Exception as error:  # any error of the library: the request is routed without its prefix
            self.failures += 1
            _log.debug("a prompt was not tokenised: %r", error)
            return None
