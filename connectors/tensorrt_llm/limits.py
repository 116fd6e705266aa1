"""What this connector refuses: an engine with more KV cache than it showed the connector, and prompts that
are more than their tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.connectors.objects import Refused
from moonpool.connectors.tensorrt_llm.identity import longest, quantisation
from moonpool.connectors.tensorrt_llm.layout import SHOWS_ALL, Memory

_MEDIA = re.compile(r"image|video|audio|vision|visual|speech|media|multimodal|(^|_)(mm|img)(_|$)")
_TOKEN = re.compile(r"_token(_id|_index|_idx)?s?$|_(pad|patch)_id$")
_PARTS = re.compile(r"^(vision|visual|audio|speech|image|img|video|multimodal|mm|embd|vit|thinker|talker)_")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Tokens that stand for something that is no text: the ids that config.json names, and all from
    ``vocabulary`` on (0: not known)."""

    ids: frozenset[int]
    vocabulary: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Foreign:
        """Raises Refused for a model that takes images or sounds and does not say by which tokens."""
        ids = frozenset(_media_ids(config))
        if not ids and any(_PARTS.match(key) and value for key, value in config.items()):
            raise Refused(
                "the model takes more than text, and its config.json names no tokens that stand for it"
            )
        vocabulary = config.get("text_config", config).get("vocab_size")
        return cls(ids, vocabulary if isinstance(vocabulary, int) else 0)

    def are_in(self, tokens: Sequence[int]) -> bool:
        """Whether one of ``tokens`` stands for an image, audio or video, or is outside of the vocabulary."""
        return not self.ids.isdisjoint(tokens) or bool(
            self.vocabulary and tokens and max(tokens) >= self.vocabulary
        )


def _media_ids(config: Mapping[str, Any]) -> Iterator[int]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _media_ids(value)
        elif _MEDIA.search(key) and _TOKEN.search(key):
            yield from (one for one in (value if isinstance(value, list) else [value]) if type(one) is int)


def check(args: Any, folder: Path, config: Mapping[str, Any], memory: Memory) -> None:
    """Raises Refused with the reason."""
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if (getattr(args, name, 1) or 1) > 1:
            raise Refused(f"the pool does not know {name} above 1")
    if getattr(args, "enable_attention_dp", False):
        raise Refused("the pool does not know enable_attention_dp, where each rank has other requests")
    if not memory.described and (why := _not_in_tensor(args, folder, config)):
        raise Refused(why + SHOWS_ALL)


def _not_in_tensor(args: Any, folder: Path, config: Mapping[str, Any]) -> str:
    """What may lie elsewhere; empty: nothing. One tensor is the first pool of however many there are; the
    others were not shown."""
    text, cache = config.get("text_config", config), args.kv_cache_config
    types = (getattr(cache, "dtype", ""), quantisation(args, folder))
    if "fp4" in str(types).lower():
        return "4-bit KV has its scales in another pool, which this TensorRT-LLM does not show"
    if any(text.get(name) for name in ("index_head_dim", "index_topk", "index_n_heads")) or getattr(
        args, "sparse_attention_config", None
    ):
        return "sparse attention has keys in another pool, which this TensorRT-LLM does not show"
    if getattr(cache, "host_cache_size", None):
        return "host_cache_size moves blocks, and this TensorRT-LLM does not say where to"
    windows = getattr(cache, "max_attention_window", None)
    length = longest(args, text)
    if windows and (not length or min(windows) < length):
        return "max_attention_window frees blocks, and this TensorRT-LLM does not say which"
    return ""
